//! A volume on several devices: a superblock of the span on each, and behind it a volume of one engine.
//!
//! ```text
//!   device i     ┌ superblocks of the span ┬ a volume of the engine, with the keys of the partitions of device i ┐
//!   format       erased on all ─▶ volumes formatted ─▶ superblocks written, one device after another
//!   open         superblocks read ─▶ devices in the order of their indices ─▶ volumes opened; one that fails is absent
//! ```
//! In: devices in any order. Out: a handle for each core. Invariant: a device that cannot be read takes down its own keys alone.

use super::core::{SpanShared, SpannedCore};
use super::device_queue::DeviceQueue;
use super::devices::{newest_of, places_of, read_superblocks, tell_all};
use super::engine::{SpannedEngine, sum_of};
use super::partition_map::{PartitionMap, SPAN_DEVICES_MAX};
use super::partition_set::{PartitionSet, SPAN_PARTITIONS};
use super::places::{MemberObserver, MemberPlace, OpenMember, OpenRegion, SpannedMember};
use super::ring_merge::ListOrder;
use super::shared_map::{MapState, MoveStage, MovingWrites, SharedMap};
use super::superblock::SpanSuperblock;
use super::swap_notes::SwapNotes;
use super::swap_recovery::{recover_notes, recover_swaps};
use super::swap_region::{
    OpenedRegion, SwapVolume, check_swaps, keys_range, open_region, swap_device, swap_format, swap_place,
};
use super::swapped_keys::SwappedKeys;
use super::traffic::TrafficCounters;
use crate::common::abandoned::AbandonedCount;
use crate::common::superblock::{DeviceOfVolume, SUPERBLOCK_AREA_BYTES, SuperblockError};
use crate::common::superblock_io::{erase_superblocks, write_superblock};
use crate::{
    DeviceLayout, DeviceReport, EngineStatistics, FormatConfig, FormatVersions, HashKind, OpenConfig,
    OpenError, PrefetchPlan, RecordProblem, VerifyFailure, VerifyObserver, VerifyReport, Volume, VolumeInfo,
};
use octokv_base::{BufferPool, Key, Prng, RingPosition, SharedSum};
use octokv_device::Device;
use octokv_device::device_window::DeviceWindow;
use parking_lot::Mutex;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// What moves of partitions may copy, in bytes a second, unless compaction may write less: a tenth of what a device gives.
const MOVE_BYTES_PER_SECOND: u64 = 64 << 20;

/// An open volume on several devices, each with a volume of the kind `V`.
#[derive(Clone)]
pub struct SpannedVolume<V>(Arc<Span<V>>);

/// What handles of all cores share.
pub(super) struct Span<V> {
    /// That of the latest map, with the replacements and the number of devices, when the volume was opened.
    superblock: SpanSuperblock,
    /// Those of the volumes on the devices, but for identifier and size.
    info: VolumeInfo,
    /// By the index of its device in the volume.
    members: Mutex<Vec<Member<V>>>,
    shared: SpanShared,
}

/// The volume on one device.
#[derive(Clone)]
pub(super) struct Member<V> {
    /// The place of its device in the list that the volume was opened with.
    pub given: usize,
    /// How often its device was replaced.
    pub replacements: u8,
    /// Tells the handles of all cores that another takes its place.
    pub is_retired: Arc<AtomicBool>,
    /// What its keys took and gave.
    pub traffic: Arc<TrafficCounters>,
    /// What runs and waits on its device, if it is bounded.
    pub queue: Option<Arc<DeviceQueue>>,
    /// Why it is absent, if it is.
    pub volume: Result<V, OpenError>,
    /// `None` without a swap region, or if it could not be opened.
    pub swap: Option<SwapVolume>,
}

impl<V> Member<V> {
    /// A member that serves unless it is absent.
    pub fn new(
        given: usize,
        replacements: u8,
        config: &OpenConfig,
        (volume, swap): (Result<V, OpenError>, Option<SwapVolume>),
    ) -> Member<V> {
        let queue = config.tokens.map(|costs| Arc::new(DeviceQueue::new(costs, config.clock.clone())));
        Member {
            given,
            replacements,
            is_retired: Arc::default(),
            traffic: Arc::default(),
            queue,
            volume,
            swap,
        }
    }

