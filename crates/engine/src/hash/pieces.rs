//! Values in pieces: what is stored where no run of free units has room for the whole record.
//!
//! ```text
//!   index ─▶ record  header, key, list ─▶ piece, piece, …          a piece: whole units, at most 128 KiB of the value
//!                            └─▶ list node ─▶ piece, piece, …       (one free unit has room for a piece, or for a node)
//!
//! ```
//! In: a value, and free space in any pieces. Out: a record with the flag [`RecordFlags::PIECES`], whose checksum is that of its
//! list ([`super::piece_list`]). Each piece has a checksum, and is verified alone.
//!
//! Invariants: pieces and nodes are written before the record that names them joins a journal batch, and given up after the
//! record's entry has left the index.
//! Tested in `pieces_tests.rs`.

use super::engine::{HashCore, RecordToWrite, SPACE_WAITS_MAX};
use super::index::{RECORD_UNITS_MAX, RecordRef};
use super::piece_list::{
    DamagedAt, ENTRY_BYTES, LIST_BYTES, PIECE_BYTES_MAX, Piece, PieceList, Pieces, list_bytes, list_of,
};
use super::volume::{HashVolume, SpaceFor};
use crate::bug_injection::{self, InjectedBug};
use crate::common::allocator::Extent;
use crate::common::group_commit::flush_deferred;
use crate::common::record::{LAYOUT, RecordFlags, RecordFormat, RecordHeader, RecordMeta};
use crate::{Durability, EngineError, PutMode, PutOutcome, ValueRange, VolumePlace};
use octokv_base::{Buffer, Key, crc32c};
use octokv_device::DeviceFuture;
use std::cell::Cell;
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::atomic::Ordering;

/// Pieces of a value that are read or written at once.
const PIECES_AT_ONCE: usize = 8;

/// Space for a value in pieces, which goes back to the volume when this is dropped.
pub(super) struct ReservedSpace<'a> {
    volume: &'a HashVolume,
    /// The pieces, then the nodes.
    extents: Vec<Extent>,
    /// The number of pieces.
    pieces: usize,
    /// The record's own space.
    pub head: Option<Extent>,
    /// Whether writes into it may be in flight, which a drop does not end: it then stays allocated.
    is_being_written: Cell<bool>,
}

impl<'a> ReservedSpace<'a> {
    pub fn new(volume: &'a HashVolume) -> ReservedSpace<'a> {
        ReservedSpace {
            volume,
            extents: Vec::new(),
            pieces: 0,
            head: None,
            is_being_written: Cell::new(false),
        }
    }

    fn keep(mut self) {
        self.extents.clear();
    }
}

impl Drop for ReservedSpace<'_> {
    fn drop(&mut self) {
        if self.is_being_written.get() {
            return;
        }
        let extents = self.extents.drain(..).chain(self.head.take());
        extents.for_each(|extent| self.volume.space.release(extent));
    }
}

/// What a value in pieces needs.
struct PiecesLayout {
    /// Units of the value.
    value_units: u64,
    /// Units of the record.
    head_units: u64,
    /// Entries of the list in the record, and of one in a node.
    in_head: usize,
    in_node: usize,
}

impl PiecesLayout {
    fn new(key_bytes: usize, value_bytes: usize, unit_bytes: usize) -> PiecesLayout {
        // The record has one unit, or as many as its key and two entries need.
        let offset = LAYOUT.value_offset(key_bytes);
        let head_bytes = (offset + list_bytes(2)).next_multiple_of(unit_bytes);
        PiecesLayout {
            value_units: value_bytes.div_ceil(unit_bytes) as u64,
            head_units: (head_bytes / unit_bytes) as u64,
            in_head: (head_bytes - offset - LIST_BYTES) / ENTRY_BYTES,
            in_node: (unit_bytes - LIST_BYTES) / ENTRY_BYTES,
        }
    }

    /// The nodes of a list of so many pieces. Each list but the last spends an entry on the node that follows.
    fn nodes(&self, pieces: usize) -> usize {
        match pieces <= self.in_head {
            true => 0,
            false => {
                1 + (pieces - (self.in_head - 1)).saturating_sub(self.in_node).div_ceil(self.in_node - 1)
            }
        }
    }
}

impl HashCore {
    /// Whether a put may store its value in pieces.
    pub(super) fn stores_pieces(&self) -> bool {
        !self.volume.volatile && self.volume.constants().format == RecordFormat::V2
    }

    /// Whether a record of so many units has to be stored in pieces: its entry could not name its length.
    pub(super) fn needs_pieces(&self, units: u64) -> bool {
        self.stores_pieces() && (units > RECORD_UNITS_MAX || bug_injection::scatters_values())
    }

