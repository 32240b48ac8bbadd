//! An engine in this process on a local file or block device, by the path of a node: reactors, io_uring, group commit,
//! maintenance.
//!
//! ```text
//!   open ─▶ workload ─▶ workload ─▶ close          one OS thread per core: a reactor with a handle of the engine
//!             └ a reactor per core: device queue, maintenance (the first core's), streams ─▶ all streams ended, volume idle
//! ```
//! Streams are tasks, as with [`crate::remote_engine`]; a node has its connections and requests in their place. Beside workloads, one task of a caller runs on
//! one core ([`LocalEngine::run_task`]).
//! Invariants: a reactor runs until the streams of all cores have ended and the volume is idle, since cores work for each
//! other; a volume is closed before it is opened or formatted again.

use crate::engine_streams::StreamContext;
use crate::error::BenchError;
use crate::platform::Clock;
use crate::recorder::Recorder;
use crate::workload_state::WorkloadState;
use octokv_base::prng::mix64;
use octokv_base::{BufferPool, Nanos};
use octokv_device::ssd_model::SharedSsdModel;
use octokv_device::{Device, FileDevice, Geometry, SimulatedSsd};
use octokv_engine::common::superblock_io::{erase_superblocks, is_blank, read_superblock};
use octokv_engine::lsm::settings::TreeSettings;
use octokv_engine::lsm::superblock::LsmSuperblock;
use octokv_engine::{
    AnyEngine, AnyVolume, Engine, EngineKind, EngineStatistics, FormatConfig, OpenConfig, OpenError, Volume,
};
use octokv_runtime::{
    CoreWaker, CpuTime, DeviceDriver, DeviceHandle, DeviceSource, IdlePolicy, KernelSockets, Polling,
    ReactorHandle, TaskSlab, block_on, open_device_queue,
};
use octokv_sys::file::DeviceFile;
use std::cell::Cell;
use std::future::Future;
use std::io;
use std::pin::pin;
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// Interval in which a reactor whose streams have ended checks whether the others' have.
const FINISH_POLL_INTERVAL: Nanos = Nanos::from_millis(1);

/// The configuration of a local engine.
#[derive(Clone)]
pub struct LocalVolumeConfig {
    /// The format of a new volume, and the engine that opens it.
    pub format: FormatConfig,
    /// How the volume is opened.
    pub open: OpenConfig,
    /// The interface to the device.
    pub driver: DeviceDriver,
    /// Most device operations in flight per core.
    pub device_depth: usize,
    /// The drive whose service times are simulated; `None` for the device's own.
    pub drive: Option<SharedSsdModel>,
    /// Buffer memory of each core, in bytes.
    pub pool_bytes: usize,
    /// The clock of timers.
    pub now: Clock,
}

/// An open volume on a local device.
pub struct LocalEngine {
    source: DeviceSource,
    config: LocalVolumeConfig,
    volume: Mutex<AnyVolume>,
    /// Bytes of a memtable of the ordered engine.
    memtable_bytes: Option<usize>,
    /// The formats so far. Each has a seed of its own: a volume must not take what an earlier one wrote for its own.
    formats: AtomicU64,
}

impl LocalEngine {
    /// Opens the volume on a device, after formatting it if `format` is set or the device is blank.
    ///
    /// # Errors
    /// [`BenchError::Thread`] without a device queue; [`BenchError::Open`] if the device fails or holds other data.
    pub fn open(
        file: DeviceFile,
        config: LocalVolumeConfig,
        format: bool,
    ) -> Result<LocalEngine, BenchError> {
        let source = DeviceSource::from_file(file);
        let reactor = LocalReactor::new(&source, &config)?;
        let blank = reactor.run_to_completion(is_blank(&*reactor.device));
        if format || blank.map_err(|error| reactor.open_error(error))? {
            reactor.format(&config.format)?;
        }
        let volume = Mutex::new(reactor.open(&config)?);
        let memtable_bytes = match config.format.engine {
            EngineKind::Hash | EngineKind::Log => None,
            EngineKind::Lsm => Some(reactor.memtable_bytes()?),
        };
        Ok(LocalEngine { source, config, volume, memtable_bytes, formats: AtomicU64::new(1) })
    }

    /// The engine.
    pub fn kind(&self) -> EngineKind {
        self.config.format.engine
    }

    /// The path of the device.
    pub fn name(&self) -> &str {
        &self.source.name
    }

    /// How the volume is opened.
    pub fn open_config(&self) -> &OpenConfig {
        &self.config.open
    }

