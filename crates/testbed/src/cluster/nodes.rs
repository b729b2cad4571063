//! A whole cluster: the control plane, nodes with systemd, containerd and kubelet, and an S3 server that all Pods reach. It is
//! made by scripts/cluster.sh, which people use too.

use std::fs;
use std::io::{self, BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};

use serde_json::Value;

use crate::environment::{self, MissingProgram};
use crate::http;
use crate::process::command;
use crate::versitygw;

use super::audit::{self, AuditEvent};
use super::kube::{self, KubectlError};

/// The cluster's S3 server, as Pods reach it.
pub const STORE_ENDPOINT: &str = "http://10.200.0.1:7070";

/// The keys of its administrator.
pub const STORE_ADMINISTRATOR: (&str, &str) = ("testbed", "testbed-NeverPrintThis");

/// A running cluster. Dropping it takes it down; so does the end of this process, however it comes.
pub struct Cluster {
    directory: PathBuf,
    tools: PathBuf,
    script: Child,
    lifeline: Option<ChildStdin>,
}

/// Where something runs: beside the control plane, or on a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClusterHost {
    ControlPlane,
    /// Counted from 1.
    Node(usize),
}

/// What to do with a service of the cluster, such as `kubelet` or `apiserver`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ServiceAction {
    Start,
    Stop,
    Restart,
    /// With SIGKILL; it is started again by itself.
    Kill,
}

#[derive(Debug, thiserror::Error)]
pub enum ClusterError {
    #[error("a program of the cluster is missing")]
    Missing {
        #[source]
        cause: MissingProgram,
    },
    #[error("failed to prepare {path:?} for a cluster")]
    Prepare {
        path: PathBuf,
        #[source]
        cause: io::Error,
    },
    #[error("failed to run scripts/cluster.sh {arguments}")]
    Run {
        arguments: String,
        #[source]
        cause: io::Error,
    },
    #[error("scripts/cluster.sh {arguments}: {output}")]
    Failed { arguments: String, output: String },
    #[error("the cluster did not come up; scripts/cluster.sh said why")]
    NotUp,
}

impl Cluster {
    /// `name` is for humans who look for the logs. Progress goes to standard error.
    pub fn start(name: &str, nodes: usize) -> Result<Self, ClusterError> {
        let kube = environment::kube().map_err(|cause| ClusterError::Missing { cause })?;
        let tools = kube.parent().unwrap_or(Path::new("/")).to_owned();
        let failed = |cause| ClusterError::Prepare { path: "/tmp/s3csi-cluster-…".into(), cause };
        let prefix = "s3csi-cluster-";
        let made = tempfile::Builder::new().prefix(prefix).rand_bytes(6).tempdir_in("/tmp").map_err(failed)?;
        let directory = made.keep();
        let mut command = script(&tools);
        command.arg("hold").arg(&directory).arg(nodes.to_string());
        if let (Some(logs), Some(own)) = (environment::log_directory(), directory.file_name()) {
            command.env("CLUSTER_LOGS", logs.join(format!("{name}-{}", own.to_string_lossy())));
        }
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let run = |cause| ClusterError::Run { arguments: "hold".to_owned(), cause };
        let mut script = command.spawn().map_err(run)?;
        let lifeline = script.stdin.take();
        let output = script.stdout.take();
        let cluster = Self { directory, tools, script, lifeline };
        let said = output.map(|it| BufReader::new(it).lines().map_while(Result::ok));
        match said.into_iter().flatten().find(|it| it == "ready") {
            Some(_) => Ok(cluster),
            None => Err(ClusterError::NotUp),
        }
    }

    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// The process that everything of the cluster ends with.
    pub fn script(&self) -> &Child {
        &self.script
    }

    /// kubectl's output, as the cluster's administrator.
    pub fn kubectl(&self, arguments: &[&str]) -> Result<String, KubectlError> {
        kube::run(self.kubectl_command(), arguments, None)
    }

    /// Makes or changes objects: `kubectl apply`.
    pub fn apply(&self, yaml: &str) -> Result<String, KubectlError> {
        kube::run(self.kubectl_command(), &["apply", "--filename", "-"], Some(yaml))
    }

    /// Removes objects and waits until they are gone: `kubectl delete`.
    pub fn delete(&self, yaml: &str) -> Result<String, KubectlError> {
        kube::run(self.kubectl_command(), &["delete", "--ignore-not-found", "--filename", "-"], Some(yaml))
    }

    /// What a command printed that ran in the namespaces of a node or of the control plane.
    pub fn run(&self, place: ClusterHost, program: &[&str]) -> Result<String, ClusterError> {
        let mut arguments = vec![place.name()];
        arguments.extend(program.iter().map(|it| (*it).to_owned()));
        self.call("on", &arguments)
    }

    /// A command that runs in the namespaces of a node or of the control plane; the program is its first argument. What it starts ends
    /// with the cluster at the latest.
    pub fn command_on(&self, place: ClusterHost) -> Command {
        let mut command = script(&self.tools);
        command.arg("on").arg(&self.directory).arg(place.name());
        command
    }

    /// Gives an image to every node.
    pub fn load(&self, image: &Path) -> Result<(), ClusterError> {
        self.call("load", &[image.to_string_lossy().into_owned()]).map(drop)
    }

    /// Installs the driver with Helm, from the chart, with the keys of the cluster's S3 server, and waits until kubelets know it. Its
    /// image has to be loaded before. One namespace holds one driver. `more` are arguments for `helm upgrade --install`.
    pub fn install_driver(&self, namespace: &str, driver: &str, more: &[&str]) -> Result<(), ClusterError> {
        let mut arguments = vec![namespace.to_owned(), driver.to_owned()];
        arguments.extend(more.iter().map(|it| (*it).to_owned()));
        self.call("install", &arguments).map(drop)
    }

