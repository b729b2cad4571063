//! Volumes, and Pods that use them.

use serde_json::{Value, json};

use super::{CLUSTER, DRIVER, NODE, wait_for_pod};
use s3csi_testbed::cluster::ClusterHost;

/// A bucket, a static volume for it and a claim, all of one name.
pub struct Volume<'a> {
    pub name: &'a str,
    pub driver: &'a str,
    pub access_mode: &'a str,
    pub options: &'a [&'a str],
    /// Members of `spec.csi.volumeAttributes` beside the bucket's name.
    pub attributes: &'a [(&'a str, &'a str)],
    /// With keys of its own, in a Secret in namespace `default`.
    pub secret: Option<&'a str>,
}

impl<'a> Volume<'a> {
    /// With which everything may be done, and whose changes by others are seen at once.
    pub fn new(name: &'a str) -> Self {
        let options = &["allow-delete", "allow-overwrite", "metadata-ttl 0"];
        Self { name, driver: DRIVER, access_mode: "ReadWriteMany", options, attributes: &[], secret: None }
    }

    #[track_caller]
    pub fn create(&self) {
        CLUSTER.create_bucket(self.name).unwrap();
        self.create_without_bucket();
    }

    #[track_caller]
    pub fn create_without_bucket(&self) {
        let list = json!({ "apiVersion": "v1", "kind": "List", "items": self.objects() });
        CLUSTER.apply(&list.to_string()).unwrap();
    }

    /// The `PersistentVolume` and its claim.
    pub fn objects(&self) -> [Value; 2] {
        let Self { name, driver, access_mode, options, attributes, secret } = self;
        let mut csi = json!({ "driver": driver, "volumeHandle": name, "volumeAttributes": { "bucketName": name } });
        for (key, value) in *attributes {
            csi["volumeAttributes"][key] = json!(value);
        }
        if let Some(secret) = secret {
            csi["volumeAttributes"]["authenticationSource"] = json!("secret");
            csi["nodePublishSecretRef"] = json!({ "name": secret, "namespace": "default" });
        }
        let volume = json!({
            "apiVersion": "v1", "kind": "PersistentVolume", "metadata": { "name": name },
            "spec": {
                "capacity": { "storage": "1Gi" }, "accessModes": [access_mode], "storageClassName": "",
                "claimRef": { "namespace": "default", "name": name }, "mountOptions": options, "csi": csi,
            },
        });
        let claim = json!({
            "apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": { "name": name, "namespace": "default" },
            "spec": {
                "accessModes": [access_mode], "storageClassName": "", "volumeName": name,
                "resources": { "requests": { "storage": "1Gi" } },
            },
        });
        [volume, claim]
    }
}

/// A Pod in namespace `default` with a volume at `/data`, which sleeps unless it has a command.
#[derive(Clone)]
pub struct Workload {
    pub name: String,
    pub object: Value,
}

impl Workload {
    pub fn new(name: &str, claim: &str) -> Self {
        let object = json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": { "name": name, "namespace": "default" },
            "spec": {
                "terminationGracePeriodSeconds": 1,
                "nodeSelector": { "kubernetes.io/hostname": NODE.name() },
                "securityContext": {},
                "containers": [{
                    "name": "main", "image": "localhost/busybox:1", "imagePullPolicy": "Never",
                    "volumeMounts": [], "command": ["sleep", "100000"],
                }],
                "volumes": [],
            },
        });
        Self { name: name.to_owned(), object }.with_volume(claim, "/data")
    }

    pub fn with_volume(mut self, claim: &str, path: &str) -> Self {
        let spec = &mut self.object["spec"];
        let volume = json!({ "name": claim, "persistentVolumeClaim": { "claimName": claim } });
        let mount = json!({ "name": claim, "mountPath": path });
        spec["volumes"].as_array_mut().unwrap().push(volume);
        spec["containers"][0]["volumeMounts"].as_array_mut().unwrap().push(mount);
        self
    }

    /// Mounts a volume that it has once more, such as `{"subPath": "part"}`.
    pub fn with_part(mut self, claim: &str, path: &str, how: Value) -> Self {
        let mut mount = how;
        mount["name"] = json!(claim);
        mount["mountPath"] = json!(path);
        self.object["spec"]["containers"][0]["volumeMounts"].as_array_mut().unwrap().push(mount);
        self
    }

    /// Changes how the volume at `/data` is mounted.
    pub fn mounted(mut self, key: &str, value: impl Into<Value>) -> Self {
        self.object["spec"]["containers"][0]["volumeMounts"][0][key] = value.into();
        self
    }

    /// A shell script, after which it sleeps.
    pub fn script(mut self, script: &str) -> Self {
        let command = json!(["sh", "-ec", format!("{script}\nexec sleep 100000")]);
        self.object["spec"]["containers"][0]["command"] = command;
        self
    }

    /// A member of the Pod's security context, such as `fsGroup`.
    pub fn secured(mut self, key: &str, value: u32) -> Self {
        self.object["spec"]["securityContext"][key] = json!(value);
        self
    }

    pub fn on(mut self, place: ClusterHost) -> Self {
        self.object["spec"]["nodeSelector"]["kubernetes.io/hostname"] = json!(place.name());
        self
    }

    /// How long it may take to end.
    pub fn grace(mut self, seconds: u32) -> Self {
        self.object["spec"]["terminationGracePeriodSeconds"] = json!(seconds);
        self
    }

    #[track_caller]
    pub fn create(&self) {
        CLUSTER.apply(&self.object.to_string()).unwrap();
    }

    #[track_caller]
    pub fn start(self) -> Self {
        self.create();
        self.wait_until_it_runs();
        self
    }

    #[track_caller]
    pub fn wait_until_it_runs(&self) {
        wait_for_pod(&CLUSTER, "default", &self.name);
    }

    /// What a script in the Pod printed.
    #[track_caller]
    pub fn run(&self, script: &str) -> String {
        self.try_to_run(script).unwrap()
    }

    /// The same, or what went wrong.
    pub fn try_to_run(&self, script: &str) -> Result<String, String> {
        CLUSTER.kubectl(&["exec", &self.name, "--", "sh", "-ec", script]).map_err(|it| it.to_string())
    }

    /// Returns when the API server has forgotten it: its volumes are gone then.
    #[track_caller]
    pub fn delete(&self) {
        delete_pods(&[self]);
    }
}

/// All at once.
#[track_caller]
pub fn delete_pods(workloads: &[&Workload]) {
    let mut arguments = vec!["delete", "pod", "--timeout=180s"];
    arguments.extend(workloads.iter().map(|it| it.name.as_str()));
    CLUSTER.kubectl(&arguments).unwrap();
}
