//! The whole environment of an engine. The engine inherits nothing: what is not in this list does not exist for it.

use std::collections::BTreeMap;

use crate::credentials::PROFILE;
use crate::proxy::ProxySettings;

/// Names the file with certificates that the engine trusts in addition to others.
pub const CA_BUNDLE_VARIABLE: &str = "S3CSI_ENGINE_CA_BUNDLE";

/// The driver's settings for the store. Empty text counts as absent.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DriverSettings {
    pub endpoint_url: Option<String>,
    pub region: Option<String>,
    pub proxy: ProxySettings,
}

/// Where the engine finds its profile, as paths in the *engine's* file system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProfilePaths<'a> {
    pub config: &'a str,
    pub credentials: &'a str,
    /// Only for volumes that bring certificates.
    pub ca_bundle: Option<&'a str>,
}

/// `KEY=VALUE` lines, sorted. `moved` are the options that policy turned into variables; they never win over ours.
pub fn engine_environment(
    driver: &DriverSettings,
    profile: ProfilePaths<'_>,
    moved: &BTreeMap<String, String>,
) -> Vec<String> {
    let DriverSettings { endpoint_url, region, proxy } = driver;
    let ProfilePaths { config, credentials, ca_bundle } = profile;
    let mut variables: BTreeMap<&str, &str> = moved.iter().map(|(key, value)| (key.as_str(), value.as_str())).collect();
    for (key, value) in [("AWS_ENDPOINT_URL", endpoint_url), ("AWS_REGION", region)] {
        match value.as_deref() {
            None | Some("") => variables.remove(key),
            Some(value) => variables.insert(key, value),
        };
    }
    for (name, value) in proxy.variables() {
        variables.insert(name, value);
    }
    if let Some(path) = ca_bundle {
        variables.insert(CA_BUNDLE_VARIABLE, path);
    }
    variables.insert("AWS_PROFILE", PROFILE);
    variables.insert("AWS_CONFIG_FILE", config);
    variables.insert("AWS_SHARED_CREDENTIALS_FILE", credentials);
    // The profile is the only source of keys: without this an unreadable file would make the engine ask the cloud's
    // metadata service and act with the node's own identity.
    variables.insert("AWS_EC2_METADATA_DISABLED", "true");
    variables.into_iter().map(|(key, value)| format!("{key}={value}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(endpoint_url: Option<&str>, region: Option<&str>, moved: &[(&str, &str)], expected: &[&str]) {
        let driver = DriverSettings {
            endpoint_url: endpoint_url.map(Into::into),
            region: region.map(Into::into),
            proxy: ProxySettings::default(),
        };
        let profile = ProfilePaths { config: "/c/config", credentials: "/c/credentials", ca_bundle: None };
        let moved = moved.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
        assert_eq!(engine_environment(&driver, profile, &moved), expected);
    }

    #[test]
    fn the_environment_is_complete_and_sorted() {
        check(
            Some("http://s3.example:8000"),
            Some("eu-1"),
            &[("AWS_MAX_ATTEMPTS", "3")],
            &[
                "AWS_CONFIG_FILE=/c/config",
                "AWS_EC2_METADATA_DISABLED=true",
                "AWS_ENDPOINT_URL=http://s3.example:8000",
                "AWS_MAX_ATTEMPTS=3",
                "AWS_PROFILE=s3-csi",
                "AWS_REGION=eu-1",
                "AWS_SHARED_CREDENTIALS_FILE=/c/credentials",
            ],
        );
    }

    #[test]
    fn proxies_and_certificates_are_variables() {
        let proxy = ProxySettings {
            https: Some("http://a:1".parse().unwrap()),
            http: Some("http://b:2".parse().unwrap()),
            no_proxy: Some(".svc".parse().unwrap()),
        };
        let driver = DriverSettings { proxy, ..DriverSettings::default() };
        let profile = ProfilePaths { config: "/c/config", credentials: "/c/credentials", ca_bundle: Some("/c/ca") };
        assert_eq!(
            engine_environment(&driver, profile, &BTreeMap::new()),
            [
                "AWS_CONFIG_FILE=/c/config",
                "AWS_EC2_METADATA_DISABLED=true",
                "AWS_PROFILE=s3-csi",
                "AWS_SHARED_CREDENTIALS_FILE=/c/credentials",
                "HTTPS_PROXY=http://a:1",
                "HTTP_PROXY=http://b:2",
                "NO_PROXY=.svc",
                "S3CSI_ENGINE_CA_BUNDLE=/c/ca",
            ]
        );
    }

    #[test]
    fn empty_settings_are_left_out_and_moved_options_never_replace_ours() {
        check(
            Some(""),
            None,
            &[("AWS_ENDPOINT_URL", "http://elsewhere"), ("AWS_PROFILE", "other"), ("AWS_EC2_METADATA_DISABLED", "no")],
            &[
                "AWS_CONFIG_FILE=/c/config",
                "AWS_EC2_METADATA_DISABLED=true",
                "AWS_PROFILE=s3-csi",
                "AWS_SHARED_CREDENTIALS_FILE=/c/credentials",
            ],
        );
    }
}
