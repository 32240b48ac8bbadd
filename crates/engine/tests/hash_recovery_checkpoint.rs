//! Recovery of checkpoints: images of any size are read from either copy, and nothing beyond the checkpoint.

use crate::common::crafted_volume::{BLOCK_BYTES, CraftedVolume, UNIT_BYTES};
use octokv_base::Lba;
use octokv_device::fault_injection::{FaultPlan, FaultRule, InjectedFault, OpFilter};
use octokv_engine::Engine;
use octokv_engine::hash::index::{IndexEntry, RecordRef, TAG_BITS};
use octokv_engine::{IndexMismatch, MetadataStructure, OpenError};

const HEADER_BYTES: usize = 48;
const ENTRY_BYTES: usize = 16;
/// How much of a checkpoint is read at once.
const WINDOW_BYTES: usize = 1 << 20;

/// A volume whose checkpoint has `counts` entries per partition, the offsets of the images and the units in use.
fn volume_of(counts: &[usize]) -> (CraftedVolume, Vec<usize>, u64) {
    let mut volume = CraftedVolume::new(counts.len().ilog2() as u8, 248, 0, 4_000, 1 << 19);
    let mut location = volume.superblock.layout.data_start_unit;
    let mut entries = |count: usize| {
        let entry = |number: u64| {
            let units = 1 + number % 3;
            location += units;
            // Spread over the table.
            let tag = number * ((1 << TAG_BITS) / (count as u64 + 1));
            IndexEntry::new(tag, RecordRef { location: location - units, units, fingerprint: 1 })
        };
        (1..=count as u64).map(entry).collect()
    };
    let partitions: Vec<Vec<IndexEntry>> = counts.iter().map(|&count| entries(count)).collect();
    let offsets = volume.write_checkpoint(&partitions);
    (volume, offsets, location)
}

/// The image of one partition ends at the end of a window, 32 bytes before it, fills a window, or is longer. Each with the
/// number of reads.
fn layouts() -> [(Vec<usize>, usize); 3] {
    let after_two = 2 * HEADER_BYTES + 45_000 * ENTRY_BYTES;
    let rest = (WINDOW_BYTES - after_two - HEADER_BYTES - 32) / ENTRY_BYTES;
    let to_end = (WINDOW_BYTES - 2 * HEADER_BYTES) / ENTRY_BYTES;
    [
        (vec![20_000, 25_000, rest, 66_000, 0, 3, 0, 5_000], 4),
        (vec![0, to_end, 7, 0], 2),
        (vec![to_end + 3, 1], 2),
    ]
}

fn assert_complete(
    volume: &CraftedVolume,
    counts: &[usize],
    end: u64,
    checkpoints: u64,
    context: &str,
) -> usize {
    let device = volume.prepared();
    let engine = volume.open_on(&device).unwrap_or_else(|error| panic!("{context}: {error}"));
    let statistics = engine.statistics();
    let used_bytes = (end - volume.superblock.layout.data_start_unit) * UNIT_BYTES as u64;
    let want = (counts.iter().sum::<usize>() as u64, used_bytes, checkpoints);
    assert_eq!((statistics.keys, statistics.used_bytes, statistics.checkpoints), want, "{context}");
    let area = volume.checkpoint_lbas()[0]..volume.checkpoint_lbas()[1];
    device.reads.borrow().iter().filter(|(lba, _)| area.contains(lba)).count()
}

