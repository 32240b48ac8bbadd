//! Operations on a volume with swap regions: puts of an overloaded device are stored in the region of another, and merged back.
//!
//! ```text
//!   put, swapped     put not long ago ─▶ status at home (first time) ─▶ superblock of home notes partition and device (first time) ─▶ record in the region ─▶ acknowledged
//!   get              swapped ─▶ region; otherwise home
//!   merge            record read ─▶ stored at home ─▶ removed from the region ─▶ key is not swapped
//!   deletes, conditions, expiry, a region without space: merge, then at home
//! ```
//! In: operations on keys. Out: what the contract says of them, wherever the newest value is. Invariants: a record in a region is newer than what home has, or the same, until its removal is durable, but for what a write that failed left at home;
//! keys that home does not have are not swapped, so that home lists them all. What a crash, or a caller that drops an operation, leaves in a region is
//! of a write that was not acknowledged, or equal to what home has.
//! Tested in `tests/spanned_swap.rs` and `tests/spanned_swap_failures.rs`, and by the scenario `devices` of the simulator.

use super::core::{CoreMap, KeyPlace, SpannedCore, admitted};
use super::devices::rewrite_superblock;
use super::guest_region::GuestRegion;
use super::places::absent;
use super::swap_region::SwappedVersions;
use super::swapped_keys::{SwappedKey, SwappedKeys};
use crate::bug_injection::{self, InjectedBug};
use crate::common::shared_lock::SharedLockGuard;
use crate::common::write_rules::{KnownKey, decide_put};
use crate::{
    DeleteOutcome, Engine, EngineError, KeyStatus, PutMode, PutOptions, PutOutcome, PutValue, StoredValue,
    ValueRange,
};
use octokv_base::{Buffer, Key, Nanos, RecordLayout, RingPosition, UnixTime, Version};
use octokv_runtime::{ReactorHandle, yield_now};
use octokv_sched::CostKind;
use std::future::poll_fn;
use std::rc::Rc;
use std::task::Poll;

/// The time between two looks for idle home devices.
const MERGE_PERIOD: Nanos = Nanos::from_millis(10);

/// A key on a volume with regions, with the map that its operation has from its begin to its end.
pub(super) struct PlacedKey<'a> {
    swaps: &'a SwappedKeys,
    key: &'a Key,
    map: Rc<CoreMap>,
    position: RingPosition,
    home: usize,
}

impl<'a> PlacedKey<'a> {
    fn new(swaps: &'a SwappedKeys, key: &'a Key, place: KeyPlace) -> PlacedKey<'a> {
        let KeyPlace { map, position, device: home } = place;
        PlacedKey { swaps, key, map, position, home }
    }

    pub fn partition(&self) -> usize {
        self.map.map.partition_of(self.position)
    }

    /// Whether puts of the key, which is swapped, go on to the region.
    fn stays_swapped(&self) -> bool {
        self.swaps.stays_swapped(self.home) && !self.is_settling()
    }

    /// Whether the key is not to be swapped, since its partition moves soon.
    fn is_settling(&self) -> bool {
        self.map.settling.has(self.partition()) && !bug_injection::is_injected(InjectedBug::MoveWhileSwapping)
    }

    pub fn swapped(&self) -> Option<SwappedKey> {
        self.swaps.get(self.home, self.key)
    }

    fn set_swapped(&self, swapped: SwappedKey) {
        self.swaps.insert(self.home, self.key.clone(), swapped);
    }

    async fn share(&self) -> SharedLockGuard<'a> {
        self.swaps.share(self.position).await
    }

    pub async fn exclude(&self) -> SharedLockGuard<'a> {
        self.swaps.exclude(self.position).await
    }
}

impl<E: Engine> SpannedCore<E> {
    pub(super) fn placed_key<'a>(&self, swaps: &'a SwappedKeys, key: &'a Key) -> PlacedKey<'a> {
        PlacedKey::new(swaps, key, self.place_of(key))
    }

