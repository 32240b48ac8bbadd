//! `verify` on volumes that recovery cannot load: lists every structure and record that is left, and writes nothing.

use crate::common;
use crate::corrupt_images::{self, IMAGE};
use octokv_base::{Key, Lba, Prng};
use octokv_device::Device;
use octokv_device::fault_injection::{FaultDevice, FaultPlan, FaultRule, InjectedFault, OpFilter};
use octokv_device::power_loss::PowerLossDisk;
use octokv_engine::common::superblock::{SUPERBLOCK_BYTES, SuperblockError, UncheckedSuperblock};
use octokv_engine::conformance::key_of;
use octokv_engine::hash::superblock::HashSuperblock;
use octokv_engine::hash::verify;
use octokv_engine::{
    Finding, FindingKind, MetadataStructure, OpenError, ProblemKind, SalvageReport, VerifyFailure,
    VerifyObserver,
};
use octokv_runtime::block_on;
use std::collections::BTreeMap;
use std::rc::Rc;

const BLOCK_BYTES: usize = 512;

#[derive(Default)]
struct Findings {
    list: Vec<Finding>,
    reason: Option<OpenError>,
    scanned: (u64, u64),
}

impl VerifyObserver for Findings {
    fn keys_verified(&mut self, _done: u64, _keys: u64) {
        panic!("the index was recovered");
    }
    fn scan_started(&mut self, reason: &OpenError) {
        self.reason = Some(*reason);
    }
    fn blocks_scanned(&mut self, done: u64, blocks: u64) {
        self.scanned = (done, blocks);
    }
    fn found(&mut self, finding: &Finding) {
        self.list.push(finding.clone());
    }
}

impl Findings {
    fn records(&self) -> BTreeMap<Key, (u64, u64, u64)> {
        let records = self.list.iter().filter_map(|finding| match &finding.kind {
            FindingKind::Record { key, value_bytes, sequence, .. } => {
                Some((key.clone(), (finding.lba, *value_bytes, *sequence)))
            }
            _ => None,
        });
        records.collect()
    }

    fn at(&self, lba: u64) -> Vec<&FindingKind> {
        self.list.iter().filter(|finding| finding.lba == lba).map(|finding| &finding.kind).collect()
    }
}

fn verify_image(image: &[u8], plan: FaultPlan) -> (VerifyFailure, Findings) {
    let disk = PowerLossDisk::new(image.to_vec(), BLOCK_BYTES as u32);
    let device: Rc<dyn Device> = Rc::new(FaultDevice::new(Rc::new(disk.clone()), plan));
    let (mut random, mut findings) = (Prng::new(1), Findings::default());
    let verified = block_on(verify(&*device, &common::pool(), &mut findings), || {
        disk.complete_one(&mut random);
    });
    assert!(disk.contents() == image, "the device was written to");
    assert_eq!(disk.events(), 0, "the device was written to");
    let failure = verified.expect_err("recovery cannot load it");
    assert_eq!(findings.reason, Some(failure.reason));
    assert_eq!(findings.scanned.0, findings.scanned.1);
    assert!(findings.list.is_sorted_by_key(|finding| finding.lba), "findings come in the order of blocks");
    (failure, findings)
}

fn superblock() -> HashSuperblock {
    let slots = IMAGE.chunks(4096).take(4);
    let slots = slots.filter_map(|slot| {
        UncheckedSuperblock(slot[..SUPERBLOCK_BYTES].try_into().unwrap()).check::<HashSuperblock>().ok()
    });
    slots.max_by_key(|superblock| superblock.generation).unwrap()
}

/// The offsets of both copies of the fixture's checkpoint.
fn checkpoint_offsets() -> [usize; 2] {
    let superblock = superblock();
    let area = superblock.checkpoint.area.expect("the fixture has a checkpoint");
    [0, 1].map(|copy| superblock.layout.area_start_unit(area, copy) as usize * BLOCK_BYTES)
}

/// The fixture's twenty values, one of which was deleted, have 100, 101, … bytes.
fn assert_all_records(findings: &Findings, report: &SalvageReport) {
    let records = findings.records();
    assert_eq!(records.len(), 20);
    let mut sequences = Vec::new();
    for index in 0..20 {
        let (lba, value_bytes, sequence) = records[&key_of(index)];
        assert_eq!(value_bytes, 100 + index);
        assert_eq!(&IMAGE[lba as usize * BLOCK_BYTES..][..4], b"OKVR");
        sequences.push(sequence);
    }
    assert!(sequences.is_sorted_by(|one, next| one < next), "later puts have higher sequence numbers");
    assert_eq!((report.records, report.value_bytes), (20, (100..120).sum()));
}

