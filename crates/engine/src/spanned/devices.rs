//! The devices of a volume by their superblocks: which belong together, and the place of each.
//!
//! In: devices in any order. Out: for each index of the volume its device. Invariants: devices of other volumes, or not all of a volume, are refused; one that was replaced is absent:
//! others have counted more replacements of its index than it has; of several maps the latest counts, and the highest number of devices.
//! Tested in `tests/spanned_devices.rs` and `tests/spanned_replacement.rs`.

use super::partition_map::SPAN_DEVICES_MAX;
use super::partition_set::PartitionSet;
use super::superblock::SpanSuperblock;
use crate::OpenError;
use crate::bug_injection::{self, InjectedBug};
use crate::common::superblock::{DeviceOfVolume, SuperblockError};
use crate::common::superblock_io::{read_superblock, write_superblock};
use octokv_device::Device;
use std::rc::Rc;

/// Added to the number of the latest map, the result exceeds that of a map which an absent device alone may have.
const MAPS_OVERRULED: u32 = 2;

/// The replacements of each device, as far as any of these was told.
pub(super) fn replacements_of<'a>(
    superblocks: impl Iterator<Item = &'a SpanSuperblock>,
) -> [u8; SPAN_DEVICES_MAX] {
    superblocks
        .fold([0; SPAN_DEVICES_MAX], |all, one| std::array::from_fn(|at| all[at].max(one.replacements[at])))
}

/// The superblocks of devices, each with the error of a device that cannot be read, or was replaced.
///
/// # Errors
/// A device that is none of the same volume as the others; or there are not as many as the volume has.
pub(super) async fn read_superblocks(
    devices: &[Rc<dyn Device>],
) -> Result<Vec<Result<SpanSuperblock, OpenError>>, OpenError> {
    let mut read = Vec::with_capacity(devices.len());
    for (device, at) in devices.iter().zip(0..) {
        read.push(match read_superblock::<SpanSuperblock>(&**device).await {
            Ok((superblock, _)) => Ok(superblock),
            // It held something else, or nothing, before: not a failure of a device.
            Err(OpenError::Superblock(error)) if error != SuperblockError::Damaged => {
                return Err(OpenError::SpanDevice { at, error });
            }
            Err(error) => Err(error),
        });
    }
    let mut intact = read.iter().zip(0..).filter_map(|(read, at)| Some((read.as_ref().ok()?, at)));
    let Some((first, _)) = intact.next() else {
        return Err(read[0].expect_err("none is intact"));
    };
    // A device may have missed that others were added.
    let count = read.iter().flatten().map(|superblock| superblock.device.count).max().expect("one is intact");
    let mut places = vec![false; count.into()];
    if places.len() != devices.len() {
        return Err(OpenError::DevicesMissing { have: devices.len(), count });
    }
    for (superblock, at) in read.iter().zip(0..).filter_map(|(read, at)| Some((read.as_ref().ok()?, at))) {
        if superblock.volume_id != first.volume_id {
            return Err(OpenError::OtherVolume { at });
        }
        if std::mem::replace(&mut places[usize::from(superblock.device.index)], true) {
            return Err(OpenError::DeviceTwice { at, index: superblock.device.index });
        }
    }
    let known = replacements_of(read.iter().flatten());
    for (read, at) in read.iter_mut().zip(0..) {
        let is_current = |superblock: &SpanSuperblock| {
            let index = usize::from(superblock.device.index);
            superblock.replacements[index] >= known[index]
                || bug_injection::is_injected(InjectedBug::SpanTakeReplaced)
        };
        if !read.as_ref().is_ok_and(is_current) && read.is_ok() {
            *read = Err(OpenError::DeviceReplaced { at });
        }
    }
    Ok(read)
}

/// Whether a map that no write was acknowledged by may be on an absent device: the power was lost within the cutover of a partition whose source, by the latest map of the others,
/// has noted that.
fn is_in_doubt(read: &[Result<SpanSuperblock, OpenError>], latest: &SpanSuperblock) -> bool {
    read.iter().any(Result::is_err) && read.iter().flatten().any(|of| has_noted_cutover(of, latest))
}

