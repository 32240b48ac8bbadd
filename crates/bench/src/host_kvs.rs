//! Host KVS, the baseline of the OctoKV paper: the hash engine in the client's process, on files of a file system.
//!
//! ```text
//!  one OS thread per operation in flight ─▶ file of the key ─▶ engine ─▶ pwrite (page cache), fsync
//!                                              └ its lock, for a put or delete                pread (direct)
//! ```
//! As in the paper (OctoKV §V.B): an fsync for each put; several files, so that threads seldom share one; reads
//! from the disk and not from a cache of the host. The paper does not specify how a key maps to a file, which puts share
//! an fsync, and how reads avoid the cache. Here a hash of the index selects the file, a put locks its file until its
//! fsync has completed (no group commit), reads bypass the page cache (O_DIRECT) and writes use it. The engine is the
//! node's: a put writes its record and both copies of a journal entry before its fsync.

use crate::blocking_streams::run_blocking_stream;
use crate::config::BenchConfig;
use crate::engine_op::{format_config, run_engine_op};
use crate::error::BenchError;
use crate::op_generator::Operation;
use crate::recorder::Recorder;
use crate::syscall_timing::{SyscallKind, SyscallTimer};
use crate::workload::WorkloadOp;
use crate::workload_state::WorkloadState;
use octokv_base::prng::mix64;
use octokv_base::{Buffer, BufferPool, Lba};
use octokv_device::{Device, DeviceError, DeviceFuture, Geometry, IoResult};
use octokv_engine::common::superblock::SuperblockError;
use octokv_engine::{AnyEngine, AnyVolume, Durability, Engine, OpenConfig, OpenError, Volume, WallClock};
use octokv_runtime::block_on;
use octokv_sys::file::DeviceFile;
use std::path::Path;
use std::rc::Rc;
use std::sync::{Arc, Mutex, PoisonError};

/// One database file, with a descriptor for writes and one for reads.
pub struct DbFile {
    /// For writes, through the page cache.
    pub buffered: DeviceFile,
    /// For reads, which bypass it.
    pub direct: DeviceFile,
}

/// A file and the volume on it.
struct DbVolume {
    file: Arc<DbFile>,
    volume: AnyVolume,
    /// Held by a put or delete until its fsync has completed.
    write_lock: Mutex<()>,
}

/// A Host KVS with open files.
pub struct HostKvs {
    volumes: Vec<DbVolume>,
    pool: BufferPool,
}

/// The most bytes of a record besides key and value: the engine's header, and the padding before the value.
const RECORD_OVERHEAD_BYTES: usize = 128;

/// Size of each of `files` files for a configuration, in bytes: the records of its keys, a quarter more for the variance
/// of the hash and for replaced records, and metadata.
pub fn db_file_bytes(config: &BenchConfig, files: usize) -> u64 {
    let payload_bytes = config.key_sizes.max_bytes() + config.value_sizes.max_bytes();
    let record = (RECORD_OVERHEAD_BYTES + payload_bytes).next_multiple_of(4096) as u64;
    let in_flight = (config.threads * config.depth) as u64;
    let records = (config.keys / files as u64) * 5 / 4 + in_flight + 256;
    let data = records.saturating_mul(record);
    (data.saturating_add(data / 10).saturating_add(64 << 20)).next_multiple_of(1 << 20)
}

impl HostKvs {
    /// Opens the volume on each file, with a handle for each operation in flight, and formats blank files.
    ///
    /// # Errors
    /// [`BenchError::Open`] if a file holds other data or cannot be read or written.
    pub fn open(
        files: Vec<DbFile>,
        config: &BenchConfig,
        pool_bytes: usize,
        seed: u64,
    ) -> Result<HostKvs, BenchError> {
        let pool = BufferPool::new(pool_bytes);
        let settings = OpenConfig {
            durability: Durability::PowerSafe,
            cores: config.threads * config.depth,
            cache_bytes: 0,
            prepare_bytes: 0,
            compact_bytes_per_second: 0,
            tree: OpenConfig::TREE,
            swap_gap: OpenConfig::SWAP_GAP,
            clock: WallClock::default(),
            tokens: None,
        };
        let mut stores = Vec::with_capacity(files.len());
        for (number, file) in files.into_iter().enumerate() {
            let file = Arc::new(file);
            let devices: [Rc<dyn Device>; 1] = [Rc::new(SyncFileDevice::new(&file))];
            let failed = |error| BenchError::Open { name: devices[0].name().to_owned(), error };
            let format = format_config(config.value_sizes.max_bytes(), mix64(seed ^ number as u64));
            let open = || block_on_spinning(AnyVolume::open(&devices, &pool, settings.clone(), &format));
            let volume = match open() {
                Err(OpenError::Superblock(SuperblockError::Blank)) => {
                    block_on_spinning(AnyVolume::format(&devices, &format)).map_err(failed)?;
                    open()
                }
                opened => opened,
            };
            let volume = volume.map_err(failed)?;
            stores.push(DbVolume { file, volume, write_lock: Mutex::new(()) });
        }
        Ok(HostKvs { volumes: stores, pool })
    }

