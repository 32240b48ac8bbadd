//! Writes to the superblock of a device which of its partitions may have keys in the regions of other devices.
//!
//! In: the whole device and the notes. Out: its superblock has them, and is otherwise unchanged. REQUIRES: one writer of superblocks of the volume at a time.

use super::superblock::SpanSuperblock;
use super::swapped_keys::SwapNotes;
use crate::OpenError;
use crate::common::superblock_io::{read_superblock, write_superblock};
use octokv_device::Device;
use std::rc::Rc;

/// See the module header.
///
/// # Errors
/// The device fails, or has no intact superblock any more.
pub(super) async fn write(device: &Rc<dyn Device>, swaps: SwapNotes) -> Result<(), OpenError> {
    let (superblock, _) = read_superblock::<SpanSuperblock>(&**device).await?;
    if superblock.swaps != swaps {
        let generation = superblock.generation + 1;
        write_superblock(&**device, &SpanSuperblock { swaps, generation, ..superblock }).await?;
    }
    Ok(())
}