    /// The handle on a device with its region.
    ///
    /// # Errors
    /// The device is absent, or its region could not be opened.
    fn region(&self, guest: usize) -> Result<GuestRegion<E>, EngineError> {
        let placed = self.member(guest)?;
        match placed.open().swap {
            Some(_) => Ok(GuestRegion { placed, guest }),
            None => Err(absent(guest)),
        }
    }

    /// # Errors
    /// The key may be in a region that was not opened.
    fn check_known(&self, of: &PlacedKey<'_>) -> Result<(), EngineError> {
        match of.swaps.unknown(of.partition()) {
            Some(guest) => Err(absent(guest)),
            None => Ok(()),
        }
    }

    /// The device whose region is to have a put of a key, if it is to be swapped.
    fn guest_for(&self, of: &PlacedKey<'_>) -> Option<usize> {
        let is_writable = |&device: &usize| self.region(device).is_ok_and(|region| region.is_writable());
        // A core that has no handle on an added device yet could not read the key there.
        let devices = (0..self.shared.map.common_devices()).filter(is_writable);
        if of.is_settling() { None } else { of.swaps.guest_for(of.home, devices) }
    }

    /// An operation on the volume of a key's home, by the tokens of its device.
    async fn at_home<T>(
        &self,
        of: &PlacedKey<'_>,
        command: (CostKind, usize),
        operation: impl AsyncFnOnce(&E) -> Result<T, EngineError>,
    ) -> Result<T, EngineError> {
        let placed = self.member(of.home)?;
        let running = operation(placed.engine());
        let outcome = admitted((&placed, of.home), command, running, |_| command.1).await;
        outcome.map_err(|error| placed.engine_error(error))
    }

    /// Flushes the home of a key.
    async fn flush_home(&self, of: &PlacedKey<'_>) -> Result<(), EngineError> {
        let placed = self.member(of.home)?;
        placed.engine().flush().await.map_err(|error| placed.engine_error(error))
    }

    /// [`Engine::put_with`].
    ///
    /// # Errors
    /// As there.
    ///
    /// # Panics
    /// On a volume without swap regions.
    pub(super) async fn put_swapping(
        &self,
        (place, key): (KeyPlace, &Key),
        value: PutValue,
        options: PutOptions,
    ) -> Result<PutOutcome, EngineError> {
        let (bytes, swaps) = (key.len() + value.bytes, self.swaps().expect("the volume has regions"));
        let of = PlacedKey::new(swaps, key, place);
        let outcome = self.put_placed(&of, value, options).await?;
        if outcome == PutOutcome::Stored {
            self.any_member(of.home).traffic.note_put(bytes);
        }
        Ok(outcome)
    }

