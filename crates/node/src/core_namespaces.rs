//! The namespaces of one core: attached, served, detached, drained.
//!
//! ```text
//!   attach: a backend of the core's own, with the volume's background tasks ─▶ served
//!   detach: backend removed ─▶ draining ─▶ its last request ended, the volume is idle ─▶ maintenance and compaction are
//!           cancelled ─▶ what they left half done has ended, the volume is idle ─▶ background tasks have ended ─▶ response
//! ```
//! In: a [`CoreNamespace`], from which each core opens the device by [`OpenDevice`], with its driver's queue. Out:
//! backends in the core's [`NamespaceTable`]; the response to a detach. Invariants: each detach gets one response, after
//! the last request; a batch or checkpoint in progress is written to its end.
//! Tested by the scenario `namespaces` of the simulator, with injected bugs in `crates/sim/tests/injected_bugs_blocks.rs`.

use crate::abortable::{CancelToken, abortable};
use crate::block_backend::{BlockBackend, BlockVolume};
use crate::core_roles::CoreRoles;
use crate::error::CompactionStartError;
use crate::fair_yield::FairYield;
use crate::kv_backend::KvBackend;
use crate::namespace_table::{NamespaceBackend, NamespaceTable};
use octokv_base::{BufferPool, NamespaceId};
use octokv_device::Device;
use octokv_engine::{AnyEngine, AnyVolume, Engine, EngineError, Volume};
use octokv_runtime::ReactorHandle;
use std::cell::{Cell, RefCell};
use std::future::Future;
use std::io;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::mpsc::Sender;

/// Opens a device for each core that serves it.
pub trait OpenDevice {
    /// One core's view of the device. REQUIRES: the calling thread is the core of `handle`.
    ///
    /// # Errors
    /// The core's queue cannot open the device.
    fn open_for_core(&self, handle: &ReactorHandle) -> io::Result<Rc<dyn Device>>;
}

/// The part of a namespace that its cores share.
#[derive(Clone)]
pub enum NamespaceVolume {
    /// Keys and values.
    Kv(AnyVolume),
    /// Blocks.
    Block(Arc<BlockVolume>),
}

impl NamespaceVolume {
    /// Whether no batch or checkpoint is in progress.
    fn is_idle(&self) -> bool {
        match self {
            NamespaceVolume::Kv(volume) => volume.is_idle(),
            NamespaceVolume::Block(_) => true,
        }
    }
}

/// An open namespace as its cores attach it. Clones share volume and device.
#[derive(Clone)]
pub struct CoreNamespace<D> {
    /// Its identifier.
    pub id: NamespaceId,
    /// The part that its cores share.
    pub volume: NamespaceVolume,
    /// Its devices, which each core opens for itself.
    pub devices: Vec<D>,
}

/// The namespaces of a core, draining ones included.
pub(crate) struct CoreNamespaces<D> {
    core: usize,
    table: Rc<NamespaceTable<AnyEngine>>,
    pool: BufferPool,
    handle: ReactorHandle,
    served: Vec<ServedNamespace<D>>,
    draining: Vec<DrainingNamespace<D>>,
}

struct ServedNamespace<D> {
    namespace: CoreNamespace<D>,
    /// Cancels the task that runs abandoned operations.
    abandoned: Option<Rc<CancelToken>>,
    /// Cancels maintenance, on the first core.
    maintenance: Option<Rc<CancelToken>>,
    /// Cancels the last compaction that was asked for, and whether it has ended.
    compaction: Option<(Rc<CancelToken>, Rc<Cell<bool>>)>,
}

struct DrainingNamespace<D> {
    served: ServedNamespace<D>,
    backend: Option<Rc<NamespaceBackend<AnyEngine>>>,
    /// Maintenance and compaction, once they are cancelled.
    cancelled: Option<Vec<Rc<CancelToken>>>,
    response_tx: Sender<io::Result<()>>,
}

impl<D: OpenDevice> CoreNamespaces<D> {
    /// A core without namespaces.
    pub fn new(core: usize, roles: CoreRoles, pool: BufferPool, handle: ReactorHandle) -> CoreNamespaces<D> {
        let table = Rc::new(NamespaceTable::new(roles));
        CoreNamespaces { core, table, pool, handle, served: Vec::new(), draining: Vec::new() }
    }

    /// The backends of the served namespaces.
    pub fn table(&self) -> &Rc<NamespaceTable<AnyEngine>> {
        &self.table
    }

    /// Detached namespaces with requests in progress.
    pub fn draining_count(&self) -> usize {
        self.draining.len()
    }

    /// Whether no volume has a batch or checkpoint in progress.
    pub fn are_volumes_idle(&self) -> bool {
        let draining = self.draining.iter().map(|draining| &draining.served);
        self.served.iter().chain(draining).all(|served| served.namespace.volume.is_idle())
    }

