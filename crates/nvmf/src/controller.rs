//! One controller: the state that its connections, on any core, share.
//!
//! In: property writes, activity, features and events, from the admin connection and the target. Out: its
//! [`ControllerEpoch`], which every connection checks in each iteration, and the data of admin commands.
//!
//! ```text
//!              CC.EN 0→1                 CC.SHN
//!  Disabled ───────────────▶ Ready ───────────────▶ ShutDown
//!    ▲ │ ▲ │                   │ CC.EN 1→0             │ CC.EN 1→0 (or SHN back to 0)
//!    │ │ │ └──── CC.SHN ───────┼──────────────────▶    │
//!    │ │ └─────────────────────┴───────────────────────┘
//!    │ │ CC.EN 0→1 with an unsupported CC
//!    │ └─────────▶ Failed (CSTS.CFS; the host may reset)
//!    └── CC.EN 1→0 ──┘
//!  any of these ── keep-alive timeout ──▶ KeepAliveExpired  (its connections close)
//!  any of these ── admin connection ended, host denied ──▶ Disconnected  (its connections close)
//! ```
//! Invariants: `epoch` changes only under the lock of `inner`, in `set_state`; each reset starts a new
//! generation, and an I/O connection is valid only in the generation that it connected in; no queue
//! identifier is connected twice.

use crate::async_events::AsyncEventState;
use crate::controller_iterators::ControllerIterators;
use crate::counters::SharedCounters;
use crate::feature_values::FeatureValues;
use crate::io_request::IteratorHandle;
use crate::namespace_info::{NamespaceInfo, NamespaceKind};
use crate::token_share::{ShareOwner, TokenWeight};
use octokv_base::{NamespaceId, Nanos};
use octokv_wire::Status;
use octokv_wire::fabrics::{ControllerConfiguration, ControllerStatus};
use parking_lot::{Mutex, MutexGuard};
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

/// The type of a controller (CNTRLTYPE).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ControllerType {
    /// An I/O controller: serves namespaces.
    Io,
    /// A discovery controller: serves the discovery log.
    Discovery,
}

/// The state of a controller; see the diagram at the top of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum ControllerState {
    /// Connected, not enabled: only Fabrics commands and Keep Alive are accepted.
    Disabled,
    /// Enabled: all commands are accepted.
    Ready,
    /// The host has requested a shutdown, and it is complete.
    ShutDown,
    /// Enabled with an unsupported configuration (CSTS.CFS).
    Failed,
    /// Ended: the host sent nothing for longer than its keep-alive timeout.
    KeepAliveExpired,
    /// Ended: its admin connection ended, or its host lost access.
    Disconnected,
}

impl ControllerState {
    fn from_u8(number: u8) -> ControllerState {
        use ControllerState::*;
        [Disabled, Ready, ShutDown, Failed, KeepAliveExpired, Disconnected][usize::from(number)]
    }

    /// Whether the state diagram has a transition from this state to `next`.
    fn can_transition_to(self, next: ControllerState) -> bool {
        use ControllerState::*;
        match self {
            Disabled => matches!(next, Ready | ShutDown | Failed | KeepAliveExpired | Disconnected),
            Ready => matches!(next, Disabled | ShutDown | KeepAliveExpired | Disconnected),
            ShutDown => matches!(next, Disabled | Ready | KeepAliveExpired | Disconnected),
            Failed => matches!(next, Disabled | KeepAliveExpired | Disconnected),
            KeepAliveExpired => matches!(next, Disconnected),
            Disconnected => false,
        }
    }

    /// Whether I/O connections may continue.
    pub fn serves_io(self) -> bool {
        matches!(self, ControllerState::Ready | ControllerState::ShutDown)
    }

    /// Whether the controller has ended, so that all its connections must close.
    pub fn has_ended(self) -> bool {
        matches!(self, ControllerState::KeepAliveExpired | ControllerState::Disconnected)
    }
}

/// A controller's state and generation, as one atomic value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ControllerEpoch {
    /// The number of resets, modulo 2^32.
    pub generation: u32,
    /// The current state.
    pub state: ControllerState,
}

/// Whether the target supports the fields of CC. The queue entry sizes may be 0.
pub(crate) fn is_supported_configuration(cc: ControllerConfiguration) -> bool {
    let command_sets = matches!(cc.command_set(), 0 | 6 | 7);
    let arbitration = cc.0 >> 11 & 7 == 0;
    let submission = matches!(cc.0 >> 16 & 0xf, 0 | 6);
    let completion = matches!(cc.0 >> 20 & 0xf, 0 | 4);
    command_sets && cc.mps() == 0 && arbitration && submission && completion
}

