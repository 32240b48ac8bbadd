//! The simulator's tests: every scenario, and injected bugs that it must find.
//! One binary: a second one would compile the node's generic code again.

mod etcd_faults;
mod etcd_json;
mod etcd_model;
mod etcd_real;
mod etcd_script;
mod injected_bugs;
mod injected_bugs_blocks;
mod injected_bugs_devices;
mod injected_bugs_log;
mod injected_bugs_memory;
mod injected_bugs_nodes;
mod injected_bugs_ordered;
mod injected_bugs_remote;
mod injected_bugs_scheduling;
mod peers;
mod regression_seeds;
mod remote_engine;
mod scenarios;
