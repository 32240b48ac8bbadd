//! Corrupt images of volumes of the log engine: shared by the bounded tests and the fuzz target.

#![allow(dead_code)]

use octokv_base::{BufferPool, Crc32c, Key, Prng, RingRange, UnixTime, Version};
use octokv_device::Device;
use octokv_device::power_loss::PowerLossDisk;
use octokv_engine::conformance::{key_of, operation_of, random_length, record_of, value_of};
use octokv_engine::log::handle::LogEngine;
use octokv_engine::log::log_place::LogKind;
use octokv_engine::log::open::open_with;
use octokv_engine::log::settings::LogSettings;
use octokv_engine::log::volume::LogVolume;
use octokv_engine::volume::FORMAT_REGION_BYTES;
use octokv_engine::{
    DeviceLayout, Durability, Engine, EngineError, EngineKind, FormatConfig, OpenConfig, PutMode, PutOptions,
    PutOutcome, PutValue, ScanEntry, ValueRange, VerifyReport, Volume, WallClock,
};
use octokv_runtime::block_on;
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;

pub const BLOCK: usize = 512;
pub const KEYS: u64 = 40;
const DISK_BYTES: usize = 3 << 20;
const VALUE_BYTES_MAX: u32 = 20_000;

/// A volume that was written, and what each key had.
#[derive(Clone)]
pub struct WrittenImage {
    pub bytes: Vec<u8>,
    /// The last operation on each key; 0 if it does not exist.
    pub last: Vec<u64>,
    /// All puts of each key.
    pub stored: Vec<Vec<u64>>,
}

fn format_config() -> FormatConfig {
    FormatConfig {
        engine: EngineKind::Log,
        seed: 42,
        unit_bytes: Some(BLOCK as u32),
        partitions: 2,
        chunk_bytes: Some(16 << 10),
        value_bytes_max: VALUE_BYTES_MAX,
        ..FormatConfig::default()
    }
}

fn open_config() -> OpenConfig {
    OpenConfig {
        durability: Durability::PowerSafe,
        cores: 1,
        cache_bytes: 0,
        prepare_bytes: 0,
        compact_bytes_per_second: 0,
        tree: OpenConfig::TREE,
        swap_gap: OpenConfig::SWAP_GAP,
        clock: WallClock::new(|| UnixTime(1_000_000)),
        tokens: None,
    }
}

fn make_small(settings: &mut LogSettings) {
    settings.segment_target_bytes = 200;
}

/// A volume with segments of several buckets, records in extents, directories, versions, expired values and tombstones, which was
/// checkpointed, compacted and written again. It is closed, or its machine crashed.
pub fn written_image(seed: u64, is_closed: bool) -> WrittenImage {
    let disk = PowerLossDisk::new(vec![0; DISK_BYTES], BLOCK as u32);
    let device: Rc<dyn Device> = Rc::new(disk.clone());
    let (pool, format) = (BufferPool::new(64 << 20), format_config());
    let (mut random, mut order) = (Prng::new(seed), Prng::new(seed));
    let mut complete = || {
        disk.complete_one(&mut order);
    };
    block_on(<Arc<LogVolume>>::format(&[Rc::clone(&device)], &format), &mut complete).expect("formats");
    let opened = open_with(&device, &pool, open_config(), &format, make_small);
    let volume = block_on(opened, &mut complete).expect("opens");
    let engine = LogEngine::new(volume, Rc::clone(&device), pool.clone());
    let mut image = WrittenImage {
        bytes: Vec::new(),
        last: vec![0; KEYS as usize],
        stored: vec![Vec::new(); KEYS as usize],
    };
    for operation in 1..=240_u64 {
        let index = random.below(KEYS);
        let key = key_of(index);
        let version = if index % 3 == 0 { Version::from_bits(operation) } else { Version::NONE };
        if operation % 9 == 0 {
            block_on(engine.delete_with(&key, version), &mut complete).expect("no fault");
            image.last[index as usize] = 0;
            continue;
        }
        let bytes = random_length(&mut random, VALUE_BYTES_MAX.into());
        let has_expired = random.one_in(12);
        let expires_at = if has_expired { UnixTime(1_000) } else { UnixTime::NEVER };
        let record = record_of(engine.record_layout(), &key, &value_of(&key, operation, bytes));
        let options = PutOptions { version, expires_at, ..PutOptions::default() };
        let put = engine.put_with(&key, PutValue::new(record, bytes), options);
        assert_eq!(block_on(put, &mut complete), Ok(PutOutcome::Stored));
        image.last[index as usize] = if has_expired { 0 } else { operation };
        image.stored[index as usize].push(operation);
        match operation % 60 {
            15 => while block_on(engine.split_once(), &mut complete).expect("no fault") {},
            30 => drop(block_on(engine.compact_once(LogKind::Values), &mut complete).expect("no fault")),
            45 => drop(block_on(engine.compact_once(LogKind::Keys), &mut complete).expect("no fault")),
            50 if operation < 200 => block_on(engine.checkpoint(), &mut complete).expect("no fault"),
            _ => {}
        }
    }
    if is_closed {
        block_on(engine.close(), &mut complete).expect("closes");
    } else if seed.is_multiple_of(2) {
        block_on(engine.mark_durable(), &mut complete).expect("no fault");
    }
    while disk.complete_one(&mut random) {}
    image.bytes = disk.contents();
    image
}

