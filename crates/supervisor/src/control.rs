//! The control channel between a supervisor and its engine: single bytes over a socket pair, and environment variables that
//! name the inherited descriptors. An engine that does not know them runs without supervision.

/// From the engine: it has started and loaded nothing yet; another engine may still serve the mount.
pub const PREPARED: u8 = b'S';

/// From the supervisor: no other engine serves the mount.
pub const GO: u8 = b'G';

/// From the engine: it serves the mount.
pub const SERVING: u8 = b'R';

/// From the engine, instead of [`SERVING`]: it serves the mount, and the kernel does not send requests again that an engine has
/// read and not answered (before Linux 6.9).
pub const SERVING_WITHOUT_RESEND: u8 = b'r';

/// The descriptors of state and control channel, and of FUSE if the arguments do not name it: `3,4` or `3,4,5`.
pub const DESCRIPTORS_VARIABLE: &str = "S3CSI_ENGINE_SUPERVISOR";

/// Set if the engine must verify its credentials with the server before it takes over a mount.
pub const CHECK_CREDENTIALS_VARIABLE: &str = "S3CSI_ENGINE_CHECK_CREDENTIALS";

/// The `oom_score_adj` that the engine gives itself before it forbids other processes to inspect it: from then on a supervisor without
/// privileges cannot set it.
pub const OOM_SCORE_VARIABLE: &str = "S3CSI_ENGINE_OOM_SCORE_ADJ";
