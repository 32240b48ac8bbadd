//! The namespaces of one core and the backend of each.
//!
//! In: a namespace and an operation. Out: its outcome. Namespaces are added and removed while the node runs. A
//! removed backend lives until its last request has ended. The reactor receives the removed identifiers, so that a
//! request still queued does not reach another namespace that takes the identifier. Invariant: the table says that requests
//! have owner cores exactly while cores have roles or one of its engines says so.

use crate::block_backend::BlockBackend;
use crate::core_roles::CoreRoles;
use crate::kv_backend::KvBackend;
use octokv_base::NamespaceId;
use octokv_engine::{Engine, PrefetchStage};
use octokv_nvmf::RequestOperation;
use std::cell::{Cell, RefCell};
use std::rc::Rc;

/// What executes the requests of one namespace on one core.
pub enum NamespaceBackend<E> {
    /// Key Value commands, on an engine.
    Kv(Rc<KvBackend<E>>),
    /// Block commands, on a device.
    Block(BlockBackend),
}

impl<E: Engine> NamespaceBackend<E> {
    /// Prefetches the memory that `operation` will read. Block operations have no index to look up.
    pub fn prefetch(&self, operation: &RequestOperation, stage: PrefetchStage) {
        if let NamespaceBackend::Kv(kv_backend) = self {
            kv_backend.prefetch(operation, stage);
        }
    }

    /// The core, of the first `drive_cores`, that has to execute an operation: that of its key's drive, and without a key one for each
    /// connection.
    fn drive_core(&self, operation: &RequestOperation, connection: usize, drive_cores: usize) -> usize {
        match (self, operation.key()) {
            (NamespaceBackend::Kv(kv_backend), Some(key)) => kv_backend.engine.drive_core(key, drive_cores),
            _ => connection % drive_cores,
        }
    }

    /// The core that has to execute an operation, if it is on a key and the engine's keys have owners.
    fn owner_core(&self, operation: &RequestOperation) -> Option<usize> {
        match self {
            NamespaceBackend::Kv(kv_backend) => kv_backend.engine.owner_core(operation.key()?),
            NamespaceBackend::Block(_) => None,
        }
    }

    /// Whether keys have owner cores by the engine's rule.
    fn has_owner_cores(&self) -> bool {
        match self {
            NamespaceBackend::Kv(kv_backend) => kv_backend.engine.has_owner_cores(),
            NamespaceBackend::Block(_) => false,
        }
    }
}

/// Namespaces removed since the reactor last took them; each control message adds at most one.
#[derive(Clone, Debug, Default)]
pub struct RemovedNamespaces(Rc<RefCell<Vec<NamespaceId>>>);

impl RemovedNamespaces {
    /// Whether none was removed.
    pub fn is_empty(&self) -> bool {
        self.0.borrow().is_empty()
    }

    /// Takes the removed namespaces.
    pub fn take(&self) -> Vec<NamespaceId> {
        self.0.take()
    }
}

/// The backends of one core, by ascending namespace identifier.
pub struct NamespaceTable<E> {
    backends: RefCell<Vec<(NamespaceId, Rc<NamespaceBackend<E>>)>>,
    removed: RemovedNamespaces,
    roles: CoreRoles,
    /// Whether requests have owner cores.
    has_owner_cores: Rc<Cell<bool>>,
}

impl<E> NamespaceTable<E> {
    /// No namespaces, on a node whose cores have these roles.
    pub fn new(roles: CoreRoles) -> NamespaceTable<E> {
        NamespaceTable {
            backends: RefCell::default(),
            removed: RemovedNamespaces::default(),
            roles,
            has_owner_cores: Rc::new(Cell::new(roles.drive_cores().is_some())),
        }
    }

    /// The backend of a namespace; `None` if the core does not serve it.
    #[inline]
    pub fn get(&self, id: NamespaceId) -> Option<Rc<NamespaceBackend<E>>> {
        let backends = self.backends.borrow();
        // Identifiers are mostly 1, 2, 3, …
        let guess = (id.0 as usize).wrapping_sub(1);
        if let Some((found, backend)) = backends.get(guess)
            && *found == id
        {
            return Some(Rc::clone(backend));
        }
        let at = backends.binary_search_by_key(&id, |(id, _)| *id).ok()?;
        Some(Rc::clone(&backends[at].1))
    }

    /// The list of namespaces removed from now on, for the reactor to drain.
    pub fn removed(&self) -> RemovedNamespaces {
        self.removed.clone()
    }

    /// Whether requests of a namespace have owner cores, now and after later changes.
    pub fn has_owner_cores(&self) -> Rc<Cell<bool>> {
        Rc::clone(&self.has_owner_cores)
    }
}

impl<E: Engine> NamespaceTable<E> {
    /// The core that has to execute an operation of a connection; `None` if any may, or if this core does not serve the namespace.
    pub fn owner_core(
        &self,
        id: NamespaceId,
        operation: &RequestOperation,
        connection: usize,
    ) -> Option<usize> {
        let backend = self.get(id)?;
        match self.roles.drive_cores() {
            Some(drive_cores) => Some(backend.drive_core(operation, connection, drive_cores)),
            None => backend.owner_core(operation),
        }
    }

