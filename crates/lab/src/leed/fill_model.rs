//! What a put costs by the part of a volume that lives, by the arithmetic of decision 0028: the curve beside the measured one.
//!
//! ```text
//!   a log of utilization u has the part f of its head chunk alive:   u = (1 - f) / (-ln f),   and writes each byte A = 1 / (1 - f) times
//!   values moved for each put         m = 1.11 · f_v / (1 - f_v)                               1.11 is simulated
//!   segments visited for each put     v = u_v · (1 + m) · (1 - exp(-λ)) / (e · w),  λ = e · w / u_v
//!   images appended for each put      1 + i,  i = u_v · (1 + m) · (1 - exp(-λ · f_v)) / (e · w)
//!   written for each put              (1 + m) · r + (1 + i) · S · A(u_k)
//!   read for each put                 1 + v + m                                                without the chunks of key logs
//!   space                             (r + k) / F = r / u_v + k / u_k
//! ```
//! with r bytes of a record, k of the key log for each object, S of an image, e objects of a segment, w the part of a value log that is a window.
//! Of all utilizations that the space allows those are taken whose writes and reads cost least.

use octokv_engine::log::compaction_policy::READ_COST_BYTES;

/// What a volume has of each object.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FillModel {
    /// The bytes of a record with its id.
    pub record_bytes: f64,
    /// The bytes of the key log for each object.
    pub key_bytes: f64,
    /// The mean length of an image that a put writes, in bytes.
    pub image_bytes: f64,
    /// Objects of a segment.
    pub segment_objects: f64,
}

/// The cost of a put.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PutCost {
    /// Bytes that the engine writes.
    pub written_bytes: f64,
    /// Its reads of images and records.
    pub reads: f64,
    /// The utilization of the key log, and of the value log.
    pub utilizations: [f64; 2],
}

/// The part of a value log that is compacted at once.
const WINDOW: f64 = 1.0 / 8.0;
/// By how much more values are moved than one by one.
const WINDOW_MOVES: f64 = 1.11;
/// Utilizations of the key log that are tried.
const STEPS: u32 = 4_000;

/// The part of the head chunk that lives in a log of this utilization, from 0 to 1.
pub fn head_live(utilization: f64) -> f64 {
    // The utilization ascends with it.
    let (mut low, mut high) = (1e-12, 1.0 - 1e-12);
    for _ in 0..100 {
        let middle: f64 = (low + high) / 2.0;
        match (1.0 - middle) / -middle.ln() < utilization {
            true => low = middle,
            false => high = middle,
        }
    }
    low
}

/// How often a log of this utilization writes each byte.
pub fn write_amplification(utilization: f64) -> f64 {
    1.0 / (1.0 - head_live(utilization))
}

impl FillModel {
    fn cost(&self, [keys, values]: [f64; 2]) -> PutCost {
        let FillModel { record_bytes, image_bytes, segment_objects, .. } = *self;
        let live = head_live(values);
        let moved = WINDOW_MOVES * live / (1.0 - live);
        let (per_visit, lambda) = (segment_objects * WINDOW, segment_objects * WINDOW / values);
        let visits = |part: f64| values * (1.0 + moved) * (1.0 - (-lambda * part).exp()) / per_visit;
        let images = 1.0 + visits(live);
        PutCost {
            written_bytes: (1.0 + moved) * record_bytes + images * image_bytes * write_amplification(keys),
            reads: 1.0 + visits(1.0) + moved,
            utilizations: [keys, values],
        }
    }

