//! The chunks that compacting a window takes before it gives any back.
//!
//! A visit moves all records that a segment has in the window, also those of chunks that become free much later. So a window first takes space: with
//! c chunks, Λ live records of a segment in them, and the part x of the chunks compacted,
//!
//! ```text
//!   segments visited    1 - exp(-Λ x)
//!   chunks taken        c · (G · (1 - exp(-Λ x)) - x)        G: what visiting all segments moves, for each chunk of the window
//!   at most             at x = ln(G Λ) / Λ                   with 86 % live and 3.7 records: 0.29 c, behind a third of the chunks
//! ```
//! In: what lives in a window. Out: how many chunks it still takes, and whether it has given back what it took. Images are left out: each makes
//! another one garbage, which compaction of the key log frees meanwhile. Tested below.

/// What a window takes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct WindowSpace {
    chunks: f64,
    /// G.
    moved: f64,
    /// Λ.
    records: f64,
}

impl WindowSpace {
    /// Of a window of `chunks` chunks, which is 1 at least, with the live contents of `live_chunks` chunks in so many records.
    pub(super) fn new(chunks: u32, live_chunks: f64, records: u64, segments: u64) -> WindowSpace {
        let (chunks, records) = (f64::from(chunks.max(1)), records as f64 / segments.max(1) as f64);
        let visited = -(-records).exp_m1();
        let moved = if visited > 0.0 { live_chunks / chunks / visited } else { 0.0 };
        WindowSpace { chunks, moved, records }
    }

    /// The chunks taken when so large a part of the window is compacted, less those that became free.
    fn taken(&self, part: f64) -> f64 {
        self.chunks * (self.moved * -(-self.records * part).exp_m1() - part)
    }

    /// The part that is compacted when most is taken, from 0 to 1.
    fn peak(&self) -> f64 {
        let growth = self.moved * self.records;
        if growth > 1.0 { (growth.ln() / self.records).min(1.0) } else { 0.0 }
    }

    /// Whether it has taken a chunk more than it gave back, when so many of its chunks are compacted.
    pub(super) fn has_debt(&self, compacted: u32) -> bool {
        self.taken(f64::from(compacted) / self.chunks) >= 1.0
    }

    /// The most chunks that it will take from now on, when so many of its chunks are compacted.
    pub(super) fn takes_more(&self, compacted: u32) -> u64 {
        let (part, peak) = (f64::from(compacted) / self.chunks, self.peak());
        // Not negative, and at most the chunks of the device.
        if part < peak { (self.taken(peak) - self.taken(part)).ceil() as u64 } else { 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_takes_most_behind_a_third_of_its_chunks() {
        // 72 chunks with 86 % live, 3.7 live records a segment.
        let window = WindowSpace::new(72, 0.86 * 72.0, 3_700, 1_000);
        // 21.03.
        assert_eq!(window.takes_more(0), 22);
        assert!((0.30..0.33).contains(&window.peak()), "{}", window.peak());
        // Less and less is left to take, by what was taken.
        let left: Vec<u64> = (0..=72).map(|compacted| window.takes_more(compacted)).collect();
        assert!(
            left.windows(2).all(|pair| pair[1] <= pair[0]) && left[24..].iter().all(|&left| left == 0),
            "{left:?}"
        );
        // It has a debt from the first chunk on, and gives it back at about four fifths.
        let debts: Vec<u32> = (0..=72).filter(|&compacted| window.has_debt(compacted)).collect();
        assert_eq!((debts[0], debts.len() as u32), (1, debts[debts.len() - 1]), "{debts:?}");
        assert!((54..62).contains(&debts.len()), "{debts:?}");
        // What was taken at the end is the live part less the chunks that became free.
        assert!((window.taken(1.0) - 72.0 * (0.86 - 1.0)).abs() < 1e-9);
        // Twice the window takes twice as much from more records.
        let longer = WindowSpace::new(144, 0.86 * 144.0, 7_400, 1_000);
        assert!(longer.takes_more(0) > 2 * window.takes_more(0));
    }

    #[test]
    fn a_window_without_much_in_it_takes_nothing() {
        // Fewer records than segments: hardly any is moved before its chunk is compacted.
        assert_eq!(WindowSpace::new(10, 9.0, 100, 1_000_000).takes_more(0), 0);
        assert_eq!(WindowSpace::new(10, 0.0, 0, 10).takes_more(0), 0);
        assert_eq!(WindowSpace::new(0, 0.0, 0, 0).takes_more(0), 0);
        assert!((0..=10).all(|compacted| !WindowSpace::new(10, 9.0, 100, 1_000_000).has_debt(compacted)));
        // One chunk takes what lives in it, or less.
        assert!(WindowSpace::new(1, 1.0, 1_000, 10).takes_more(0) <= 1);
    }
}
