//! How a volume's store is reached, as far as it depends on whose keys are used.

use std::collections::BTreeMap;

use super::{AuthenticationSource, InvalidPublish};
use crate::arguments::MountArguments;
use crate::bucket_reference::BucketReference;
use crate::ca_certificates::CaCertificates;
use crate::secret::Secret;
use crate::store_connection::{Addressing, SECRET_CA, StoreConnection};

pub(crate) fn parse_connection(
    attributes: &BTreeMap<String, String>,
    options: &MountArguments,
    bucket: &BucketReference,
) -> Result<StoreConnection, InvalidPublish> {
    let parsed = StoreConnection::parse(attributes, options);
    let connection = parsed.map_err(|cause| InvalidPublish::Connection { cause })?;
    if bucket.is_arn() && connection.addressing == Some(Addressing::Path) {
        return Err(InvalidPublish::PathStyleWithArn);
    }
    Ok(connection)
}

pub(crate) fn require_own_keys(
    connection: &StoreConnection,
    source: AuthenticationSource,
) -> Result<(), InvalidPublish> {
    match (connection.needs_own_keys(), source) {
        (Some(attribute), AuthenticationSource::Driver) => Err(InvalidPublish::WithoutOwnKeys { attribute }),
        (Some(_), AuthenticationSource::Secret | AuthenticationSource::Pod) | (None, _) => Ok(()),
    }
}

/// The certificates of the attribute and those of the Secret, which is not used with the driver's keys.
pub(super) fn all_certificates(
    connection: &StoreConnection,
    source: AuthenticationSource,
    secrets: &BTreeMap<String, Secret<String>>,
) -> Result<Option<CaCertificates>, InvalidPublish> {
    let own = connection.ca_certificates.as_ref();
    let text = secrets.get(SECRET_CA).map(|it| it.expose().as_str());
    let Some(text) = text.filter(|it| source != AuthenticationSource::Driver && !it.trim().is_empty()) else {
        return Ok(own.cloned());
    };
    let more: CaCertificates = text.parse().map_err(|cause| InvalidPublish::SecretCertificates { cause })?;
    Ok(Some(own.map_or_else(|| more.clone(), |it| it.and(Some(&more)))))
}