    /// Serves a namespace on this core and starts the volume's background tasks; maintenance on the first core only.
    ///
    /// # Errors
    /// The core's queue cannot open the device.
    pub fn attach(&mut self, namespace: CoreNamespace<D>) -> io::Result<()> {
        let backend = self.open_backend(&namespace)?;
        let (mut abandoned, mut maintenance) = (None, None);
        if let NamespaceBackend::Kv(kv_backend) = &backend {
            abandoned = Some(self.spawn_background(run_abandoned(Rc::clone(kv_backend))));
            maintenance =
                (self.core == 0).then(|| self.spawn_background(run_maintenance(Rc::clone(kv_backend))));
        }
        self.table.insert(namespace.id, backend);
        self.served.push(ServedNamespace { namespace, abandoned, maintenance, compaction: None });
        Ok(())
    }

    /// Serves a namespace with another device in place `at`, which its volume has replaced. Does nothing without the namespace.
    ///
    /// # Errors
    /// The core's queue cannot open the device: the keys on it are not served by this core.
    pub fn replace_device(&mut self, id: NamespaceId, at: usize, device: D) -> io::Result<()> {
        let Some(served) = self.served.iter_mut().find(|served| served.namespace.id == id) else {
            return Ok(());
        };
        let opened = device.open_for_core(&self.handle)?;
        if let (NamespaceVolume::Kv(volume), Some(NamespaceBackend::Kv(kv_backend))) =
            (&served.namespace.volume, self.table.get(id).as_deref())
        {
            volume.renew_engine(&kv_backend.engine, at, (self.core, &opened, &self.pool));
            kv_backend.device_names.borrow_mut()[at] = opened.name().into();
        }
        served.namespace.devices[at] = device;
        Ok(())
    }

    /// Serves a namespace with another device behind its others, which its volume has. Does nothing without the namespace.
    ///
    /// # Errors
    /// The core's queue cannot open the device: no partition moves to it.
    pub fn add_device(&mut self, id: NamespaceId, device: D) -> io::Result<()> {
        let Some(served) = self.served.iter_mut().find(|served| served.namespace.id == id) else {
            return Ok(());
        };
        let opened = device.open_for_core(&self.handle)?;
        if let (NamespaceVolume::Kv(volume), Some(NamespaceBackend::Kv(kv_backend))) =
            (&served.namespace.volume, self.table.get(id).as_deref())
        {
            kv_backend.device_names.borrow_mut().push(opened.name().into());
            volume.extend_engine(&kv_backend.engine, (self.core, &opened, &self.pool));
        }
        served.namespace.devices.push(device);
        Ok(())
    }

    /// Compacts a namespace fully, beside its maintenance. `on_compacted` receives the result, and is dropped if the namespace is
    /// detached first.
    ///
    /// # Errors
    /// [`CompactionStartError`]; `on_compacted` was dropped.
    pub fn compact(
        &mut self,
        id: NamespaceId,
        on_compacted: impl FnOnce(Result<(), EngineError>) + 'static,
    ) -> Result<(), CompactionStartError> {
        let index = self.served.iter().position(|served| served.namespace.id == id);
        let index = index.ok_or(CompactionStartError::Missing(id))?;
        let kv_backend = match self.table.get(id).as_deref() {
            Some(NamespaceBackend::Kv(kv_backend)) => Rc::clone(kv_backend),
            Some(NamespaceBackend::Block(_)) => return Err(CompactionStartError::Blocks(id)),
            None => return Err(CompactionStartError::Missing(id)),
        };
        if self.served[index].compaction.as_ref().is_some_and(|(_, has_ended)| !has_ended.get()) {
            return Err(CompactionStartError::InProgress(id));
        }
        let has_ended = Rc::new(Cell::new(false));
        let of_task = Rc::clone(&has_ended);
        let cancel = self.spawn_background(async move {
            let result = kv_backend.engine.compact_all().await;
            of_task.set(true);
            on_compacted(result);
        });
        self.served[index].compaction = Some((cancel, has_ended));
        Ok(())
    }

    fn spawn_background(&self, task: impl Future<Output = ()> + 'static) -> Rc<CancelToken> {
        let cancel = Rc::new(CancelToken::default());
        self.handle.spawn(abortable(Rc::clone(&cancel), task));
        cancel
    }

