//! One cluster with the earlier driver, a workload that reads and writes all the time, and the upgrade to our chart.

use std::time::{Duration, Instant};

use s3csi_testbed::cluster::{Cluster, ClusterHost, STORE_ADMINISTRATOR, STORE_ENDPOINT};
use s3csi_testbed::earlier_driver::{self, EarlierBuild, EarlierMounter};
use s3csi_testbed::steady_reader::ReaderReport;
use s3csi_testbed::steady_script::{self, SteadyAccess, steady_script};
use s3csi_testbed::wait::wait_patiently_until;
use s3csi_testbed::{environment, image};
use serde_json::{Value, json};

pub const NAMESPACE: &str = "kube-system";
pub const NODE: ClusterHost = ClusterHost::Node(1);

/// Pods run after some seconds on an idle machine, and kubelet publishes again after one or two minutes; CI machines are not idle.
const PATIENCE: Duration = Duration::from_mins(4);

/// Keys that differ from those of the cluster's S3 server, whose owner cannot be changed.
pub const FIRST_KEYS: (&str, &str) = ("first", "first-NeverPrintThis");
pub const SECOND_KEYS: (&str, &str) = ("second", "second-NeverPrintThis");

pub struct World {
    pub cluster: Cluster,
    build: EarlierBuild,
}

/// What a workload does with its volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    ReadOnly,
    ReadWrite,
}

/// A Pod that reads one file and writes new ones for as long as it runs, and notes every error.
pub struct Workload {
    pub name: String,
    pub uid: String,
}

impl World {
    /// The earlier driver runs and kubelet knows it.
    pub fn start(name: &str, mounter: EarlierMounter) -> Self {
        Self::start_build(name, EarlierBuild::Scality, mounter)
    }

    pub fn start_build(name: &str, build: EarlierBuild, mounter: EarlierMounter) -> Self {
        let world = Self::prepare(name, build);
        world.install_earlier(mounter);
        world
    }

    /// Our driver runs, and kubelet knows it.
    pub fn start_ours(name: &str, strategy: &str) -> Self {
        let world = Self::prepare(name, EarlierBuild::Scality);
        let strategy = format!("strategy={strategy}");
        world.cluster.install_driver(NAMESPACE, world.driver(), &["--set", &strategy]).unwrap();
        world
    }

