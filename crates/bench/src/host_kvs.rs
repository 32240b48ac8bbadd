//! OctoKV's baseline, Host KVS: the same hash engine in the client's process, over files of a file system.
//!
//! ```text
//!  one OS thread per operation in flight ─▶ file of the key ─▶ HashEngine ─▶ pwrite (page cache), fsync
//!                                              └ its lock, for a put or delete                pread (direct)
//! ```
//! As the paper has it (OctoKV §V.B): fsync with each put; several files, so that threads seldom share one; reads
//! come from the disk and not from a cache of the host. The paper leaves open how a key finds its file, what shares
//! a file's fsync, and how reads avoid the cache; here a mixed index chooses the file, a put has its file to itself
//! until its fsync is over (no group commit), and reads go past the page cache (O_DIRECT) while writes go through
//! it. The engine is the node's own: a put writes its record and both copies of a journal entry before its fsync.

use crate::config::Plan;
use crate::engine_op::{Operated, format_settings, operate};
use crate::recorder::{Answered, Tally};
use crate::runner::{Error, Shared};
use crate::syscall_timing::{Call, CallMeter};
use crate::workload::Action;
use octokv_base::prng::mix;
use octokv_base::{Buffer, Lba, Pool, value_offset};
use octokv_device::{Device, DeviceError, Done, Geometry, Pending};
use octokv_engine::Durability;
use octokv_engine::hash::superblock::NotOurs;
use octokv_engine::hash::{self, HashEngine, OpenError, OpenSettings, Volume};
use octokv_runtime::block_on;
use octokv_sys::file::OwnedFile;
use std::rc::Rc;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};

/// One DB file, as one descriptor for writes and one for reads.
pub struct DbFile {
    /// Writes through the page cache.
    pub buffered: OwnedFile,
    /// Reads past it.
    pub direct: OwnedFile,
}

/// A file and the volume on it.
struct Store {
    file: Arc<DbFile>,
    volume: Arc<Volume>,
    /// Held by whoever changes something, until its fsync is over.
    writing: Mutex<()>,
}

/// The files of a Host KVS, open.
pub struct HostKvs {
    stores: Vec<Store>,
    pool: Pool,
}

/// How large each of `files` files must be for a plan, in bytes: values with their heads, as many as keys fall on
/// it, a quarter more for those that do so by chance and for what replaces them, and metadata.
pub fn file_bytes(plan: &Plan, files: usize) -> u64 {
    let record =
        (value_offset(plan.key_sizes.most()) + plan.value_sizes.most()).next_multiple_of(4096) as u64;
    let in_flight = (plan.threads * plan.depth) as u64;
    let records = (plan.keys / files as u64) * 5 / 4 + in_flight + 256;
    let data = records.saturating_mul(record);
    (data.saturating_add(data / 10).saturating_add(64 << 20)).next_multiple_of(1 << 20)
}

impl HostKvs {
    /// Opens the volume on each file, with a handle for each of the plan's operations in flight; formats those that
    /// nothing was ever written to.
    ///
    /// # Errors
    /// When one holds something else, or cannot be used.
    pub fn open(files: Vec<DbFile>, plan: &Plan, pool_bytes: usize, seed: u64) -> Result<HostKvs, Error> {
        let pool = Pool::new(pool_bytes);
        let settings = OpenSettings { durability: Durability::Flush, cores: plan.threads * plan.depth };
        let mut stores = Vec::with_capacity(files.len());
        for (number, file) in files.into_iter().enumerate() {
            let file = Arc::new(file);
            let device: Rc<dyn Device> = Rc::new(FileOfPage::new(&file));
            let failed = |error| Error::Open { name: device.name().to_owned(), error };
            let format = format_settings(plan.value_sizes.most(), mix(seed ^ number as u64));
            let open = || now_or_never(hash::open(&device, &pool, settings, &format));
            let volume = match open() {
                Err(OpenError::NotOurs(NotOurs::Blank)) => {
                    now_or_never(hash::format(&*device, &format)).map_err(failed)?;
                    open()
                }
                opened => opened,
            };
            let volume = volume.map_err(failed)?;
            stores.push(Store { file, volume, writing: Mutex::new(()) });
        }
        Ok(HostKvs { stores, pool })
    }

    /// How many files there are.
    pub fn files(&self) -> usize {
        self.stores.len()
    }

    /// Writes the last checkpoint of each volume, so that they open at once next time.
    ///
    /// # Errors
    /// When one fails.
    pub fn close(&self) -> Result<(), Error> {
        for store in &self.stores {
            let engine = self.engine(store, 0, None);
            now_or_never(engine.checkpoint(true)).map_err(Error::Close)?;
        }
        Ok(())
    }

