//! Validation of a node's configuration: settings before any device is opened, and volumes that are copies.
//!
//! In: a configuration. Out: nothing, or the first invalid setting with its valid values.

use crate::config::{
    ANA_GROUPS_MAX, CACHE_BYTES_MIN, CommandSetConfig, DEVICE_TIMEOUT_MIN, DeviceConfig, ITERATOR_IDLE_MIN,
    NAMESPACE_ID_MAX, NamespaceConfig, NodeConfig, PREPARE_BYTES_MAX, REQUESTS_MAX,
};
use crate::error::StartError;
use crate::namespace_open::OpenNamespace;
use octokv_base::NamespaceId;
use octokv_engine::FormatConfig;
use octokv_engine::log::log_layout::CHUNK_BYTES_MAX;
use octokv_engine::lsm::superblock::INLINE_BYTES_LIMIT;
use octokv_engine::spanned::{SPAN_DEVICES_MAX, check_swaps};
use octokv_sys::process::available_memory_bytes;
use octokv_sys::thread;
use std::collections::{BTreeMap, BTreeSet};
use std::io;

/// Validates the settings of a node.
///
/// # Errors
/// The first setting out of its range, or a core that this process may not run on.
pub(crate) fn validate_config(config: &NodeConfig) -> Result<(), StartError> {
    let invalid = |name, why: &str| Err(StartError::InvalidSetting { name, why: why.to_owned() });
    if config.cores.is_empty() {
        return invalid("cores", "at least one is needed");
    }
    if config.listen.is_empty() {
        return invalid("listen", "at least one address is needed");
    }
    let allowed = thread::allowed_cores();
    if let Some(&core) = config.cores.iter().find(|core| !allowed.contains(core)) {
        let error =
            io::Error::new(io::ErrorKind::NotFound, format!("this process may run on cores {allowed:?}"));
        return Err(StartError::Core { core, error });
    }
    let mut sorted = config.cores.clone();
    sorted.sort_unstable();
    if sorted.windows(2).any(|pair| pair[0] == pair[1]) {
        return invalid("cores", "a core is listed twice");
    }
    validate_drive_cores(config)?;
    if config.buffer_bytes < 4 * config.format.value_bytes_max as usize {
        return invalid("buffer_bytes", "space for at least four of the longest values is needed");
    }
    if config.device_depth == 0 || config.requests_max == 0 || config.connections_max == 0 {
        return invalid("device_depth, requests_max, connections_max", "must be at least 1");
    }
    if config.device_timeout < DEVICE_TIMEOUT_MIN {
        return invalid("device_timeout", "must be at least one second");
    }
    if config.requests_max > REQUESTS_MAX {
        return invalid("requests_max", &format!("must be at most {REQUESTS_MAX}"));
    }
    if config.nqn.is_empty() || config.nqn.len() > 223 {
        return invalid("nqn", "must have 1 to 223 bytes");
    }
    if config.nqn == octokv_wire::nqn::DISCOVERY {
        return invalid("nqn", "this name is reserved for discovery");
    }
    validate_devices(&config.devices, true)?;
    if config.tree.iterator_idle < ITERATOR_IDLE_MIN {
        return invalid("iterator_idle", "must be at least one second");
    }
    Ok(())
}

/// Validates the cores for drives.
fn validate_drive_cores(config: &NodeConfig) -> Result<(), StartError> {
    let invalid = |why: String| Err(StartError::InvalidSetting { name: "drive_cores", why });
    let drive_cores = &config.drive_cores;
    for (at, core) in drive_cores.iter().enumerate() {
        if drive_cores[..at].contains(core) {
            return invalid(format!("core {core} is listed twice"));
        }
        if !config.cores.contains(core) {
            return invalid(format!("core {core} is not one of cores"));
        }
    }
    if drive_cores.len() == config.cores.len() {
        return invalid("at least one of cores has to be left for connections".to_owned());
    }
    Ok(())
}

/// Validates one namespace's configuration by itself.
///
/// # Errors
/// The first setting out of its range.
pub(crate) fn validate_namespace(config: &NamespaceConfig) -> Result<(), StartError> {
    let invalid = |name, why: &str| Err(StartError::InvalidSetting { name, why: why.to_owned() });
    if config.id.0 == 0 || config.id.0 > NAMESPACE_ID_MAX {
        return invalid("nsid", &format!("must be 1 to {NAMESPACE_ID_MAX}"));
    }
    if !(1..=ANA_GROUPS_MAX).contains(&config.ana_group) {
        return invalid("ana_group", &format!("must be 1 to {ANA_GROUPS_MAX}"));
    }
    if let CommandSetConfig::Blocks { block_bytes } = config.command_set
        && !matches!(block_bytes, 512 | 4096)
    {
        return invalid("block_size", "must be 512 or 4096");
    }
    if let CommandSetConfig::KeyValue { format } = config.command_set
        && format.inline_bytes_max > INLINE_BYTES_LIMIT
    {
        return invalid("inline_bytes_max", &format!("must be at most {INLINE_BYTES_LIMIT}"));
    }
    if let CommandSetConfig::KeyValue { format } = config.command_set {
        validate_chunks(&format)?;
        if format.swap_bytes > 0 {
            validate_swaps(&format, config.devices.len())?;
        }
    }
    if config.cache_bytes > 0 {
        validate_cache(config)?;
    }
    if config.prepare_bytes > 0 && matches!(config.command_set, CommandSetConfig::Blocks { .. }) {
        return invalid("prepare_bytes", "only a key-value namespace is prepared");
    }
    if config.prepare_bytes > PREPARE_BYTES_MAX {
        return invalid("prepare_bytes", &format!("must be at most {PREPARE_BYTES_MAX}"));
    }
    validate_devices(&config.devices, matches!(config.command_set, CommandSetConfig::KeyValue { .. }))
}

