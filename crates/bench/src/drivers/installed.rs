//! The two drivers of the comparison and how they get into one cluster. They share nothing but the node and the S3 server.

use std::fs;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use rustix::process::Pid;
use s3csi_testbed::cluster::{Cluster, ClusterHost, STORE_ADMINISTRATOR};
use s3csi_testbed::earlier_driver::{self, EarlierBuild, EarlierMounter};
use s3csi_testbed::fixture::Fixture;
use s3csi_testbed::image;
use s3csi_testbed::wait::wait_patiently_until;
use serde_json::{Value, json};

use crate::footprint;
use crate::pod_start::LIMIT;
use crate::run::Progress;

pub const NODE: ClusterHost = ClusterHost::Node(1);

/// One of the drivers, as it is installed.
pub struct InstalledDriver {
    /// In tables.
    pub title: &'static str,
    /// In names of objects.
    pub short_name: &'static str,
    pub name: &'static str,
    pub namespace: &'static str,
    mountpoint_namespace: &'static str,
}

pub const OURS: InstalledDriver = InstalledDriver {
    title: "s3csi",
    short_name: "ours",
    name: "ours.s3csi.test",
    namespace: "s3-ours",
    mountpoint_namespace: "mount-s3-ours",
};

/// The chart does not know other names.
pub const THEIRS: InstalledDriver = InstalledDriver {
    title: "AWS",
    short_name: "aws",
    name: EarlierBuild::Aws.driver_name(),
    namespace: "kube-system",
    mountpoint_namespace: "mount-s3",
};

/// Programs that serve mounts, as the kernel shortens their names: engines, and what starts them in Mountpoint Pods.
const MOUNT_PROGRAMS: [&str; 3] = ["mount-s3", "s3csi-mounter", "aws-s3-csi-moun"];

/// Where machines of EC2 have their instance metadata. AWS's driver lets its engine ask there, ours does not.
const METADATA_ADDRESS: &str = "169.254.169.254/32";

/// What ends at once has ended by then.
const MOMENT: Duration = Duration::from_secs(5);

/// A cluster of one node with both drivers.
pub fn start(fixture: &Fixture, mounter: EarlierMounter, progress: &Progress) -> anyhow::Result<Cluster> {
    progress.say("starting a cluster");
    let ours = fixture.path("s3csi.tar");
    image::write(&ours)?;
    let [theirs, sidecars] = earlier_driver::write_images(EarlierBuild::Aws, &fixture.path("earlier-driver"))?;
    let cluster = Cluster::start("bench-drivers", 1)?;
    // It refuses connections at once. Without a machine of this address an engine would wait for it for up to four seconds: the kernel
    // says that there is none, but only once a second.
    cluster.run(ClusterHost::ControlPlane, &["ip", "address", "add", METADATA_ADDRESS, "dev", "lo"])?;
    for archive in [&ours, &theirs, &sidecars] {
        cluster.load(archive)?;
    }
    progress.say("installing the drivers");
    install_theirs(&cluster, mounter)?;
    install_ours(&cluster, mounter)?;
    Ok(cluster)
}

fn install_ours(cluster: &Cluster, mounter: EarlierMounter) -> anyhow::Result<()> {
    let strategy = match mounter {
        EarlierMounter::Systemd => "systemd",
        EarlierMounter::Pod => "pod",
    };
    let namespace = OURS.mountpoint_namespace;
    let settings = [
        format!("strategy={strategy}"),
        format!("mountpointPod.namespace={namespace}"),
        format!("mountpointPod.priorityClassName={namespace}"),
        // A directory that belongs to the node alone.
        "systemd.engineDirectory=/var/lib/s3csi/bin".to_owned(),
    ];
    let arguments: Vec<&str> = settings.iter().flat_map(|it| ["--set", it]).collect();
    cluster.install_driver(OURS.namespace, OURS.name, &arguments)?;
    Ok(())
}

