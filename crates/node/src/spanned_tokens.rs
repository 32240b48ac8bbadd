//! The tokens of a namespace on several devices, for hosts; and the weights by which hosts share them.
//!
//! In: the queues of the devices, the scheduling configuration. Out: a [`TokenSource`] for the target. The weights are those of
//! the fair queue: it orders the requests that are on a core, and the shares bound those that hosts send.
//! Tested below.

use octokv_engine::spanned::SPAN_DEVICES_MAX;
use octokv_engine::{DeviceQueue, SpannedVolume, Volume};
use octokv_nvmf::{HostWeights, TokenCommand, TokenShares, TokenSource};
use octokv_sched::{CostKind, SchedConfig};
use octokv_wire::device_log::{DeviceEntry, DeviceLog, LoggedCost};
use std::fmt;
use std::sync::Arc;

/// The devices of a volume that have queues.
struct SpannedTokens<V: Volume> {
    volume: SpannedVolume<V>,
}

/// The tokens of a volume on several devices, for hosts; `None` if its devices have no queues.
pub fn token_shares<V: Volume + Send + Sync + 'static>(
    volume: &SpannedVolume<V>,
) -> Option<Arc<TokenShares>> {
    let tokens = || Arc::new(SpannedTokens { volume: volume.clone() });
    (!volume.device_queues().is_empty()).then(|| TokenShares::new(tokens()))
}

impl<V: Volume> fmt::Debug for SpannedTokens<V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SpannedTokens").finish_non_exhaustive()
    }
}

fn entry_of(queue: &DeviceQueue) -> DeviceEntry {
    let cost = |kind| {
        let tokens = queue.host_cost(kind, 0);
        let tokens_per_4k = queue.host_cost(kind, 2 * 4096).saturating_sub(tokens);
        LoggedCost { tokens: tokens as u16, tokens_per_4k: tokens_per_4k as u16 }
    };
    DeviceEntry {
        capacity: queue.host_capacity(),
        free: queue.host_free_tokens(),
        get: cost(CostKind::Get),
        put: cost(CostKind::Put),
        delete: cost(CostKind::Delete),
    }
}

impl<V: Volume + Send + Sync + 'static> TokenSource for SpannedTokens<V> {
    fn device_of(&self, key: &[u8]) -> u8 {
        self.volume.device_of(key) as u8
    }

    fn devices_max(&self) -> usize {
        SPAN_DEVICES_MAX
    }

    fn capacity(&self, device: u8) -> u32 {
        self.volume.of_queue(device.into(), DeviceQueue::host_capacity)
    }

    fn free_tokens(&self, device: u8) -> u32 {
        self.volume.of_queue(device.into(), DeviceQueue::host_free_tokens)
    }

    fn cost(&self, device: u8, command: TokenCommand) -> u32 {
        let (kind, bytes) = match command {
            TokenCommand::Get => (CostKind::Get, 0),
            TokenCommand::Put(bytes) => (CostKind::Put, bytes),
            TokenCommand::Delete => (CostKind::Delete, 0),
        };
        self.volume.of_queue(device.into(), |queue| queue.host_cost(kind, bytes))
    }

    fn device_log(&self) -> DeviceLog {
        let devices = self.volume.device_queues().iter().map(|queue| entry_of(queue)).collect();
        let (map, hash_seed) = self.volume.placement();
        DeviceLog { hash_seed, map, devices }
    }
}

/// The weights of hosts.
pub(crate) fn host_weights(config: &SchedConfig) -> HostWeights {
    let of_hosts = config.tenants.iter().map(|(host, qos)| (host.clone(), qos.weight)).collect();
    HostWeights { of_hosts, default: config.default_qos.weight }
}

#[cfg(test)]
mod tests {
    use super::*;
    use octokv_base::{BufferPool, RingPosition};
    use octokv_device::Device;
    use octokv_device::memory::{MemoryDevice, RamDisk};
    use octokv_engine::conformance::key_of;
    use octokv_engine::{
        AnyVolume, Durability, EngineKind, FormatConfig, OpenConfig, QueueReport, WallClock,
    };
    use octokv_runtime::block_on;
    use octokv_sched::{KindCost, STARTING_TOKENS_MAX, StartingCosts, TenantQos};
    use std::rc::Rc;

