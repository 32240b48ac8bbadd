//! Verification: reads every record that the index names and checks it; changes nothing.
//!
//! If recovery cannot load the volume, `salvage` scans the device for intact structures.

use super::index::is_fingerprint_of;
use super::index::{IndexEntry, RecordRef};
use super::piece_list::{DamagedAt, find_damage, load_pieces};
use super::recovery::{RecoveredState, load_volume};
use super::salvage::salvage;
use super::superblock::HashSuperblock;
use super::volume::{hash_of, partition_and_tag};
use crate::common::record::{RecordFlags, RecordFormat, RecordHeader, UncheckedRecord};
use crate::common::unit_reader::UnitReader;
use crate::open_error::OpenError;
use crate::verify_report::{ProblemKind, RecordProblem, VerifyFailure, VerifyObserver, VerifyReport};
use octokv_base::{BufferPool, Key, Lba};
use octokv_device::Device;

/// Verifies the volume on a device, and reports to `observer` as it goes on.
///
/// # Errors
/// If recovery cannot load the volume: why, and the totals of a scan whose findings `observer` received.
pub async fn verify(
    device: &dyn Device,
    pool: &BufferPool,
    observer: &mut impl VerifyObserver,
) -> Result<VerifyReport, VerifyFailure> {
    let state = match load_volume(device).await {
        Ok(state) => state,
        Err(reason) if reason.may_leave_records() => {
            observer.scan_started(&reason);
            let remains = Some(salvage(device, observer).await);
            return Err(VerifyFailure { reason, remains });
        }
        Err(reason) => return Err(VerifyFailure { reason, remains: None }),
    };
    let verified = verify_records(device, pool, &state, observer).await;
    verified.map_err(|reason| VerifyFailure { reason, remains: None })
}

/// Reads and checks the records of a recovered index.
async fn verify_records(
    device: &dyn Device,
    pool: &BufferPool,
    state: &RecoveredState,
    observer: &mut impl VerifyObserver,
) -> Result<VerifyReport, OpenError> {
    let unit_bytes = u64::from(state.superblock.layout.unit_bytes);
    let keys = state.partitions.iter().map(|partition| partition.state.lock().keys());
    let mut report = VerifyReport {
        keys: keys.sum(),
        used_bytes: (state.space.units() - state.space.free_units()) * unit_bytes,
        capacity_bytes: state.space.units() * unit_bytes,
        dropped_entries: state.dropped_entries,
        damaged_copies: state.damaged_copies,
        is_clean_shutdown: state.superblock.is_clean_shutdown,
        ..VerifyReport::default()
    };
    let entries = state.partitions.iter().map(|partition| partition.state.lock().table.len() as u64);
    let (mut done, all) = (0, entries.sum());
    for (index, partition) in state.partitions.iter().enumerate() {
        let entries: Vec<IndexEntry> = partition.state.lock().table.iter_from(0).collect();
        for entry in entries {
            match verify_entry(device, pool, state, (index, entry)).await? {
                Ok(value_bytes) => report.value_bytes += value_bytes,
                Err(problem) => report.problems.push(problem),
            }
            done += 1;
            observer.keys_verified(done, all);
        }
    }
    Ok(report)
}

/// Reads and checks the record of one index entry of a partition. Gives the length of its value.
async fn verify_entry(
    device: &dyn Device,
    pool: &BufferPool,
    state: &RecoveredState,
    (partition, entry): (usize, IndexEntry),
) -> Result<Result<u64, RecordProblem>, OpenError> {
    let (superblock, record_ref) = (&state.superblock, entry.record_ref());
    let unit_bytes = u64::from(superblock.layout.unit_bytes);
    let unit_blocks = unit_bytes / u64::from(device.geometry().block_bytes);
    let lba = record_ref.location * unit_blocks;
    let buffer = pool.take((record_ref.units * unit_bytes) as usize).ok_or(OpenError::NoMemory)?;
    let Ok(bytes) = device.read(Lba(lba), buffer).await.into_read() else {
        return Ok(Err(RecordProblem { device: None, lba, key: None, kind: ProblemKind::Unreadable }));
    };
    let record = match verify_record(&bytes, record_ref, superblock.volume_id, superblock.format) {
        Ok((key, header)) if header.meta.flags.contains(RecordFlags::PIECES) => {
            match verify_pieces(device, superblock, &header, &bytes).await {
                Ok(()) => Ok((key, header.value_bytes)),
                Err((kind, at)) => {
                    let lba = at.map_or(lba, |DamagedAt(location)| location * unit_blocks);
                    return Ok(Err(RecordProblem { device: None, lba, key: Some(key), kind }));
                }
            }
        }
        Ok((key, header)) => match header.value_range(&bytes) {
            Ok(range) => Ok((key, range.len())),
            Err(_) => Err((Some(key), ProblemKind::Value)),
        },
        Err(problem) => Err(problem),
    };
    Ok(match record {
        Ok((key, value_bytes)) => {
            let found =
                partition_and_tag(hash_of(superblock, key.as_bytes()), superblock.index_partitions_log2);
            match found == (partition, entry.tag()) {
                true => Ok(value_bytes as u64),
                false => {
                    Err(RecordProblem { device: None, lba, key: Some(key), kind: ProblemKind::WrongRecord })
                }
            }
        }
        Err((key, kind)) => Err(RecordProblem { device: None, lba, key, kind }),
    })
}

fn verify_record(
    bytes: &[u8],
    record_ref: RecordRef,
    volume: u64,
    format: RecordFormat,
) -> Result<(Key, RecordHeader), (Option<Key>, ProblemKind)> {
    let unchecked = UncheckedRecord { bytes, location: record_ref.location };
    let (header, key) = unchecked.header().map_err(|_| (None, ProblemKind::Header))?;
    let key = Key::new(key).ok_or((None, ProblemKind::Header))?;
    let identity = header.identity;
    let same = identity.volume_id == volume
        && identity.location == record_ref.location
        && is_fingerprint_of(format, record_ref, &header);
    if !same {
        return Err((Some(key), ProblemKind::WrongRecord));
    }
    Ok((key, header))
}

/// Reads and checks the pieces of a record.
///
/// # Errors
/// The problem, and where it is if it is not the record itself.
async fn verify_pieces(
    device: &dyn Device,
    superblock: &HashSuperblock,
    header: &RecordHeader,
    record: &[u8],
) -> Result<(), (ProblemKind, Option<DamagedAt>)> {
    let reader = UnitReader::new(device, superblock.layout.unit_bytes);
    let units = superblock.layout.record_units();
    let unreadable = |_| (ProblemKind::Unreadable, None);
    let pieces = load_pieces(reader, &units, header, record).await.map_err(unreadable)?;
    let pieces = pieces.map_err(|at| (ProblemKind::Value, Some(at)))?;
    match find_damage(reader, &pieces, header.value_bytes).await.map_err(unreadable)? {
        None => Ok(()),
        Some(at) => Err((ProblemKind::Value, Some(at))),
    }
}
