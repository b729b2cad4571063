//! `prefixTemplate`: how the prefix of a volume is derived from its claim.

use crate::prefix::{InvalidPrefix, Prefix};

/// A text with variables, as in a `StorageClass`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PrefixTemplate {
    text: String,
    pieces: Vec<Piece>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Piece {
    Text(String),
    Variable(TemplateVariable),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TemplateVariable {
    ClaimNamespace,
    ClaimName,
    VolumeName,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidPrefixTemplate {
    #[error(
        "prefixTemplate {template:?} has the unknown variable {variable:?}; known are ${{pvc.namespace}}, ${{pvc.name}} and ${{pv.name}}"
    )]
    Unknown { template: String, variable: String },

    #[error("prefixTemplate {template:?} has a variable without an end: write ${{pvc.name}}")]
    Open { template: String },

    #[error(
        "prefixTemplate {template:?} has no variable that differs from claim to claim: use ${{pvc.name}} with ${{pvc.namespace}}, or ${{pv.name}}"
    )]
    Constant { template: String },

    #[error(
        "prefixTemplate {template:?} has two variables without a slash between them, so that different claims could get the same prefix: use ${{pvc.namespace}}/${{pvc.name}}"
    )]
    Ambiguous { template: String },

    #[error(
        "prefixTemplate {template:?} needs {variable}, which was not sent: start the external-provisioner with --extra-create-metadata"
    )]
    NotSent { template: String, variable: &'static str },

    #[error("prefixTemplate {template:?} results in an invalid prefix for this claim")]
    Prefix {
        template: String,
        #[source]
        cause: InvalidPrefix,
    },
}

impl TemplateVariable {
    pub const fn name(self) -> &'static str {
        match self {
            Self::ClaimNamespace => "pvc.namespace",
            Self::ClaimName => "pvc.name",
            Self::VolumeName => "pv.name",
        }
    }
}

impl PrefixTemplate {
    pub fn parse(text: &str) -> Result<Self, InvalidPrefixTemplate> {
        let mut pieces = Vec::new();
        let mut rest = text;
        while let Some((before, after)) = rest.split_once("${") {
            let (name, behind) =
                after.split_once('}').ok_or_else(|| InvalidPrefixTemplate::Open { template: text.to_owned() })?;
            let variable =
                [TemplateVariable::ClaimNamespace, TemplateVariable::ClaimName, TemplateVariable::VolumeName]
                    .into_iter()
                    .find(|it| it.name() == name)
                    .ok_or_else(|| InvalidPrefixTemplate::Unknown {
                        template: text.to_owned(),
                        variable: name.to_owned(),
                    })?;
            pieces.push(Piece::Text(before.to_owned()));
            pieces.push(Piece::Variable(variable));
            rest = behind;
        }
        pieces.push(Piece::Text(rest.to_owned()));
        let template = Self { text: text.to_owned(), pieces };
        let names_a_claim = template.has(TemplateVariable::VolumeName)
            || (template.has(TemplateVariable::ClaimName) && template.has(TemplateVariable::ClaimNamespace));
        if !names_a_claim {
            return Err(InvalidPrefixTemplate::Constant { template: template.text });
        }
        if template.is_ambiguous() {
            return Err(InvalidPrefixTemplate::Ambiguous { template: template.text });
        }
        Ok(template)
    }

    /// Only a slash separates values: no name in Kubernetes contains one, while hyphens and dots are part of names. With
    /// `${pvc.namespace}-${pvc.name}`, claim `prod-data` in `team` would get what `data` in `team-prod` left behind.
    fn is_ambiguous(&self) -> bool {
        let mut is_separated = true;
        for piece in &self.pieces {
            match piece {
                Piece::Text(text) => is_separated |= text.contains('/'),
                Piece::Variable(_) if !is_separated => return true,
                Piece::Variable(_) => is_separated = false,
            }
        }
        false
    }