    /// The least cost while the part `fill` of the space for logs lives; `None` if there is no space.
    pub fn least_cost(&self, fill: f64) -> Option<PutCost> {
        let space = (self.record_bytes + self.key_bytes) / fill;
        let costs = (1..STEPS).filter_map(|step| {
            let keys = f64::from(step) / f64::from(STEPS);
            let values = self.record_bytes / (space - self.key_bytes / keys);
            (values > 0.0 && values < 1.0).then(|| self.cost([keys, values]))
        });
        let sum = |cost: &PutCost| cost.written_bytes + cost.reads * READ_COST_BYTES;
        costs.min_by(|a, b| sum(a).total_cmp(&sum(b)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_writes_what_decision_0028_says() {
        for (utilization, times) in [(0.5, 1.26), (0.7, 1.88), (0.8, 2.69), (0.9, 5.18), (0.95, 10.2)] {
            let measured = write_amplification(utilization);
            assert!((measured / times - 1.0).abs() < 0.01, "{utilization}: {measured}");
        }
    }

    /// The next chunk of a simulated log that is compacted.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    enum CleaningPolicy {
        /// The oldest, as in a circular log.
        Oldest,
        /// That with the fewest live records: greedy.
        Emptiest,
    }

    /// A log of chunks with as many records each, in which records of one length are overwritten uniformly.
    struct SimulatedLog {
        chunk_records: usize,
        /// The records of each chunk in the order in which they were appended, live or not.
        chunks: Vec<Vec<u32>>,
        live: Vec<usize>,
        /// The chunk of each object.
        place: Vec<usize>,
        free: Vec<usize>,
        /// The last one is the tail.
        used: std::collections::VecDeque<usize>,
        appended: u64,
    }

    impl SimulatedLog {
        /// Chunks that are free or the tail: these are no space for garbage.
        const APART: usize = 3;

        fn new(chunks: usize, chunk_records: usize, utilization: f64) -> SimulatedLog {
            let objects = ((chunks - Self::APART) * chunk_records) as f64 * utilization;
            let mut log = SimulatedLog {
                chunk_records,
                chunks: vec![Vec::new(); chunks],
                live: vec![0; chunks],
                place: vec![usize::MAX; objects as usize],
                free: (1..chunks).collect(),
                used: [0].into(),
                appended: 0,
            };
            (0..objects as u32).for_each(|object| log.append(object));
            log
        }

        fn append(&mut self, object: u32) {
            let mut tail = *self.used.back().expect("a log has a tail");
            if self.chunks[tail].len() == self.chunk_records {
                tail = self.free.pop().expect("compaction keeps chunks free");
                self.used.push_back(tail);
            }
            let former = std::mem::replace(&mut self.place[object as usize], tail);
            if former != usize::MAX {
                self.live[former] -= 1;
            }
            self.live[tail] += 1;
            self.chunks[tail].push(object);
            self.appended += 1;
        }

        fn compact(&mut self, policy: CleaningPolicy) {
            while self.free.len() < Self::APART - 1 {
                let sealed = 0..self.used.len() - 1;
                let at = match policy {
                    CleaningPolicy::Oldest => 0,
                    CleaningPolicy::Emptiest => {
                        sealed.min_by_key(|&at| self.live[self.used[at]]).expect("sealed")
                    }
                };
                let chunk = self.used.remove(at).expect("it is one of them");
                for object in std::mem::take(&mut self.chunks[chunk]) {
                    // Once, though it may be there twice.
                    if self.place[object as usize] == chunk {
                        self.append(object);
                    }
                }
                self.free.push(chunk);
            }
        }

        /// How often each record is written, when all objects were overwritten four times and then once more.
        fn write_amplification(&mut self, policy: CleaningPolicy) -> f64 {
            let mut random = octokv_base::Prng::new(1);
            let puts = self.place.len() as u64;
            for put in 0..5 * puts {
                if put == 4 * puts {
                    self.appended = 0;
                }
                self.append(random.below(puts) as u32);
                self.compact(policy);
            }
            self.appended as f64 / puts as f64
        }
    }

    /// Under uniform overwrites all records of a chunk die alike, so that the oldest chunks are nearly the emptiest.
    #[test]
    fn no_choice_of_chunks_writes_much_less_than_a_circular_log_under_uniform_overwrites() {
        for utilization in [0.5, 0.9, 0.95] {
            let [oldest, emptiest] = [CleaningPolicy::Oldest, CleaningPolicy::Emptiest]
                .map(|policy| SimulatedLog::new(500, 112, utilization).write_amplification(policy));
            let computed = write_amplification(utilization);
            println!("{utilization}: {computed:.2} computed, {oldest:.2} simulated, {emptiest:.2} greedy");
            assert!((oldest / computed - 1.0).abs() < 0.05, "{utilization}: {oldest}, {computed}");
            assert!(emptiest <= oldest && emptiest > 0.9 * oldest, "{utilization}: {oldest}, {emptiest}");
        }
    }

    /// The values' own goals, 1.25, 5.2 and 10 writes of each at 50, 90 and 95 %, are those of a value log that has the whole volume.
    #[test]
    fn a_value_log_beside_its_key_log_cannot_have_the_amplification_of_the_whole_volume() {
        // Of all chunks, less a 64th that is free while compaction runs, and two tails of each of 8 stores.
        let for_logs = 1.0 - 1.0 / 64.0 - 16.0 / 5_367.0;
        let value_use = |record: f64, live: f64, key_use: f64| {
            let key = 35.8;
            record / (for_logs * (record + key) / live - key / key_use)
        };
        // At 50 % it could with values of 256 B, if the key log had hardly any garbage, and wrote more for it.
        assert!(write_amplification(value_use(292.0, 0.5, 0.8)) < write_amplification(0.5));
        for record in [292.0, 1_060.0] {
            // At 90 % not even beside a key log without garbage.
            let [best, beside_90] =
                [1.0, 0.9].map(|key_use| write_amplification(value_use(record, 0.9, key_use)));
            println!(
                "records of {record} B at 90 %: {best:.2} at least, {beside_90:.2} beside a key log of 90 %"
            );
            assert!(best > 1.05 * write_amplification(0.9), "{best}");
        }
    }

    #[test]
    fn a_put_costs_more_the_more_lives_and_the_key_log_has_more_garbage() {
        let model =
            FillModel { record_bytes: 292.0, key_bytes: 35.8, image_bytes: 1_234.0, segment_objects: 32.0 };
        let fills = [0.3, 0.5, 0.8, 0.9, 0.95];
        let costs = fills.map(|fill| model.least_cost(fill).unwrap());
        for pair in costs.windows(2) {
            assert!(
                pair[0].written_bytes < pair[1].written_bytes && pair[0].reads < pair[1].reads,
                "{pair:?}"
            );
        }
        for (PutCost { utilizations: [keys, values], .. }, fill) in costs.into_iter().zip(fills) {
            assert!(keys < values, "{keys}, {values}");
            // Together they take the space.
            let taken = 292.0 / values + 35.8 / keys;
            assert!((327.8 / taken - fill).abs() < 1e-9, "{taken} of {fill}");
        }
        assert_eq!(model.least_cost(1.01), None);
    }
}
