//! The suites of every volume, on one disk or several: power loss at every write and flush, also during recovery, and
//! damaged blocks.
//!
//! ```text
//!   puts and deletes, six at once ─▶ history of the disks ─▶ images at every event ─▶ open ─▶ each key has a value that
//!   background work                  (one order of events)                                     it may have there
//! ```
//! In: a [`VolumeSuite`]: a volume's configuration and its background work. Out: a panic with the event and the mode of a
//! failure. Several disks lose their power between the same two events.

use crate::conformance::{TaskSet, key_of, operation_of, random_length, record_of, value_of};
use crate::{
    DeleteOutcome, Engine, EngineError, FormatConfig, OpenConfig, PutOptions, PutOutcome, PutValue,
    ScanEntry, Volume,
};
use octokv_base::{BufferPool, Key, Prng, RingRange, Version};
use octokv_device::Device;
use octokv_device::disk_image::DiskImage;
use octokv_device::power_loss::{DiskHistory, PowerLossDisk, PowerLossMode};
use octokv_runtime::block_on;
use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::future::Future;
use std::marker::PhantomData;
use std::pin::Pin;
use std::rc::Rc;

/// Work of an engine beside its operations.
pub type EngineTask<E> = fn(Rc<E>) -> Pin<Box<dyn Future<Output = ()>>>;
/// A core's view of a disk.
pub type DeviceView = fn(PowerLossDisk) -> Rc<dyn Device>;

/// A volume under test.
pub struct VolumeSuite<V: Volume> {
    /// The configuration of its format.
    pub format: FormatConfig,
    /// How it is opened.
    pub open: OpenConfig,
    /// The disks' sizes in bytes.
    pub disk_bytes: Vec<usize>,
    /// The disks' block size in bytes.
    pub block_bytes: u32,
    /// Called now and then while operations run: a checkpoint, a compaction.
    pub background: EngineTask<V::Engine>,
    /// Called at the end of a run: what the volume does when idle.
    pub settle: EngineTask<V::Engine>,
    /// The device on a disk: the disk itself, unless the test breaks something.
    pub view: DeviceView,
    /// Whether the operations of a run have versions, so that deletes leave tombstones. REQUIRES: the volume has them, in ring
    /// order.
    pub has_versions: bool,
    /// The cores whose handles make the operations of a run, in turns; at most those that the volume is opened for.
    pub cores: usize,
    /// The keys that the operations of a run are of, at most [`KEYS`]: writes of few share accesses.
    pub keys: u64,
    volume: PhantomData<V>,
}

/// The most keys that a run writes.
pub const KEYS: u64 = 24;
/// The longest value of a run, in bytes.
const VALUE_BYTES_MAX: u64 = 5_000;

/// A write or delete, with its start and acknowledgement by the test's clock and the disks' events.
struct TracedCall {
    key: Key,
    /// `None` deletes.
    operation: Option<u64>,
    /// [`Version::NONE`] in a run without versions.
    version: Version,
    began: (u64, usize),
    acknowledged: Option<(u64, usize)>,
}

/// The calls of a run.
#[derive(Default)]
pub struct CallTrace {
    clock: u64,
    calls: Vec<TracedCall>,
}

impl CallTrace {
    fn tick(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }

    /// The values that a key may have after a power loss at `events`: those of writes that had begun, except those that a
    /// later acknowledged write replaced.
    fn allowed(&self, key: &Key, events: usize) -> Vec<Option<u64>> {
        let begun = self.calls.iter().filter(|call| call.key == *key && call.began.1 <= events);
        let begun: Vec<&TracedCall> = begun.collect();
        let acknowledged = |call: &&&TracedCall| call.acknowledged.is_some_and(|(_, at)| at <= events);
        let is_replaced = |at: u64| begun.iter().filter(acknowledged).any(|call| call.began.0 > at);
        let mut allowed = Vec::new();
        if !is_replaced(0) {
            allowed.push(None);
        }
        for call in &begun {
            let ended = call.acknowledged.filter(|(_, at)| *at <= events);
            if ended.is_none_or(|(at, _)| !is_replaced(at)) {
                allowed.push(call.operation);
            }
        }
        allowed
    }

    /// The highest version of an acknowledged write of a key at a power loss at `events`.
    fn acknowledged_version(&self, key: &Key, events: usize) -> Version {
        let of_key = self.calls.iter().filter(|call| call.key == *key);
        let acknowledged = of_key.filter(|call| call.acknowledged.is_some_and(|(_, at)| at <= events));
        acknowledged.map(|call| call.version).max().unwrap_or(Version::NONE)
    }

