//! Online rebalancing: migrates partitions between devices until each has its share by size (copy, dual writes, cutover, deletion at the source).
//!
//! ```text
//!   destination notes that it may have keys of the partitions ─▶ map with the move: writes go to both ─▶ keys copied, paced
//!     ─▶ map that freezes their writes, until those that run have ended ─▶ destination flushed
//!     ─▶ source notes that the destination may have the new map
//!     ─▶ superblocks with the new map: destination, source, others ─▶ new map ─▶ source deletes its keys of the partitions
//!       └ crash: the source has them       └ crash: the destination has them; if it is absent, the source
//! ```
//! In: the devices of a volume and their sizes. Out: partitions by [`PartitionMap::next_move`](super::partition_map::PartitionMap::next_move), one move after the other, by the handle of core 0.
//! Invariants:
//! - Until a superblock has the new map, reads and listings ignore what the destination has of the partitions.
//! - From then on, no write of these partitions goes to the source alone.
//! - The source deletes their keys only when no running operation has an earlier map.
//! - A move that fails before the new map is written leaves the partitions at the source, and is retried later.
//!
//! A device whose superblock could not be written gets the map with the next change of that, or at the next opening. On volumes with swap regions partitions
//! [settle](super::settling) before they move. Tested in `tests/spanned_growth.rs`,
//! `tests/spanned_swap_growth.rs`, `tests/spanned_read_only.rs` and `tests/spanned_map_faults.rs`.

use super::core::SpannedCore;
use super::devices::rewrite_superblock;
use super::moving::CopyOutcome;
use super::partition_map::PlannedMove;
use super::partition_set::PartitionSet;
use super::places::PlacedMember;
use super::ring_merge::ListOrder;
use super::shared_map::{MapState, MovingWrites, PartitionMove, SharedMap};
use super::superblock::SpanSuperblock;
use super::swapped_keys::{SwapNoteInFlight, SwappedKeys};
use crate::bug_injection::{self, InjectedBug};
use crate::common::shared_lock::SharedLockGuard;
use crate::{Engine, EngineError, OpenError, ScanEntry, VolumePlace};
use futures_util::future::join_all;
use octokv_base::{Key, Nanos, RingPosition, RingRange, Version};
use octokv_device::DeviceError;
use octokv_runtime::ReactorHandle;
use std::future::pending;
use std::sync::Arc;

/// Keys that are copied or deleted at once.
const KEYS_AT_ONCE: usize = 16;
/// Keys of a page, at most.
const PAGE_KEYS: usize = 1_024;
/// The same with the ordered engine, which makes a pass over its whole tree for each page.
const TREE_PAGE_KEYS: usize = 64 << 10;
/// What an operation counts in the pace beside the bytes of its value.
const OPERATION_BYTES: u64 = 4 << 10;
/// Between two looks whether operations with an earlier map have ended.
const OPERATIONS_PERIOD: Nanos = Nanos::from_millis(1);
/// The first pause after a move that failed, and the longest: each is twice the one before.
const RETRY_MIN: Nanos = Nanos::from_secs(1);
const RETRY_MAX: Nanos = Nanos::from_secs(256);
/// How often a copy that finds no memory is tried.
const MEMORY_TRIES: usize = 1_000;

/// Why a move ended without a new map.
enum MoveFailure {
    Engine(EngineError),
    /// The superblock of this device could not be read or written.
    Superblock(usize, OpenError),
    /// The destination, of this index, has no space.
    Full(usize),
    /// The source cannot read a key of this partition.
    Unreadable(usize, EngineError),
    /// Newest values of keys of these partitions are in the regions of other devices, and cannot be merged.
    Swapped(PartitionSet),
    /// The destination lacks a write, a device was replaced, or a superblock cannot be written until the next opening.
    Broken,
}

impl From<EngineError> for MoveFailure {
    fn from(error: EngineError) -> MoveFailure {
        MoveFailure::Engine(error)
    }
}

impl MoveFailure {
    /// The error that the log of the node gets.
    fn error(self) -> Option<EngineError> {
        match self {
            MoveFailure::Engine(error) | MoveFailure::Unreadable(_, error) => Some(error),
            MoveFailure::Superblock(device, error) => Some(error_of_superblock(device, error)),
            MoveFailure::Full(device) => {
                let place = VolumePlace::new(device as u16, 0);
                Some(EngineError::Device { error: DeviceError::NoSpace, place })
            }
            MoveFailure::Swapped(_) | MoveFailure::Broken => None,
        }
    }
}

