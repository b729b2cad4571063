//! `s3csi controller` beside a control plane.

use std::path::{Path, PathBuf};

use anyhow::Context as _;
use kube::config::Kubeconfig;
use serde_json::json;

use super::ControlPlane;
use crate::chart;
use crate::environment::product;
use crate::process::Process;

/// As whom it works, with the rights that the chart grants.
pub const CONTROLLER_ACCOUNT: &str = "system:serviceaccount:kube-system:s3-csi-driver-controller-sa";

/// How one controller is started.
pub struct ControllerOptions<'a> {
    /// For its logs.
    pub name: &'static str,
    pub kubeconfig: &'a Path,
    pub driver: &'a str,
    /// Of Mountpoint Pods.
    pub namespace: &'a str,
    pub flags: &'a [&'a str],
}

impl ControlPlane {
    /// Makes the objects of the chart, and answers with a file that holds the controller's own account.
    pub fn install_controller(&self) -> anyhow::Result<PathBuf> {
        self.apply(&chart::render(&[])?)?;
        let token = self.kubectl(&["create", "token", "--namespace=kube-system", "s3-csi-driver-controller-sa"])?;
        let kubeconfig = self.kubeconfig().with_file_name("controller.kubeconfig");
        self.write_kubeconfig(&kubeconfig, token.trim())?;
        Ok(kubeconfig)
    }

    /// How the holder of this token reaches the API server.
    pub fn write_kubeconfig(&self, path: &Path, token: &str) -> anyhow::Result<()> {
        let admin = Kubeconfig::read_from(self.kubeconfig())?;
        let cluster = admin.clusters.first().and_then(|it| it.cluster.clone()).context("a kubeconfig of nowhere")?;
        let text = json!({
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "context",
            "contexts": [{ "name": "context", "context": { "cluster": "cluster", "user": "user" } }],
            "clusters": [{ "name": "cluster", "cluster": {
                "server": cluster.server, "certificate-authority-data": cluster.certificate_authority_data,
            } }],
            "users": [{ "name": "user", "user": { "token": token } }],
        });
        std::fs::write(path, text.to_string()).with_context(|| format!("failed to write {}", path.display()))
    }

    /// Ends with its value, and with this process in any case.
    pub fn start_controller(&self, order: &ControllerOptions<'_>) -> anyhow::Result<Process> {
        let ControllerOptions { name, kubeconfig, driver, namespace, flags } = order;
        let mut arguments = vec![
            "controller".to_owned(),
            format!("--kubeconfig={}", kubeconfig.display()),
            format!("--driver-name={driver}"),
            format!("--mountpoint-namespace={namespace}"),
            "--mountpoint-image=localhost/s3csi:test".to_owned(),
            "--mountpoint-image-pull-policy=Never".to_owned(),
        ];
        arguments.extend(flags.iter().map(|it| (*it).to_owned()));
        Ok(self.run(name, &product("s3csi")?, &arguments)?)
    }
}
