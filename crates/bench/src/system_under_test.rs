//! What is put under load: which side the engine is on, and what lies under it.
//!
//! ```text
//!   kv             generator ─ Key Value commands ─▶ node: engine ─▶ device          (NetKVS's (d), OctoKV)
//!   remote-engine  generator ─▶ engine ─ commands on blocks ─▶ node ─▶ device        (NetKVS's (c))
//!   host-kvs       generator ─▶ engine ─▶ files of this machine, synced with each put (OctoKV's Host KVS)
//!   redis, valkey  generator ─ RESP ─▶ server: memory, and a synced log on a file    (a peer, beside the first)
//! ```

use crate::config::BenchConfig;
use crate::host_kvs::HostKvs;
use octokv_engine::Durability;
use std::sync::Arc;

/// A system under load.
#[derive(Clone)]
pub enum SystemUnderTest {
    /// Key Value commands to the node.
    Kv,
    /// The hash engine in this process, on the node's namespace of blocks.
    RemoteEngine(LocalEngineConfig),
    /// The hash engine in this process, on files.
    HostKvs(Arc<HostKvs>),
    /// A peer's server that speaks RESP, by its name ([`crate::peers`]).
    RespServer(&'static str),
}

/// How an engine in this process works.
#[derive(Clone, Copy, Debug)]
pub struct LocalEngineConfig {
    /// When it acknowledges a write.
    pub durability: Durability,
    /// The most bytes of values and metadata that are in work at a time.
    pub pool_bytes: usize,
    /// The volume's random numbers, where it is formatted.
    pub seed: u64,
}

impl SystemUnderTest {
    /// Its name on the command line and in reports.
    pub fn name(&self) -> &'static str {
        match self {
            SystemUnderTest::Kv => "kv",
            SystemUnderTest::RemoteEngine(_) => "remote-engine",
            SystemUnderTest::HostKvs(_) => "host-kvs",
            SystemUnderTest::RespServer(name) => name,
        }
    }

    /// How many files it works on.
    pub fn files(&self) -> Option<usize> {
        match self {
            SystemUnderTest::Kv | SystemUnderTest::RemoteEngine(_) | SystemUnderTest::RespServer(_) => None,
            SystemUnderTest::HostKvs(store) => Some(store.files()),
        }
    }

    /// When its engine in this process acknowledges a write.
    pub fn durability(&self) -> Option<&'static str> {
        let durability = match self {
            SystemUnderTest::Kv | SystemUnderTest::RespServer(_) => return None,
            SystemUnderTest::RemoteEngine(settings) => settings.durability,
            SystemUnderTest::HostKvs(_) => Durability::PowerSafe,
        };
        Some(match durability {
            Durability::PowerSafe => "flush",
            Durability::Completed => "device",
        })
    }

    /// The OS threads of a workload: the core of each and how many of the plan's threads it drives.
    pub fn assign_workers(
        &self,
        config: &BenchConfig,
        cores: &[Option<usize>],
    ) -> Vec<(Option<usize>, usize)> {
        match self {
            SystemUnderTest::Kv | SystemUnderTest::RespServer(_) => {
                let count = cores.len().min(config.threads);
                let share = |number| config.threads / count + usize::from(number < config.threads % count);
                cores[..count].iter().enumerate().map(|(number, &core)| (core, share(number))).collect()
            }
            // One engine, one loop.
            SystemUnderTest::RemoteEngine(_) => vec![(cores[0], config.threads)],
            // A file operation keeps its thread until it is over.
            SystemUnderTest::HostKvs(_) => {
                (0..config.threads * config.depth).map(|number| (cores[number % cores.len()], 1)).collect()
            }
        }
    }
}
