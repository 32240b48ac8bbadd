//! The namespaces of one core and the backend of each.
//!
//! In: a namespace and an operation. Out: its outcome. Namespaces are added and removed while the node runs. A
//! removed backend lives until its last request has ended. The reactor receives the removed identifiers, so that a
//! request still queued does not reach another namespace that takes the identifier.

use crate::block_backend::BlockBackend;
use crate::kv_backend::KvBackend;
use octokv_base::NamespaceId;
use octokv_engine::{Engine, PrefetchStage};
use octokv_nvmf::{RequestOperation, RequestOutcome};
use std::cell::RefCell;
use std::rc::Rc;

/// Executes the requests of one namespace on one core.
pub enum NamespaceBackend<E> {
    /// Key Value commands, on an engine.
    Kv(Rc<KvBackend<E>>),
    /// Block commands, on a device.
    Block(BlockBackend),
}

impl<E: Engine> NamespaceBackend<E> {
    /// Executes one operation.
    pub async fn execute(&self, operation: RequestOperation) -> RequestOutcome {
        match self {
            NamespaceBackend::Kv(kv_backend) => kv_backend.execute(operation).await,
            NamespaceBackend::Block(block_backend) => block_backend.execute(operation).await,
        }
    }

    /// Prefetches the memory that `operation` will read. Block operations have no index to look up.
    pub fn prefetch(&self, operation: &RequestOperation, stage: PrefetchStage) {
        if let NamespaceBackend::Kv(kv_backend) = self {
            kv_backend.prefetch(operation, stage);
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
}

impl<E> Default for NamespaceTable<E> {
    fn default() -> NamespaceTable<E> {
        NamespaceTable { backends: RefCell::default(), removed: RemovedNamespaces::default() }
    }
}

impl<E> NamespaceTable<E> {
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

    /// Adds a backend.
    ///
    /// # Panics
    /// The namespace has a backend already.
    pub fn insert(&self, id: NamespaceId, backend: NamespaceBackend<E>) {
        let mut backends = self.backends.borrow_mut();
        let at = backends.binary_search_by_key(&id, |(id, _)| *id).expect_err("a namespace has one backend");
        backends.insert(at, (id, Rc::new(backend)));
    }

    /// Removes a backend; requests that have started keep it alive.
    pub fn remove(&self, id: NamespaceId) -> Option<Rc<NamespaceBackend<E>>> {
        let mut backends = self.backends.borrow_mut();
        let at = backends.binary_search_by_key(&id, |(id, _)| *id).ok()?;
        self.removed.0.borrow_mut().push(id);
        Some(backends.remove(at).1)
    }

    /// The list of namespaces removed from now on, for the reactor to drain.
    pub fn removed(&self) -> RemovedNamespaces {
        self.removed.clone()
    }
}