    fn allowed_of_all(&self, events: usize) -> Vec<Vec<Option<u64>>> {
        (0..KEYS).map(|index| self.allowed(&key_of(index), events)).collect()
    }
}

async fn run_call<E: Engine>(
    engine: Rc<E>,
    trace: Rc<RefCell<CallTrace>>,
    disk: PowerLossDisk,
    key: Key,
    (operation, version): (u64, Version),
    random: RefCell<Prng>,
) {
    let stores = (!random.borrow_mut().one_in(4)).then_some(operation);
    let id = {
        let mut trace = trace.borrow_mut();
        let began = (trace.tick(), disk.events());
        let key = key.clone();
        trace.calls.push(TracedCall { key, operation: stores, version, began, acknowledged: None });
        trace.calls.len() - 1
    };
    let is_newer = match stores {
        Some(operation) => {
            let length = random_length(&mut random.borrow_mut(), VALUE_BYTES_MAX);
            let value = value_of(&key, operation, length);
            let record = record_of(engine.record_layout(), &key, &value);
            let options = PutOptions { version, ..PutOptions::default() };
            let put = engine.put_with(&key, PutValue::new(record, length), options).await;
            match put.expect("no fault") {
                PutOutcome::Stored => true,
                PutOutcome::NotNewer(newer) if newer > version => false,
                outcome => panic!("{key}: {outcome:?}"),
            }
        }
        None => {
            let deleted = engine.delete_with(&key, version).await.expect("no fault");
            !matches!(deleted, DeleteOutcome::NotNewer(_))
        }
    };
    let mut trace = trace.borrow_mut();
    if !is_newer {
        // As if it had not been called. The key never has this operation.
        (trace.calls[id].began, trace.calls[id].version) = ((u64::MAX, usize::MAX), Version::NONE);
        return;
    }
    let at = (trace.tick(), disk.events());
    trace.calls[id].acknowledged = Some(at);
}

/// What each key of a volume holds, in the order of the keys: an operation, nothing, or an error.
pub type FoundValues = Vec<Result<Option<u64>, EngineError>>;

/// Reads every key.
pub fn read_all<E: Engine>(disk: &PowerLossDisk, engine: &E) -> FoundValues {
    let mut random = Prng::new(5);
    let mut read = |key: Key| {
        let found = block_on(engine.get(&key), || {
            disk.complete_one(&mut random);
        });
        found.map(|value| value.map(|value| operation_of(&key, value.as_bytes())))
    };
    (0..KEYS).map(|index| read(key_of(index))).collect()
}

/// The version of each key, in the order of the keys.
fn read_versions<E: Engine>(disk: &PowerLossDisk, engine: &E) -> Vec<Version> {
    let (mut random, mut versions) = (Prng::new(5), BTreeMap::new());
    let mut sink = |entry: &ScanEntry<'_>| {
        versions.insert(entry.key.to_vec(), entry.version);
        true
    };
    block_on(engine.scan(RingRange::FULL, Version::NONE, &mut sink), || {
        disk.complete_one(&mut random);
    })
    .expect("no fault");
    let version_of = |index| versions.get(key_of(index).as_bytes()).copied().unwrap_or(Version::NONE);
    (0..KEYS).map(version_of).collect()
}

/// No key's version is older than an acknowledged one.
fn assert_versions(trace: &CallTrace, events: usize, found: &[Version], context: &str) {
    for (index, &found) in found.iter().enumerate() {
        let acknowledged = trace.acknowledged_version(&key_of(index as u64), events);
        assert!(
            found >= acknowledged,
            "{context}: {} has version {found}, not {acknowledged}",
            key_of(index as u64)
        );
    }
}

/// Each key has one of the values that it may have after a power loss.
fn assert_allowed(allowed: &[Vec<Option<u64>>], found: &FoundValues, context: &str) {
    for (index, (allowed, found)) in allowed.iter().zip(found).enumerate() {
        let key = key_of(index as u64);
        let found = found.unwrap_or_else(|fault| panic!("{context}: {key}: {fault}"));
        assert!(allowed.contains(&found), "{context}: {key} holds {found:?}, of {allowed:?}");
    }
}

/// Each key has one of the values that it may have after a power loss at `events`.
///
/// # Panics
/// If it does not: `context` is the front of the message.
pub fn assert_durability(found: &FoundValues, trace: &CallTrace, events: usize, context: &str) {
    assert_allowed(&trace.allowed_of_all(events), found, context);
}