    /// Adds a backend.
    ///
    /// # Panics
    /// The namespace has a backend already.
    pub fn insert(&self, id: NamespaceId, backend: NamespaceBackend<E>) {
        let mut backends = self.backends.borrow_mut();
        let at = backends.binary_search_by_key(&id, |(id, _)| *id).expect_err("a namespace has one backend");
        backends.insert(at, (id, Rc::new(backend)));
        self.update_has_owner_cores(&backends);
    }

    /// Removes a backend; requests that have started keep it alive.
    pub fn remove(&self, id: NamespaceId) -> Option<Rc<NamespaceBackend<E>>> {
        let mut backends = self.backends.borrow_mut();
        let at = backends.binary_search_by_key(&id, |(id, _)| *id).ok()?;
        self.removed.0.borrow_mut().push(id);
        let (_, removed) = backends.remove(at);
        self.update_has_owner_cores(&backends);
        Some(removed)
    }

    fn update_has_owner_cores(&self, backends: &[(NamespaceId, Rc<NamespaceBackend<E>>)]) {
        let by_engines = backends.iter().any(|(_, backend)| backend.has_owner_cores());
        self.has_owner_cores.set(self.roles.drive_cores().is_some() || by_engines);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fair_yield::FairYield;
    use octokv_base::{BufferPool, Key};
    use octokv_device::{Device, MemoryDevice, RamDisk};
    use octokv_engine::{AnyEngine, AnyVolume, Durability, FormatConfig, OpenConfig, Volume, WallClock};
    use octokv_runtime::{
        CoreWaker, CpuTime, DeviceDriver, DeviceHandle, ReactorHandle, block_on, open_device_queue,
    };
    use std::collections::BTreeSet;

    fn backend(owner_cores: Option<usize>) -> NamespaceBackend<AnyEngine> {
        let core_waker = CoreWaker::without_eventfd();
        let (queue, _) = open_device_queue(DeviceDriver::Threads, 1, &core_waker).expect("worker threads");
        let handle = ReactorHandle::new(core_waker, DeviceHandle::new(queue, 1), CpuTime::simulated());
        let device: Rc<dyn Device> = Rc::new(MemoryDevice::new(RamDisk::new(1 << 20, 512).expect("memory")));
        let (devices, pool) = ([device], BufferPool::new(1 << 20));
        let config = OpenConfig {
            durability: Durability::PowerSafe,
            cores: 2,
            cache_bytes: 0,
            prepare_bytes: 0,
            compact_bytes_per_second: 0,
            tree: OpenConfig::TREE,
            swap_gap: OpenConfig::SWAP_GAP,
            clock: WallClock::default(),
            tokens: None,
        };
        let format = FormatConfig::default();
        let opened = AnyVolume::open(&devices, &pool, config, &format);
        let volume = block_on(opened, || ()).expect("a volatile device is formatted");
        if let Some(cores) = owner_cores {
            volume.assign_owner_cores(cores);
        }
        let engine = volume.engine(0, &devices, pool.clone());
        let (device_names, list_yield) = (RefCell::default(), FairYield::default());
        NamespaceBackend::Kv(Rc::new(KvBackend { engine, pool, handle, device_names, list_yield }))
    }

    #[test]
    fn the_table_knows_whether_keys_of_any_namespace_have_owners() {
        let table = NamespaceTable::new(CoreRoles::SHARED);
        let has_owner_cores = table.has_owner_cores();
        let [plain, owned] = [NamespaceId(1), NamespaceId(2)];
        table.insert(plain, backend(None));
        assert!(!has_owner_cores.get());
        table.insert(owned, backend(Some(2)));
        assert!(has_owner_cores.get());
        let key = Key::new(b"key").expect("three bytes");
        let (exist, flush) = (RequestOperation::Exist { key }, RequestOperation::Flush);
        let owner_of = |id, operation| table.get(id).and_then(|backend| backend.owner_core(operation));
        assert!(owner_of(owned, &exist).is_some_and(|core| core < 2));
        assert_eq!((owner_of(plain, &exist), owner_of(owned, &flush)), (None, None));
        table.remove(owned);
        assert!(!has_owner_cores.get());
    }

    #[test]
    fn with_cores_for_drives_they_own_all_requests() {
        let table = NamespaceTable::new(CoreRoles::with_drive_cores(3));
        let id = NamespaceId(1);
        let owner_of = |operation: &RequestOperation, connection| table.owner_core(id, operation, connection);
        assert_eq!(owner_of(&RequestOperation::Flush, 0), None);
        table.insert(id, backend(None));
        assert!(table.has_owner_cores().get());
        let of_key = |byte: u8, connection| {
            owner_of(&RequestOperation::Exist { key: Key::new(&[byte]).expect("a byte") }, connection)
        };
        let owners: BTreeSet<_> = (0..100).map(|byte| of_key(byte, 0)).collect();
        assert_eq!(owners, BTreeSet::from([Some(0), Some(1), Some(2)]));
        assert!((0..100).all(|byte| of_key(byte, 0) == of_key(byte, 1)));
        assert_eq!(
            [3, 4, 5].map(|connection| owner_of(&RequestOperation::Flush, connection)),
            [0, 1, 2].map(Some)
        );
        table.remove(id);
        assert!(table.has_owner_cores().get());
    }
}
