//! Simulation of one node of LEED: the production log engine on four modelled drives, the cores that execute requests, and clients without a
//! network or with one that only delays, in virtual time.
//!
//! ```text
//!   clients ──request──▶ core that owns the key: engine ──commands──▶ drive of the key
//!           ◀──result───     one of four                               one of four
//! ```
//! The paper maps cores 0 to 3 to drives 0 to 3, cores 4 to 6 to the network and core 7 to control. Here four cores execute requests, each on its
//! part of the ring on all drives, as a node does, with the images of recently used segments that the engine keeps (256 KiB a core); the four others have no work without a network and are not simulated.
//!
//! # Layout
//! - [`parameters`]: the numbers of node and workloads, with their sources.
//! - [`workload`]: operations of YCSB's workloads. [`clients`]: closed and open loops over all cores. [`client_flows`]:
//!   clients that send by the node's tokens.
//! - [`experiment`](mod@experiment): the node with its volume, and loads on it. [`node_stats`]: results by drive and overall.

pub mod client_flows;
pub mod clients;
pub mod experiment;
pub mod node_stats;
pub mod parameters;
pub mod workload;
