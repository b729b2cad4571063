//! The product on one node: a mounter and a node plugin as real processes, in a fixture's directory.

use std::ffi::OsString;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};

use crate::environment::{self, MissingProgram};
use crate::fixture::Fixture;
use crate::kubelet::Kubelet;
use crate::process::{Process, ProcessError, command};
use crate::wait::wait_for_start;
use s3csi_s3_server::store::{Account, Store};

/// The user the mounter runs as, as in its Pod.
pub const MOUNTER_USER: u32 = 1000;

pub const DRIVER_NAME: &str = "s3.csi.scality.com";

#[derive(Debug, thiserror::Error)]
pub enum PluginError {
    #[error(transparent)]
    Missing(MissingProgram),
    #[error(transparent)]
    Start(ProcessError),
    #[error("failed to prepare {path:?}")]
    Prepare {
        path: PathBuf,
        #[source]
        cause: std::io::Error,
    },
}

/// Where a node's things are, and how its programs are started. Starting is explicit: tests kill and restart them.
pub struct Plugin<'a> {
    fixture: &'a Fixture,
    kubelet_root: PathBuf,
    served: StoreSettings,
    strategy: PluginStrategy,
    entry: Vec<OsString>,
    node_name: String,
}

/// How the node plugin runs engines.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PluginStrategy {
    /// The API server of this kubeconfig says which Mountpoint Pod serves a workload.
    Pod {
        kubeconfig: PathBuf,
    },
    Daemon,
    Systemd,
}

/// The store that the driver is configured for.
pub struct StoreSettings {
    pub endpoint_url: String,
    pub region: String,
    /// The driver's own keys, if it has any.
    pub account: Option<Account>,
}

impl<'a> Plugin<'a> {
    /// For the store's default account as the driver's.
    pub fn new(fixture: &'a Fixture, store: &dyn Store) -> Result<Self, PluginError> {
        let served = StoreSettings {
            endpoint_url: store.endpoint(),
            region: store.region().to_owned(),
            account: Some(store.account().clone()),
        };
        Self::at(fixture, served)
    }

    pub fn at(fixture: &'a Fixture, served: StoreSettings) -> Result<Self, PluginError> {
        let kubelet_root = fixture.create_directory("kubelet");
        let node_name = "node-1".to_owned();
        let plugin =
            Self { fixture, kubelet_root, served, strategy: PluginStrategy::Daemon, node_name, entry: Vec::new() };
        let mounter = plugin.mounter_directory();
        let prepare = |cause| PluginError::Prepare { path: mounter.clone(), cause };
        std::fs::create_dir_all(plugin.kubelet_root.join("plugins_registry")).map_err(prepare)?;
        std::fs::create_dir_all(&mounter).map_err(prepare)?;
        std::os::unix::fs::chown(&mounter, Some(MOUNTER_USER), Some(MOUNTER_USER)).map_err(prepare)?;
        Ok(plugin)
    }

    /// Engines are run by systemd from the next start on; no mounter is needed then.
    pub fn set_strategy(&mut self, strategy: PluginStrategy) {
        self.strategy = strategy;
    }

    pub fn strategy(&self) -> &PluginStrategy {
        &self.strategy
    }

    /// A program and its arguments that runs the node plugin from its next start on: the way into a container.
    pub fn set_entry(&mut self, entry: Vec<OsString>) {
        self.entry = entry;
    }

    /// The node's name from the next start on; nodes that share an API server need different ones.
    pub fn set_node_name(&mut self, name: &str) {
        name.clone_into(&mut self.node_name);
    }

    /// The driver's own keys from its next start on.
    pub fn set_account(&mut self, account: Option<Account>) {
        self.served.account = account;
    }

    pub fn kubelet_root(&self) -> &Path {
        &self.kubelet_root
    }

    pub fn mounter_directory(&self) -> PathBuf {
        self.directory().join("mounter")
    }

    /// Sources are mounted in here.
    pub fn sources(&self) -> PathBuf {
        self.directory().join("mnt")
    }

    pub fn csi_socket(&self) -> PathBuf {
        self.directory().join("csi.sock")
    }

    pub fn registration_socket(&self) -> PathBuf {
        self.kubelet_root.join(format!("plugins_registry/s3csi@{DRIVER_NAME}-reg.sock"))
    }

    /// Strategy systemd: one directory of credentials per target.
    pub fn credentials(&self) -> PathBuf {
        self.directory().join("systemd")
    }

    /// Strategy systemd: one directory of staged files per target.
    pub fn stages(&self) -> PathBuf {
        self.directory().join("systemd-stage")
    }

    /// A directory that a mounter's engines may stage files in, as a volume of its Pod.
    pub fn make_stage_directory(&self, name: &str) -> Result<PathBuf, PluginError> {
        let directory = self.fixture.create_directory(name);
        let prepare = |cause| PluginError::Prepare { path: directory.clone(), cause };
        std::os::unix::fs::chown(&directory, Some(MOUNTER_USER), Some(MOUNTER_USER)).map_err(prepare)?;
        Ok(directory)
    }

    /// What a Mountpoint Pod shares with the node.
    pub fn communication_directory(&self, pod_uid: &str) -> PathBuf {
        self.kubelet_root.join(format!("pods/{pod_uid}/volumes/kubernetes.io~empty-dir/comm"))
    }

    fn directory(&self) -> PathBuf {
        self.kubelet_root.join("plugins").join(DRIVER_NAME)
    }

