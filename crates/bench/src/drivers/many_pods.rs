//! Many Pods that are created at once on one node, and how soon they run.

use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use s3csi_testbed::cluster::Cluster;
use s3csi_testbed::wait::wait_patiently_until;
use serde_json::json;

use crate::pod_start::{PODS, now, pod, started};
use crate::statistics::Samples;

/// Of all Pods that are created at once.
const LABEL: (&str, &str) = ("bench", "many");

/// Many times what the slowest machine needs: something is stuck.
const LIMIT: Duration = Duration::from_mins(10);

/// How many Pods, and how many of them share a volume.
#[derive(Clone, Copy, Debug)]
pub struct PodCrowd {
    /// None: the Pods have no volume.
    pub volumes: usize,
    pub pods_each: usize,
}

/// Seconds after the creation of the first Pod.
#[derive(Clone, Copy, Debug)]
pub struct StartTimes {
    /// Half of the containers run.
    pub half: f64,
    pub all: f64,
}

impl PodCrowd {
    pub fn title(&self) -> String {
        let Self { volumes, pods_each } = self;
        match volumes {
            0 => format!("{pods_each} Pods without a volume"),
            _ => format!("{volumes} volumes × {pods_each} Pods"),
        }
    }

    pub fn volume_names(&self, owner: &str) -> Vec<String> {
        (0..self.volumes).map(|it| format!("{owner}-{}-volumes-{it}", self.volumes)).collect()
    }

    /// Names of the Pods and of their claims.
    pub fn pods(&self, owner: &str) -> Vec<(String, Option<String>)> {
        let volumes = self.volume_names(owner);
        let number = self.pods_each * volumes.len().max(1);
        (0..number).map(|it| (format!("{owner}-many-{it}"), volumes.get(it % volumes.len().max(1)).cloned())).collect()
    }
}

/// Creates Pods and waits until all of them run.
pub fn start(cluster: &Cluster, pods: &[(String, Option<String>)]) -> anyhow::Result<StartTimes> {
    let (label, value) = LABEL;
    let created = now()?;
    for (name, claim) in pods {
        let mut pod = pod(name, claim.as_deref());
        pod["metadata"]["labels"] = json!({ label: value });
        cluster.create(PODS, &pod)?;
    }
    let running = || {
        let found = cluster.get(&format!("{PODS}?labelSelector={label}={value}")).unwrap_or_default();
        found["items"].as_array().into_iter().flatten().filter(|it| it["status"]["phase"] == "Running").count()
    };
    let is_done = wait_patiently_until(Instant::now() + LIMIT, || running() == pods.len());
    ensure!(is_done, "{} of {} Pods run after {LIMIT:?}", running(), pods.len());
    let mut times = Samples::default();
    for (name, _) in pods {
        times.add(started(cluster, name)? - created);
    }
    times.median().zip(times.maximum()).map(|(half, all)| StartTimes { half, all }).context("there are no Pods")
}

/// Removes them again.
pub fn end(cluster: &Cluster) -> anyhow::Result<()> {
    let (label, value) = LABEL;
    cluster.kubectl(&["delete", "pods", &format!("--selector={label}={value}"), "--timeout=600s"])?;
    Ok(())
}
