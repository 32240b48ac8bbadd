//! Opens a namespace: its devices, once per process, and the volume on them.
//!
//! In: the settings of a namespace. Out: an [`OpenNamespace`], recovered; each core attaches its [`CoreNamespace`].
//! Runs on the calling thread with a device queue of its own.
//!
//! Invariant: only a device that is blank, new or released by [`ExistingDataPolicy::Discard`] is formatted.

use crate::block_backend::BlockVolume;
use crate::config::{
    CommandSetConfig, DeviceConfig, ExistingDataPolicy, NamespaceConfig, NodeConfig,
    default_compact_bytes_per_second,
};
use crate::core_namespaces::{self, CoreNamespace, NamespaceVolume};
use crate::error::{CloseError, StartError};
use crate::namespace_device::{NamespaceDevice, names_of, open_for_core};
use crate::namespace_status::DeviceStatus;
use crate::spanned_tokens::token_shares;
use octokv_base::{BufferPool, Nanos, SharedSum};
use octokv_device::health::DeviceHealth;
use octokv_device::{Device, DeviceError};
use octokv_engine::common::superblock_io::{erase_superblocks, holds_volume, is_blank};
use octokv_engine::{
    AnyVolume, DeviceReport, Durability, Engine, EngineStatistics, FormatConfig, FormatVersions, OpenConfig,
    OpenError, TreeOptions, VerifyFailure, VerifyObserver, VerifyReport, Volume, VolumeInfo, WallClock,
};
use octokv_nvmf::{NamespaceInfo, NamespaceKind};
use octokv_runtime::{
    CoreWaker, CpuTime, DeviceDriver, DeviceHandle, ReactorHandle, block_on, kernel, open_device_queue,
};
use octokv_sched::StartingCosts;
use octokv_sys::clock;
use octokv_sys::process::random_u64;
use std::io;
use std::path::PathBuf;
use std::rc::Rc;

/// Options for opening devices and recovering volumes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NamespaceOpenOptions {
    pub driver: DeviceDriver,
    pub device_depth: usize,
    pub device_timeout: Nanos,
    pub swap_gap: u32,
    pub durability: Durability,
    /// Of the compaction of each Key Value namespace; 0 for none, `None` for the default of its engine.
    pub compact_bytes_per_second: Option<u64>,
    /// Of the scrub of each Key Value namespace; 0 for none.
    pub scrub_bytes_per_second: u64,
    pub tree: TreeOptions,
    /// Starting costs of a namespace on several devices, whose commands wait for tokens of their device; `None` without tokens.
    pub device_tokens: Option<StartingCosts>,
    pub cores: usize,
    /// Seed of a new volume's random identifiers; `None` takes it from the operating system.
    pub seed: Option<u64>,
}

impl NamespaceOpenOptions {
    /// Those of a node's configuration.
    pub fn of(config: &NodeConfig) -> NamespaceOpenOptions {
        NamespaceOpenOptions {
            driver: config.driver,
            device_depth: config.device_depth,
            device_timeout: config.device_timeout,
            swap_gap: config.swap_gap,
            durability: config.durability,
            compact_bytes_per_second: config.compact_bytes_per_second,
            scrub_bytes_per_second: config.scrub_bytes_per_second,
            tree: config.tree,
            device_tokens: config.device_tokens,
            cores: config.cores.len(),
            seed: config.seed,
        }
    }
}

/// An open namespace.
#[derive(Clone)]
pub(crate) struct OpenNamespace {
    pub config: NamespaceConfig,
    pub volume: NamespaceVolume,
    pub devices: Vec<NamespaceDevice>,
}

impl OpenNamespace {
    /// Opens a namespace, after formatting its device if the configuration requests it or the file is new.
    ///
    /// # Errors
    /// The device does not open, holds other data, or is too small for one block; the volume does not recover.
    pub fn open(
        config: &NamespaceConfig,
        options: NamespaceOpenOptions,
    ) -> Result<OpenNamespace, StartError> {
        let (namespace_devices, are_new) = NamespaceDevice::open_all(config, options.device_timeout)?;
        let handle = dedicated_handle(options.driver, options.device_depth).map_err(StartError::System)?;
        let devices = open_for_core(&namespace_devices, &handle).map_err(StartError::System)?;
        let volume = match &config.command_set {
            CommandSetConfig::KeyValue { .. } => {
                NamespaceVolume::Kv(open_volume(config, options, (&handle, &devices), are_new)?)
            }
            CommandSetConfig::Blocks { block_bytes } => {
                let device = &*devices[0];
                ensure_not_kv_volume(config, &handle, device)?;
                let volume = BlockVolume::new(*block_bytes, device.geometry().bytes());
                if volume.size_bytes() == 0 {
                    let why = format!("{} is smaller than one block of {block_bytes} bytes", device.name());
                    return Err(StartError::InvalidSetting { name: "size", why });
                }
                NamespaceVolume::Block(volume)
            }
        };
        let (config, devices) = (config.clone(), namespace_devices);
        let opened = OpenNamespace { config, volume, devices };
        for DeviceStatus { name, failure, .. } in opened.device_statuses() {
            if let Some(why) = failure {
                log_failure(&name, &why);
            }
        }
        // Those that failed just now are known.
        for (_, health) in opened.supervised() {
            health.take_unreported();
        }
        Ok(opened)
    }