    pub fn driver(&self) -> &'static str {
        self.build.driver_name()
    }

    /// Where both drivers keep what belongs to the driver on a node.
    pub fn plugin_directory(&self) -> String {
        format!("/var/lib/kubelet/plugins/{}", self.driver())
    }

    fn prepare(name: &str, build: EarlierBuild) -> Self {
        let home = tempfile::Builder::new().prefix("s3csi-test-").tempdir_in("/tmp").unwrap();
        let ours = home.path().join("s3csi.tar");
        image::write(&ours).unwrap();
        let [theirs, sidecar] = earlier_driver::write_images(build, home.path()).unwrap();
        let world = Self { cluster: Cluster::start(name, 1).unwrap(), build };
        for archive in [&ours, &theirs, &sidecar] {
            world.cluster.load(archive).unwrap();
        }
        for keys in [FIRST_KEYS, SECOND_KEYS] {
            world.create_account(keys);
        }
        world.write_driver_keys(FIRST_KEYS);
        world
    }

    fn install_earlier(&self, mounter: EarlierMounter) {
        let arguments = earlier_driver::install_arguments(self.build, mounter, NAMESPACE).unwrap();
        self.cluster.helm(&arguments.iter().map(String::as_str).collect::<Vec<_>>()).unwrap();
        self.wait_for_rollout("daemonset/s3-csi-node");
        if mounter == EarlierMounter::Pod {
            self.wait_for_rollout("deployment/s3-csi-controller");
        }
        self.eventually("kubelet knows the earlier driver", || self.is_registered());
    }

    /// Our chart over theirs, as the documents say, and all of ours ready.
    pub fn upgrade(&self, more: &[&str]) {
        let mut arguments = vec!["--reset-values", "--take-ownership"];
        arguments.extend(more);
        // The Secret with the driver's keys is the administrator's; installing writes the cluster's own into it.
        self.cluster.install_driver(NAMESPACE, self.driver(), &arguments).unwrap();
        self.write_driver_keys(FIRST_KEYS);
    }

    /// Our chart, without waiting for its Pods.
    pub fn helm_upgrade(&self, arguments: &[&str]) {
        let chart = environment::workspace().join("charts/s3csi");
        let mut command = vec!["upgrade", "s3csi", chart.to_str().unwrap(), "--namespace", NAMESPACE];
        command.extend(arguments);
        self.cluster.helm(&command).unwrap();
    }

    /// Back to the earlier driver, as it was installed first.
    pub fn roll_back(&self) {
        self.cluster.helm(&["rollback", "s3csi", "1", "--namespace", NAMESPACE]).unwrap();
        self.wait_for_rollout("daemonset/s3-csi-node");
        let controller = format!("/apis/apps/v1/namespaces/{NAMESPACE}/deployments/s3-csi-controller");
        if self.cluster.get(&controller).is_some() {
            self.wait_for_rollout("deployment/s3-csi-controller");
        }
        self.eventually("kubelet knows the earlier driver", || self.is_registered());
    }

    /// New keys of the driver: in its Secret, and its Pods are restarted as that asks for.
    pub fn rotate_driver_keys(&self, keys: (&str, &str)) {
        self.write_driver_keys(keys);
        self.cluster.kubectl(&["rollout", "restart", "--namespace", NAMESPACE, "daemonset/s3-csi-node"]).unwrap();
        self.wait_for_rollout("daemonset/s3-csi-node");
    }

    pub fn write_driver_keys(&self, (access_key, secret_key): (&str, &str)) {
        let secret = json!({
            "apiVersion": "v1", "kind": "Secret", "metadata": { "name": "s3-secret", "namespace": NAMESPACE },
            "stringData": { "access_key_id": access_key, "secret_access_key": secret_key },
        });
        self.cluster.apply(&secret.to_string()).unwrap();
    }

    fn create_account(&self, (access_key, secret_key): (&str, &str)) {
        let user = ["create-user", "--access", access_key, "--secret", secret_key, "--role", "admin"];
        self.cluster.administer_store(STORE_ADMINISTRATOR, &user).unwrap();
    }

    /// A bucket, a volume of it, a claim and a Pod, all of one name; returns when the Pod runs.
    pub fn start_workload(&self, name: &str, access: Access) -> Workload {
        self.cluster.create_bucket(name).unwrap();
        self.cluster.put_object(name, steady_script::SEED, "seed\n").unwrap();
        for object in volume(self.driver(), name) {
            self.cluster.apply(&object.to_string()).unwrap();
        }
        self.start_pod(name, access)
    }

    /// A Pod for a volume that is there.
    pub fn start_pod(&self, name: &str, access: Access) -> Workload {
        self.cluster.apply(&pod(name, access).to_string()).unwrap();
        let is_ready = || {
            let conditions = self.pod(name)["status"]["conditions"].clone();
            conditions.as_array().into_iter().flatten().any(|it| it["type"] == "Ready" && it["status"] == "True")
        };
        self.eventually(&format!("Pod {name} is ready"), is_ready);
        Workload { name: name.to_owned(), uid: self.pod(name)["metadata"]["uid"].as_str().unwrap().to_owned() }
    }

    fn pod(&self, name: &str) -> Value {
        self.cluster.get(&format!("/api/v1/namespaces/default/pods/{name}")).unwrap_or_default()
    }

    /// How often its container was started again.
    pub fn restarts(&self, workload: &Workload) -> u64 {
        self.pod(&workload.name)["status"]["containerStatuses"][0]["restartCount"].as_u64().unwrap_or_default()
    }

    /// Whether the volume answers on the node, whatever the workload's container sees.
    pub fn is_served_on_node(&self, workload: &Workload) -> bool {
        let target =
            format!("/var/lib/kubelet/pods/{}/volumes/kubernetes.io~csi/{}/mount", workload.uid, workload.name);
        self.on_node(&format!("cat {target}/{} 2>/dev/null || true", steady_script::SEED)) == "seed\n"
    }

    /// The workload's process ends, and kubelet has started its container again.
    pub fn restart_container(&self, workload: &Workload) {
        self.run(workload, steady_script::END);
        let is_restarted = || {
            let is_ready = self.pod(&workload.name)["status"]["containerStatuses"][0]["ready"] == true;
            is_ready && 0 < self.restarts(workload)
        };
        self.eventually(&format!("the container of {} is started again", workload.name), is_restarted);
        assert_eq!(self.pod(&workload.name)["metadata"]["uid"], workload.uid.as_str(), "it is the same Pod");
    }

    /// It has read and written on since the last look, and never met an error.
    #[track_caller]
    pub fn check_undisturbed(&self, workload: &Workload) {
        let before = self.report(workload).rounds;
        self.eventually("the workload goes on", || self.report(workload).rounds > before + 3);
        assert_eq!(self.report(workload).errors, Vec::<String>::new(), "the workload met errors");
    }

    /// Every file that the workload has written is in the bucket.
    #[track_caller]
    pub fn check_all_stored(&self, workload: &Workload) {
        let rounds = self.report(workload).rounds;
        let is_stored = |round| self.cluster.object(&workload.name, &steady_script::created(round)).is_some();
        let missing = || (1..=rounds).filter(|it| !is_stored(*it)).collect::<Vec<_>>();
        self.eventually("all files are stored", || missing().is_empty());
    }

    fn report(&self, workload: &Workload) -> ReaderReport {
        ReaderReport::parse(&self.run(workload, steady_script::SHOW_REPORT)).unwrap_or_default()
    }

    #[track_caller]
    pub fn run(&self, workload: &Workload, script: &str) -> String {
        self.cluster.kubectl(&["exec", &workload.name, "--", "sh", "-c", script]).unwrap()
    }

    /// The line of the mount table that the workload's container sees.
    pub fn mount_in_container(&self, workload: &Workload) -> String {
        self.run(workload, "grep ' /data ' /proc/self/mountinfo")
    }

    /// kubelet has published the volume again since, by the driver that runs now.
    pub fn wait_for_republish(&self, workload: &Workload) {
        let published = || {
            let logs = self.cluster.kubectl(&["logs", "--namespace", NAMESPACE, "daemonset/s3-csi-node", "--tail=-1"]);
            logs.is_ok_and(|it| it.lines().any(|it| it.contains("NodePublishVolume") && it.contains(&workload.uid)))
        };
        self.eventually(&format!("{} is published again", workload.name), published);
    }

    /// UIDs of the Mountpoint Pods and the volumes they were made for, sorted.
    pub fn mountpoint_pods(&self) -> Vec<(String, String)> {
        let pods = self.cluster.get("/api/v1/namespaces/mount-s3/pods").unwrap_or_default();
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let of = |it: &Value| {
            let volume = &it["metadata"]["labels"][format!("{}/volume-name", self.driver())];
            (text(&it["metadata"]["uid"]), text(volume))
        };
        let mut pods: Vec<_> = pods["items"].as_array().into_iter().flatten().map(of).collect();
        pods.sort();
        pods
    }

    /// The keys that the engine of an earlier Mountpoint Pod reads.
    pub fn keys_of_mountpoint_pod(&self, uid: &str, volume: &str) -> String {
        let directory = format!("/var/lib/kubelet/pods/{uid}/volumes/kubernetes.io~empty-dir/comm/credentials");
        self.on_node(&format!("cat {directory}/*-{volume}-s3-csi-credentials 2>/dev/null || true"))
    }

    /// Names of the attachments.
    pub fn attachments(&self) -> Vec<String> {
        let found =
            self.cluster.get(&format!("/apis/{}/v2/mountpoints3podattachments", self.driver())).unwrap_or_default();
        let names = found["items"].as_array().into_iter().flatten();
        names.filter_map(|it| it["metadata"]["name"].as_str().map(|it| format!("attachment {it}"))).collect()
    }

    /// Deletes the Pod and returns when its volumes are gone.
    pub fn delete_pod(&self, workload: &Workload) {
        self.cluster.kubectl(&["delete", "pod", &workload.name, "--timeout=180s"]).unwrap();
    }

    /// What a command printed on the node.
    #[track_caller]
    pub fn on_node(&self, script: &str) -> String {
        self.cluster.run(NODE, &["sh", "-c", script]).unwrap()
    }

    /// Units of the node that serve mounts.
    pub fn units(&self) -> Vec<String> {
        let units = self.on_node("systemctl list-units --all --plain --no-legend 'mount-s3-*' | awk '{ print $1 }'");
        units.lines().filter(|it| !it.starts_with("mount-s3-umount-")).map(str::to_owned).collect()
    }

    /// Files with keys in the plugin's directory and below, by name.
    pub fn key_files(&self) -> Vec<String> {
        let directory = self.plugin_directory();
        let find = format!("find {directory} -xdev -type f -name '*s3-csi*' 2>/dev/null || true");
        self.on_node(&find).lines().map(str::to_owned).collect()
    }

    /// No mount, no unit, no key file and no Mountpoint Pod of any driver is left on the node.
    #[track_caller]
    pub fn check_nothing_left(&self) {
        let leftovers = || {
            let mounts = self.on_node("grep -c mountpoint-s3 /proc/self/mountinfo || true");
            let mut found: Vec<String> = Vec::new();
            if mounts.trim() != "0" {
                found.push(format!("{} mounts", mounts.trim()));
            }
            found.extend(self.units());
            found.extend(self.key_files());
            let pods = self.cluster.get("/api/v1/namespaces/mount-s3/pods").unwrap_or_default();
            let names = pods["items"].as_array().into_iter().flatten();
            found.extend(names.filter_map(|it| it["metadata"]["name"].as_str().map(|it| format!("Pod {it}"))));
            found.extend(self.attachments());
            found
        };
        let is_clean = wait_patiently_until(Instant::now() + PATIENCE, || leftovers().is_empty());
        assert!(is_clean, "left: {:#?}\n{}", leftovers(), self.describe());
    }

    #[track_caller]
    pub fn wait_for_rollout(&self, what: &str) {
        let timeout = format!("--timeout={}s", PATIENCE.as_secs());
        let waited = self.cluster.kubectl(&["rollout", "status", "--namespace", NAMESPACE, what, &timeout]);
        if let Err(error) = waited {
            panic!("{error}\n{}", self.describe());
        }
    }

    fn is_registered(&self) -> bool {
        let node = self.cluster.get(&format!("/apis/storage.k8s.io/v1/csinodes/{}", NODE.name())).unwrap_or_default();
        node["spec"]["drivers"].as_array().into_iter().flatten().any(|it| it["name"] == self.driver())
    }

    #[track_caller]
    pub fn eventually(&self, what: &str, condition: impl FnMut() -> bool) {
        let is_met = wait_patiently_until(Instant::now() + PATIENCE, condition);
        assert!(is_met, "waited {PATIENCE:?} in vain: {what}\n{}", self.describe());
    }

    /// All that a person would look at when something does not come about.
    fn describe(&self) -> String {
        let look = |arguments: &[&str]| self.cluster.kubectl(arguments).unwrap_or_else(|it| it.to_string());
        let logs = |what| look(&["logs", "--namespace", NAMESPACE, what, "--all-containers", "--tail=60"]);
        [
            look(&["get", "pods", "--all-namespaces", "--output", "wide"]),
            look(&["describe", "pods", "--namespace", "default"]),
            look(&["get", "events", "--namespace", NAMESPACE]),
            logs("daemonset/s3-csi-node"),
            logs("deployment/s3-csi-controller"),
        ]
        .join("\n")
    }
}

