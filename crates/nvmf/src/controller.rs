//! One controller: what the connections of one host share, on whatever cores they are.
//!
//! In: property writes, signs of life, features and notices, from the admin connection and the target.
//! Out: its life, which every connection looks at in each turn, and what admin commands read.
//!
//! ```text
//!             CC.EN 0→1                 CC.SHN
//! Disabled ───────────────▶ Ready ───────────────▶ ShutDown
//!   ▲ │ ▲ │                   │ CC.EN 1→0             │ CC.EN 1→0 (or SHN back to 0)
//!   │ │ │ └──── CC.SHN ───────┼──────────────────▶    │
//!   │ │ └─────────────────────┴───────────────────────┘
//!   │ │ CC.EN 0→1 with a bad CC
//!   │ └─────────▶ Failed (CSTS.CFS; the host may reset)
//!   └── CC.EN 1→0 ──┘
//! any of these ── keep alive ran out ──▶ Expired      (its connections close)
//! any of these ── admin connection ended, or its host may connect no more ──▶ Gone (its connections close)
//! ```
//! Invariants: `life` changes only under the lock of `book`, by `set_condition`; each reset
//! makes a new generation, and I/O connections live only in the generation that they connected in; no
//! queue identifier is connected twice.

use crate::async_events::Events;
use crate::config::{NamespaceInfo, NamespaceKind};
use crate::counters::Statistics;
use crate::features::Features;
use octokv_base::{NamespaceId, Nanos};
use octokv_wire::Status;
use octokv_wire::fabrics::{Configuration, ControllerStatus};
use parking_lot::{Mutex, MutexGuard};
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

/// What a controller is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// Namespaces.
    Io,
    /// The discovery log.
    Discovery,
}

/// How a controller is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Condition {
    /// Connected, not enabled: only properties.
    Disabled,
    /// Enabled.
    Ready,
    /// The host said that it is done.
    ShutDown,
    /// Enabled with a configuration that cannot be.
    Failed,
    /// The host fell silent for longer than its keep-alive time.
    Expired,
    /// Its admin connection ended, or its host may connect no more.
    Gone,
}

impl Condition {
    fn of(number: u8) -> Condition {
        use Condition::*;
        [Disabled, Ready, ShutDown, Failed, Expired, Gone][usize::from(number)]
    }

    /// Whether the drawing has an arrow from this to `next`.
    fn may_become(self, next: Condition) -> bool {
        use Condition::*;
        match self {
            Disabled => matches!(next, Ready | ShutDown | Failed | Expired | Gone),
            Ready => matches!(next, Disabled | ShutDown | Expired | Gone),
            ShutDown => matches!(next, Disabled | Ready | Expired | Gone),
            Failed => matches!(next, Disabled | Expired | Gone),
            Expired => matches!(next, Gone),
            Gone => false,
        }
    }

    /// Whether I/O connections may go on.
    pub fn serves_io(self) -> bool {
        matches!(self, Condition::Ready | Condition::ShutDown)
    }

    /// Whether nothing of the controller may go on.
    pub fn is_over(self) -> bool {
        matches!(self, Condition::Expired | Condition::Gone)
    }
}

/// A controller's condition, and how often it has been reset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Life {
    /// Resets so far.
    pub generation: u32,
    /// How it is.
    pub condition: Condition,
}

/// Whether the fields of CC that matter hold what this target can do. The entry sizes may be left zero.
pub(crate) fn is_supported(cc: Configuration) -> bool {
    let command_sets = matches!(cc.command_set(), 0 | 6 | 7);
    let arbitration = cc.0 >> 11 & 7 == 0;
    let submission = matches!(cc.0 >> 16 & 0xf, 0 | 6);
    let completion = matches!(cc.0 >> 20 & 0xf, 0 | 4);
    command_sets && cc.page_size() == 0 && arbitration && submission && completion
}

/// CSTS of a controller in this condition.
fn status_of(condition: Condition, enabled: bool) -> ControllerStatus {
    let status = |ready, fatal, shutdown| ControllerStatus { ready, fatal, shutdown };
    match condition {
        Condition::Disabled => status(false, false, 0),
        Condition::Ready => status(true, false, 0),
        Condition::ShutDown => status(enabled, false, 2),
        Condition::Failed | Condition::Expired | Condition::Gone => status(false, true, 0),
    }
}

/// CC.CSS of a host that turned all command sets on.
const ALL_SETS: u8 = 6;

/// The host that a controller belongs to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Host {
    /// Its name.
    pub nqn: String,
    /// Its identifier.
    pub id: [u8; 16],
}

