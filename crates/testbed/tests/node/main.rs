//! The node plugin with everything real behind it: sockets, mounter, engine, kernel and an S3 server. Each test has a
//! node of its own and proves at its end that nothing is left of it.

mod basics;
mod concurrency;
mod crashes;
mod credential_matrix;
mod credentials;
mod engine_errors;
mod flatness;
mod groups;
mod held;
mod hung;
mod inline;
mod issued;
mod kill_matrix;
mod network;
mod paths;
mod read_only;
mod repair;
mod service;
mod sharing;
mod staging;
mod workload_identity;
mod world;
mod wrong_input;
