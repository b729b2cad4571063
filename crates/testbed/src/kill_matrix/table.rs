//! The table itself.

use super::Disruption::{DeletePod, Evict, Kill, Restart, Stop, Terminate};
use super::Expectation::{Lost, Pause, StoreErrors, WriterError};
use super::MatrixRow::{self, Measured, NotApplicable, Shown};
use super::MatrixStrategy::{Daemon, Pod, Systemd};
use super::{Disruption, MatrixStrategy, Victim};

const PLUGIN_RESTART: &str = "cluster::restarts::a_restart_of_the_node_plugin_and_a_republish_change_nothing";
const KUBELET_RESTART: &str = "cluster::restarts::the_registration_survives_a_restart_of_kubelet_and_of_the_plugin";
const REBOOT: &str = "cluster::reboot::after_a_reboot_everything_is_mounted_again_and_nothing_of_before_is_left";
const ROLLOUT: &str = "cluster::outliving::the_mounter_of_strategy_daemon_is_killed_and_restarted";
const DELETION: &str = "cluster::outliving::a_mountpoint_pod_is_deleted";
const EVICTION: &str = "cluster::outliving::a_mountpoint_pod_is_evicted";
const UNIT_STOPPED: &str = "systemd::outliving::a_unit_that_is_stopped_ends_and_stays_ended";
const DRAIN: &str = "cluster::ending::the_last_writes_of_a_workload_arrive_when_its_node_is_drained";
/// Containers outlive kubelet and containerd, and so do mounters.
const SERVICES: &str = "cluster::life::pods_outlive_every_part_of_the_cluster_and_the_cluster_leaves_nothing";
const STALL: &str = "cluster::stalls::a_store_that_stalls_is_waited_for";
const API_SERVER: &str = "controller::lifetimes::a_restart_of_the_api_server_is_survived";
const CONTROLLER_KILLED: &str = "controller::election::the_successor_of_a_killed_controller_goes_on";
const CONTROLLER_ENDED: &str = "controller::election::a_controller_that_is_asked_to_end_gives_the_lease_back";
const SHUTDOWN: &str = "systemd::shutdown::a_shutdown_stores_what_is_being_written_before_the_network_ends";

/// Why a cell is empty.
type Reason = &'static str;

const A_PROCESS: Reason = "a process, not a Pod: see the whole container";
const NOT_A_POD: Reason = "does not run in a Pod";
const FIRST_PROCESS: Reason =
    "the first process of its container, and the kernel ends all others with it: see the whole container";
const AS_SUPERVISOR: Reason = "SIGTERM goes to the first process, the supervisor: see there";
const AS_DELETED: Reason =
    "the signal of a deletion, until which a Mountpoint Pod serves on: see delete Pod of the whole container";
const AS_TERMINATED: Reason = "SIGTERM and a new start: see SIGTERM";
const NOT_USED: Reason = "not used by this strategy";
const NO_DATA_PATH: Reason = "not in the path of data: the same as its absence, see kill -9 and restart";
const AS_DAEMON: Reason = "engine and supervisor are the programs of strategy daemon: see there";

/// What happens with this strategy when that part is ended like this.
pub const fn row(strategy: MatrixStrategy, victim: Victim, disruption: Disruption) -> MatrixRow {
    match victim {
        Victim::Engine => engine(disruption),
        Victim::Supervisor => supervisor(strategy, disruption),
        Victim::Container => container(strategy, disruption),
        Victim::NodePlugin => node_plugin(disruption),
        Victim::Both => both(strategy, disruption),
        Victim::Controller => controller(strategy, disruption),
        Victim::Kubelet => kubelet(disruption),
        Victim::Containerd => containerd(strategy, disruption),
        Victim::ApiServer => api_server(strategy, disruption),
        Victim::S3Server => s3_server(strategy, disruption),
        Victim::Systemd => systemd(strategy, disruption),
        Victim::Node => node(disruption),
    }
}

const fn no(reason: &'static str) -> MatrixRow {
    NotApplicable { reason }
}

const fn shown(test: &'static str) -> MatrixRow {
    Shown { test }
}

const fn engine(disruption: Disruption) -> MatrixRow {
    match disruption {
        // An engine that is asked to end stores what it can; its supervisor starts another one.
        Kill | Stop | Terminate => Measured(WriterError),
        // SIGUSR1 of the supervisor: the planned replacement.
        Restart => Measured(Pause),
        DeletePod | Evict => no(A_PROCESS),
    }
}

const fn supervisor(strategy: MatrixStrategy, disruption: Disruption) -> MatrixRow {
    match (strategy, disruption) {
        (_, DeletePod | Evict) => no(A_PROCESS),
        (Pod, Kill) => no(FIRST_PROCESS),
        // With SIGTERM, engines serve on until what cannot be kept is stored.
        (_, Stop) | (Daemon, Kill | Terminate) => Measured(Pause),
        (Systemd, Kill) => Measured(WriterError),
        (Pod, Terminate) => no(AS_DELETED),
        (Systemd, Terminate) => shown(UNIT_STOPPED),
        (_, Restart) => no(AS_TERMINATED),
    }
}

