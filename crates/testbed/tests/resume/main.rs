//! An engine that dies, freezes or cannot start, under applications that use its mount: what they see is a pause. With a real
//! mounter, real engines, real FUSE and an S3 server in this process.

mod alone;
mod closing;
mod handles;
mod keeper;
mod keys;
mod names;
mod old_kernels;
mod stress;
mod upgrades;
mod world;
mod writers;
