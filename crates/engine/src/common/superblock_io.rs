//! Reads and writes the four superblocks of a device, and tells whether it holds a volume.

use super::superblock::{
    SUPERBLOCK_AREA_BYTES, SUPERBLOCK_BYTES, SUPERBLOCK_STRIDE_BYTES, SUPERBLOCKS, Superblock,
    SuperblockError, SuperblockHeader, UncheckedSuperblock,
};
use crate::open_error::{MetadataStructure, OpenError};
use octokv_base::{Buffer, Lba};
use octokv_device::{Device, DeviceError};

/// Writes a superblock: first one copy, then, when that is durable, the other.
///
/// # Errors
/// The device's: either generation may then be found.
pub async fn write_superblock<S: Superblock>(device: &dyn Device, superblock: &S) -> Result<(), DeviceError> {
    let blocks = SUPERBLOCK_STRIDE_BYTES / u64::from(device.geometry().block_bytes);
    for copy in 0..2 {
        let mut buffer = Buffer::zeroed(SUPERBLOCK_STRIDE_BYTES as usize);
        let bytes = superblock.encode();
        buffer[..bytes.len()].copy_from_slice(&bytes);
        let slot = superblock.header().generation % 2 + copy * 2;
        device.write(Lba(slot * blocks), buffer).await.result?;
        device.flush().await.result?;
    }
    Ok(())
}

/// The result of reading one of the four superblocks: slot `generation % 2 + copy * 2`.
pub type SuperblockSlot<S> = Result<S, SlotError>;

/// Why a slot gives no superblock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SlotError {
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
pub fn slot_lba(device: &dyn Device, slot: u64) -> Lba {
    Lba(slot * SUPERBLOCK_STRIDE_BYTES / u64::from(device.geometry().block_bytes))
}

/// Reads all four superblocks.
///
/// # Errors
/// [`OpenError::TooSmall`] if the device has no place for them.
pub async fn read_slots<S: Superblock>(device: &dyn Device) -> Result<Vec<SuperblockSlot<S>>, OpenError> {
    let have_bytes = device.geometry().bytes();
    let need_bytes = SUPERBLOCK_AREA_BYTES;
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

/// The superblocks among the first bytes of a device, slot by slot.
pub fn check_slots<S: Superblock>(area: &[u8]) -> impl Iterator<Item = SuperblockSlot<S>> {
    unchecked(area).map(|superblock| superblock.check().map_err(SlotError::Content))
}

/// The superblock of the highest generation among the intact ones.
pub fn newest<S: Superblock>(slots: &[SuperblockSlot<S>]) -> Option<S> {
    slots.iter().filter_map(|slot| slot.ok()).max_by_key(|superblock| superblock.header().generation)
}

/// Reads the newest superblock and the number of damaged copies.
///
/// # Errors
/// [`OpenError::Superblock`] if no slot is intact, or if one is of another version or engine or has a field value
/// that this code does not know: that software's state would be lost. [`OpenError::CopiesUnreadable`] if both
/// copies of one parity of generations are lost, since the newest may have been among them.
pub async fn read_superblock<S: Superblock>(device: &dyn Device) -> Result<(S, u64), OpenError> {
    let slots = read_slots::<S>(device).await?;
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

/// Reads the superblocks' area, or what the device has of it.
async fn read_area(device: &dyn Device) -> Result<Buffer, DeviceError> {
    let bytes = SUPERBLOCK_AREA_BYTES.min(device.geometry().bytes()) as usize;
    device.read(Lba(0), Buffer::zeroed(bytes)).await.into_read()
}

/// Whether the place of the superblocks is all zeros.
///
/// # Errors
/// The device's.
pub async fn is_blank(device: &dyn Device) -> Result<bool, DeviceError> {
    Ok(read_area(device).await?.iter().all(|&byte| byte == 0))
}

/// The newest intact superblock of any engine among the first bytes of a device.
pub fn newest_header(area: &[u8]) -> Option<SuperblockHeader> {
    let headers = unchecked(area).filter_map(|superblock| superblock.header().ok());
    headers.max_by_key(|header| header.generation)
}

fn unchecked(area: &[u8]) -> impl Iterator<Item = UncheckedSuperblock<'_>> {
    let slots = area.chunks(SUPERBLOCK_STRIDE_BYTES as usize);
    slots.filter_map(|slot| slot.first_chunk().map(UncheckedSuperblock))
}

/// The newest intact superblock of any engine; `None` if there is none.
///
/// # Errors
/// The device's.
pub async fn read_header(device: &dyn Device) -> Result<Option<SuperblockHeader>, DeviceError> {
    Ok(newest_header(&read_area(device).await?))
}

/// Whether the device holds a volume of any engine or version, damaged ones included.
///
/// # Errors
/// The device's.
pub async fn holds_volume(device: &dyn Device) -> Result<bool, DeviceError> {
    let area = read_area(device).await?;
    let is_none = |error| matches!(error, SuperblockError::Foreign | SuperblockError::Blank);
    Ok(unchecked(&area).any(|superblock| !superblock.header().is_err_and(is_none)))
}

/// Zeroes the superblocks, and makes that durable: what remains is not mistaken for a volume.
///
/// # Errors
/// The device's.
pub async fn erase_superblocks(device: &dyn Device) -> Result<(), DeviceError> {
    let bytes = SUPERBLOCK_AREA_BYTES.min(device.geometry().bytes()) as usize;
    device.write(Lba(0), Buffer::zeroed(bytes)).await.result?;
    device.flush().await.result
}
