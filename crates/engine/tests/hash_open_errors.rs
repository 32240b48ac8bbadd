//! What `open` says of a damaged volume: the structure, its blocks and what disagrees; the device stays unchanged.

use crate::common::crafted_volume::SparseDevice;
use crate::common::{self, HashFixture};
use crate::corrupt_images::{IMAGE, fix_checksum};
use octokv_base::Prng;
use octokv_device::Device;
use octokv_device::power_loss::PowerLossDisk;
use octokv_engine::common::superblock::{
    SUPERBLOCK_BYTES, SUPERBLOCK_STRIDE_BYTES, Superblock, SuperblockError, SuperblockField,
    UncheckedSuperblock,
};
use octokv_engine::conformance::{EngineFixture, key_of, record_of};
use octokv_engine::hash::open;
use octokv_engine::hash::superblock::HashSuperblock;
use octokv_engine::{Engine, EngineError, PutMode, VolumePlace};
use octokv_engine::{IndexMismatch, MetadataStructure, OpenError};
use octokv_runtime::block_on;
use std::rc::Rc;

const UNIT_BYTES: usize = 512;
const STRIDE: usize = SUPERBLOCK_STRIDE_BYTES as usize;

/// The error of opening an image, which must stay as it is.
fn open_error(image: Vec<u8>) -> OpenError {
    let disk = PowerLossDisk::new(image.clone(), UNIT_BYTES as u32);
    let device: Rc<dyn Device> = Rc::new(disk.clone());
    let mut random = Prng::new(1);
    let fixture = HashFixture::default();
    let opened = block_on(open(&device, &common::pool(), fixture.open_config(), &fixture.format), || {
        disk.complete_one(&mut random);
    });
    assert!(disk.contents() == image, "the device was written to");
    opened.err().expect("the volume is damaged")
}

fn superblock() -> HashSuperblock {
    let slots = IMAGE.chunks(STRIDE).take(4);
    let slots = slots.filter_map(|slot| {
        UncheckedSuperblock(slot[..SUPERBLOCK_BYTES].try_into().unwrap()).check::<HashSuperblock>().ok()
    });
    slots.max_by_key(|superblock| superblock.generation).unwrap()
}

/// The bytes of both copies of the checkpoint, and of both of the journal.
fn checkpoint_offsets() -> [usize; 2] {
    let superblock = superblock();
    let area = superblock.checkpoint.area.expect("the fixture has a checkpoint");
    [0, 1].map(|copy| superblock.layout.area_start_unit(area, copy) as usize * UNIT_BYTES)
}

/// The offsets in both copies of the first batch to replay.
fn batch_offsets() -> [usize; 2] {
    let superblock = superblock();
    let unit = u64::from(superblock.checkpoint.journal_unit);
    [0, 1].map(|copy| (superblock.layout.journal_start_unit(copy) + unit) as usize * UNIT_BYTES)
}

/// Changes eight bytes in both copies of a structure and makes its checksum valid again.
fn patched(copies: [usize; 2], at: usize, value: u64) -> Vec<u8> {
    let mut image = IMAGE.to_vec();
    for start in copies {
        image[start + at..start + at + 8].copy_from_slice(&value.to_le_bytes());
        let structure = (0..=start + at)
            .rev()
            .find(|&from| [b"OKVJ", b"OKVC"].iter().any(|magic| image[from..from + 4] == magic[..]));
        fix_checksum(&mut image, structure.unwrap());
    }
    image
}

/// The offsets from the start of the checkpoint of the entries of its images.
fn checkpoint_entries() -> Vec<usize> {
    let (start, superblock) = (checkpoint_offsets()[0], superblock());
    let (mut at, mut entries) = (0, Vec::new());
    while at < superblock.checkpoint.bytes as usize {
        let count = u32::from_le_bytes(IMAGE[start + at + 28..start + at + 32].try_into().unwrap()) as usize;
        entries.extend((0..count).map(|entry| at + 48 + entry * 16));
        at += 48 + count * 16;
    }
    entries
}

