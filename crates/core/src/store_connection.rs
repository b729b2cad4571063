//! How the store of a volume is reached, where the volume's attributes say so: region, addressing, proxies, trusted certificates. The
//! endpoint has a module of its own.

use std::collections::BTreeMap;

use crate::arguments::MountArguments;
use crate::ca_certificates::{CaCertificates, InvalidCaCertificates};
use crate::provision::is_signing_region;
use crate::proxy::{InvalidNoProxy, InvalidProxyUrl, NoProxy, ProxySettings, ProxyUrl};

/// Keys of a volume's attributes.
pub mod context {
    pub const REGION: &str = "region";
    pub const FORCE_PATH_STYLE: &str = "forcePathStyle";
    pub const REQUESTER_PAYS: &str = "requesterPays";
    pub const HTTPS_PROXY: &str = "httpsProxy";
    pub const HTTP_PROXY: &str = "httpProxy";
    pub const NO_PROXY: &str = "noProxy";
    pub const CA_BUNDLE: &str = "caBundle";
    /// How volumes of AWS's driver name variables of the engine's environment.
    pub const ENVIRONMENT_PREFIX: &str = "mountpointEnv.";
    pub const ENVIRONMENT_HTTPS_PROXY: &str = "mountpointEnv.HTTPS_PROXY";
    pub const ENVIRONMENT_HTTP_PROXY: &str = "mountpointEnv.HTTP_PROXY";
    pub const ENVIRONMENT_NO_PROXY: &str = "mountpointEnv.NO_PROXY";
}

/// The key of a volume's Secret with certificates, as in Secrets of other tools.
pub const SECRET_CA: &str = "ca.crt";

const REGION_OPTION: &str = "--region";
const PATH_STYLE_OPTION: &str = "--force-path-style";
const REQUESTER_PAYS_OPTION: &str = "--requester-pays";

/// What the attributes of a volume say. `None` and the default: what the driver says.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StoreConnection {
    pub region: Option<String>,
    pub addressing: Option<Addressing>,
    pub payer: Option<Payer>,
    pub proxy: ProxySettings,
    /// Trusted in addition to the system's and the driver's.
    pub ca_certificates: Option<CaCertificates>,
}

/// Where requests name the bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Addressing {
    /// `https://store/bucket/key`.
    Path,
    /// `https://bucket.store/key`.
    VirtualHost,
}

/// Who pays for requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Payer {
    Owner,
    Requester,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidConnection {
    #[error(
        "volume attribute region {value:?} must be the name of a region such as eu-west-1: letters, digits, dots, hyphens and \
         underscores"
    )]
    Region { value: String },

    #[error("volume attribute {attribute} {value:?} must be \"true\" or \"false\"")]
    Boolean { attribute: &'static str, value: String },

    #[error("volume attribute {attribute} not usable")]
    Proxy {
        attribute: &'static str,
        #[source]
        cause: InvalidProxyUrl,
    },

    #[error("volume attribute {attribute} not usable")]
    NoProxy {
        attribute: &'static str,
        #[source]
        cause: InvalidNoProxy,
    },

    #[error(
        "volume attribute {attribute} is not allowed: of mountpointEnv only HTTPS_PROXY, HTTP_PROXY and NO_PROXY are"
    )]
    Environment { attribute: String },

    #[error("volume attributes {attribute} and {other} have different values; remove one of them")]
    Contradiction { attribute: &'static str, other: &'static str },

    #[error("mount option {option} and volume attribute {attribute} exclude each other; remove one of them")]
    OptionTwice { option: &'static str, attribute: &'static str },

    #[error("volume attribute caBundle not usable")]
    Certificates {
        #[source]
        cause: InvalidCaCertificates,
    },
}

