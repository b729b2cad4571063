//! The background tasks of a node plugin that do not depend on its strategy: Events, the start-up taint, mount health, metrics.

use std::path::PathBuf;
use std::sync::Arc;

use kube::Client;
use tokio::runtime::Runtime;
use tokio::sync::watch;

use super::node::RegistrationMode;
use crate::credentials::driver::DriverCredentials;
use crate::csi::health::MetricsPage;
use crate::host::Host;
use crate::metrics::NodeMetrics;
use crate::node::assignment::{AssignmentScope, Assignments};
use crate::node::conditions::Conditions;
use crate::node::held_mounts::HeldMounts;
use crate::node::mount_health::MountHealth;
use crate::node::reporter::Reporter;
use crate::node::taint::{Registered, StartupTaint};

/// The node, and the paths of its mounts.
pub struct NodePaths {
    pub node: String,
    pub driver_name: String,
    pub kubelet: PathBuf,
    pub sources: PathBuf,
    pub strategy: &'static str,
}

/// Runs for the life of the plugin.
pub struct BackgroundTasks {
    pub metrics: Arc<NodeMetrics>,
    pub reporter: Arc<Reporter>,
    pub mount_health: Arc<MountHealth>,
    /// Set when kubelet has registered the driver.
    pub acknowledged: watch::Sender<bool>,
}

impl BackgroundTasks {
    pub fn start(
        runtime: &Runtime,
        host: Arc<dyn Host>,
        held_mounts: &HeldMounts,
        paths: NodePaths,
        client: Option<Client>,
        metrics: &Arc<NodeMetrics>,
        registration: RegistrationMode,
    ) -> Self {
        let NodePaths { node, driver_name, kubelet, sources, strategy } = paths;
        let (acknowledged, registered) = watch::channel(false);
        let reporter = match client {
            Some(client) => {
                let (reporter, post) = Reporter::new(metrics.clone(), client.clone(), &driver_name, &node);
                runtime.spawn(post);
                let registered = match registration {
                    RegistrationMode::On => Registered::Acknowledged(registered),
                    RegistrationMode::Off => Registered::Listed,
                };
                let metrics = metrics.clone();
                runtime.spawn(StartupTaint { client, node, driver_name, registered, metrics }.remove_forever());
                reporter
            }
            None => Reporter::without_events(metrics.clone()),
        };
        Self {
            metrics: metrics.clone(),
            reporter: Arc::new(reporter),
            mount_health: Arc::new(MountHealth::new(host, held_mounts.clone(), kubelet, sources, strategy)),
            acknowledged,
        }
    }

    /// Strategy pod: watches the assignments, and writes the conditions of Mountpoint Pods.
    pub fn watch_assignments(&self, runtime: &Runtime, client: Client, scope: AssignmentScope) -> Arc<Assignments> {
        let driver_name = scope.driver_name.clone();
        let assignments = Arc::new(Assignments::new(scope, client.clone(), runtime.handle().clone()));
        runtime.spawn(assignments.clone().watch_forever());
        let (mount_health, reporter) = (self.mount_health.clone(), self.reporter.clone());
        let conditions = Conditions { assignments: assignments.clone(), mount_health, reporter, client, driver_name };
        runtime.spawn(conditions.write_forever());
        assignments
    }

    /// Renews the driver's temporary credentials; reports when they or those of workloads expire.
    pub fn renew_credentials(&self, runtime: &Runtime, credentials: &Arc<DriverCredentials>) {
        runtime.spawn(self.reporter.clone().watch_expiry_forever());
        let reporter = self.reporter.clone();
        runtime.spawn(credentials.clone().renew_forever(move |expires| reporter.driver_credentials(expires)));
    }

    pub fn metrics_page(&self) -> MetricsPage {
        let Self { metrics, reporter, mount_health, acknowledged: _ } = self;
        MetricsPage::new(metrics.clone(), mount_health.clone(), reporter.clone())
    }
}
