//! Membership of a cluster: the interface to the etcd that holds it.
//!
//! No I/O and no clock: requests go out and responses come in as messages, with time as an argument.
//!
//! # Layout
//! - [`etcd`]: requests, responses and watch updates of etcd's v3 API.
//! - [`membership_store`]: the interface to an etcd; a client on the kernel's sockets and the simulator implement it.

pub mod etcd;
pub mod membership_store;

pub use membership_store::{MembershipStore, RequestLimitReached, StoreDelivery, WatchUpdate};