    /// The prefix of one claim. `value` knows what was sent about it.
    pub fn render<'a>(
        &self,
        value: impl Fn(TemplateVariable) -> Option<&'a str>,
    ) -> Result<Prefix, InvalidPrefixTemplate> {
        let mut prefix = String::new();
        for piece in &self.pieces {
            match piece {
                Piece::Text(text) => prefix.push_str(text),
                Piece::Variable(variable) => prefix.push_str(value(*variable).ok_or_else(|| {
                    InvalidPrefixTemplate::NotSent { template: self.text.clone(), variable: variable.name() }
                })?),
            }
        }
        prefix.parse().map_err(|cause| InvalidPrefixTemplate::Prefix { template: self.text.clone(), cause })
    }

    fn has(&self, variable: TemplateVariable) -> bool {
        self.pieces.contains(&Piece::Variable(variable))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::chain::Chain;

    #[track_caller]
    fn check(template: &str, expected: Result<&str, &str>) {
        let value = |it| match it {
            TemplateVariable::ClaimNamespace => Some("team"),
            TemplateVariable::ClaimName => Some("logs"),
            TemplateVariable::VolumeName => None,
        };
        let rendered = PrefixTemplate::parse(template).and_then(|it| it.render(value));
        let rendered = rendered.map(|it| it.to_string()).map_err(|it| Chain(&it).to_string());
        assert_eq!(rendered, expected.map(str::to_owned).map_err(str::to_owned));
    }

    #[test]
    fn templates() {
        check("${pvc.namespace}/${pvc.name}", Ok("team/logs/"));
        check("claims/ns-${pvc.namespace}/pvc-${pvc.name}/", Ok("claims/ns-team/pvc-logs/"));
        check(
            "${pvc.uid}",
            Err(
                "prefixTemplate \"${pvc.uid}\" has the unknown variable \"pvc.uid\"; known are ${pvc.namespace}, ${pvc.name} and ${pv.name}",
            ),
        );
        check("a/${pvc.name", Err("prefixTemplate \"a/${pvc.name\" has a variable without an end: write ${pvc.name}"));
        check(
            "${pv.name}",
            Err(
                "prefixTemplate \"${pv.name}\" needs pv.name, which was not sent: start the external-provisioner with --extra-create-metadata",
            ),
        );
        check(
            "/${pvc.namespace}/${pvc.name}",
            Err(
                "prefixTemplate \"/${pvc.namespace}/${pvc.name}\" results in an invalid prefix for this claim: prefix \"/team/logs\" must not begin with a slash, have two slashes in a row or contain \".\" or \"..\"",
            ),
        );
    }

    #[test]
    fn a_template_must_not_give_two_claims_one_prefix() {
        for template in [
            "${pvc.namespace}-${pvc.name}",
            "${pvc.namespace}${pvc.name}",
            "a/${pvc.namespace}.${pvc.name}/b",
            "${pvc.namespace}/${pvc.name}-${pvc.namespace}",
            "${pv.name}_${pvc.namespace}",
        ] {
            let refused = PrefixTemplate::parse(template).unwrap_err();
            assert!(matches!(refused, InvalidPrefixTemplate::Ambiguous { .. }), "{refused}");
        }
    }

    #[test]
    fn a_template_must_tell_claims_apart() {
        for template in ["", "all", "${pvc.name}", "${pvc.namespace}/x", "$pv.name"] {
            let refused = PrefixTemplate::parse(template).unwrap_err();
            assert!(matches!(refused, InvalidPrefixTemplate::Constant { .. }), "{refused}");
        }
    }

    /// Names as Kubernetes allows them, short enough that concatenations collide often.
    fn claims() -> impl Strategy<Value = (String, String)> {
        ("[a-b](-?[a-b]){0,2}", "[a-b]([.-]?[a-b]){0,3}")
    }

    /// Templates of all kinds, most of which are refused.
    fn any_templates() -> impl Strategy<Value = String> {
        let piece = prop_oneof![
            Just("${pvc.namespace}".to_owned()),
            Just("${pvc.name}".to_owned()),
            Just("${pv.name}".to_owned()),
            "[ab/.-]{1,2}",
        ];
        prop::collection::vec(piece, 0..6).prop_map(|it| it.concat())
    }

    proptest! {
        #[test]
        fn different_claims_get_different_prefixes(one in claims(), other in claims(), template in any_templates()) {
            let Ok(template) = PrefixTemplate::parse(&template) else { return Ok(()) };
            let render = |(namespace, name): &(String, String)| {
                let volume = format!("pvc-{namespace}/{name}").replace('/', "_");
                template.render(|it| Some(match it {
                    TemplateVariable::ClaimNamespace => namespace.as_str(),
                    TemplateVariable::ClaimName => name.as_str(),
                    TemplateVariable::VolumeName => volume.as_str(),
                }))
            };
            if let (Ok(first), Ok(second)) = (render(&one), render(&other)) {
                prop_assert_eq!(first == second, one == other, "{:?}", template);
            }
        }

        #[test]
        fn parsing_never_panics(text in prop_oneof![any::<String>(), "[${}pvcname./-]{0,24}"]) {
            let _ = PrefixTemplate::parse(&text);
        }
    }
}