    /// The devices' names in messages.
    pub fn name(&self) -> String {
        names_of(&self.devices)
    }

    /// Longest value in bytes; `None` for a block namespace.
    pub fn value_bytes_max(&self) -> Option<usize> {
        match &self.volume {
            NamespaceVolume::Kv(volume) => Some(volume.info().value_bytes_max),
            NamespaceVolume::Block(_) => None,
        }
    }

    /// The devices that are supervised, with the health of each.
    fn supervised(&self) -> impl Iterator<Item = (&NamespaceDevice, &DeviceHealth)> {
        self.devices.iter().filter_map(|device| Some((device, device.health()?)))
    }

    /// Logs the devices that failed since the last call. Whether there are any.
    pub fn log_failures(&self) -> bool {
        let mut any = false;
        for (device, health) in self.supervised() {
            if let Some(failure) = health.take_unreported() {
                log_failure(&device.name(), &failure.to_string());
                any = true;
            }
        }
        any
    }

    /// Its devices by name, if they are several.
    pub fn device_statuses(&self) -> Vec<DeviceStatus> {
        let NamespaceVolume::Kv(volume) = &self.volume else { return Vec::new() };
        let status = |(device, report): (&NamespaceDevice, DeviceReport)| {
            let of_health =
                || device.health().and_then(DeviceHealth::failure).map(|failure| failure.to_string());
            let of_volume = || report.failure.map(|error| error.to_string());
            let failure = device.open_failure().map(str::to_owned).or_else(of_volume).or_else(of_health);
            let load = device.health().map(DeviceHealth::load).unwrap_or_default();
            DeviceStatus { name: device.name(), failure, report, load }
        };
        self.devices.iter().zip(volume.device_reports()).map(status).collect()
    }

    /// Statistics of its engine; `None` for a block namespace.
    pub fn statistics(&self) -> Option<EngineStatistics> {
        match &self.volume {
            NamespaceVolume::Kv(volume) => Some(volume.statistics()),
            NamespaceVolume::Block(_) => None,
        }
    }

    /// The namespace as hosts see it.
    pub fn info(&self, key_bytes_max: u16) -> NamespaceInfo {
        let NamespaceConfig { id, ana_group, nguid_suffix, .. } = self.config;
        match &self.volume {
            NamespaceVolume::Kv(volume) => {
                let tokens = match volume {
                    AnyVolume::Spanned(volume) => token_shares(volume),
                    _ => None,
                };
                NamespaceInfo { id, ana_group, tokens, ..namespace_info(volume, key_bytes_max) }
            }
            NamespaceVolume::Block(volume) => NamespaceInfo {
                id,
                nguid: nguid(2, nguid_suffix),
                size_bytes: volume.size_bytes(),
                used_bytes: SharedSum::constant(volume.size_bytes()),
                kind: NamespaceKind::Block { block_bytes: volume.block_bytes() },
                ana_group,
                tokens: None,
            },
        }
    }

    /// The namespace as its cores attach it.
    pub fn for_cores(&self) -> CoreNamespace<NamespaceDevice> {
        CoreNamespace { id: self.config.id, volume: self.volume.clone(), devices: self.devices.clone() }
    }

    /// Shuts the volume down cleanly: checkpoint or flush. REQUIRES: every core has detached the namespace.
    ///
    /// # Errors
    /// The calling thread gets no queue to the device, or the last checkpoint or flush fails.
    pub fn close(&self, options: NamespaceOpenOptions) -> Result<(), CloseError> {
        self.close_on(|| dedicated_handle(options.driver, options.device_depth))
    }

