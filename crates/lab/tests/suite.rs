//! The papers' simulations: they repeat, and their figures add up.
//! One binary: a second one would compile the node's generic code again.

mod iterator_simulation;
mod log_node_simulation;
mod log_store_simulation;
mod multi_tenant_simulation;
mod simulation;
