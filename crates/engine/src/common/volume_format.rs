//! The steps of a format that engines share: choosing the unit, and writing an empty volume with a journal.
//!
//! In: a device's geometry, and the superblock of a new volume. Out: zeros over all superblocks and over the first batch
//! of each journal copy, then one superblock in both copies. Nothing else is written: recovery reads nothing else of a
//! volume without a checkpoint and without a first batch.

use super::journal::{BATCH_HEADER_BYTES, batch_units};
use super::superblock::Superblock;
use super::superblock_io::{erase_superblocks, write_superblock};
use super::volume_layout::{UNIT_BYTES, VolumeLayout};
use crate::open_error::OpenError;
use octokv_base::{Buffer, Lba};
use octokv_device::{Device, DeviceError, Geometry};
use std::rc::Rc;

/// The device of a volume whose format has one.
///
/// # Errors
/// [`OpenError::DeviceCount`].
pub(crate) fn only_device(devices: &[Rc<dyn Device>]) -> Result<&Rc<dyn Device>, OpenError> {
    match devices {
        [device] => Ok(device),
        _ => Err(OpenError::DeviceCount { have: devices.len(), most: 1 }),
    }
}

/// The unit of a new volume: the configured one, else the smallest whose write needs no read below and that `suits` the engine, or the
/// largest if there is none.
///
/// # Errors
/// [`OpenError::BlockTooLarge`].
pub(crate) fn choose_unit_bytes(
    geometry: Geometry,
    preferred_write_bytes: u32,
    configured: Option<u32>,
    suits: impl Fn(u32) -> bool,
) -> Result<u32, OpenError> {
    let [smaller @ .., largest] = UNIT_BYTES;
    let chosen = || {
        let mut smaller = smaller.into_iter();
        smaller
            .find(|&unit_bytes| unit_bytes >= preferred_write_bytes && suits(unit_bytes))
            .unwrap_or(largest)
    };
    let unit_bytes = configured.unwrap_or_else(chosen);
    match geometry.block_bytes > unit_bytes {
        true => Err(OpenError::BlockTooLarge { block_bytes: geometry.block_bytes, unit_bytes }),
        false => Ok(unit_bytes),
    }
}

/// A layout of `units` units, with a data area behind the other regions.
///
/// # Errors
/// [`OpenError::TooSmall`] if that would have fewer than `data_units_min` units.
pub(crate) fn fill_with_data(
    geometry: Geometry,
    layout: VolumeLayout,
    units: u64,
    data_units_min: u64,
) -> Result<VolumeLayout, OpenError> {
    let units_min = layout.data_start_unit + data_units_min;
    if units < units_min {
        let need_bytes = units_min * u64::from(layout.unit_bytes);
        return Err(OpenError::TooSmall { have_bytes: geometry.bytes(), need_bytes });
    }
    Ok(VolumeLayout { data_units: units - layout.data_start_unit, ..layout })
}

/// Writes a new volume, the batches of whose journal have at most so many bytes.
///
/// # Errors
/// The device's: there may be no volume then, or the new one.
pub(crate) async fn write_volume<S: Superblock>(
    device: &dyn Device,
    superblock: &S,
    layout: &VolumeLayout,
    batch_bytes_max: usize,
) -> Result<(), DeviceError> {
    // The other slots may hold superblocks of an older volume: erase them first.
    erase_superblocks(device).await?;
    // With the same seed, an older volume has the same id: its journal must not continue this one's.
    let unit_blocks = u64::from(layout.unit_bytes / device.geometry().block_bytes);
    let first_bytes =
        batch_units(batch_bytes_max - BATCH_HEADER_BYTES, layout.unit_bytes) * layout.unit_bytes;
    for copy in 0..2 {
        let first = Buffer::zeroed(first_bytes as usize);
        device.write(Lba(layout.journal_start_unit(copy) * unit_blocks), first).await.result?;
    }
    device.flush().await.result?;
    write_superblock(device, superblock).await
}
