//! A profile in AWS's shared files: static keys only. What a profile could delegate to is a source of its own.

use s3csi_core::credentials::{InvalidKeys, Keys};

/// Properties that would make AWS's clients fetch keys elsewhere.
const DELEGATING: [&str; 6] =
    ["role_arn", "source_profile", "credential_source", "credential_process", "web_identity_token_file", "sso_session"];

/// Names profiles and properties, never a value.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidProfile {
    #[error("there is no profile {profile:?}")]
    Missing { profile: String },

    #[error(
        "profile {profile:?} has {property}, which is not supported; choose the source of credentials that does it"
    )]
    Delegating { profile: String, property: &'static str },

    #[error("profile {profile:?} lacks {property}")]
    Incomplete { profile: String, property: &'static str },

    #[error("profile {profile:?} is not usable")]
    Keys {
        profile: String,
        #[source]
        cause: InvalidKeys,
    },
}

/// The keys of a profile. Those of the credentials file win over those of the config file, as with AWS's clients.
pub fn keys(credentials: Option<&str>, config: Option<&str>, profile: &str) -> Result<Keys, InvalidProfile> {
    let name = || profile.to_owned();
    let titled = format!("profile {profile}");
    let in_config = if profile == "default" { [profile, titled.as_str()].to_vec() } else { vec![titled.as_str()] };
    let own = [credentials.and_then(|it| section(it, &[profile])), config.and_then(|it| section(it, &in_config))];
    if own.iter().all(Option::is_none) {
        return Err(InvalidProfile::Missing { profile: name() });
    }
    let property = |wanted: &str| {
        let mut properties = own.iter().flatten().flatten();
        properties.find(|(key, _)| key == wanted).map(|(_, value)| value.as_str()).filter(|it| !it.is_empty())
    };
    let required = |property_name: &'static str| {
        let incomplete = || match DELEGATING.into_iter().find(|it| property(it).is_some()) {
            Some(property) => InvalidProfile::Delegating { profile: name(), property },
            None => InvalidProfile::Incomplete { profile: name(), property: property_name },
        };
        property(property_name).ok_or_else(incomplete)
    };
    let (id, key) = (required("aws_access_key_id")?, required("aws_secret_access_key")?);
    let invalid = |cause| InvalidProfile::Keys { profile: name(), cause };
    Keys::driver(id, key, property("aws_session_token")).map_err(invalid)
}

/// The properties of a section; `None` if it does not exist.
fn section(text: &str, titles: &[&str]) -> Option<Vec<(String, String)>> {
    let mut found = None;
    let mut is_inside = false;
    for line in text.lines().map(str::trim).filter(|it| !it.is_empty() && !it.starts_with(['#', ';'])) {
        if let Some(title) = line.strip_prefix('[').and_then(|it| it.split(']').next()) {
            let title = title.split_whitespace().collect::<Vec<_>>().join(" ");
            is_inside = titles.contains(&title.as_str());
            if is_inside {
                found.get_or_insert_with(Vec::new);
            }
        } else if is_inside && let (Some(properties), Some((key, value))) = (&mut found, line.split_once('=')) {
            let end = [" #", " ;", "\t#", "\t;"].iter().filter_map(|it| value.find(it)).min().unwrap_or(value.len());
            properties.push((key.trim().to_ascii_lowercase(), value[..end].trim().to_owned()));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    const CREDENTIALS: &str = "\
# ours
[default]
aws_access_key_id = first
aws_secret_access_key=one # a comment
[ other ]
AWS_ACCESS_KEY_ID=second
aws_secret_access_key=t#o
aws_session_token=three
[half]
aws_access_key_id=third
[delegating]
role_arn=arn
source_profile=default
";
    const CONFIG: &str =
        "[profile in-config]\naws_access_key_id=fourth\naws_secret_access_key=x\n[half]\naws_secret_access_key=x\n";

    #[track_caller]
    fn check(profile: &str, expected: Result<(&str, &str, Option<&str>), &str>) {
        let found = keys(Some(CREDENTIALS), Some(CONFIG), profile);
        match &found {
            Ok(keys) => {
                let (id, key) = (keys.access_key_id().expose(), keys.secret_access_key().expose());
                let token = keys.session_token().map(|it| it.expose().as_str());
                assert_eq!(expected, Ok((id.as_str(), key.as_str(), token)));
            }
            Err(error) => assert_eq!(expected, Err(error.to_string().as_str())),
        }
    }

    #[test]
    fn profiles_are_found_in_both_files() {
        check("default", Ok(("first", "one", None)));
        check("other", Ok(("second", "t#o", Some("three"))));
        check("in-config", Ok(("fourth", "x", None)));
    }

    #[test]
    fn unusable_profiles_are_named() {
        check("none", Err("there is no profile \"none\""));
        check("half", Err("profile \"half\" lacks aws_secret_access_key"));
        check(
            "delegating",
            Err(
                "profile \"delegating\" has role_arn, which is not supported; choose the source of credentials that does it",
            ),
        );
    }
}