/// Whether the device of a superblock is by this map the source of partitions whose destination may have a later one.
fn has_noted_cutover(of: &SpanSuperblock, latest: &SpanSuperblock) -> bool {
    let own = latest.map.partitions_of(of.device.index.into());
    of.left_over.without(&own) != of.left_over
}

/// What the devices of a volume say together: the superblock with the latest map, with all devices and all replacements. A map that may be on an absent device alone is overruled.
///
/// # Panics
/// Without an intact superblock.
pub(super) fn newest_of(read: &[Result<SpanSuperblock, OpenError>]) -> SpanSuperblock {
    let by_map = |superblock: &&SpanSuperblock| superblock.map_number;
    let latest = *read.iter().flatten().max_by_key(by_map).expect("one is intact");
    // As many as were given: `read_superblocks` has compared them.
    let device = DeviceOfVolume { count: read.len() as u16, ..latest.device };
    let overruled = if is_in_doubt(read, &latest) { MAPS_OVERRULED } else { 0 };
    let map_number = latest.map_number.saturating_add(overruled);
    SpanSuperblock { device, replacements: replacements_of(read.iter().flatten()), map_number, ..latest }
}

/// Changes the superblock of a device. REQUIRES: no other writer of superblocks of the volume.
///
/// # Errors
/// The device fails, or has no intact superblock any more. The device may have the change then, but not for sure: a repetition has to write it again.
pub(super) async fn rewrite_superblock(
    device: &dyn Device,
    change: impl FnOnce(&mut SpanSuperblock),
) -> Result<(), OpenError> {
    let (mut superblock, _) = read_superblock::<SpanSuperblock>(device).await?;
    superblock.generation += 1;
    change(&mut superblock);
    Ok(write_superblock(device, &superblock).await?)
}

/// Tells the devices that missed something of all that any other knows: one that is lost may be the only one that knew. Returns for each index of the volume
/// the partitions of other devices of which the device may have keys.
///
/// # Errors
/// Of a device that has to overrule the map of an absent one.
pub(super) async fn tell_all(
    devices: &[Rc<dyn Device>],
    read: &[Result<SpanSuperblock, OpenError>],
) -> Result<Vec<PartitionSet>, OpenError> {
    let newest = newest_of(read);
    let is_in_doubt = is_in_doubt(read, &newest);
    let mut left_over = vec![PartitionSet::default(); newest.device.count.into()];
    for (device, superblock) in devices.iter().zip(read) {
        let Ok(superblock) = superblock else { continue };
        let index = usize::from(superblock.device.index);
        // What a later map has elsewhere.
        let before = superblock.left_over.with(&superblock.map.partitions_of(index));
        left_over[index] = before.without(&newest.map.partitions_of(index));
        let told = SpanSuperblock {
            device: DeviceOfVolume { count: newest.device.count, ..superblock.device },
            replacements: newest.replacements,
            map: newest.map,
            map_number: newest.map_number,
            left_over: left_over[index],
            ..*superblock
        };
        if told != *superblock {
            let told = SpanSuperblock { generation: superblock.generation + 1, ..told };
            // What fails here gets it at the next opening.
            let written = write_superblock(&**device, &told).await;
            if is_in_doubt && has_noted_cutover(superblock, &newest) {
                written?;
            }
        }
    }
    Ok(left_over)
}

/// For each index of the volume the place of its device in the list. Those without a superblock have the indices that are left.
pub(super) fn places_of(read: &[Result<SpanSuperblock, OpenError>]) -> Vec<usize> {
    let index_of = |read: &Result<SpanSuperblock, OpenError>| {
        read.as_ref().ok().map(|read| usize::from(read.device.index))
    };
    if bug_injection::is_injected(InjectedBug::SpanIgnoreIndex) {
        return (0..read.len()).collect();
    }
    let mut unknown = (0..read.len()).filter(|&at| read[at].is_err());
    let place_of = |index| {
        let known = read.iter().position(|read| index_of(read) == Some(index));
        known.or_else(|| unknown.next()).expect("as many devices as indices")
    };
    (0..read.len()).map(place_of).collect()
}
