//! When two workloads may be served by one source: exactly when their sharing keys are equal.

use crate::endpoint::EndpointUrl;
use crate::names::hex_sha224;
use crate::prefix::Prefix;
use crate::publish::{Access, AuthenticationSource};
use crate::role::RoleArn;
use crate::store_connection::StoreConnection;

/// Everything that must be equal for two workloads to share one source.
///
/// Key *values* are not part of it: rotated credentials reach the running source as rewritten files. What is part of it
/// is whose credentials they are.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SharingKey {
    pub node: String,
    pub persistent_volume: String,
    pub volume_id: String,
    /// A PV that was recreated under its old name and handle may point to another bucket.
    pub bucket: String,
    /// Likewise to another part of it.
    pub prefix: Option<Prefix>,
    /// Likewise to another store.
    pub endpoint: Option<EndpointUrl>,
    /// Likewise in another way.
    pub connection: StoreConnection,
    /// Normalised: one option per line, sorted, under long names.
    pub mount_options: String,
    pub fs_group: Option<String>,
    pub authentication_source: AuthenticationSource,
    /// `namespace/name` of the Secret that the PV names. A PV that was recreated may name another one, whose keys must not reach
    /// the workloads of the old one. Only the controller knows it: kubelet sends the node the content alone.
    pub secret: Option<String>,
    /// A read-only source is not shared with workloads that may write.
    pub volume_access: Access,
    /// Only where the identity is the workload's own.
    pub workload_namespace: Option<String>,
    /// Only where the identity is the workload's own.
    pub service_account: Option<String>,
    /// The role that the PV names, only where the identity is the workload's own. A PV that was recreated may name another one. The role
    /// of the service account is not part of the key: if it changes, the keys of the new one reach the running source.
    pub role: Option<RoleArn>,
}

impl SharingKey {
    /// 56 hex digits that stand for this key: the name of the source.
    pub fn name(&self) -> String {
        // No `..`: a new field that is not hashed does not compile.
        let Self {
            node,
            persistent_volume,
            volume_id,
            bucket,
            prefix,
            endpoint,
            connection,
            mount_options,
            fs_group,
            authentication_source,
            secret,
            volume_access,
            workload_namespace,
            service_account,
            role,
        } = self;
        let access = match volume_access {
            Access::ReadOnly => "read-only",
            Access::ReadWrite => "read-write",
        };
        let fields = [
            ("node", Some(node.as_str())),
            ("persistent volume", Some(persistent_volume)),
            ("volume id", Some(volume_id)),
            ("bucket", Some(bucket)),
            ("prefix", prefix.as_ref().map(Prefix::as_str)),
            ("endpoint", endpoint.as_ref().map(EndpointUrl::as_str)),
            ("mount options", Some(mount_options)),
            ("fs group", fs_group.as_deref()),
            ("authentication source", Some(authentication_source.as_str())),
            ("secret", secret.as_deref()),
            ("volume access", Some(access)),
            ("workload namespace", workload_namespace.as_deref()),
            ("service account", service_account.as_deref()),
            ("role", role.as_ref().map(RoleArn::as_str)),
        ];
        let fields = fields.into_iter().chain(connection.fields());
        // Each value is preceded by its length, so that no two different keys are written the same.
        hex_sha224(fields.filter_map(|(field, value)| value.map(|it| format!("{field}:{}:{it}\n", it.len()))))
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::ca_certificates::tests::PEM;
    use crate::store_connection::{Addressing, Payer};

    pub fn key() -> SharingKey {
        SharingKey {
            node: "node".to_owned(),
            persistent_volume: "pv".to_owned(),
            volume_id: "handle".to_owned(),
            bucket: "bucket".to_owned(),
            prefix: None,
            endpoint: None,
            connection: StoreConnection::default(),
            mount_options: "--allow-root\n--force-path-style".to_owned(),
            fs_group: None,
            authentication_source: AuthenticationSource::Driver,
            secret: None,
            volume_access: Access::ReadWrite,
            workload_namespace: None,
            service_account: None,
            role: None,
        }
    }

    #[test]
    fn every_field_changes_the_name() {
        let text = |it: &str| it.to_owned();
        let connected = |change: fn(&mut StoreConnection)| {
            let mut changed = key();
            change(&mut changed.connection);
            changed
        };
        let keys = [
            key(),
            SharingKey { node: text("other"), ..key() },
            SharingKey { persistent_volume: text("other"), ..key() },
            SharingKey { volume_id: text("other"), ..key() },
            SharingKey { bucket: text("other"), ..key() },
            SharingKey { prefix: Some("a/".parse().unwrap()), ..key() },
            SharingKey { endpoint: Some("http://s3".parse().unwrap()), ..key() },
            connected(|it| it.region = Some("eu-1".to_owned())),
            connected(|it| it.addressing = Some(Addressing::Path)),
            connected(|it| it.addressing = Some(Addressing::VirtualHost)),
            connected(|it| it.payer = Some(Payer::Owner)),
            connected(|it| it.payer = Some(Payer::Requester)),
            connected(|it| it.proxy.https = Some("http://a".parse().unwrap())),
            connected(|it| it.proxy.http = Some("http://a".parse().unwrap())),
            connected(|it| it.proxy.no_proxy = Some("a".parse().unwrap())),
            connected(|it| it.ca_certificates = Some(PEM.parse().unwrap())),
            SharingKey { mount_options: text("--allow-root"), ..key() },
            SharingKey { fs_group: Some(text("1000")), ..key() },
            SharingKey { fs_group: Some(text("")), ..key() },
            SharingKey { authentication_source: AuthenticationSource::Secret, ..key() },
            SharingKey { authentication_source: AuthenticationSource::Pod, ..key() },
            SharingKey { secret: Some(text("team/keys")), ..key() },
            SharingKey { volume_access: Access::ReadOnly, ..key() },
            SharingKey { workload_namespace: Some(text("a")), ..key() },
            SharingKey { service_account: Some(text("a")), ..key() },
            SharingKey { role: Some("arn:aws:iam::1:role/a".parse().unwrap()), ..key() },
        ];
        let names: BTreeSet<String> = keys.iter().map(SharingKey::name).collect();
        assert_eq!(names.len(), keys.len());
    }

    #[test]
    fn neighbouring_fields_do_not_run_into_each_other() {
        let split = |node: &str, volume: &str| {
            SharingKey { node: node.to_owned(), persistent_volume: volume.to_owned(), ..key() }.name()
        };
        assert_ne!(split("ab", "c"), split("a", "bc"));
        assert_ne!(split("a\npersistent volume:1:b", "c"), split("a", "b\npersistent volume:1:c"));
    }

    /// Names are found again after an upgrade of the driver: a change here would remount every running source.
    #[test]
    fn the_name_of_a_key_never_changes() {
        assert_eq!(key().name(), "ab33525d7c3595be23cc100804eb587d7b703e1a905484fdfe6a9e9b");
    }
}
