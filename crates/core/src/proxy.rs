//! Through which proxy a store is reached: what `HTTPS_PROXY`, `HTTP_PROXY` and `NO_PROXY` say to most programs.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

use crate::endpoint::EndpointUrl;

/// `http://host[:port]`. Holding one is the proof that it was checked.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ProxyUrl(EndpointUrl);

/// Hosts that are reached directly: names (of a host, or of a domain with all its hosts), addresses, networks, or `*` for all.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NoProxy(String);

/// Does not quote the URL: what is wrong with it may be that it contains a password.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("must look like http://proxy.example.com:3128, without user, password and path")]
pub struct InvalidProxyUrl;

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "must be a list like .svc,10.0.0.0/8,store.example.com (names, addresses, networks), or * for all; {entry:?} is none of these"
)]
pub struct InvalidNoProxy {
    pub entry: String,
}

/// The proxies of one store.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ProxySettings {
    /// For `https://` stores.
    pub https: Option<ProxyUrl>,
    /// For `http://` stores.
    pub http: Option<ProxyUrl>,
    pub no_proxy: Option<NoProxy>,
}

/// How a store is spoken to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scheme {
    Http,
    Https,
}

impl ProxySettings {
    /// These settings where `volume` says nothing.
    #[must_use]
    pub fn overridden_by(&self, volume: &Self) -> Self {
        let Self { https, http, no_proxy } = volume.clone();
        Self {
            https: https.or_else(|| self.https.clone()),
            http: http.or_else(|| self.http.clone()),
            no_proxy: no_proxy.or_else(|| self.no_proxy.clone()),
        }
    }

    /// As variables of a program's environment.
    pub fn variables(&self) -> impl Iterator<Item = (&'static str, &str)> {
        let Self { https, http, no_proxy } = self;
        let urls = [("HTTPS_PROXY", https), ("HTTP_PROXY", http)];
        let urls = urls.into_iter().filter_map(|(name, url)| Some((name, url.as_ref()?.as_str())));
        urls.chain(no_proxy.iter().map(|it| ("NO_PROXY", it.as_str())))
    }

    /// The proxy for a host; `None`: it is reached directly.
    pub fn proxy_for(&self, scheme: Scheme, host: &str) -> Option<&ProxyUrl> {
        let proxy = match scheme {
            Scheme::Https => self.https.as_ref(),
            Scheme::Http => self.http.as_ref(),
        };
        proxy.filter(|_| !self.no_proxy.as_ref().is_some_and(|it| it.matches(host)))
    }
}

impl ProxyUrl {
    pub fn as_str(&self) -> &str {
        self.0.as_str()
    }

    /// `host:port`. An IPv6 address keeps its brackets.
    pub fn authority(&self) -> String {
        let host = self.as_str().trim_start_matches("http://");
        let has_port = host.rsplit_once(':').is_some_and(|(_, port)| port.bytes().all(|it| it.is_ascii_digit()));
        if has_port { host.to_owned() } else { format!("{host}:80") }
    }
}

impl NoProxy {
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The rules of the engine's client library, which are curl's.
    fn matches(&self, host: &str) -> bool {
        let address: Option<IpAddr> = host.trim_matches(['[', ']']).parse().ok();
        self.0.split(',').any(|entry| match (entry, address) {
            ("*", _) => true,
            (entry, Some(address)) => is_in_network(entry, address),
            (entry, None) => is_in_domain(entry.trim_matches('.'), host),
        })
    }
}

impl FromStr for ProxyUrl {
    type Err = InvalidProxyUrl;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let url: EndpointUrl = text.parse().map_err(|_| InvalidProxyUrl)?;
        // TLS to the proxy itself would need a second set of trusted certificates.
        if url.as_str().starts_with("http://") { Ok(Self(url)) } else { Err(InvalidProxyUrl) }
    }
}

impl FromStr for NoProxy {
    type Err = InvalidNoProxy;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let mut entries: Vec<&str> = text.split(',').map(str::trim).filter(|it| !it.is_empty()).collect();
        if let Some(entry) = entries.iter().find(|it| !is_entry(it)) {
            return Err(InvalidNoProxy { entry: (*entry).to_owned() });
        }
        entries.dedup();
        Ok(Self(entries.join(",")))
    }
}

impl fmt::Display for ProxyUrl {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.as_str())
    }
}

fn is_entry(entry: &str) -> bool {
    let is_name = |it: &str| !it.is_empty() && it.chars().all(|it| it.is_ascii_alphanumeric() || "-._".contains(it));
    match entry.split_once('/') {
        Some((address, bits)) => address.parse::<IpAddr>().is_ok_and(|it| bits_of(bits, it).is_some()),
        None => entry == "*" || entry.parse::<IpAddr>().is_ok() || is_name(entry),
    }
}

fn is_in_domain(domain: &str, host: &str) -> bool {
    let (domain, host) = (domain.to_ascii_lowercase(), host.to_ascii_lowercase());
    !domain.is_empty() && (host == domain || host.strip_suffix(&domain).is_some_and(|it| it.ends_with('.')))
}