fn flip_bit(image: &mut DiskImage, at: usize, bit: u64) {
    let mut byte = [0];
    image.read(at, &mut byte);
    image.write(at, &[byte[0] ^ 1 << bit]);
}

impl<V: Volume> VolumeSuite<V> {
    /// A suite without background work.
    pub fn new(
        format: FormatConfig,
        open: OpenConfig,
        disk_bytes: Vec<usize>,
        block_bytes: u32,
    ) -> VolumeSuite<V> {
        let nothing: EngineTask<V::Engine> = |_| Box::pin(std::future::ready(()));
        let view: DeviceView = |disk| Rc::new(disk);
        let (background, settle) = (nothing, nothing);
        VolumeSuite {
            format,
            open,
            disk_bytes,
            block_bytes,
            background,
            settle,
            view,
            has_versions: false,
            cores: 1,
            keys: KEYS,
            volume: PhantomData,
        }
    }

    fn devices(&self, disks: &[PowerLossDisk]) -> Vec<Rc<dyn Device>> {
        disks.iter().map(|disk| (self.view)(disk.clone())).collect()
    }

    /// New disks with these contents, and the volume on them, opened.
    ///
    /// # Errors
    /// The volume does not open.
    pub fn open(&self, images: Vec<DiskImage>) -> Result<(Vec<PowerLossDisk>, V::Engine), String> {
        let (disks, mut engines) = self.open_on(images, 1)?;
        Ok((disks, engines.remove(0)))
    }

    /// The same, with handles of several cores.
    fn open_on(
        &self,
        images: Vec<DiskImage>,
        cores: usize,
    ) -> Result<(Vec<PowerLossDisk>, Vec<V::Engine>), String> {
        let disks = PowerLossDisk::group(images, self.block_bytes);
        let mut random = Prng::new(1);
        let (devices, pool) = (self.devices(&disks), BufferPool::new(64 << 20));
        let opened = block_on(V::open(&devices, &pool, self.open.clone(), &self.format), || {
            disks[0].complete_one(&mut random);
        });
        let volume = opened.map_err(|error| error.to_string())?;
        let engines = (0..cores).map(|core| volume.engine(core, &devices, pool.clone())).collect();
        Ok((disks, engines))
    }

    /// Runs `operations` puts and deletes, up to six at once, on a fresh volume.
    pub fn run_traced(&self, seed: u64, operations: u64) -> (Vec<PowerLossDisk>, CallTrace) {
        let mut random = Prng::new(seed);
        let blank = self.disk_bytes.iter().map(|&bytes| vec![0; bytes].into()).collect();
        let disks = PowerLossDisk::group(blank, self.block_bytes);
        block_on(V::format(&self.devices(&disks), &self.format), || {
            disks[0].complete_one(&mut random);
        })
        .expect("formats");
        let images = disks.iter().map(PowerLossDisk::image).collect();
        let (disks, engines) = self.open_on(images, self.cores).expect("opens");
        let engines: Vec<Rc<V::Engine>> = engines.into_iter().map(Rc::new).collect();
        let trace = Rc::new(RefCell::new(CallTrace::default()));
        let mut tasks = TaskSet::default();
        for operation in 1..=operations {
            let random_of_call = RefCell::new(random.fork());
            let engine = &engines[operation as usize % self.cores];
            let (engine_of_call, disk) = (Rc::clone(engine), disks[0].clone());
            let version = if self.has_versions { Version::from_bits(operation) } else { Version::NONE };
            let trace = Rc::clone(&trace);
            let key = key_of(random_of_call.borrow_mut().below(self.keys));
            let call = (operation, version);
            tasks.add(run_call(engine_of_call, trace, disk, key, call, random_of_call));
            if random.one_in(50) {
                tasks.add((self.background)(Rc::clone(engine)));
            }
            while tasks.len() >= 6 {
                if random.one_in(2) || !tasks.step(&mut random) {
                    disks[0].complete_one(&mut random);
                }
            }
        }
        tasks.run(&mut random, |random| disks[0].complete_one(random));
        block_on((self.settle)(Rc::clone(&engines[0])), || {
            disks[0].complete_one(&mut random);
        });
        drop((tasks, engines));
        (disks, Rc::try_unwrap(trace).ok().expect("all calls are over").into_inner())
    }

    /// The versions of all keys; none in a run without versions.
    fn versions(&self, disk: &PowerLossDisk, engine: &V::Engine) -> Vec<Version> {
        if self.has_versions { read_versions(disk, engine) } else { Vec::new() }
    }