    /// Allocates `units` units in runs of at most `longest`, as few as possible with halving; `None`, and nothing is allocated, if
    /// there are not as many.
    fn allocate_runs(
        &self,
        hash: u128,
        units: u64,
        longest: u64,
        space: &mut ReservedSpace<'_>,
    ) -> Option<()> {
        let (mut left, mut run) = (units, longest);
        while left > 0 {
            match self.allocate(hash, run.min(left), SpaceFor::Value) {
                Some(extent) => {
                    space.extents.push(extent);
                    left -= extent.units;
                }
                None if run.min(left) == 1 => return None,
                None => run = run.min(left) / 2,
            }
        }
        Some(())
    }

    /// Reserves the space of a value in pieces; `None` if the volume has not as much now.
    fn reserve_pieces(&self, hash: u128, layout: &PiecesLayout) -> Option<ReservedSpace<'_>> {
        let volume = &self.volume;
        // A value that cannot fit takes nothing, not even for a moment: other cores would find no space.
        let units_min = layout.value_units + layout.head_units;
        if volume.space.free_units() < units_min {
            volume.epochs.reclaim_all(|extent| volume.space.release(extent));
            if volume.space.free_units() < units_min {
                return None;
            }
        }
        let longest = match bug_injection::scatters_values() {
            true => 2,
            false => (PIECE_BYTES_MAX / volume.unit_bytes()) as u64,
        };
        let mut space = ReservedSpace::new(volume);
        // The record first: with a long key it needs adjacent units, of which the pieces may take the last.
        space.head = Some(self.allocate(hash, layout.head_units, SpaceFor::Value)?);
        self.allocate_runs(hash, layout.value_units, longest, &mut space)?;
        space.pieces = space.extents.len();
        let nodes = layout.nodes(space.pieces);
        self.allocate_runs(hash, nodes as u64, 1, &mut space)?;
        Some(space)
    }

    /// Reserves the space of a value in pieces after that failed once, as [`HashCore::put`] waits for the space of a record.
    async fn wait_for_pieces(
        &self,
        hash: u128,
        layout: &PiecesLayout,
    ) -> Result<Option<ReservedSpace<'_>>, EngineError> {
        let steps = self.volume.compaction.steps();
        let mut compaction_guard = None;
        loop {
            flush_deferred(self).await?;
            for waits_left in (0..=SPACE_WAITS_MAX).rev() {
                if let Some(space) = self.reserve_pieces(hash, layout) {
                    return Ok(Some(space));
                }
                if waits_left == 0 || !self.volume.epochs.has_retired() {
                    break;
                }
                self.volume.epochs.readers_left().await;
            }
            if compaction_guard.is_some() {
                break;
            }
            match self.pause_compaction(steps).await {
                Some(guard) => compaction_guard = Some(guard),
                None => break,
            }
        }
        let Some(_preparation_guard) = self.pause_preparation().await else { return Ok(None) };
        Ok(self.reserve_pieces(hash, layout))
    }

    /// Stores a value in pieces. REQUIRES: the caller has the key's lock and is in no epoch, and knows what the put keeps.
    pub(super) async fn put_in_pieces(
        &self,
        hash: u128,
        key: &Key,
        value: &[u8],
        meta: RecordMeta,
    ) -> Result<PutOutcome, EngineError> {
        let unit = self.volume.unit_bytes();
        let layout = PiecesLayout::new(key.len(), value.len(), unit);
        let reserved = match self.reserve_pieces(hash, &layout) {
            Some(space) => Some(space),
            None => self.wait_for_pieces(hash, &layout).await?,
        };
        let Some(mut space) = reserved else { return Ok(PutOutcome::Full) };
        let PiecesLayout { head_units, in_head, in_node, .. } = layout;
        let piece_count = space.pieces;
        let nodes = space.extents.len() - piece_count;
        let mut pieces = Pieces::default();
        let (mut rest, mut runs) = (value, Vec::with_capacity(piece_count));
        for &extent in &space.extents[..piece_count] {
            let (part, after) = rest.split_at(rest.len().min(extent.units as usize * unit));
            rest = after;
            pieces.pieces.push(Piece { extent, crc: crc32c(part) });
            runs.push((extent, part));
        }
        self.write_runs(&space, runs.into_iter()).await?;
        // The lists, from the last to the first, which each name the one that follows.
        let mut unlisted = &pieces.pieces[..];
        let (first, others) =
            unlisted.split_at(unlisted.len().min(if nodes == 0 { in_head } else { in_head - 1 }));
        unlisted = others;
        let mut parts = Vec::with_capacity(nodes);
        for left in (0..nodes).rev() {
            let count = if left == 0 { in_node } else { in_node - 1 };
            let (part, after) = unlisted.split_at(unlisted.len().min(count));
            parts.push(part);
            unlisted = after;
        }
        assert!(unlisted.is_empty(), "{} pieces without a place in {nodes} nodes", unlisted.len());
        let mut next = None;
        let mut node_bytes = Vec::with_capacity(nodes);
        for (&extent, part) in space.extents[piece_count..].iter().zip(&parts).rev() {
            let mut bytes = vec![0; unit];
            let end = PieceList { pieces: part.to_vec(), next }.encode(&mut bytes);
            next = Some(Piece { extent, crc: crc32c(&bytes[..end]) });
            node_bytes.push((extent, bytes));
        }
        self.write_runs(&space, node_bytes.iter().map(|(extent, bytes)| (*extent, &bytes[..]))).await?;
        let (offset, head_bytes) = (LAYOUT.value_offset(key.len()), head_units as usize * unit);
        let mut buffer = self.pool.take(head_bytes).ok_or(EngineError::NoMemory)?;
        let list = PieceList { pieces: first.to_vec(), next };
        let stored_bytes = list.encode(&mut buffer[offset..]);
        let flags = meta.flags.with(RecordFlags::PIECES);
        let meta = RecordMeta { flags, ..meta };
        let record = RecordToWrite { buffer, value_bytes: value.len(), stored_bytes, meta };
        let epoch_guard = self.enter_epoch();
        // A mode that makes sure that the predecessor is verified.
        let predecessor = self.find_predecessor(PutMode::UpdateOnly, hash, key).await?;
        // From here on the write gives the record's own space back, if it fails.
        let head = space.head.take().expect("reserved with the pieces");
        self.write_and_commit(hash, key, record, head, predecessor).await?;
        drop(epoch_guard);
        let piece_units: u64 = space.extents.iter().map(|extent| extent.units).sum();
        self.volume.count_units_of_pieces(piece_units as i64);
        self.volume.compaction.values_in_pieces.fetch_add(1, Ordering::Relaxed);
        space.keep();
        Ok(PutOutcome::Stored)
    }

    /// Writes runs of units of `space`, a few at a time. What a part lacks of its run is filled with zeros.
    async fn write_runs<'a>(
        &self,
        space: &ReservedSpace<'_>,
        runs: impl Iterator<Item = (Extent, &'a [u8])>,
    ) -> Result<(), EngineError> {
        let mut writes: VecDeque<DeviceFuture> = VecDeque::new();
        let mut result = Ok(());
        let mut runs = runs.fuse();
        let mut skipped = bug_injection::is_injected(InjectedBug::ForgetPiece);
        space.is_being_written.set(true);
        loop {
            while result.is_ok()
                && writes.len() < PIECES_AT_ONCE
                && let Some((extent, part)) = runs.next()
            {
                if std::mem::take(&mut skipped) {
                    continue;
                }
                let Some(mut buffer) = self.pool.take(extent.units as usize * self.volume.unit_bytes())
                else {
                    result = Err(EngineError::NoMemory);
                    break;
                };
                buffer[..part.len()].copy_from_slice(part);
                buffer[part.len()..].fill(0);
                writes.push_back(self.device.write(self.lba(extent.location), buffer));
            }
            // All that were begun are awaited: the device has their space.
            let Some(write) = writes.pop_front() else {
                space.is_being_written.set(false);
                return result;
            };
            if let Err(error) = write.await.result {
                result = Err(error.into());
            }
        }
    }

    /// The pieces of the record whose front is in `record`; or what of its list is damaged.
    ///
    /// # Errors
    /// No memory, or a device failure.
    async fn pieces_of(
        &self,
        header: &RecordHeader,
        record: &[u8],
    ) -> Result<Result<Pieces, DamagedAt>, EngineError> {
        let unit = self.volume.unit_bytes();
        let units = self.volume.record_units();
        let mut pieces = Pieces::default();
        let (mut at, mut list) = (header.identity.location, list_of(header, record));
        loop {
            match list.and_then(|list| pieces.add(list, header.value_bytes, unit, &units)) {
                None => return Ok(Err(DamagedAt(at))),
                Some(None) => return Ok(Ok(pieces)),
                Some(Some(node)) => {
                    at = node.extent.location;
                    let bytes = node.extent.units as usize * unit;
                    let buffer = self.pool.take(bytes).ok_or(EngineError::NoMemory)?;
                    let buffer = self.device.read(self.lba(at), buffer).await.into_read()?;
                    list = PieceList::decode(&buffer, node.crc);
                }
            }
        }
    }

    fn corrupt_at(&self, DamagedAt(location): DamagedAt) -> EngineError {
        EngineError::Corrupt { lba: self.lba(location).0, place: VolumePlace::default() }
    }

    /// Reads the requested part of a value in pieces, and verifies each piece that it touches. REQUIRES: the caller is in an epoch since it took the reference from the index.
    ///
    /// # Errors
    /// No memory, a device failure, and [`EngineError::Corrupt`] if the list or a piece is damaged.
    pub(super) async fn read_pieces(
        &self,
        header: &RecordHeader,
        record: &[u8],
        requested: ValueRange,
    ) -> Result<Buffer, EngineError> {
        let requested = requested.within(header.value_bytes as u32);
        let requested = requested.start as usize..requested.end as usize;
        let mut value = self.pool.take(requested.len()).ok_or(EngineError::NoMemory)?;
        self.read_pieces_into(header, record, requested, &mut value).await?;
        Ok(value)
    }

    /// The same into `value`, which has the length of `requested`, a range of the value.
    pub(super) async fn read_pieces_into(
        &self,
        header: &RecordHeader,
        record: &[u8],
        requested: Range<usize>,
        value: &mut [u8],
    ) -> Result<(), EngineError> {
        let unit = self.volume.unit_bytes();
        let pieces = self.pieces_of(header, record).await?.map_err(|at| self.corrupt_at(at))?;
        let mut touched = pieces
            .ranges(header.value_bytes, unit)
            .filter(|(_, range)| range.start < requested.end && requested.start < range.end);
        let mut reads: VecDeque<(Piece, Range<usize>, DeviceFuture)> = VecDeque::new();
        loop {
            while reads.len() < PIECES_AT_ONCE
                && let Some((piece, range)) = touched.next()
            {
                let bytes = range.len().next_multiple_of(unit);
                let buffer = self.pool.take(bytes).ok_or(EngineError::NoMemory)?;
                let read = self.device.read(self.lba(piece.extent.location), buffer);
                reads.push_back((piece, range, read));
            }
            let Some((piece, range, read)) = reads.pop_front() else { break };
            let buffer = read.await.into_read()?;
            if crc32c(&buffer[..range.len()]) != piece.crc
                && !bug_injection::is_injected(InjectedBug::SkipValueChecksum)
            {
                return Err(self.corrupt_at(DamagedAt(piece.extent.location)));
            }
            let part = range.start.max(requested.start)..range.end.min(requested.end);
            value[part.start - requested.start..part.end - requested.start]
                .copy_from_slice(&buffer[part.start - range.start..part.end - range.start]);
        }
        Ok(())
    }

    /// The space of the pieces of a record that is about to leave the index; none if its list cannot be read: that space comes back
    /// at the next opening. REQUIRES: the caller has the key's lock, and is in an epoch.
    pub(super) async fn extents_of_pieces(&self, old: RecordRef) -> Vec<Extent> {
        if self.volume.lost_pieces.lock().contains(&old.location) {
            return Vec::new();
        }
        let Ok(record) = self.read_whole(old).await else { return Vec::new() };
        let Ok((header, _)) = self.volume.record_header(&record, old.location) else { return Vec::new() };
        if !self.volume.is_record(old, &header) {
            return Vec::new();
        }
        let pieces = self.pieces_of(&header, &record).await.ok().and_then(Result::ok);
        let extents: Vec<Extent> = pieces.map_or_else(Vec::new, |pieces| pieces.extents().collect());
        if bug_injection::is_injected(InjectedBug::FreePiecesEarly) {
            extents.iter().for_each(|&extent| self.volume.space.release(extent));
            return Vec::new();
        }
        extents
    }

    /// Whether a record's value lies in pieces.
    pub(super) fn is_in_pieces(&self, record_ref: &RecordRef) -> bool {
        record_ref.flags(self.volume.constants().format).contains(RecordFlags::PIECES)
    }

    /// Gives up the space of pieces whose record has left the index.
    pub(super) fn free_pieces(&self, old: Option<RecordRef>, freed: &[Extent]) {
        if let Some(old) = old {
            self.volume.lost_pieces.lock().remove(&old.location);
            self.volume.compaction.values_in_pieces.fetch_sub(1, Ordering::Relaxed);
        }
        if freed.is_empty() {
            return;
        }
        let units: u64 = freed.iter().map(|extent| extent.units).sum();
        self.volume.count_units_of_pieces(-(units as i64));
        match self.volume.commits.durability() {
            Durability::PowerSafe => self.retire(freed),
            Durability::Completed => self.volume.commits.defer_free(freed),
        }
    }
}

impl HashVolume {
    /// Counts units that pieces took, or gave up if negative.
    pub(super) fn count_units_of_pieces(&self, units: i64) {
        let bytes = units.wrapping_mul(i64::from(self.layout().unit_bytes));
        self.used_bytes().fetch_add(bytes as u64, Ordering::Relaxed);
    }
}
