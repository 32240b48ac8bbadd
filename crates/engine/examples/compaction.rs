//! What compaction is worth: reads of the device, and time, of a get of a value in pieces, before and after
//! (docs/BENCHMARKS.md, "Values in pieces"): `cargo run --release -p octokv-engine --example compaction`.
//!
//! A volume of 256 MiB is filled with values of 4,000 bytes, every second one is deleted, and 60 values of a MiB are put. Then
//! compaction runs to its end. The drive is simulated, and so is the time: the figures are the same on every machine. Keys have 16
//! bytes; in the last case one in seven is longer, so that its record has a unit more.

use octokv_base::{Buffer, BufferPool, Key, Lba};
use octokv_device::ssd_model::drive_profiles::DCT_983;
use octokv_device::ssd_model::{SimulatedSsd, SsdModel};
use octokv_device::{Device, DeviceFuture, Geometry, MemoryDevice, RamDisk};
use octokv_engine::conformance::{key_of, record_of, value_of};
use octokv_engine::hash::{HashEngine, format, open};
use octokv_engine::{Durability, Engine, FormatConfig, OpenConfig, PutMode, PutOutcome, WallClock};
use octokv_runtime::simulated::{SimEnv, SimEnvConfig};
use octokv_runtime::{CoreWaker, CpuTime, DeviceHandle, ReactorHandle, block_on};
use parking_lot::Mutex;
use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;

const VOLUME_BYTES: u64 = 256 << 20;
const SHORT_BYTES: usize = 4_000;
const LONG_BYTES: usize = 1 << 20;
const LONG_VALUES: u64 = 60;
/// The first key of the long values.
const LONG_KEYS: u64 = 1_000_000;

/// A device that counts its operations, and the bytes written.
struct CountingDevice {
    inner: SimulatedSsd,
    counts: Rc<Counts>,
}

#[derive(Default)]
struct Counts {
    reads: Cell<u64>,
    written_bytes: Cell<u64>,
}

impl Device for CountingDevice {
    fn geometry(&self) -> Geometry {
        self.inner.geometry()
    }
    fn name(&self) -> &str {
        self.inner.name()
    }
    fn read(&self, at: Lba, buffer: Buffer) -> DeviceFuture {
        self.counts.reads.set(self.counts.reads.get() + 1);
        self.inner.read(at, buffer)
    }
    fn write(&self, at: Lba, buffer: Buffer) -> DeviceFuture {
        self.counts.written_bytes.set(self.counts.written_bytes.get() + buffer.len() as u64);
        self.inner.write(at, buffer)
    }
    fn flush(&self) -> DeviceFuture {
        self.inner.flush()
    }
    fn trim(&self, at: Lba, blocks: u64) -> DeviceFuture {
        self.inner.trim(at, blocks)
    }
}

/// A volume on the drive.
struct BenchVolume {
    engine: HashEngine,
    counts: Rc<Counts>,
    handle: ReactorHandle,
}

impl BenchVolume {
    fn new(unit_bytes: u32) -> BenchVolume {
        let sim = SimEnv::new(SimEnvConfig::new(1));
        let devices = DeviceHandle::new(Box::new(sim.device_queue(sim.add_host())), 1);
        let handle = ReactorHandle::new(CoreWaker::without_eventfd(), devices, CpuTime::simulated());
        let memory = Rc::new(MemoryDevice::new(RamDisk::new(VOLUME_BYTES, 512).expect("memory")));
        let model = Arc::new(Mutex::new(SsdModel::new(DCT_983, 512)));
        let (inner, counts) = (SimulatedSsd::new(memory, model, handle.clone()), Rc::<Counts>::default());
        let device: Rc<dyn Device> = Rc::new(CountingDevice { inner, counts: Rc::clone(&counts) });
        let pool = BufferPool::new(64 << 20);
        let format_config = FormatConfig {
            unit_bytes: Some(unit_bytes),
            value_bytes_max: 2 << 20,
            ..FormatConfig::default()
        };
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
        let volume = block_on(
            async {
                format(&*device, &format_config).await.expect("formats");
                open(&device, &pool, config, &format_config).await.expect("opens")
            },
            || advance(&handle),
        );
        BenchVolume { engine: HashEngine::new(volume, 0, device, pool), counts, handle }
    }

    fn run<T>(&self, future: impl Future<Output = T>) -> T {
        block_on(future, || advance(&self.handle))
    }

    fn put(&self, key: &Key, bytes: usize) -> PutOutcome {
        let record = record_of(self.engine.record_layout(), key, &value_of(key, 1, bytes));
        self.run(self.engine.put(key, PutMode::Upsert, record, bytes)).expect("no fault")
    }

    /// The reads of the device and the time of a get of a long value: the mean.
    fn measure_gets(&self, has_lengths: bool) -> (f64, f64) {
        let (reads, begin) = (self.counts.reads.get(), self.handle.now());
        for key in (LONG_KEYS..LONG_KEYS + LONG_VALUES).map(|index| key(index, has_lengths)) {
            let value = self.run(self.engine.get(&key)).expect("no fault").expect("exists");
            assert!(value.as_bytes() == value_of(&key, 1, LONG_BYTES), "{key}");
        }
        let mean = |sum: u64| sum as f64 / LONG_VALUES as f64;
        (mean(self.counts.reads.get() - reads), mean((self.handle.now() - begin).0) / 1e6)
    }
}

/// A key of 16 bytes, or one of several lengths.
fn key(index: u64, has_lengths: bool) -> Key {
    match has_lengths {
        true => key_of(index),
        false => Key::new(format!("{index:016}").as_bytes()).expect("within the limit"),
    }
}

fn advance(handle: &ReactorHandle) {
    handle.begin_iteration(handle.next_deadline());
}

fn main() {
    println!("unit      get before              get after             moved    written");
    for (unit_bytes, has_lengths) in [(512, false), (4096, false), (4096, true)] {
        let key = |index| key(index, has_lengths);
        let volume = BenchVolume::new(unit_bytes);
        let stored = |index: &u64| volume.put(&key(*index), SHORT_BYTES) == PutOutcome::Stored;
        let count = (0..).take_while(stored).count() as u64;
        for key in (0..count).step_by(2).map(key) {
            volume.run(volume.engine.delete(&key)).expect("no fault");
        }
        for key in (LONG_KEYS..LONG_KEYS + LONG_VALUES).map(key) {
            assert_eq!(volume.put(&key, LONG_BYTES), PutOutcome::Stored);
        }
        assert_eq!(volume.engine.statistics().compaction.values_in_pieces, LONG_VALUES);
        let before = volume.measure_gets(has_lengths);
        let (written, begin) = (volume.counts.written_bytes.get(), volume.handle.now());
        while volume.run(volume.engine.compact()).expect("no fault") {}
        let (written, took) = (volume.counts.written_bytes.get() - written, volume.handle.now() - begin);
        let statistics = volume.engine.statistics().compaction;
        let after = volume.measure_gets(has_lengths);
        println!(
            "{unit_bytes:>4} B  {:>6.1} reads, {:>7.3} ms  {:>4.1} reads, {:>7.3} ms  {:>6}  {:>5.1} MiB in {:.1} s, {} of {LONG_VALUES} joined",
            before.0,
            before.1,
            after.0,
            after.1,
            statistics.moved_records,
            written as f64 / f64::from(1 << 20),
            took.as_secs_f64(),
            statistics.joined_values,
        );
    }
}