/// The regions of a volume.
pub fn layout_of(image: &[u8]) -> DeviceLayout {
    let region = &image[..FORMAT_REGION_BYTES as usize];
    <Arc<LogVolume>>::device_layout(region).expect("a superblock")
}

/// What has a checksum of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StructureKind {
    Superblock,
    StoreImage,
    Bucket,
    RecordHead,
    Directory,
}

/// Where such a structure begins; a directory at its trailer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogStructure {
    pub kind: StructureKind,
    pub at: usize,
}

impl LogStructure {
    fn u32_at(self, image: &[u8], offset: usize) -> usize {
        let bytes = &image[self.at + offset..self.at + offset + 4];
        u32::from_le_bytes(bytes.try_into().expect("four bytes")) as usize
    }

    /// The bytes that its checksum covers, as its fields say, and where the checksum is.
    fn covered(self, image: &[u8]) -> ([Range<usize>; 2], usize) {
        let at = self.at;
        let (mut ranges, crc_at) = match self.kind {
            StructureKind::Superblock => ([at + 12..at + BLOCK, 0..0], at + 8),
            StructureKind::Bucket => ([at..at + 4, at + 8..at + BLOCK], at + 4),
            StructureKind::StoreImage => {
                let count = self.u32_at(image, 36).min(image.len());
                let body = if image[at + 28] == 0 { 6 * count } else { count };
                ([at + 8..at + 48 + body, 0..0], at + 4)
            }
            StructureKind::Directory => {
                let ids = self.u32_at(image, 16).min(at / 4);
                ([at - 4 * ids..at, at + 8..at + 32], at + 4)
            }
            StructureKind::RecordHead => {
                let (flags, value_bytes) = (image[at + 1], self.u32_at(image, 4));
                let key_bytes = usize::from(u16::from_le_bytes([image[at + 2], image[at + 3]]));
                let fields = 8 * usize::from(flags & 1) + 8 * usize::from(flags >> 1 & 1);
                let pieces = if flags & 4 != 0 { 4 * value_bytes.div_ceil(128 << 10) } else { 0 };
                ([at..at + 8, at + 12..at + 16 + fields + key_bytes + pieces], at + 8)
            }
        };
        for range in &mut ranges {
            range.end = range.end.clamp(range.start, image.len());
        }
        (ranges, crc_at)
    }

    /// What its checksum is combined with.
    fn seed(self, image: &[u8]) -> u32 {
        let (ranges, crc_at) = self.covered(image);
        let mut crc = Crc32c::new();
        ranges.into_iter().for_each(|range| crc.update(&image[range]));
        crc.finish() ^ u32::from_le_bytes(image[crc_at..crc_at + 4].try_into().expect("four bytes"))
    }

    /// Sets a byte of it, before its checksum or behind it, and makes the checksum valid.
    pub fn set_byte(self, image: &mut [u8], offset: usize, byte: u8) {
        let (seed, at) = (self.seed(image), (self.at + offset).min(image.len() - 1));
        image[at] = byte;
        let (_, crc_at) = self.covered(image);
        image[crc_at..crc_at + 4].fill(0);
        // What the fields say of its length may have changed.
        let crc = self.seed(image) ^ seed;
        image[crc_at..crc_at + 4].copy_from_slice(&crc.to_le_bytes());
    }

    /// The bytes that have fields.
    pub fn bytes(self, image: &[u8]) -> usize {
        match self.kind {
            StructureKind::Superblock => 144,
            StructureKind::Bucket => BLOCK,
            StructureKind::StoreImage => 48 + 140 + self.u32_at(image, 36).min(1_000),
            StructureKind::RecordHead => 60,
            StructureKind::Directory => 32,
        }
    }
}