/// The error of a superblock as that of an operation on its device.
fn error_of_superblock(device: usize, error: OpenError) -> EngineError {
    let place = VolumePlace::new(device as u16, 0);
    match error {
        OpenError::Device(error) => EngineError::Device { error, place },
        _ => EngineError::Corrupt { lba: 0, place },
    }
}

/// While a map is frozen: if the task is dropped, writes fail from then on.
struct Frozen<'a> {
    shared: &'a SharedMap,
    is_thawed: bool,
}

impl Drop for Frozen<'_> {
    fn drop(&mut self) {
        if !self.is_thawed {
            self.shared.publish(|state| state.writes = MovingWrites::Fail);
        }
    }
}

impl<E: Engine> SpannedCore<E> {
    /// Moves partitions until it is dropped, on core 0. `report` receives the errors of moves.
    pub(super) async fn rebalance(&self, handle: &ReactorHandle, report: impl Fn(EngineError)) {
        if self.core != 0 || self.shared.move_bytes_per_second == 0 {
            return pending().await;
        }
        let (mut unreadable, mut swapped, mut retry) =
            (PartitionSet::default(), PartitionSet::default(), RETRY_MIN);
        loop {
            let change = self.map().change();
            match self.rebalance_once(handle, &unreadable.with(&swapped)).await {
                // A home that was full has space again.
                Ok(true) => (swapped, retry) = (PartitionSet::default(), RETRY_MIN),
                Ok(false) if swapped.is_empty() => self.shared.map.changed(change).await,
                // Others first.
                Err(MoveFailure::Swapped(partitions)) => swapped = swapped.with(&partitions),
                outcome => {
                    if let Err(failure) = outcome {
                        if let MoveFailure::Unreadable(partition, _) = failure {
                            unreadable.insert(partition);
                        }
                        failure.error().into_iter().for_each(&report);
                    }
                    swapped = PartitionSet::default();
                    handle.sleep(retry).await;
                    retry = Nanos((retry.0 * 2).min(RETRY_MAX.0));
                }
            }
        }
    }

    /// The next step. False if there is nothing to do until something changes.
    async fn rebalance_once(
        &self,
        handle: &ReactorHandle,
        fixed: &PartitionSet,
    ) -> Result<bool, MoveFailure> {
        let map = self.map();
        if map.writes != MovingWrites::Both || !self.shared.map.all_cores_have(self.devices()) {
            return Ok(false);
        }
        if map.moving.is_some() || !map.settling.is_empty() {
            // Of a task that was dropped.
            drop(map);
            self.end_move(handle, |_| ()).await;
            return Ok(true);
        }
        let left_over = map.left_over.iter().enumerate();
        let mut left_over = left_over.filter(|(device, set)| !set.is_empty() && self.member(*device).is_ok());
        if let Some((device, &set)) = left_over.next() {
            drop(map);
            // A task that was dropped may not have waited for operations of the former map, which read them there.
            self.wait_for_former(handle).await;
            self.delete_left_over(device, set, handle).await?;
            return Ok(true);
        }
        let members = (0..self.devices()).map(|device| self.member(device)).collect::<Result<Vec<_>, _>>();
        let Ok(members) = members else { return Ok(false) };
        let bytes: Vec<_> = members.iter().map(|placed| placed.open().whole.geometry().bytes()).collect();
        let planned = map.map.next_move(&bytes, &fixed.with(&self.unknown_partitions()));
        drop(map);
        let Some(planned) = planned else { return Ok(false) };
        let moved = self.move_partitions(planned, handle).await;
        if moved.is_err() {
            self.stop_settling(handle).await;
        }
        moved.map(|()| true)
    }

    /// Lets keys of partitions be swapped again whose move has not begun.
    async fn stop_settling(&self, handle: &ReactorHandle) {
        let map = self.map();
        let is_settling = map.moving.is_none() && !map.settling.is_empty();
        drop(map);
        if is_settling {
            self.end_move(handle, |_| ()).await;
        }
    }

    /// Changes the map, and waits until no operation has an earlier one.
    async fn change_map(&self, handle: &ReactorHandle, change: impl FnOnce(&mut MapState)) {
        self.shared.map.publish(change);
        self.wait_for_former(handle).await;
    }

    /// Waits until no operation has an earlier map than the current one, and no device executes one whose future was dropped, which has no map.
    async fn wait_for_former(&self, handle: &ReactorHandle) {
        // This core's own reference.
        self.map();
        while !self.shared.map.have_former_ended() {
            handle.sleep(OPERATIONS_PERIOD).await;
        }
        for placed in self.open_members() {
            while placed.engine().has_abandoned() && !placed.is_lost() {
                handle.sleep(OPERATIONS_PERIOD).await;
            }
        }
    }

