//! The iterators of a volume: what each keeps of its snapshot, where it is, and who else has to know when it ends.
//!
//! ```text
//!   create ─▶ snapshot, memtable slots, version ─▶ advanced on any core, one call at a time ─▶ dropped, or expired: all of it is released
//! ```
//! An iterator is a few references: creating one reads nothing, however large the tree is. The cursors over it are those of a core ([`super::iterator_views`]), which keeps
//! them between calls, and drops them when it hears that the iterator has ended.
//!
//! Invariants: the snapshot is in the list before memtables and version are taken, so that what flushes and compactions drop from then on is not seen by it. An
//! iterator that has expired holds neither memtable nor version.

use super::memtables::TreeSlot;
use super::snapshots::LiveSnapshot;
use super::tree_version::TreeVersion;
use crate::IteratorOptions;
use crate::common::key_locks::{KeyGuard, KeyLocks};
use octokv_base::map::FxHashMap;
use parking_lot::Mutex;
use smallvec::SmallVec;
use std::future::poll_fn;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::task::{Context, Poll, Waker};

/// Ended iterators of which a core gets the numbers; beyond, it looks at all of its views.
const ENDED_MAX: usize = 256;

/// The place of an iterator: where its next pair is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum IteratorPlace {
    /// Before its first pair.
    Start,
    /// At the first key from this one on, in its direction.
    From(Box<[u8]>),
    /// Behind this key, in its direction.
    Behind(Box<[u8]>),
    /// At one of those, and behind damage that was reported.
    BehindDamage(Box<IteratorPlace>),
    /// Behind its last pair.
    End,
}

impl IteratorPlace {
    /// This place, behind damage that was reported.
    pub fn behind_damage(self) -> IteratorPlace {
        match self {
            IteratorPlace::BehindDamage(_) | IteratorPlace::End => self,
            place => IteratorPlace::BehindDamage(Box::new(place)),
        }
    }

    /// The place without that.
    pub fn place(&self) -> &IteratorPlace {
        match self {
            IteratorPlace::BehindDamage(place) => place,
            place => place,
        }
    }

    /// Whether damage behind it was reported.
    pub fn is_damage_reported(&self) -> bool {
        matches!(self, IteratorPlace::BehindDamage(_))
    }
}

/// What an iterator keeps for its snapshot.
#[derive(Clone)]
pub(super) struct IteratorSources {
    /// The memtables, the newest first.
    pub slots: SmallVec<[Arc<TreeSlot>; 4]>,
    /// The tables.
    pub version: Arc<TreeVersion>,
}

/// An iterator: what its owner's [`TreeIterator`](super::TreeIterator) refers to.
pub(super) struct IteratorState {
    pub id: u64,
    pub options: IteratorOptions,
    pub snapshot: LiveSnapshot,
    /// `None` once it has expired.
    sources: Mutex<Option<IteratorSources>>,
    /// One call at a time, in their order.
    turns: KeyLocks,
    /// The cores that have kept a view of it: a bit for each, or for each 64th.
    view_cores: AtomicU64,
    /// The place, and a number that each change of it by a call changes: a view with another number is not at that place.
    pub place: Mutex<(IteratorPlace, u64)>,
}

/// The numbers of ended iterators for a core.
#[derive(Default)]
struct CoreMail {
    ended: Vec<u64>,
    waker: Option<Waker>,
}

/// The iterators of a volume.
pub(super) struct IteratorList {
    live: Mutex<FxHashMap<u64, Weak<IteratorState>>>,
    next_id: AtomicU64,
    cores: Box<[Mutex<CoreMail>]>,
    /// The task that ends iterators, while there are none.
    expiry: Mutex<Option<Waker>>,
}

impl IteratorList {
    /// None, of a volume with so many cores.
    pub fn new(cores: usize) -> IteratorList {
        IteratorList {
            live: Mutex::default(),
            next_id: AtomicU64::new(1),
            cores: (0..cores).map(|_| Mutex::default()).collect(),
            expiry: Mutex::default(),
        }
    }

    /// Adds an iterator that `make` makes of its number.
    pub fn add(&self, make: impl FnOnce(u64) -> IteratorState) -> Arc<IteratorState> {
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let state = Arc::new(make(id));
        self.live.lock().insert(id, Arc::downgrade(&state));
        self.wake_expiry();
        state
    }