    fn open_backend(&self, namespace: &CoreNamespace<D>) -> io::Result<NamespaceBackend<AnyEngine>> {
        let open = |device: &D| device.open_for_core(&self.handle);
        let devices = namespace.devices.iter().map(open).collect::<io::Result<Vec<_>>>()?;
        let (pool, handle) = (self.pool.clone(), self.handle.clone());
        Ok(match &namespace.volume {
            NamespaceVolume::Kv(volume) => {
                let engine = volume.engine(self.core, &devices, pool.clone());
                let device_names = devices.iter().map(|device| device.name().into()).collect();
                let (device_names, list_yield) = (RefCell::new(device_names), FairYield::default());
                NamespaceBackend::Kv(Rc::new(KvBackend { engine, pool, handle, device_names, list_yield }))
            }
            NamespaceVolume::Block(volume) => {
                let (volume, device) = (Arc::clone(volume), Rc::clone(&devices[0]));
                let name = Rc::from(device.name());
                NamespaceBackend::Block(BlockBackend::new(volume, device, pool, handle, name))
            }
        })
    }

    /// Stops serving a namespace. The response follows when [`CoreNamespaces::reap_drained`] finds that its last request
    /// has ended; at once if this core does not serve it.
    pub fn detach(&mut self, id: NamespaceId, response_tx: Sender<io::Result<()>>) {
        let Some(index) = self.served.iter().position(|served| served.namespace.id == id) else {
            // Attaching it failed on this core.
            return drop(response_tx.send(Ok(())));
        };
        let (served, backend) = (self.served.remove(index), self.table.remove(id));
        self.draining.push(DrainingNamespace { served, backend, cancelled: None, response_tx });
    }

    /// Drops the detached namespaces whose last request has ended, and sends their responses.
    pub fn reap_drained(&mut self) {
        self.draining.retain_mut(|draining| {
            if !draining.has_ended() {
                return true;
            }
            draining.backend = None;
            let _ = draining.response_tx.send(Ok(()));
            false
        });
    }
}

impl<D> DrainingNamespace<D> {
    /// Whether nothing uses the backend any more. Cancels the background tasks when they may be.
    fn has_ended(&mut self) -> bool {
        let has_requests = self.backend.as_ref().is_some_and(|backend| Rc::strong_count(backend) > 1);
        if has_requests || !self.served.namespace.volume.is_idle() {
            return false;
        }
        let ServedNamespace { abandoned, maintenance, compaction, .. } = &mut self.served;
        // These go first: what they leave half done, the abandoned operations run to its end.
        let cancelled = self.cancelled.get_or_insert_with(|| {
            let compaction = compaction.take().map(|(task, _)| task);
            let tasks: Vec<_> = maintenance.take().into_iter().chain(compaction).collect();
            tasks.iter().for_each(|task| task.cancel());
            tasks
        });
        // A task holds its token.
        cancelled.retain(|task| Rc::strong_count(task) > 1);
        if !cancelled.is_empty() {
            return false;
        }
        if let Some(task) = abandoned.take() {
            task.cancel();
        }
        // The tasks hold references to the backend until they are polled once more.
        !matches!(self.backend.as_deref(), Some(NamespaceBackend::Kv(kv_backend)) if Rc::strong_count(kv_backend) > 1)
    }
}

/// The names of devices, in one line.
pub(crate) fn names_of(devices: &[Rc<dyn Device>]) -> String {
    devices.iter().map(|device| device.name()).collect::<Vec<_>>().join(", ")
}

/// Operations on a volume that their callers dropped on this core.
async fn run_abandoned(kv_backend: Rc<KvBackend<AnyEngine>>) {
    kv_backend.engine.run_abandoned().await;
}

/// Checkpoints and other background work of a volume, on the first core.
async fn run_maintenance(kv_backend: Rc<KvBackend<AnyEngine>>) {
    let log_error = |error: EngineError| {
        tracing::error!(device = kv_backend.device_names.borrow().join(", "), %error, "volume maintenance failed");
    };
    kv_backend.engine.maintain(&kv_backend.handle, log_error).await;
}

#[cfg(test)]
mod tests {
    use super::*;
    use octokv_base::{Buffer, Key, Nanos};
    use octokv_device::{MemoryDevice, RamDisk};
    use octokv_engine::{Durability, EngineKind, FormatConfig, OpenConfig, PutMode, PutOutcome, WallClock};
    use octokv_runtime::{CoreWaker, CpuTime, DeviceDriver, DeviceHandle, block_on, open_device_queue};
    use std::cell::RefCell;
    use std::sync::mpsc::channel;

    const KEYS: NamespaceId = NamespaceId(1);
    const BLOCKS: NamespaceId = NamespaceId(2);

    struct OpenMemory(Arc<RamDisk>);

    impl OpenDevice for OpenMemory {
        fn open_for_core(&self, _: &ReactorHandle) -> io::Result<Rc<dyn Device>> {
            Ok(Rc::new(MemoryDevice::new(Arc::clone(&self.0))))
        }
    }

