//! etcd and an API server on loopback ports of their own, ready in seconds. There is no scheduler, no kubelet and no
//! controller: a test plays those itself, object by object.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::environment::{self, MissingProgram};
use crate::process::{Process, ProcessError, command};
use crate::wait::wait_patiently_until;

use super::audit::{self, AuditEvent};
use super::kube::{self, KubectlError};
use super::lifetime::{ClusterDirectory, killed_with_thread, on_lasting_thread};
use super::ports::free_port;

/// An idle machine needs four seconds; CI machines are not idle.
const READY_DEADLINE: Duration = Duration::from_mins(2);

/// Another program may take a chosen port before ours does.
const ATTEMPTS: usize = 3;

/// A running control plane. Dropping it ends it; a process that keeps it in a static need not care.
pub struct ControlPlane {
    // Fields are dropped in this order: first those who write into the directory.
    api_server: Mutex<Option<Process>>,
    _etcd: Process,
    program: PathBuf,
    logs: PathBuf,
    ports: Ports,
    directory: ClusterDirectory,
}

#[derive(Clone, Copy)]
struct Ports {
    api_server: u16,
    etcd: u16,
    etcd_peer: u16,
}

#[derive(Debug, thiserror::Error)]
pub enum ControlPlaneError {
    #[error("Kubernetes is missing")]
    Missing {
        #[source]
        cause: MissingProgram,
    },
    #[error("failed to prepare {path:?} for a control plane")]
    Prepare {
        path: PathBuf,
        #[source]
        cause: io::Error,
    },
    #[error("failed to make certificates: {output}")]
    Certificates { output: String },
    #[error("failed to run a part of the control plane")]
    Run {
        #[source]
        cause: ProcessError,
    },
    #[error("the thread that starts programs has ended")]
    NoThread,
    #[error("the API server was not ready after {READY_DEADLINE:?}: {output}")]
    NotReady { output: String },
}

impl ControlPlane {
    /// `name` is for humans who look for the logs.
    pub fn start(name: &str) -> Result<Self, ControlPlaneError> {
        let program = environment::kube().map_err(|cause| ControlPlaneError::Missing { cause })?;
        let mut last = None;
        for _ in 0..ATTEMPTS {
            match Self::attempt(name, &program) {
                Err(ControlPlaneError::NotReady { output }) => last = Some(ControlPlaneError::NotReady { output }),
                outcome => return outcome,
            }
        }
        Err(last.unwrap_or(ControlPlaneError::NoThread))
    }

    fn attempt(name: &str, program: &Path) -> Result<Self, ControlPlaneError> {
        let directory =
            ClusterDirectory::new().map_err(|cause| ControlPlaneError::Prepare { path: "/tmp".into(), cause })?;
        let prepare = |path: &Path, cause| ControlPlaneError::Prepare { path: path.to_owned(), cause };
        let logs = match (environment::log_directory(), directory.path().file_name()) {
            (Some(logs), Some(own)) => logs.join(format!("{name}-{}", own.to_string_lossy())),
            _ => directory.path().join("logs"),
        };
        fs::create_dir_all(&logs).map_err(|cause| prepare(&logs, cause))?;
        let policy = directory.path().join(AUDIT_POLICY);
        fs::write(&policy, audit::POLICY).map_err(|cause| prepare(&policy, cause))?;
        let port = || free_port().map_err(|cause| ControlPlaneError::Prepare { path: "127.0.0.1".into(), cause });
        let ports = Ports { api_server: port()?, etcd: port()?, etcd_peer: port()? };
        write_certificates(program, &directory.path().join("pki"), &url(ports.api_server))?;
        let etcd = start(&logs, "etcd", etcd_command(program, directory.path(), ports))?;
        let api_server = Mutex::new(None);
        let control_plane = Self { api_server, _etcd: etcd, program: program.to_owned(), logs, ports, directory };
        control_plane.start_api_server()?;
        Ok(control_plane)
    }

    /// Where the API server is: `https://127.0.0.1:PORT`.
    pub fn server(&self) -> String {
        url(self.ports.api_server)
    }

    /// A file with all that a client needs to act as the cluster's administrator.
    pub fn kubeconfig(&self) -> PathBuf {
        self.directory.path().join("pki/admin.kubeconfig")
    }

    pub fn logs(&self) -> &Path {
        &self.logs
    }

    /// Everything that the API server was asked so far, by whomever.
    pub fn audit(&self) -> Vec<AuditEvent> {
        audit::read(&self.logs.join(AUDIT_LOG))
    }

    /// kubectl's output, as the cluster's administrator.
    pub fn kubectl(&self, arguments: &[&str]) -> Result<String, KubectlError> {
        kube::run(self.kubectl_command(), arguments, None)
    }

    /// Makes or changes objects: `kubectl apply`.
    pub fn apply(&self, yaml: &str) -> Result<String, KubectlError> {
        kube::run(self.kubectl_command(), &["apply", "--server-side", "--filename", "-"], Some(yaml))
    }