    async fn put_placed(
        &self,
        of: &PlacedKey<'_>,
        value: PutValue,
        options: PutOptions,
    ) -> Result<PutOutcome, EngineError> {
        let (swaps, key) = (of.swaps, of.key);
        self.check_known(of)?;
        let of_home = self.member(of.home)?;
        let layout = of_home.engine().record_layout();
        let may_swap = options.mode == PutMode::Upsert
            && options.expires_at == UnixTime::NEVER
            && has_whole_value(&value, layout.value_offset(key.len()));
        let is_frequent = may_swap && swaps.note_put(of.home, of.position);
        let put_home = async |value: PutValue, options| {
            let command = (CostKind::Put, value.bytes);
            self.at_home(of, command, async |engine| engine.put_with(key, value, options).await).await
        };
        // Whether the put may be the first one of its key that is swapped.
        let mut may_begin = is_frequent;
        let mut has_waited = false;
        loop {
            let command = swaps.begin(of.home);
            let shared = of.share().await;
            let is_swapped = match of.swapped() {
                None if !may_begin || self.guest_for(of).is_none() => {
                    return put_home(value, options).await;
                }
                Some(swapped)
                    if may_swap
                        && options.version.max(swapped.versions.version) == Version::NONE
                        && of.stays_swapped() =>
                {
                    drop(command);
                    let region = self.region(swapped.guest.into())?;
                    let _command = swaps.begin(region.guest);
                    if region.put(key, swapped.versions, (&value, layout)).await? == PutOutcome::Stored {
                        swaps.acknowledge(of.home, key);
                        swaps.note_swapped(of.home);
                        return Ok(PutOutcome::Stored);
                    }
                    true
                }
                swapped => {
                    drop(command);
                    swapped.is_some()
                }
            };
            drop(shared);
            let exclusive = of.exclude().await;
            // Another put has swapped the key meanwhile: this one shares the lock with those behind it.
            if !is_swapped && of.swapped().is_some() && !has_waited {
                has_waited = true;
                continue;
            }
            if may_swap && let Some(outcome) = self.swap(of, (&value, layout), &options).await? {
                return Ok(outcome);
            }
            let _command = swaps.begin(of.home);
            let Some(swapped) = of.swapped() else {
                // It cannot be swapped now: the puts of a hot key that wait would go one after another.
                may_begin = false;
                drop(exclusive);
                continue;
            };
            if !self.merge(of, swapped).await? {
                return Ok(PutOutcome::Full);
            }
            return put_home(value, options).await;
        }
    }

    /// Stores a value in a region, that of `value`'s key if it has one. `None` if it belongs at home. REQUIRES: the key's exclusive lock.
    ///
    /// # Errors
    /// A device failed. The value may be stored.
    async fn swap(
        &self,
        of: &PlacedKey<'_>,
        value: (&PutValue, RecordLayout),
        options: &PutOptions,
    ) -> Result<Option<PutOutcome>, EngineError> {
        let before = of.swapped();
        let (guest, versions) = match before {
            Some(swapped) if of.stays_swapped() => (usize::from(swapped.guest), swapped.versions),
            Some(_) => return Ok(None),
            None => {
                let Some(guest) = self.guest_for(of) else { return Ok(None) };
                let status =
                    self.at_home(of, (CostKind::Get, 0), async |engine| engine.status(of.key).await).await?;
                let Some(status) = status.filter(|status| status.expires_at == UnixTime::NEVER) else {
                    return Ok(None);
                };
                if has_only_old_version(status.version, options) {
                    return Ok(None);
                }
                if self.note_guest(of, guest).await.is_err() {
                    return Ok(None);
                }
                if of.swaps.flushes_home() {
                    // Home lists a swapped key by its older value, which a power loss must not undo.
                    self.flush_home(of).await?;
                }
                (guest, SwappedVersions { version: status.version, at_home: status.version })
            }
        };
        let known = KnownKey { version: versions.version, exists: true };
        let stored = match decide_put(known, options) {
            Ok(_) if has_only_old_version(versions.version, options) => return Ok(None),
            Ok(meta) => SwappedVersions { version: meta.version, ..versions },
            Err(outcome) => return Ok(Some(outcome)),
        };
        let region = self.region(guest)?;
        // If this put fails, its caller may repeat it with the same version: the key keeps the old version until the put is stored.
        let is_acknowledged = before.is_some_and(|swapped| swapped.is_acknowledged);
        let swapped = SwappedKey { guest: guest as u8, versions, is_acknowledged };
        of.set_swapped(swapped);
        let _command = of.swaps.begin(guest);
        match region.put(of.key, stored, value).await? {
            PutOutcome::Stored => {
                of.set_swapped(SwappedKey { versions: stored, is_acknowledged: true, ..swapped });
                of.swaps.note_swapped(of.home);
                Ok(Some(PutOutcome::Stored))
            }
            _ => {
                match before {
                    Some(swapped) => of.set_swapped(swapped),
                    None => of.swaps.remove(of.home, of.key),
                }
                Ok(None)
            }
        }
    }