#[test]
fn images_of_any_size_are_read_in_windows_and_from_the_second_copy_if_the_first_is_damaged() {
    for (counts, windows) in layouts() {
        let (volume, offsets, end) = volume_of(&counts);
        assert_eq!(assert_complete(&volume, &counts, end, 0, "intact"), windows, "reads");
        for (partition, &at) in offsets.iter().enumerate() {
            let context = format!("partition {partition} of {counts:?}");
            let damaged = CraftedVolume { device: volume.device.clone(), ..volume.clone() };
            damaged.device.damage(volume.checkpoint_lbas()[0], at + 20);
            // A damaged copy is repaired at once.
            assert_complete(&damaged, &counts, end, 1, &context);
            let lbas = volume.checkpoint_lbas().map(|lba| lba + (at / UNIT_BYTES * 2) as u64);
            damaged.device.damage(volume.checkpoint_lbas()[1], at + 20);
            let structure = MetadataStructure::CheckpointImage { partition: partition as u32 };
            assert_eq!(damaged.open_error(), OpenError::CopiesUnreadable { structure, lbas }, "{context}");
        }
        // A block of the first copy that cannot be read costs a window, which the second copy replaces.
        let unreadable = CraftedVolume { faults: FaultPlan::default(), ..volume.clone() };
        let lba = volume.checkpoint_lbas()[0] + (offsets[1] / BLOCK_BYTES) as u64;
        unreadable.faults.add(FaultRule::within(
            OpFilter::Read,
            Lba(lba),
            Lba(lba + 1),
            InjectedFault::Error(5),
        ));
        assert_complete(&unreadable, &counts, end, 1, "unreadable");
        assert!(unreadable.verify().unwrap().damaged_copies >= 1);
    }
}

#[test]
fn an_opening_repairs_a_damaged_copy() {
    // A checkpoint is written in chunks of 256 KiB: this one has three.
    let (volume, offsets, _) = volume_of(&[20_000, 20_000]);
    assert_eq!(volume.verify().unwrap().damaged_copies, 0);
    volume.device.damage(volume.checkpoint_lbas()[0], offsets[1] + 60);
    assert_eq!(volume.verify().unwrap().damaged_copies, 1);
    let device = volume.prepared();
    volume.open_on(&device).unwrap();
    let report = volume.verify_on(&device).unwrap();
    assert_eq!((report.keys, report.damaged_copies), (40_000, 0));
    // The new checkpoint is in the other area. Its second copy is as good as its first.
    let first = volume.lba(volume.superblock.layout.area_start_unit(0, 0));
    for offset in offsets {
        device.damage(first, offset + 20);
    }
    let report = volume.verify_on(&device).unwrap();
    assert_eq!((report.keys, report.damaged_copies), (40_000, 2));
}

#[test]
fn an_image_that_claims_more_than_the_checkpoint_holds_is_not_read() {
    for more in [1_u32, 100] {
        let (volume, offsets, _) = volume_of(&[100, 3]);
        let [start, end] = [0, volume.superblock.checkpoint.bytes as usize]
            .map(|at| volume.checkpoint_lbas().map(|lba| lba + volume.lba(at.div_ceil(UNIT_BYTES) as u64)));
        for lba in start {
            let at = offsets[1] + 28;
            let mut contents = volume.device.contents.borrow_mut();
            let block = contents.get_mut(&(lba + (at / BLOCK_BYTES) as u64)).unwrap();
            block[at % BLOCK_BYTES..][..4].copy_from_slice(&(3 + more).to_le_bytes());
        }
        let device = volume.prepared();
        let structure = MetadataStructure::CheckpointImage { partition: 1 };
        let lbas = start.map(|lba| lba + volume.lba((offsets[1] / UNIT_BYTES) as u64));
        assert_eq!(volume.open_on(&device).err(), Some(OpenError::CopiesUnreadable { structure, lbas }));
        for &(lba, bytes) in device.reads.borrow().iter() {
            let read = lba..lba + (bytes / BLOCK_BYTES) as u64;
            for copy in 0..2 {
                assert!(!(start[copy]..end[copy]).contains(&lba) || read.end <= end[copy], "{read:?}");
            }
        }
    }
}

