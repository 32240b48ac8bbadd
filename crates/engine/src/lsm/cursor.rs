//! Cursors over entries: what memtables, tables and merges of them have in common.

use super::entry::{Position, TreeEntry};
use crate::EngineError;
use std::future::Future;

/// A place among entries that can be moved in both directions. New ones are at no entry.
///
/// An operation that fails with [`EngineError::Corrupt`] has met a part that cannot be read. The cursor is then at no entry, and
/// [`EntryCursor::next`] and [`EntryCursor::prev`], whichever direction it had, go on behind that part: what was there is unknown, and the caller decides
/// whether to leave it out. After any other failure the cursor has to seek anew.
pub trait EntryCursor {
    /// The entry at which the cursor is.
    fn entry(&self) -> Option<TreeEntry<'_>>;
    /// The position of that entry.
    fn position(&self) -> Option<Position<'_>> {
        self.entry().map(|entry| entry.position())
    }
    /// Moves to the first entry at or behind a position.
    ///
    /// # Errors
    /// Device failures, no memory, [`EngineError::Corrupt`].
    fn seek(&mut self, position: Position<'_>) -> impl Future<Output = Result<(), EngineError>>;
    /// Moves to the last entry before a position; without one, to the last of all.
    ///
    /// # Errors
    /// As for [`EntryCursor::seek`].
    fn seek_before(
        &mut self,
        position: Option<Position<'_>>,
    ) -> impl Future<Output = Result<(), EngineError>>;
    /// Moves to the next entry. REQUIRES: the cursor is at an entry, or met a part that cannot be read while it moved forward.
    ///
    /// # Errors
    /// As for [`EntryCursor::seek`].
    fn next(&mut self) -> impl Future<Output = Result<(), EngineError>>;
    /// Moves to the preceding entry. REQUIRES: the cursor is at an entry, or met a part that cannot be read while it moved back.
    ///
    /// # Errors
    /// As for [`EntryCursor::seek`].
    fn prev(&mut self) -> impl Future<Output = Result<(), EngineError>>;
}
