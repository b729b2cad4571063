//! Sources of keys in every state, in the same way with every strategy: keys are missing, malformed, expired, fresh, revoked and
//! refreshed, before a volume is mounted and while it is. The store checks the keys, so nothing here decides what they are worth.
//!
//! `supply` puts a source into a state, and `run` checks what the node makes of it.

mod run;
mod supply;

use std::path::PathBuf;

use rustix::process::Pid;

pub use run::{check_key_source, check_private_authority};

use crate::kubelet::CsiVolume;
use crate::plugin::PluginStrategy;
use crate::test_node::{TestNode, names_in};
use crate::world::{BUCKET, World, pod};

/// Where keys come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeySource {
    /// The Secret of a volume.
    Secret,
    /// The driver's own Secret, mounted as files.
    DriverSecret,
    /// A profile in AWS's shared files.
    Profile,
    InstanceProfile,
    WebIdentity,
    /// The agent for containers.
    Container,
    /// Tokens of workloads: `authenticationSource: pod`.
    PodIdentity,
}

/// A node of any strategy whose engines need keys. Its node plugin is not started yet.
pub trait CredentialWorld<'a> {
    fn test_node(&self) -> &TestNode<'a>;

    fn test_node_mut(&mut self) -> &mut TestNode<'a>;

    /// The volume of another workload, which shares no engine with those before. All that the strategy needs to mount it is there.
    fn start_workload(&mut self, number: u32) -> CsiVolume;

    /// The engines that serve, and those that are about to.
    fn engines(&self) -> Vec<Pid>;

    /// Where the engine of the first workload reads its keys.
    fn credentials_file(&self) -> PathBuf;

    /// Unpublishes the volume of the first workload.
    fn end_workload(&mut self, volume: &CsiVolume);

    fn check_nothing_left(&self);
}

/// Strategies `daemon` and `systemd`.
impl<'a> CredentialWorld<'a> for World<'a> {
    fn test_node(&self) -> &TestNode<'a> {
        self
    }

    fn test_node_mut(&mut self) -> &mut TestNode<'a> {
        self
    }

    fn start_workload(&mut self, number: u32) -> CsiVolume {
        CsiVolume::new(BUCKET, &format!("pv-{number}"), &pod(number))
    }

    fn engines(&self) -> Vec<Pid> {
        let supervisors = match self.plugin.strategy() {
            PluginStrategy::Systemd => Self::engines(self),
            PluginStrategy::Daemon | PluginStrategy::Pod { .. } => Vec::new(),
        };
        self.engine_processes().into_iter().filter(|it| !supervisors.contains(it)).collect()
    }

    fn credentials_file(&self) -> PathBuf {
        let directory = match self.plugin.strategy() {
            PluginStrategy::Systemd => {
                let names = names_in(&self.plugin.credentials());
                assert_eq!(names.len(), 1, "directories with credentials: {names:?}");
                self.plugin.credentials().join(&names[0])
            }
            PluginStrategy::Daemon | PluginStrategy::Pod { .. } => self.mounter_source_directory(),
        };
        directory.join("credentials/s3-csi-credentials")
    }

    fn end_workload(&mut self, volume: &CsiVolume) {
        self.unpublish(volume);
    }

    fn check_nothing_left(&self) {
        Self::check_nothing_left(self);
    }
}

/// A test for each source of keys, in the module where it is called. `check` and `check_authority` get the source.
#[macro_export]
macro_rules! credential_matrix_tests {
    ($check:expr, $check_authority:expr) => {
        $crate::credential_matrix_tests! {
            $check;
            secret: Secret, driver_secret: DriverSecret, profile: Profile, instance_profile: InstanceProfile,
            web_identity: WebIdentity, container: Container, pod_identity: PodIdentity,
        }
        $crate::credential_matrix_tests! {
            $check_authority;
            private_certificate_authority_of_web_identity: WebIdentity,
            private_certificate_authority_of_pod_identity: PodIdentity,
        }
    };
    ($check:expr; $($name:ident: $source:ident,)*) => {
        $(
            #[test]
            fn $name() {
                let check: fn($crate::credential_matrix::KeySource) = $check;
                check($crate::credential_matrix::KeySource::$source);
            }
        )*
    };
}