/// CSTS of a controller in this state.
fn csts_of(state: ControllerState, enabled: bool) -> ControllerStatus {
    let status = |ready, fatal, shutdown| ControllerStatus { ready, fatal, shutdown };
    match state {
        ControllerState::Disabled => status(false, false, 0),
        ControllerState::Ready => status(true, false, 0),
        ControllerState::ShutDown => status(enabled, false, 2),
        ControllerState::Failed | ControllerState::KeepAliveExpired | ControllerState::Disconnected => {
            status(false, true, 0)
        }
    }
}

/// CC.CSS: all supported command sets are enabled.
const CSS_ALL_COMMAND_SETS: u8 = 6;

/// The identity of a controller's host, from Connect.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostIdentity {
    /// The host's NQN.
    pub nqn: String,
    /// The host's 128-bit identifier (HOSTID).
    pub id: [u8; 16],
}

/// The fields that only admin commands and connects change, under one lock.
#[derive(Debug)]
pub(crate) struct ControllerInner {
    /// CC as last written.
    pub configuration: ControllerConfiguration,
    pub features: FeatureValues,
    /// Pending and masked asynchronous events.
    pub async_events: AsyncEventState,
    /// The namespaces on which Delete of a missing key is an error (feature 20h).
    delete_missing_error_namespaces: BTreeSet<NamespaceId>,
    /// One bit per connected I/O queue.
    queue_bitmap: Vec<u64>,
}

/// The shared state of one controller.
#[derive(Debug)]
pub struct Controller {
    /// Controller identifier (CNTLID).
    pub id: u16,
    pub controller_type: ControllerType,
    pub host: HostIdentity,
    /// Sums over the controller's connections.
    pub counters: SharedCounters,
    epoch: AtomicU64,
    keep_alive_ms: AtomicU32,
    last_activity: AtomicU64,
    /// Whether `delete_missing_error_namespaces` is not empty, readable without the lock.
    any_delete_missing_is_error: AtomicBool,
    /// Feature 06h: writes of blocks may stay in a volatile cache.
    write_cache_enabled: AtomicBool,
    inner: Mutex<ControllerInner>,
    iterators: Mutex<ControllerIterators>,
    /// Feature C0h: its weight in the tokens of devices.
    pub(crate) token_weight: TokenWeight,
}

impl Controller {
    /// Creates a disabled controller.
    pub(crate) fn new(
        id: u16,
        controller_type: ControllerType,
        host: HostIdentity,
        now: Nanos,
    ) -> Controller {
        Controller {
            id,
            controller_type,
            host,
            counters: SharedCounters::default(),
            epoch: AtomicU64::new(0),
            keep_alive_ms: AtomicU32::new(0),
            last_activity: AtomicU64::new(now.0),
            any_delete_missing_is_error: AtomicBool::new(false),
            write_cache_enabled: AtomicBool::new(true),
            inner: Mutex::new(ControllerInner {
                configuration: ControllerConfiguration::default(),
                features: FeatureValues::default(),
                async_events: AsyncEventState::default(),
                delete_missing_error_namespaces: BTreeSet::new(),
                queue_bitmap: Vec::new(),
            }),
            iterators: Mutex::default(),
            token_weight: TokenWeight::default(),
        }
    }

    /// The current state and generation: one atomic load.
    #[inline]
    pub fn epoch(&self) -> ControllerEpoch {
        let packed = self.epoch.load(Ordering::Acquire);
        ControllerEpoch { generation: (packed >> 8) as u32, state: ControllerState::from_u8(packed as u8) }
    }