    /// The directory of the files.
    pub fn directory(&self) -> Option<&Path> {
        self.volumes.first()?.file.buffered.path().parent()
    }

    /// Number of files.
    pub fn files(&self) -> usize {
        self.volumes.len()
    }

    /// Writes the final checkpoint of each volume, so that the next open replays nothing.
    ///
    /// # Errors
    /// [`BenchError::Close`] if a checkpoint fails.
    pub fn close(&self) -> Result<(), BenchError> {
        for db in &self.volumes {
            let engine = self.engine(db, 0, None);
            block_on_spinning(engine.close()).map_err(BenchError::Close)?;
        }
        Ok(())
    }

    fn engine(&self, db: &DbVolume, number: usize, timer: Option<&Rc<SyscallTimer>>) -> AnyEngine {
        let device = Rc::new(SyncFileDevice { timer: timer.cloned(), ..SyncFileDevice::new(&db.file) });
        db.volume.engine(number, &[device], self.pool.clone())
    }
}

/// Runs a future to completion. Its device completes synchronously, and the lock of the file excludes other writers.
fn block_on_spinning<T>(future: impl Future<Output = T>) -> T {
    block_on(future, std::hint::spin_loop)
}

/// Runs one stream of a workload on this thread.
pub(crate) fn run_worker(
    shared: &WorkloadState,
    kvs: &HostKvs,
    number: usize,
) -> Result<Recorder, BenchError> {
    let timer = Rc::new(SyscallTimer::new(shared.platform.now));
    let engine = |one| kvs.engine(one, number, Some(&timer));
    let engines: Vec<AnyEngine> = kvs.volumes.iter().map(engine).collect();
    let execute = |op: Operation| {
        let at = mix64(op.index) as usize % engines.len();
        let changes = !matches!(op.kind, WorkloadOp::Read | WorkloadOp::ReadMissing);
        let writing = &kvs.volumes[at].write_lock;
        let lock = || writing.lock().unwrap_or_else(PoisonError::into_inner);
        let _guard = changes.then(|| timer.time(SyscallKind::Wait, lock));
        block_on_spinning(run_engine_op(shared, &engines[at], &kvs.pool, op))
    };
    run_blocking_stream(shared, number, execute, |recorder, now| recorder.record_syscalls(now, timer.take()))
}

/// A database file as a device of one thread: every operation has completed when its method returns.
struct SyncFileDevice {
    file: Arc<DbFile>,
    geometry: Geometry,
    name: String,
    /// The timer of the thread; `None` outside of a workload.
    timer: Option<Rc<SyscallTimer>>,
}

impl SyncFileDevice {
    fn new(file: &Arc<DbFile>) -> SyncFileDevice {
        let block_bytes = file.direct.block_bytes();
        let blocks = file.buffered.size_bytes() / u64::from(block_bytes);
        let geometry = Geometry { block_bytes, blocks, volatile: false };
        let name = file.buffered.path().display().to_string();
        SyncFileDevice { file: Arc::clone(file), geometry, name, timer: None }
    }

    fn timed<T>(&self, call: SyscallKind, make: impl FnOnce() -> T) -> T {
        match &self.timer {
            Some(timer) => timer.time(call, make),
            None => make(),
        }
    }

    fn offset(&self, at: Lba) -> u64 {
        at.0 * u64::from(self.geometry.block_bytes)
    }
}

fn ready_io(buffer: Option<Buffer>, result: Result<(), i32>) -> DeviceFuture {
    let result = result.map_err(|code| match code {
        28 => DeviceError::NoSpace, // ENOSPC
        code => DeviceError::Io(code),
    });
    DeviceFuture::ready(IoResult { buffer, result })
}

impl Device for SyncFileDevice {
    fn geometry(&self) -> Geometry {
        self.geometry
    }
    fn name(&self) -> &str {
        &self.name
    }
    fn read(&self, at: Lba, mut buffer: Buffer) -> DeviceFuture {
        if !self.geometry.is_valid_range(at, buffer.len()) {
            return DeviceFuture::out_of_range(Some(buffer));
        }
        let result = self.timed(SyscallKind::Read, || self.file.direct.read_at(self.offset(at), &mut buffer));
        ready_io(Some(buffer), result)
    }
    fn write(&self, at: Lba, buffer: Buffer) -> DeviceFuture {
        if !self.geometry.is_valid_range(at, buffer.len()) {
            return DeviceFuture::out_of_range(Some(buffer));
        }
        let result = self.timed(SyscallKind::Write, || self.file.buffered.write_at(self.offset(at), &buffer));
        ready_io(Some(buffer), result)
    }
    fn flush(&self) -> DeviceFuture {
        ready_io(None, self.timed(SyscallKind::Sync, || self.file.buffered.sync_all()))
    }
    fn trim(&self, at: Lba, blocks: u64) -> DeviceFuture {
        let bytes = blocks * u64::from(self.geometry.block_bytes);
        ready_io(None, self.file.buffered.trim(self.offset(at), bytes))
    }
}
