//! Scheduling policies: load balancing between cores and fairness between tenants.
//!
//! Nothing here starts a thread, does I/O or reads a clock. Measurements arrive as numbers and time as an argument; the
//! node calls these functions and applies their decisions. The decision of a sampling interval is a pure function; the
//! decision of each request is a small passive structure, owned by one core.
//!
//! ```text
//!   counters of an interval ─▶ metrics ─▶ policy::choose ─▶ decision ─┬─▶ Router         local, or on which core
//!                                            │    │    │              ├─▶ RequeueQueue   now, or behind the others
//!                                      balance inter intra            └─▶ FairQueue      which request is next
//! ```
//!
//! # Layout
//! - [`ids`]: identifiers of cores and tenants.
//! - [`config`]: the configuration and its validation.
//! - [`metrics`](mod@metrics): metrics from the counters of one interval; loads without migration.
//! - [`migration_plan`]: how many requests each core sends to which others.
//! - [`load_balance`]: OctoKV's load balancing.
//! - [`octofas_inter`]: OctoFAS between cores.
//! - [`router`]: applies a migration plan request by request.
//! - [`octofas_intra`]: OctoFAS within a core: dense tenants and their requeue counts.
//! - [`requeue`]: the queue that requeues their requests.
//! - [`policy`]: selects the action of the next interval.
//! - [`fair_queue`]: a fair queue of our own, with weights and limits.
//! - [`concurrency_limit`]: how many of its requests are in flight.
//! - [`device_tokens`]: how much may be in flight on a device, by its throughput.
//! - [`throughput_round`]: measures that throughput.
//! - [`command_costs`]: the tokens of a command.
//! - [`cross_core_weights`]: its weights on each core, for tenants on several cores.

pub mod command_costs;
pub mod concurrency_limit;
pub mod config;
pub mod cross_core_weights;
pub mod device_tokens;
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
pub mod throughput_round;

pub use command_costs::{CostKind, GET_TOKENS, KindCost, MeasuredCosts, STARTING_TOKENS_MAX, StartingCosts};
pub use concurrency_limit::ConcurrencyLimit;
pub use config::{MigrateTenants, Policy, SchedConfig, SettingError, TenantQos};
pub use device_tokens::DeviceTokens;
pub use fair_queue::{Cost, FairQueue, FairQueueLimits, ServiceTicket};
pub use ids::{CoreId, TenantId};
pub use metrics::{IntervalCounters, IntervalMetrics, compute_metrics};
pub use migration_plan::MigrationPlan;
pub use octokv_base::Nanos;
pub use policy::{Decision, PolicyAction, TenantRule, choose};
pub use requeue::RequeueQueue;
pub use router::{Router, RoutingDecision};
pub use throughput_round::EndedCommand;
