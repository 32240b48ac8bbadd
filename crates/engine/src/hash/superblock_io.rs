//! Reads and writes the four superblocks of a device.

use super::error::OpenError;
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

/// The newest superblock, and how many damaged copies were met.
pub(super) async fn read_superblock(device: &dyn Device) -> Result<(Superblock, u64), OpenError> {
    let geometry = device.geometry();
    let area_bytes = SUPERBLOCKS * SUPERBLOCK_STRIDE_BYTES;
    if geometry.bytes() < area_bytes {
        return Err(OpenError::TooSmall { have_bytes: geometry.bytes(), need_bytes: area_bytes });
    }
    let (mut found, mut failed) = (Vec::new(), None);
    for slot in 0..SUPERBLOCKS {
        let at = Lba(slot * SUPERBLOCK_STRIDE_BYTES / u64::from(geometry.block_bytes));
        let buffer = Buffer::zeroed(SUPERBLOCK_STRIDE_BYTES as usize);
        found.push(match device.read(at, buffer).await.into_read() {
            Ok(bytes) => {
                UncheckedSuperblock(bytes[..SUPERBLOCK_BYTES].try_into().expect("512 bytes")).check()
            }
            Err(error) => {
                failed = Some(error);
                Err(SuperblockError::Damaged)
            }
        });
    }
    let newest = found.iter().filter_map(|found| found.ok()).max_by_key(|superblock| superblock.generation);
    let Some(newest) = newest else {
        if let Some(error) = failed {
            return Err(error.into());
        }
        let errors: Vec<SuperblockError> = found.iter().filter_map(|found| found.err()).collect();
        let is_specific = |error: &&SuperblockError| {
            matches!(error, SuperblockError::Version(_) | SuperblockError::Engine(_))
        };
        let damaged = errors.contains(&SuperblockError::Damaged).then_some(&SuperblockError::Damaged);
        let error = errors.iter().find(is_specific).or(damaged).unwrap_or(&errors[0]);
        return Err(OpenError::Superblock(*error));
    };
    let is_damaged =
        |at: usize| matches!(found[at], Err(SuperblockError::Damaged | SuperblockError::Foreign));
    // A crash tears at most one copy of a generation: with both gone, the newest may be among them.
    if (is_damaged(0) && is_damaged(2)) || (is_damaged(1) && is_damaged(3)) {
        return Err(OpenError::Damaged { structure: "superblock", lba: 0 });
    }
    let damaged = (0..4).filter(|&at| is_damaged(at)).count() as u64;
    Ok((newest, damaged))
}
