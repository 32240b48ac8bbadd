//! The namespaces of one core: which store does the requests of which.
//!
//! In: a namespace and an operation. Out: its outcome. Changes when a namespace is added or removed while the node
//! runs; a store that was removed lives on until its last request has ended, and the reactor hears of it, so that no
//! request that still waits comes to another namespace that takes the identifier.

use crate::block_backend::Blocks;
use crate::kv_backend::Performer;
use octokv_base::NamespaceId;
use octokv_engine::{Engine, Hint};
use octokv_nvmf::{Operation, Outcome};
use std::cell::RefCell;
use std::rc::Rc;

/// What does the requests of one namespace.
pub enum Store<E> {
    /// Keys and values, by an engine.
    Keys(Rc<Performer<E>>),
    /// Blocks, by a device.
    Blocks(Blocks),
}

impl<E: Engine> Store<E> {
    /// Carries an operation out.
    pub async fn perform(&self, operation: Operation) -> Outcome {
        match self {
            Store::Keys(performer) => performer.perform(operation).await,
            Store::Blocks(blocks) => blocks.perform(operation).await,
        }
    }

    /// Says that an operation comes soon. For blocks there is nothing to look up.
    pub fn expect(&self, operation: &Operation, hint: Hint) {
        if let Store::Keys(performer) = self {
            performer.expect(operation, hint);
        }
    }
}

/// Namespaces that were removed since the reactor looked.
pub type Removed = Rc<RefCell<Vec<NamespaceId>>>;

/// The stores of one core, by rising namespace.
pub struct Stores<E> {
    stores: RefCell<Vec<(NamespaceId, Rc<Store<E>>)>>,
    removed: Removed,
}

impl<E> Default for Stores<E> {
    fn default() -> Stores<E> {
        Stores { stores: RefCell::default(), removed: Rc::default() }
    }
}

impl<E> Stores<E> {
    /// The store of a namespace, if it has one.
    #[inline]
    pub fn get(&self, id: NamespaceId) -> Option<Rc<Store<E>>> {
        let stores = self.stores.borrow();
        // Mostly the identifiers are 1, 2, 3, …
        let guess = (id.0 as usize).wrapping_sub(1);
        if let Some((found, store)) = stores.get(guess)
            && *found == id
        {
            return Some(Rc::clone(store));
        }
        let at = stores.binary_search_by_key(&id, |(id, _)| *id).ok()?;
        Some(Rc::clone(&stores[at].1))
    }

    /// Adds a store.
    ///
    /// # Panics
    /// When the namespace has one.
    pub fn insert(&self, id: NamespaceId, store: Store<E>) {
        let mut stores = self.stores.borrow_mut();
        let at = stores.binary_search_by_key(&id, |(id, _)| *id).expect_err("a namespace has one store");
        stores.insert(at, (id, Rc::new(store)));
    }

    /// Takes a store out; requests that were begun still hold it.
    pub fn remove(&self, id: NamespaceId) -> Option<Rc<Store<E>>> {
        let mut stores = self.stores.borrow_mut();
        let at = stores.binary_search_by_key(&id, |(id, _)| *id).ok()?;
        self.removed.borrow_mut().push(id);
        Some(stores.remove(at).1)
    }

    /// What is removed from now on, for the reactor to take.
    pub fn removed(&self) -> Removed {
        Rc::clone(&self.removed)
    }
}
