//! Volumes: what an engine keeps on one device or several, from format to close.
//!
//! ```text
//!   format ─▶ open ─▶ a handle for each core ─▶ operations, beside maintain on one core ─▶ close
//!               └──── verify, while it is not open
//! ```
//! In: devices, each core's view of them. Out: an engine's handle for each core. Invariant: a volume is opened only by the
//! engine that formatted it: each device's superblock names it.

use crate::common::superblock::SUPERBLOCK_AREA_BYTES;
use crate::lsm::prefetch_degree::PrefetchMode;
use crate::{
    Durability, Engine, EngineKind, EngineStatistics, OpenError, PrefetchStage, VerifyFailure,
    VerifyObserver, VerifyReport,
};
use octokv_base::{BufferPool, Nanos, RecordLayout, SharedSum, UnixTime};
use octokv_device::Device;
use octokv_sched::StartingCosts;
use std::fmt;
use std::future::Future;
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;

/// The bytes at the start of each device of a volume that a format writes first.
pub const FORMAT_REGION_BYTES: u64 = SUPERBLOCK_AREA_BYTES;

/// The 128-bit hash function of keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HashKind {
    /// XXH3-128 with the volume's seed: the ring of all volumes.
    Xxh3 = 0,
    /// The first 128 bits of SHA-1, as in the OctoKV paper.
    Sha1 = 1,
}

/// The configuration of a new volume.
#[derive(Clone, Copy, Debug)]
pub struct FormatConfig {
    /// The engine of the volume, and of the namespace that it is opened for.
    pub engine: EngineKind,
    /// The version of the engine's format; an engine of which there is only one ignores it.
    pub version: u16,
    /// The unit in bytes: 512, 1024, 2048 or 4096, and at least the device's block. A record takes whole units. `None`
    /// selects the smallest whose write needs no read below ([`Device::preferred_write_bytes`]) and that suits the device's
    /// size and the longest value.
    pub unit_bytes: Option<u32>,
    /// The hash function of keys.
    pub hash: HashKind,
    /// log2 of the bitmap's partitions (OctoKV's n); fewer on a small device.
    pub bitmap_partitions_log2: u8,
    /// The longest value, in bytes.
    pub value_bytes_max: u32,
    /// Values of fewer bytes lie in the tree of the ordered engine, the others in value segments; at most 16 KiB. The hash engine
    /// ignores it.
    pub inline_bytes_max: u32,
    /// The stores of a volume of the log engine, at least 1: each has the keys of one range of the ring. Halved on a device with fewer
    /// than 16 chunks for each. Other engines ignore it.
    pub partitions: u16,
    /// The bytes of a chunk of the log engine, a power of two up to 16 MiB; fewer than 16 units are raised to 16. `None` selects it by
    /// the device's size and the longest value. Other engines ignore it.
    pub chunk_bytes: Option<u32>,
    /// The identifier of the namespace that the volume holds.
    pub namespace: u32,
    /// The seed of the volume's random numbers: its id, and its hash seed unless `hash_seed` says it.
    pub seed: u64,
    /// The seed of positions on the ring, the same on all volumes of a ring.
    pub hash_seed: Option<u64>,
    /// The bytes at the end of each of several devices for values of overloaded others, a multiple of [`SWAP_UNIT_BYTES`](crate::spanned::SWAP_UNIT_BYTES); 0 for
    /// none. A volume on one device ignores it.
    pub swap_bytes: u64,
}

impl Default for FormatConfig {
    fn default() -> FormatConfig {
        FormatConfig {
            engine: EngineKind::Hash,
            version: 2,
            unit_bytes: None,
            hash: HashKind::Xxh3,
            bitmap_partitions_log2: 4,
            value_bytes_max: 2 << 20,
            inline_bytes_max: 4 << 10,
            partitions: 32,
            chunk_bytes: None,
            namespace: 1,
            seed: 0,
            hash_seed: None,
            swap_bytes: 0,
        }
    }
}

/// The clocks of a volume: the wall clock, with which the expiry of keys is compared, and a monotonic one, by which an engine measures, if there is one. The default wall
/// clock stands still at 0: nothing expires.
#[derive(Clone)]
pub struct WallClock {
    wall: Arc<dyn Fn() -> UnixTime + Send + Sync>,
    monotonic: Option<Arc<dyn Fn() -> Nanos + Send + Sync>>,
}

impl WallClock {
    /// A wall clock that `now` reads, without a monotonic one.
    pub fn new(now: impl Fn() -> UnixTime + Send + Sync + 'static) -> WallClock {
        WallClock { wall: Arc::new(now), monotonic: None }
    }

