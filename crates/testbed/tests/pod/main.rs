//! Strategy `pod` on one node: a real API server says by whom a workload is served, real mounters run in directories as kubelet
//! lays them out, FUSE, engine and S3 server are real as well. What the controller and kubelet would write into the API is written
//! by the tests.

mod assignment;
mod basics;
mod cluster;
mod crashes;
mod credential_matrix;
mod failures;
mod flood;
mod hostile;
mod kill_matrix;
mod lost;
mod metrics;
mod moves;
mod older_drivers;
mod permissions;
mod replacement;
mod retire;
mod staging;
mod status;
mod taint;
mod workload_identity;
mod world;