/// Validates the devices of a namespace.
fn validate_devices(devices: &[DeviceConfig], may_be_several: bool) -> Result<(), StartError> {
    let invalid = |name, why: String| Err(StartError::InvalidSetting { name, why });
    let most = if may_be_several { SPAN_DEVICES_MAX } else { 1 };
    if !(1..=most).contains(&devices.len()) {
        return invalid("device", format!("{} devices: must be 1 to {most}", devices.len()));
    }
    if devices.iter().any(|device| matches!(device, DeviceConfig::File { create_bytes: Some(0), .. })) {
        return invalid("size", "must be at least one block".to_owned());
    }
    let in_memory = devices.iter().filter(|device| matches!(device, DeviceConfig::Memory { .. })).count();
    if in_memory > 0 && in_memory < devices.len() {
        return invalid("device", "some in memory, which ends with the process, and others not".to_owned());
    }
    let mut paths = BTreeSet::new();
    for device in devices {
        if let DeviceConfig::File { path, .. } = device
            && !paths.insert(path)
        {
            return invalid("device", format!("{} is there twice", path.display()));
        }
    }
    Ok(())
}

/// Validates what only the log engine uses.
fn validate_chunks(format: &FormatConfig) -> Result<(), StartError> {
    let invalid = |name, why: &str| Err(StartError::InvalidSetting { name, why: why.to_owned() });
    if format.partitions == 0 {
        return invalid("partitions", "must be at least 1");
    }
    if let Some(bytes) = format.chunk_bytes
        && !(bytes.is_power_of_two() && bytes <= CHUNK_BYTES_MAX)
    {
        return invalid("chunk_bytes", &format!("must be a power of two of at most {CHUNK_BYTES_MAX}"));
    }
    Ok(())
}

/// Validates the size of swap regions that is not 0.
fn validate_swaps(format: &FormatConfig, devices: usize) -> Result<(), StartError> {
    let invalid = |why: &str| Err(StartError::InvalidSetting { name: "swap_bytes", why: why.to_owned() });
    if devices == 1 {
        return invalid("only a namespace on several devices has swap regions");
    }
    match check_swaps(format) {
        Ok(()) => Ok(()),
        Err(error) => invalid(&error.to_string()),
    }
}

/// Validates the size of a cache that is not 0.
fn validate_cache(config: &NamespaceConfig) -> Result<(), StartError> {
    let invalid = |why: String| Err(StartError::InvalidSetting { name: "cache_bytes", why });
    let bytes = config.cache_bytes;
    if matches!(config.command_set, CommandSetConfig::Blocks { .. }) {
        return invalid("only a key-value namespace has a cache of values".to_owned());
    }
    let is_memory = |device: &DeviceConfig| matches!(device, DeviceConfig::Memory { .. });
    if config.devices.iter().all(is_memory) && config.drive_profile.is_none() {
        return invalid("a namespace in memory needs no cache of its values".to_owned());
    }
    if bytes < CACHE_BYTES_MIN {
        return invalid(format!("{bytes} bytes are too few: at least {CACHE_BYTES_MIN}, or 0 for no cache"));
    }
    // Memory is committed as the cache fills: more than is available would get this process, or another, killed.
    if let Some(available) = available_memory_bytes().filter(|available| bytes > *available) {
        return invalid(format!("{bytes} bytes of memory are more than the {available} that are available"));
    }
    Ok(())
}

/// Rejects a volume that is a copy of another: both would have the same NGUID.
///
/// # Errors
/// [`StartError::InvalidSetting`] with the namespace of the original.
pub(crate) fn reject_duplicate(
    open_namespaces: &BTreeMap<NamespaceId, OpenNamespace>,
    new: OpenNamespace,
) -> Result<OpenNamespace, StartError> {
    let nguid = new.info(0).nguid;
    match open_namespaces.iter().find(|(_, open)| open.info(0).nguid == nguid) {
        None => Ok(new),
        Some((original, _)) => {
            let why = format!("{} is a copy of the volume of namespace {original}", new.name());
            Err(StartError::InvalidSetting { name: "device", why })
        }
    }
}
