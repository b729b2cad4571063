//! How engines are run on a node.

pub mod daemon;
