//! Which keys have their newest values in the swap regions of other devices, and what decides that.
//!
//! ```text
//!   put without condition or expiry ─▶ key put not long ago ─▶ home device has many more commands in flight than another ─▶ swapped: stored in the region of that one
//!   home device nearly idle         ─▶ merged back: stored at home, then removed from the region
//! ```
//! In: the commands in flight of each device, and swaps as they happen. Out: the device that holds a key's newest value. Shared by the handles of all cores.
//! Invariants: a key that may have a record in a region is here before the record is written, and until its removal is durable; the superblock of
//! its home says so before, by the key's partition and the region's device.
//!
//! Locks of keys: writes of a key at its home, and those of a swapped key in its region, share the lock; a key is swapped and merged under an exclusive one,
//! as what decides on versions needs. Tested below and in `tests/spanned_swap.rs`.

use super::partition_map::SPAN_DEVICES_MAX;
use super::partition_set::{PartitionSet, SPAN_PARTITIONS};
use super::swap_notes::SwapNotes;
use super::swap_region::SwappedVersions;
use crate::common::shared_lock::{SharedLock, SharedLockGuard};
use crate::{Durability, SwapReport};
use octokv_base::{Key, RingPosition};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::task::Waker;

/// The locks of keys: several keys share one.
const LOCKS: usize = 1 << 12;
/// The puts of a home device that are remembered, at most one for each slot: a key is swapped if its last one is.
const RECENT_PUTS: usize = 1 << 12;
/// The most swapped keys of a home device: about 100 bytes of memory each, and as many reads at an opening.
const SWAPPED_KEYS_MAX: usize = 1 << 16;

/// A key whose newest value may be in a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SwappedKey {
    /// The device of the region.
    pub guest: u8,
    pub versions: SwappedVersions,
    /// Whether the region may have a value that home lacks. Otherwise no put to the region was acknowledged, or home has its value.
    pub is_acknowledged: bool,
}

/// The swapping of one home device.
struct HomeDevice {
    /// The commands in flight: active or waiting.
    in_flight: AtomicU32,
    /// The last put of each slot, by a part of its key's position; 0 for none.
    recent_puts: Box<[AtomicU32]>,
    keys: Mutex<BTreeMap<Key, SwappedKey>>,
    swapped: AtomicU64,
    merged: AtomicU64,
}

impl HomeDevice {
    fn new() -> HomeDevice {
        HomeDevice {
            in_flight: AtomicU32::new(0),
            recent_puts: (0..RECENT_PUTS).map(|_| AtomicU32::new(0)).collect(),
            keys: Mutex::default(),
            swapped: AtomicU64::new(0),
            merged: AtomicU64::new(0),
        }
    }
}

/// See the module header.
pub(super) struct SwappedKeys {
    /// By the indices of the devices, as far as they were used.
    homes: Box<[OnceLock<HomeDevice>]>,
    /// Those of all devices.
    count: AtomicUsize,
    /// How many keys are swapped no more.
    removals: AtomicU64,
    locks: Box<[SharedLock]>,
    notes: Mutex<Vec<SwapNotes>>,
    /// Taken to write a superblock.
    pub superblocks: SharedLock,
    /// By partition the devices whose regions may have keys of it, and were not opened.
    unknown: Mutex<Box<[u64; SPAN_PARTITIONS]>>,
    has_unknown: AtomicBool,
    /// Woken when a key is swapped.
    mergers: Mutex<Vec<Waker>>,
    /// Whether a caller dropped an operation while it wrote a superblock.
    is_note_dropped: AtomicBool,
    /// The merges that are running.
    merging: AtomicUsize,
    /// Whether writes are acknowledged before they are durable.
    flushes_home: bool,
    /// How many more commands in flight than another a device has before its puts are swapped.
    gap: u32,
}

/// Counts a merge until it is dropped.
pub(super) struct SwapMerge<'a>(&'a AtomicUsize);

impl Drop for SwapMerge<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Counts a command of a device until it is dropped.
pub(super) struct CommandInFlight<'a>(&'a AtomicU32);

impl Drop for CommandInFlight<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A write of a superblock, which its caller may drop.
pub(super) struct SwapNoteInFlight<'a>(&'a AtomicBool);

impl SwapNoteInFlight<'_> {
    /// The write has ended.
    pub fn end(self) {
        std::mem::forget(self);
    }
}

