//! The degree in a closed loop, in virtual time: a device that reads some values at once, and a consumer that works on each of them. Against every fixed degree.

use super::prefetch_degree::{
    COLD_START, ConsumedValue, DEGREE_MAX, FALL_VALUES, ITERATOR_BYTES_MAX, PrefetchBudget, PrefetchDegree,
    PrefetchMode, ScanHistory,
};
use octokv_base::{Nanos, Prng};

/// The latency of a read without its bytes, in nanoseconds: that of a flash page.
const LATENCY: u64 = 80_000;
/// What a channel of the device transfers, in bytes a nanosecond.
const CHANNEL_SPEED: u64 = 3;

const PARALLELISM: [usize; 6] = [1, 2, 4, 8, 16, 32];
const WORK_US: [u64; 8] = [5, 10, 20, 40, 80, 160, 400, 1000];
const VALUE_BYTES: [u64; 4] = [128, 4 << 10, 32 << 10, 128 << 10];
const VALUES: [usize; 5] = [16, 64, 128, 512, 2048];

#[derive(Clone, Copy, Debug)]
struct Cell {
    parallelism: usize,
    work_us: u64,
    value_bytes: u64,
    values: usize,
    /// Whether latencies and work vary by half, at random.
    varies: bool,
}

struct Scan {
    end: u64,
    /// Values that were read and not consumed.
    in_vain: usize,
    degree: PrefetchDegree,
}

/// A scan on an idle device, from time 0 on.
fn scan(cell: &Cell, mode: PrefetchMode, history: &ScanHistory) -> Scan {
    scan_on(&mut vec![0; cell.parallelism], 0, cell, mode, history)
}

/// A scan from `now` on, on a device whose channels are busy until these times.
fn scan_on(
    channels: &mut [u64],
    mut now: u64,
    cell: &Cell,
    mode: PrefetchMode,
    history: &ScanHistory,
) -> Scan {
    // The same for every degree: reads begin in the order of the values.
    let vary = |random: &mut Prng, mean: u64| match cell.varies {
        true => mean / 2 + random.below(mean + 1),
        false => mean,
    };
    let (random_reads, random_work) = (&mut Prng::new(1), &mut Prng::new(2));
    let mut read_ns = || vary(random_reads, LATENCY) + cell.value_bytes / CHANNEL_SPEED;
    let mut degree = PrefetchDegree::new(mode, history);
    // When each value was asked for and came.
    let mut reads: Vec<(u64, u64)> = Vec::new();
    let mut last_taken = None;
    for value in 0..cell.values {
        // What the consumer wants, and what was to be read ahead when it took the preceding value.
        while reads.len() <= value + degree.degree() as usize {
            let channel = channels.iter_mut().min().expect("a channel");
            *channel = now.max(*channel) + read_ns();
            reads.push((now, *channel));
        }
        let (asked, came) = reads[value];
        let taken = now.max(came);
        degree.consume(&ConsumedValue {
            waited: Nanos(taken - now),
            interval: last_taken.map(|last| Nanos(taken - last)),
            latency: Some(Nanos(came - asked)),
            bytes: cell.value_bytes,
        });
        last_taken = Some(taken);
        // Reads ahead begin when the value is taken.
        while reads.len() <= value + degree.degree() as usize {
            let channel = channels.iter_mut().min().expect("a channel");
            *channel = taken.max(*channel) + read_ns();
            reads.push((taken, *channel));
        }
        now = taken + vary(random_work, cell.work_us * 1000);
    }
    Scan { end: now, in_vain: reads.len() - cell.values, degree }
}

fn cells(varies: bool) -> impl Iterator<Item = Cell> {
    PARALLELISM.into_iter().flat_map(move |parallelism| {
        WORK_US.into_iter().flat_map(move |work_us| {
            VALUE_BYTES.into_iter().flat_map(move |value_bytes| {
                VALUES.map(|values| Cell { parallelism, work_us, value_bytes, values, varies })
            })
        })
    })
}

fn best_fixed(cell: &Cell) -> (u64, u32) {
    let time = |degree| scan(cell, PrefetchMode::Fixed(degree), &ScanHistory::default()).end;
    (0..=DEGREE_MAX).map(|degree| (time(degree), degree)).min().expect("a degree")
}

/// The time of a scan in thousandths of that with the best fixed degree, after some scans before.
fn permille(cell: &Cell, scans_before: usize) -> (u64, Scan) {
    let mut history = ScanHistory::default();
    for _ in 0..scans_before {
        history.end_scan(&scan(cell, PrefetchMode::Adaptive, &history).degree);
    }
    let scan = scan(cell, PrefetchMode::Adaptive, &history);
    (scan.end * 1000 / best_fixed(cell).0, scan)
}

