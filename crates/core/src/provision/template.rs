//! `prefixTemplate`: how the prefix of a claim is named after it.

use crate::prefix::{InvalidPrefix, Prefix};

/// A text with variables in it, as it stands in a `StorageClass`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Template {
    text: String,
    pieces: Vec<Piece>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Piece {
    Text(String),
    Variable(Variable),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Variable {
    ClaimNamespace,
    ClaimName,
    VolumeName,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidTemplate {
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
        "prefixTemplate {template:?} needs {variable}, which was not sent: start the external-provisioner with --extra-create-metadata"
    )]
    NotSent { template: String, variable: &'static str },

    #[error("prefixTemplate {template:?} gives no usable prefix for this claim")]
    Prefix {
        template: String,
        #[source]
        cause: InvalidPrefix,
    },
}

impl Variable {
    pub const fn name(self) -> &'static str {
        match self {
            Self::ClaimNamespace => "pvc.namespace",
            Self::ClaimName => "pvc.name",
            Self::VolumeName => "pv.name",
        }
    }
}

impl Template {
    pub fn parse(text: &str) -> Result<Self, InvalidTemplate> {
        let mut pieces = Vec::new();
        let mut rest = text;
        while let Some((before, after)) = rest.split_once("${") {
            let (name, behind) =
                after.split_once('}').ok_or_else(|| InvalidTemplate::Open { template: text.to_owned() })?;
            let variable = [Variable::ClaimNamespace, Variable::ClaimName, Variable::VolumeName]
                .into_iter()
                .find(|it| it.name() == name)
                .ok_or_else(|| InvalidTemplate::Unknown { template: text.to_owned(), variable: name.to_owned() })?;
            pieces.push(Piece::Text(before.to_owned()));
            pieces.push(Piece::Variable(variable));
            rest = behind;
        }
        pieces.push(Piece::Text(rest.to_owned()));
        let template = Self { text: text.to_owned(), pieces };
        let names_a_claim = template.has(Variable::VolumeName)
            || (template.has(Variable::ClaimName) && template.has(Variable::ClaimNamespace));
        if names_a_claim { Ok(template) } else { Err(InvalidTemplate::Constant { template: template.text }) }
    }

    /// The prefix of one claim. `value` knows what was sent about it.
    pub fn render<'a>(&self, value: impl Fn(Variable) -> Option<&'a str>) -> Result<Prefix, InvalidTemplate> {
        let mut prefix = String::new();
        for piece in &self.pieces {
            match piece {
                Piece::Text(text) => prefix.push_str(text),
                Piece::Variable(variable) => prefix.push_str(value(*variable).ok_or_else(|| {
                    InvalidTemplate::NotSent { template: self.text.clone(), variable: variable.name() }
                })?),
            }
        }
        prefix.parse().map_err(|cause| InvalidTemplate::Prefix { template: self.text.clone(), cause })
    }

    fn has(&self, variable: Variable) -> bool {
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
            Variable::ClaimNamespace => Some("team"),
            Variable::ClaimName => Some("logs"),
            Variable::VolumeName => None,
        };
        let rendered = Template::parse(template).and_then(|it| it.render(value));
        let rendered = rendered.map(|it| it.to_string()).map_err(|it| Chain(&it).to_string());
        assert_eq!(rendered, expected.map(str::to_owned).map_err(str::to_owned));
    }

    #[test]
    fn templates() {
        check("${pvc.namespace}/${pvc.name}", Ok("team/logs/"));
        check("claims/${pvc.namespace}-${pvc.name}/", Ok("claims/team-logs/"));
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
                "prefixTemplate \"/${pvc.namespace}/${pvc.name}\" gives no usable prefix for this claim: prefix \"/team/logs\" must not begin with a slash, have two slashes in a row or contain \".\" or \"..\"",
            ),
        );
    }

    #[test]
    fn a_template_must_tell_claims_apart() {
        for template in ["", "all", "${pvc.name}", "${pvc.namespace}/x", "$pv.name"] {
            let refused = Template::parse(template).unwrap_err();
            assert!(matches!(refused, InvalidTemplate::Constant { .. }), "{refused}");
        }
    }

    proptest! {
        #[test]
        fn different_claims_get_different_prefixes(
            one in "[a-z0-9]([a-z0-9.-]{0,8}[a-z0-9])?", other in "[a-z0-9]([a-z0-9.-]{0,8}[a-z0-9])?",
        ) {
            let template = Template::parse("x/${pvc.namespace}/${pvc.name}").unwrap();
            let render = |name: &str| template.render(|it| match it {
                Variable::ClaimNamespace => Some("team"),
                Variable::ClaimName => Some(name),
                Variable::VolumeName => None,
            });
            if let (Ok(first), Ok(second)) = (render(&one), render(&other)) {
                prop_assert_eq!(first == second, one == other);
                // Neither lies in the other.
                prop_assert!(one == other || !first.as_str().starts_with(second.as_str()));
            }
        }

        #[test]
        fn parsing_never_panics(text in any::<String>()) {
            let _ = Template::parse(&text);
        }
    }
}