    /// Notes in the superblock of a key's home that keys of its partition may be in the region of `guest`, if it does not say so.
    ///
    /// # Errors
    /// The home device failed; superblocks are being written, or a write of one was dropped before.
    async fn note_guest(&self, of: &PlacedKey<'_>, guest: usize) -> Result<(), EngineError> {
        let partition = of.partition();
        if of.swaps.notes(of.home).has(partition, guest) {
            return Ok(());
        }
        // A replacement writes superblocks, and waits for locks of keys meanwhile.
        let Some(_turn) = of.swaps.superblocks.try_exclude() else { return Err(absent(of.home)) };
        let mut notes = of.swaps.notes(of.home);
        notes.add(partition, guest);
        let placed = self.member(of.home)?;
        if !of.swaps.may_note() {
            return Err(absent(of.home));
        }
        let in_flight = of.swaps.begin_note();
        let written = rewrite_superblock(&*placed.open().whole, |changed| changed.swaps = notes).await;
        in_flight.end();
        written.map_err(|_| absent(of.home))?;
        of.swaps.set_notes(of.home, notes);
        Ok(())
    }

    /// Stores the value of a swapped key at its home, and removes it from the region. Returns whether home had space for it. REQUIRES: the key's exclusive lock.
    ///
    /// # Errors
    /// A device failed; the key is still swapped.
    pub(super) async fn merge(&self, of: &PlacedKey<'_>, swapped: SwappedKey) -> Result<bool, EngineError> {
        let region = self.region(swapped.guest.into())?;
        let _merge = of.swaps.begin_merge();
        // None if the put that was to write it ended without.
        if let Some((versions, value)) = region.get(of.key, ValueRange::ALL).await? {
            // It could not be removed from the region.
            if !region.is_writable() {
                return Err(EngineError::ReadOnly);
            }
            if bug_injection::is_injected(InjectedBug::SwapRemoveFirst) {
                region.remove(of.key).await?;
            }
            let put = async |options: PutOptions| {
                let command = (CostKind::Put, value.as_bytes().len());
                self.at_home(of, command, async |engine| {
                    let value = home_value(engine.record_layout(), of.key, &value);
                    engine.put_with(of.key, value, options).await
                })
                .await
            };
            let mut outcome = put(merge_options(versions)).await?;
            if let PutOutcome::OtherVersion(found) | PutOutcome::NotNewer(found) = outcome
                && let Some(options) = versions.options_over(found)
            {
                outcome = put(options).await?;
            }
            if outcome == PutOutcome::Full {
                return Ok(false);
            }
        }
        self.remove_record(of, swapped).await?;
        of.swaps.note_merged(of.home);
        Ok(true)
    }

    /// [`Engine::get_range`].
    ///
    /// # Errors
    /// As there.
    pub(super) async fn get_swapping(
        &self,
        swaps: &SwappedKeys,
        key: &Key,
        range: ValueRange,
    ) -> Result<Option<StoredValue>, EngineError> {
        let from_home = async |engine: &E| engine.get_range(key, range).await;
        self.read_swapping(swaps, key, range, from_home, |value| value).await
    }

    /// [`Engine::status`].
    ///
    /// # Errors
    /// As there.
    pub(super) async fn status_swapping(
        &self,
        swaps: &SwappedKeys,
        key: &Key,
    ) -> Result<Option<KeyStatus>, EngineError> {
        let nothing = ValueRange { offset: 0, bytes_max: 0 };
        let status = |value: StoredValue| KeyStatus {
            value_bytes: value.value_bytes as usize,
            version: value.version,
            expires_at: value.expires_at,
        };
        self.read_swapping(swaps, key, nothing, async |engine| engine.status(key).await, status).await
    }