    /// Whether it was opened, its device works, and no other device may have counted that it was given up.
    pub fn serves(&self, device: &Rc<dyn Device>) -> bool {
        self.volume.is_ok() && device.is_available() && !self.is_retired.load(Ordering::Acquire)
    }

    /// Why it is absent, or serves no more.
    pub fn absence(&self) -> Option<OpenError> {
        let given_up = || OpenError::DeviceGivenUp { at: self.given as u16 };
        let is_retired = self.is_retired.load(Ordering::Acquire);
        self.volume.as_ref().err().copied().or_else(|| is_retired.then(given_up))
    }
}

/// The part of a device behind the superblocks of the span and before its swap region.
pub(super) fn member_device(device: &Rc<dyn Device>, swap_bytes: u64) -> Rc<dyn Device> {
    let range = keys_range(device.geometry().bytes(), swap_bytes);
    Rc::new(DeviceWindow::part(Rc::clone(device), range))
}

/// The part of each of several devices in a limit of all; none stays none.
fn part_of(of_all: u64, devices: usize) -> u64 {
    match of_all {
        u64::MAX => u64::MAX,
        of_all => of_all / devices as u64,
    }
}

/// Formats the volume of a device, and its swap region.
///
/// # Errors
/// As for [`Volume::format`].
pub(super) async fn format_member<V: Volume>(
    device: &Rc<dyn Device>,
    config: &FormatConfig,
) -> Result<(), OpenError> {
    let (have_bytes, reserved) = (device.geometry().bytes(), SUPERBLOCK_AREA_BYTES + config.swap_bytes);
    let formatted = V::format(&[member_device(device, config.swap_bytes)], config).await;
    formatted.map_err(|error| match error {
        // Of the whole device, as its owner sees it.
        OpenError::TooSmall { need_bytes, .. } => {
            OpenError::TooSmall { have_bytes, need_bytes: need_bytes + reserved }
        }
        error => error,
    })?;
    if config.swap_bytes > 0 {
        let region = swap_device(device, config.swap_bytes);
        <SwapVolume as Volume>::format(&[region], &swap_format(config)).await?;
    }
    Ok(())
}

/// Verifies the volume on a part of a device of several, which lies at `place`.
///
/// # Errors
/// As for [`Volume::verify`].
async fn verify_part<P: Volume>(
    (device, place): (u16, MemberPlace),
    part: Rc<dyn Device>,
    pool: &BufferPool,
    observer: &mut dyn VerifyObserver,
) -> Result<VerifyReport, VerifyFailure> {
    let verified = P::verify(&[part], pool, &mut MemberObserver { place, observer }).await;
    let of_part =
        verified.map_err(|failure| VerifyFailure { reason: place.open_error(failure.reason), ..failure })?;
    let placed = |problem: RecordProblem| RecordProblem {
        device: Some(device),
        lba: place.lba(problem.lba),
        ..problem
    };
    let problems = of_part.problems.into_iter().map(placed).collect();
    Ok(VerifyReport { problems, ..of_part })
}

/// The configuration of the volume on one device of several, which was replaced so often: a new one has another identifier than those that were lost.
pub(super) fn member_config(
    config: &FormatConfig,
    superblock: &SpanSuperblock,
    index: usize,
    replacements: u8,
) -> FormatConfig {
    let mut random = Prng::new(superblock.volume_id.wrapping_add(replacements.into()));
    let seed = (0..=index).fold(0, |_, _| random.next_u64());
    FormatConfig { seed, hash_seed: Some(superblock.hash_seed), swap_bytes: superblock.swap_bytes, ..*config }
}

/// The part of one of so many devices in the settings of a volume.
pub(super) fn member_open_config(config: &OpenConfig, devices: usize, swap_bytes: u64) -> OpenConfig {
    OpenConfig {
        // The last one is for a replacement, which deletes keys.
        cores: config.cores + usize::from(swap_bytes > 0),
        cache_bytes: part_of(config.cache_bytes, devices),
        prepare_bytes: part_of(config.prepare_bytes, devices),
        compact_bytes_per_second: part_of(config.compact_bytes_per_second, devices),
        ..config.clone()
    }
}

