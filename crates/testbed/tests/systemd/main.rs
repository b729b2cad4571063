//! Strategy `systemd`, each test beside a real systemd of its own: nothing about systemd is pretended.

mod client;
mod containers;
mod failures;
mod kept;
mod managers;
mod patterns;
mod predecessors;
mod recovery;
mod world;
