//! What a driver's node plugin, its sidecars and its mounts occupy on the node.

use rustix::process::Pid;
use s3csi_testbed::cluster::Cluster;

use super::installed::{InstalledDriver, mount_processes, node_plugin_processes};
use crate::footprint::{self, MemoryUsage};
use crate::report::MarkdownTable;
use crate::statistics::{figure, mebibytes};

/// The container of the node plugin itself, in both charts.
const DRIVER_CONTAINER: &str = "s3-plugin";

/// The memory of one driver while no other has volumes.
pub struct NodeState {
    pub name: String,
    pub volumes: usize,
    driver: MemoryUsage,
    sidecars: MemoryUsage,
    mounts: MemoryUsage,
    mount_processes: usize,
}

impl NodeState {
    pub fn of(cluster: &Cluster, driver: &InstalledDriver, name: &str, volumes: usize) -> anyhow::Result<Self> {
        let (mut plugin, mut sidecars) = (Vec::new(), Vec::new());
        for (container, processes) in node_plugin_processes(cluster, driver)? {
            let kind = if container == DRIVER_CONTAINER { &mut plugin } else { &mut sidecars };
            kind.extend(processes);
        }
        let mounts = mount_processes(cluster)?;
        // A program that kubelet runs in a container to probe it may have ended meanwhile.
        let sum = |processes: &[Pid]| processes.iter().filter_map(|it| footprint::memory(*it).ok()).sum();
        Ok(Self {
            name: name.to_owned(),
            volumes,
            driver: sum(&plugin),
            sidecars: sum(&sidecars),
            mounts: sum(&mounts),
            mount_processes: mounts.len(),
        })
    }

    /// PSS of the driver's container, in MiB.
    pub fn driver(&self) -> f64 {
        proportional(&self.driver)
    }

    /// Of that what is no page of a file, in MiB.
    pub fn driver_anonymous(&self) -> f64 {
        mebibytes(self.driver.anonymous_kib << 10)
    }

    /// PSS of the driver with the sidecars.
    pub fn node_plugin(&self) -> f64 {
        self.driver() + proportional(&self.sidecars)
    }
}

/// One row for each state and driver. Both have the same states.
pub fn memory_table(drivers: &[(&InstalledDriver, &Vec<NodeState>); 2]) -> MarkdownTable {
    let mut table = MarkdownTable::new([
        "MiB",
        "driver RSS",
        "PSS",
        "anonymous",
        "sidecars RSS",
        "PSS",
        "mounts RSS",
        "PSS",
        "processes",
        "all PSS",
    ]);
    let [(our_driver, ours), (their_driver, theirs)] = drivers;
    for (driver, state) in
        ours.iter().zip(*theirs).flat_map(|(ours, theirs)| [(our_driver, ours), (their_driver, theirs)])
    {
        let mut cells = vec![format!("{}, {}", state.name, driver.title)];
        let both = |part: &MemoryUsage| [mebibytes(part.resident_kib << 10), proportional(part)].map(figure);
        cells.extend(both(&state.driver));
        cells.push(figure(state.driver_anonymous()));
        cells.extend([&state.sidecars, &state.mounts].into_iter().flat_map(both));
        cells.push(state.mount_processes.to_string());
        cells.push(figure(state.node_plugin() + proportional(&state.mounts)));
        table.add(cells);
    }
    table
}

fn proportional(memory: &MemoryUsage) -> f64 {
    mebibytes(memory.proportional_kib << 10)
}
