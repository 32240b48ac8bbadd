//! A volume that a test writes structure by structure, on a sparse device that logs reads.

#![allow(dead_code)]

use super::{HashFixture, pool};
use octokv_base::{Buffer, Key, Lba};
use octokv_device::fault_injection::{FaultDevice, FaultPlan};
use octokv_device::{Device, DeviceFuture, Geometry, IoResult};
use octokv_engine::HashKind;
use octokv_engine::common::journal::{self, BatchHeader};
use octokv_engine::common::record::{self, NewRecord, RecordFormat, RecordId, RecordMeta};
use octokv_engine::common::superblock::Superblock;
use octokv_engine::common::volume_layout::{Checkpoint, VolumeLayout};
use octokv_engine::hash::checkpoint::{self, PartitionImageHeader};
use octokv_engine::hash::index::IndexEntry;
use octokv_engine::hash::journal::IndexChange;
use octokv_engine::hash::superblock::HashSuperblock;
use octokv_engine::hash::{HashEngine, open, verify};
use octokv_engine::{OpenError, VerifyFailure, VerifyReport};
use octokv_runtime::block_on;
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;

/// The device's block in bytes.
pub const BLOCK_BYTES: usize = 512;
/// The volume's unit in bytes: two blocks.
pub const UNIT_BYTES: usize = 1024;

/// A device of zeros, except for some blocks.
#[derive(Clone)]
pub struct SparseDevice {
    pub blocks: Cell<u64>,
    pub contents: RefCell<BTreeMap<u64, [u8; BLOCK_BYTES]>>,
    /// First block and length in bytes of each read.
    pub reads: RefCell<Vec<(u64, usize)>>,
    /// The number of writes, flushes and trims.
    pub changes: Cell<usize>,
}

impl SparseDevice {
    pub fn new(blocks: u64) -> SparseDevice {
        SparseDevice {
            blocks: Cell::new(blocks),
            contents: RefCell::default(),
            reads: RefCell::default(),
            changes: Cell::new(0),
        }
    }

    fn changed(&self, buffer: Option<Buffer>) -> DeviceFuture {
        self.changes.set(self.changes.get() + 1);
        DeviceFuture::ready(IoResult { buffer, result: Ok(()) })
    }

    pub fn put(&self, lba: u64, bytes: &[u8]) {
        for (lba, bytes) in (lba..).zip(bytes.chunks(BLOCK_BYTES)) {
            let mut block = [0; BLOCK_BYTES];
            block[..bytes.len()].copy_from_slice(bytes);
            self.contents.borrow_mut().insert(lba, block);
        }
    }

    /// Flips a bit.
    pub fn damage(&self, lba: u64, byte: usize) {
        let at = lba + (byte / BLOCK_BYTES) as u64;
        self.contents.borrow_mut().entry(at).or_insert([0; BLOCK_BYTES])[byte % BLOCK_BYTES] ^= 1;
    }
}

impl Device for SparseDevice {
    fn geometry(&self) -> Geometry {
        Geometry { blocks: self.blocks.get(), block_bytes: BLOCK_BYTES as u32, volatile: false }
    }
    fn name(&self) -> &str {
        "sparse"
    }
    fn read(&self, at: Lba, mut buffer: Buffer) -> DeviceFuture {
        self.reads.borrow_mut().push((at.0, buffer.len()));
        if !self.geometry().is_valid_range(at, buffer.len()) {
            return DeviceFuture::out_of_range(Some(buffer));
        }
        buffer.fill(0);
        let end = at.0 + (buffer.len() / BLOCK_BYTES) as u64;
        for (lba, block) in self.contents.borrow().range(at.0..end) {
            let start = (lba - at.0) as usize * BLOCK_BYTES;
            buffer[start..start + BLOCK_BYTES].copy_from_slice(block);
        }
        DeviceFuture::ready(IoResult { buffer: Some(buffer), result: Ok(()) })
    }
    fn write(&self, at: Lba, buffer: Buffer) -> DeviceFuture {
        self.put(at.0, &buffer);
        self.changed(Some(buffer))
    }
    fn flush(&self) -> DeviceFuture {
        self.changed(None)
    }
    fn trim(&self, _at: Lba, _blocks: u64) -> DeviceFuture {
        self.changed(None)
    }
}

/// The volume. Opening and verifying it changes a copy.
#[derive(Clone)]
pub struct CraftedVolume {
    pub superblock: HashSuperblock,
    pub device: SparseDevice,
    pub faults: FaultPlan,
}

impl CraftedVolume {
    /// A volume without a checkpoint whose next batch is number 5, with entry 50, at `journal_unit`.
    pub fn new(
        index_partitions_log2: u8,
        journal_units: u32,
        journal_unit: u32,
        area_units: u64,
        data_units: u64,
    ) -> CraftedVolume {
        let regions = VolumeLayout::without_data(UNIT_BYTES as u32, journal_units, area_units);
        let superblock = HashSuperblock {
            format: RecordFormat::V1,
            volume_id: 77,
            hash_seed: 9,
            hash: HashKind::Xxh3,
            layout: VolumeLayout { data_units, ..regions },
            index_partitions_log2,
            bitmap_partitions_log2: 0,
            namespace: 1,
            value_bytes_max: 1 << 20,
            generation: 2,
            incarnation: 3,
            checkpoint: Checkpoint {
                journal_unit,
                batch: 5,
                entry: 49,
                incarnation: 3,
                ..Checkpoint::default()
            },
            is_clean_shutdown: false,
        };
        let device = SparseDevice::new(superblock.layout.units() * 2);
        CraftedVolume { superblock, device, faults: FaultPlan::default() }
    }