fn install_theirs(cluster: &Cluster, mounter: EarlierMounter) -> anyhow::Result<()> {
    let (access_key, secret_key) = STORE_ADMINISTRATOR;
    let secret = json!({
        "apiVersion": "v1", "kind": "Secret", "metadata": { "name": "s3-secret", "namespace": THEIRS.namespace },
        "stringData": { "access_key_id": access_key, "secret_access_key": secret_key },
    });
    cluster.apply(&secret.to_string())?;
    let arguments = earlier_driver::install_arguments(EarlierBuild::Aws, mounter, THEIRS.namespace)?;
    cluster.helm(&arguments.iter().map(String::as_str).collect::<Vec<_>>())?;
    let parts: &[&str] = match mounter {
        EarlierMounter::Systemd => &["daemonset/s3-csi-node"],
        EarlierMounter::Pod => &["daemonset/s3-csi-node", "deployment/s3-csi-controller"],
    };
    for part in parts {
        cluster.kubectl(&["rollout", "status", "--namespace", THEIRS.namespace, part, "--timeout=120s"])?;
    }
    let is_registered = || {
        let node = cluster.get(&format!("/apis/storage.k8s.io/v1/csinodes/{}", NODE.name())).unwrap_or_default();
        node["spec"]["drivers"].as_array().into_iter().flatten().any(|it| it["name"] == THEIRS.name)
    };
    ensure!(wait_patiently_until(Instant::now() + LIMIT, is_registered), "kubelet does not know the driver of AWS");
    Ok(())
}

/// The end of what was measured must not be part of what is measured next.
pub fn wait_until_quiet(cluster: &Cluster) -> anyhow::Result<()> {
    let is_quiet_in_time = wait_patiently_until(Instant::now() + LIMIT, || is_quiet(cluster));
    ensure!(is_quiet_in_time, "engines or Mountpoint Pods do not end: {:?}", mount_processes(cluster)?);
    Ok(())
}

/// The same for single Pods. AWS's driver ends some Mountpoint Pods minutes after their last workload; meanwhile they do nothing.
pub fn wait_a_moment_until_quiet(cluster: &Cluster) {
    let _ = wait_patiently_until(Instant::now() + MOMENT, || is_quiet(cluster));
}

fn is_quiet(cluster: &Cluster) -> bool {
    let mountpoint_pods = |driver: &InstalledDriver| {
        let pods = cluster.get(&format!("/api/v1/namespaces/{}/pods", driver.mountpoint_namespace)).unwrap_or_default();
        pods["items"].as_array().map_or(0, Vec::len)
    };
    [&OURS, &THEIRS].into_iter().all(|it| mountpoint_pods(it) == 0)
        && mount_processes(cluster).is_ok_and(|it| it.is_empty())
}

/// What serves the mounts of the cluster's node, whichever driver made them.
pub fn mount_processes(cluster: &Cluster) -> anyhow::Result<Vec<Pid>> {
    let path = cluster.directory().join("cgroups");
    let cgroups = fs::read_to_string(&path).with_context(|| format!("failed to read {}", path.display()))?;
    let name = cgroups.lines().next().and_then(|it| it.rsplit('/').next()).context("the cluster has no cgroup")?;
    let mut found = footprint::in_cgroup(&format!("/{name}/"));
    found.retain(|it| MOUNT_PROGRAMS.contains(&footprint::program(*it).as_str()));
    Ok(found)
}

/// Processes of the containers of a driver's node plugin, by the names of the containers.
pub fn node_plugin_processes(cluster: &Cluster, driver: &InstalledDriver) -> anyhow::Result<Vec<(String, Vec<Pid>)>> {
    let pods = cluster.get(&format!("/api/v1/namespaces/{}/pods", driver.namespace)).context("there are no Pods")?;
    let is_node_plugin = |it: &&Value| it["metadata"]["name"].as_str().is_some_and(|it| it.starts_with("s3-csi-node-"));
    let pods = pods["items"].as_array().into_iter().flatten().filter(is_node_plugin);
    let containers = pods.flat_map(|it| it["status"]["containerStatuses"].as_array().into_iter().flatten());
    containers
        .map(|it| {
            let name = it["name"].as_str().context("a container without a name")?;
            let id = it["containerID"].as_str().and_then(|it| it.rsplit('/').next());
            let processes = footprint::in_cgroup(id.with_context(|| format!("container {name} does not run"))?);
            ensure!(!processes.is_empty(), "container {name} of {} has no process", driver.title);
            Ok((name.to_owned(), processes))
        })
        .collect()
}