#[test]
fn without_any_superblock_every_other_structure_and_record_is_found() {
    for (byte, reason) in [(0, SuperblockError::Blank), (0x55, SuperblockError::Foreign)] {
        let mut image = IMAGE.to_vec();
        image[..16384].fill(byte);
        let (failure, findings) = verify_image(&image, FaultPlan::default());
        assert_eq!(failure.reason, OpenError::Superblock(reason));
        let report = failure.remains.unwrap();
        assert_all_records(&findings, &report);
        assert_eq!((report.superblocks, report.damaged), (0, 4));
        // 16 partitions in two copies; what the journal holds since the checkpoint and before it.
        assert_eq!(report.checkpoint_images, 32);
        assert!(report.journal_batches >= 2 * 11, "{report:?}");
        let volume_id = superblock().volume_id;
        for finding in &findings.list {
            match finding.kind {
                FindingKind::Record { volume_id: id, .. }
                | FindingKind::CheckpointImage { volume_id: id, .. }
                | FindingKind::JournalBatch { volume_id: id, .. } => assert_eq!(id, volume_id),
                FindingKind::NoSuperblock(error) => assert_eq!(error, reason),
                _ => panic!("{finding}"),
            }
        }
    }
}

#[test]
fn without_either_checkpoint_copy_the_damage_and_all_that_is_intact_is_named() {
    let mut image = IMAGE.to_vec();
    for start in checkpoint_offsets() {
        image[start + 20] ^= 1;
    }
    let (failure, findings) = verify_image(&image, FaultPlan::default());
    let lbas = checkpoint_offsets().map(|start| (start / BLOCK_BYTES) as u64);
    let structure = MetadataStructure::CheckpointImage { partition: 0 };
    assert_eq!(failure.reason, OpenError::CopiesUnreadable { structure, lbas });
    for lba in lbas {
        assert!(findings.at(lba).contains(&&FindingKind::DamagedImage), "block {lba}");
    }
    let report = failure.remains.unwrap();
    assert_all_records(&findings, &report);
    assert_eq!(
        (report.checkpoint_images, report.damaged),
        (30, 2),
        "the images behind the damaged ones are found"
    );
    assert!(
        findings
            .list
            .iter()
            .any(|finding| finding.kind == FindingKind::Superblock { generation: superblock().generation })
    );
    // With nothing left of both copies, too.
    let area_bytes = superblock().layout.area_units as usize * BLOCK_BYTES;
    checkpoint_offsets().into_iter().for_each(|start| image[start..start + area_bytes].fill(0));
    let (failure, findings) = verify_image(&image, FaultPlan::default());
    assert_eq!(failure.reason, OpenError::CopiesUnreadable { structure, lbas });
    assert_all_records(&findings, &failure.remains.unwrap());
}

#[test]
fn damaged_and_unreadable_records_are_named_and_the_others_stay_intact() {
    let mut image = IMAGE.to_vec();
    image[..16384].fill(0);
    let (_, intact) = verify_image(&image, FaultPlan::default());
    let records = intact.records();
    let lba = |index| records[&key_of(index)].0;
    image[lba(1) as usize * BLOCK_BYTES + 20] ^= 1;
    let value_at = octokv_engine::common::record::LAYOUT.value_offset(key_of(2).len());
    image[lba(2) as usize * BLOCK_BYTES + value_at] ^= 1;
    // A record that was written elsewhere.
    let (from, to) = (lba(4) as usize * BLOCK_BYTES, lba(5) as usize * BLOCK_BYTES);
    image.copy_within(from..from + BLOCK_BYTES, to);
    let plan = FaultPlan::default();
    plan.add(FaultRule::within(OpFilter::Read, Lba(lba(7)), Lba(lba(7) + 1), InjectedFault::Error(5)));
    let (failure, findings) = verify_image(&image, plan);
    let damaged = |key: Option<Key>, problem| FindingKind::DamagedRecord { key, problem };
    assert_eq!(findings.at(lba(1)), [&damaged(None, ProblemKind::Header)]);
    assert_eq!(findings.at(lba(2)), [&damaged(Some(key_of(2)), ProblemKind::Value)]);
    assert_eq!(findings.at(lba(5)), [&damaged(Some(key_of(4)), ProblemKind::WrongRecord)]);
    assert!(matches!(findings.at(lba(7))[..], [FindingKind::Unreadable(_)]));
    let report = failure.remains.unwrap();
    assert_eq!((report.records, report.damaged, report.unreadable_blocks), (16, 4 + 3, 1));
    for index in (0..20).filter(|index| ![1, 2, 5, 7].contains(index)) {
        assert_eq!(findings.records()[&key_of(index)], records[&key_of(index)], "key {index}");
    }
}

#[test]
fn a_volume_of_another_version_is_not_scanned() {
    let mut image = IMAGE.to_vec();
    for slot in (0..4).map(|slot| slot * 4096).filter(|&slot| IMAGE[slot] != 0) {
        image[slot + 12] = 9;
        corrupt_images::fix_checksum(&mut image, slot);
    }
    let disk = PowerLossDisk::new(image, BLOCK_BYTES as u32);
    let mut random = Prng::new(1);
    let verified = block_on(verify(&disk, &common::pool(), &mut |_, _| ()), || {
        disk.complete_one(&mut random);
    });
    let failure = verified.expect_err("another version");
    assert_eq!(failure.reason, OpenError::Superblock(SuperblockError::Version { found: 9, known: 2 }));
    assert!(failure.remains.is_none());
}