/// Superblocks of a volume on devices of these sizes.
fn superblocks(device_bytes: &[u64], config: &FormatConfig) -> impl Iterator<Item = SpanSuperblock> + use<> {
    let mut random = Prng::new(config.seed);
    let (volume_id, hash_seed) = (random.next_u64(), config.hash_seed.unwrap_or(random.next_u64()));
    let (engine, map, count) = (config.engine, PartitionMap::spread(device_bytes), device_bytes.len() as u16);
    let swap_bytes = config.swap_bytes;
    (0..count).map(move |index| SpanSuperblock {
        volume_id,
        device: DeviceOfVolume { index, count },
        generation: 0,
        engine,
        hash_seed,
        map,
        replacements: [0; SPAN_DEVICES_MAX],
        swap_bytes,
        swaps: SwapNotes::default(),
        map_number: 0,
        left_over: PartitionSet::default(),
    })
}

impl<V: Volume> SpannedVolume<V> {
    /// The volumes on the devices that were opened.
    pub fn members(&self) -> impl Iterator<Item = V> {
        self.all_members().into_iter().filter_map(|member| member.volume.ok())
    }

    /// The place of the device with a key, in the list that the volume was opened with.
    pub fn place_of(&self, key: &Key) -> usize {
        let index = self.device_of(key.as_bytes());
        self.0.members.lock()[index].given
    }

    /// The device of each partition, by its index in the volume, and the seed of positions on the ring.
    pub fn placement(&self) -> ([u8; SPAN_PARTITIONS], u64) {
        (*self.0.shared.map.get().0.map.as_bytes(), self.0.superblock.hash_seed)
    }

    /// Whether partitions move, or keys of moved ones are left where they were.
    pub fn is_rebalancing(&self) -> bool {
        self.move_stage() != MoveStage::AtRest
    }

    /// How far moves of partitions are.
    pub fn move_stage(&self) -> MoveStage {
        self.0.shared.map.get().0.stage()
    }

    /// The devices from and to which the partition of a key moves, by their places in the list that the volume was opened with; `None` if it does not move.
    pub fn move_of(&self, key: &Key) -> Option<[usize; 2]> {
        let position = RingPosition::of_bytes(key.as_bytes(), self.0.superblock.hash_seed);
        let (state, _) = self.0.shared.map.get();
        let planned = state.move_of(position)?.planned;
        let members = self.0.members.lock();
        Some([planned.from, planned.to].map(|index| members[index].given))
    }

    /// A figure of the queue of a device; 0 if there is no device of this index, or it has no queue.
    pub fn of_queue(&self, index: usize, figure: impl FnOnce(&DeviceQueue) -> u32) -> u32 {
        let members = self.0.members.lock();
        let queue = members.get(index).and_then(|member| member.queue.as_ref());
        queue.map_or(0, |queue| figure(queue))
    }

    /// The queues of the devices, by their indices; none if they are not bounded.
    pub fn device_queues(&self) -> Vec<Arc<DeviceQueue>> {
        self.all_members().into_iter().filter_map(|member| member.queue).collect()
    }

    /// The index of the device with a key.
    pub fn device_of(&self, key: &[u8]) -> usize {
        let position = RingPosition::of_bytes(key, self.0.superblock.hash_seed);
        self.0.shared.map.get().0.map.device_of(position)
    }

    /// The place of the device with the newest value of a key: its own, or that whose swap region has it.
    pub fn place_of_newest(&self, key: &Key) -> usize {
        let home = self.device_of(key.as_bytes());
        let swapped = self.swaps().and_then(|swaps| swaps.get(home, key)).filter(|of| of.is_acknowledged);
        self.0.members.lock()[swapped.map_or(home, |swapped| swapped.guest.into())].given
    }

    /// The swap regions that were opened.
    fn regions(&self) -> impl Iterator<Item = SwapVolume> {
        self.all_members().into_iter().filter_map(|member| member.swap)
    }

    /// The swapping of a volume with swap regions.
    pub(super) fn swaps(&self) -> Option<&SwappedKeys> {
        self.0.shared.swaps.as_deref()
    }

    /// The number of cores with handles.
    pub(super) fn cores(&self) -> usize {
        self.0.shared.cores
    }

    pub(super) fn all_members(&self) -> Vec<Member<V>> {
        self.0.members.lock().clone()
    }

