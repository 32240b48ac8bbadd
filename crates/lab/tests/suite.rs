//! The papers' simulations: they repeat, and their figures add up.
//! One binary: a second one would compile the node's generic code again.

mod multi_tenant_simulation;
mod simulation;
