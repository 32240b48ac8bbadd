//! A volume on several devices: a superblock of the span on each, and behind it a volume of one engine.
//!
//! ```text
//!   device i     ┌ superblocks of the span ┬ a volume of the engine, with the keys of the partitions of device i ┐
//!   format       erased on all ─▶ volumes formatted ─▶ superblocks written, one device after another
//!   open         superblocks read ─▶ devices in the order of their indices ─▶ volumes opened; one that fails is absent
//! ```
//! In: devices in any order. Out: a handle for each core. Invariants: devices of other volumes, or not all of a volume, are never opened; a device that cannot be read takes down its
//! own keys alone.

use super::engine::{SpanShared, SpannedEngine, SpannedMember, sum_of};
use super::partition_map::{PartitionMap, SPAN_DEVICES_MAX};
use super::places::{MemberObserver, MemberPlace};
use super::ring_merge::ListOrder;
use super::superblock::SpanSuperblock;
use crate::bug_injection::{self, InjectedBug};
use crate::common::superblock::{DeviceOfVolume, SUPERBLOCK_AREA_BYTES, SuperblockError};
use crate::common::superblock_io::{erase_superblocks, read_superblock, write_superblock};
use crate::{
    DeviceLayout, DeviceReport, EngineStatistics, FormatConfig, FormatVersions, HashKind, OpenConfig,
    OpenError, PrefetchPlan, RecordProblem, VerifyFailure, VerifyObserver, VerifyReport, Volume, VolumeInfo,
};
use octokv_base::{BufferPool, Prng, SharedSum};
use octokv_device::Device;
use octokv_device::device_window::DeviceWindow;
use std::rc::Rc;
use std::sync::Arc;

/// An open volume on several devices, each with a volume of the kind `V`.
#[derive(Clone)]
pub struct SpannedVolume<V>(Arc<Span<V>>);

/// What handles of all cores share.
pub(super) struct Span<V> {
    superblock: SpanSuperblock,
    info: VolumeInfo,
    /// By the index of its device in the volume.
    members: Vec<Member<V>>,
    shared: SpanShared,
}

/// The volume on one device.
struct Member<V> {
    /// The place of its device in the list that the volume was opened with.
    given: usize,
    /// Why it is absent, if it is.
    volume: Result<V, OpenError>,
}

/// The part of a device behind the superblocks of the span.
fn member_device(device: &Rc<dyn Device>) -> Rc<dyn Device> {
    Rc::new(DeviceWindow::behind(Rc::clone(device), SUPERBLOCK_AREA_BYTES))
}

/// The part of each of several devices in a limit of all; none stays none.
fn part_of(of_all: u64, devices: usize) -> u64 {
    match of_all {
        u64::MAX => u64::MAX,
        of_all => of_all / devices as u64,
    }
}

/// The configuration of the volume on one device of several.
fn member_config(config: &FormatConfig, volume_id: u64, hash_seed: u64, index: usize) -> FormatConfig {
    let mut random = Prng::new(volume_id);
    let seed = (0..=index).fold(0, |_, _| random.next_u64());
    FormatConfig { seed, hash_seed: Some(hash_seed), ..*config }
}

/// Superblocks of a volume on devices of these sizes.
fn superblocks(device_bytes: &[u64], config: &FormatConfig) -> impl Iterator<Item = SpanSuperblock> + use<> {
    let mut random = Prng::new(config.seed);
    let (volume_id, hash_seed) = (random.next_u64(), config.hash_seed.unwrap_or(random.next_u64()));
    let (engine, map, count) = (config.engine, PartitionMap::spread(device_bytes), device_bytes.len() as u16);
    (0..count).map(move |index| SpanSuperblock {
        volume_id,
        device: DeviceOfVolume { index, count },
        generation: 0,
        engine,
        hash_seed,
        map,
    })
}