impl StoreConnection {
    /// `options` are the volume's mount options, some of which say the same.
    pub fn parse(attributes: &BTreeMap<String, String>, options: &MountArguments) -> Result<Self, InvalidConnection> {
        let attribute = |key: &str| attributes.get(key).map(String::as_str).filter(|it| !it.is_empty());
        refuse_other_variables(attributes)?;

        let region = attribute(context::REGION).map(parse_region).transpose()?;
        let exclude = |attribute: &'static str, option: &'static str, is_contradicted: bool| {
            if is_contradicted && options.has(option) {
                return Err(InvalidConnection::OptionTwice { option, attribute });
            }
            Ok(())
        };
        exclude(context::REGION, REGION_OPTION, region.is_some())?;
        let choose = |key: &'static str| attribute(key).map(|it| parse_boolean(key, it)).transpose();
        let is_path = choose(context::FORCE_PATH_STYLE)?;
        exclude(context::FORCE_PATH_STYLE, PATH_STYLE_OPTION, is_path == Some(false))?;
        let is_requester = choose(context::REQUESTER_PAYS)?;
        exclude(context::REQUESTER_PAYS, REQUESTER_PAYS_OPTION, is_requester == Some(false))?;

        let either = |own: &'static str, alias: &'static str| match (attribute(own), attribute(alias)) {
            (Some(one), Some(other)) if one != other => {
                Err(InvalidConnection::Contradiction { attribute: own, other: alias })
            }
            (Some(text), _) => Ok(Some((own, text))),
            (None, alias_text) => Ok(alias_text.map(|it| (alias, it))),
        };
        let url = |(attribute, text): (&'static str, &str)| {
            text.parse::<ProxyUrl>().map_err(|cause| InvalidConnection::Proxy { attribute, cause })
        };
        let list = |(attribute, text): (&'static str, &str)| {
            text.parse::<NoProxy>().map_err(|cause| InvalidConnection::NoProxy { attribute, cause })
        };
        Ok(Self {
            region,
            addressing: is_path.map(|it| if it { Addressing::Path } else { Addressing::VirtualHost }),
            payer: is_requester.map(|it| if it { Payer::Requester } else { Payer::Owner }),
            proxy: ProxySettings {
                https: either(context::HTTPS_PROXY, context::ENVIRONMENT_HTTPS_PROXY)?.map(url).transpose()?,
                http: either(context::HTTP_PROXY, context::ENVIRONMENT_HTTP_PROXY)?.map(url).transpose()?,
                no_proxy: either(context::NO_PROXY, context::ENVIRONMENT_NO_PROXY)?.map(list).transpose()?,
            },
            ca_certificates: attribute(context::CA_BUNDLE)
                .map(|it| it.parse().map_err(|cause| InvalidConnection::Certificates { cause }))
                .transpose()?,
        })
    }

    /// The first attribute that changes who sees or answers the engine's requests. Only volumes with keys of their own may have it: the
    /// driver's keys are used where the driver's administrator says, and nowhere else.
    pub const fn needs_own_keys(&self) -> Option<&'static str> {
        let ProxySettings { https, http, no_proxy } = &self.proxy;
        match (https, http, no_proxy, &self.ca_certificates) {
            (Some(_), _, _, _) => Some(context::HTTPS_PROXY),
            (_, Some(_), _, _) => Some(context::HTTP_PROXY),
            (_, _, Some(_), _) => Some(context::NO_PROXY),
            (_, _, _, Some(_)) => Some(context::CA_BUNDLE),
            (None, None, None, None) => None,
        }
    }

    /// What the engine takes as options. `default` is how requests name the bucket if neither options nor attributes say so.
    pub fn add_to(&self, arguments: &mut MountArguments, default: Addressing) {
        if let Some(region) = &self.region {
            arguments.set(REGION_OPTION, Some(region));
        }
        if self.addressing.unwrap_or(default) == Addressing::Path {
            arguments.set_if_absent(PATH_STYLE_OPTION, None);
        }
        if self.payer == Some(Payer::Requester) {
            arguments.set_if_absent(REQUESTER_PAYS_OPTION, None);
        }
    }

    /// Name and value of everything that is set, for the sharing key.
    pub(crate) fn fields(&self) -> Vec<(&'static str, Option<&str>)> {
        // No `..`: a new field that is not part of the key does not compile.
        let Self { region, addressing, payer, proxy, ca_certificates } = self;
        let addressing = addressing.map(|it| match it {
            Addressing::Path => "path",
            Addressing::VirtualHost => "virtual host",
        });
        let payer = payer.map(|it| match it {
            Payer::Owner => "owner",
            Payer::Requester => "requester",
        });
        let mut fields = vec![("region", region.as_deref()), ("addressing", addressing), ("payer", payer)];
        fields.extend(proxy.variables().map(|(name, value)| (name, Some(value))));
        fields.push(("certificates", ca_certificates.as_ref().map(CaCertificates::as_str)));
        fields
    }
}