    /// Opens a device that was formatted to replace one of the volume, or to be added: the volume with its keys, and its swap region.
    ///
    /// # Errors
    /// Either cannot be opened; [`OpenError::OtherFormat`].
    pub(super) async fn open_member(
        &self,
        device: &Rc<dyn Device>,
        pool: &BufferPool,
        (config, format): (&OpenConfig, &FormatConfig),
    ) -> Result<(V, Option<OpenedRegion>), OpenError> {
        let swap_bytes = self.0.superblock.swap_bytes;
        let volume = V::open(&[member_device(device, swap_bytes)], pool, config.clone(), format).await?;
        let region = match swap_bytes {
            0 => None,
            _ => Some(open_region(&swap_device(device, swap_bytes), pool, config, format).await?),
        };
        let limits = |info: VolumeInfo| (info.value_bytes_max, info.record_layout, info.has_iterators);
        if limits(volume.info()) != limits(self.info()) {
            return Err(OpenError::OtherFormat);
        }
        Ok((volume, region))
    }

    /// Sets the volume on the device of an index. The handles on the one before serve no more from here on, on any core.
    pub(super) fn set_member(&self, index: usize, member: Member<V>) {
        let before = std::mem::replace(&mut self.0.members.lock()[index], member);
        before.is_retired.store(true, Ordering::Release);
        before.queue.iter().for_each(|queue| queue.close());
    }

    /// Adds the volume on a device behind those of the others.
    pub(super) fn push_member(&self, member: Member<V>) {
        self.0.members.lock().push(member);
    }

    /// What the handles of all cores share.
    pub(super) fn shared(&self) -> &SpanShared {
        &self.0.shared
    }

    /// The superblock of any device of the volume, with the map, the devices and the replacements so far.
    pub(super) fn superblock(&self) -> SpanSuperblock {
        let (state, _) = self.0.shared.map.get();
        let mut superblock = self.0.superblock;
        (superblock.map, superblock.map_number) = (state.map, state.number);
        superblock.left_over = PartitionSet::default();
        superblock.device.count = self.0.members.lock().len() as u16;
        for (count, member) in superblock.replacements.iter_mut().zip(self.0.members.lock().iter()) {
            *count = member.replacements;
        }
        superblock
    }

    /// A handle of a core on the volume on the device of an index; `device` is the core's view of it.
    pub(super) fn member_engine(
        &self,
        index: usize,
        member: &Member<V>,
        (core, device, pool): (usize, &Rc<dyn Device>, &BufferPool),
    ) -> SpannedMember<V::Engine> {
        let volume = member.volume.as_ref().ok().map(|volume| {
            let (whole, swap_bytes) = (Rc::clone(device), self.0.superblock.swap_bytes);
            let swap = member.swap.as_ref().map(|volume| {
                let device = swap_device(&whole, swap_bytes);
                OpenRegion {
                    engine: volume.engine(core, &[device], pool.clone()),
                    place: swap_place(index, &*whole, swap_bytes),
                }
            });
            let device = member_device(&whole, swap_bytes);
            let place = MemberPlace::new(index as u16, &*device);
            let engine = volume.engine(core, &[Rc::clone(&device)], pool.clone());
            OpenMember { engine, place, device, whole, swap }
        });
        let (is_retired, traffic) = (Arc::clone(&member.is_retired), Arc::clone(&member.traffic));
        let queue = member.queue.clone();
        SpannedMember { volume, replacements: member.replacements, is_retired, traffic, queue }
    }
}

impl<V: Volume> Volume for SpannedVolume<V> {
    type Engine = SpannedEngine<V::Engine>;

    const PREFETCH: PrefetchPlan = V::PREFETCH;

    /// A crash before the last superblock is written leaves no volume.
    async fn format(devices: &[Rc<dyn Device>], config: &FormatConfig) -> Result<(), OpenError> {
        if !(2..=SPAN_DEVICES_MAX).contains(&devices.len()) {
            return Err(OpenError::DeviceCount { have: devices.len(), most: SPAN_DEVICES_MAX });
        }
        if config.hash != HashKind::Xxh3 {
            return Err(OpenError::SpanHash);
        }
        check_swaps(config)?;
        for device in devices {
            let (have_bytes, need_bytes) =
                (device.geometry().bytes(), SUPERBLOCK_AREA_BYTES + config.swap_bytes + 1);
            if have_bytes < need_bytes {
                return Err(OpenError::TooSmall { have_bytes, need_bytes });
            }
        }
        for device in devices {
            erase_superblocks(&**device).await?;
        }
        let bytes: Vec<u64> = devices.iter().map(|device| device.geometry().bytes()).collect();
        let superblocks: Vec<_> = superblocks(&bytes, config).collect();
        for (device, superblock) in devices.iter().zip(&superblocks) {
            let member = member_config(config, superblock, superblock.device.index.into(), 0);
            format_member::<V>(device, &member).await?;
        }
        for (device, superblock) in devices.iter().zip(&superblocks) {
            write_superblock(&**device, superblock).await?;
        }
        Ok(())
    }

