//! Pods of a cluster with a stop watch: from the creation of a Pod until its container runs, which the container itself reports.

use std::fs;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use s3csi_testbed::cluster::Cluster;
use s3csi_testbed::wait::wait_patiently_until;
use serde_json::{Value, json};

use crate::publisher::milliseconds;
use crate::report::MarkdownTable;
use crate::statistics::{Samples, figure_or_dash};

/// The list of all Pods with a stop watch.
pub const PODS: &str = "/api/v1/namespaces/default/pods";

const VOLUMES: &str = "/api/v1/persistentvolumes";
const CLAIMS: &str = "/api/v1/namespaces/default/persistentvolumeclaims";

/// The kernel's clock, for all of its namespaces.
const CLOCK: &str = "/proc/uptime";

/// Many times what the slowest machine needs: something is stuck.
pub const LIMIT: Duration = Duration::from_mins(5);

/// Between two looks at the API server.
const INTERVAL: Duration = Duration::from_millis(10);

/// A bucket, a volume of it and a claim, all of one name.
pub struct ClusterVolume<'a> {
    pub name: &'a str,
    pub driver: &'a str,
    pub mount_options: &'a [String],
}

/// Milliseconds after the creation of a Pod.
pub struct PodStart {
    /// The container runs.
    pub running: f64,
    /// The API server shows it.
    pub reported: f64,
}

#[derive(Default)]
pub struct PodStartSamples {
    running: Samples,
    reported: Samples,
}

impl PodStartSamples {
    pub fn add(&mut self, PodStart { running, reported }: &PodStart) {
        self.running.add(*running);
        self.reported.add(*reported);
    }

    pub fn running(&self) -> &Samples {
        &self.running
    }

    /// How much later the container of such a Pod runs than that of a Pod without a volume, by the medians.
    pub fn above(&self, plain: &Self) -> Option<f64> {
        Some(self.running.median()? - plain.running.median()?)
    }
}

/// Makes volumes and waits until their claims are bound.
pub fn create_volumes(cluster: &Cluster, volumes: &[ClusterVolume<'_>]) -> anyhow::Result<()> {
    for volume in volumes {
        create_volume(cluster, volume)?;
    }
    for ClusterVolume { name, .. } in volumes {
        let is_bound = || cluster.get(&format!("{CLAIMS}/{name}")).is_some_and(|it| it["status"]["phase"] == "Bound");
        ensure!(wait_patiently_until(Instant::now() + LIMIT, is_bound), "claim {name} is not bound");
    }
    Ok(())
}

fn create_volume(cluster: &Cluster, order: &ClusterVolume<'_>) -> anyhow::Result<()> {
    let ClusterVolume { name, driver, mount_options } = order;
    cluster.create_bucket(name)?;
    let spec = json!({ "accessModes": ["ReadWriteMany"], "storageClassName": "" });
    let metadata = json!({ "name": name });
    let mut volume = json!({ "apiVersion": "v1", "kind": "PersistentVolume", "metadata": metadata, "spec": spec });
    volume["spec"]["capacity"] = json!({ "storage": "1Gi" });
    volume["spec"]["claimRef"] = json!({ "namespace": "default", "name": name });
    volume["spec"]["mountOptions"] = json!(mount_options);
    volume["spec"]["csi"] =
        json!({ "driver": driver, "volumeHandle": name, "volumeAttributes": { "bucketName": name } });
    cluster.create(VOLUMES, &volume)?;
    let mut claim = json!({ "apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata, "spec": spec });
    claim["spec"]["volumeName"] = json!(name);
    claim["spec"]["resources"] = json!({ "requests": { "storage": "1Gi" } });
    cluster.create(CLAIMS, &claim)?;
    Ok(())
}

/// A Pod whose container prints the time when it starts, with the volume of this claim or without one.
pub fn pod(name: &str, claim: Option<&str>) -> Value {
    let mut pod = json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": { "name": name },
        "spec": {
            "terminationGracePeriodSeconds": 0,
            "containers": [{
                "name": "main", "image": "localhost/busybox:1", "imagePullPolicy": "Never",
                "command": ["sh", "-c", format!("cat {CLOCK}; exec sleep 100000")],
            }],
        },
    });
    if let Some(claim) = claim {
        let volume = json!({ "name": "data", "persistentVolumeClaim": { "claimName": claim } });
        pod["spec"]["volumes"] = json!([volume]);
        pod["spec"]["containers"][0]["volumeMounts"] = json!([{ "name": "data", "mountPath": "/data" }]);
    }
    pod
}

/// Until the Pod runs. Calls `observe` with the time since its creation between two looks at it.
pub fn start_pod(
    cluster: &Cluster,
    name: &str,
    claim: Option<&str>,
    mut observe: impl FnMut(Duration),
) -> anyhow::Result<PodStart> {
    let (start, created) = (Instant::now(), now()?);
    cluster.create(PODS, &pod(name, claim))?;
    while start.elapsed() < LIMIT {
        let seen = cluster.get(&format!("{PODS}/{name}")).context("the Pod is gone")?;
        if seen["status"]["phase"] == "Running" {
            let reported = milliseconds(start.elapsed());
            return Ok(PodStart { running: (started(cluster, name)? - created) * 1000.0, reported });
        }
        observe(start.elapsed());
        thread::sleep(INTERVAL);
    }
    anyhow::bail!("{}", cluster.kubectl(&["describe", "pod", name])?)
}

/// The kernel's clock in seconds.
pub fn now() -> anyhow::Result<f64> {
    seconds(&fs::read_to_string(CLOCK)?)
}

/// When the container of a Pod that runs was started, by the same clock.
pub fn started(cluster: &Cluster, name: &str) -> anyhow::Result<f64> {
    let log = cluster.get_text(&format!("{PODS}/{name}/log")).with_context(|| format!("Pod {name} has no log"))?;
    seconds(&log)
}

/// The first of the two figures that the kernel prints.
fn seconds(text: &str) -> anyhow::Result<f64> {
    let seconds = text.split_whitespace().next().context("the container has printed no time")?;
    seconds.parse().with_context(|| format!("the container has printed {seconds:?}"))
}

/// One row for each, and how far its median is above that of Pods without a volume.
pub fn start_table(rows: &[(&str, &PodStartSamples)], plain: &PodStartSamples) -> MarkdownTable {
    let mut table = MarkdownTable::new([
        "ms",
        "n",
        "min",
        "p50",
        "p90",
        "max",
        "p50 above a Pod without a volume",
        "reported, p50",
    ]);
    for (name, samples) in rows {
        let figures = [
            samples.running.minimum(),
            samples.running.median(),
            samples.running.percentile(90),
            samples.running.maximum(),
            samples.above(plain),
            samples.reported.median(),
        ];
        let cells = [(*name).to_owned(), samples.running.count().to_string()];
        table.add(cells.into_iter().chain(figures.map(figure_or_dash)));
    }
    table
}