/// All structures of an image.
pub fn structures(image: &[u8]) -> Vec<LogStructure> {
    let keys: Vec<Key> = (0..KEYS).map(key_of).collect();
    let is_record = |at: usize| {
        let Some(head) = image.get(at..at + 32) else { return false };
        let fields = 8 * usize::from(head[1] & 1) + 8 * usize::from(head[1] >> 1 & 1);
        let key_bytes = usize::from(u16::from_le_bytes([head[2], head[3]]));
        let key = image.get(at + 16 + fields..at + 16 + fields + key_bytes);
        head[0] == 0x56 && head[1] < 8 && key.is_some_and(|key| keys.iter().any(|of| of.as_bytes() == key))
    };
    let (records, mut found) = (layout_of(image).records, Vec::new());
    for at in (0..image.len() - BLOCK).step_by(8) {
        let (is_block, in_chunks) = (at % BLOCK == 0, at as u64 >= records.start);
        let kind = match &image[at..at + 4] {
            b"OCTO" if is_block => StructureKind::Superblock,
            b"OKVD" if in_chunks => StructureKind::Directory,
            [b'K', b'B', 1, _] if is_block && in_chunks => StructureKind::Bucket,
            [0xc5, 1, ..] if is_block && in_chunks => StructureKind::Bucket,
            [0x56, ..] if in_chunks && is_record(at) => StructureKind::RecordHead,
            _ => continue,
        };
        found.push(LogStructure { kind, at });
    }
    // The images of a checkpoint follow one another without gaps.
    let before_chunks = &image[..records.start as usize];
    let images = before_chunks.windows(4).enumerate().filter(|(_, magic)| magic == b"OKVS");
    found.extend(images.map(|(at, _)| LogStructure { kind: StructureKind::StoreImage, at }));
    found
}

/// What using a damaged volume showed.
pub struct DamagedUse {
    /// What each key has; `None` if it does not exist.
    pub found: Vec<Result<Option<u64>, EngineError>>,
    /// What verification says, unless it cannot load the volume.
    pub report: Option<VerifyReport>,
}

/// Verifies an image, opens it, and runs every operation on the open volume. `None` if the opening fails. With `has_values`, each value found must have the format of
/// [`value_of`].
pub fn verify_open_and_use(bytes: Vec<u8>, random: &mut Prng, has_values: bool) -> Option<DamagedUse> {
    let (pool, format) = (BufferPool::new(64 << 20), format_config());
    let disk = PowerLossDisk::new(bytes, BLOCK as u32);
    let device: Rc<dyn Device> = Rc::new(disk.clone());
    let mut order = random.fork();
    let mut complete = || {
        disk.complete_one(&mut order);
    };
    let (devices, mut observer) = ([Rc::clone(&device)], |_: u64, _: u64| ());
    let verified = <Arc<LogVolume>>::verify(&devices, &pool, &mut observer);
    let report = block_on(verified, &mut complete).ok();
    let opened = open_with(&device, &pool, open_config(), &format, make_small);
    let volume = block_on(opened, &mut complete).ok()?;
    let engine = LogEngine::new(volume, Rc::clone(&device), pool.clone());
    let mut found = Vec::new();
    for key in (0..KEYS).map(key_of) {
        let value = block_on(engine.get(&key), &mut complete);
        let operation = |bytes: &[u8]| if has_values { operation_of(&key, bytes) } else { 1 };
        found.push(value.map(|value| value.map(|value| operation(value.as_bytes()))));
        let range = ValueRange { offset: 100, bytes_max: 1_000 };
        let _ = block_on(engine.get_range(&key, range), &mut complete);
        let _ = block_on(engine.status(&key), &mut complete);
    }
    exercise(&engine, random, has_values, &mut complete);
    Some(DamagedUse { found, report })
}

/// Lists keys, puts and deletes, splits and compacts, and checks, with `has_values`, that a get returns each acknowledged put.
fn exercise(engine: &LogEngine, random: &mut Prng, has_values: bool, mut complete: impl FnMut()) {
    let empty = Key::new(&[]).expect("an empty key");
    let _ = block_on(engine.list(&empty, &mut |_: &[u8]| true), &mut complete);
    let _ =
        block_on(engine.scan(RingRange::FULL, Version::NONE, &mut |_: &ScanEntry<'_>| true), &mut complete);
    for step in 0..24_u64 {
        let key = key_of(random.below(KEYS));
        let (operation, bytes) = (1_000 + step, random_length(random, 6_000));
        let record = record_of(engine.record_layout(), &key, &value_of(&key, operation, bytes));
        let stored = block_on(engine.put(&key, PutMode::Upsert, record, bytes), &mut complete);
        if stored == Ok(PutOutcome::Stored) {
            let found = block_on(engine.get(&key), &mut complete);
            let found = found.map(|value| value.map(|value| operation_of(&key, value.as_bytes())));
            assert!(!has_values || found == Ok(Some(operation)), "{found:?} of {operation}");
        }
        if step % 4 == 0 {
            let _ = block_on(engine.delete(&key_of(random.below(KEYS))), &mut complete);
        }
        match step % 8 {
            2 => drop(block_on(engine.split_once(), &mut complete)),
            4 => drop(block_on(engine.compact_once(LogKind::Values), &mut complete)),
            6 => drop(block_on(engine.compact_once(LogKind::Keys), &mut complete)),
            _ => {}
        }
    }
    let _ = block_on(engine.compact_all(), &mut complete);
    let _ = block_on(engine.checkpoint(), &mut complete);
    let _ = block_on(engine.close(), &mut complete);
}
