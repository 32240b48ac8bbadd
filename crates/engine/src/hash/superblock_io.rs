//! Reads and writes the four superblocks of a device.

use super::error::{MetadataStructure, OpenError};
use super::superblock::{
    SUPERBLOCK_BYTES, SUPERBLOCK_STRIDE_BYTES, SUPERBLOCKS, Superblock, SuperblockError, UncheckedSuperblock,
};
use octokv_base::{Buffer, Lba};
use octokv_device::{Device, DeviceError};

/// Writes a superblock: first one copy, then, when that is durable, the other.
pub(super) async fn write_superblock(
    device: &dyn Device,
    superblock: &Superblock,
) -> Result<(), DeviceError> {
    let blocks = SUPERBLOCK_STRIDE_BYTES / u64::from(device.geometry().block_bytes);
    for copy in 0..2 {
        let mut buffer = Buffer::zeroed(SUPERBLOCK_STRIDE_BYTES as usize);
        let bytes = superblock.encode();
        buffer[..bytes.len()].copy_from_slice(&bytes);
        let slot = superblock.generation % 2 + copy * 2;
        device.write(Lba(slot * blocks), buffer).await.result?;
        device.flush().await.result?;
    }
    Ok(())
}

/// The result of reading one of the four superblocks: slot `generation % 2 + copy * 2`.
pub(super) type SuperblockSlot = Result<Superblock, SlotError>;

/// Why a slot gives no superblock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SlotError {
    /// Its bytes were read and are none that can be used.
    Content(SuperblockError),
    /// The device did not read them.
    Device(DeviceError),
}

impl SlotError {
    /// Whether the copy is lost, as opposed to never written or written by other software.
    fn is_damage(self) -> bool {
        match self {
            SlotError::Device(_) => true,
            SlotError::Content(error) => matches!(
                error,
                SuperblockError::Damaged | SuperblockError::Inconsistent | SuperblockError::Foreign
            ),
        }
    }
}

/// The first block of a superblock slot.
pub(super) fn slot_lba(device: &dyn Device, slot: u64) -> Lba {
    Lba(slot * SUPERBLOCK_STRIDE_BYTES / u64::from(device.geometry().block_bytes))
}

/// Reads all four superblocks.
///
/// # Errors
/// [`OpenError::TooSmall`] if the device has no place for them.
pub(super) async fn read_slots(device: &dyn Device) -> Result<Vec<SuperblockSlot>, OpenError> {
    let have_bytes = device.geometry().bytes();
    let need_bytes = SUPERBLOCKS * SUPERBLOCK_STRIDE_BYTES;
    if have_bytes < need_bytes {
        return Err(OpenError::TooSmall { have_bytes, need_bytes });
    }
    let mut slots = Vec::with_capacity(SUPERBLOCKS as usize);
    for slot in 0..SUPERBLOCKS {
        let buffer = Buffer::zeroed(SUPERBLOCK_STRIDE_BYTES as usize);
        slots.push(match device.read(slot_lba(device, slot), buffer).await.into_read() {
            Ok(bytes) => UncheckedSuperblock(bytes[..SUPERBLOCK_BYTES].try_into().expect("512 bytes"))
                .check()
                .map_err(SlotError::Content),
            Err(error) => Err(SlotError::Device(error)),
        });
    }
    Ok(slots)
}

/// The superblock of the highest generation among the intact ones.
pub(super) fn newest(slots: &[SuperblockSlot]) -> Option<Superblock> {
    slots.iter().filter_map(|slot| slot.ok()).max_by_key(|superblock| superblock.generation)
}

/// Reads the newest superblock and the number of damaged copies.
///
/// # Errors
/// [`OpenError::Superblock`] if no slot is intact, or if one is of another version or engine or has a field value
/// that this code does not know: that software's state would be lost. [`OpenError::CopiesUnreadable`] if both
/// copies of one parity of generations are lost, since the newest may have been among them.
pub(super) async fn read_superblock(device: &dyn Device) -> Result<(Superblock, u64), OpenError> {
    let slots = read_slots(device).await?;
    let errors = || slots.iter().filter_map(|slot| slot.err());
    let contents = || {
        errors().filter_map(|error| match error {
            SlotError::Content(error) => Some(error),
            SlotError::Device(_) => None,
        })
    };
    if let Some(unsupported) = contents().find(SuperblockError::is_unsupported) {
        return Err(unsupported.into());
    }
    let Some(newest) = newest(&slots) else {
        if let Some(SlotError::Device(error)) = errors().find(|error| matches!(error, SlotError::Device(_))) {
            return Err(error.into());
        }
        let damage = [SuperblockError::Inconsistent, SuperblockError::Damaged];
        let error = damage.into_iter().find(|damage| contents().any(|error| error == *damage));
        return Err(error.or_else(|| contents().next()).expect("an error for each slot").into());
    };
    let is_damaged = |slot: usize| slots[slot].is_err_and(SlotError::is_damage);
    // A crash tears at most one copy of a generation.
    if let Some(slot) = (0..2).find(|&slot| is_damaged(slot) && is_damaged(slot + 2)) {
        let lbas = [slot, slot + 2].map(|slot| slot_lba(device, slot as u64).0);
        return Err(OpenError::CopiesUnreadable { structure: MetadataStructure::Superblock, lbas });
    }
    Ok((newest, (0..SUPERBLOCKS as usize).filter(|&slot| is_damaged(slot)).count() as u64))
}