#[test]
fn an_unknown_hash_kind_or_checkpoint_area_is_refused_with_field_and_value() {
    for (at, byte, field, name) in [
        (76, 7, SuperblockField::HashKind, "hash kind 7"),
        (88, 9, SuperblockField::CheckpointArea, "checkpoint area 9"),
    ] {
        // In every copy that there is, and in a single one: that software's newer state is there.
        for slots in [&[0, 1, 2, 3][..], &[0], &[3]] {
            let mut image = IMAGE.to_vec();
            for slot in slots.iter().map(|slot| slot * STRIDE).filter(|&slot| IMAGE[slot] != 0) {
                image[slot + at] = byte;
                fix_checksum(&mut image, slot);
            }
            let error = open_error(image);
            let want = SuperblockError::UnknownValue { field, value: byte.into() };
            assert_eq!(error, OpenError::Superblock(want), "slots {slots:?}");
            assert!(error.to_string().contains(name) && !error.is_damage(), "{error}");
        }
    }
}

#[test]
fn both_copies_of_a_superblock_a_checkpoint_image_or_a_batch_are_named_with_their_blocks() {
    let mut image = IMAGE.to_vec();
    [0, 2].into_iter().for_each(|slot| image[slot * STRIDE + 100] ^= 1);
    let structure = MetadataStructure::Superblock;
    assert_eq!(open_error(image), OpenError::CopiesUnreadable { structure, lbas: [0, 16] });

    let entry = checkpoint_entries()[0];
    let copies = checkpoint_offsets();
    let mut image = IMAGE.to_vec();
    copies.into_iter().for_each(|start| image[start + entry] ^= 1);
    let error = open_error(image);
    let OpenError::CopiesUnreadable { structure: MetadataStructure::CheckpointImage { partition }, lbas } =
        error
    else {
        panic!("{error:?}")
    };
    let header = (0..=entry).rev().find(|&at| &IMAGE[copies[0] + at..copies[0] + at + 4] == b"OKVC").unwrap();
    assert_eq!(partition, u32::from(IMAGE[copies[0] + header + 24]));
    assert_eq!(lbas, copies.map(|start| ((start + header) / UNIT_BYTES) as u64));
    assert!(
        error.is_damage() && error.to_string().starts_with("both copies of the checkpoint image"),
        "{error}"
    );

    let mut image = IMAGE.to_vec();
    batch_offsets().into_iter().for_each(|start| image[start + 70] ^= 1);
    let lbas = batch_offsets().map(|start| (start / UNIT_BYTES) as u64);
    let structure = MetadataStructure::JournalBatch { batch: superblock().checkpoint.batch };
    assert_eq!(open_error(image), OpenError::CopiesUnreadable { structure, lbas });
}

#[test]
fn an_inconsistent_index_names_the_block_and_what_disagrees() {
    let superblock = superblock();
    let first_entry = superblock.checkpoint.entry + 1;
    let batch = superblock.checkpoint.batch;
    // The first entry after the checkpoint replaces a record that was never written (entry byte 24).
    let lba = superblock.layout.units() - 1;
    let table = [
        (batch_offsets(), 64 + 24, lba, lba, IndexMismatch::MissingPredecessor { entry: first_entry }),
        // It names a record far beyond the device (entry byte 16).
        (
            batch_offsets(),
            64 + 16,
            1 << 40,
            batch_offsets()[0] as u64 / 512,
            IndexMismatch::ImpossibleBatch { batch },
        ),
    ];
    for (copies, at, value, lba, mismatch) in table {
        let error = open_error(patched(copies, at, value));
        assert_eq!(error, OpenError::Inconsistent { lba, mismatch });
        assert!(error.is_damage() && !error.to_string().contains("both copies"), "{error}");
    }
    // One entry of the checkpoint takes over another's location, then one below the records.
    let entries = checkpoint_entries();
    let word = |entry: usize| {
        let at = checkpoint_offsets()[0] + entry + 8;
        u64::from_le_bytes(IMAGE[at..at + 8].try_into().unwrap())
    };
    let low = word(entries[1]) & ((1 << 28) - 1);
    for location in [word(entries[0]) >> 28, 3] {
        let error = open_error(patched(checkpoint_offsets(), entries[1] + 8, location << 28 | low));
        let OpenError::Inconsistent { lba, mismatch } = error else { panic!("{error:?}") };
        assert_eq!(lba, location);
        match location {
            3 => assert!(matches!(mismatch, IndexMismatch::OutsideRecordArea { units: 1.. }), "{mismatch:?}"),
            _ => {
                assert!(matches!(mismatch, IndexMismatch::OverlappingRecords { units: 1.. }), "{mismatch:?}")
            }
        }
    }
}