    async fn open(
        devices: &[Rc<dyn Device>],
        pool: &BufferPool,
        config: OpenConfig,
        format: &FormatConfig,
    ) -> Result<SpannedVolume<V>, OpenError> {
        if devices.iter().all(|device| device.geometry().volatile) {
            Self::format(devices, format).await?;
        }
        let read = read_superblocks(devices).await?;
        let superblock = newest_of(&read);
        let replacements = superblock.replacements;
        if superblock.engine != format.engine {
            let (found, wanted) = (superblock.engine.number(), format.engine.number());
            return Err(SuperblockError::Engine { found, wanted }.into());
        }
        let left_over = tell_all(devices, &read).await?;
        let of_member = member_open_config(&config, devices.len(), superblock.swap_bytes);
        let swap_bytes = superblock.swap_bytes;
        let swaps = (swap_bytes > 0).then(|| SwappedKeys::new(config.swap_gap, config.durability));
        let mut members = Vec::with_capacity(devices.len());
        let places = places_of(&read);
        for (index, &given) in places.iter().enumerate() {
            let (device, mut swap) = (&devices[given], None);
            let volume = match read[given] {
                Ok(_) => {
                    let format = member_config(format, &superblock, index, replacements[index]);
                    let place = MemberPlace::new(index as u16, &**device);
                    let member = member_device(device, swap_bytes);
                    let opened = V::open(&[member], pool, of_member.clone(), &format).await;
                    if let Some(swaps) = &swaps
                        && opened.is_ok()
                    {
                        let region = swap_device(device, swap_bytes);
                        let opened = open_region(&region, pool, &of_member, &format).await;
                        swap = recover_swaps(swaps, &superblock, index, opened);
                    }
                    opened.map_err(|error| place.open_error(error))
                }
                Err(error) => Err(error),
            };
            members.push(Member::new(given, replacements[index], &config, (volume, swap)));
        }
        if let Some(swaps) = &swaps {
            for (home, &given) in places.iter().enumerate() {
                if let Ok(of_home) = &read[given] {
                    let is_open =
                        |guest: usize| members.get(guest).is_some_and(|member| member.swap.is_some());
                    recover_notes(swaps, &devices[given], (home, of_home, &superblock.map), is_open).await;
                }
            }
        }
        let Some(info) = members.iter().find_map(|member| member.volume.as_ref().ok().map(V::info)) else {
            return Err(members.into_iter().find_map(|member| member.volume.err()).expect("all are absent"));
        };
        let (members, cores) = (Mutex::new(members), config.cores);
        let swaps = swaps.map(Arc::new);
        let (gate, page_budget, abandoned) = (Arc::default(), Arc::default(), AbandonedCount::default());
        let state = MapState {
            map: superblock.map,
            number: superblock.map_number,
            left_over,
            moving: None,
            writes: MovingWrites::Both,
            settling: PartitionSet::default(),
        };
        let (map, structure) = (Arc::new(SharedMap::new(state)), Arc::default());
        let move_bytes_per_second = config.compact_bytes_per_second.min(MOVE_BYTES_PER_SECOND);
        let shared =
            SpanShared { cores, map, structure, move_bytes_per_second, gate, page_budget, swaps, abandoned };
        let volume = SpannedVolume(Arc::new(Span { superblock, info, members, shared }));
        volume.merge_unlisted(devices, pool).await;
        Ok(volume)
    }

