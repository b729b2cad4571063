//! What a server is started with, and how it deviates from AWS on request.

use std::net::Ipv4Addr;

use crate::store::Account;

/// What a server is started with.
#[derive(Clone, Debug)]
pub struct Config {
    /// Where it listens.
    pub address: Ipv4Addr,
    /// 0 lets the kernel choose.
    pub port: u16,
    /// The first one is the account that tests use when they do not care.
    pub accounts: Vec<Account>,
    /// Owned by the first account.
    pub buckets: Vec<String>,
    pub transport: Transport,
    pub copy: CopySupport,
    pub rename: RenameSupport,
    pub tagging: TaggingSupport,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    Plain,
    /// With a certificate authority of the server's own.
    Tls,
}

/// What `CopyObject` does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CopySupport {
    Supported,
    /// 501.
    Refused,
    /// The header is ignored: 200, and the destination is an empty object.
    Ignored,
}

/// What `PUT ?renameObject` does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RenameSupport {
    Supported,
    /// 501.
    Refused,
    /// The query is ignored: 200, and the destination is an empty object. This is what S3-compatible servers do.
    Ignored,
}

/// What tags of buckets do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TaggingSupport {
    Supported,
    /// 501.
    Refused,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            address: Ipv4Addr::LOCALHOST,
            port: 0,
            accounts: vec![Account::named("testbed")],
            buckets: Vec::new(),
            transport: Transport::Plain,
            copy: CopySupport::Supported,
            rename: RenameSupport::Ignored,
            tagging: TaggingSupport::Supported,
        }
    }
}
