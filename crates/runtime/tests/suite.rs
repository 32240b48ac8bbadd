//! The runtime's tests: tasks, reactors, device queues, and their simulation.
//! One binary: a second one would compile the node's generic code again.

mod common;
mod device_queues;
mod kernel_sockets;
mod reactor;
mod run_queue;
mod simulated;
mod simulated_hosts;
mod tasks;
