//! The client's tests against targets in memory.
//! One binary: a second one would compile the node's generic code again.

mod block_commands;
mod client;
mod nvmf_target;
mod peer_session;
mod queue_pair;
mod remote_device;
mod scan;
mod support;
