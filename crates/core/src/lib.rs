//! The pure rules of s3csi: what a request means, what is allowed, what things are called and how they are written down.
//!
//! Nothing here reads a file, a clock, the environment or the network, and no CSI or Kubernetes type is named: every
//! rule can be tested with data alone, and a caller who holds one of these types holds the proof that it was checked.
#![forbid(unsafe_code)]

pub mod arguments;
pub mod attachment;
pub mod bucket;
pub mod bucket_reference;
pub mod ca_certificates;
pub mod chain;
pub mod credentials;
pub mod driver_keys;
pub mod duration;
pub mod endpoint;
pub mod engine_failure;
pub mod environment;
pub mod headroom;
pub mod hold;
pub mod identifiers;
pub mod limits;
pub mod mountinfo;
pub mod mountpoint_pod;
pub mod names;
pub mod policy;
pub mod prefix;
pub mod provision;
pub mod proxy;
pub mod publish;
pub mod quantity;
pub mod role;
pub mod secret;
pub mod sharing;
pub mod stage;
pub mod store_connection;
pub mod target;
pub mod text;
pub mod user_agent;
pub mod warm_pool;

pub use arguments::{InvalidArgument, MountArguments};
pub use bucket::{BucketName, InvalidBucketName};
pub use bucket_reference::BucketReference;
pub use chain::Chain;
pub use credentials::{InvalidKeys, Keys, PROFILE, ProfileFiles};
pub use endpoint::{EndpointUrl, InvalidEndpointUrl};
pub use engine_failure::FailureCode;
pub use environment::{DriverSettings, ProfilePaths, engine_environment};
pub use identifiers::{InvalidIdentifier, PvName, VolumeId, WorkloadUid};
pub use names::mountpoint_pod_name;
pub use prefix::{InvalidPrefix, Prefix};
pub use publish::{
    Access, AccessMode, AccessType, AuthenticationSource, Identity, InvalidPublish, Publish, RawCapability, RawPublish,
    UnusableSecret,
};
pub use role::{InvalidRoleArn, RoleArn};
pub use secret::Secret;
pub use sharing::SharingKey;
pub use target::{InvalidTargetPath, TargetPath};
pub use user_agent::user_agent;
