//! What is put under load: which side the engine is on, and what lies under it.
//!
//! ```text
//!   kv             generator ─ Key Value commands ─▶ node: engine ─▶ device          (NetKVS's (d), OctoKV)
//!   remote-engine  generator ─▶ engine ─ commands on blocks ─▶ node ─▶ device        (NetKVS's (c))
//!   host-kvs       generator ─▶ engine ─▶ files of this machine, synced with each put (OctoKV's Host KVS)
//!   redis, valkey  generator ─ RESP ─▶ server: memory, and a synced log on a file    (a peer, beside the first)
//! ```

use crate::config::Plan;
use crate::host_kvs::HostKvs;
use octokv_engine::Durability;
use std::sync::Arc;

/// A system under load.
#[derive(Clone)]
pub enum System {
    /// Key Value commands to the node.
    Kv,
    /// The hash engine in this process, on the node's namespace of blocks.
    RemoteEngine(EngineSettings),
    /// The hash engine in this process, on files.
    HostKvs(Arc<HostKvs>),
    /// A peer's server that speaks RESP, by its name ([`crate::peers`]).
    Resp(&'static str),
}

/// How an engine in this process works.
#[derive(Clone, Copy, Debug)]
pub struct EngineSettings {
    /// When it acknowledges a write.
    pub durability: Durability,
    /// The most bytes of values and metadata that are in work at a time.
    pub pool_bytes: usize,
    /// The volume's random numbers, where it is formatted.
    pub seed: u64,
}

impl System {
    /// Its name on the command line and in reports.
    pub fn name(&self) -> &'static str {
        match self {
            System::Kv => "kv",
            System::RemoteEngine(_) => "remote-engine",
            System::HostKvs(_) => "host-kvs",
            System::Resp(name) => name,
        }
    }

    /// How many files it works on.
    pub fn files(&self) -> Option<usize> {
        match self {
            System::Kv | System::RemoteEngine(_) | System::Resp(_) => None,
            System::HostKvs(store) => Some(store.files()),
        }
    }

    /// When its engine in this process acknowledges a write.
    pub fn durability(&self) -> Option<&'static str> {
        let durability = match self {
            System::Kv | System::Resp(_) => return None,
            System::RemoteEngine(settings) => settings.durability,
            System::HostKvs(_) => Durability::Flush,
        };
        Some(match durability {
            Durability::Flush => "flush",
            Durability::Device => "device",
        })
    }

    /// The OS threads of a workload: the core of each and how many of the plan's threads it drives.
    pub fn workers(&self, plan: &Plan, cores: &[Option<usize>]) -> Vec<(Option<usize>, usize)> {
        match self {
            System::Kv | System::Resp(_) => {
                let count = cores.len().min(plan.threads);
                let share = |number| plan.threads / count + usize::from(number < plan.threads % count);
                cores[..count].iter().enumerate().map(|(number, &core)| (core, share(number))).collect()
            }
            // One engine, one loop.
            System::RemoteEngine(_) => vec![(cores[0], plan.threads)],
            // A file operation keeps its thread until it is over.
            System::HostKvs(_) => {
                (0..plan.threads * plan.depth).map(|number| (cores[number % cores.len()], 1)).collect()
            }
        }
    }
}