    fn close_on(&self, open_handle: impl FnOnce() -> io::Result<ReactorHandle>) -> Result<(), CloseError> {
        let no_queue = |error| CloseError::Queue { name: self.name(), error };
        let handle = open_handle().map_err(no_queue)?;
        let devices = open_for_core(&self.devices, &handle).map_err(no_queue)?;
        match &self.volume {
            NamespaceVolume::Kv(volume) => {
                let engine = volume.engine(0, &devices, BufferPool::new(1 << 20));
                run_to_completion(&handle, engine.close())
                    .map_err(|error| CloseError::Checkpoint { name: self.name(), error })
            }
            NamespaceVolume::Block(_) => run_to_completion(&handle, devices[0].flush())
                .result
                .map_err(|error| CloseError::Flush { name: self.name(), error }),
        }
    }
}

fn log_failure(device: &str, why: &str) {
    tracing::error!(device, why, "the device is not available: its keys are not served");
}

/// A device queue and timers for the calling thread alone.
pub(crate) fn dedicated_handle(driver: DeviceDriver, depth: usize) -> io::Result<ReactorHandle> {
    let core_waker = CoreWaker::new()?;
    let (queue, _) = open_device_queue(driver, depth, &core_waker)?;
    let handle = ReactorHandle::new(core_waker, DeviceHandle::new(queue, depth), CpuTime::measured());
    handle.begin_iteration(kernel::now());
    Ok(handle)
}

/// Runs a future on the calling thread and polls its devices until the future ends.
pub(crate) fn run_to_completion<T>(handle: &ReactorHandle, future: impl Future<Output = T>) -> T {
    let channel = handle.devices();
    block_on(future, || {
        handle.begin_iteration(kernel::now());
        channel.poll();
    })
}

/// Opens the volume, after formatting the devices if the configuration requests it or all files `are_new` and blank.
fn open_volume(
    config: &NamespaceConfig,
    options: NamespaceOpenOptions,
    (handle, devices): (&ReactorHandle, &[Rc<dyn Device>]),
    are_new: bool,
) -> Result<AnyVolume, StartError> {
    let failed = |error| StartError::Volume { name: core_namespaces::names_of(devices), error };
    let format = format_config(config, options)?;
    let pool = BufferPool::new(64 << 20);
    let mut unwritten = are_new;
    for device in devices.iter().filter(|_| are_new) {
        unwritten &= run_to_completion(handle, is_blank(&**device)).map_err(|error| failed(error.into()))?;
    }
    if config.existing_data == ExistingDataPolicy::Discard || unwritten {
        run_to_completion(handle, AnyVolume::format(devices, &format)).map_err(failed)?;
    }
    let open = open_config(config, &format, options);
    let volume = run_to_completion(handle, AnyVolume::open(devices, &pool, open, &format)).map_err(failed)?;
    volume.set_scrub_rate(options.scrub_bytes_per_second);
    Ok(volume)
}

/// The format of a new volume of a Key Value namespace.
///
/// # Errors
/// No random numbers.
pub(crate) fn format_config(
    config: &NamespaceConfig,
    options: NamespaceOpenOptions,
) -> Result<FormatConfig, StartError> {
    let CommandSetConfig::KeyValue { format } = &config.command_set else {
        unreachable!("called for Key Value namespaces only")
    };
    let seed = match options.seed {
        Some(seed) => seed,
        None => random_u64().map_err(StartError::System)?,
    };
    Ok(FormatConfig { seed, ..*format })
}

/// How the volume of a Key Value namespace is opened.
pub(crate) fn open_config(
    config: &NamespaceConfig,
    format: &FormatConfig,
    options: NamespaceOpenOptions,
) -> OpenConfig {
    OpenConfig {
        durability: options.durability,
        cores: options.cores,
        cache_bytes: config.cache_bytes,
        prepare_bytes: config.prepare_bytes,
        compact_bytes_per_second: options
            .compact_bytes_per_second
            .unwrap_or_else(|| default_compact_bytes_per_second(format.engine)),
        tree: options.tree,
        swap_gap: options.swap_gap,
        clock: WallClock::new(clock::wall).with_monotonic(clock::now),
        tokens: options.device_tokens,
    }
}

/// Refuses a device that holds a Key Value volume, unless the policy is to discard it: then the superblocks are
/// zeroed, so that the remains are not mistaken for a volume.
fn ensure_not_kv_volume(
    config: &NamespaceConfig,
    handle: &ReactorHandle,
    device: &dyn Device,
) -> Result<(), StartError> {
    if config.existing_data == ExistingDataPolicy::Keep {
        return Ok(());
    }
    let failed =
        |error: DeviceError| StartError::Volume { name: device.name().to_owned(), error: error.into() };
    let holds_volume = run_to_completion(handle, holds_volume(device)).map_err(failed)?;
    if holds_volume && config.existing_data == ExistingDataPolicy::Check {
        let why = format!(
            "{} holds an octokv volume of keys and was left unchanged (--format discards its contents, --keep \
             serves it to hosts as blocks)",
            device.name()
        );
        return Err(StartError::InvalidSetting { name: "device", why });
    }
    if holds_volume {
        run_to_completion(handle, erase_superblocks(device)).map_err(failed)?;
    }
    Ok(())
}