/// The superblocks of devices, each with the error of a device that cannot be read.
///
/// # Errors
/// A device that is none of the same volume as the others, or there are not as many as the volume has.
async fn read_superblocks(
    devices: &[Rc<dyn Device>],
) -> Result<Vec<Result<SpanSuperblock, OpenError>>, OpenError> {
    let mut read = Vec::with_capacity(devices.len());
    for (device, at) in devices.iter().zip(0..) {
        read.push(match read_superblock::<SpanSuperblock>(&**device).await {
            Ok((superblock, _)) => Ok(superblock),
            // It held something else, or nothing, before: not a failure of a device.
            Err(OpenError::Superblock(error)) if error != SuperblockError::Damaged => {
                return Err(OpenError::SpanDevice { at, error });
            }
            Err(error) => Err(error),
        });
    }
    let mut intact = read.iter().zip(0..).filter_map(|(read, at)| Some((read.as_ref().ok()?, at)));
    let Some((first, _)) = intact.next() else {
        return Err(read[0].expect_err("none is intact"));
    };
    let mut places = vec![false; first.device.count.into()];
    if places.len() != devices.len() {
        return Err(OpenError::DevicesMissing { have: devices.len(), count: first.device.count });
    }
    for (superblock, at) in read.iter().zip(0..).filter_map(|(read, at)| Some((read.as_ref().ok()?, at))) {
        let is_same =
            superblock.volume_id == first.volume_id && superblock.device.count == first.device.count;
        if !is_same {
            return Err(OpenError::OtherVolume { at });
        }
        if std::mem::replace(&mut places[usize::from(superblock.device.index)], true) {
            return Err(OpenError::DeviceTwice { at, index: superblock.device.index });
        }
    }
    Ok(read)
}

/// For each index of the volume the place of its device in the list. Those without a superblock have the indices that are left.
fn places_of(read: &[Result<SpanSuperblock, OpenError>]) -> Vec<usize> {
    let index_of = |read: &Result<SpanSuperblock, OpenError>| {
        read.as_ref().ok().map(|read| usize::from(read.device.index))
    };
    if bug_injection::is_injected(InjectedBug::SpanIgnoreIndex) {
        return (0..read.len()).collect();
    }
    let mut unknown = (0..read.len()).filter(|&at| read[at].is_err());
    let place_of = |index| {
        let known = read.iter().position(|read| index_of(read) == Some(index));
        known.or_else(|| unknown.next()).expect("as many devices as indices")
    };
    (0..read.len()).map(place_of).collect()
}

impl<V: Volume> SpannedVolume<V> {
    /// The volumes on the devices that serve.
    pub fn members(&self) -> impl Iterator<Item = &V> {
        self.0.members.iter().filter_map(|member| member.volume.as_ref().ok())
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
        for device in devices {
            let have_bytes = device.geometry().bytes();
            if have_bytes <= SUPERBLOCK_AREA_BYTES {
                return Err(OpenError::TooSmall { have_bytes, need_bytes: SUPERBLOCK_AREA_BYTES + 1 });
            }
        }
        for device in devices {
            erase_superblocks(&**device).await?;
        }
        let bytes: Vec<u64> = devices.iter().map(|device| device.geometry().bytes()).collect();
        let superblocks: Vec<_> = superblocks(&bytes, config).collect();
        for (device, superblock) in devices.iter().zip(&superblocks) {
            let SpanSuperblock { volume_id, hash_seed, device: of, .. } = *superblock;
            let member = member_config(config, volume_id, hash_seed, of.index.into());
            V::format(&[member_device(device)], &member).await?;
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
        let superblock = *read.iter().find_map(|read| read.as_ref().ok()).expect("one is intact");
        let SpanSuperblock { volume_id, hash_seed, engine, .. } = superblock;
        if engine != format.engine {
            let (found, wanted) = (engine.number(), format.engine.number());
            return Err(SuperblockError::Engine { found, wanted }.into());
        }
        let part = |of_all: u64| part_of(of_all, devices.len());
        let of_member = OpenConfig {
            cache_bytes: part(config.cache_bytes),
            prepare_bytes: part(config.prepare_bytes),
            compact_bytes_per_second: part(config.compact_bytes_per_second),
            ..config
        };
        let mut members = Vec::with_capacity(devices.len());
        for (index, given) in places_of(&read).into_iter().enumerate() {
            let volume = match read[given] {
                Ok(_) => {
                    let format = member_config(format, volume_id, hash_seed, index);
                    let place = MemberPlace::new(index as u16, &*devices[given]);
                    let opened =
                        V::open(&[member_device(&devices[given])], pool, of_member.clone(), &format).await;
                    opened.map_err(|error| place.open_error(error))
                }
                Err(error) => Err(error),
            };
            members.push(Member { given, volume });
        }
        let infos: Vec<VolumeInfo> =
            members.iter().filter_map(|member| member.volume.as_ref().ok()).map(V::info).collect();
        let Some(&first) = infos.first() else {
            return Err(members.into_iter().find_map(|member| member.volume.err()).expect("all are absent"));
        };
        let capacity_bytes = infos.iter().map(|info| info.capacity_bytes).sum();
        let info = VolumeInfo { id: volume_id, capacity_bytes, ..first };
        Ok(SpannedVolume(Arc::new(Span { superblock, info, members, shared: SpanShared::default() })))
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
            let mut observer = MemberObserver { place, observer: &mut *observer };
            let verified = V::verify(&[member_device(&devices[given])], pool, &mut observer).await;
            let of_device = verified
                .map_err(|failure| VerifyFailure { reason: place.open_error(failure.reason), ..failure })?;
            let placed = |problem: RecordProblem| RecordProblem {
                device: Some(device),
                lba: place.lba(problem.lba),
                ..problem
            };
            let problems = of_device.problems.into_iter().map(placed).collect();
            report.add(VerifyReport { problems, ..of_device });
        }
        Ok(report)
    }

