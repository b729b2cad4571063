//! Strategy `systemd`, each test beside a real systemd of its own: nothing about systemd is pretended.

mod client;
mod containers;
mod credential_matrix;
mod failures;
mod kill_matrix;
mod legacy_v1;
mod managers;
mod network;
mod outliving;
mod patterns;
mod recovery;
mod sandbox;
mod shutdown;
mod supervision;
mod workload_identity;
mod world;