    /// Helm's output, as the cluster's administrator.
    pub fn helm(&self, arguments: &[&str]) -> Result<String, ClusterError> {
        self.call("helm", &arguments.iter().map(|it| (*it).to_owned()).collect::<Vec<_>>())
    }

    /// What the API server answers to a GET, as the cluster's administrator; nothing if it has no such thing. Much cheaper
    /// than a kubectl, so this is what to wait with.
    pub fn get(&self, path: &str) -> Option<Value> {
        serde_json::from_str(&self.get_text(path)?).ok()
    }

    /// The same for what is not JSON: logs of Pods, and metrics of kubelets.
    pub fn get_text(&self, path: &str) -> Option<String> {
        let answer = http::get_over(&self.directory.join("api.sock"), path).ok()?;
        (answer.status == 200).then_some(answer.body)
    }

    /// Makes an object, as the cluster's administrator, within milliseconds. `path` is that of the list of such objects.
    pub fn create(&self, path: &str, object: &Value) -> Result<(), ClusterError> {
        let arguments = format!("POST {path}");
        let answer = http::post_over(&self.directory.join("api.sock"), path, &object.to_string())
            .map_err(|cause| ClusterError::Run { arguments: arguments.clone(), cause })?;
        if answer.status == 201 { Ok(()) } else { Err(ClusterError::Failed { arguments, output: answer.body }) }
    }

    pub fn service(&self, place: ClusterHost, change: ServiceAction, name: &str) -> Result<(), ClusterError> {
        let change = match change {
            ServiceAction::Start => "start",
            ServiceAction::Stop => "stop",
            ServiceAction::Restart => "restart",
            ServiceAction::Kill => "kill",
        };
        self.call("service", &[place.name(), change.to_owned(), name.to_owned()]).map(drop)
    }

    /// Switches a node off.
    pub fn kill_node(&self, number: usize) -> Result<(), ClusterError> {
        self.call("kill-node", &[number.to_string()]).map(drop)
    }

    /// Switches a node on that was killed, with the same disk.
    pub fn start_node(&self, number: usize) -> Result<(), ClusterError> {
        self.call("start-node", &[number.to_string()]).map(drop)
    }

    /// Everything that the API server was asked so far, by whomever.
    pub fn audit(&self) -> Vec<AuditEvent> {
        audit::read(&self.directory.join("logs/audit.log"))
    }

    /// A bucket of the cluster's S3 server.
    pub fn create_bucket(&self, name: &str) -> Result<(), ClusterError> {
        let directory = self.bucket(name);
        fs::create_dir_all(&directory).map_err(|cause| ClusterError::Prepare { path: directory, cause })
    }

    /// Makes an object, behind the server's back.
    pub fn put_object(&self, bucket: &str, key: &str, content: &str) -> Result<(), ClusterError> {
        let path = self.bucket(bucket).join(key);
        versitygw::write_object(&path, content.as_bytes()).map_err(|cause| ClusterError::Prepare { path, cause })
    }

    /// An object's content, read behind the server's back.
    pub fn object(&self, bucket: &str, key: &str) -> Option<Vec<u8>> {
        fs::read(self.bucket(bucket).join(key)).ok()
    }

    /// Runs a command of the S3 server's administration (`versitygw admin …`) with the keys of one of its users.
    pub fn administer_store(
        &self,
        (access_key, secret_key): (&str, &str),
        arguments: &[&str],
    ) -> Result<String, ClusterError> {
        let program = environment::tool("versitygw").map_err(|cause| ClusterError::Missing { cause })?;
        let keys = [format!("ADMIN_ACCESS_KEY={access_key}"), format!("ADMIN_SECRET_KEY={secret_key}")];
        let program = program.to_string_lossy();
        let admin =
            ["env", &keys[0], &keys[1], &program, "admin", "--allow-insecure", "--endpoint-url", STORE_ENDPOINT];
        self.run(ClusterHost::ControlPlane, &[&admin, arguments].concat())
    }

    /// Where the objects of a bucket lie, as plain files.
    pub fn bucket(&self, name: &str) -> PathBuf {
        self.directory.join("s3/buckets").join(name)
    }

    fn kubectl_command(&self) -> Command {
        let mut command = script(&self.tools);
        command.arg("kubectl").arg(&self.directory);
        command
    }

    fn call(&self, what: &str, arguments: &[String]) -> Result<String, ClusterError> {
        let said = format!("{what} {}", arguments.join(" "));
        let output = script(&self.tools).arg(what).arg(&self.directory).args(arguments).output();
        let output = output.map_err(|cause| ClusterError::Run { arguments: said.clone(), cause })?;
        if output.status.success() {
            return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
        }
        let text = [output.stdout, output.stderr].concat();
        Err(ClusterError::Failed { arguments: said, output: String::from_utf8_lossy(&text).into_owned() })
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        drop(self.lifeline.take());
        let _ = self.script.wait();
    }
}

impl ClusterHost {
    /// `cp`, `node1`, …
    pub fn name(self) -> String {
        match self {
            Self::ControlPlane => "cp".to_owned(),
            Self::Node(number) => format!("node{number}"),
        }
    }
}

fn script(tools: &Path) -> Command {
    let mut command = command(&environment::workspace().join("scripts/cluster.sh"));
    command.env("S3CSI_TOOLS", tools);
    command
}
