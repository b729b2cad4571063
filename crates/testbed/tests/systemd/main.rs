//! Strategy `systemd`, each test beside a real systemd of its own: nothing about systemd is pretended.

mod client;
mod failures;
mod kept;
mod managers;
mod patterns;
mod recovery;
mod world;
