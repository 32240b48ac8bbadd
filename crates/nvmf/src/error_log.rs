//! The error log: the last failed commands (log page 01h).
//!
//! Expected negative results (no such key, key exists, compare failure) are not recorded.

use octokv_base::Lba;
use octokv_wire::Status;
use octokv_wire::log_page::ErrorEntry;
use parking_lot::Mutex;
use std::collections::VecDeque;
use zerocopy::byteorder::little_endian::{U16, U32, U64};

/// The number of retained entries.
pub(crate) const ERROR_LOG_ENTRIES: usize = 16;
const NO_LOCATION: u16 = 0xffff;
const TRANSPORT_TCP: u8 = 3;

/// One failed command.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ErrorLogEntry {
    pub queue_id: u16,
    pub command_id: u16,
    pub nsid: u32,
    /// The first block of a command on blocks.
    pub lba: Option<Lba>,
    pub status: Status,
}

#[derive(Debug, Default)]
struct ErrorRing {
    total_count: u64,
    entries: VecDeque<ErrorLogEntry>,
}

/// The error log of a target, newest entry first.
#[derive(Debug, Default)]
pub(crate) struct ErrorLog(Mutex<ErrorRing>);

impl ErrorLog {
    /// Adds an entry and drops the oldest one if the log is full.
    pub fn record(&self, failure: ErrorLogEntry) {
        let ring = &mut *self.0.lock();
        ring.total_count += 1;
        ring.entries.truncate(ERROR_LOG_ENTRIES - 1);
        ring.entries.push_front(failure);
    }

    /// The number of entries recorded so far, dropped ones included.
    pub fn total_count(&self) -> u64 {
        self.0.lock().total_count
    }

    /// The log page: newest entry first, empty entries last.
    pub fn entries(&self) -> [ErrorEntry; ERROR_LOG_ENTRIES] {
        let ring = self.0.lock();
        let mut entries = [ErrorEntry::empty(); ERROR_LOG_ENTRIES];
        for ((entry, failure), count) in
            entries.iter_mut().zip(&ring.entries).zip((1..=ring.total_count).rev())
        {
            entry.count = U64::new(count);
            entry.queue_id = U16::new(failure.queue_id);
            entry.command_id = U16::new(failure.command_id);
            entry.status = U16::new(failure.status.to_field());
            entry.location = U16::new(NO_LOCATION);
            entry.lba = U64::new(failure.lba.map_or(0, |lba| lba.0));
            entry.nsid = U32::new(failure.nsid);
            entry.transport = TRANSPORT_TCP;
        }
        entries
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_errors_are_kept_and_all_are_counted() {
        let log = ErrorLog::default();
        for command_id in 0..20 {
            log.record(ErrorLogEntry {
                queue_id: 1,
                command_id,
                nsid: 1,
                lba: None,
                status: Status::INVALID_FIELD,
            });
        }
        let entries = log.entries();
        assert_eq!((entries[0].count.get(), entries[0].command_id.get()), (20, 19));
        assert_eq!((entries[15].count.get(), entries[15].command_id.get()), (5, 4));
        assert_eq!(log.total_count(), 20);
    }
}