    pub(crate) fn lock_inner(&self) -> MutexGuard<'_, ControllerInner> {
        self.inner.lock()
    }

    /// The iterators of the host.
    pub(crate) fn lock_iterators(&self) -> MutexGuard<'_, ControllerIterators> {
        self.iterators.lock()
    }

    /// Keeps an iterator that a queue of this generation created, and gives its identifier.
    ///
    /// # Errors
    /// [`Status::TOO_MANY_ITERATORS`]; or the controller was reset or has ended, or the namespace was removed since. The iterator ends.
    pub(crate) fn keep_iterator(
        &self,
        handle: IteratorHandle,
        generation: u32,
        namespace: NamespaceId,
        has_namespace: impl FnOnce() -> bool,
        limits: (usize, Nanos),
    ) -> Result<u32, Status> {
        let (iterators_max, now) = limits;
        let mut iterators = self.iterators.lock();
        // Checked under the lock: what ends the iterators after a change ends this one as well.
        let epoch = self.epoch();
        if epoch.generation != generation || !epoch.state.serves_io() {
            return Err(Status::COMMAND_SEQUENCE_ERROR.do_not_retry());
        }
        if !has_namespace() {
            return Err(Status::INVALID_NAMESPACE.do_not_retry());
        }
        if iterators.len() >= iterators_max {
            return Err(Status::TOO_MANY_ITERATORS);
        }
        Ok(iterators.add(handle, namespace, now))
    }

    /// Ends all iterators.
    fn end_iterators(&self) {
        let ended = std::mem::take(&mut *self.iterators.lock());
        drop(ended);
    }

    /// Ends the iterators that were not used for `idle`.
    pub(crate) fn end_idle_iterators(&self, now: Nanos, idle: Nanos) {
        let Some(before) = now.0.checked_sub(idle.0) else { return };
        let ended = self.iterators.lock().remove_idle(Nanos(before));
        drop(ended);
    }

    /// Changes the state. All changes go through here.
    ///
    /// REQUIRES: the lock of `inner`, which the reference proves.
    fn set_state(&self, _inner: &mut ControllerInner, next: ControllerState) {
        let ControllerEpoch { generation, state } = self.epoch();
        assert!(state.can_transition_to(next), "controller {}: {state:?} -> {next:?}", self.id);
        let is_reset = next == ControllerState::Disabled;
        let generation = generation.wrapping_add(u32::from(is_reset));
        self.epoch.store(u64::from(generation) << 8 | next as u64, Ordering::Release);
    }

    /// Writes CC. A reset clears queues, features and events.
    pub(crate) fn write_cc(&self, cc: ControllerConfiguration) {
        let inner = &mut *self.inner.lock();
        if self.epoch().state.has_ended() {
            return;
        }
        let before = std::mem::replace(&mut inner.configuration, cc);
        if cc.is_enabled() && !before.is_enabled() {
            let next =
                if is_supported_configuration(cc) { ControllerState::Ready } else { ControllerState::Failed };
            if self.epoch().state != next {
                // A controller that was shut down while disabled restarts by being enabled.
                if next == ControllerState::Failed && self.epoch().state == ControllerState::ShutDown {
                    self.set_state(inner, ControllerState::Disabled);
                }
                self.set_state(inner, next);
            }
        } else if !cc.is_enabled() && before.is_enabled() {
            self.reset(inner);
        }
        let state = self.epoch().state;
        let wants_shutdown = cc.shn() != 0;
        if wants_shutdown && matches!(state, ControllerState::Disabled | ControllerState::Ready) {
            self.set_state(inner, ControllerState::ShutDown);
        } else if !wants_shutdown && state == ControllerState::ShutDown {
            let next = if cc.is_enabled() { ControllerState::Ready } else { ControllerState::Disabled };
            self.set_state(inner, next);
        }
    }

    fn reset(&self, inner: &mut ControllerInner) {
        self.set_state(inner, ControllerState::Disabled);
        inner.features = FeatureValues::default();
        inner.async_events = AsyncEventState::default();
        inner.queue_bitmap.clear();
        inner.delete_missing_error_namespaces.clear();
        self.any_delete_missing_is_error.store(false, Ordering::Relaxed);
        self.set_write_cache_enabled(true);
        self.token_weight.set(0);
        self.end_iterators();
    }

    /// Its part in the tokens of devices, if it asked for them (feature C0h).
    #[inline]
    pub(crate) fn share_owner(&self) -> Option<ShareOwner> {
        let weight = self.token_weight.get();
        (weight > 0).then_some(ShareOwner { controller: self.id, weight })
    }

    /// CSTS now. Takes the lock.
    pub(crate) fn csts(&self) -> u32 {
        let enabled = self.inner.lock().configuration.is_enabled();
        csts_of(self.epoch().state, enabled).encode()
    }

    /// Ends the controller; returns false if it had ended before.
    ///
    /// # Panics
    /// If `how` is not a state that ends a controller.
    pub(crate) fn terminate(&self, how: ControllerState) -> bool {
        assert!(how.has_ended(), "{how:?} does not end a controller");
        let inner = &mut *self.inner.lock();
        let is_possible = self.epoch().state.can_transition_to(how);
        if is_possible {
            self.set_state(inner, how);
            self.token_weight.set(0);
            self.end_iterators();
        }
        is_possible
    }

    /// Sets the keep-alive timeout in milliseconds; 0 turns it off.
    pub(crate) fn set_keep_alive(&self, milliseconds: u32, now: Nanos) {
        self.keep_alive_ms.store(milliseconds, Ordering::Relaxed);
        self.record_activity(now);
    }

    /// The keep-alive timeout in milliseconds.
    pub(crate) fn keep_alive_ms(&self) -> u32 {
        self.keep_alive_ms.load(Ordering::Relaxed)
    }

    /// Records that the host sent something at `now`.
    #[inline]
    pub(crate) fn record_activity(&self, now: Nanos) {
        self.last_activity.fetch_max(now.0, Ordering::Relaxed);
    }

    /// When the keep-alive timeout expires. A discovery controller without one expires after `idle_limit`.
    pub(crate) fn keep_alive_deadline(&self, idle_limit: Nanos) -> Nanos {
        let last = Nanos(self.last_activity.load(Ordering::Relaxed));
        match (self.keep_alive_ms(), self.controller_type) {
            (0, ControllerType::Io) => Nanos::NEVER,
            (0, ControllerType::Discovery) => last + idle_limit,
            (milliseconds, _) => last + Nanos::from_millis(u64::from(milliseconds)),
        }
    }

    /// Connects I/O queue `id`; returns the generation that the queue belongs to.
    ///
    /// # Errors
    /// A sequence error if the controller is not ready or the queue is connected already.
    pub(crate) fn connect_queue(&self, id: u16) -> Result<u32, Status> {
        let inner = &mut *self.inner.lock();
        let epoch = self.epoch();
        if epoch.state != ControllerState::Ready {
            return Err(Status::COMMAND_SEQUENCE_ERROR.do_not_retry());
        }
        let (word, bit) = (usize::from(id >> 6), 1u64 << (id & 63));
        if inner.queue_bitmap.len() <= word {
            inner.queue_bitmap.resize(word + 1, 0);
        }
        if inner.queue_bitmap[word] & bit != 0 {
            return Err(Status::COMMAND_SEQUENCE_ERROR.do_not_retry());
        }
        inner.queue_bitmap[word] |= bit;
        Ok(epoch.generation)
    }

    /// Disconnects I/O queue `id` of this generation.
    pub(crate) fn disconnect_queue(&self, id: u16, generation: u32) {
        let inner = &mut *self.inner.lock();
        if self.epoch().generation == generation
            && let Some(word) = inner.queue_bitmap.get_mut(usize::from(id >> 6))
        {
            *word &= !(1u64 << (id & 63));
        }
    }

    /// The number of connected I/O queues.
    pub fn queue_count(&self) -> usize {
        self.inner.lock().queue_bitmap.iter().map(|word| word.count_ones() as usize).sum()
    }

    /// Whether Delete of a missing key is an error on this namespace (feature 20h). Takes the lock only if
    /// that is set for any namespace.
    #[inline]
    pub(crate) fn delete_missing_is_error(&self, id: NamespaceId) -> bool {
        self.any_delete_missing_is_error.load(Ordering::Relaxed)
            && self.inner.lock().delete_missing_error_namespaces.contains(&id)
    }

    /// Sets feature 20h of these namespaces.
    pub(crate) fn set_delete_missing_is_error(&self, ids: impl Iterator<Item = NamespaceId>, is_error: bool) {
        let inner = &mut *self.inner.lock();
        for id in ids {
            if is_error {
                inner.delete_missing_error_namespaces.insert(id);
            } else {
                inner.delete_missing_error_namespaces.remove(&id);
            }
        }
        self.any_delete_missing_is_error
            .store(!inner.delete_missing_error_namespaces.is_empty(), Ordering::Relaxed);
    }

    /// Whether writes of blocks may stay in a volatile cache: one atomic load.
    #[inline]
    pub(crate) fn is_write_cache_enabled(&self) -> bool {
        self.write_cache_enabled.load(Ordering::Relaxed)
    }

    pub(crate) fn set_write_cache_enabled(&self, on: bool) {
        self.write_cache_enabled.store(on, Ordering::Relaxed);
    }

    /// Whether CC.CSS enables all supported command sets.
    pub(crate) fn are_all_command_sets_enabled(&self) -> bool {
        self.inner.lock().configuration.command_set() == CSS_ALL_COMMAND_SETS
    }

    /// Clears the features of a removed namespace, whose identifier may be reused.
    pub(crate) fn forget_namespace(&self, id: NamespaceId) {
        if self.delete_missing_is_error(id) {
            self.set_delete_missing_is_error(std::iter::once(id), false);
        }
        let ended = self.iterators.lock().remove_of(id);
        drop(ended);
    }

    /// Records a change of a namespace for the host's changed list, if the namespace is visible to the
    /// host.
    pub(crate) fn notify_namespace_changed(&self, info: &NamespaceInfo) {
        let inner = &mut *self.inner.lock();
        if is_namespace_visible(inner.configuration, info) {
            inner.async_events.record_namespace_change(info.id.0);
        }
    }
}