impl Drop for SwapNoteInFlight<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

impl SwappedKeys {
    /// No swapped keys.
    pub fn new(gap: u32, durability: Durability) -> SwappedKeys {
        SwappedKeys {
            homes: (0..SPAN_DEVICES_MAX).map(|_| OnceLock::new()).collect(),
            count: AtomicUsize::new(0),
            removals: AtomicU64::new(0),
            locks: (0..LOCKS).map(|_| SharedLock::default()).collect(),
            notes: Mutex::new(vec![SwapNotes::default(); SPAN_DEVICES_MAX]),
            superblocks: SharedLock::default(),
            unknown: Mutex::new(Box::new([0; SPAN_PARTITIONS])),
            has_unknown: AtomicBool::new(false),
            mergers: Mutex::default(),
            is_note_dropped: AtomicBool::new(false),
            merging: AtomicUsize::new(0),
            flushes_home: durability == Durability::Completed,
            gap,
        }
    }

    #[inline]
    fn home(&self, device: usize) -> &HomeDevice {
        self.homes[device].get_or_init(HomeDevice::new)
    }

    fn lock_of(&self, position: RingPosition) -> &SharedLock {
        // The highest bits: the lowest are the partition.
        &self.locks[(position.0 >> 64) as usize % LOCKS]
    }

