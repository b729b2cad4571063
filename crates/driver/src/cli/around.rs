//! What surrounds a node plugin whatever its strategy: what the cluster and Prometheus see of it.

use std::path::PathBuf;
use std::sync::Arc;

use kube::Client;
use tokio::runtime::Runtime;
use tokio::sync::watch;

use super::Registration;
use crate::csi::health::Figures;
use crate::host::Host;
use crate::metrics::NodeMetrics;
use crate::node::assignment::{Assignments, Place};
use crate::node::census::Census;
use crate::node::conditions::Conditions;
use crate::node::taint::{Registered, StartupTaint};
use crate::node::teller::Teller;

/// The node, and where its mounts are.
pub struct Whereabouts {
    pub node: String,
    pub driver_name: String,
    pub kubelet: PathBuf,
    pub sources: PathBuf,
    /// Its name.
    pub strategy: &'static str,
}

/// Lives as long as the plugin.
pub struct Around {
    pub metrics: Arc<NodeMetrics>,
    pub teller: Arc<Teller>,
    pub census: Arc<Census>,
    /// To be told when kubelet has registered us.
    pub acknowledged: watch::Sender<bool>,
}

impl Around {
    pub fn begin(
        runtime: &Runtime,
        host: Arc<dyn Host>,
        whereabouts: Whereabouts,
        client: Option<Client>,
        metrics: &Arc<NodeMetrics>,
        registration: Registration,
    ) -> Self {
        let Whereabouts { node, driver_name, kubelet, sources, strategy } = whereabouts;
        let (acknowledged, registered) = watch::channel(false);
        let teller = match client {
            Some(client) => {
                let (teller, post) = Teller::new(metrics.clone(), client.clone(), &driver_name, &node);
                runtime.spawn(post);
                let registered = match registration {
                    Registration::On => Registered::Acknowledged(registered),
                    Registration::Off => Registered::Listed,
                };
                let metrics = metrics.clone();
                runtime.spawn(StartupTaint { client, node, driver_name, registered, metrics }.remove_forever());
                teller
            }
            None => Teller::mute(metrics.clone()),
        };
        Self {
            metrics: metrics.clone(),
            teller: Arc::new(teller),
            census: Arc::new(Census::new(host, kubelet, sources, strategy)),
            acknowledged,
        }
    }

    /// Strategy pod: watches who is served by whom, and writes what is mounted.
    pub fn follow(&self, runtime: &Runtime, client: Client, place: Place) -> Arc<Assignments> {
        let driver_name = place.driver_name.clone();
        let assignments = Arc::new(Assignments::new(place, client.clone(), runtime.handle().clone()));
        runtime.spawn(assignments.clone().watch_forever());
        let (census, teller) = (self.census.clone(), self.teller.clone());
        let conditions = Conditions { assignments: assignments.clone(), census, teller, client, driver_name };
        runtime.spawn(conditions.write_forever());
        assignments
    }

    pub fn figures(&self) -> Figures {
        let Self { metrics, teller, census, acknowledged: _ } = self;
        Figures { metrics: metrics.clone(), census: census.clone(), teller: teller.clone() }
    }
}