/// An NGUID of this project: prefix, namespace kind (1 Key Value, 2 block) and `identity`, big-endian.
fn nguid(kind: u8, identity: u64) -> [u8; 16] {
    let mut nguid = [0; 16];
    nguid[..7].copy_from_slice(b"octokv\0");
    nguid[7] = kind;
    nguid[8..].copy_from_slice(&identity.to_be_bytes());
    nguid
}

/// Namespace 1 of a volume as hosts see it.
pub fn namespace_info(volume: &impl Volume, key_bytes_max: u16) -> NamespaceInfo {
    let VolumeInfo { id, value_bytes_max, capacity_bytes, record_layout, has_iterators } = volume.info();
    NamespaceInfo {
        id: octokv_base::NamespaceId(1),
        nguid: nguid(1, id),
        size_bytes: capacity_bytes,
        used_bytes: volume.used_bytes(),
        kind: NamespaceKind::KeyValue {
            value_bytes_max: value_bytes_max as u32,
            key_bytes_max,
            record_layout,
            has_iterators,
        },
        ana_group: 1,
        tokens: None,
    }
}

/// The devices of a volume that is not served, and a queue to them.
///
/// # Errors
/// A device does not open or is in use.
fn open_offline(paths: &[PathBuf]) -> Result<(ReactorHandle, Vec<Rc<dyn Device>>), StartError> {
    let open = |path: &PathBuf| {
        let config = DeviceConfig::File { path: path.clone(), create_bytes: None };
        NamespaceDevice::open(&config, None).map(|(device, _)| device)
    };
    let namespace_devices = paths.iter().map(open).collect::<Result<Vec<_>, _>>()?;
    let handle = dedicated_handle(DeviceDriver::Auto, 64).map_err(StartError::System)?;
    let devices = open_for_core(&namespace_devices, &handle).map_err(StartError::System)?;
    Ok((handle, devices))
}

/// Reads and verifies everything on the devices of a volume, and reports to `observer` as it goes on; changes nothing.
///
/// # Errors
/// Outer: a device does not open or is in use. Inner: recovery cannot load the volume; the error has the
/// totals of a scan for intact structures.
pub fn verify_devices(
    paths: &[PathBuf],
    observer: &mut impl VerifyObserver,
) -> Result<Result<VerifyReport, VerifyFailure>, StartError> {
    let (handle, devices) = open_offline(paths)?;
    let pool = BufferPool::new(64 << 20);
    Ok(run_to_completion(&handle, AnyVolume::verify(&devices, &pool, observer)))
}

/// Makes the volume on devices one of its engine's newest format.
///
/// # Errors
/// Outer: a device does not open or is in use. Inner: recovery cannot load the volume, or a device fails; the volume is
/// then what it was.
pub fn upgrade_devices(paths: &[PathBuf]) -> Result<Result<FormatVersions, OpenError>, StartError> {
    let (handle, devices) = open_offline(paths)?;
    let pool = BufferPool::new(64 << 20);
    Ok(run_to_completion(&handle, AnyVolume::upgrade(&devices, &pool)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use octokv_base::NamespaceId;

    #[test]
    fn a_close_without_a_device_queue_names_the_device_and_the_cause() {
        let config = NamespaceConfig::blocks_in_memory(NamespaceId(2));
        let options = NamespaceOpenOptions {
            driver: DeviceDriver::Threads,
            device_depth: 1,
            device_timeout: Nanos::from_secs(30),
            swap_gap: OpenConfig::SWAP_GAP,
            durability: Durability::PowerSafe,
            compact_bytes_per_second: Some(0),
            scrub_bytes_per_second: 0,
            tree: OpenConfig::TREE,
            device_tokens: None,
            cores: 1,
            seed: Some(1),
        };
        let namespace = OpenNamespace::open(&config, options).expect("opens");
        let too_many_files = || Err(io::Error::from_raw_os_error(24));
        let error = namespace.close_on(too_many_files).expect_err("has no queue");
        assert!(matches!(&error, CloseError::Queue { error, .. } if error.raw_os_error() == Some(24)));
        let message = error.to_string();
        assert!(message.contains("device memory") && message.contains("os error 24"), "{message}");
        namespace.close(options).expect("closes");
    }
}