    /// Removes an iterator that ends.
    pub fn remove(&self, state: &IteratorState) {
        self.live.lock().remove(&state.id);
        self.notify_cores(state);
    }

    /// Waits until there is an iterator. `is_enough` is asked when one was created.
    pub async fn wait_for_iterators(&self, is_enough: impl Fn() -> bool) {
        poll_fn(|context| {
            *self.expiry.lock() = Some(context.waker().clone());
            if is_enough() { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
    }

    /// Wakes the task that ends iterators.
    pub fn wake_expiry(&self) {
        if let Some(waker) = self.expiry.lock().take() {
            waker.wake();
        }
    }

    /// Releases what the iterators hold whose snapshots have expired.
    pub fn release_expired(&self) {
        let live: Vec<Arc<IteratorState>> = self.live.lock().values().filter_map(Weak::upgrade).collect();
        for state in live {
            let now = octokv_base::Nanos::ZERO;
            if state.snapshot.begin_use(now).is_none() {
                drop(state.sources.lock().take());
                self.notify_cores(&state);
            }
        }
    }

    /// Notifies the cores which may keep a view of an iterator that it has ended.
    fn notify_cores(&self, state: &IteratorState) {
        let (id, view_cores) = (state.id, state.view_cores.load(Ordering::Acquire));
        for (index, core) in self.cores.iter().enumerate() {
            if view_cores & view_core_bit(index) == 0 {
                continue;
            }
            let mut mail = core.lock();
            if mail.ended.len() < ENDED_MAX {
                mail.ended.push(id);
            }
            let waker = mail.waker.take();
            drop(mail);
            waker.into_iter().for_each(Waker::wake);
        }
    }

    /// The iterators that have ended since the last call, for a core; `None` if there were too many. `Pending` registers its waker.
    pub fn poll_ended(&self, core: usize, context: &Context<'_>) -> Poll<Option<Vec<u64>>> {
        let mut mail = self.cores[core].lock();
        if mail.ended.is_empty() {
            mail.waker = Some(context.waker().clone());
            return Poll::Pending;
        }
        let ended = std::mem::take(&mut mail.ended);
        Poll::Ready((ended.len() < ENDED_MAX).then_some(ended))
    }

    /// The same, at once.
    pub fn take_ended(&self, core: usize) -> Option<Vec<u64>> {
        let ended = std::mem::take(&mut self.cores[core].lock().ended);
        (ended.len() < ENDED_MAX).then_some(ended)
    }

    /// Whether an iterator with this number lives and has not expired.
    pub fn has(&self, id: u64) -> bool {
        let state = self.live.lock().get(&id).and_then(Weak::upgrade);
        state.is_some_and(|state| state.sources.lock().is_some())
    }
}

fn view_core_bit(core: usize) -> u64 {
    1 << (core % u64::BITS as usize)
}

impl IteratorState {
    /// An iterator before its first pair.
    pub fn new(
        id: u64,
        options: IteratorOptions,
        snapshot: LiveSnapshot,
        sources: IteratorSources,
    ) -> IteratorState {
        IteratorState {
            id,
            options,
            snapshot,
            sources: Mutex::new(Some(sources)),
            turns: KeyLocks::default(),
            view_cores: AtomicU64::new(0),
            place: Mutex::new((IteratorPlace::Start, 0)),
        }
    }

    /// Notes that a core keeps a view of it. REQUIRES: the caller uses its snapshot, so that it does not expire meanwhile.
    pub fn note_view(&self, core: usize) {
        self.view_cores.fetch_or(view_core_bit(core), Ordering::Release);
    }

    /// The next turn.
    pub async fn turn(&self) -> KeyGuard<'_> {
        self.turns.lock(0).await
    }

    /// What it keeps; `None` if it has expired.
    pub fn sources(&self) -> Option<IteratorSources> {
        self.sources.lock().clone()
    }

    /// Whether its bounds are reversed or equal, so that it has no pairs.
    pub fn is_empty(&self) -> bool {
        let lower = self.options.lower.as_ref().map_or(&[][..], |key| key.as_bytes());
        self.options.upper.as_ref().is_some_and(|upper| upper.as_bytes() <= lower)
    }
}
