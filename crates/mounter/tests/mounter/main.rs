//! The mounter as a process: real sockets, real descriptors, shell scripts for engines. A pipe stands for the FUSE
//! descriptor, because its other end tells when the last copy was closed.

mod engines;
mod fixture;
mod handshake;
mod life;
mod sources;