    /// Changes the map to one without a move, and waits until no operation has an earlier one; only then keys of the partitions are swapped.
    async fn end_move(&self, handle: &ReactorHandle, change: impl FnOnce(&mut MapState)) {
        let without = |state: &mut MapState| {
            (state.moving, state.writes) = (None, MovingWrites::Both);
            change(state);
        };
        self.change_map(handle, without).await;
        if self.swaps().is_some() {
            self.shared.map.publish(|state| state.settling = PartitionSet::default());
        }
    }

    /// Changes the superblock of a device. If the device missed the current map, it gets it too: its own may have been overruled. With [`MoveFailure::Broken`] nothing was written. REQUIRES: the
    /// lock of the structure.
    async fn change_superblock(
        &self,
        placed: &PlacedMember<E>,
        change: impl FnOnce(&mut SpanSuperblock),
    ) -> Result<(), MoveFailure> {
        let device = &placed.open().whole;
        let failed = |error| MoveFailure::Superblock(placed.index(), error);
        let _notes = self.shared.exclude_notes().await;
        if self.swaps().is_some_and(|swaps| !swaps.may_note()) {
            return Err(MoveFailure::Broken);
        }
        let map = self.map();
        let (current, number) = (map.map, map.number);
        drop(map);
        let in_flight = self.swaps().map(SwappedKeys::begin_note);
        let written = rewrite_superblock(&**device, |superblock| {
            if superblock.map_number < number {
                let index = superblock.device.index.into();
                let before = superblock.left_over.with(&superblock.map.partitions_of(index));
                superblock.left_over = before.without(&current.partitions_of(index));
                (superblock.map, superblock.map_number) = (current, number);
            }
            change(superblock);
        })
        .await;
        in_flight.into_iter().for_each(SwapNoteInFlight::end);
        written.map_err(failed)
    }

    async fn move_partitions(&self, planned: PlannedMove, handle: &ReactorHandle) -> Result<(), MoveFailure> {
        let PlannedMove { from, to, partitions } = planned;
        if self.swaps().is_some() {
            self.change_map(handle, |state| state.settling = partitions).await;
            let swapped = self.merge_partitions(from, &partitions).await;
            if !swapped.is_empty() {
                return Err(MoveFailure::Swapped(swapped));
            }
        }
        let moving = Arc::new(PartitionMove::new(planned));
        let members = {
            let _turn = self.shared.structure.exclude().await;
            // Under the lock: a device that was replaced before does not get the note.
            let members = (self.member(from)?, self.member(to)?);
            let note = |superblock: &mut SpanSuperblock| {
                superblock.left_over = superblock.left_over.with(&partitions)
            };
            if !bug_injection::is_injected(InjectedBug::MoveForgetNote) {
                self.change_superblock(&members.1, note).await?;
            }
            // Under the lock: a device that replaces the destination gets the note from here.
            let of_map = Arc::clone(&moving);
            self.shared.map.publish(|state| {
                state.left_over[to] = state.left_over[to].with(&partitions);
                state.moving = Some(of_map);
            });
            members
        };
        self.wait_for_former(handle).await;
        if let Err(failure) = self.copy_partitions(&moving, handle).await {
            self.end_move(handle, |_| ()).await;
            return Err(failure);
        }
        if bug_injection::is_injected(InjectedBug::MoveDeleteEarly) {
            self.delete_left_over(from, partitions, handle).await?;
        }
        let (mut frozen, turn) = self.freeze_writes(handle).await;
        let outcome = self.write_maps(&moving, &members, turn).await;
        match outcome {
            Ok(()) => {
                let moved = |state: &mut MapState| {
                    (state.map, state.number) = (state.map.moved(&planned), state.number + 1);
                    state.left_over[to] = state.left_over[to].without(&partitions);
                    state.left_over[from] = state.left_over[from].with(&partitions);
                };
                frozen.is_thawed = true;
                self.end_move(handle, moved).await;
                Ok(())
            }
            Err(NotMoved { failure, numbers }) => {
                if let Some(numbers) = numbers {
                    frozen.is_thawed = true;
                    self.end_move(handle, |state| state.number += numbers).await;
                }
                Err(failure)
            }
        }
    }