    /// Loses power after every `step`th event of a run, in every mode, and opens the volume. What a volume holds depends on
    /// its images alone: of equal images, as successive events often leave them, only the first are opened.
    pub fn lose_power_at_events(&self, disks: &[PowerLossDisk], trace: &CallTrace, step: usize) {
        const REMEMBERED: usize = 8;
        let (mut history, mut random) = (DiskHistory::of(&disks[0]), Prng::new(3));
        let mut opened: VecDeque<(Vec<DiskImage>, FoundValues, Vec<Version>)> = VecDeque::new();
        let total = disks[0].events();
        for events in (0..=total).step_by(step) {
            history.advance(events);
            let allowed = trace.allowed_of_all(events);
            // `run_traced` formatted the volume before the first event.
            for mode in PowerLossMode::ALL {
                let context = format!("power loss at {events} of {total}, {mode:?}");
                let images = history.images(mode, &mut random);
                let known = opened.iter().position(|(known, ..)| *known == images);
                let entry = match known {
                    Some(at) => opened.remove(at).expect("found"),
                    None => {
                        let opened = self.open(images.clone());
                        let (after, engine) = opened.unwrap_or_else(|error| panic!("{context}: {error}"));
                        (images, read_all(&after[0], &engine), self.versions(&after[0], &engine))
                    }
                };
                assert_allowed(&allowed, &entry.1, &context);
                assert_versions(trace, events, &entry.2, &context);
                opened.push_front(entry);
                opened.truncate(REMEMBERED);
            }
        }
    }

    /// Loses power after every `step`th event of a run, and again at every event of the recovery.
    pub fn lose_power_twice(&self, disks: &[PowerLossDisk], trace: &CallTrace, step: usize) {
        let (mut history, mut random) = (DiskHistory::of(&disks[0]), Prng::new(4));
        for events in (0..=disks[0].events()).step_by(step) {
            history.advance(events);
            let first = PowerLossMode::ALL[random.below(4) as usize];
            let (recovering, _engine) = self.open(history.images(first, &mut random)).expect("opens");
            let mut history_of_recovery = DiskHistory::of(&recovering[0]);
            for again in 0..=recovering[0].events() {
                history_of_recovery.advance(again);
                let second = PowerLossMode::ALL[random.below(4) as usize];
                let context =
                    format!("power loss at {events}, {first:?}, then at {again} of recovery, {second:?}");
                let opened = self.open(history_of_recovery.images(second, &mut random));
                let (after, engine) = opened.unwrap_or_else(|error| panic!("{context}: {error}"));
                assert_durability(&read_all(&after[0], &engine), trace, events, &context);
                assert_versions(trace, events, &self.versions(&after[0], &engine), &context);
            }
        }
    }

    /// Flips a bit of each block of each disk, one after another. The volume opens, and at most one key is affected: its
    /// error names the disk, and a record that the block is in. Gives how many blocks affected a key.
    pub fn flip_a_bit_in_every_block(&self, images: &[DiskImage]) -> usize {
        let (reference, engine) = self.open(images.to_vec()).expect("opens");
        let good = read_all(&reference[0], &engine);
        let (mut random, mut affected) = (Prng::new(6), 0);
        let block_bytes = self.block_bytes as usize;
        let record_blocks = (VALUE_BYTES_MAX as usize + 1_000).div_ceil(block_bytes);
        for device in 0..images.len() {
            for block in 0..images[device].len() / block_bytes {
                let mut damaged = images.to_vec();
                let at = block * block_bytes + random.below(block_bytes as u64) as usize;
                flip_bit(&mut damaged[device], at, random.below(8));
                let context = format!("block {block} of device {device}");
                let opened = self.open(damaged);
                let (disks, engine) = opened.unwrap_or_else(|error| panic!("{context}: {error}"));
                let found = read_all(&disks[0], &engine);
                let differ = found.iter().zip(&good).filter(|(found, good)| found != good);
                let faults: Vec<_> = differ.map(|(found, _)| found).collect();
                assert!(faults.len() <= 1, "{context} affected {} keys", faults.len());
                for found in faults {
                    let Err(EngineError::Corrupt { lba, place }) = found else {
                        panic!("{context}: {found:?}")
                    };
                    let record = *lba as usize..*lba as usize + record_blocks;
                    assert!(record.contains(&block), "{context} is not of the record at block {lba}");
                    assert_eq!(usize::from(place.device()), device, "{context}");
                    affected += 1;
                }
            }
        }
        affected
    }
}