#[test]
fn a_damaged_copy_that_claims_another_length_costs_no_long_read() {
    // The second image is longer than a window.
    let (volume, offsets, _) = volume_of(&[100, 140_000]);
    let read_bytes = |volume: &CraftedVolume, checkpoints, context: &str| {
        let device = volume.prepared();
        let engine = volume.open_on(&device).unwrap_or_else(|error| panic!("{context}: {error}"));
        let statistics = engine.statistics();
        assert_eq!((statistics.keys, statistics.checkpoints), (140_100, checkpoints), "{context}");
        let [first, second] = volume.checkpoint_lbas();
        let copies = first..2 * second - first;
        let reads = device.reads.borrow();
        reads.iter().filter(|(lba, _)| copies.contains(lba)).map(|(_, bytes)| bytes).sum::<usize>()
    };
    let intact = read_bytes(&volume, 0, "intact");
    // Each image, each copy: the entries that it claims and does not have, and what may be read for nothing.
    let second = HEADER_BYTES + 140_000 * ENTRY_BYTES;
    for (image, claimed, more) in [
        (0, 120_000_u32, 1 << 16),
        (1, 140_001, second),
        (1, 70_000, WINDOW_BYTES + (1 << 17)),
        (1, 5, second),
    ] {
        for copy in 0..2 {
            let context = format!("image {image}, copy {copy} claims {claimed}");
            let damaged = volume.clone();
            let at = offsets[image] + 28;
            let block = volume.checkpoint_lbas()[copy] + (at / BLOCK_BYTES) as u64;
            let mut contents = damaged.device.contents.borrow_mut();
            let bytes = contents.get_mut(&block).expect("the header is written");
            bytes[at % BLOCK_BYTES..][..4].copy_from_slice(&claimed.to_le_bytes());
            drop(contents);
            // The second copy of an image that loads in one read is not looked at.
            let is_found = copy == 0 || image == 1;
            let read = read_bytes(&damaged, u64::from(is_found), &context);
            assert!(read <= intact + more, "{context}: {read} B, intact {intact} B");
        }
    }
}

#[test]
fn records_end_with_the_record_area() {
    for (location, units, want) in [(-1_i64, 1, None), (-2, 2, None), (-1, 2, Some(-1)), (0, 1, Some(0))] {
        let mut volume = CraftedVolume::new(0, 248, 0, 100, 1_000);
        let location = volume.superblock.layout.units().checked_add_signed(location).unwrap();
        let entry = IndexEntry::new(1, RecordRef { location, units, fingerprint: 1 });
        volume.write_checkpoint(&[vec![entry]]);
        let opened = volume.open().map(|engine| engine.statistics().used_bytes);
        let mismatch = IndexMismatch::OutsideRecordArea { units };
        let want = match want {
            None => Ok(units * UNIT_BYTES as u64),
            Some(_) => Err(OpenError::Inconsistent { lba: volume.lba(location), mismatch }),
        };
        assert_eq!(opened, want, "{units} units at {location}");
    }
}

#[test]
fn two_records_in_one_unit_are_named_as_such_at_both_ends_of_the_record_area() {
    for is_last in [false, true] {
        let mut volume = CraftedVolume::new(0, 248, 0, 100, 1_000);
        let superblock = volume.superblock;
        let location =
            if is_last { superblock.layout.units() - 1 } else { superblock.layout.data_start_unit };
        let entry = |tag| IndexEntry::new(tag, RecordRef { location, units: 1, fingerprint: 1 });
        volume.write_checkpoint(&[vec![entry(1), entry(2)]]);
        let mismatch = IndexMismatch::OverlappingRecords { units: 1 };
        let lba = volume.lba(location);
        assert_eq!(volume.open_error(), OpenError::Inconsistent { lba, mismatch });
    }
}

#[test]
fn a_device_is_as_large_as_the_volume_or_larger() {
    let (volume, ..) = volume_of(&[10]);
    let blocks = volume.device.blocks.get();
    for more in [0, 1, 1_000] {
        volume.device.blocks.set(blocks + more);
        assert!(volume.open().is_ok(), "{more} blocks more");
    }
    for less in [1, blocks / 2] {
        volume.device.blocks.set(blocks - less);
        let (have_bytes, need_bytes) = ((blocks - less) * 512, blocks * 512);
        assert_eq!(volume.open_error(), OpenError::TooSmall { have_bytes, need_bytes });
    }
}
