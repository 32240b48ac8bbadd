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
//! - [`config`]: what an operator may set, and what is refused.
//! - [`metrics`](mod@measure): counters of one window into figures; loads as if nothing had been moved.
//! - [`migration_plan`]: what a core is told about requests that are to run elsewhere.
//! - [`load_balance`]: OctoKV's load balance.
//! - [`octofas_inter`]: OctoFAS between cores.
//! - [`router`]: a plan, carried out request by request.
//! - [`octofas_intra`]: OctoFAS within a core: who is dense, and how often that goes back.
//! - [`requeue`]: the queue in which it does.
//! - [`policy`]: the choice for the next window.
//! - [`fair_queue`]: a fair queue of our own, with weights and limits.
//! - [`concurrency_limit`]: how many of its requests run at a time.
//! - [`cross_core_weights`]: its weights on each core, for tenants that are on several.

pub mod concurrency_limit;
pub mod config;
pub mod cross_core_weights;
pub mod fair_queue;
pub mod ids;
pub mod load_balance;
pub mod metrics;
pub mod migration_plan;
pub mod octofas_inter;
pub mod octofas_intra;
pub mod policy;
pub mod requeue;
pub mod router;

pub use concurrency_limit::ConcurrencyLimit;
pub use config::{MigrateTenants, Policy, SchedConfig, SettingError, TenantQos};
pub use fair_queue::{Cost, FairQueue, FairQueueLimits, ServiceTicket};
pub use ids::{CoreId, TenantId};
pub use metrics::{IntervalCounters, IntervalMetrics, compute_metrics};
pub use migration_plan::MigrationPlan;
pub use octokv_base::Nanos;
pub use policy::{Decision, PolicyAction, TenantRule, choose};
pub use requeue::RequeueQueue;
pub use router::{Router, RoutingDecision};