/// What changes only by admin commands and connects.
#[derive(Debug)]
pub(crate) struct Book {
    /// CC as last written.
    pub configuration: Configuration,
    /// Feature values.
    pub features: Features,
    /// Notices for the host.
    pub events: Events,
    /// The namespaces on which Delete of a missing key fails (feature 20h).
    missing_fails: BTreeSet<NamespaceId>,
    /// One bit per connected I/O queue.
    queues: Vec<u64>,
}

/// One controller.
#[derive(Debug)]
pub struct Controller {
    /// CNTLID.
    pub id: u16,
    /// What it is for.
    pub purpose: Purpose,
    /// Whose it is.
    pub host: Host,
    /// What its connections did.
    pub statistics: Statistics,
    life: AtomicU64,
    keep_alive_ms: AtomicU32,
    last_sign: AtomicU64,
    /// Whether Delete of a missing key fails on any namespace (feature 20h): `book` knows on which.
    any_missing_fails: AtomicBool,
    /// Feature 06h: whether writes of blocks may stay in a volatile cache.
    write_cache: AtomicBool,
    book: Mutex<Book>,
}

impl Controller {
    /// A disabled controller.
    pub(crate) fn new(id: u16, purpose: Purpose, host: Host, now: Nanos) -> Controller {
        Controller {
            id,
            purpose,
            host,
            statistics: Statistics::default(),
            life: AtomicU64::new(0),
            keep_alive_ms: AtomicU32::new(0),
            last_sign: AtomicU64::new(now.0),
            any_missing_fails: AtomicBool::new(false),
            write_cache: AtomicBool::new(true),
            book: Mutex::new(Book {
                configuration: Configuration::default(),
                features: Features::default(),
                events: Events::default(),
                missing_fails: BTreeSet::new(),
                queues: Vec::new(),
            }),
        }
    }

    /// How it is now: one load.
    #[inline]
    pub fn life(&self) -> Life {
        let life = self.life.load(Ordering::Acquire);
        Life { generation: (life >> 8) as u32, condition: Condition::of(life as u8) }
    }

