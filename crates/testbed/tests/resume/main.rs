//! An engine that dies, freezes or cannot start, under applications that use its mount: what they see is a pause. With a real
//! mounter, real engines, real FUSE and an S3 server in this process.

mod handles;
mod keeper;
mod names;
mod stress;
mod world;
mod writers;