    /// Bytes of a memtable; `None` of an engine without.
    pub fn memtable_bytes(&self) -> Option<usize> {
        self.memtable_bytes
    }

    /// Shuts the volume down cleanly and opens it again: a workload then finds no value in memory, like one of a new process.
    ///
    /// # Errors
    /// As for [`LocalEngine::open`] and [`LocalEngine::close`].
    pub fn reopen(&self) -> Result<(), BenchError> {
        self.close()?;
        self.replace(false)
    }

    /// Discards every key: formats the device and opens the new volume.
    ///
    /// # Errors
    /// As for [`LocalEngine::reopen`].
    pub fn discard_all(&self) -> Result<(), BenchError> {
        self.close()?;
        self.replace(true)
    }

    fn replace(&self, format: bool) -> Result<(), BenchError> {
        let reactor = LocalReactor::new(&self.source, &self.config)?;
        if format {
            let number = self.formats.fetch_add(1, Ordering::Relaxed);
            let seed = mix64(self.config.format.seed ^ mix64(number));
            reactor.format(&FormatConfig { seed, ..self.config.format })?;
        }
        *self.volume.lock().unwrap_or_else(PoisonError::into_inner) = reactor.open(&self.config)?;
        Ok(())
    }

    /// Writes the final checkpoint, so that the next open replays nothing. REQUIRES: no workload runs.
    ///
    /// # Errors
    /// [`BenchError::Close`] if it fails, [`BenchError::Thread`] without a device queue.
    pub fn close(&self) -> Result<(), BenchError> {
        let reactor = LocalReactor::new(&self.source, &self.config)?;
        let devices = std::slice::from_ref(&reactor.device);
        let engine = self.volume().engine(0, devices, BufferPool::new(self.config.pool_bytes));
        reactor.run_to_completion(engine.close()).map_err(BenchError::Close)
    }

    /// Zeroes the superblocks: the device then holds no volume. REQUIRES: no workload runs, and none will.
    ///
    /// # Errors
    /// [`BenchError::Open`] if the device fails, [`BenchError::Thread`] without a device queue.
    pub fn erase(&self) -> Result<(), BenchError> {
        let reactor = LocalReactor::new(&self.source, &self.config)?;
        let erased = reactor.run_to_completion(erase_superblocks(&*reactor.device));
        erased.map_err(|error| reactor.open_error(error))
    }

    /// The current statistics of the volume.
    pub fn statistics(&self) -> EngineStatistics {
        self.volume().statistics()
    }

    /// Runs a task on this thread as the first core, beside the volume's background work, until the task has ended and nothing is being written. A compaction that
    /// still runs then is dropped; the next workload or task begins it again. REQUIRES: no workload runs.
    ///
    /// # Errors
    /// [`BenchError::Thread`] without a device queue.
    pub fn run_task<T>(
        &self,
        polling: Polling,
        task: impl AsyncFnOnce(&AnyEngine, &ReactorHandle) -> T,
    ) -> Result<T, BenchError> {
        let mut core = EngineCore::new(self, polling)?;
        let handle = core.reactor.handle.clone();
        let (engine, _) = core.start_engine(self, 0);
        let result = Cell::new(None);
        let body = pin!(async { result.set(Some(task(&engine, &handle).await)) });
        let mut tasks = TaskSlab::new(1, Arc::clone(handle.core_waker()));
        handle.begin_iteration((self.config.now)());
        assert!(tasks.spawn(body).is_ok(), "there is room for one task");
        core.run(&mut tasks, None);
        drop(tasks);
        Ok(result.take().expect("the task has ended"))
    }

