//! How many blocks a scan forward has entered, has read ahead, and will probably enter. Pure.
//!
//! In: the blocks that it enters and reads, and how long scans of the level usually are. Out: how many to read. Invariant: it never wants blocks
//! beyond its expected length. Tested by the tests of whole tables.

use super::scan_lengths::SCAN_BLOCKS_MAX;

/// A scan forward, from its seek on, in blocks; also of the tables of the level before this one.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct BlockScan {
    pub(super) entered: u32,
    /// How many earlier scans of the level entered.
    pub(super) usual: u32,
    /// How many it will probably enter.
    pub(super) expected: u32,
    /// Behind the current one, those that were read or are being read.
    pub(super) ahead: u32,
    /// The length of the last read.
    pub(super) run: u32,
    /// Whether the current one was read ahead.
    pub(super) was_ahead: bool,
}

impl BlockScan {
    /// Comes to the next block.
    pub(super) fn enter(&mut self) {
        self.entered = self.entered.saturating_add(1);
        self.was_ahead = self.ahead > 0;
        self.ahead = self.ahead.saturating_sub(1);
        if self.entered > self.expected {
            self.expected = self.beyond(self.entered);
        }
    }

    /// Of a scan that is longer than usual, expects more once half of the last read is passed: it then waits for the device at its first unusual block only, not whenever it has
    /// entered as many as it was expected to.
    pub(super) fn expect_more(&mut self) {
        if self.entered > self.usual && self.ahead <= self.run / 2 {
            self.expected = self.expected.max(self.beyond(self.entered.saturating_add(self.ahead)));
        }
    }

    /// The expected length of a scan that needs more blocks than these: as many again as are beyond the usual length, so that one which is little longer than others reads little
    /// in vain. The usual length is known up to [`SCAN_BLOCKS_MAX`].
    fn beyond(&self, blocks: u32) -> u32 {
        let usual = if self.usual < SCAN_BLOCKS_MAX { self.usual } else { 0 };
        blocks.saturating_mul(2).saturating_add(1).saturating_sub(usual)
    }

    /// How many blocks to read behind the current one, and those that were read.
    pub(super) fn wanted(&self) -> u32 {
        self.expected.saturating_sub(self.entered.saturating_add(self.ahead))
    }
}
