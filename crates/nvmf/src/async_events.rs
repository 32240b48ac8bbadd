//! Asynchronous events of a controller: pending ones, masked ones, and the list of changed namespaces.
//!
//! Each event type is masked from its delivery until the host reads its log page (NVMe Base 2.1, 5.2.2), so
//! at most one of each type is pending and memory is bounded.

use crate::health::{WARNING_DEGRADED, WARNING_READ_ONLY, WARNING_SPARE};
use octokv_wire::queue_entry::event;

/// The supported asynchronous event types.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AsyncEvent {
    /// A namespace was added, removed or changed; log page 04h.
    NamespaceChanged,
    /// An ANA state changed; log page 0Ch.
    AnaChanged,
    /// The discovery log changed; log page 70h.
    DiscoveryChanged,
    /// Spare capacity fell below its threshold; log page 02h.
    SpareLow,
    /// The media became read only; log page 02h.
    ReadOnly,
    /// A device of a namespace is not available; log page 02h.
    Degraded,
}

const ALL_ASYNC_EVENTS: [AsyncEvent; 6] = [
    AsyncEvent::NamespaceChanged,
    AsyncEvent::AnaChanged,
    AsyncEvent::DiscoveryChanged,
    AsyncEvent::SpareLow,
    AsyncEvent::ReadOnly,
    AsyncEvent::Degraded,
];

impl AsyncEvent {
    /// The events for these critical warning bits of the health log.
    pub(crate) fn for_critical_warnings(warnings: u8) -> impl Iterator<Item = AsyncEvent> {
        let health = [
            (WARNING_SPARE, AsyncEvent::SpareLow),
            (WARNING_READ_ONLY, AsyncEvent::ReadOnly),
            (WARNING_DEGRADED, AsyncEvent::Degraded),
        ];
        health.into_iter().filter(move |(bit, _)| warnings & bit != 0).map(|(_, event)| event)
    }

    fn bit(self) -> u8 {
        1 << self as u8
    }

    fn enable_bit(self) -> u32 {
        match self {
            AsyncEvent::NamespaceChanged => event::NAMESPACE_CHANGED_BIT,
            AsyncEvent::AnaChanged => event::ANA_CHANGED_BIT,
            AsyncEvent::DiscoveryChanged => event::DISCOVERY_CHANGED_BIT,
            // The low byte of feature 0Bh has the critical warning bits of the health log.
            AsyncEvent::SpareLow => WARNING_SPARE as u32,
            AsyncEvent::ReadOnly => WARNING_READ_ONLY as u32,
            AsyncEvent::Degraded => WARNING_DEGRADED as u32,
        }
    }

    fn completion_dword(self) -> u32 {
        match self {
            AsyncEvent::NamespaceChanged => event::NAMESPACE_CHANGED,
            AsyncEvent::AnaChanged => event::ANA_CHANGED,
            AsyncEvent::DiscoveryChanged => event::DISCOVERY_CHANGED,
            AsyncEvent::SpareLow => event::SPARE_LOW,
            AsyncEvent::ReadOnly | AsyncEvent::Degraded => event::RELIABILITY,
        }
    }

    fn log_page_id(self) -> u8 {
        (self.completion_dword() >> 16) as u8
    }
}

/// The most namespaces in the changed list; more are reported as FFFFFFFFh.
const CHANGED_NAMESPACES_MAX: usize = 1024;

/// The event state of one controller.
#[derive(Debug, Default)]
pub(crate) struct AsyncEventState {
    /// Feature 0Bh: the events that the host has enabled.
    pub enabled: u32,
    pending: u8,
    masked: u8,
    changed_namespaces: Vec<u32>,
}

impl AsyncEventState {
    /// Makes an event pending, if the host has enabled it.
    pub fn notify(&mut self, event: AsyncEvent) {
        if self.enabled & event.enable_bit() != 0 {
            self.pending |= event.bit();
        }
    }

    /// Adds a namespace to the changed list and makes the event pending.
    pub fn record_namespace_change(&mut self, nsid: u32) {
        if !self.changed_namespaces.contains(&nsid) && self.changed_namespaces.len() < CHANGED_NAMESPACES_MAX
        {
            self.changed_namespaces.push(nsid);
        }
        self.notify(AsyncEvent::NamespaceChanged);
    }

    /// Takes the next deliverable event and masks its type; returns DW0 of its completion.
    pub fn take_next(&mut self) -> Option<u32> {
        let ready = self.pending & !self.masked;
        let event = ALL_ASYNC_EVENTS.into_iter().find(|event| ready & event.bit() != 0)?;
        self.pending &= !event.bit();
        self.masked |= event.bit();
        Some(event.completion_dword())
    }

    /// Unmasks the events of a log page that the host read without RAE.
    pub fn unmask_log(&mut self, log: u8) {
        for event in ALL_ASYNC_EVENTS.into_iter().filter(|event| event.log_page_id() == log) {
            self.masked &= !event.bit();
        }
    }

    /// The changed namespaces, ascending; `None` if there are too many to list.
    pub fn changed_namespaces(&self) -> Option<Vec<u32>> {
        let mut changed = self.changed_namespaces.clone();
        changed.sort_unstable();
        (changed.len() < CHANGED_NAMESPACES_MAX).then_some(changed)
    }

    /// Empties the changed list after the host has read it.
    pub fn clear_changed_namespaces(&mut self) {
        self.changed_namespaces.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_is_delivered_once_until_its_log_page_is_read() {
        let mut events = AsyncEventState { enabled: u32::MAX, ..AsyncEventState::default() };
        events.record_namespace_change(2);
        events.record_namespace_change(1);
        assert_eq!(events.take_next(), Some(event::NAMESPACE_CHANGED));
        events.record_namespace_change(2);
        assert_eq!(events.take_next(), None);
        assert_eq!(events.changed_namespaces(), Some(vec![1, 2]));
        events.clear_changed_namespaces();
        events.unmask_log(0x04);
        assert_eq!(events.take_next(), Some(event::NAMESPACE_CHANGED));
        events.notify(AsyncEvent::DiscoveryChanged);
        assert_eq!(events.take_next(), Some(event::DISCOVERY_CHANGED));
    }

    #[test]
    fn disabled_events_are_not_delivered() {
        let mut events = AsyncEventState { enabled: event::ANA_CHANGED_BIT, ..AsyncEventState::default() };
        events.record_namespace_change(1);
        events.notify(AsyncEvent::AnaChanged);
        assert_eq!(events.take_next(), Some(event::ANA_CHANGED));
        assert_eq!(events.take_next(), None);
    }

    #[test]
    fn the_changed_list_is_bounded() {
        let mut events = AsyncEventState::default();
        (1..5000).for_each(|nsid| events.record_namespace_change(nsid));
        assert_eq!(events.changed_namespaces(), None);
        events.clear_changed_namespaces();
        assert_eq!(events.changed_namespaces(), Some(vec![]));
    }
}