#[test]
fn a_batch_that_replaces_a_record_beyond_any_device_is_refused() {
    // Units of several blocks: the block number of such a location would not fit into 64 bits.
    let (fixture, key) = (HashFixture::default(), key_of(1));
    let disk = PowerLossDisk::new(vec![0; 8 << 20], 512);
    let (device, mut random): (Rc<dyn Device>, _) = (Rc::new(disk.clone()), Prng::new(1));
    let mut complete_io = || {
        disk.complete_one(&mut random);
    };
    block_on(fixture.format(Rc::clone(&device)), &mut complete_io);
    let engine = block_on(fixture.open(device), &mut complete_io).unwrap();
    block_on(
        engine.put(&key, PutMode::Upsert, record_of(engine.record_layout(), &key, &[7; 100]), 100),
        &mut complete_io,
    )
    .unwrap();
    let mut image = disk.contents();
    let is_batch = |&at: &usize| image[at..].starts_with(b"OKVJ");
    let batches: Vec<usize> = (0..image.len()).step_by(UNIT_BYTES).filter(is_batch).collect();
    assert_eq!(batches.len(), 2, "one batch in two copies");
    for &at in &batches {
        image[at + 64 + 24..at + 64 + 32].copy_from_slice(&u64::MAX.to_le_bytes());
        fix_checksum(&mut image, at);
    }
    let (lba, mismatch) = ((batches[0] / UNIT_BYTES) as u64, IndexMismatch::ImpossibleBatch { batch: 1 });
    assert_eq!(open_error(image), OpenError::Inconsistent { lba, mismatch });
}

#[test]
fn a_checkpoint_image_that_claims_more_than_one_transfer_is_read_in_parts() {
    const CLAIMED_BYTES: u64 = 80 << 20;
    const READ_BYTES_MAX: usize = 64 << 20;
    let mut superblock = superblock();
    superblock.layout.area_units = CLAIMED_BYTES / UNIT_BYTES as u64;
    superblock.checkpoint.area = Some(0);
    superblock.checkpoint.bytes = CLAIMED_BYTES;
    superblock.layout.data_start_unit = superblock.layout.area_start_unit(0, 4);
    let device = Rc::new(SparseDevice::new(superblock.layout.units()));
    (0..4).for_each(|slot| device.put(slot * (STRIDE / UNIT_BYTES) as u64, &superblock.encode()));
    let entries = (CLAIMED_BYTES as u32 - 48) / 16;
    let lbas = [0, 1].map(|copy| superblock.layout.area_start_unit(0, copy));
    let header = [&b"OKVC"[..], &[0; 24], &entries.to_le_bytes()].concat();
    lbas.into_iter().for_each(|lba| device.put(lba, &header));

    let fixture = HashFixture::default();
    let opened: Rc<dyn Device> = Rc::clone(&device) as Rc<dyn Device>;
    let opened = block_on(open(&opened, &common::pool(), fixture.open_config(), &fixture.format), || ());
    let structure = MetadataStructure::CheckpointImage { partition: 0 };
    assert_eq!(opened.err(), Some(OpenError::CopiesUnreadable { structure, lbas }));
    assert_eq!(device.changes.get(), 0, "a damaged volume is not written to");
    let mut reads = device.reads.take();
    reads.retain(|&(lba, bytes)| lba >= lbas[0] && bytes > 1 << 20);
    let rest = (READ_BYTES_MAX / UNIT_BYTES) as u64;
    let parts = |lba| [(lba, READ_BYTES_MAX), (lba + rest, CLAIMED_BYTES as usize - READ_BYTES_MAX)];
    assert_eq!(reads, lbas.map(parts).concat());
}

#[test]
fn engine_errors_keep_their_meaning_as_open_errors() {
    let corrupt = EngineError::Corrupt { lba: 7, place: VolumePlace::default() };
    for (error, part) in [
        (EngineError::ReadOnly, "journal write failed"),
        (corrupt, "the record at block 7 of device 0, partition 0 is corrupt"),
    ] {
        let text = OpenError::from(error).to_string();
        assert!(text.contains(part) && !text.contains("both copies"), "{text}");
        assert!(!OpenError::from(error).is_damage());
    }
}
