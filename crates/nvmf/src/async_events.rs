//! What a host wants to be told without asking: notices that wait for an event request, and the lists
//! that they point to.
//!
//! Each kind of notice is told once and then held back until the host has read its log page (NVMe Base
//! 2.1, 5.2.2), so that a host which does not read gets no second one, and nothing grows.

use crate::health::{WARNING_READ_ONLY, WARNING_SPARE};
use octokv_wire::queue_entry::event;

/// A kind of notice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Notice {
    /// A namespace changed: log 04h says which.
    NamespaceChanged,
    /// The access to namespaces changed: log 0Ch.
    AccessChanged,
    /// The discovery log changed: log 70h.
    DiscoveryChanged,
    /// Spare capacity is below its threshold: log 02h.
    SpareLow,
    /// The media takes no more writes: log 02h.
    ReadOnly,
}

const NOTICES: [Notice; 5] = [
    Notice::NamespaceChanged,
    Notice::AccessChanged,
    Notice::DiscoveryChanged,
    Notice::SpareLow,
    Notice::ReadOnly,
];

impl Notice {
    /// Those for critical warnings.
    pub(crate) fn of_warnings(warnings: u8) -> impl Iterator<Item = Notice> {
        let health = [(WARNING_SPARE, Notice::SpareLow), (WARNING_READ_ONLY, Notice::ReadOnly)];
        health.into_iter().filter(move |(bit, _)| warnings & bit != 0).map(|(_, notice)| notice)
    }

    fn bit(self) -> u8 {
        1 << self as u8
    }

    fn wanted_bit(self) -> u32 {
        match self {
            Notice::NamespaceChanged => event::NAMESPACE_CHANGED_BIT,
            Notice::AccessChanged => event::ANA_CHANGED_BIT,
            Notice::DiscoveryChanged => event::DISCOVERY_CHANGED_BIT,
            // The low byte has the bits of the health log's critical warnings.
            Notice::SpareLow => WARNING_SPARE as u32,
            Notice::ReadOnly => WARNING_READ_ONLY as u32,
        }
    }

    fn dword(self) -> u32 {
        match self {
            Notice::NamespaceChanged => event::NAMESPACE_CHANGED,
            Notice::AccessChanged => event::ANA_CHANGED,
            Notice::DiscoveryChanged => event::DISCOVERY_CHANGED,
            Notice::SpareLow => event::SPARE_LOW,
            Notice::ReadOnly => event::RELIABILITY,
        }
    }

    fn log(self) -> u8 {
        (self.dword() >> 16) as u8
    }
}

/// The most namespaces that the changed list names; more are told as "all".
const CHANGED_MAX: usize = 1024;

/// The notices of one controller.
#[derive(Debug, Default)]
pub(crate) struct Events {
    /// Feature 0Bh: which notices the host wants.
    pub wanted: u32,
    pending: u8,
    held: u8,
    changed: Vec<u32>,
}

impl Events {
    /// Something happened.
    pub fn notify(&mut self, notice: Notice) {
        if self.wanted & notice.wanted_bit() != 0 {
            self.pending |= notice.bit();
        }
    }

    /// A namespace changed.
    pub fn namespace_changed(&mut self, nsid: u32) {
        if !self.changed.contains(&nsid) && self.changed.len() < CHANGED_MAX {
            self.changed.push(nsid);
        }
        self.notify(Notice::NamespaceChanged);
    }

    /// The next notice to tell, as DW0 of an event request.
    pub fn next(&mut self) -> Option<u32> {
        let ready = self.pending & !self.held;
        let notice = NOTICES.into_iter().find(|notice| ready & notice.bit() != 0)?;
        self.pending &= !notice.bit();
        self.held |= notice.bit();
        Some(notice.dword())
    }

    /// The host read a log page and did not ask to keep its event held.
    pub fn log_was_read(&mut self, log: u8) {
        for notice in NOTICES.into_iter().filter(|notice| notice.log() == log) {
            self.held &= !notice.bit();
        }
    }

    /// The namespaces that changed and were not forgotten, rising; `None` stands for too many.
    pub fn changed(&self) -> Option<Vec<u32>> {
        let mut changed = self.changed.clone();
        changed.sort_unstable();
        (changed.len() < CHANGED_MAX).then_some(changed)
    }

    /// The host has read the list.
    pub fn forget_changed(&mut self) {
        self.changed.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_notice_is_told_once_until_its_log_is_read() {
        let mut events = Events { wanted: u32::MAX, ..Events::default() };
        events.namespace_changed(2);
        events.namespace_changed(1);
        assert_eq!(events.next(), Some(event::NAMESPACE_CHANGED));
        events.namespace_changed(2);
        assert_eq!(events.next(), None);
        assert_eq!(events.changed(), Some(vec![1, 2]));
        events.forget_changed();
        events.log_was_read(0x04);
        assert_eq!(events.next(), Some(event::NAMESPACE_CHANGED));
        events.notify(Notice::DiscoveryChanged);
        assert_eq!(events.next(), Some(event::DISCOVERY_CHANGED));
    }

    #[test]
    fn notices_that_the_host_does_not_want_are_not_told() {
        let mut events = Events { wanted: event::ANA_CHANGED_BIT, ..Events::default() };
        events.namespace_changed(1);
        events.notify(Notice::AccessChanged);
        assert_eq!(events.next(), Some(event::ANA_CHANGED));
        assert_eq!(events.next(), None);
    }

    #[test]
    fn the_changed_list_is_bounded() {
        let mut events = Events::default();
        (1..5000).for_each(|nsid| events.namespace_changed(nsid));
        assert_eq!(events.changed(), None);
        events.forget_changed();
        assert_eq!(events.changed(), Some(vec![]));
    }
}
