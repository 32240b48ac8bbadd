//! The namespaces of one core: which store does the requests of which.
//!
//! In: a namespace and an operation. Out: its outcome. Changes when a namespace is added or removed while the node
//! runs; a store that was removed lives on until its last request has ended, and the reactor hears of it, so that no
//! request that still waits comes to another namespace that takes the identifier.

use crate::block_backend::BlockBackend;
use crate::kv_backend::KvBackend;
use octokv_base::NamespaceId;
use octokv_engine::{Engine, PrefetchStage};
use octokv_nvmf::{RequestOperation, RequestOutcome};
use std::cell::RefCell;
use std::rc::Rc;

/// What does the requests of one namespace.
pub enum NamespaceBackend<E> {
    /// Keys and values, by an engine.
    Kv(Rc<KvBackend<E>>),
    /// Blocks, by a device.
    Block(BlockBackend),
}

impl<E: Engine> NamespaceBackend<E> {
    /// Carries an operation out.
    pub async fn execute(&self, operation: RequestOperation) -> RequestOutcome {
        match self {
            NamespaceBackend::Kv(performer) => performer.execute(operation).await,
            NamespaceBackend::Block(blocks) => blocks.execute(operation).await,
        }
    }

    /// Says that an operation comes soon. For blocks there is nothing to look up.
    pub fn prefetch(&self, operation: &RequestOperation, stage: PrefetchStage) {
        if let NamespaceBackend::Kv(performer) = self {
            performer.prefetch(operation, stage);
        }
    }
}

/// Namespaces that were removed since the reactor looked.
pub type RemovedNamespaces = Rc<RefCell<Vec<NamespaceId>>>;

/// The stores of one core, by rising namespace.
pub struct NamespaceTable<E> {
    backends: RefCell<Vec<(NamespaceId, Rc<NamespaceBackend<E>>)>>,
    removed: RemovedNamespaces,
}

impl<E> Default for NamespaceTable<E> {
    fn default() -> NamespaceTable<E> {
        NamespaceTable { backends: RefCell::default(), removed: Rc::default() }
    }
}

impl<E> NamespaceTable<E> {
    /// The store of a namespace, if it has one.
    #[inline]
    pub fn get(&self, id: NamespaceId) -> Option<Rc<NamespaceBackend<E>>> {
        let backends = self.backends.borrow();
        // Mostly the identifiers are 1, 2, 3, …
        let guess = (id.0 as usize).wrapping_sub(1);
        if let Some((found, backend)) = backends.get(guess)
            && *found == id
        {
            return Some(Rc::clone(backend));
        }
        let at = backends.binary_search_by_key(&id, |(id, _)| *id).ok()?;
        Some(Rc::clone(&backends[at].1))
    }

    /// Adds a store.
    ///
    /// # Panics
    /// When the namespace has one.
    pub fn insert(&self, id: NamespaceId, backend: NamespaceBackend<E>) {
        let mut backends = self.backends.borrow_mut();
        let at = backends.binary_search_by_key(&id, |(id, _)| *id).expect_err("a namespace has one store");
        backends.insert(at, (id, Rc::new(backend)));
    }

    /// Takes a store out; requests that were begun still hold it.
    pub fn remove(&self, id: NamespaceId) -> Option<Rc<NamespaceBackend<E>>> {
        let mut backends = self.backends.borrow_mut();
        let at = backends.binary_search_by_key(&id, |(id, _)| *id).ok()?;
        self.removed.borrow_mut().push(id);
        Some(backends.remove(at).1)
    }

    /// What is removed from now on, for the reactor to take.
    pub fn removed(&self) -> RemovedNamespaces {
        Rc::clone(&self.removed)
    }
}