    pub fn lba(&self, unit: u64) -> u64 {
        unit * (UNIT_BYTES / BLOCK_BYTES) as u64
    }

    /// The first block of both copies of the checkpoint.
    pub fn checkpoint_lbas(&self) -> [u64; 2] {
        [0, 1].map(|copy| self.lba(self.superblock.layout.area_start_unit(1, copy)))
    }

    /// The first block of both copies of the ring's `unit`.
    pub fn journal_lbas(&self, unit: u32) -> [u64; 2] {
        [0, 1].map(|copy| self.lba(self.superblock.layout.journal_start_unit(copy) + u64::from(unit)))
    }

    /// Writes a checkpoint with the entries of each partition, and gives the offset of each image.
    pub fn write_checkpoint(&mut self, partitions: &[Vec<IndexEntry>]) -> Vec<usize> {
        let (mut bytes, mut offsets) = (Vec::new(), Vec::new());
        for (index, entries) in partitions.iter().enumerate() {
            offsets.push(bytes.len());
            let header = PartitionImageHeader {
                volume_id: self.superblock.volume_id,
                checkpoint_id: 4,
                partition: index as u32,
                applied_through: self.superblock.checkpoint.entry,
            };
            checkpoint::encode(&mut bytes, &header, entries);
        }
        let checkpoint = &mut self.superblock.checkpoint;
        (checkpoint.area, checkpoint.id, checkpoint.bytes) = (Some(1), 4, bytes.len() as u64);
        self.checkpoint_lbas().into_iter().for_each(|lba| self.device.put(lba, &bytes));
        offsets
    }

    /// The header of a batch of this volume and opening.
    pub fn header(&self, batch: u64, first_entry: u64, flushed_through: u64) -> BatchHeader {
        BatchHeader {
            volume_id: self.superblock.volume_id,
            batch,
            first_entry,
            incarnation: self.superblock.incarnation,
            is_predecessor_unflushed: true,
            flushed_through,
        }
    }

    /// Writes a batch to both copies of the ring, and gives its length in units.
    pub fn write_batch(&self, unit: u32, header: &BatchHeader, entries: &[IndexChange]) -> u32 {
        let mut bytes = vec![0; 32 << 10];
        let units = journal::encode(&mut bytes, header, entries, UNIT_BYTES as u32);
        bytes.truncate(units as usize * UNIT_BYTES);
        self.journal_lbas(unit).into_iter().for_each(|lba| self.device.put(lba, &bytes));
        units
    }

    /// Writes a record with an empty value.
    pub fn write_record(&self, location: u64, sequence: u64, key: &Key) {
        self.write_record_as(location, RecordId { volume_id: 77, sequence, location }, key);
    }

    /// Writes a record with any identity.
    pub fn write_record_as(&self, location: u64, identity: RecordId, key: &Key) {
        let mut bytes = vec![0; record::record_bytes(key.len(), 0).next_multiple_of(UNIT_BYTES)];
        let new = NewRecord {
            format: self.superblock.format,
            identity,
            namespace: 1,
            key: key.as_bytes(),
            value_bytes: 0,
            stored_bytes: 0,
            meta: RecordMeta::PLAIN,
        };
        record::encode(&mut bytes, &new);
        self.device.put(self.lba(location), &bytes);
    }

    /// The hash of a key on this volume.
    pub fn hash(&self, key: &Key) -> u128 {
        xxhash_rust::xxh3::xxh3_128_with_seed(key.as_bytes(), self.superblock.hash_seed)
    }

    /// The device with the superblock, for one opening.
    pub fn prepared(&self) -> Rc<SparseDevice> {
        let sparse = Rc::new(self.device.clone());
        for slot in [0, 2] {
            sparse.put(slot * 4096 / BLOCK_BYTES as u64, &self.superblock.encode());
        }
        sparse
    }

    /// Opens the volume on this copy of the device.
    pub fn open_on(&self, device: &Rc<SparseDevice>) -> Result<HashEngine, OpenError> {
        let device = FaultDevice::new(Rc::clone(device) as Rc<dyn Device>, self.faults.clone());
        let device: Rc<dyn Device> = Rc::new(device);
        let fixture = HashFixture::default();
        let volume = block_on(open(&device, &pool(), fixture.open_config(), &fixture.format), || ())?;
        Ok(HashEngine::new(volume, 0, device, pool()))
    }

    /// Verifies the volume on this copy of the device.
    pub fn verify_on(&self, device: &Rc<SparseDevice>) -> Result<VerifyReport, VerifyFailure> {
        let device = FaultDevice::new(Rc::clone(device) as Rc<dyn Device>, self.faults.clone());
        block_on(verify(&device, &pool(), &mut |_, _| ()), || ())
    }

    pub fn open(&self) -> Result<HashEngine, OpenError> {
        self.open_on(&self.prepared())
    }

    pub fn open_error(&self) -> OpenError {
        self.open().err().expect("the volume is damaged")
    }

    pub fn verify(&self) -> Result<VerifyReport, VerifyFailure> {
        self.verify_on(&self.prepared())
    }
}