    /// Verifies the volumes on the devices one after another.
    async fn verify(
        devices: &[Rc<dyn Device>],
        pool: &BufferPool,
        observer: &mut impl VerifyObserver,
    ) -> Result<VerifyReport, VerifyFailure> {
        let failed = |reason| VerifyFailure { reason, remains: None };
        let read = read_superblocks(devices).await.map_err(failed)?;
        let mut report = VerifyReport { is_clean_shutdown: true, ..VerifyReport::default() };
        for (given, device) in places_of(&read).into_iter().zip(0..) {
            read[given].map_err(failed)?;
            let place = MemberPlace::new(device, &*devices[given]);
            let swap_bytes = read[given].map_or(0, |superblock| superblock.swap_bytes);
            let member = member_device(&devices[given], swap_bytes);
            report.add(verify_part::<V>((device, place), member, pool, &mut *observer).await?);
            if swap_bytes > 0 {
                let place = swap_place(device.into(), &*devices[given], swap_bytes);
                let region = swap_device(&devices[given], swap_bytes);
                let of_region =
                    verify_part::<SwapVolume>((device, place), region, pool, &mut *observer).await?;
                // Its keys are those of other devices, which have older values of them.
                report.add(VerifyReport { keys: 0, used_bytes: 0, ..of_region });
            }
        }
        Ok(report)
    }

    async fn upgrade(devices: &[Rc<dyn Device>], pool: &BufferPool) -> Result<FormatVersions, OpenError> {
        let read = read_superblocks(devices).await?;
        let mut versions = None;
        for given in places_of(&read) {
            let swap_bytes = read[given]?.swap_bytes;
            let of_device = V::upgrade(&[member_device(&devices[given], swap_bytes)], pool).await?;
            let before =
                versions.map_or(of_device.before, |all: FormatVersions| all.before.min(of_device.before));
            versions = Some(FormatVersions { before, ..of_device });
        }
        Ok(versions.expect("a volume has devices"))
    }

    fn device_layout(_format_region: &[u8]) -> Option<DeviceLayout> {
        None
    }

    fn engine(&self, core: usize, devices: &[Rc<dyn Device>], pool: BufferPool) -> Self::Engine {
        let of_volume = self.all_members();
        assert_eq!(devices.len(), of_volume.len(), "as many as the volume was opened with");
        let member = |(index, member): (usize, &Member<V>)| {
            self.member_engine(index, member, (core, &devices[member.given], &pool))
        };
        let members = of_volume.iter().enumerate().map(member).collect();
        let hash_seed = self.0.superblock.hash_seed;
        let order = if self.0.info.has_iterators { ListOrder::Keys } else { ListOrder::Ring(hash_seed) };
        SpannedEngine::new(SpannedCore::new(members, (hash_seed, order), (core, self.0.shared.clone())))
    }

    fn info(&self) -> VolumeInfo {
        let capacity_bytes = self.members().map(|volume| volume.info().capacity_bytes).sum();
        VolumeInfo { id: self.0.superblock.volume_id, capacity_bytes, ..self.0.info }
    }

    fn set_scrub_rate(&self, bytes_per_second: u64) {
        let members = self.all_members();
        let of_member = part_of(bytes_per_second, members.len());
        self.members().for_each(|volume| volume.set_scrub_rate(of_member));
    }

    /// Without what devices that replace others will have.
    fn used_bytes(&self) -> SharedSum {
        self.members().map(|volume| volume.used_bytes()).collect()
    }

    fn is_idle(&self) -> bool {
        let is_merging = self.swaps().is_some_and(SwappedKeys::is_merging);
        !is_merging
            && self.0.shared.abandoned.is_zero()
            && self.members().all(|volume| volume.is_idle())
            && self.regions().all(|region| region.is_idle())
    }

    /// A device whose writes failed leaves the others as they are.
    fn is_read_only(&self) -> bool {
        self.members().all(|volume| volume.is_read_only())
    }

    fn device_reports(&self) -> Vec<DeviceReport> {
        let report = |(index, member): (usize, &Member<V>)| DeviceReport {
            index: index as u16,
            failure: member.absence(),
            is_read_only: member.volume.as_ref().is_ok_and(V::is_read_only),
            statistics: member.volume.as_ref().map(V::statistics).unwrap_or_default(),
            traffic: member.traffic.get(),
            swaps: self.0.shared.swaps.as_ref().map(|swaps| swaps.report(index)).unwrap_or_default(),
            tokens: member.queue.as_ref().map(|queue| queue.report()),
        };
        let members = self.all_members();
        let mut reports: Vec<_> = members.iter().enumerate().map(report).collect();
        reports.sort_by_key(|report| members[usize::from(report.index)].given);
        reports
    }

    fn statistics(&self) -> EngineStatistics {
        sum_of(self.members().map(|volume| volume.statistics()))
    }
}