fn is_in_network(entry: &str, address: IpAddr) -> bool {
    let (network, bits) = entry.split_once('/').map_or((entry, None), |(network, bits)| (network, Some(bits)));
    let Ok(network) = network.parse::<IpAddr>() else { return false };
    let Some(bits) = bits.map_or(Some(width(network)), |it| bits_of(it, network)) else { return false };
    let number = |it: IpAddr| match it {
        IpAddr::V4(it) => u128::from(it.to_bits()),
        IpAddr::V6(it) => it.to_bits(),
    };
    let shift = width(network) - bits;
    let prefix = |it: IpAddr| number(it).checked_shr(shift).unwrap_or(0);
    network.is_ipv4() == address.is_ipv4() && prefix(network) == prefix(address)
}

fn bits_of(text: &str, network: IpAddr) -> Option<u32> {
    text.parse().ok().filter(|it| (1..=width(network)).contains(it))
}

const fn width(address: IpAddr) -> u32 {
    if address.is_ipv4() { 32 } else { 128 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn proxy_urls() {
        let check = |text: &str, expected: Option<&str>| {
            assert_eq!(text.parse::<ProxyUrl>().ok().map(|it| it.authority()).as_deref(), expected, "{text}");
        };
        check("http://proxy.example.com:3128", Some("proxy.example.com:3128"));
        check("http://proxy", Some("proxy:80"));
        check("http://10.0.0.1:8080/", Some("10.0.0.1:8080"));
        check("http://[::1]", Some("[::1]:80"));
        check("http://[::1]:3128", Some("[::1]:3128"));
        for wrong in
            ["", "proxy:3128", "https://proxy", "http://user:password@proxy", "http://proxy/path", "socks5://p"]
        {
            check(wrong, None);
        }
        assert!(!"http://user:visible@proxy".parse::<ProxyUrl>().unwrap_err().to_string().contains("visible"));
    }

    #[test]
    fn lists_of_direct_hosts() {
        let check = |text: &str, expected: Result<&str, &str>| {
            let parsed = text.parse::<NoProxy>();
            assert_eq!(parsed.as_ref().map(NoProxy::as_str).map_err(|it| it.entry.as_str()), expected);
        };
        check(" .svc, 10.0.0.0/8 ,,fd00::/8,s3,::1", Ok(".svc,10.0.0.0/8,fd00::/8,s3,::1"));
        check("*", Ok("*"));
        check("", Ok(""));
        check("*.svc", Err("*.svc"));
        check("10.0.0.0/33", Err("10.0.0.0/33"));
        check("10.0.0.0/0", Err("10.0.0.0/0"));
        check("http://s3", Err("http://s3"));
        check("a\nB=c", Err("a\nB=c"));
    }

    #[test]
    fn a_host_is_reached_through_the_proxy_of_its_scheme_or_directly() {
        let settings = |no_proxy: &str| ProxySettings {
            https: Some("http://a:1".parse().unwrap()),
            http: Some("http://b:2".parse().unwrap()),
            no_proxy: Some(no_proxy.parse().unwrap()),
        };
        let check = |no_proxy: &str, host: &str, is_direct: bool| {
            for (scheme, url) in [(Scheme::Https, "http://a:1"), (Scheme::Http, "http://b:2")] {
                let settings = settings(no_proxy);
                let found = settings.proxy_for(scheme, host).map(ProxyUrl::as_str);
                assert_eq!(found, (!is_direct).then_some(url), "{host} with {no_proxy}");
            }
        };
        check("", "s3.example.com", false);
        check("*", "s3.example.com", true);
        check(".svc,example.com", "s3.example.com", true);
        check(".svc", "S3.ns.SVC", true);
        check("svc", "svc", true);
        check("example.com", "notexample.com", false);
        check("10.0.0.0/8", "10.200.0.1", true);
        check("10.0.0.0/8", "11.0.0.1", false);
        check("10.0.0.1", "10.0.0.1", true);
        check("10.0.0.1", "10.0.0.2", false);
        check("fd00::/8", "[fd12::1]", true);
        check("fd00::/8", "10.0.0.1", false);
        check("10.0.0.0/8", "s3.example.com", false);
        assert_eq!(ProxySettings::default().proxy_for(Scheme::Https, "s3"), None);
    }

    #[test]
    fn a_volume_overrides_one_setting_at_a_time() {
        let driver = ProxySettings {
            https: Some("http://driver".parse().unwrap()),
            http: None,
            no_proxy: Some(".svc".parse().unwrap()),
        };
        let volume = ProxySettings { https: Some("http://volume".parse().unwrap()), ..ProxySettings::default() };
        let both = driver.overridden_by(&volume);
        assert_eq!(both.variables().collect::<Vec<_>>(), [("HTTPS_PROXY", "http://volume"), ("NO_PROXY", ".svc")]);
        assert_eq!(driver.overridden_by(&ProxySettings::default()), driver);
    }
}
