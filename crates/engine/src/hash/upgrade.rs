//! Upgrade: makes a volume of format 1 one of format 2, in place.
//!
//! ```text
//!   recover (format 1) ─▶ superblock with a new incarnation ─▶ index without the bits that are flags in format 2,
//!        as a checkpoint in the area that is not in use ─▶ flush ─▶ superblock of format 2
//! ```
//! Records remain as they are: format 2 reads both versions of headers. Invariant: until the last superblock is durable the volume
//! is one of format 1, with everything that it holds; a crash leaves one or the other. Tested in `tests/hash_upgrade.rs`.

use super::engine::HashCore;
use super::recovery::load_volume;
use super::volume::{HashVolume, VolumeState};
use crate::common::record::RecordFormat;
use crate::common::superblock::Superblock;
use crate::common::superblock_io::write_superblock;
use crate::open_error::OpenError;
use crate::volume::FormatVersions;
use crate::{Durability, OpenConfig, WallClock};
use octokv_base::BufferPool;
use octokv_device::Device;
use std::rc::Rc;
use std::sync::Arc;

/// Upgrades the volume on a device, if it is not of the newest format.
///
/// # Errors
/// [`OpenError`], if there is no volume, it is damaged, or the device fails. The volume is then what it was.
pub(super) async fn upgrade(device: &Rc<dyn Device>, pool: &BufferPool) -> Result<FormatVersions, OpenError> {
    let mut loaded = load_volume(&**device).await?;
    let before = loaded.superblock.header().version;
    if loaded.superblock.format == RecordFormat::V2 {
        return Ok(FormatVersions { before, after: before });
    }
    // No earlier attempt has written images of this incarnation.
    loaded.superblock.incarnation += 1;
    loaded.superblock.generation += 1;
    loaded.superblock.is_clean_shutdown = false;
    write_superblock(&**device, &loaded.superblock).await?;
    loaded.superblock.format = RecordFormat::V2;
    for partition in &loaded.partitions {
        partition.state.lock().clear_flags();
    }
    let after = loaded.superblock.header().version;
    let config = OpenConfig {
        durability: Durability::PowerSafe,
        cores: 1,
        cache_bytes: 0,
        prepare_bytes: 0,
        compact_bytes_per_second: 0,
        tree: OpenConfig::TREE,
        swap_gap: OpenConfig::SWAP_GAP,
        clock: WallClock::default(),
        tokens: None,
    };
    let (partitions, space, position) = (loaded.partitions, loaded.space, loaded.position);
    let state = VolumeState {
        partitions,
        space,
        position,
        lost_pieces: loaded.lost_pieces,
        values_in_pieces: loaded.values_in_pieces,
    };
    let volume = HashVolume::new(loaded.superblock, state, device.geometry().block_bytes, false, config);
    let core = HashCore::new(Arc::clone(&volume), 0, Rc::clone(device), pool.clone());
    core.checkpoint(true).await?;
    Ok(FormatVersions { before, after })
}