    /// Starts the API server unless it runs, and waits until it is ready. Objects and addresses are those of before.
    pub fn start_api_server(&self) -> Result<(), ControlPlaneError> {
        let mut api_server = self.api_server.lock().unwrap_or_else(PoisonError::into_inner);
        if api_server.as_ref().is_some_and(Process::is_running) {
            return Ok(());
        }
        let command = api_server_command(&self.program, self.directory.path(), &self.logs, self.ports);
        let process = start(&self.logs, "kube-apiserver", command)?;
        let is_ready = || {
            self.kubectl(&["get", "--raw", "/readyz"]).is_ok() && self.kubectl(&["get", "namespace", "default"]).is_ok()
        };
        let deadline = Instant::now() + READY_DEADLINE;
        let _ = wait_patiently_until(deadline, || !process.is_running() || is_ready());
        if !process.is_running() || deadline <= Instant::now() {
            return Err(ControlPlaneError::NotReady { output: last_lines(&process.errors()) });
        }
        *api_server = Some(process);
        Ok(())
    }

    /// Ends the API server with SIGKILL: every watch is cut, every new connection refused.
    pub fn kill_api_server(&self) {
        drop(self.api_server.lock().unwrap_or_else(PoisonError::into_inner).take());
    }

    /// Runs a program beside the control plane. It ends when its value is dropped, and with this process in any case.
    pub fn run(&self, name: &'static str, program: &Path, arguments: &[String]) -> Result<Process, ControlPlaneError> {
        let mut command = killed_with_thread(program);
        command.args(arguments);
        start(&self.logs, name, command)
    }

    pub fn restart_api_server(&self) -> Result<(), ControlPlaneError> {
        self.kill_api_server();
        self.start_api_server()
    }

    fn kubectl_command(&self) -> Command {
        let mut kubectl = command(&self.program);
        kubectl.arg("kubectl").arg("--kubeconfig").arg(self.kubeconfig());
        // It would look for a home directory otherwise.
        kubectl.env("KUBECACHEDIR", self.directory.path().join("kubectl"));
        kubectl
    }
}

const AUDIT_POLICY: &str = "audit-policy.yaml";
const AUDIT_LOG: &str = "audit.log";

fn url(port: u16) -> String {
    format!("https://127.0.0.1:{port}")
}

fn start(logs: &Path, name: &'static str, mut command: Command) -> Result<Process, ControlPlaneError> {
    let logs = logs.to_owned();
    on_lasting_thread(move || Process::start(&logs, name, &mut command))
        .ok_or(ControlPlaneError::NoThread)?
        .map_err(|cause| ControlPlaneError::Run { cause })
}

fn write_certificates(program: &Path, directory: &Path, server: &str) -> Result<(), ControlPlaneError> {
    let output = command(program).arg("pki").arg(directory).arg(server).output();
    let output = output.map_err(|cause| ControlPlaneError::Prepare { path: directory.to_owned(), cause })?;
    let said = || String::from_utf8_lossy(&output.stderr).into_owned();
    if output.status.success() { Ok(()) } else { Err(ControlPlaneError::Certificates { output: said() }) }
}

fn etcd_command(program: &Path, directory: &Path, ports: Ports) -> Command {
    let mut command = killed_with_thread(program);
    let client = format!("http://127.0.0.1:{}", ports.etcd);
    let peer = format!("http://127.0.0.1:{}", ports.etcd_peer);
    command.arg("etcd").arg("--data-dir").arg(directory.join("etcd"));
    command.args(["--listen-client-urls", &client, "--advertise-client-urls", &client, "--listen-peer-urls", &peer]);
    // What a crash of the machine would lose is gone with the test anyway.
    command.args(["--unsafe-no-fsync", "--log-level", "warn"]);
    command
}

fn api_server_command(program: &Path, directory: &Path, logs: &Path, ports: Ports) -> Command {
    let mut command = killed_with_thread(program);
    let certificate = |name: &str| directory.join("pki").join(name);
    let etcd = format!("http://127.0.0.1:{}", ports.etcd);
    command.args(["kube-apiserver", "--etcd-servers", &etcd]);
    command.args(["--bind-address", "127.0.0.1", "--secure-port", &ports.api_server.to_string()]);
    // An address of this machine's network would be asked for otherwise, and there may be none.
    command.args(["--advertise-address", "127.0.0.1", "--endpoint-reconciler-type", "none"]);
    command.args(["--service-cluster-ip-range", "10.96.0.0/16", "--authorization-mode", "Node,RBAC"]);
    // No controller creates service accounts here, and Pods would wait for theirs for ever.
    command.args(["--disable-admission-plugins", "ServiceAccount", "--allow-privileged=true"]);
    command.arg("--client-ca-file").arg(certificate("ca.crt"));
    command.arg("--tls-cert-file").arg(certificate("apiserver.crt"));
    command.arg("--tls-private-key-file").arg(certificate("apiserver.key"));
    command.args(["--service-account-issuer", "https://kubernetes.default.svc.cluster.local"]);
    command.arg("--service-account-key-file").arg(certificate("sa.key"));
    command.arg("--service-account-signing-key-file").arg(certificate("sa.key"));
    command.arg("--cert-dir").arg(certificate(""));
    command.arg("--audit-policy-file").arg(directory.join(AUDIT_POLICY));
    command.arg("--audit-log-path").arg(logs.join(AUDIT_LOG));
    command
}

/// Enough to see why a program ended.
fn last_lines(text: &str) -> String {
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(20)..].join("\n")
}