    pub(crate) fn book(&self) -> MutexGuard<'_, Book> {
        self.book.lock()
    }

    /// The one door through which the condition changes. The guard proves that the lock is held.
    fn set_condition(&self, _book: &mut Book, next: Condition) {
        let Life { generation, condition } = self.life();
        assert!(condition.may_become(next), "controller {}: {condition:?} -> {next:?}", self.id);
        let is_reset = next == Condition::Disabled;
        let generation = generation.wrapping_add(u32::from(is_reset));
        self.life.store(u64::from(generation) << 8 | next as u64, Ordering::Release);
    }

    /// Writes CC. A reset forgets queues, features and notices.
    pub(crate) fn configure(&self, written: Configuration) {
        let book = &mut *self.book.lock();
        if self.life().condition.is_over() {
            return;
        }
        let before = std::mem::replace(&mut book.configuration, written);
        if written.is_enabled() && !before.is_enabled() {
            let next = if is_supported(written) { Condition::Ready } else { Condition::Failed };
            if self.life().condition != next {
                // From a shutdown while disabled, too: a controller starts anew by enabling it.
                if next == Condition::Failed && self.life().condition == Condition::ShutDown {
                    self.set_condition(book, Condition::Disabled);
                }
                self.set_condition(book, next);
            }
        } else if !written.is_enabled() && before.is_enabled() {
            self.reset(book);
        }
        let condition = self.life().condition;
        let wants_shutdown = written.shutdown() != 0;
        if wants_shutdown && matches!(condition, Condition::Disabled | Condition::Ready) {
            self.set_condition(book, Condition::ShutDown);
        } else if !wants_shutdown && condition == Condition::ShutDown {
            let next = if written.is_enabled() { Condition::Ready } else { Condition::Disabled };
            self.set_condition(book, next);
        }
    }

    fn reset(&self, book: &mut Book) {
        self.set_condition(book, Condition::Disabled);
        book.features = Features::default();
        book.events = Events::default();
        book.queues.clear();
        book.missing_fails.clear();
        self.any_missing_fails.store(false, Ordering::Relaxed);
        self.set_write_cache(true);
    }

    /// CSTS now.
    pub(crate) fn status_property(&self) -> u32 {
        let enabled = self.book.lock().configuration.is_enabled();
        status_of(self.life().condition, enabled).encode()
    }

    /// Ends the controller, unless it has ended; says whether this call did it.
    pub(crate) fn end(&self, how: Condition) -> bool {
        assert!(how.is_over());
        let book = &mut *self.book.lock();
        let possible = self.life().condition.may_become(how);
        if possible {
            self.set_condition(book, how);
        }
        possible
    }

    /// Sets the keep-alive time; zero turns it off.
    pub(crate) fn set_keep_alive(&self, milliseconds: u32, now: Nanos) {
        self.keep_alive_ms.store(milliseconds, Ordering::Relaxed);
        self.note_sign(now);
    }

    /// The keep-alive time, in milliseconds.
    pub(crate) fn keep_alive_ms(&self) -> u32 {
        self.keep_alive_ms.load(Ordering::Relaxed)
    }

    /// The host is there: it sent something.
    #[inline]
    pub(crate) fn note_sign(&self, now: Nanos) {
        self.last_sign.fetch_max(now.0, Ordering::Relaxed);
    }

    /// When the host will have been silent for too long, where `idle_limit` rules a discovery
    /// controller without keep alive.
    pub(crate) fn silence_deadline(&self, idle_limit: Nanos) -> Nanos {
        let last = Nanos(self.last_sign.load(Ordering::Relaxed));
        match (self.keep_alive_ms(), self.purpose) {
            (0, Purpose::Io) => Nanos::NEVER,
            (0, Purpose::Discovery) => last + idle_limit,
            (milliseconds, _) => last + Nanos::from_millis(u64::from(milliseconds)),
        }
    }

    /// Connects I/O queue `id`; gives the generation it lives in.
    pub(crate) fn connect_queue(&self, id: u16) -> Result<u32, Status> {
        let book = &mut *self.book.lock();
        let life = self.life();
        if life.condition != Condition::Ready {
            return Err(Status::COMMAND_SEQUENCE_ERROR.do_not_retry());
        }
        let (word, bit) = (usize::from(id >> 6), 1u64 << (id & 63));
        if book.queues.len() <= word {
            book.queues.resize(word + 1, 0);
        }
        if book.queues[word] & bit != 0 {
            return Err(Status::COMMAND_SEQUENCE_ERROR.do_not_retry());
        }
        book.queues[word] |= bit;
        Ok(life.generation)
    }

    /// I/O queue `id` of this generation has no connection any more.
    pub(crate) fn disconnect_queue(&self, id: u16, generation: u32) {
        let book = &mut *self.book.lock();
        if self.life().generation == generation
            && let Some(word) = book.queues.get_mut(usize::from(id >> 6))
        {
            *word &= !(1u64 << (id & 63));
        }
    }

    /// I/O queues that are connected.
    pub fn queues(&self) -> usize {
        self.book.lock().queues.iter().map(|word| word.count_ones() as usize).sum()
    }

    /// Whether Delete of a missing key fails on this namespace (feature 20h). It takes a lock only where
    /// the host has turned that on for any.
    #[inline]
    pub(crate) fn missing_fails(&self, id: NamespaceId) -> bool {
        self.any_missing_fails.load(Ordering::Relaxed) && self.book.lock().missing_fails.contains(&id)
    }

    /// Sets whether Delete of a missing key fails on these namespaces.
    pub(crate) fn set_missing_fails(&self, ids: impl Iterator<Item = NamespaceId>, fails: bool) {
        let book = &mut *self.book.lock();
        for id in ids {
            if fails {
                book.missing_fails.insert(id);
            } else {
                book.missing_fails.remove(&id);
            }
        }
        self.any_missing_fails.store(!book.missing_fails.is_empty(), Ordering::Relaxed);
    }

    /// Whether writes of blocks may stay in a volatile cache: one load.
    #[inline]
    pub(crate) fn write_cache(&self) -> bool {
        self.write_cache.load(Ordering::Relaxed)
    }

    pub(crate) fn set_write_cache(&self, on: bool) {
        self.write_cache.store(on, Ordering::Relaxed);
    }

    /// Whether the host turned all command sets on.
    pub(crate) fn all_sets(&self) -> bool {
        self.book.lock().configuration.command_set() == ALL_SETS
    }

    /// A namespace is gone: one that takes its identifier is another.
    pub(crate) fn forget_namespace(&self, id: NamespaceId) {
        if self.missing_fails(id) {
            self.set_missing_fails(std::iter::once(id), false);
        }
    }

    /// Tells the host that a namespace came, went or changed, if it may see it.
    pub(crate) fn namespace_changed(&self, info: &NamespaceInfo) {
        let book = &mut *self.book.lock();
        if sees(book.configuration, info) {
            book.events.namespace_changed(info.id.0);
        }
    }
}

/// Whether a host that wrote this CC sees a namespace. One that did not turn all command sets on knows of
/// blocks alone, and must not take a Key Value namespace for a disk.
pub(crate) fn sees(cc: Configuration, namespace: &NamespaceInfo) -> bool {
    cc.command_set() == ALL_SETS || matches!(namespace.kind, NamespaceKind::Block { .. })
}

#[cfg(test)]
mod tests {
    use super::*;