fn worst(cells: impl Iterator<Item = Cell>, scans_before: usize) -> (u64, Cell) {
    let of_cells = cells.map(|cell| (permille(&cell, scans_before).0, cell));
    of_cells.max_by_key(|(permille, _)| *permille).expect("a cell")
}

#[test]
fn after_some_scans_every_cell_is_within_5_percent_of_the_best_fixed_degree() {
    let (permille, cell) = worst(cells(false), 8);
    println!("the worst cell: {permille} ‰ in {cell:?}");
    assert!(permille <= 1050, "{permille} ‰ in {cell:?}");
}

/// The time of scans one after another, each of which waits for what the one before left on the device, and their history.
fn scans_in_a_row(cell: &Cell, mode: PrefetchMode, scans: usize) -> (u64, ScanHistory) {
    let (mut channels, mut history, mut now) = (vec![0; cell.parallelism], ScanHistory::default(), 0);
    for _ in 0..scans {
        let scan = scan_on(&mut channels, now, cell, mode, &history);
        history.end_scan(&scan.degree);
        now = scan.end;
    }
    (now, history)
}

#[test]
fn scans_in_a_row_on_a_saturated_device_are_within_5_percent_of_the_best_fixed_degree() {
    for parallelism in [1, 2, 3, 4, 8, 16] {
        for values in [128, 256, 512] {
            let cell = Cell { parallelism, work_us: 20, value_bytes: 128 << 10, values, varies: false };
            // Some of the scans are probes.
            let time = |mode| scans_in_a_row(&cell, mode, 200).0;
            let best =
                (0..=DEGREE_MAX).map(|degree| time(PrefetchMode::Fixed(degree))).min().expect("a degree");
            let permille = time(PrefetchMode::Adaptive) * 1000 / best;
            assert!(permille <= 1050, "{permille} ‰ in {cell:?}");
        }
    }
}

/// Scans whose values each take `latency_us`, as if nothing queued. Gives the history behind them.
fn scans_of_latency(mut history: ScanHistory, scans: u32, latency_us: u64) -> ScanHistory {
    for _ in 0..scans {
        let mut scan = PrefetchDegree::new(PrefetchMode::Adaptive, &history);
        (0..40).for_each(|_| _ = scan.consume(&value(10, 20, latency_us, 128)));
        history.end_scan(&scan);
    }
    history
}

#[test]
fn one_scan_in_64_reads_one_value_after_another_and_measures_the_least_latency_anew() {
    let degree_after = |history: &ScanHistory| {
        let mut scan = PrefetchDegree::new(PrefetchMode::Adaptive, history);
        // Far enough behind the 40 values of the scans before that no end is expected.
        (0..120).map(|_| scan.consume(&value(10, 20, 400, 128))).last()
    };
    // One read that a cache of the device served.
    let history = scans_of_latency(scans_of_latency(ScanHistory::default(), 1, 1), 62, 400);
    // Two of 1 us, and one for 32 consumed values, since it does not gain by more.
    assert_eq!(degree_after(&history), Some(5));
    let history = scans_of_latency(history, 1, 400);
    let mut probe = PrefetchDegree::new(PrefetchMode::Adaptive, &history);
    let degrees: Vec<u32> = (0..5).map(|_| probe.consume(&value(400, 420, 400, 128))).collect();
    assert!(degrees[..2] == [0, 0] && degrees[2] > 0, "{degrees:?}");
    // One that ends before it has measured changes nothing, and is not repeated at once.
    let mut short = history;
    let mut scan = PrefetchDegree::new(PrefetchMode::Adaptive, &short);
    scan.consume(&value(400, 420, 400, 128));
    short.end_scan(&scan);
    assert_eq!(degree_after(&short), Some(5));
    let history = scans_of_latency(history, 1, 400);
    assert_eq!(degree_after(&history), Some(DEGREE_MAX - 1), "three times the 21 of 400 us");
}

#[test]
fn a_scan_without_a_past_loses_less_than_two_latencies() {
    for cell in cells(false) {
        let (cold, best) = (permille(&cell, 0).1.end, best_fixed(&cell).0);
        let latency = LATENCY + cell.value_bytes / CHANNEL_SPEED;
        assert!(cold <= best + 2 * latency, "{cold} ns, {best} ns in {cell:?}");
    }
}