    fn volume(&self) -> AnyVolume {
        self.volume.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// The device queue of this thread, and the device.
struct LocalReactor {
    handle: ReactorHandle,
    device: Rc<dyn Device>,
    now: Clock,
}

impl LocalReactor {
    fn new(source: &DeviceSource, config: &LocalVolumeConfig) -> Result<LocalReactor, BenchError> {
        let LocalVolumeConfig { driver, device_depth, now, .. } = *config;
        let core_waker = CoreWaker::new().map_err(thread_error)?;
        let (queue, _) = open_device_queue(driver, device_depth, &core_waker).map_err(thread_error)?;
        let channel = DeviceHandle::new(queue, device_depth);
        let blocks = source.size_bytes / u64::from(source.block_bytes);
        let geometry = Geometry { block_bytes: source.block_bytes, blocks, volatile: false };
        let id = channel.open(source).map_err(thread_error)?;
        let device = FileDevice::new(channel.clone(), id, geometry, source.name.to_string())
            .with_preferred_write(source.preferred_write_bytes)
            .with_unwritten_of(source.clone());
        let handle = ReactorHandle::new(core_waker, channel, CpuTime::measured());
        handle.begin_iteration(now());
        let device: Rc<dyn Device> = match &config.drive {
            None => Rc::new(device),
            Some(model) => Rc::new(SimulatedSsd::new(Rc::new(device), Arc::clone(model), handle.clone())),
        };
        Ok(LocalReactor { handle, device, now })
    }

    /// Runs a future to completion and polls the device meanwhile.
    fn run_to_completion<T>(&self, future: impl Future<Output = T>) -> T {
        let channel = self.handle.devices();
        block_on(future, || {
            self.handle.begin_iteration((self.now)());
            channel.poll();
        })
    }

    fn format(&self, format: &FormatConfig) -> Result<(), BenchError> {
        let formatted = AnyVolume::format(std::slice::from_ref(&self.device), format);
        self.run_to_completion(formatted).map_err(|error| self.open_error(error))
    }

    fn open(&self, config: &LocalVolumeConfig) -> Result<AnyVolume, BenchError> {
        let (pool, open) = (BufferPool::new(config.pool_bytes), config.open.clone());
        let opened = AnyVolume::open(std::slice::from_ref(&self.device), &pool, open, &config.format);
        self.run_to_completion(opened).map_err(|error| self.open_error(error))
    }

    /// Bytes of a memtable of the ordered engine, which follow from its superblock.
    fn memtable_bytes(&self) -> Result<usize, BenchError> {
        let superblock = self.run_to_completion(read_superblock::<LsmSuperblock>(&*self.device));
        let (superblock, _) = superblock.map_err(|error| self.open_error(error))?;
        Ok(TreeSettings::for_layout(&superblock.layout, 0).memtable_bytes)
    }

    fn open_error(&self, error: impl Into<OpenError>) -> BenchError {
        BenchError::Open { name: self.device.name().to_owned(), error: error.into() }
    }
}

fn thread_error(error: io::Error) -> BenchError {
    BenchError::Thread(error.raw_os_error().unwrap_or_default())
}

/// One core of an engine, on this thread: its reactor, and how it waits.
struct EngineCore {
    reactor: LocalReactor,
    volume: AnyVolume,
    sockets: KernelSockets,
    idle: IdlePolicy,
}

impl EngineCore {
    fn new(local: &LocalEngine, polling: Polling) -> Result<EngineCore, BenchError> {
        let reactor = LocalReactor::new(&local.source, &local.config)?;
        let mut sockets = KernelSockets::new().map_err(thread_error)?;
        let core_waker = Arc::clone(reactor.handle.core_waker());
        let eventfd = reactor.handle.devices().completion_eventfd();
        let idle = IdlePolicy::new(polling, core_waker, &mut sockets, eventfd).map_err(thread_error)?;
        Ok(EngineCore { reactor, volume: local.volume(), sockets, idle })
    }

    /// The handle of core `number`, whose background work is started: the volume's, too, on the first core.
    fn start_engine(&self, local: &LocalEngine, number: usize) -> (Rc<AnyEngine>, BufferPool) {
        let (handle, device) = (&self.reactor.handle, std::slice::from_ref(&self.reactor.device));
        let pool = BufferPool::new(local.config.pool_bytes);
        let engine = Rc::new(self.volume.engine(number, device, pool.clone()));
        let abandoned = Rc::clone(&engine);
        handle.spawn(async move { abandoned.run_abandoned().await });
        if number == 0 {
            let (maintained, background) = (Rc::clone(&engine), handle.clone());
            // What fails is retried; if it matters, the next put fails too.
            handle.spawn(async move { maintained.maintain(&background, |_| ()).await });
        }
        (engine, pool)
    }

    /// Runs tasks until they have ended, `have_others_ended` is true, and nothing is being written. Ends the background work.
    fn run<F: Future<Output = ()>>(&mut self, tasks: &mut TaskSlab<F>, workload: Option<&WorkloadState>) {
        let (now, handle) = (self.reactor.now, &self.reactor.handle);
        let channel = handle.devices();
        loop {
            let mut busy = handle.begin_iteration(now()) > 0;
            busy |= handle.poll_background() > 0;
            busy |= tasks.poll_ready() > 0;
            busy |= channel.poll() > 0;
            busy |= tasks.poll_ready() > 0;
            let has_device_io = handle.device_operations_in_flight() > 0;
            let has_ended = tasks.running() == 0;
            if has_ended
                && workload.is_none_or(WorkloadState::is_finished)
                && self.volume.is_idle()
                && !has_device_io
            {
                break;
            }
            let poll_at = if has_ended { now() + FINISH_POLL_INTERVAL } else { Nanos::NEVER };
            let deadline = handle.next_deadline().min(poll_at);
            self.idle.spin_or_sleep(busy, now(), has_device_io, deadline, &mut self.sockets);
        }
        handle.shutdown();
    }
}

/// Runs the `threads` × depth streams of worker `number` of a workload on this thread.
pub(crate) fn run_worker(
    shared: &WorkloadState,
    local: &LocalEngine,
    number: usize,
    threads: usize,
) -> Result<Recorder, BenchError> {
    let group = &shared.group;
    let core = EngineCore::new(local, shared.polling);
    // Ready or not, the other workers must not wait for this one.
    group.failed.fetch_or(core.is_err(), Ordering::AcqRel);
    group.connected.fetch_add(1, Ordering::AcqRel);
    let mut core = core?;
    while group.connected.load(Ordering::Acquire) < group.workers {
        std::thread::yield_now();
    }
    let handle = core.reactor.handle.clone();
    let (engine, pool) = core.start_engine(local, number);
    let has_iterators = core.volume.info().has_iterators;
    let context = StreamContext::new(shared, number, &engine, has_iterators, pool);
    handle.begin_iteration((shared.platform.now)());
    let (count, core_waker) = (threads * shared.config.depth, Arc::clone(handle.core_waker()));
    let mut streams = context.start(count, shared.has_writer(number), &handle, core_waker);
    core.run(&mut streams, Some(shared));
    drop(streams);
    context.finish()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{BenchConfig, StopCondition};
    use crate::platform::GeneratorPlatform;
    use crate::runner::run_local_engine;
    use crate::size_distribution::SizeDistribution;
    use crate::temporary_directory::temporary_directory;
    use crate::workload::Workload;
    use crate::workload_result::WorkloadResult;
    use octokv_engine::{Durability, WallClock};
    use octokv_sys::{clock, file, thread};
    use std::path::Path;

    const PLATFORM: GeneratorPlatform =
        GeneratorPlatform { now: clock::now, spawn: |_, body| thread::spawn("octokv-load", body).map(drop) };
    const KEYS: u64 = 300;

    fn config(workloads: &[Workload], depth: usize) -> BenchConfig {
        BenchConfig {
            workloads: workloads.to_vec(),
            value_sizes: SizeDistribution::Uniform { min: 100, max: 6000 },
            keys: KEYS,
            threads: 3,
            depth,
            stop: StopCondition::Operations(KEYS),
            ..BenchConfig::default()
        }
    }

    fn open(path: &Path, engine: EngineKind, cores: usize) -> Result<Arc<LocalEngine>, BenchError> {
        let volume = LocalVolumeConfig {
            format: FormatConfig { engine, seed: 7, ..FormatConfig::default() },
            open: OpenConfig {
                durability: Durability::PowerSafe,
                cores,
                cache_bytes: 1 << 20,
                prepare_bytes: 0,
                compact_bytes_per_second: 0,
                tree: OpenConfig::TREE,
                swap_gap: OpenConfig::SWAP_GAP,
                clock: WallClock::default(),
                tokens: None,
            },
            driver: DeviceDriver::Auto,
            device_depth: 64,
            drive: None,
            pool_bytes: 16 << 20,
            now: clock::now,
        };
        let file = file::open_device(path, Some(128 << 20), true).expect("the file opens");
        LocalEngine::open(file, volume, false).map(Arc::new)
    }

    fn run_on(
        engine: &Arc<LocalEngine>,
        config: &BenchConfig,
        cores: usize,
    ) -> Result<Vec<WorkloadResult>, BenchError> {
        run_local_engine(config, engine, &vec![None; cores], Polling::Sleep, PLATFORM)
    }

    #[test]
    fn all_engines_run_workloads_on_two_cores_and_keep_the_keys() {
        let directory = temporary_directory("octokv-bench-").expect("a directory");
        let all = [
            Workload::FillSequential,
            Workload::Overwrite,
            Workload::ReadRandom,
            Workload::ReadWhileWriting,
            Workload::YcsbA,
            Workload::YcsbF,
        ];
        for kind in EngineKind::ALL {
            let path = directory.path().join(kind.name());
            let engine = open(&path, kind, 2).expect("opens");
            let results = run_on(&engine, &config(&all, 2), 2).expect("runs");
            for result in &results {
                assert_eq!((result.operations, result.not_found), (KEYS, 0), "{kind} {}", result.workload);
            }
            // Twelve puts of one segment may share an image.
            let images = results[0].log.map(|log| log.images);
            assert_eq!(images.is_some(), kind == EngineKind::Log, "{kind}");
            assert!(images.is_none_or(|images| (1.0 / 12.0..=2.0).contains(&images)), "{images:?}");
            engine.reopen().expect("opens again");
            let read = run_on(&engine, &config(&[Workload::ReadRandom], 2), 2).expect("runs");
            assert_eq!((read[0].not_found, read[0].verified), (0, true), "{kind}");
            let wrong = BenchConfig { seed: 2, ..config(&[Workload::ReadRandom], 1) };
            let error = run_on(&engine, &wrong, 2).expect_err("other values are stored");
            assert!(matches!(error, BenchError::WrongValue { .. }), "{error}");
            engine.discard_all().expect("formats");
            let empty = run_on(&engine, &config(&[Workload::ReadRandom], 1), 1).expect("runs");
            assert_eq!(empty[0].not_found, KEYS, "{kind}");
            engine.close().expect("closes");
            assert_eq!(engine.memtable_bytes().is_some(), kind == EngineKind::Lsm);
        }
        let path = directory.path().join(EngineKind::Hash.name());
        let other = open(&path, EngineKind::Lsm, 1).err().expect("the volume is another engine's");
        assert!(matches!(other, BenchError::Open { .. }), "{other}");
    }

    #[test]
    fn a_task_uses_the_engine_beside_its_background_work() {
        let directory = temporary_directory("octokv-bench-").expect("a directory");
        let engine = open(&directory.path().join("device"), EngineKind::Lsm, 1).expect("opens");
        let config = config(&[Workload::FillSequential], 1);
        run_on(&engine, &config, 1).expect("runs");
        let waited = Nanos::from_millis(30);
        let (found, missing, passed) = engine
            .run_task(Polling::Sleep, async |engine, handle| {
                let start = handle.now();
                handle.sleep(waited).await;
                let found = engine.exist(&config.key(1)).await.expect("reads");
                let missing = engine.exist(&config.key(KEYS)).await.expect("reads");
                (found, missing, handle.now().since(start))
            })
            .expect("runs");
        assert_eq!((found, missing), (Some(config.value_bytes(1)), None));
        assert!(passed >= waited);
        assert!(engine.statistics().tree.is_some_and(|tree| tree.last_sequence >= KEYS));
        engine.close().expect("closes");
    }

    #[test]
    fn scans_read_pairs_in_order_and_reads_go_on_beside_a_writer_at_its_rate() {
        let directory = temporary_directory("octokv-bench-").expect("a directory");
        let engine = open(&directory.path().join("device"), EngineKind::Lsm, 1).expect("opens");
        let ranges = [Workload::FillSequential, Workload::ScanRandom, Workload::YcsbE];
        let results =
            run_on(&engine, &BenchConfig { scan_length: 7, ..config(&ranges, 4) }, 1).expect("runs");
        let [_, scan, ycsb] = &results[..] else { panic!("three workloads") };
        assert_eq!((scan.operations, scan.not_found, scan.verified), (KEYS, 0, true));
        // Fewer at the end of the keys.
        assert!((KEYS * 7 - 100..=KEYS * 7).contains(&scan.pairs_read), "{}", scan.pairs_read);
        assert_eq!((ycsb.not_found, ycsb.keys_listed, ycsb.verified), (0, 0, true));
        assert!(ycsb.pairs_read > KEYS * 20, "{}", ycsb.pairs_read);

        let timed = BenchConfig {
            write_rate: Some(50.0),
            stop: StopCondition::Time(Nanos::from_millis(400)),
            ..config(&[Workload::ReadWhileWriting], 1)
        };
        let beside = run_on(&engine, &timed, 1).expect("runs").remove(0);
        let due = (beside.elapsed_s * 50.0) as u64;
        assert!((1..=due + 5).contains(&beside.writes_beside), "{}", beside.writes_beside);
        assert!(beside.operations > beside.writes_beside && beside.not_found == 0);
        let scans = BenchConfig { workloads: vec![Workload::ScanWhileWriting], scan_length: 7, ..timed };
        let beside = run_on(&engine, &scans, 1).expect("runs").remove(0);
        assert!(beside.writes_beside > 0 && beside.not_found == 0 && beside.verified);
        assert!(beside.pairs_read > beside.operations * 6, "{}", beside.pairs_read);
        engine.close().expect("closes");
    }
}