    /// Reads a key where its newest value is.
    async fn read_swapping<T>(
        &self,
        swaps: &SwappedKeys,
        key: &Key,
        range: ValueRange,
        from_home: impl AsyncFn(&E) -> Result<Option<T>, EngineError>,
        from_region: impl Fn(StoredValue) -> T,
    ) -> Result<Option<T>, EngineError> {
        let of = self.placed_key(swaps, key);
        self.check_known(&of)?;
        let swapped = of.swapped().filter(|_| !bug_injection::is_injected(InjectedBug::SwapReadHome));
        let Some(swapped) = swapped else {
            let _command = swaps.begin(of.home);
            return self.at_home(&of, (CostKind::Get, 0), &from_home).await;
        };
        if let Some(value) = self.get_in_region(&of, swapped, range).await? {
            return Ok(Some(from_region(value)));
        }
        // It is being merged, or the put that was to write it ended without.
        let _exclusive = of.exclude().await;
        if let Some(swapped) = of.swapped()
            && let Some(value) = self.get_in_region(&of, swapped, range).await?
        {
            return Ok(Some(from_region(value)));
        }
        self.at_home(&of, (CostKind::Get, 0), &from_home).await
    }

    async fn get_in_region(
        &self,
        of: &PlacedKey<'_>,
        swapped: SwappedKey,
        range: ValueRange,
    ) -> Result<Option<StoredValue>, EngineError> {
        let region = self.region(swapped.guest.into())?;
        let _command = of.swaps.begin(region.guest);
        Ok(region.get(of.key, range).await?.map(|(_, value)| value))
    }

    /// [`Engine::delete_with`].
    ///
    /// # Errors
    /// As there.
    ///
    /// # Panics
    /// On a volume without swap regions.
    pub(super) async fn delete_swapping(
        &self,
        (place, key): (KeyPlace, &Key),
        version: Version,
    ) -> Result<DeleteOutcome, EngineError> {
        let swaps = self.swaps().expect("the volume has regions");
        let of = PlacedKey::new(swaps, key, place);
        self.check_known(&of)?;
        let _command = swaps.begin(of.home);
        let delete_home = async |version| {
            let delete = async |engine: &E| engine.delete_with(key, version).await;
            self.at_home(&of, (CostKind::Delete, 0), delete).await
        };
        let shared = of.share().await;
        if of.swapped().is_none() {
            return delete_home(version).await;
        }
        drop(shared);
        let _exclusive = of.exclude().await;
        let Some(swapped) = of.swapped() else { return delete_home(version).await };
        if self.merge(&of, swapped).await? {
            return delete_home(version).await;
        }
        // A full home deletes its older value.
        if version > Version::NONE && version <= swapped.versions.version {
            return Ok(DeleteOutcome::NotNewer(swapped.versions.version));
        }
        let mut outcome = delete_home(merge_options(swapped.versions).version).await?;
        // Home may have that version of an earlier merge, or a later one of a write that failed.
        if matches!(outcome, DeleteOutcome::NotNewer(found) if version == Version::NONE || version > found) {
            outcome = delete_home(Version::NONE).await?;
        }
        self.remove_record(&of, swapped).await?;
        // Only now: the next merge would not know a version that home has from one that was put over the record.
        if version > Version::NONE && !matches!(outcome, DeleteOutcome::NotNewer(_)) {
            delete_home(version).await?;
        }
        Ok(outcome)
    }

    /// Removes the record of a key from its region when what home has is durable. REQUIRES: the key's exclusive lock.
    ///
    /// # Errors
    /// A device failed; the key is still swapped.
    async fn remove_record(&self, of: &PlacedKey<'_>, swapped: SwappedKey) -> Result<(), EngineError> {
        let region = self.region(swapped.guest.into())?;
        if of.swaps.flushes_home() {
            self.flush_home(of).await?;
        }
        // From here on nothing is lost with the region.
        of.set_swapped(SwappedKey { is_acknowledged: false, ..swapped });
        if !bug_injection::is_injected(InjectedBug::SwapLeaveRecord) {
            region.remove(of.key).await?;
        }
        if of.swaps.flushes_home() {
            // A later delete at home must not survive without the removal.
            region.flush().await?;
        }
        of.swaps.remove(of.home, of.key);
        Ok(())
    }