#[test]
fn latencies_and_work_that_vary_by_half_cost_a_tenth() {
    // Shorter ones depend on where the few long latencies fall.
    let long = cells(true).filter(|cell| cell.values >= 128);
    let (permille, cell) = worst(long, 8);
    println!("the worst cell: {permille} ‰ in {cell:?}");
    assert!(permille <= 1100, "{permille} ‰ in {cell:?}");
}

#[test]
fn a_saturated_device_has_a_short_queue() {
    // Shorter scans end before the mean of their intervals has settled.
    for cell in cells(false).filter(|cell| cell.values >= 512) {
        let degree = permille(&cell, 8).1.degree.degree() as usize;
        // Values come in bursts, so the mean of the intervals varies.
        assert!(degree <= 4 * (cell.parallelism + 2), "{degree} in {cell:?}");
    }
}

fn value(waited_us: u64, interval_us: u64, latency_us: u64, bytes: u64) -> ConsumedValue {
    let us = |us| Nanos(us * 1000);
    ConsumedValue {
        waited: us(waited_us),
        interval: Some(us(interval_us)),
        latency: Some(us(latency_us)),
        bytes,
    }
}

#[test]
fn the_degree_is_the_latency_in_units_of_work_and_one() {
    for (interval_us, latency_us, bytes, degree) in [
        (1000, 80, 128, 2),
        (80, 80, 128, 2),
        (79, 80, 128, 3),
        (40, 80, 128, 3),
        (10, 80, 128, 9),
        (1, 80, 128, DEGREE_MAX),
        (0, 80, 128, DEGREE_MAX),
        // Bounded by memory, but one value is read ahead.
        (1, 80, ITERATOR_BYTES_MAX / 8, 8),
        (1, 80, ITERATOR_BYTES_MAX, 1),
        (1, 80, u64::MAX, 1),
    ] {
        let mut scan = PrefetchDegree::new(PrefetchMode::Adaptive, &ScanHistory::default());
        for _ in 0..100 {
            scan.consume(&value(0, interval_us, latency_us, bytes));
        }
        assert_eq!(scan.degree(), degree, "{interval_us} us, {latency_us} us, {bytes} bytes");
    }
}

#[test]
fn the_degree_doubles_with_each_value_rises_at_once_and_falls_slowly() {
    let mut scan = PrefetchDegree::new(PrefetchMode::Adaptive, &ScanHistory::default());
    let rising: Vec<u32> = (0..6).map(|_| scan.consume(&value(0, 5, 80, 128))).collect();
    assert_eq!(rising, [COLD_START, 4, 8, 16, 17, 17]);
    let falls_at = |scan: &mut PrefetchDegree| {
        let before = scan.degree();
        (1..1000).find(|_| scan.consume(&value(0, 1000, 80, 128)) < before)
    };
    falls_at(&mut scan).expect("it falls");
    for degree in (2..16).rev() {
        assert_eq!((falls_at(&mut scan), scan.degree()), (Some(FALL_VALUES), degree));
    }
    assert_eq!(falls_at(&mut scan), None);
    let risen = (0..20).map(|_| scan.consume(&value(75, 80, 80, 128))).max();
    assert!(risen >= Some(4), "it waits: {risen:?}");
}

#[test]
fn a_fixed_degree_stays_and_values_without_reads_say_nothing() {
    for (mode, degree) in
        [(PrefetchMode::Fixed(0), 0), (PrefetchMode::Fixed(7), 7), (PrefetchMode::Fixed(99), DEGREE_MAX)]
    {
        let mut history = ScanHistory::default();
        let mut scan = PrefetchDegree::new(mode, &history);
        for _ in 0..100 {
            assert_eq!(scan.consume(&value(80, 85, 80, 128)), degree);
        }
        history.end_scan(&scan);
        assert_eq!((scan.consumed(), history), (100, ScanHistory::default()));
    }
    let mut scan = PrefetchDegree::new(PrefetchMode::Adaptive, &ScanHistory::default());
    for _ in 0..100 {
        assert_eq!(scan.consume(&ConsumedValue { latency: None, ..value(0, 5, 0, 20) }), COLD_START);
    }
}

/// Scans of these lengths, again and again, at a work of 5 us. Gives the start in the end.
fn start_after(lengths: &[usize]) -> u32 {
    let mut history = ScanHistory::default();
    for &values in lengths.iter().cycle().take(64) {
        let cell = Cell { parallelism: 32, work_us: 5, value_bytes: 128, values, varies: false };
        history.end_scan(&scan(&cell, PrefetchMode::Adaptive, &history).degree);
    }
    history.start()
}

