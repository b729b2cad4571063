//! The controller of strategy `pod` beside a real API server. There is no scheduler and no kubelet: each test plays them,
//! and reads what the controller made of it in the cluster itself.
//!
//! Numbers such as C7 are those of the acceptance list that this suite was written from.

mod churn;
mod cleanup;
mod crashes;
mod election;
mod headroom;
mod late_binding;
mod lifetimes;
mod metrics;
mod moves;
mod permissions;
mod pod_specs;
mod replacement;
mod reports;
mod sharing;
mod single_node;
mod warm_pods;
mod world;