/// Whether a namespace is visible to a host that wrote this CC.
///
/// A host without all command sets enabled expects blocks, and would take a Key Value namespace for a disk.
pub(crate) fn is_namespace_visible(cc: ControllerConfiguration, namespace: &NamespaceInfo) -> bool {
    cc.command_set() == CSS_ALL_COMMAND_SETS || matches!(namespace.kind, NamespaceKind::Block { .. })
}

#[cfg(test)]
mod tests {
    use super::*;

    const ENABLE: u32 = 0x0046_0061; // IOCQES 4, IOSQES 6, all command sets, EN.
    const SHUT_DOWN: u32 = 1 << 14;

    fn controller() -> Controller {
        let host = HostIdentity { nqn: "nqn.2014-08.org.nvmexpress:uuid:1".to_owned(), id: [1; 16] };
        Controller::new(5, ControllerType::Io, host, Nanos::ZERO)
    }

    fn after(writes: &[u32]) -> (ControllerState, u32) {
        let controller = controller();
        for &write in writes {
            controller.write_cc(ControllerConfiguration(write));
        }
        (controller.epoch().state, controller.csts())
    }

    #[test]
    fn property_writes_follow_the_state_diagram() {
        use ControllerState::*;
        let table: &[(&[u32], ControllerState, u32)] = &[
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
        for (writes, state, status) in table {
            assert_eq!(after(writes), (*state, *status), "after {writes:x?}");
        }
    }

    #[test]
    fn random_property_writes_stay_within_the_state_diagram() {
        let mut random = octokv_base::Prng::new(11);
        for _ in 0..200 {
            let controller = controller();
            for _ in 0..50 {
                let bits = [ENABLE, 0, ENABLE | 0x80, 1, random.next_u64() as u32][random.below(5) as usize];
                let shutdown = (random.below(4) as u32) << 14;
                controller.write_cc(ControllerConfiguration(bits | shutdown));
            }
        }
    }

    #[test]
    fn a_reset_begins_a_new_generation_and_frees_its_queues() {
        let controller = controller();
        assert!(controller.connect_queue(1).is_err(), "a disabled controller accepts no queue");
        controller.write_cc(ControllerConfiguration(ENABLE));
        let first = controller.connect_queue(1).unwrap();
        assert!(controller.connect_queue(1).is_err(), "a queue identifier connects once");
        controller.connect_queue(64).unwrap();
        assert_eq!(controller.queue_count(), 2);
        controller.write_cc(ControllerConfiguration(0));
        controller.write_cc(ControllerConfiguration(ENABLE));
        let second = controller.connect_queue(1).unwrap();
        assert_ne!(first, second);
        controller.disconnect_queue(1, first);
        assert_eq!(
            controller.queue_count(),
            1,
            "a queue of an earlier generation does not disconnect this one"
        );
        controller.disconnect_queue(1, second);
        assert_eq!(controller.queue_count(), 0);
    }

    #[test]
    fn an_ended_controller_stays_ended() {
        let controller = controller();
        assert!(controller.terminate(ControllerState::KeepAliveExpired));
        assert!(!controller.terminate(ControllerState::KeepAliveExpired));
        assert!(controller.terminate(ControllerState::Disconnected));
        controller.write_cc(ControllerConfiguration(ENABLE));
        assert_eq!(controller.epoch().state, ControllerState::Disconnected);
    }

    #[test]
    fn keep_alive_is_measured_from_the_last_activity() {
        let (controller, idle) = (controller(), Nanos::from_secs(120));
        assert_eq!(controller.keep_alive_deadline(idle), Nanos::NEVER);
        controller.set_keep_alive(500, Nanos::from_millis(100));
        assert_eq!(controller.keep_alive_deadline(idle), Nanos::from_millis(600));
        controller.record_activity(Nanos::from_millis(300));
        controller.record_activity(Nanos::from_millis(200));
        assert_eq!(controller.keep_alive_deadline(idle), Nanos::from_millis(800));
    }
}
