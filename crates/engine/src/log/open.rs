//! Opening a volume: recovery, a superblock with the next incarnation, and a checkpoint if recovery has decided something.
//!
//! In: a device, after any crash or none. Out: an open volume. Invariants: nothing is written before recovery has read everything; the new
//! incarnation is on the device before anything else is written, so that images which recovery refused are refused again.
//! Tested by the conformance suite and by power loss.

use super::core::LogCore;
use super::format;
use super::log_place::{LogKind, LogPlace};
use super::recovery::{RecoveredStore, RecoveredVolume, recover_volume};
use super::settings::LogSettings;
use super::store::{Store, StoreParts, WaitingChunk};
use super::superblock::LogSuperblock;
use super::value_tail::{ValueTail, ValueTailConfig};
use super::volume::LogVolume;
use crate::common::superblock_io::write_superblock;
use crate::{EngineError, FormatConfig, OpenConfig, OpenError};
use octokv_base::BufferPool;
use octokv_device::Device;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Opens the volume on a device for `config.cores` cores. A volatile device is formatted with `format` first.
///
/// # Errors
/// [`OpenError`], if there is no volume, it is damaged, or the device fails.
pub async fn open(
    device: &Rc<dyn Device>,
    pool: &BufferPool,
    config: OpenConfig,
    format: &FormatConfig,
) -> Result<Arc<LogVolume>, OpenError> {
    open_with(device, pool, config, format, |_| {}).await
}

/// The same, with other settings.
///
/// # Errors
/// As for [`open`].
pub async fn open_with(
    device: &Rc<dyn Device>,
    pool: &BufferPool,
    config: OpenConfig,
    format: &FormatConfig,
    adjust: impl FnOnce(&mut LogSettings),
) -> Result<Arc<LogVolume>, OpenError> {
    let geometry = device.geometry();
    if geometry.volatile {
        format::format(&**device, format).await?;
    }
    let recovered = recover_volume(&**device).await?;
    let needs_checkpoint = recovered.needs_checkpoint;
    let superblock = &recovered.superblock;
    let mut settings = LogSettings::new(&superblock.layout, &config);
    adjust(&mut settings);
    let opened = LogSuperblock {
        generation: superblock.generation + 1,
        incarnation: superblock.incarnation + 1,
        is_clean_shutdown: false,
        ..*superblock
    };
    write_superblock(&**device, &opened).await.map_err(OpenError::Device)?;
    let volume = volume_of(recovered, opened, geometry.block_bytes, config, settings);
    if needs_checkpoint {
        let core = LogCore::new(Arc::clone(&volume), Rc::clone(device), pool.clone());
        core.checkpoint(false).await.map_err(open_error)?;
    }
    Ok(volume)
}

/// The volume that recovery found, in memory, with the superblock of its opening.
pub(super) fn volume_of(
    recovered: RecoveredVolume,
    superblock: LogSuperblock,
    block_bytes: u32,
    config: OpenConfig,
    settings: LogSettings,
) -> Arc<LogVolume> {
    let layout = &superblock.layout;
    let used_of = |store| used_bytes_of(store, layout.unit_bytes, layout.granule_log2);
    let used_bytes = recovered.stores.iter().map(used_of).sum();
    let replayed_images = recovered.stores.iter().map(|store| store.images).sum();
    let last_incarnation = recovered.superblock.incarnation;
    let of_recovered = |store| store_of(store, &superblock, last_incarnation, &settings);
    let stores = recovered.stores.into_iter().map(of_recovered).collect();
    let volume =
        LogVolume::new(superblock, recovered.pool, stores, used_bytes, block_bytes, config, settings);
    volume.counters.replayed_images.store(replayed_images, Ordering::Relaxed);
    volume
}

/// The live bytes of a store: images, records and their ids.
fn used_bytes_of(store: &RecoveredStore, unit_bytes: u32, granule_log2: u8) -> u64 {
    let units: u64 = store.table.images().map(|(_, image)| u64::from(image.chain())).sum();
    let ids = store.totals.keys * super::chunk_directory::DIRECTORY_ID_BYTES as u64;
    units * u64::from(unit_bytes) + (store.totals.live_granules << granule_log2) + ids
}

fn store_of(
    store: RecoveredStore,
    superblock: &LogSuperblock,
    last_incarnation: u32,
    settings: &LogSettings,
) -> Store {
    let config = ValueTailConfig {
        volume_id: superblock.volume_id,
        partition: store.partition,
        incarnation: superblock.incarnation,
        layout: superblock.layout,
        rewrites_tail: settings.rewrites_tail,
    };
    let tail: LogPlace = store.values.tail();
    let retired = store.retired.iter().map(|retired| WaitingChunk {
        log: LogKind::Keys,
        index: retired.index,
        chunk: retired.chunk,
        // The head behind them is that of an image that was recovered.
        stated_by: Some(store.last_sequence),
    });
    let replay_start = store.retired.first().map_or(store.keys.head(), |first| first.index);
    let parts = StoreParts {
        totals: store.totals,
        last_sequence: store.last_sequence,
        previous: store.previous,
        incarnation: last_incarnation,
        stated_value_chunk: tail.index,
        retired: retired.collect(),
        pinned: store.pinned,
        replay_start,
        is_lost: store.is_lost,
        table: store.table,
        keys: store.keys,
        values: store.values,
    };
    Store::new(store.partition, store.range, parts, ValueTail::new(config, tail))
}

/// The failure of a checkpoint during opening.
fn open_error(error: EngineError) -> OpenError {
    match error {
        EngineError::Device { error, .. } => OpenError::Device(error),
        // A flush or a superblock failed.
        _ => OpenError::Device(octokv_device::DeviceError::Io(5)),
    }
}