    /// This wall clock, and a monotonic one that `elapsed` reads.
    pub fn with_monotonic(self, elapsed: impl Fn() -> Nanos + Send + Sync + 'static) -> WallClock {
        WallClock { monotonic: Some(Arc::new(elapsed)), ..self }
    }

    /// The time.
    pub fn now(&self) -> UnixTime {
        (self.wall)()
    }

    /// The time since some moment, which never decreases; `None` without a monotonic clock.
    pub fn elapsed(&self) -> Option<Nanos> {
        self.monotonic.as_ref().map(|elapsed| elapsed())
    }
}

impl Default for WallClock {
    fn default() -> WallClock {
        WallClock::new(|| UnixTime(0))
    }
}

impl fmt::Debug for WallClock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "WallClock({})", self.now().0)
    }
}

/// How a volume is opened.
#[derive(Clone, Debug)]
pub struct OpenConfig {
    /// When writes are acknowledged.
    pub durability: Durability,
    /// The number of cores with a handle.
    pub cores: usize,
    /// Memory of a cache of values in front of the volume, in bytes; 0 for none.
    pub cache_bytes: u64,
    /// Never-written space that is written with zeros ahead of its use, in bytes at most; 0 for none. No effect on devices
    /// whose first writes cost no more than later ones ([`Device::next_unwritten`]).
    pub prepare_bytes: u64,
    /// What compaction may read and write, in bytes per second; 0 for no compaction. No effect on volatile volumes and on those
    /// of the hash engine's format 1, which have no values in pieces. Of the ordered engine what compactions write, and `u64::MAX`
    /// for as fast as they need; flushes, and compactions that a write or a call waits for, are not limited.
    pub compact_bytes_per_second: u64,
    /// Options of the ordered engine; other engines ignore them.
    pub tree: TreeOptions,
    /// The commands in flight by which a device has to exceed another before its puts are stored in the swap region of that one
    /// ([`FormatConfig::swap_bytes`]).
    pub swap_gap: u32,
    /// The clock of expiry.
    pub clock: WallClock,
    /// Initial cost of each command in tokens. A volume on several devices limits the tokens in flight on each device; `None` for no limit.
    /// Ignored by a volume on one device.
    pub tokens: Option<StartingCosts>,
}

impl OpenConfig {
    /// The usual [`OpenConfig::tree`].
    pub const TREE: TreeOptions = TreeOptions {
        iterator_idle: Nanos::from_secs(600),
        prefetch: PrefetchMode::Adaptive,
        compresses: false,
    };
    /// The usual [`OpenConfig::swap_gap`]: a drive has all its parallelism at fewer commands in flight than this.
    pub const SWAP_GAP: u32 = 64;
}

/// Options of the ordered engine that may be others at each opening.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TreeOptions {
    /// The time after which an iterator that is not used ends; more than 0.
    pub iterator_idle: Nanos,
    /// How many values an iterator reads ahead of the next one.
    pub prefetch: PrefetchMode,
    /// Whether blocks of new tables are compressed by LZ4. Those that are there are read in either form.
    pub compresses: bool,
}

/// What a volume is, from its format on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VolumeInfo {
    /// Its random number.
    pub id: u64,
    /// The longest value, in bytes.
    pub value_bytes_max: usize,
    /// The space for records, in bytes.
    pub capacity_bytes: u64,
    /// Where the buffer of a put has key and value.
    pub record_layout: RecordLayout,
    /// Whether its handles have iterators.
    pub has_iterators: bool,
}

/// The versions of a volume's format before and after an upgrade.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FormatVersions {
    /// Before.
    pub before: u16,
    /// After; the same if it was the newest.
    pub after: u16,
}

/// Where a device of a volume has what, in bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceLayout {
    /// The granularity of records.
    pub unit_bytes: u32,
    /// The records.
    pub records: Range<u64>,
    /// The journal's first copy.
    pub journal: Range<u64>,
    /// The first copy of each area of index images.
    pub images: Vec<Range<u64>>,
}

/// How many requests ahead each stage of an engine is prefetched: their execution time hides one memory access.
pub type PrefetchPlan = &'static [(usize, PrefetchStage)];

