//! The flags of strategy `systemd`.

use std::path::PathBuf;

use clap::Args;
use s3csi_core::limits;
use s3csi_core::stage::StageLimit;

use super::Switch;

#[derive(Args, Debug)]
pub struct SystemdArgs {
    /// Strategy systemd: path of the engine on the host.
    #[arg(long, env = "MOUNT_S3_PATH", value_name = "PATH", default_value = "/usr/bin/mount-s3")]
    pub mount_s3_path: PathBuf,

    /// Strategy systemd: the plugin's directory as the host sees it [default: `<kubelet path>/plugins/<driver name>`]
    #[arg(long, env = "HOST_PLUGIN_DIR", value_name = "DIRECTORY")]
    pub host_plugin_dir: Option<PathBuf>,

    /// Strategy systemd: where pseudoterminals of the host are opened; in a container, for example, /host/dev/ptmx.
    #[arg(long, env = "PTMX_PATH", value_name = "PATH", default_value = "/dev/ptmx")]
    pub ptmx_path: PathBuf,

    /// Strategy systemd: memory limit of an engine, for example 512Mi; volumes may override it.
    #[arg(long, env = "ENGINE_MEMORY_LIMIT", value_name = "QUANTITY", value_parser = limits::parse_memory)]
    pub engine_memory_limit: Option<u64>,

    /// Strategy systemd: CPU limit of an engine, for example 500m or 2; volumes may override it.
    #[arg(long, env = "ENGINE_CPU_LIMIT", value_name = "QUANTITY", value_parser = limits::parse_cpu)]
    pub engine_cpu_limit: Option<u64>,

    /// Strategy systemd: thread limit of an engine; volumes may override it.
    #[arg(long, env = "ENGINE_TASKS_LIMIT", value_name = "NUMBER")]
    pub engine_tasks_limit: Option<u64>,

    /// Strategy systemd: size limit of the directory in which an engine stages files above 8 MiB that are edited in place; 0: the
    /// engine makes one in /var/tmp.
    #[arg(long, env = "ENGINE_STAGE_SIZE_LIMIT", value_name = "QUANTITY", default_value = "1Gi")]
    pub engine_stage_size_limit: StageLimit,

    /// Strategy systemd: what happens when an engine dies. With `on`, its unit starts a new engine on the same mount, and
    /// applications see a pause; with `off`, the volume is mounted again.
    #[arg(long, env = "ENGINE_KEEP_ALIVE", value_enum, default_value = "on")]
    pub engine_keep_alive: Switch,

    /// Strategy systemd: file with CA certificates (PEM) that engines trust in addition to the host's.
    #[arg(long, env = "ENGINE_CA_BUNDLE", value_name = "FILE")]
    pub engine_ca_bundle: Option<PathBuf>,
}
