//! Every source of keys in every state, with strategy `pod`.

use std::path::PathBuf;

use rustix::process::Pid;
use s3csi_testbed::credential_matrix::{CredentialWorld, KeySource, check_key_source, check_private_authority};
use s3csi_testbed::fixture::Fixture;
use s3csi_testbed::kubelet::CsiVolume;
use s3csi_testbed::test_node::TestNode;

use crate::world::{MountpointPod, World};

struct PodWorld<'a> {
    world: World<'a>,
    /// One for each workload.
    pods: Vec<MountpointPod>,
}

impl<'a> PodWorld<'a> {
    fn prepare(fixture: &'a Fixture) -> Self {
        Self { world: World::prepare(fixture), pods: Vec::new() }
    }
}

impl<'a> CredentialWorld<'a> for PodWorld<'a> {
    fn test_node(&self) -> &TestNode<'a> {
        &self.world
    }

    fn test_node_mut(&mut self) -> &mut TestNode<'a> {
        &mut self.world
    }

    fn start_workload(&mut self, number: u32) -> CsiVolume {
        self.pods.push(self.world.serve(&[number]));
        self.world.volume(number)
    }

    fn engines(&self) -> Vec<Pid> {
        self.world.engines()
    }

    fn credentials_file(&self) -> PathBuf {
        self.pods[0].directory.join("credentials/s3-csi-credentials")
    }

    fn end_workload(&mut self, volume: &CsiVolume) {
        self.world.unpublish(volume);
        self.world.retire(&self.pods[0]);
    }

    fn check_nothing_left(&self) {
        self.world.check_nothing_mounted();
    }
}

fn check(source: KeySource) {
    let fixture = Fixture::new(&format!("pod-keys-{source:?}"));
    check_key_source(&mut PodWorld::prepare(&fixture), &fixture, source);
}

fn check_authority(source: KeySource) {
    let fixture = Fixture::new(&format!("pod-keys-authority-{source:?}"));
    check_private_authority(&mut PodWorld::prepare(&fixture), &fixture, source);
}

s3csi_testbed::credential_matrix_tests!(check, check_authority);