/// An open volume, which all cores of a process share. Clones are the same volume. Its maintenance and its close are
/// operations of a core's handle: [`Engine::maintain`], [`Engine::close`].
pub trait Volume: Clone + Send + Sync + 'static {
    /// One core's handle.
    type Engine: Engine + 'static;

    /// What a request is worth prefetching for, and how early; each distance at least 1.
    const PREFETCH: PrefetchPlan;

    /// Creates an empty volume on devices, whose contents are lost. Does nothing to volatile devices.
    ///
    /// # Errors
    /// The configuration does not fit the devices, or a device fails.
    ///
    /// # Panics
    /// If the configuration is invalid for every device.
    fn format(
        devices: &[Rc<dyn Device>],
        config: &FormatConfig,
    ) -> impl Future<Output = Result<(), OpenError>>;
    /// Opens the volume on devices, in the order of their indices, after recovery. A volatile device is formatted with
    /// `format` first. Writes nothing before recovery has read everything.
    ///
    /// # Errors
    /// The devices hold no volume of this engine, or a damaged one, or fail.
    fn open(
        devices: &[Rc<dyn Device>],
        pool: &BufferPool,
        config: OpenConfig,
        format: &FormatConfig,
    ) -> impl Future<Output = Result<Self, OpenError>>;
    /// Reads and checks everything on devices, and reports to `observer` as it goes on; changes nothing.
    ///
    /// # Errors
    /// Recovery cannot load the volume: why, and the totals of a scan whose findings `observer` received.
    fn verify(
        devices: &[Rc<dyn Device>],
        pool: &BufferPool,
        observer: &mut impl VerifyObserver,
    ) -> impl Future<Output = Result<VerifyReport, VerifyFailure>>;
    /// Makes the volume on devices, which is not open, one of the engine's newest format, with all that it holds. A crash leaves it
    /// in either format.
    ///
    /// # Errors
    /// Recovery cannot load the volume, or a device fails: the volume is then what it was.
    fn upgrade(
        devices: &[Rc<dyn Device>],
        pool: &BufferPool,
    ) -> impl Future<Output = Result<FormatVersions, OpenError>>;
    /// The layout of a device, from its first [`FORMAT_REGION_BYTES`]; `None` without an intact superblock.
    fn device_layout(format_region: &[u8]) -> Option<DeviceLayout>;

    /// The handle of core `core`. REQUIRES: `devices` are that core's views of the volume's devices, and no other handle
    /// of the volume has the same core.
    fn engine(&self, core: usize, devices: &[Rc<dyn Device>], pool: BufferPool) -> Self::Engine;
    /// What the volume is.
    fn info(&self) -> VolumeInfo;
    /// Sets what verification in the background reads per second, in bytes; 0 for none, as it is after an opening. REQUIRES:
    /// [`Engine::maintain`] does not run yet. No effect with an engine that has no such work.
    fn set_scrub_rate(&self, _bytes_per_second: u64) {}
    /// The space in use, in bytes; updated by each operation.
    fn used_bytes(&self) -> SharedSum;
    /// Whether nothing is being written. A core must not stop before.
    fn is_idle(&self) -> bool;
    /// Whether a write failed, so that nothing is written until the next opening.
    fn is_read_only(&self) -> bool;
    /// The current statistics.
    fn statistics(&self) -> EngineStatistics;
    /// The devices of a volume on several, in the order in which they were given to open it; none of a volume on one.
    fn device_reports(&self) -> Vec<DeviceReport> {
        Vec::new()
    }
}

/// One device of a volume on several.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceReport {
    /// Its index in the volume.
    pub index: u16,
    /// Why it is not available, if it is not.
    pub failure: Option<OpenError>,
    /// Whether a write to it failed, so that its keys are only read until the next opening.
    pub is_read_only: bool,
    /// The statistics of the volume on it.
    pub statistics: EngineStatistics,
    /// What its keys took and gave since the opening, or its replacement.
    pub traffic: KeyTraffic,
    /// What swapping did with its keys.
    pub swaps: SwapReport,
    /// Its tokens, if operations wait for some.
    pub tokens: Option<QueueReport>,
}

/// The tokens of one device, and what operations cost there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QueueReport {
    /// The tokens that may be active.
    pub capacity: u32,
    /// Those of the operations that are active; an operation on an idle device may exceed the capacity.
    pub active: u32,
    /// Those of the operations that wait.
    pub waiting: u64,
    /// The measured cost of a Get of up to 4 KiB.
    pub get_cost: u32,
    /// That of a Put of up to 4 KiB.
    pub put_cost: u32,
    /// That of a Delete.
    pub delete_cost: u32,
}

/// What swapping did with the keys of a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SwapReport {
    /// The keys whose newest values are in the regions of other devices.
    pub keys: usize,
    /// The puts that were stored there since the opening.
    pub swapped: u64,
    /// The values that were stored at home again.
    pub merged: u64,
}

/// The bytes of keys and values that operations brought, and of values that they took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KeyTraffic {
    /// Of puts that stored: keys and values.
    pub put_bytes: u64,
    /// Of reads: values, or the parts that were asked for.
    pub got_bytes: u64,
}