    /// Lets the writes of a move's partitions wait, and returns with the lock of the structure when none of them runs any more. They never wait for the lock, which a
    /// device that is formatted meanwhile has for long; nor does the lock wait for operations, one of which may need the replacement of a device to end.
    async fn freeze_writes(&self, handle: &ReactorHandle) -> (Frozen<'_>, SharedLockGuard<'_>) {
        loop {
            drop(self.shared.structure.exclude().await);
            let mut frozen = Frozen { shared: &self.shared.map, is_thawed: false };
            self.change_map(handle, |state| state.writes = MovingWrites::Wait).await;
            if let Some(turn) = self.shared.structure.try_exclude() {
                return (frozen, turn);
            }
            frozen.is_thawed = true;
            self.change_map(handle, |state| state.writes = MovingWrites::Both).await;
        }
    }

    /// Writes the map of a move to the superblocks of all devices that serve. REQUIRES: no write of its partitions runs; `_turn` is the lock of the structure.
    async fn write_maps(
        &self,
        moving: &PartitionMove,
        (from, to): &(PlacedMember<E>, PlacedMember<E>),
        _turn: SharedLockGuard<'_>,
    ) -> Result<(), NotMoved> {
        let planned = &moving.planned;
        let before = |failure| NotMoved { failure, numbers: Some(0) };
        let is_same = |device, placed: &PlacedMember<E>| {
            let now = self.member(device);
            now.is_ok_and(|now| now.replacements() == placed.replacements())
        };
        if moving.has_failed() || !is_same(planned.from, from) || !is_same(planned.to, to) {
            return Err(before(MoveFailure::Broken));
        }
        // What hosts have flushed on the source is to be as durable at the destination.
        let flushed = to.engine().flush().await;
        flushed.map_err(|error| before(to.engine_error(error).into()))?;
        let state = self.map();
        let (map, number) = (state.map.moved(planned), state.number + 1);
        let old_map = state.map;
        drop(state);
        let undecided = |failure| NotMoved { failure, numbers: None };
        // From here on an opening without the destination overrules the map that this may have.
        let of_source = |superblock: &mut SpanSuperblock| {
            superblock.left_over = superblock.left_over.with(&planned.partitions);
        };
        self.change_superblock(from, of_source).await.map_err(|failure| match failure {
            MoveFailure::Broken => before(failure),
            _ => undecided(failure),
        })?;
        let of_destination = |superblock: &mut SpanSuperblock| {
            (superblock.map, superblock.map_number) = (map, number);
            superblock.left_over = superblock.left_over.without(&planned.partitions);
        };
        if let Err(failure) = self.change_superblock(to, of_destination).await {
            // It may have the map nevertheless: a later one overrules it.
            let overrule = |superblock: &mut SpanSuperblock| {
                (superblock.map, superblock.map_number) = (old_map, number + 1);
                if usize::from(superblock.device.index) == planned.from {
                    superblock.left_over = superblock.left_over.without(&planned.partitions);
                }
            };
            let mut is_overruled = true;
            for device in (0..self.devices()).filter(|&device| device != planned.to) {
                if let Ok(placed) = self.member(device) {
                    is_overruled &= self.change_superblock(&placed, overrule).await.is_ok();
                }
            }
            return Err(NotMoved { failure, numbers: is_overruled.then_some(2) });
        }
        let of_other = |superblock: &mut SpanSuperblock| {
            (superblock.map, superblock.map_number) = (map, number);
        };
        // Before a write is acknowledged by the map the source has it, which would otherwise overrule it.
        self.change_superblock(from, of_other).await.map_err(undecided)?;
        for device in (0..self.devices()).filter(|device| ![planned.from, planned.to].contains(device)) {
            if let Ok(placed) = self.member(device) {
                // One that fails gets it at the next opening: the others have it.
                let _ = self.change_superblock(&placed, of_other).await;
            }
        }
        Ok(())
    }

