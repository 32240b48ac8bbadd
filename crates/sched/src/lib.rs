//! Choices about who is served where and when: load balance between cores, fairness between tenants.
//!
//! Nothing here has a thread, does I/O or reads a clock. What is measured comes in as numbers and time as an argument; the
//! node asks, and carries out what is chosen. What chooses for a window is a pure function; what decides for each
//! request is a small passive structure, owned by one core.
//!
//! ```text
//!   counters of a window ─▶ measure ─▶ figures ─▶ policy::choose ─▶ decision ─┬─▶ Router     here, or on which core
//!                                                  │    │    │                ├─▶ Backward   now, or behind the others
//!                                              balance inter intra            └─▶ Fair       who is next
//! ```
//!
//! # Layout
//! - [`ids`]: names of cores and flows.
//! - [`settings`]: what an operator may set, and what is refused.
//! - [`measure`](mod@measure): counters of one window into figures; loads as if nothing had been moved.
//! - [`plan`]: what a core is told about requests that are to run elsewhere.
//! - [`balance`]: OctoKV's load balance.
//! - [`inter`]: OctoFAS between cores.
//! - [`route`]: a plan, carried out request by request.
//! - [`intra`]: OctoFAS within a core: who is dense, and how often that goes back.
//! - [`backward`]: the queue in which it does.
//! - [`policy`]: the choice for the next window.
//! - [`fair`]: a fair queue of our own, with weights and limits.
//! - [`depth`]: how many of its requests run at a time.
//! - [`across`]: its weights on each core, for tenants that are on several.

pub mod across;
pub mod backward;
pub mod balance;
pub mod depth;
pub mod fair;
pub mod ids;
pub mod inter;
pub mod intra;
pub mod measure;
pub mod plan;
pub mod policy;
pub mod route;
pub mod settings;

pub use backward::Backward;
pub use depth::Depth;
pub use fair::{Charge, Cost, Fair, FairBounds};
pub use ids::{CoreId, FlowId};
pub use measure::{Counters, Figures, measure};
pub use octokv_base::Nanos;
pub use plan::Plan;
pub use policy::{Chosen, Decision, FlowRule, choose};
pub use route::{Route, Router};
pub use settings::{FlowSettings, MoveFlows, Policy, SettingError, Settings};
