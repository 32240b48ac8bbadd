//! A double of etcd: a cluster with leases, watches, transactions and compaction, and with faults of its own.
//!
//! ```text
//!   EtcdConnection ──request──▶ transport ──▶ member ──▶ log, applied by each member in its time ──▶ EtcdState
//!        ▲   lost, delayed, held                │ no leader, isolated                                    │
//!        └─────── response, watch update ───────┴──◀── transport ◀── responses, changes for watches ─────┘
//! ```
//! In: requests through [`octokv_cluster::MembershipStore`], faults, time. Out: responses and watch updates. The same
//! inputs at the same times give the same outputs. Its semantics are compared with a naive reference in
//! `tests/etcd_model.rs` and with a real etcd in `tests/etcd_real.rs`; its faults are tested in `tests/etcd_faults.rs`.
//!
//! # Layout
//! - [`store`]: keys and changes by revision. [`state`]: the store and the leases, changed by the log's requests.
//! - `member`: a replica of the state, its watches, and the requests that wait for it.
//! - `transport`: connections, and messages on their way to or from a member.
//! - [`cluster`]: members, log, leader, the leader's clock. [`connection`]: a client's end.
//! - [`sim_etcd`]: the cluster within a simulation, and the end of a simulated host.
//! - [`faults`]: a plan of faults, drawn from a seed.

pub mod cluster;
pub mod connection;
pub mod faults;
mod member;
pub mod sim_etcd;
pub mod state;
pub mod store;
mod transport;

pub use cluster::{EtcdCluster, EtcdConfig, EtcdStats};
pub use connection::EtcdConnection;
pub use faults::{EtcdFault, EtcdFaultPlan, MessageFaults};
pub use sim_etcd::{SimEtcd, SimEtcdConnection};