    /// A core with a key-value namespace and one of blocks, each in memory.
    fn namespaces(engine: EngineKind) -> (CoreNamespaces<OpenMemory>, ReactorHandle) {
        let core_waker = CoreWaker::without_eventfd();
        let (queue, _) = open_device_queue(DeviceDriver::Threads, 1, &core_waker).expect("worker threads");
        let handle = ReactorHandle::new(core_waker, DeviceHandle::new(queue, 1), CpuTime::simulated());
        let pool = BufferPool::new(8 << 20);
        let disk = || OpenMemory(RamDisk::new(32 << 20, 512).expect("memory"));
        let of_keys = disk();
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
        let devices = [of_keys.open_for_core(&handle).expect("memory")];
        let format = FormatConfig { engine, ..FormatConfig::default() };
        let opened = AnyVolume::open(&devices, &pool, config, &format);
        let volume = NamespaceVolume::Kv(block_on(opened, || ()).expect("a volatile device is formatted"));
        let mut namespaces = CoreNamespaces::new(0, CoreRoles::SHARED, pool, handle.clone());
        let blocks = NamespaceVolume::Block(BlockVolume::new(512, 1 << 20));
        for (id, volume, device) in [(KEYS, volume, of_keys), (BLOCKS, blocks, disk())] {
            namespaces.attach(CoreNamespace { id, volume, devices: vec![device] }).expect("memory");
        }
        (namespaces, handle)
    }

    #[test]
    fn one_compaction_of_a_namespace_runs_at_a_time_and_ends_with_it() {
        for engine in EngineKind::ALL {
            one_compaction_runs_at_a_time(engine);
        }
    }

    fn one_compaction_runs_at_a_time(engine: EngineKind) {
        let (mut namespaces, handle) = namespaces(engine);
        let results: Rc<RefCell<Vec<_>>> = Rc::default();
        let compact = |namespaces: &mut CoreNamespaces<_>, id| {
            let results = Rc::clone(&results);
            namespaces.compact(id, move |result| results.borrow_mut().push(result))
        };
        let missing = NamespaceId(9);
        assert_eq!(compact(&mut namespaces, missing), Err(CompactionStartError::Missing(missing)));
        assert_eq!(compact(&mut namespaces, BLOCKS), Err(CompactionStartError::Blocks(BLOCKS)));
        for count in 1..=2 {
            assert_eq!(compact(&mut namespaces, KEYS), Ok(()));
            assert_eq!(compact(&mut namespaces, KEYS), Err(CompactionStartError::InProgress(KEYS)));
            handle.begin_iteration(Nanos(count));
            while (results.borrow().len() as u64) < count {
                handle.poll_background();
            }
            assert_eq!(*results.borrow(), vec![Ok(()); count as usize], "{engine}");
        }
        // One that has not ended is dropped with its namespace, and so is what waits for it.
        assert_eq!(compact(&mut namespaces, KEYS), Ok(()));
        let (response_tx, response) = channel();
        namespaces.detach(KEYS, response_tx);
        while namespaces.draining_count() > 0 {
            namespaces.reap_drained();
            handle.poll_background();
        }
        assert!(response.recv().is_ok_and(|response| response.is_ok()));
        assert_eq!((results.borrow().len(), Rc::strong_count(&results)), (2, 1));
        assert_eq!(compact(&mut namespaces, KEYS), Err(CompactionStartError::Missing(KEYS)));
    }

    #[test]
    fn a_namespace_that_is_detached_does_not_wait_for_the_end_of_its_compactions() {
        let (mut namespaces, handle) = namespaces(EngineKind::Lsm);
        let kv_backend = match namespaces.table.get(KEYS).as_deref() {
            Some(NamespaceBackend::Kv(kv_backend)) => Rc::clone(kv_backend),
            _ => panic!("it has keys"),
        };
        for index in 0..4_000u32 {
            let key = Key::new(&index.to_be_bytes()).expect("a key");
            let record = Buffer::zeroed(kv_backend.engine.record_layout().value_offset(key.len()) + 2_000);
            let put = kv_backend.engine.put(&key, PutMode::Upsert, record, 2_000);
            assert_eq!(block_on(put, || ()), Ok(PutOutcome::Stored));
        }
        drop(kv_backend);
        let ended: Rc<Cell<bool>> = Rc::default();
        let of_compaction = Rc::clone(&ended);
        assert_eq!(namespaces.compact(KEYS, move |_| of_compaction.set(true)), Ok(()));
        handle.begin_iteration(Nanos(1));
        for _ in 0..3 {
            handle.poll_background();
        }
        let (response_tx, response) = channel();
        namespaces.detach(KEYS, response_tx);
        for _ in 0..1_000 {
            namespaces.reap_drained();
            handle.poll_background();
        }
        assert_eq!(namespaces.draining_count(), 0);
        assert!(response.recv().is_ok_and(|response| response.is_ok()));
        assert_eq!((ended.get(), Rc::strong_count(&ended)), (false, 1), "it was given up");
    }
}
