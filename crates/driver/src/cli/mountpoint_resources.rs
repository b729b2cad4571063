//! Resources of Mountpoint Pods for volumes that set none.

use clap::Args;
use s3csi_core::mountpoint_pod::{DefaultResources, Resources};
use s3csi_core::quantity::Quantity;

#[derive(Args, Debug)]
#[expect(
    clippy::struct_field_names,
    reason = "the fields are flags of the controller, whose names say what they concern"
)]
pub struct MountpointResourcesArgs {
    /// CPU request of Mountpoint Pods whose volume sets none, such as 10m.
    #[arg(long, env = "MOUNTPOINT_REQUESTS_CPU", value_name = "QUANTITY")]
    mountpoint_requests_cpu: Option<Quantity>,

    /// Memory request of Mountpoint Pods whose volume sets none, such as 64Mi.
    #[arg(long, env = "MOUNTPOINT_REQUESTS_MEMORY", value_name = "QUANTITY")]
    mountpoint_requests_memory: Option<Quantity>,

    /// CPU limit of Mountpoint Pods whose volume sets none, such as 2.
    #[arg(long, env = "MOUNTPOINT_LIMITS_CPU", value_name = "QUANTITY")]
    mountpoint_limits_cpu: Option<Quantity>,

    /// Memory limit of Mountpoint Pods whose volume sets none, such as 2Gi. The engine uses at most 95 % of it.
    #[arg(long, env = "MOUNTPOINT_LIMITS_MEMORY", value_name = "QUANTITY")]
    mountpoint_limits_memory: Option<Quantity>,
}

impl MountpointResourcesArgs {
    pub fn defaults(self) -> DefaultResources {
        let Self {
            mountpoint_requests_cpu,
            mountpoint_requests_memory,
            mountpoint_limits_cpu,
            mountpoint_limits_memory,
        } = self;
        DefaultResources {
            requests: Resources { cpu: mountpoint_requests_cpu, memory: mountpoint_requests_memory },
            limits: Resources { cpu: mountpoint_limits_cpu, memory: mountpoint_limits_memory },
        }
    }
}
