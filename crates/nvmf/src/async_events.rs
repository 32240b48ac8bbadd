//! What a host wants to be told without asking: notices that wait for an event request, and the lists
//! that they point to.
//!
//! Each kind of event is told once and then held back until the host has read its log page (NVMe Base
//! 2.1, 5.2.2), so that a host which does not read gets no second one, and nothing grows.

use crate::health::{WARNING_READ_ONLY, WARNING_SPARE};
use octokv_wire::queue_entry::event;

/// A kind of event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AsyncEvent {
    /// A namespace changed: log 04h says which.
    NamespaceChanged,
    /// The access to namespaces changed: log 0Ch.
    AnaChanged,
    /// The discovery log changed: log 70h.
    DiscoveryChanged,
    /// Spare capacity is below its threshold: log 02h.
    SpareLow,
    /// The media takes no more writes: log 02h.
    ReadOnly,
}

const ALL_ASYNC_EVENTS: [AsyncEvent; 5] = [
    AsyncEvent::NamespaceChanged,
    AsyncEvent::AnaChanged,
    AsyncEvent::DiscoveryChanged,
    AsyncEvent::SpareLow,
    AsyncEvent::ReadOnly,
];

impl AsyncEvent {
    /// Those for critical warnings.
    pub(crate) fn for_critical_warnings(warnings: u8) -> impl Iterator<Item = AsyncEvent> {
        let health = [(WARNING_SPARE, AsyncEvent::SpareLow), (WARNING_READ_ONLY, AsyncEvent::ReadOnly)];
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
            // The low byte has the bits of the health log's critical warnings.
            AsyncEvent::SpareLow => WARNING_SPARE as u32,
            AsyncEvent::ReadOnly => WARNING_READ_ONLY as u32,
        }
    }

    fn completion_dword(self) -> u32 {
        match self {
            AsyncEvent::NamespaceChanged => event::NAMESPACE_CHANGED,
            AsyncEvent::AnaChanged => event::ANA_CHANGED,
            AsyncEvent::DiscoveryChanged => event::DISCOVERY_CHANGED,
            AsyncEvent::SpareLow => event::SPARE_LOW,
            AsyncEvent::ReadOnly => event::RELIABILITY,
        }
    }

    fn log_page_id(self) -> u8 {
        (self.completion_dword() >> 16) as u8
    }
}

/// The most namespaces that the changed list names; more are told as "all".
const CHANGED_NAMESPACES_MAX: usize = 1024;

/// The notices of one controller.
#[derive(Debug, Default)]
pub(crate) struct AsyncEventState {
    /// Feature 0Bh: which notices the host wants.
    pub enabled: u32,
    pending: u8,
    masked: u8,
    changed_namespaces: Vec<u32>,
}

impl AsyncEventState {
    /// Something happened.
    pub fn notify(&mut self, event: AsyncEvent) {
        if self.enabled & event.enable_bit() != 0 {
            self.pending |= event.bit();
        }
    }

    /// A namespace changed.
    pub fn record_namespace_change(&mut self, nsid: u32) {
        if !self.changed_namespaces.contains(&nsid) && self.changed_namespaces.len() < CHANGED_NAMESPACES_MAX
        {
            self.changed_namespaces.push(nsid);
        }
        self.notify(AsyncEvent::NamespaceChanged);
    }

    /// The next event to tell, as DW0 of an event request.
    pub fn take_next(&mut self) -> Option<u32> {
        let ready = self.pending & !self.masked;
        let event = ALL_ASYNC_EVENTS.into_iter().find(|event| ready & event.bit() != 0)?;
        self.pending &= !event.bit();
        self.masked |= event.bit();
        Some(event.completion_dword())
    }

    /// The host read a log page and did not ask to keep its event held.
    pub fn unmask_log(&mut self, log: u8) {
        for event in ALL_ASYNC_EVENTS.into_iter().filter(|event| event.log_page_id() == log) {
            self.masked &= !event.bit();
        }
    }

    /// The namespaces that changed and were not forgotten, rising; `None` stands for too many.
    pub fn changed_namespaces(&self) -> Option<Vec<u32>> {
        let mut changed = self.changed_namespaces.clone();
        changed.sort_unstable();
        (changed.len() < CHANGED_NAMESPACES_MAX).then_some(changed)
    }

    /// The host has read the list.
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
