//! An engine that dies, freezes or cannot start, under applications that use its mount: what they see is a pause. With a real
//! mounter, real engines, real FUSE and an S3 server in this process.

mod closing;
mod fsx;
mod handles;
mod keys;
mod lost;
mod moves;
mod names;
mod old_kernels;
mod pages;
mod random_reads;
mod staged;
mod standalone;
mod stress;
mod supervisor;
mod upgrades;
mod world;
mod writers;