    fn volume(tokens: Option<StartingCosts>) -> AnyVolume {
        let memory =
            |_| Rc::new(MemoryDevice::new(RamDisk::new(32 << 20, 512).expect("memory"))) as Rc<dyn Device>;
        let devices: Vec<Rc<dyn Device>> = (0..3).map(memory).collect();
        let format = FormatConfig { engine: EngineKind::Hash, ..FormatConfig::default() };
        let config = OpenConfig {
            durability: Durability::Completed,
            cores: 1,
            cache_bytes: 0,
            prepare_bytes: 0,
            compact_bytes_per_second: 0,
            tree: OpenConfig::TREE,
            swap_gap: OpenConfig::SWAP_GAP,
            clock: WallClock::default(),
            tokens,
        };
        let pool = BufferPool::new(64 << 20);
        block_on(AnyVolume::open(&devices, &pool, config, &format), || ()).expect("opens")
    }

    #[test]
    fn hosts_find_the_device_of_a_key_by_the_log() {
        let volume = volume(Some(StartingCosts::default()));
        let AnyVolume::Spanned(spanned) = &volume else { panic!("it spans devices") };
        let source = SpannedTokens { volume: spanned.clone() };
        let log = DeviceLog::check(&source.device_log().encode()).expect("is valid");
        assert_eq!(log.devices.len(), 3);
        for key in (0..200).map(key_of) {
            let device = log.device_of(RingPosition::of(&key, log.hash_seed));
            assert_eq!(
                (usize::from(device), device),
                (spanned.place_of(&key), source.device_of(key.as_bytes()))
            );
        }
        let DeviceEntry { capacity, free, get, put, delete } = log.devices[2];
        assert_eq!((capacity, free, source.free_tokens(2), source.free_tokens(3)), (512, 512, 512, 0));
        assert_eq!((source.capacity(2), source.capacity(3)), (512, 0));
        let idle = QueueReport {
            capacity: 512,
            get_cost: 16,
            put_cost: 64,
            delete_cost: 32,
            ..QueueReport::default()
        };
        assert!(volume.device_reports().iter().all(|report| report.tokens == Some(idle)));
        let commands = [TokenCommand::Get, TokenCommand::Put(8192), TokenCommand::Delete];
        assert_eq!(commands.map(|command| source.cost(1, command)), [16, 128, 32]);
        assert_eq!((get.of(1), put.of(1), delete.of(0), put.of(8192)), (16, 64, 32, 128));
        let AnyVolume::Spanned(without) = self::volume(None) else { panic!("it spans devices") };
        assert!(token_shares(spanned).is_some() && token_shares(&without).is_none());
    }

    #[test]
    fn hosts_read_the_starting_costs_of_the_configuration() {
        let most = KindCost { tokens: STARTING_TOKENS_MAX, tokens_per_4k: STARTING_TOKENS_MAX };
        let costs = StartingCosts {
            get: KindCost { tokens: 16, tokens_per_4k: 5 },
            put: most,
            delete: KindCost { tokens: 7, tokens_per_4k: 1 },
        };
        let volume = volume(Some(costs));
        let AnyVolume::Spanned(spanned) = &volume else { panic!("it spans devices") };
        let log = SpannedTokens { volume: spanned.clone() }.device_log();
        let log = DeviceLog::check(&log.encode()).expect("is valid");
        let most = STARTING_TOKENS_MAX as u16;
        for DeviceEntry { get, put, delete, .. } in log.devices {
            assert_eq!(get, LoggedCost { tokens: 16, tokens_per_4k: 5 });
            assert_eq!(put, LoggedCost { tokens: most, tokens_per_4k: most });
            assert_eq!(delete, LoggedCost { tokens: 7, tokens_per_4k: 1 });
        }
        let reports: Vec<_> = volume.device_reports().iter().filter_map(|report| report.tokens).collect();
        assert_eq!(reports.len(), 3);
        for QueueReport { get_cost, put_cost, delete_cost, .. } in reports {
            assert_eq!((get_cost, put_cost, delete_cost), (16, STARTING_TOKENS_MAX, 7));
        }
    }

    #[test]
    fn hosts_share_by_the_weights_of_the_fair_queue() {
        let mut config = SchedConfig::default();
        config.tenants.insert("heavy".to_owned(), TenantQos { weight: 7, ..TenantQos::default() });
        config.default_qos.weight = 2;
        let weights = host_weights(&config);
        assert_eq!((weights.of_hosts["heavy"], weights.default), (7, 2));
    }
}