    /// Flushes the regions of the devices that serve.
    ///
    /// # Errors
    /// Of the first device that failed.
    pub(super) async fn flush_regions(&self) -> Result<(), EngineError> {
        for guest in 0..self.devices() {
            if let Ok(region) = self.region(guest) {
                region.flush().await?;
            }
        }
        Ok(())
    }

    /// Whether the value of a key is newer than the one that its home had when there had been so many `removals`, or may be.
    ///
    /// # Errors
    /// The key may be in a region that was not opened.
    pub(super) fn may_be_newer(
        &self,
        swaps: &SwappedKeys,
        key: &Key,
        removals: u64,
    ) -> Result<bool, EngineError> {
        let of = self.placed_key(swaps, key);
        self.check_known(&of)?;
        Ok(of.swapped().is_some() || swaps.removals() != removals)
    }

    /// Merges the keys of home devices that are nearly idle; never ends.
    pub(super) async fn merge_when_idle(&self, swaps: &SwappedKeys, handle: &ReactorHandle) {
        loop {
            poll_fn(|context| match swaps.is_empty_or_wake(context.waker()) {
                true => Poll::Pending,
                false => Poll::Ready(()),
            })
            .await;
            handle.sleep(MERGE_PERIOD).await;
            for home in 0..self.devices() {
                self.merge_home(swaps, home).await;
            }
        }
    }

    /// Merges keys of a home device as long as it is nearly idle and not full. Those in a region that fails stay there; so do all if the home fails.
    async fn merge_home(&self, swaps: &SwappedKeys, home: usize) {
        let (mut behind, mut failed) = (None, 0_u64);
        while swaps.is_idle(home)
            && let Some(key) = swaps.next(home, behind.as_ref())
        {
            let of = self.placed_key(swaps, &key);
            if of.swapped().is_some_and(|swapped| failed >> swapped.guest & 1 != 0) {
                // There may be many.
                yield_now().await;
                behind = Some(key);
                continue;
            }
            let exclusive = of.exclude().await;
            if let Some(swapped) = of.swapped() {
                match self.merge(&of, swapped).await {
                    Ok(true) => {}
                    Ok(false) => return,
                    Err(_) => failed |= 1 << swapped.guest,
                }
            }
            drop(exclusive);
            behind = Some(key);
        }
    }
}

/// Whether a put without a version would get that of its key: of two values of one version it would not be known which is newer.
fn has_only_old_version(of_key: Version, options: &PutOptions) -> bool {
    options.version == Version::NONE && of_key > Version::NONE
}

/// Whether the buffers of a put have its whole value, which begins at `offset` in the first one.
fn has_whole_value(value: &PutValue, offset: usize) -> bool {
    let more: usize = value.more.iter().flatten().map(|buffer| buffer.len()).sum();
    value.record.len() >= offset && value.record.len() - offset + more >= value.bytes
}

/// The value of a record as home stores it.
pub(super) fn home_value(layout: RecordLayout, key: &Key, value: &StoredValue) -> PutValue {
    let (at, bytes) = (layout.value_offset(key.len()), value.as_bytes());
    let mut record = Buffer::zeroed(at + bytes.len());
    record[at..].copy_from_slice(bytes);
    PutValue::new(record, bytes.len())
}

/// How the value of a record is stored at home: if home still has the version that it had when the key was swapped.
fn merge_options(versions: SwappedVersions) -> PutOptions {
    let SwappedVersions { version, at_home } = versions;
    let version = if version > at_home { version } else { Version::NONE };
    PutOptions { mode: PutMode::IfVersion(at_home), version, expires_at: UnixTime::NEVER }
}
