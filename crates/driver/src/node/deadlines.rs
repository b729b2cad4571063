//! How long the node waits for a FUSE server to answer a probe. Every probe of the node uses one of these.
//!
//! A healthy engine answers for its root from memory in less than a millisecond. Everything here is a margin for a node
//! without free CPU, weighed against what the caller blocks meanwhile. The deadline of the call itself always wins.

use std::time::{Duration, Instant};

/// A source that is already mounted, before a publish uses it. The longest of all, because the alternative is an error.
pub const PUBLISH: Duration = Duration::from_secs(20);

/// A bind mount of a source that has just answered.
pub const BIND: Duration = Duration::from_secs(10);

/// A target that is already mounted, when kubelet repeats its call every minute for the credentials. A slower one takes the
/// full path, which probes again with [`PUBLISH`].
pub const REPUBLISH: Duration = Duration::from_secs(5);

/// Everything that looks at many mounts or must be quick: unpublish, sweeps, metrics, conditions, restarts of units.
pub const CHECK: Duration = Duration::from_secs(2);

/// The end of a probe that must not outlast the call.
pub fn within(patience: Duration, deadline: Instant) -> Instant {
    deadline.min(Instant::now() + patience)
}
