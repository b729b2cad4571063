//! Where a store is: the URL that a volume or a `StorageClass` names instead of the driver's.

use std::fmt;
use std::str::FromStr;

/// `http://host[:port]` or `https://host[:port]`. Holding one is the proof that it was checked.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EndpointUrl(String);

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("endpointUrl {text:?} must look like https://s3.example.com or http://s3.example.com:8000, without a path")]
pub struct InvalidEndpointUrl {
    pub text: String,
}

impl EndpointUrl {
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for EndpointUrl {
    type Err = InvalidEndpointUrl;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let invalid = || InvalidEndpointUrl { text: text.to_owned() };
        let url = text.strip_suffix('/').unwrap_or(text);
        let host = url.strip_prefix("https://").or_else(|| url.strip_prefix("http://")).ok_or_else(invalid)?;
        // An IPv6 address has its own colons, and brackets around them.
        let (name, port) = match host.strip_prefix('[').and_then(|it| it.split_once(']')) {
            Some((address, rest)) => {
                let is_address = address.parse::<std::net::Ipv6Addr>().is_ok();
                let port = rest.strip_prefix(':').or(rest.is_empty().then_some("0")).ok_or_else(invalid)?;
                (if is_address { "address" } else { "" }, port)
            }
            None => host.split_once(':').unwrap_or((host, "0")),
        };
        let is_name = !name.is_empty() && name.chars().all(|it| it.is_ascii_alphanumeric() || "-._".contains(it));
        if !is_name || port.parse::<u16>().is_err() || !port.chars().all(|it| it.is_ascii_digit()) {
            return Err(invalid());
        }
        Ok(Self(url.to_owned()))
    }
}

impl fmt::Display for EndpointUrl {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(text: &str, expected: Option<&str>) {
        assert_eq!(text.parse::<EndpointUrl>().ok().as_ref().map(EndpointUrl::as_str), expected, "{text}");
    }

    #[test]
    fn endpoint_urls() {
        check("https://s3.example.com", Some("https://s3.example.com"));
        check("http://s3:8000/", Some("http://s3:8000"));
        check("http://[::1]:9000", Some("http://[::1]:9000"));
        check("https://[2001:db8::1]", Some("https://[2001:db8::1]"));
        for wrong in [
            "",
            "s3.example.com",
            "ftp://s3",
            "https://",
            "https://:80",
            "https://s3/path",
            "https://s3?x",
            "https://user@s3",
            "https://s3:port",
            "https://s3:+80",
            "https://s3:99999",
            "https://s 3",
            "https://[x]",
            "https://[::1]x",
        ] {
            check(wrong, None);
        }
    }
}