    pub fn kubelet(&self) -> Kubelet {
        Kubelet::new(&self.kubelet_root, &self.csi_socket())
    }

    /// Starts the mounter, as an ordinary user, and waits until it listens.
    pub fn start_mounter(&self) -> Result<Process, PluginError> {
        self.start_mounter_with(&[])
    }

    pub fn start_mounter_with(&self, arguments: &[&str]) -> Result<Process, PluginError> {
        let program = self.for_the_mounter("s3csi-mounter")?;
        let engine = self.for_the_mounter("mount-s3")?;
        let mut command = command(&program);
        command.uid(MOUNTER_USER).gid(MOUNTER_USER);
        command.arg("--directory").arg(self.mounter_directory()).arg("--engine").arg(engine).args(["--limit", "1000"]);
        command.args(arguments);
        let process = self.fixture.start("mounter", &mut command).map_err(PluginError::Start)?;
        let socket = self.mounter_directory().join("mount.sock");
        wait_for_start("the mounter listens", || {
            assert!(process.is_running(), "the mounter ended: {process}");
            std::os::unix::net::UnixStream::connect(&socket).is_ok()
        });
        Ok(process)
    }

    /// Makes the shared directory of a Mountpoint Pod as kubelet does: any user may write, what is in it belongs to the Pod's group.
    pub fn make_communication_directory(&self, pod_uid: &str) -> Result<PathBuf, PluginError> {
        let directory = self.communication_directory(pod_uid);
        let prepare = |cause| PluginError::Prepare { path: directory.clone(), cause };
        std::fs::create_dir_all(&directory).map_err(prepare)?;
        std::os::unix::fs::chown(&directory, None, Some(MOUNTER_USER)).map_err(prepare)?;
        std::fs::set_permissions(&directory, std::fs::Permissions::from_mode(0o2777)).map_err(prepare)?;
        Ok(directory)
    }

    /// Starts the mounter of a Mountpoint Pod, which sees nothing but its directory, and waits until it listens.
    pub fn start_mounter_of_pod(&self, pod_uid: &str, arguments: &[&str]) -> Result<Process, PluginError> {
        let directory = self.communication_directory(pod_uid);
        let program = self.for_the_mounter("s3csi-mounter")?;
        let engine = self.for_the_mounter("mount-s3")?;
        let mut command = command(&program);
        command.uid(MOUNTER_USER).gid(MOUNTER_USER).current_dir(&directory);
        command.arg("--directory").arg(&directory).arg("--engine").arg(engine).args(arguments);
        let process = self.fixture.start("mountpoint-pod", &mut command).map_err(PluginError::Start)?;
        wait_for_start("the mounter of the Mountpoint Pod listens", || {
            assert!(process.is_running(), "the mounter ended: {process}");
            process.log_contains("mounter is listening")
        });
        Ok(process)
    }

    /// A program where the mounter's user can reach it; what cargo builds is often below a home directory that he cannot enter.
    pub fn for_the_mounter(&self, name: &str) -> Result<PathBuf, PluginError> {
        let built = environment::product(name).map_err(PluginError::Missing)?;
        let path = self.fixture.create_directory("bin").join(name);
        if !path.exists() {
            // A second name costs nothing, but there is none across file systems.
            std::fs::hard_link(&built, &path)
                .or_else(|_| std::fs::copy(&built, &path).map(drop))
                .map_err(|cause| PluginError::Prepare { path: path.clone(), cause })?;
        }
        Ok(path)
    }

    /// Starts the node plugin and waits until its socket answers.
    pub fn start_node(&self) -> Result<Process, PluginError> {
        self.start_node_with(&[])
    }

    pub fn start_node_with(&self, arguments: &[&str]) -> Result<Process, PluginError> {
        let program = environment::product("s3csi").map_err(PluginError::Missing)?;
        let mut words = self.entry.iter().map(OsString::as_os_str).chain([program.as_os_str()]);
        let mut command = command(words.next().map_or(program.as_path(), Path::new));
        command.args(words);
        let strategy = match &self.strategy {
            PluginStrategy::Pod { kubeconfig } => {
                command.env("KUBECONFIG", kubeconfig);
                // Mounters run in their directories and not in containers.
                command.env("MOUNTER_VIEW", ".");
                "pod"
            }
            PluginStrategy::Daemon => "daemon",
            PluginStrategy::Systemd => {
                command.env("MOUNT_S3_PATH", self.for_the_mounter("mount-s3")?);
                "systemd"
            }
        };
        command
            .args(["node", "--strategy", strategy, "--v", "4"])
            .arg("--kubelet-path")
            .arg(&self.kubelet_root)
            .args(arguments)
            .env("CSI_NODE_NAME", &self.node_name)
            .env("AWS_ENDPOINT_URL", &self.served.endpoint_url)
            .env("AWS_REGION", &self.served.region);
        if let Some(account) = &self.served.account {
            command.env("AWS_ACCESS_KEY_ID", &account.access_key).env("AWS_SECRET_ACCESS_KEY", &account.secret_key);
        }
        let process = self.fixture.start("node", &mut command).map_err(PluginError::Start)?;
        // It registers last, once everything else answers.
        let is_registering = !arguments.contains(&"off");
        let socket = if is_registering { self.registration_socket() } else { self.csi_socket() };
        wait_for_start("the node plugin listens", || {
            assert!(process.is_running(), "the node plugin ended: {process}");
            std::os::unix::net::UnixStream::connect(&socket).is_ok()
        });
        Ok(process)
    }
}
