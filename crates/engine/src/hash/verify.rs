//! Reads everything a volume holds and verifies it; changes nothing.

use super::index::{Place, check_of};
use super::record;
use super::recovery::{OpenError, load};
use super::volume::{hash_of, split};
use octokv_base::{Key, Lba, Pool};
use octokv_device::Device;
use std::fmt;

/// What is wrong with one record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// The first block of the record.
    pub lba: u64,
    /// Its key, where the header is whole.
    pub key: Option<Key>,
    /// What is wrong.
    pub what: What,
}

/// What is wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// The header or key is damaged, or it is no record at all.
    Header,
    /// A record of another place, time or volume lies there.
    Elsewhere,
    /// The value is damaged.
    Value,
    /// The device could not read it.
    Unreadable,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = match self.what {
            What::Header => "header or key damaged",
            What::Elsewhere => "holds another record",
            What::Value => "value damaged",
            What::Unreadable => "unreadable",
        };
        match &self.key {
            Some(key) => write!(f, "block {}, key {key}: {what}", self.lba),
            None => write!(f, "block {}: {what}", self.lba),
        }
    }
}

/// What a check found.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// Keys in the index.
    pub keys: u64,
    /// Bytes of values that were read and verified.
    pub value_bytes: u64,
    /// Bytes of space in use.
    pub used_bytes: u64,
    /// Bytes of space for records.
    pub capacity_bytes: u64,
    /// Journal entries of the last moment before a crash whose records never became whole.
    pub dropped: u64,
    /// Pieces of metadata of which one copy is damaged. Those that opening met it mends; the others are written
    /// anew by the next checkpoint.
    pub damaged_copies: u64,
    /// Records that cannot be read back as they were written.
    pub problems: Vec<Problem>,
    /// Whether the volume was closed in order.
    pub clean: bool,
}

/// Verifies the volume on a device. `progress` is told how many of how many keys are done.
pub async fn check(
    device: &dyn Device,
    pool: &Pool,
    mut progress: impl FnMut(u64, u64),
) -> Result<Report, OpenError> {
    let loaded = load(device).await?;
    let superblock = loaded.superblock;
    let unit_bytes = u64::from(superblock.unit_bytes);
    let unit_blocks = unit_bytes / u64::from(device.geometry().block_bytes);
    let slots = |index: usize| -> Vec<_> { loaded.segments[index].entries.lock().table.from(0).collect() };
    let keys =
        (0..loaded.segments.len()).map(|index| loaded.segments[index].entries.lock().table.len() as u64);
    let mut report = Report {
        keys: keys.sum(),
        used_bytes: (loaded.space.units() - loaded.space.free_units()) * unit_bytes,
        capacity_bytes: loaded.space.units() * unit_bytes,
        dropped: loaded.dropped,
        damaged_copies: loaded.damaged_copies,
        clean: superblock.clean,
        ..Report::default()
    };
    let mut done = 0;
    for index in 0..loaded.segments.len() {
        for slot in slots(index) {
            let (place, lba) = (slot.place(), slot.place().location * unit_blocks);
            let buffer = pool.take((place.units * unit_bytes) as usize).ok_or(OpenError::NoMemory)?;
            let home = |key: &Key| split(hash_of(&superblock, key), superblock.segments_log2);
            match device.read(Lba(lba), buffer).await.into_read() {
                Err(_) => report.problems.push(Problem { lba, key: None, what: What::Unreadable }),
                Ok(bytes) => match verify(&bytes, place, superblock.volume) {
                    Ok((key, value_bytes)) if home(&key) == (index, slot.tag()) => {
                        report.value_bytes += value_bytes as u64;
                    }
                    Ok((key, _)) => {
                        report.problems.push(Problem { lba, key: Some(key), what: What::Elsewhere });
                    }
                    Err((key, what)) => report.problems.push(Problem { lba, key, what }),
                },
            }
            done += 1;
            progress(done, report.keys);
        }
    }
    Ok(report)
}

fn verify(bytes: &[u8], place: Place, volume: u64) -> Result<(Key, usize), (Option<Key>, What)> {
    let (header, key) = record::Unchecked(bytes).header().map_err(|_| (None, What::Header))?;
    let key = Key::new(key).ok_or((None, What::Header))?;
    let identity = header.identity;
    let same = identity.volume == volume
        && identity.location == place.location
        && check_of(identity.stamp) == place.check;
    if !same {
        return Err((Some(key), What::Elsewhere));
    }
    match header.value(bytes) {
        Ok(range) => Ok((key, range.len())),
        Err(_) => Err((Some(key), What::Value)),
    }
}
