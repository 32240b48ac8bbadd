//! Verification: reads every table and every value that a key has, and checks them; changes nothing.

use super::core::LsmCore;
use super::cursor::EntryCursor;
use super::entry::Position;
use super::iterator_list::IteratorPlace;
use super::level_cursor::{LevelCursor, LevelCursorConfig};
use super::recovery::{load, read_tree_superblock};
use super::settings::TreeSettings;
use super::tree_iterator::TreeIterator;
use super::volume::LsmVolume;
use crate::open_error::OpenError;
use crate::verify_report::{ProblemKind, RecordProblem, VerifyFailure, VerifyObserver, VerifyReport};
use crate::{Durability, EngineError, IteratorOptions, OpenConfig, WallClock};
use octokv_base::{BufferPool, Key};
use octokv_device::Device;
use std::rc::Rc;
use std::sync::Arc;

/// Keys between two reports to the observer.
const KEYS_PER_REPORT: u64 = 64;

/// Verifies the volume on a device, and reports to `observer` as it goes on.
///
/// # Errors
/// If recovery cannot load the volume: why.
pub async fn verify(
    device: &Rc<dyn Device>,
    pool: &BufferPool,
    observer: &mut impl VerifyObserver,
) -> Result<VerifyReport, VerifyFailure> {
    let verified = verify_volume(device, pool, observer).await;
    verified.map_err(|reason| VerifyFailure { reason, remains: None })
}

async fn verify_volume(
    device: &Rc<dyn Device>,
    pool: &BufferPool,
    observer: &mut impl VerifyObserver,
) -> Result<VerifyReport, OpenError> {
    let (superblock, damaged) = read_tree_superblock(&**device).await?;
    let settings = TreeSettings::for_layout(&superblock.layout, 0);
    let loaded = load(&**device, superblock, damaged, settings.memtable_bounds()).await?;
    // Only what it has in memory is used: nothing is written.
    let config = OpenConfig {
        durability: Durability::PowerSafe,
        cores: 1,
        cache_bytes: 0,
        prepare_bytes: 0,
        compact_bytes_per_second: u64::MAX,
        tree: OpenConfig::TREE,
        swap_gap: OpenConfig::SWAP_GAP,
        clock: WallClock::default(),
        tokens: None,
    };
    let block_bytes = device.geometry().block_bytes;
    let volume = LsmVolume::new(superblock, loaded.state, block_bytes, config, settings);
    let core = LsmCore::for_verification(Arc::clone(&volume), Rc::clone(device), pool.clone());
    let statistics = volume.statistics();
    let mut report = VerifyReport {
        used_bytes: statistics.used_bytes,
        capacity_bytes: statistics.capacity_bytes,
        dropped_entries: loaded.dropped_entries,
        damaged_copies: loaded.damaged_copies,
        is_clean_shutdown: superblock.is_clean_shutdown,
        ..VerifyReport::default()
    };
    core.verify_tables(&mut report).await?;
    core.verify_values(&mut report, observer).await?;
    Ok(report)
}

impl LsmCore {
    /// `damage`, if the blocks from this one on were read or the medium has lost them, and not the device failed.
    fn problem_at(&self, lba: u64, damage: ProblemKind) -> ProblemKind {
        match &self.io.unreadable {
            Some(unreadable) if unreadable.has(lba) => ProblemKind::Unreadable,
            _ => damage,
        }
    }

    /// Reads all tables.
    async fn verify_tables(&self, report: &mut VerifyReport) -> Result<(), OpenError> {
        let version = self.volume.version();
        for (_, table) in version.tables() {
            let config = LevelCursorConfig::COMPACTION;
            let mut cursor = LevelCursor::of_tables(Rc::clone(&self.io), vec![Arc::clone(table)], config);
            let mut outcome = cursor.seek(Position::START).await;
            loop {
                match outcome {
                    Err(EngineError::Corrupt { lba, .. }) => {
                        let kind = self.problem_at(lba, ProblemKind::TableBlock);
                        report.problems.push(RecordProblem { device: None, lba, key: None, kind });
                    }
                    Err(error) => return Err(error.into()),
                    Ok(()) if cursor.entry().is_none() => break,
                    Ok(()) => {}
                }
                outcome = cursor.next().await;
            }
        }
        Ok(())
    }

    /// Reads the value of each key.
    async fn verify_values(
        &self,
        report: &mut VerifyReport,
        observer: &mut impl VerifyObserver,
    ) -> Result<(), OpenError> {
        let all = self.volume.statistics().keys;
        let iterator = TreeIterator::create(&self.volume, IteratorOptions::default());
        let iterator = iterator.ok_or(OpenError::NoMemory)?;
        let sources = iterator.state.sources().ok_or(OpenError::NoMemory)?;
        let mut yield_point = async || ();
        let mut view =
            self.open_view(&iterator.state, sources, &IteratorPlace::Start, &mut yield_point).await;
        loop {
            match self.next_pair(&mut view, &mut yield_point).await {
                Ok(None) => break,
                Ok(Some(_)) => {
                    let (key, taken) = self.take_pair(&mut view, &mut yield_point).await;
                    match taken {
                        Ok(value) => report.value_bytes += value.bytes().len() as u64,
                        Err(EngineError::Corrupt { lba, .. }) => {
                            let (key, kind) = (Key::new(&key), self.problem_at(lba, ProblemKind::Value));
                            report.problems.push(RecordProblem { device: None, lba, key, kind });
                        }
                        Err(error) => return Err(error.into()),
                    }
                    report.keys += 1;
                    if report.keys.is_multiple_of(KEYS_PER_REPORT) {
                        observer.keys_verified(report.keys, all.max(report.keys));
                    }
                }
                // A part of a table, which was reported.
                Err(EngineError::Corrupt { .. }) => {}
                Err(error) => return Err(error.into()),
            }
        }
        observer.keys_verified(report.keys, report.keys);
        Ok(())
    }
}