    async fn upgrade(devices: &[Rc<dyn Device>], pool: &BufferPool) -> Result<FormatVersions, OpenError> {
        let read = read_superblocks(devices).await?;
        let mut versions = None;
        for given in places_of(&read) {
            read[given]?;
            let of_device = V::upgrade(&[member_device(&devices[given])], pool).await?;
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
        assert_eq!(devices.len(), self.0.members.len(), "as many as the volume was opened with");
        let member = |(index, member): (usize, &Member<V>)| match &member.volume {
            Ok(volume) => {
                let device = member_device(&devices[member.given]);
                let place = MemberPlace::new(index as u16, &*device);
                let engine = volume.engine(core, &[Rc::clone(&device)], pool.clone());
                SpannedMember::Open(engine, place, device)
            }
            Err(_) => SpannedMember::Absent,
        };
        let members = self.0.members.iter().enumerate().map(member).collect();
        let SpanSuperblock { map, hash_seed, .. } = self.0.superblock;
        let order = if self.0.info.has_iterators { ListOrder::Keys } else { ListOrder::Ring(hash_seed) };
        SpannedEngine::new(members, (map, hash_seed, order), self.0.shared.clone())
    }

    fn info(&self) -> VolumeInfo {
        self.0.info
    }

    fn set_scrub_rate(&self, bytes_per_second: u64) {
        let of_member = part_of(bytes_per_second, self.0.members.len());
        self.members().for_each(|volume| volume.set_scrub_rate(of_member));
    }

    fn used_bytes(&self) -> SharedSum {
        self.members().map(V::used_bytes).collect()
    }

    fn is_idle(&self) -> bool {
        self.members().all(V::is_idle)
    }

    /// A device whose writes failed leaves the others as they are.
    fn is_read_only(&self) -> bool {
        self.members().all(V::is_read_only)
    }

    fn device_reports(&self) -> Vec<DeviceReport> {
        let report = |(index, member): (usize, &Member<V>)| DeviceReport {
            index: index as u16,
            failure: member.volume.as_ref().err().copied(),
            is_read_only: member.volume.as_ref().is_ok_and(V::is_read_only),
            statistics: member.volume.as_ref().map(V::statistics).unwrap_or_default(),
        };
        let mut reports: Vec<_> = self.0.members.iter().enumerate().map(report).collect();
        reports.sort_by_key(|report| self.0.members[usize::from(report.index)].given);
        reports
    }

    fn statistics(&self) -> EngineStatistics {
        sum_of(self.members().map(V::statistics))
    }
}