    /// Copies all keys of a move to its destination.
    async fn copy_partitions(
        &self,
        moving: &PartitionMove,
        handle: &ReactorHandle,
    ) -> Result<(), MoveFailure> {
        let page_keys = if self.order == ListOrder::Keys { TREE_PAGE_KEYS } else { PAGE_KEYS };
        let map = self.map().map;
        let mut rest = Some(RingRange::FULL);
        while let Some(range) = rest {
            let from = self.member(moving.planned.from)?;
            let mut page = Vec::new();
            let mut collect = |entry: &ScanEntry<'_>| {
                let has_space = page.len() < page_keys;
                if has_space && moving.planned.partitions.has(map.partition_of(entry.position)) {
                    let key = Key::new(entry.key).expect("a key of the volume");
                    // If it is deleted until it is copied, its version stays as that of a tombstone.
                    page.push((key, entry.position, entry.version));
                }
                has_space
            };
            let scanned = from.engine().scan(range, Version::NONE, &mut collect).await;
            scanned.map_err(|error| from.engine_error(error))?;
            rest = match page.last() {
                Some((_, last, _)) if page.len() == page_keys && *last < range.last() => {
                    RingRange::new(RingPosition(last.0 + 1), range.last())
                }
                _ => None,
            };
            for some in page.chunks(KEYS_AT_ONCE) {
                let copies = some.iter().map(|(key, position, tombstone)| async {
                    let copied = self.copy_locked(moving, (key, *position, *tombstone), handle).await;
                    let partition = map.partition_of(*position);
                    copied.map_err(|error| match error {
                        EngineError::Corrupt { .. } => MoveFailure::Unreadable(partition, error),
                        error => MoveFailure::Engine(error),
                    })
                });
                let mut bytes = 0;
                for copied in join_all(copies).await {
                    match copied? {
                        CopyOutcome::Copied(of_value) => bytes += OPERATION_BYTES + of_value as u64,
                        CopyOutcome::Refused => return Err(MoveFailure::Full(moving.planned.to)),
                    }
                }
                if moving.has_failed() {
                    return Err(MoveFailure::Broken);
                }
                self.pace(bytes, handle).await;
            }
        }
        Ok(())
    }

    async fn copy_locked(
        &self,
        moving: &PartitionMove,
        (key, position, tombstone): (&Key, RingPosition, Version),
        handle: &ReactorHandle,
    ) -> Result<CopyOutcome, EngineError> {
        let mut tries = 0;
        loop {
            let copied = {
                let _exclusive = match bug_injection::is_injected(InjectedBug::MoveCopyUnlocked) {
                    true => None,
                    false => Some(moving.exclude(position).await),
                };
                self.copy_key(moving, key, tombstone).await
            };
            tries += 1;
            match copied {
                Err(EngineError::NoMemory) if tries < MEMORY_TRIES => handle.sleep(OPERATIONS_PERIOD).await,
                copied => return copied,
            }
        }
    }

    /// Deletes the keys of partitions of other devices that a device has. REQUIRES: none of these partitions moves.
    async fn delete_left_over(
        &self,
        device: usize,
        set: PartitionSet,
        handle: &ReactorHandle,
    ) -> Result<(), MoveFailure> {
        let placed = self.member(device)?;
        let (map, seed) = (self.map().map, self.hash_seed());
        let is_wanted = |key: &[u8]| set.has(map.partition_of(RingPosition::of_bytes(key, seed)));
        let mut start = Key::new(b"").expect("it is short enough");
        loop {
            let mut keys = Vec::new();
            let mut page = |key: &[u8]| {
                let has_space = keys.len() < PAGE_KEYS;
                if has_space && is_wanted(key) {
                    keys.push(Key::new(key).expect("a key of the volume"));
                }
                has_space
            };
            let listed = placed.engine().list(&start, &mut page).await;
            listed.map_err(|error| placed.engine_error(error))?;
            for some in keys.chunks(KEYS_AT_ONCE) {
                let deletes = some.iter().map(|key| placed.engine().delete_with(key, Version::NONE));
                for deleted in join_all(deletes).await {
                    deleted.map_err(|error| placed.engine_error(error))?;
                }
                self.pace(OPERATION_BYTES * some.len() as u64, handle).await;
            }
            match keys.pop() {
                Some(last) if keys.len() + 1 == PAGE_KEYS => start = last,
                _ => break,
            }
        }
        // It fails if the device has become read-only: a put that failed may be on it, and then the next opening lists its key.
        let flushed = placed.engine().flush().await;
        flushed.map_err(|error| placed.engine_error(error))?;
        let _turn = self.shared.structure.exclude().await;
        let clear =
            |superblock: &mut SpanSuperblock| superblock.left_over = superblock.left_over.without(&set);
        self.change_superblock(&placed, clear).await?;
        self.shared.map.publish(|state| state.left_over[device] = state.left_over[device].without(&set));
        Ok(())
    }

    /// Sleeps for as long as so many bytes may take.
    async fn pace(&self, bytes: u64, handle: &ReactorHandle) {
        let per_second = self.shared.move_bytes_per_second;
        handle.sleep(Nanos(bytes.saturating_mul(1_000_000_000) / per_second)).await;
    }
}

/// The map of a move was not written.
struct NotMoved {
    failure: MoveFailure,
    /// By how many the number of the map has grown nevertheless; `None` if it is not known whether the destination has the map.
    numbers: Option<u32>,
}