    fn engine(&self, store: &Store, number: usize, meter: Option<&Rc<CallMeter>>) -> HashEngine {
        let device = Rc::new(FileOfPage { meter: meter.cloned(), ..FileOfPage::new(&store.file) });
        HashEngine::new(Arc::clone(&store.volume), number, device, self.pool.clone())
    }
}

/// Runs a future whose device answers at once, and whose volume nobody else is writing to.
fn now_or_never<T>(future: impl Future<Output = T>) -> T {
    block_on(future, std::hint::spin_loop)
}

/// Drives one stream of a workload on this thread.
pub(crate) fn drive(shared: &Shared, store: &HostKvs, number: usize) -> Result<Tally, Error> {
    let meter = Rc::new(CallMeter::new(shared.host.now));
    let engine = |one| store.engine(one, number, Some(&meter));
    let engines: Vec<HashEngine> = store.stores.iter().map(engine).collect();
    shared.crew.connected.fetch_add(1, Ordering::AcqRel);
    while shared.crew.connected.load(Ordering::Acquire) < shared.crew.workers {
        std::thread::yield_now();
    }
    let now = shared.host.now;
    let begin = now();
    let (mut chooser, until) = (shared.chooser(number), shared.until(begin));
    let mut tally = Tally::new(begin + shared.plan.warm_up);
    loop {
        let started = now();
        if started >= until || shared.crew.failed.load(Ordering::Relaxed) {
            return Ok(tally);
        }
        let Some(operation) = shared.next_operation(&mut chooser) else { return Ok(tally) };
        let at = mix(operation.index) as usize % engines.len();
        let changes = !matches!(operation.action, Action::Read | Action::ReadMissing);
        let writing = &store.stores[at].writing;
        let lock = || writing.lock().unwrap_or_else(PoisonError::into_inner);
        let held = changes.then(|| meter.time(Call::Wait, lock));
        let done = now_or_never(operate(shared, &engines[at], &store.pool, operation));
        drop(held);
        match done {
            Ok(Operated { found, value_bytes }) => {
                let now = now();
                tally.answered(Answered { started, now, found, value_bytes, keys_listed: 0 });
                tally.called(now, meter.take());
            }
            Err(error) => {
                shared.crew.failed.store(true, Ordering::Release);
                return Err(error);
            }
        }
        shared.done.fetch_add(1, Ordering::Relaxed);
    }
}

/// A DB file as a device of one thread: every operation is over when its method returns.
struct FileOfPage {
    file: Arc<DbFile>,
    geometry: Geometry,
    name: String,
    /// Of the thread that works on it; none for what is no operation of a workload.
    meter: Option<Rc<CallMeter>>,
}

impl FileOfPage {
    fn new(file: &Arc<DbFile>) -> FileOfPage {
        let block_bytes = file.direct.block_bytes();
        let blocks = file.buffered.size_bytes() / u64::from(block_bytes);
        let geometry = Geometry { block_bytes, blocks, volatile: false };
        let name = file.buffered.path().display().to_string();
        FileOfPage { file: Arc::clone(file), geometry, name, meter: None }
    }

    fn time<T>(&self, call: Call, make: impl FnOnce() -> T) -> T {
        match &self.meter {
            Some(meter) => meter.time(call, make),
            None => make(),
        }
    }

    fn offset(&self, at: Lba) -> u64 {
        at.0 * u64::from(self.geometry.block_bytes)
    }
}

fn finished(buffer: Option<Buffer>, result: Result<(), i32>) -> Pending {
    let result = result.map_err(|code| match code {
        28 => DeviceError::NoSpace, // ENOSPC
        code => DeviceError::Io(code),
    });
    Pending::ready(Done { buffer, result })
}

impl Device for FileOfPage {
    fn geometry(&self) -> Geometry {
        self.geometry
    }
    fn name(&self) -> &str {
        &self.name
    }
    fn read(&self, at: Lba, mut buffer: Buffer) -> Pending {
        if !self.geometry.holds(at, buffer.len()) {
            return Pending::out_of_range(Some(buffer));
        }
        let result = self.time(Call::Read, || self.file.direct.read_at(self.offset(at), &mut buffer));
        finished(Some(buffer), result)
    }
    fn write(&self, at: Lba, buffer: Buffer) -> Pending {
        if !self.geometry.holds(at, buffer.len()) {
            return Pending::out_of_range(Some(buffer));
        }
        let result = self.time(Call::Write, || self.file.buffered.write_at(self.offset(at), &buffer));
        finished(Some(buffer), result)
    }
    fn flush(&self) -> Pending {
        finished(None, self.time(Call::Sync, || self.file.buffered.sync_all()))
    }
    fn trim(&self, at: Lba, blocks: u64) -> Pending {
        let bytes = blocks * u64::from(self.geometry.block_bytes);
        finished(None, self.file.buffered.trim(self.offset(at), bytes))
    }
}