fn refuse_other_variables(attributes: &BTreeMap<String, String>) -> Result<(), InvalidConnection> {
    let known = [context::ENVIRONMENT_HTTPS_PROXY, context::ENVIRONMENT_HTTP_PROXY, context::ENVIRONMENT_NO_PROXY];
    let is_other = |it: &&String| it.starts_with(context::ENVIRONMENT_PREFIX) && !known.contains(&it.as_str());
    match attributes.keys().find(is_other) {
        Some(attribute) => Err(InvalidConnection::Environment { attribute: attribute.clone() }),
        None => Ok(()),
    }
}

fn parse_region(text: &str) -> Result<String, InvalidConnection> {
    if is_signing_region(text) {
        Ok(text.to_owned())
    } else {
        Err(InvalidConnection::Region { value: text.to_owned() })
    }
}

fn parse_boolean(attribute: &'static str, text: &str) -> Result<bool, InvalidConnection> {
    text.parse().map_err(|_| InvalidConnection::Boolean { attribute, value: text.to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ca_certificates::tests::PEM;
    use crate::chain::Chain;

    fn parse(attributes: &[(&str, &str)], options: &[&str]) -> Result<StoreConnection, InvalidConnection> {
        let attributes = attributes.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
        StoreConnection::parse(&attributes, &MountArguments::parse(options).unwrap())
    }

    /// The options of the engine and the variables of its environment.
    #[track_caller]
    fn check(attributes: &[(&str, &str)], options: &[&str], expected: Result<&[&str], &str>) {
        match parse(attributes, options) {
            Ok(connection) => {
                let mut arguments = MountArguments::parse(options).unwrap();
                connection.add_to(&mut arguments, Addressing::Path);
                let mut found = arguments.render();
                found.extend(connection.proxy.variables().map(|(name, value)| format!("{name}={value}")));
                assert_eq!(expected, Ok(&found.iter().map(String::as_str).collect::<Vec<_>>()[..]));
            }
            Err(error) => assert_eq!(expected, Err(Chain(&error).to_string().as_str())),
        }
    }

    #[test]
    fn attributes_become_options_and_variables() {
        check(&[], &[], Ok(&["--force-path-style"]));
        check(&[("region", "eu-west-1")], &[], Ok(&["--force-path-style", "--region=eu-west-1"]));
        check(&[("region", "")], &["region us-1"], Ok(&["--force-path-style", "--region=us-1"]));
        check(&[("forcePathStyle", "false")], &[], Ok(&[]));
        check(&[("forcePathStyle", "true")], &["force-path-style"], Ok(&["--force-path-style"]));
        check(&[("requesterPays", "true")], &["requester-pays"], Ok(&["--force-path-style", "--requester-pays"]));
        check(&[("requesterPays", "false")], &[], Ok(&["--force-path-style"]));
        check(
            &[("httpsProxy", "http://a:1"), ("httpProxy", "http://b:2/"), ("noProxy", ".svc, 10.0.0.0/8")],
            &[],
            Ok(&["--force-path-style", "HTTPS_PROXY=http://a:1", "HTTP_PROXY=http://b:2", "NO_PROXY=.svc,10.0.0.0/8"]),
        );
        check(
            &[("mountpointEnv.HTTPS_PROXY", "http://a:1"), ("mountpointEnv.NO_PROXY", "*"), ("noProxy", "*")],
            &[],
            Ok(&["--force-path-style", "HTTPS_PROXY=http://a:1", "NO_PROXY=*"]),
        );
    }

    #[test]
    fn malformed_attributes_are_named_with_the_form_they_must_have() {
        let proxy = "must look like http://proxy.example.com:3128, without user, password and path";
        check(
            &[("region", "eu west")],
            &[],
            Err(
                "volume attribute region \"eu west\" must be the name of a region such as eu-west-1: letters, digits, dots, hyphens \
                 and underscores",
            ),
        );
        check(
            &[("forcePathStyle", "no")],
            &[],
            Err("volume attribute forcePathStyle \"no\" must be \"true\" or \"false\""),
        );
        check(
            &[("requesterPays", "True")],
            &[],
            Err("volume attribute requesterPays \"True\" must be \"true\" or \"false\""),
        );
        check(
            &[("httpsProxy", "http://user:visible@proxy")],
            &[],
            Err(&format!("volume attribute httpsProxy not usable: {proxy}")),
        );
        check(
            &[("mountpointEnv.HTTP_PROXY", "proxy")],
            &[],
            Err(&format!("volume attribute mountpointEnv.HTTP_PROXY not usable: {proxy}")),
        );
        check(
            &[("noProxy", "*.svc")],
            &[],
            Err(
                "volume attribute noProxy not usable: must be a list like .svc,10.0.0.0/8,store.example.com (names, addresses, \
                 networks), or * for all; \"*.svc\" is none of these",
            ),
        );
        check(
            &[("caBundle", "x")],
            &[],
            Err(
                "volume attribute caBundle not usable: must be certificates in PEM (-----BEGIN CERTIFICATE-----): it has no \
                 certificate",
            ),
        );
        check(
            &[("mountpointEnv.AWS_PROFILE", "x")],
            &[],
            Err(
                "volume attribute mountpointEnv.AWS_PROFILE is not allowed: of mountpointEnv only HTTPS_PROXY, HTTP_PROXY and \
                 NO_PROXY are",
            ),
        );
    }

    #[test]
    fn contradictions_are_refused() {
        let twice = |option: &str, attribute: &str| {
            format!("mount option {option} and volume attribute {attribute} exclude each other; remove one of them")
        };
        check(&[("region", "a")], &["region a"], Err(&twice("--region", "region")));
        check(
            &[("forcePathStyle", "false")],
            &["force-path-style"],
            Err(&twice("--force-path-style", "forcePathStyle")),
        );
        check(&[("requesterPays", "false")], &["requester-pays"], Err(&twice("--requester-pays", "requesterPays")));
        check(
            &[("httpsProxy", "http://a"), ("mountpointEnv.HTTPS_PROXY", "http://b")],
            &[],
            Err("volume attributes httpsProxy and mountpointEnv.HTTPS_PROXY have different values; remove one of them"),
        );
    }

    #[test]
    fn what_redirects_requests_or_trust_needs_keys_of_the_volume() {
        for (attributes, expected) in [
            (&[("region", "a"), ("forcePathStyle", "false"), ("requesterPays", "true")][..], None),
            (&[("httpsProxy", "http://a")], Some("httpsProxy")),
            (&[("httpProxy", "http://a")], Some("httpProxy")),
            (&[("mountpointEnv.NO_PROXY", "*")], Some("noProxy")),
            (&[("caBundle", PEM)], Some("caBundle")),
        ] {
            assert_eq!(parse(attributes, &[]).unwrap().needs_own_keys(), expected);
        }
    }
}