/// As users of the earlier driver write them: where the store is, is an option of each volume.
fn volume(driver: &str, name: &str) -> [Value; 2] {
    let endpoint = format!("endpoint-url {STORE_ENDPOINT}");
    let options = json!(["allow-delete", "allow-overwrite", "region us-east-1", "force-path-style", endpoint]);
    let volume = json!({
        "apiVersion": "v1", "kind": "PersistentVolume", "metadata": { "name": name },
        "spec": {
            "capacity": { "storage": "1Gi" }, "accessModes": ["ReadWriteMany"], "storageClassName": "",
            "claimRef": { "namespace": "default", "name": name }, "mountOptions": options,
            "csi": { "driver": driver, "volumeHandle": name, "volumeAttributes": { "bucketName": name } },
        },
    });
    let claim = json!({
        "apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": { "name": name, "namespace": "default" },
        "spec": {
            "accessModes": ["ReadWriteMany"], "storageClassName": "", "volumeName": name,
            "resources": { "requests": { "storage": "1Gi" } },
        },
    });
    [volume, claim]
}

fn pod(name: &str, access: Access) -> Value {
    let script = match access {
        Access::ReadOnly => steady_script("/data", SteadyAccess::Read),
        // The earlier driver cannot append.
        Access::ReadWrite => steady_script("/data", SteadyAccess::Create),
    };
    let is_read_only = access == Access::ReadOnly;
    json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": { "name": name, "namespace": "default" },
        "spec": {
            "terminationGracePeriodSeconds": 1,
            "nodeSelector": { "kubernetes.io/hostname": NODE.name() },
            "containers": [{
                "name": "main", "image": "localhost/busybox:1", "imagePullPolicy": "Never",
                "command": ["sh", "-c", script],
                "volumeMounts": [{ "name": "data", "mountPath": "/data" }],
            }],
            "volumes": [{ "name": "data", "persistentVolumeClaim": { "claimName": name, "readOnly": is_read_only } }],
        },
    })
}
