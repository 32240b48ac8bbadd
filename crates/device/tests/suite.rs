//! Tests of the simulated SSD (its model, its drives, its parts), and of supervised devices.
//! One binary: a second one would compile the node's generic code again.

mod drive_profiles;
mod simulated_ssd;
mod ssd_model;
mod supervised;