#[test]
fn later_scans_start_with_what_earlier_ones_could_use() {
    for (lengths, start) in [
        (&[1][..], 0),
        (&[2], 1),
        (&[4], 3),
        (&[16], 15),
        (&[200], 18),
        // As many short ones as long ones.
        (&[200, 1], 0),
    ] {
        assert_eq!(start_after(lengths), start, "{lengths:?}");
    }
    assert!(start_after(&[1, 1, 200, 200, 200, 200, 200, 200]) >= 16, "few short ones");
}

#[test]
fn a_scan_that_ends_early_reads_little_in_vain() {
    for values in 1..6 {
        let cell = Cell { parallelism: 32, work_us: 5, value_bytes: 128, values, varies: false };
        let cold = scan(&cell, PrefetchMode::Adaptive, &ScanHistory::default());
        assert!(cold.in_vain <= 1 << values, "{} in vain of {values}", cold.in_vain);
        let warm = permille(&Cell { values: 1, ..cell }, values).1;
        assert_eq!(warm.in_vain, 0, "after {values} scans of one value");
    }
}

/// A history of ten scans of each of these lengths, in turns, of values that ask for a degree of 30 and more.
fn history_of_lengths(lengths: &[usize]) -> ScanHistory {
    let mut history = ScanHistory::default();
    for values in lengths.iter().cycle().take(10 * lengths.len()) {
        let mut scan = PrefetchDegree::new(PrefetchMode::Adaptive, &history);
        (0..*values).for_each(|_| _ = scan.consume(&value(10, 20, 400, 128)));
        history.end_scan(&scan);
    }
    history
}

#[test]
fn a_scan_of_the_usual_length_reads_nothing_in_vain_whatever_the_latency_asks_for() {
    for values in [2, 10, 100, 1000] {
        let history = history_of_lengths(&[values]);
        let mut scan = PrefetchDegree::new(PrefetchMode::Adaptive, &history);
        let (mut asked, mut highest) = (0, 0);
        for taken in 0..values {
            asked = asked.max(taken + 1 + scan.degree() as usize);
            highest = highest.max(scan.degree());
            scan.consume(&value(10, 20, 400, 128));
        }
        // Of a long one: what a sixteenth of what it has consumed allows at its end.
        assert!(asked <= values + values / 16, "{asked} of {values}");
        assert!(highest as usize >= (values - 1).min(40), "{highest} of {values}");
    }
}

#[test]
fn behind_its_expected_end_a_scan_reads_ahead_as_much_as_it_has_read_there() {
    let history = history_of_lengths(&[10]);
    let mut scan = PrefetchDegree::new(PrefetchMode::Adaptive, &history);
    let degrees: Vec<u32> = (0..60).map(|_| scan.consume(&value(10, 20, 400, 128))).collect();
    // At the tenth value of ten, at the next ones, later, and in the end.
    assert_eq!((degrees[8], &degrees[9..13], degrees[29], degrees[59]), (0, &[1, 2, 3, 4][..], 21, 51));
    // Lengths that vary: up to the mean and half of the deviation at once.
    let scan = PrefetchDegree::new(PrefetchMode::Adaptive, &history_of_lengths(&[4, 40]));
    assert!(scan.degree() <= 31, "{}", scan.degree());
}

#[test]
fn latencies_that_differ_raise_the_degree() {
    let mut scan = PrefetchDegree::new(PrefetchMode::Adaptive, &ScanHistory::default());
    for index in 0..200 {
        scan.consume(&value(0, 10, [40, 120][index % 2], 128));
    }
    // 9 by the mean, 17 by mean and deviation, 15 by the least latency.
    assert_eq!(scan.degree(), 15);
}

#[test]
fn a_budget_is_never_exceeded_and_everything_comes_back() {
    let (budget, random) = (PrefetchBudget::new(100_000), &mut Prng::new(1));
    let (mut grants, mut refused) = (Vec::new(), 0);
    for _ in 0..10_000 {
        let bytes = random.below(9_000);
        match budget.take(bytes) {
            Some(grant) => grants.push(grant),
            None => {
                assert!(budget.taken_bytes() + bytes > budget.bytes_max(), "refused without a reason");
                refused += 1;
                for _ in 0..random.below(9) {
                    grants.swap_remove(random.below(grants.len() as u64) as usize);
                }
            }
        }
        assert_eq!(grants.iter().map(|grant| grant.bytes()).sum::<u64>(), budget.taken_bytes());
        assert!(budget.taken_bytes() <= 100_000);
    }
    assert!(refused > 100);
    assert!(budget.take(u64::MAX).is_none());
    grants.clear();
    assert_eq!(budget.taken_bytes(), 0);
}
