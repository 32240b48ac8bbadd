//! The systems under test: the process that runs the engine, and the storage of its data.
//!
//! ```text
//!   kv             generator ─ Key Value commands ─▶ node: engine ─▶ device          (NetKVS's (d), OctoKV)
//!   remote-engine  generator ─▶ engine ─ NVM commands ─▶ node ─▶ device              (NetKVS's (c))
//!   local-engine   generator ─▶ engine ─▶ local file or block device, by the path of a node: io_uring, group commit
//!   host-kvs       generator ─▶ engine ─▶ files of this machine, synced with each put (OctoKV's Host KVS)
//!   rocksdb        generator ─▶ RocksDB's library in this process ─▶ its files        (a baseline of local-engine)
//!   redis, valkey  generator ─ RESP ─▶ server: memory, and a synced log on a file    (baselines of the first)
//! ```

use crate::config::BenchConfig;
use crate::host_kvs::HostKvs;
use crate::local_engine::LocalEngine;
use crate::rocksdb_store::RocksDbStore;
use octokv_engine::{Durability, LogStatistics};
use std::path::Path;
use std::sync::Arc;

/// A system under test.
#[derive(Clone)]
pub enum SystemUnderTest {
    /// Key Value commands to the node.
    Kv,
    /// The hash engine in this process, on a block namespace of the node.
    RemoteEngine(LocalEngineConfig),
    /// An engine in this process, on a local device.
    LocalEngine(Arc<LocalEngine>),
    /// The hash engine in this process, on files.
    HostKvs(Arc<HostKvs>),
    /// RocksDB in this process.
    RocksDb(Arc<RocksDbStore>),
    /// The server of a baseline that speaks RESP, by its name ([`crate::baselines`]).
    RespServer(&'static str),
}

/// Configuration of an engine in this process.
#[derive(Clone, Copy, Debug)]
pub struct LocalEngineConfig {
    /// When a write is acknowledged.
    pub durability: Durability,
    /// Bytes of the buffer pool for values and metadata in use.
    pub pool_bytes: usize,
    /// Seed of the volume, if it is formatted.
    pub seed: u64,
}

impl SystemUnderTest {
    /// Its name on the command line and in reports.
    pub fn name(&self) -> &'static str {
        match self {
            SystemUnderTest::Kv => "kv",
            SystemUnderTest::RemoteEngine(_) => "remote-engine",
            SystemUnderTest::LocalEngine(_) => "local-engine",
            SystemUnderTest::HostKvs(_) => "host-kvs",
            SystemUnderTest::RocksDb(_) => "rocksdb",
            SystemUnderTest::RespServer(name) => name,
        }
    }

    /// Number of files of an engine on files; `None` for the others.
    pub fn files(&self) -> Option<usize> {
        match self {
            SystemUnderTest::Kv
            | SystemUnderTest::RemoteEngine(_)
            | SystemUnderTest::LocalEngine(_)
            | SystemUnderTest::RocksDb(_)
            | SystemUnderTest::RespServer(_) => None,
            SystemUnderTest::HostKvs(store) => Some(store.files()),
        }
    }

    /// Where a store in this process has its data; `None` for a node or a server.
    pub fn data_path(&self) -> Option<&Path> {
        match self {
            SystemUnderTest::LocalEngine(local) => Some(Path::new(local.name())),
            SystemUnderTest::HostKvs(store) => store.directory(),
            SystemUnderTest::RocksDb(store) => Some(store.directory()),
            SystemUnderTest::Kv | SystemUnderTest::RemoteEngine(_) | SystemUnderTest::RespServer(_) => None,
        }
    }

    /// The options of RocksDB in this process; `None` for the others.
    pub fn rocksdb_options(&self) -> Option<String> {
        match self {
            SystemUnderTest::RocksDb(store) => Some(store.options().to_owned()),
            _ => None,
        }
    }

    /// Bytes of the index of a store in this process; `None` for the others.
    pub fn index_bytes(&self) -> Option<u64> {
        match self {
            SystemUnderTest::LocalEngine(local) => Some(local.statistics().index_bytes),
            SystemUnderTest::RocksDb(store) => store.index_bytes(),
            _ => None,
        }
    }

    /// The statistics of the logs of a log engine in this process; `None` for the others.
    pub fn log_statistics(&self) -> Option<LogStatistics> {
        match self {
            SystemUnderTest::LocalEngine(local) => local.statistics().log,
            _ => None,
        }
    }

    /// Name of an engine on a local device; `None` for the others.
    pub fn engine(&self) -> Option<&'static str> {
        match self {
            SystemUnderTest::LocalEngine(local) => Some(local.kind().name()),
            _ => None,
        }
    }

    /// Bytes of the cache of an engine on a local device; `None` for the others.
    pub fn cache_bytes(&self) -> Option<u64> {
        match self {
            SystemUnderTest::LocalEngine(local) => Some(local.open_config().cache_bytes),
            _ => None,
        }
    }

    /// When an engine in this process acknowledges a write; `None` for the others.
    pub fn durability(&self) -> Option<&'static str> {
        let durability = match self {
            SystemUnderTest::Kv | SystemUnderTest::RespServer(_) => return None,
            SystemUnderTest::RemoteEngine(settings) => settings.durability,
            SystemUnderTest::LocalEngine(local) => local.open_config().durability,
            SystemUnderTest::HostKvs(_) => Durability::PowerSafe,
            SystemUnderTest::RocksDb(store) if store.is_synced() => Durability::PowerSafe,
            SystemUnderTest::RocksDb(_) => return Some("none"),
        };
        Some(match durability {
            Durability::PowerSafe => "flush",
            Durability::Completed => "device",
        })
    }

    /// The OS threads of a workload: the core of each and the number of connections that it drives.
    pub fn assign_workers(
        &self,
        config: &BenchConfig,
        cores: &[Option<usize>],
    ) -> Vec<(Option<usize>, usize)> {
        match self {
            SystemUnderTest::Kv | SystemUnderTest::LocalEngine(_) | SystemUnderTest::RespServer(_) => {
                let count = cores.len().min(config.threads);
                let share = |number| config.threads / count + usize::from(number < config.threads % count);
                cores[..count].iter().enumerate().map(|(number, &core)| (core, share(number))).collect()
            }
            // One engine runs in one event loop.
            SystemUnderTest::RemoteEngine(_) => vec![(cores[0], config.threads)],
            // An operation blocks its thread.
            SystemUnderTest::HostKvs(_) | SystemUnderTest::RocksDb(_) => {
                (0..config.threads * config.depth).map(|number| (cores[number % cores.len()], 1)).collect()
            }
        }
    }
}