    /// The lock of a key for a write that others of the key may run beside.
    pub async fn share(&self, position: RingPosition) -> SharedLockGuard<'_> {
        self.lock_of(position).share().await
    }

    /// The lock of a key for what changes where its newest value is.
    pub async fn exclude(&self, position: RingPosition) -> SharedLockGuard<'_> {
        self.lock_of(position).exclude().await
    }

    /// Counts a merge.
    pub fn begin_merge(&self) -> SwapMerge<'_> {
        self.merging.fetch_add(1, Ordering::SeqCst);
        SwapMerge(&self.merging)
    }

    /// Whether a merge runs.
    pub fn is_merging(&self) -> bool {
        self.merging.load(Ordering::SeqCst) > 0
    }

    /// Whether home has to be flushed before a record is removed: a power loss could undo the write there, and not the removal.
    pub fn flushes_home(&self) -> bool {
        self.flushes_home
    }

    /// Counts a command of a device.
    pub fn begin(&self, device: usize) -> CommandInFlight<'_> {
        let in_flight = &self.home(device).in_flight;
        in_flight.fetch_add(1, Ordering::Relaxed);
        CommandInFlight(in_flight)
    }

    fn in_flight(&self, device: usize) -> u32 {
        self.home(device).in_flight.load(Ordering::Relaxed)
    }

    /// Of these devices the one whose region is to have a put of a key of `home`: that with the fewest commands in flight, if `home` has so many more. `None`
    /// if the put belongs at home.
    pub fn guest_for(&self, home: usize, devices: impl Iterator<Item = usize>) -> Option<usize> {
        let guest = devices.filter(|&device| device != home).min_by_key(|&device| self.in_flight(device))?;
        let is_overloaded = self.in_flight(home) >= self.in_flight(guest).saturating_add(self.gap);
        (is_overloaded && self.home(home).keys.lock().len() < SWAPPED_KEYS_MAX).then_some(guest)
    }

    /// Notes a put, and returns whether its key is put often enough to be swapped: the first swap of a key costs its home a read, which only later puts
    /// of it repay. So it is if the key's last put is remembered, which one in [`RECENT_PUTS`] others replaces; without a gap any key is.
    pub fn note_put(&self, home: usize, position: RingPosition) -> bool {
        // Behind the byte of the partition.
        let (slot, tag) = ((position.0 >> 8) as usize % RECENT_PUTS, (position.0 >> 32) as u32 | 1);
        let last = self.home(home).recent_puts[slot].swap(tag, Ordering::Relaxed);
        last == tag || self.gap == 0
    }

    /// Whether a device has so few commands in flight that its keys are merged back.
    pub fn is_idle(&self, home: usize) -> bool {
        self.in_flight(home) <= self.gap / 8
    }

    /// Whether puts of a swapped key go on to its region.
    pub fn stays_swapped(&self, home: usize) -> bool {
        // The put itself is one of the commands.
        self.in_flight(home) > self.gap / 8 + u32::from(self.gap > 0)
    }

    /// Where the newest value of a key may be, if not at its home.
    pub fn get(&self, home: usize, key: &Key) -> Option<SwappedKey> {
        if self.count.load(Ordering::Acquire) == 0 {
            return None;
        }
        self.home(home).keys.lock().get(key).copied()
    }

    /// Sets that. REQUIRES: the exclusive lock of the key, unless no handle serves yet.
    pub fn insert(&self, home: usize, key: Key, swapped: SwappedKey) {
        let is_new = self.home(home).keys.lock().insert(key, swapped).is_none();
        if is_new && self.count.fetch_add(1, Ordering::AcqRel) == 0 {
            self.mergers.lock().drain(..).for_each(Waker::wake);
        }
    }

    /// A put to the region of a swapped key was acknowledged. REQUIRES: a lock of the key.
    pub fn acknowledge(&self, home: usize, key: &Key) {
        if let Some(swapped) = self.home(home).keys.lock().get_mut(key) {
            swapped.is_acknowledged = true;
        }
    }

    /// The newest value of a key is at its home. REQUIRES: the exclusive lock of the key.
    pub fn remove(&self, home: usize, key: &Key) {
        let mut keys = self.home(home).keys.lock();
        // Before the key is found missing.
        self.removals.fetch_add(1, Ordering::AcqRel);
        if keys.remove(key).is_some() {
            self.count.fetch_sub(1, Ordering::AcqRel);
        }
    }

    /// Changes whenever the newest value of a swapped key is at its home from then on: one that was read there before may be older, if [`SwappedKeys::get`] finds the key no more.
    pub fn removals(&self) -> u64 {
        self.removals.load(Ordering::Acquire)
    }

    /// Waits for the operations that hold a lock of a key now.
    pub async fn drain_locks(&self) {
        for lock in &self.locks {
            lock.exclude().await;
        }
    }

    /// Forgets the keys and notes of a region whose device was replaced: reads of these keys go to their homes.
    pub fn forget_guest(&self, guest: usize) {
        for home in self.homes.iter().filter_map(OnceLock::get) {
            let mut keys = home.keys.lock();
            self.removals.fetch_add(1, Ordering::AcqRel);
            let before = keys.len();
            keys.retain(|_, swapped| usize::from(swapped.guest) != guest);
            self.count.fetch_sub(before - keys.len(), Ordering::AcqRel);
        }
        self.notes.lock().iter_mut().for_each(|notes| *notes = notes.without(guest));
    }

    /// Marks the region of a device as known but for keys of these partitions, so that other keys which it does not have are read at home. REQUIRES: its keys were
    /// inserted.
    pub fn set_unknown(&self, guest: usize, partitions: &[usize]) {
        let mut unknown = self.unknown.lock();
        unknown.iter_mut().for_each(|guests| *guests &= !(1 << guest));
        partitions.iter().for_each(|&partition| unknown[partition] |= 1 << guest);
        self.has_unknown.store(unknown.iter().any(|&guests| guests != 0), Ordering::Release);
    }

    /// The keys of a home device whose newest values are in the region of `guest`.
    pub fn keys_in(&self, home: usize, guest: usize) -> Vec<Key> {
        let keys = self.home(home).keys.lock();
        let in_guest = keys.iter().filter(|(_, swapped)| usize::from(swapped.guest) == guest);
        in_guest.map(|(key, _)| key.clone()).collect()
    }

    /// The first swapped key of a home device behind another.
    pub fn next(&self, home: usize, behind: Option<&Key>) -> Option<Key> {
        let from = behind.map_or(Bound::Unbounded, Bound::Excluded);
        self.home(home).keys.lock().range((from, Bound::Unbounded)).next().map(|(key, _)| key.clone())
    }

    /// Whether no key is swapped. If none is, the waker is woken when one is.
    pub fn is_empty_or_wake(&self, waker: &Waker) -> bool {
        let mut mergers = self.mergers.lock();
        let is_empty = self.count.load(Ordering::Acquire) == 0;
        if is_empty && !mergers.iter().any(|other| other.will_wake(waker)) {
            mergers.push(waker.clone());
        }
        is_empty
    }

    /// The swapped keys of all devices.
    pub fn count(&self) -> usize {
        self.count.load(Ordering::Acquire)
    }

    pub fn note_swapped(&self, home: usize) {
        self.home(home).swapped.fetch_add(1, Ordering::Relaxed);
    }

    pub fn note_merged(&self, home: usize) {
        self.home(home).merged.fetch_add(1, Ordering::Relaxed);
    }

    pub fn report(&self, home: usize) -> SwapReport {
        let of = &self.home(home);
        SwapReport {
            keys: of.keys.lock().len(),
            swapped: of.swapped.load(Ordering::Relaxed),
            merged: of.merged.load(Ordering::Relaxed),
        }
    }

    /// Whether superblocks may be written: a write that its caller dropped may still arrive, and undo a later one.
    pub fn may_note(&self) -> bool {
        !self.is_note_dropped.load(Ordering::Acquire)
    }

    /// No superblock is written until the next opening, unless [`SwapNoteInFlight::end`] is called.
    pub fn begin_note(&self) -> SwapNoteInFlight<'_> {
        SwapNoteInFlight(&self.is_note_dropped)
    }

    /// What the superblock of a home device says.
    pub fn notes(&self, home: usize) -> SwapNotes {
        self.notes.lock()[home]
    }

    /// Sets what the superblock of a home device says.
    pub fn set_notes(&self, home: usize, notes: SwapNotes) {
        self.notes.lock()[home] = notes;
    }

    /// What a superblock of a home device has to say of its keys here.
    pub fn notes_of_keys(&self, home: usize, partition_of: impl Fn(&Key) -> usize) -> SwapNotes {
        let mut notes = SwapNotes::default();
        for (key, swapped) in &*self.home(home).keys.lock() {
            notes.add(partition_of(key), swapped.guest.into());
        }
        notes
    }

    /// Keys of the partition may be in a region that was not opened.
    pub fn add_unknown(&self, partition: usize, guest: usize) {
        self.unknown.lock()[partition] |= 1 << guest;
        self.has_unknown.store(true, Ordering::Release);
    }

    /// Whether a region was not opened that may have keys.
    pub fn has_unknown(&self) -> bool {
        self.has_unknown.load(Ordering::Acquire)
    }

    /// The partitions with keys that may be in a region which was not opened.
    pub fn unknown_partitions(&self) -> PartitionSet {
        let unknown = self.unknown.lock();
        (0..SPAN_PARTITIONS).filter(|&partition| unknown[partition] != 0).collect()
    }

    /// The device whose region may have a key of the partition, and was not opened.
    pub fn unknown(&self, partition: usize) -> Option<usize> {
        if !self.has_unknown() {
            return None;
        }
        let guests = self.unknown.lock()[partition];
        (guests != 0).then(|| guests.trailing_zeros() as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use octokv_base::Version;

    fn swaps(gap: u32) -> SwappedKeys {
        SwappedKeys::new(gap, Durability::PowerSafe)
    }

    fn key(number: u8) -> Key {
        Key::new(&[number]).expect("short")
    }

    fn swapped(guest: u8) -> SwappedKey {
        let versions = SwappedVersions { version: Version::NONE, at_home: Version::NONE };
        SwappedKey { guest, versions, is_acknowledged: true }
    }

    fn begun(swaps: &SwappedKeys, device: usize, commands: usize) -> Vec<CommandInFlight<'_>> {
        (0..commands).map(|_| swaps.begin(device)).collect()
    }

    #[test]
    fn the_guest_is_the_least_loaded_device_if_home_has_so_many_more_commands() {
        //   want, in flight of each, devices with regions
        let table = [
            (None, [7, 0, 0], vec![0, 1, 2]),
            (Some(1), [8, 0, 0], vec![0, 1, 2]),
            (Some(2), [9, 1, 0], vec![0, 1, 2]),
            (Some(1), [9, 1, 0], vec![0, 1]),
            (None, [9, 2, 0], vec![0, 1]),
            (None, [20, 0, 0], vec![0]),
        ];
        for (want, in_flight, devices) in table {
            let swaps = swaps(8);
            let commands: Vec<_> =
                in_flight.iter().enumerate().map(|(device, &count)| begun(&swaps, device, count)).collect();
            let guest = swaps.guest_for(0, devices.iter().copied());
            assert_eq!(guest, want, "{in_flight:?}, {devices:?}");
            drop(commands);
            assert_eq!(
                swaps.guest_for(0, devices.iter().copied()),
                None,
                "a command that ended counts no more"
            );
        }
        assert_eq!(swaps(0).guest_for(2, 0..3), Some(0), "without a gap every put that can be");
    }

    #[test]
    fn a_key_is_put_often_if_its_last_put_is_remembered() {
        let (often, other, same_slot) =
            (RingPosition(7 << 8), RingPosition(9 << 8), RingPosition(7 << 8 | 1 << 40));
        let of_home = swaps(8);
        //   put, is it of a key that is put often
        let table = [
            (often, false),
            (often, true),
            (other, false),
            (often, true),
            (same_slot, false),
            (often, false),
        ];
        for (at, (position, want)) in table.into_iter().enumerate() {
            assert_eq!(of_home.note_put(1, position), want, "put {at}");
        }
        assert!(!of_home.note_put(2, other), "another home's");
        assert!(swaps(0).note_put(1, often), "without a gap every put is");
    }

    #[test]
    fn puts_of_a_swapped_key_stay_in_the_region_until_home_is_nearly_idle() {
        //   gap, commands of home, idle, stays swapped: the put itself is one of them
        let table = [
            (16, 0, true, false),
            (16, 2, true, false),
            (16, 3, false, false),
            (16, 4, false, true),
            (16, 15, false, true),
            (0, 0, true, false),
            (0, 1, false, true),
        ];
        for (gap, commands, is_idle, stays_swapped) in table {
            let swaps = swaps(gap);
            let _begun = begun(&swaps, 1, commands);
            let is = (swaps.is_idle(1), swaps.stays_swapped(1));
            assert_eq!(is, (is_idle, stays_swapped), "gap {gap}, {commands} commands");
        }
    }

    #[test]
    fn a_region_that_is_given_up_takes_its_keys_and_notes_and_no_others() {
        let swaps = swaps(8);
        swaps.insert(0, key(1), swapped(1));
        swaps.insert(0, key(2), swapped(2));
        swaps.insert(2, key(3), swapped(1));
        let mut notes = SwapNotes::default();
        notes.add(7, 1);
        notes.add(9, 2);
        swaps.set_notes(0, notes);
        let removals = swaps.removals();
        swaps.forget_guest(1);
        assert_eq!((swaps.count(), swaps.get(0, &key(1)), swaps.get(2, &key(3))), (1, None, None));
        assert_ne!(swaps.removals(), removals, "what homes had of them before may be older");
        assert_eq!(swaps.keys_in(0, 2), [key(2)]);
        assert!(!swaps.notes(0).has(7, 1) && swaps.notes(0).has(9, 2));
        swaps.remove(0, &key(2));
        assert_eq!(swaps.count(), 0);
    }

    #[test]
    fn a_partition_is_unknown_until_all_regions_that_may_have_it_are_known() {
        let swaps = swaps(8);
        assert!(!swaps.has_unknown() && swaps.unknown(7).is_none());
        swaps.add_unknown(7, 1);
        swaps.add_unknown(7, 2);
        swaps.add_unknown(8, 1);
        assert_eq!((swaps.unknown(7), swaps.unknown(8), swaps.unknown(9)), (Some(1), Some(1), None));
        swaps.set_unknown(1, &[]);
        assert_eq!((swaps.unknown(7), swaps.unknown(8)), (Some(2), None));
        assert!(swaps.has_unknown());
        swaps.set_unknown(2, &[9]);
        assert_eq!((swaps.unknown(7), swaps.unknown(9)), (None, Some(2)));
        swaps.set_unknown(2, &[]);
        assert!(!swaps.has_unknown() && swaps.unknown(7).is_none());
    }

    #[test]
    fn the_notes_name_the_partitions_of_the_swapped_keys_and_no_write_of_them_follows_a_dropped_one() {
        let swaps = swaps(8);
        swaps.insert(0, key(3), swapped(1));
        swaps.insert(0, key(5), swapped(2));
        swaps.insert(1, key(6), swapped(0));
        let notes = swaps.notes_of_keys(0, |key| key.as_bytes()[0].into());
        assert!(notes.has(3, 1) && notes.has(5, 2));
        assert!(!notes.has(6, 0) && !notes.has(4, 1));
        swaps.begin_note().end();
        assert!(swaps.may_note());
        drop(swaps.begin_note());
        assert!(!swaps.may_note());
    }
}
