//! The host of the iterator simulation: one thread that seeks and then takes pair after pair, one command at a time
//! (db_bench's SeekRandom), as a future over any engine.
//!
//! ```text
//!   create ─▶ seek and first pair ─▶ Next ─▶ Next ─▶ … ─▶ drop       a scan of L pairs: a Seek and L − 1 Nexts, as the paper counts
//! ```
//! In: an engine with the pairs of [`put_pairs`], costs, a [`ScanConfig`]. Out: [`ScanStats`], or what was wrong with a pair: every
//! pair is compared with the one that was written.

use super::parameters::{CommandCosts, KEY_BYTES};
use octokv_base::{Buffer, Key, Nanos, Prng};
use octokv_device::ssd_model::drive_profiles::transfer_time;
use octokv_engine::{Engine, IteratorOptions, PairSink, PutMode, PutOutcome};
use octokv_runtime::ReactorHandle;
use std::cell::RefCell;
use std::rc::Rc;

/// Scans to run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScanConfig {
    /// Number of scans, each from a random key.
    pub scans: u32,
    /// Pairs of a scan, at least 1 and at most the pairs of the store.
    pub length: u32,
    /// Pairs that a command may return; the paper's is 1.
    pub batch: u32,
    /// Seed of the choice of keys.
    pub seed: u64,
}

/// What is stored: keys 0 to `count` − 1 as big-endian numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoredPairs {
    /// Number of pairs.
    pub count: u32,
    /// Length of each value.
    pub value_bytes: u32,
}

/// Measurements of scans.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ScanStats {
    /// Time of each seek with its first pair, in nanoseconds.
    pub seek_ns: Vec<u32>,
    /// Time of each further command, in nanoseconds.
    pub next_ns: Vec<u32>,
    /// Pairs received.
    pub pairs: u64,
    /// Time from the first command to the last response; creating an iterator is included.
    pub span: Nanos,
}

impl ScanStats {
    /// Pairs per second.
    pub fn pairs_per_s(&self) -> f64 {
        self.pairs as f64 / self.span.as_secs_f64()
    }
}

/// The key with a number.
pub fn key_of(number: u32) -> Key {
    const { assert!(KEY_BYTES == size_of::<u32>()) };
    Key::new(&number.to_be_bytes()).expect("a key of 4 bytes")
}

/// The start of each value; the rest is zeros, which take no memory in the modelled drive.
fn value_start(number: u32) -> [u8; 8] {
    octokv_base::prng::mix64(u64::from(number)).to_le_bytes()
}

/// Stores pairs by their numbers in the order given, until there are none. Several such futures share the numbers.
///
/// # Errors
/// A message if a put failed.
pub async fn put_pairs(
    engine: &impl Engine,
    pairs: StoredPairs,
    numbers: Rc<RefCell<impl Iterator<Item = u32>>>,
) -> Result<(), String> {
    loop {
        let Some(number) = numbers.borrow_mut().next() else { return Ok(()) };
        let from = engine.record_layout().value_offset(KEY_BYTES);
        let mut record = Buffer::zeroed(from + pairs.value_bytes as usize);
        record[from..from + 8].copy_from_slice(&value_start(number));
        let put = engine.put(&key_of(number), PutMode::Upsert, record, pairs.value_bytes as usize).await;
        match put {
            Ok(PutOutcome::Stored | PutOutcome::Exists | PutOutcome::NotFound) => {}
            other => return Err(format!("put {number}: {other:?}")),
        }
    }
}

/// Receives the pairs of one command.
struct ScanSink {
    pairs: StoredPairs,
    left: u32,
    /// Number of the next pair.
    expected: u32,
    bytes: u64,
    wrong: Option<String>,
}

impl PairSink for ScanSink {
    fn has_space(&mut self, _: usize, _: usize) -> bool {
        self.left > 0
    }

    fn push(&mut self, key: &[u8], value: &[u8]) {
        let is_right = key == self.expected.to_be_bytes()
            && value.len() == self.pairs.value_bytes as usize
            && value.starts_with(&value_start(self.expected));
        if !is_right && self.wrong.is_none() {
            let lengths = (key.len(), value.len());
            self.wrong = Some(format!("{key:02x?} of {lengths:?} bytes instead of pair {}", self.expected));
        }
        self.left = self.left.saturating_sub(1);
        self.expected += 1;
        self.bytes += (key.len() + value.len()) as u64;
    }
}

/// Runs scans one after another.
///
/// # Errors
/// A message if the engine failed, or a pair is missing or not the one that was written.
///
/// # Panics
/// If a scan is longer than the store.
pub async fn run_scans<E: Engine>(
    engine: &E,
    handle: &ReactorHandle,
    costs: CommandCosts,
    pairs: StoredPairs,
    config: ScanConfig,
) -> Result<ScanStats, String> {
    assert!((1..=pairs.count).contains(&config.length) && config.batch > 0, "{config:?} of {pairs:?}");
    let mut random = Prng::new(config.seed);
    let mut stats = ScanStats::default();
    let began = handle.now();
    for _ in 0..config.scans {
        let first = random.below(u64::from(pairs.count - config.length) + 1) as u32;
        handle.sleep(costs.before).await;
        let created = engine.create_iterator(IteratorOptions::default()).await;
        let iterator = created.map_err(|error| format!("create: {error}"))?.ok_or("too many iterators")?;
        handle.sleep(costs.after).await;
        let mut taken = 0;
        while taken < config.length {
            let submitted = handle.now();
            handle.sleep(costs.before).await;
            if taken == 0 {
                let found = engine.seek_iterator(&iterator, &key_of(first)).await;
                found.map_err(|error| format!("seek {first}: {error}"))?;
            }
            let batch = if taken == 0 { 1 } else { config.batch.min(config.length - taken) };
            let mut sink = ScanSink { pairs, left: batch, expected: first + taken, bytes: 0, wrong: None };
            let progress = engine.next_pairs(&iterator, &mut sink).await;
            let progress = progress.map_err(|error| format!("next {}: {error}", sink.expected))?;
            if let Some(wrong) = sink.wrong {
                return Err(wrong);
            }
            let received = sink.expected - first - taken;
            if received == 0 {
                return Err(format!("{progress:?} instead of pair {}", sink.expected));
            }
            handle.sleep(costs.after + transfer_time(sink.bytes, costs.link_bytes_per_s)).await;
            let span = (handle.now() - submitted).0.try_into().unwrap_or(u32::MAX);
            if taken == 0 {
                stats.seek_ns.push(span)
            } else {
                stats.next_ns.push(span)
            }
            taken += received;
        }
        stats.pairs += u64::from(taken);
    }
    stats.span = handle.now() - began;
    Ok(stats)
}