const fn container(strategy: MatrixStrategy, disruption: Disruption) -> MatrixRow {
    match (strategy, disruption) {
        (_, Kill) => Measured(WriterError),
        (_, Stop) | (Pod, DeletePod) => Measured(Pause),
        (_, Terminate) => no(AS_SUPERVISOR),
        (Daemon, Restart | DeletePod) => shown(ROLLOUT),
        (Daemon, Evict) => no("kubectl drain and evictions leave the Pods of a DaemonSet alone"),
        (Pod, Restart) => shown(DELETION),
        (Pod, Evict) => shown(EVICTION),
        (Systemd, Restart) => shown(UNIT_STOPPED),
        (Systemd, DeletePod | Evict) => no(NOT_A_POD),
    }
}

const fn node_plugin(disruption: Disruption) -> MatrixRow {
    match disruption {
        Kill | Stop | Terminate => Measured(Pause),
        Restart | DeletePod => shown(PLUGIN_RESTART),
        Evict => no("kubectl drain and evictions leave the Pods of a DaemonSet alone"),
    }
}

const fn both(strategy: MatrixStrategy, disruption: Disruption) -> MatrixRow {
    match (strategy, disruption) {
        // systemd holds the descriptors.
        (Systemd, Kill) => Measured(WriterError),
        (_, Kill) => Measured(Lost),
        (Systemd, Terminate) => shown(UNIT_STOPPED),
        (Pod, Terminate) => no(AS_DELETED),
        (_, Stop) | (Daemon, Terminate) => Measured(Pause),
        (_, Restart) => no(AS_TERMINATED),
        (_, DeletePod) => no("two Pods: see node plugin and whole container"),
        (_, Evict) => shown(DRAIN),
    }
}

const fn controller(strategy: MatrixStrategy, disruption: Disruption) -> MatrixRow {
    match (strategy, disruption) {
        (Daemon | Systemd, _) => no(NOT_USED),
        (Pod, Kill) => shown(CONTROLLER_KILLED),
        (Pod, Terminate | Restart | DeletePod | Evict) => shown(CONTROLLER_ENDED),
        (Pod, Stop) => no(NO_DATA_PATH),
    }
}

const fn kubelet(disruption: Disruption) -> MatrixRow {
    match disruption {
        Kill => shown(SERVICES),
        Restart | Terminate => shown(KUBELET_RESTART),
        Stop => no(NO_DATA_PATH),
        DeletePod | Evict => no(NOT_A_POD),
    }
}

const fn containerd(strategy: MatrixStrategy, disruption: Disruption) -> MatrixRow {
    match (strategy, disruption) {
        (Systemd, _) => no("engines do not run in containers"),
        (_, Kill | Restart | Terminate) => shown(SERVICES),
        (_, Stop) => no(NO_DATA_PATH),
        (_, DeletePod | Evict) => no(NOT_A_POD),
    }
}

const fn api_server(strategy: MatrixStrategy, disruption: Disruption) -> MatrixRow {
    match (strategy, disruption) {
        (Daemon | Systemd, _) => no("only asked for Events and conditions by this strategy"),
        (Pod, Kill | Restart | Terminate) => shown(API_SERVER),
        (Pod, Stop) => no(NO_DATA_PATH),
        (Pod, DeletePod | Evict) => no(NOT_A_POD),
    }
}

const fn s3_server(strategy: MatrixStrategy, disruption: Disruption) -> MatrixRow {
    match (strategy, disruption) {
        (_, DeletePod | Evict) => no(NOT_A_POD),
        (Pod, Stop) => shown(STALL),
        (Pod | Systemd, _) => no(AS_DAEMON),
        (Daemon, Stop) => Measured(Pause),
        (Daemon, Kill) => Measured(StoreErrors),
        (Daemon, Terminate | Restart) => no("applications see the same as after kill -9"),
    }
}

const fn systemd(strategy: MatrixStrategy, disruption: Disruption) -> MatrixRow {
    match (strategy, disruption) {
        (Daemon | Pod, _) => no(NOT_USED),
        (Systemd, Restart) => Measured(Pause),
        (Systemd, Terminate) => no("systemd executes itself again: see restart"),
        (Systemd, Kill) => no("the kernel panics without its first process: see node"),
        (Systemd, Stop) => no("the kernel does not stop its first process"),
        (Systemd, DeletePod | Evict) => no(NOT_A_POD),
    }
}

const fn node(disruption: Disruption) -> MatrixRow {
    match disruption {
        Kill | Restart => shown(REBOOT),
        Terminate => shown(SHUTDOWN),
        Stop => no("everything stops, and nothing sees it"),
        DeletePod => no(NOT_A_POD),
        Evict => shown(DRAIN),
    }
}