    const ENABLE: u32 = 0x0046_0061; // IOCQES 4, IOSQES 6, all command sets, EN.
    const SHUT_DOWN: u32 = 1 << 14;

    fn controller() -> Controller {
        let host = Host { nqn: "nqn.2014-08.org.nvmexpress:uuid:1".to_owned(), id: [1; 16] };
        Controller::new(5, Purpose::Io, host, Nanos::ZERO)
    }

    fn after(writes: &[u32]) -> (Condition, u32) {
        let controller = controller();
        for &write in writes {
            controller.configure(Configuration(write));
        }
        (controller.life().condition, controller.status_property())
    }

    #[test]
    fn property_writes_move_the_controller_as_drawn() {
        use Condition::*;
        let table: &[(&[u32], Condition, u32)] = &[
            (&[], Disabled, 0b0000),
            (&[ENABLE], Ready, 0b0001),
            (&[ENABLE, ENABLE], Ready, 0b0001),
            (&[ENABLE, 0], Disabled, 0b0000),
            (&[ENABLE, 0, ENABLE], Ready, 0b0001),
            (&[ENABLE, ENABLE | SHUT_DOWN], ShutDown, 0b1001),
            (&[ENABLE, ENABLE | SHUT_DOWN, SHUT_DOWN], ShutDown, 0b1000),
            (&[ENABLE, ENABLE | SHUT_DOWN, 0], Disabled, 0b0000),
            (&[ENABLE, ENABLE | SHUT_DOWN, 0, ENABLE], Ready, 0b0001),
            (&[ENABLE, ENABLE | SHUT_DOWN, ENABLE], Ready, 0b0001),
            (&[ENABLE, SHUT_DOWN], ShutDown, 0b1000),
            (&[SHUT_DOWN], ShutDown, 0b1000),
            (&[SHUT_DOWN, 0], Disabled, 0b0000),
            (&[SHUT_DOWN, ENABLE], Ready, 0b0001),
            (&[SHUT_DOWN, ENABLE | 0x80], Failed, 0b0010),
            (&[ENABLE | 0x80], Failed, 0b0010),
            (&[ENABLE | 0x80, 0], Disabled, 0b0000),
            (&[ENABLE | 0x80, 0, ENABLE], Ready, 0b0001),
        ];
        for (writes, condition, status) in table {
            assert_eq!(after(writes), (*condition, *status), "after {writes:x?}");
        }
    }

    #[test]
    fn any_sequence_of_property_writes_keeps_to_the_drawing() {
        let mut random = octokv_base::Random::new(11);
        for _ in 0..200 {
            let controller = controller();
            for _ in 0..50 {
                let bits = [ENABLE, 0, ENABLE | 0x80, 1, random.next_u64() as u32][random.below(5) as usize];
                let shutdown = (random.below(4) as u32) << 14;
                controller.configure(Configuration(bits | shutdown));
            }
        }
    }

    #[test]
    fn a_reset_begins_a_new_generation_and_frees_its_queues() {
        let controller = controller();
        assert!(controller.connect_queue(1).is_err(), "not before it is enabled");
        controller.configure(Configuration(ENABLE));
        let first = controller.connect_queue(1).unwrap();
        assert!(controller.connect_queue(1).is_err(), "not twice");
        controller.connect_queue(64).unwrap();
        assert_eq!(controller.queues(), 2);
        controller.configure(Configuration(0));
        controller.configure(Configuration(ENABLE));
        let second = controller.connect_queue(1).unwrap();
        assert_ne!(first, second);
        controller.disconnect_queue(1, first);
        assert_eq!(controller.queues(), 1, "a queue of an earlier generation frees nothing");
        controller.disconnect_queue(1, second);
        assert_eq!(controller.queues(), 0);
    }

    #[test]
    fn an_ended_controller_stays_ended() {
        let controller = controller();
        assert!(controller.end(Condition::Expired));
        assert!(!controller.end(Condition::Expired));
        assert!(controller.end(Condition::Gone));
        controller.configure(Configuration(ENABLE));
        assert_eq!(controller.life().condition, Condition::Gone);
    }

    #[test]
    fn silence_is_measured_from_the_last_sign_of_life() {
        let (controller, idle) = (controller(), Nanos::from_secs(120));
        assert_eq!(controller.silence_deadline(idle), Nanos::NEVER);
        controller.set_keep_alive(500, Nanos::from_millis(100));
        assert_eq!(controller.silence_deadline(idle), Nanos::from_millis(600));
        controller.note_sign(Nanos::from_millis(300));
        controller.note_sign(Nanos::from_millis(200));
        assert_eq!(controller.silence_deadline(idle), Nanos::from_millis(800));
    }
}
