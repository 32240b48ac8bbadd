//! The timing model with round numbers: each kind of wait on its own, then properties of random operations.
//!
//! The drive: dies 0 and 2 on one channel, 1 and 3 on the other; a stripe is 2 pages of 4 KiB. In microseconds: page read
//! 50, program 500, erase 2,000, channel transfer 10 per page, link 5 per page; command 5 for a read, else 3.

use octokv_base::{Lba, Nanos, Prng};
use octokv_device::ssd_model::drive_profiles::{DriveProfile, EVO_970, FlushModel, SlcCache};
use octokv_device::ssd_model::{SsdModel, SsdStatistics};

const TEST_PROFILE: DriveProfile = DriveProfile {
    name: "round",
    product: "round numbers",
    capacity_bytes: 4 * 20 * 16 * 4096,
    channels: 2,
    dies_per_channel: 2,
    planes: 1,
    page_bytes: 8192,
    pages_per_block: 8,
    blocks_per_plane: 26,
    page_read: Nanos::from_micros(50),
    page_program: Nanos::from_micros(500),
    block_erase: Nanos::from_micros(2_000),
    bits_per_cell: 2,
    slc_cache: None,
    channel_bytes_per_s: 409_600_000,
    read_transfer_bytes_min: 4096,
    link_read_bytes_per_s: 819_200_000,
    link_write_bytes_per_s: 819_200_000,
    read_overhead: Nanos::from_micros(5),
    write_overhead: Nanos::from_micros(3),
    read_interval: Nanos::from_micros(1),
    write_interval: Nanos::from_micros(1),
    buffer_bytes: 8 * 4096,
    flush: FlushModel::DrainBuffer { mapping_write: Nanos::from_micros(100) },
    gc_threshold_blocks: 3,
};

/// When a test begins: all earlier work is complete.
const BEGIN: Nanos = Nanos::from_secs(1);

/// An operation: its submission in microseconds after `BEGIN`, the first page and the number of pages.
#[derive(Clone, Copy, Debug)]
enum Op {
    Read(u64, u64, u64),
    Write(u64, u64, u64),
    Flush(u64),
    Trim(u64, u64, u64),
}
use Op::{Flush as F, Read as R, Trim as T, Write as W};

fn apply(model: &mut SsdModel, begin: Nanos, op: Op) -> Nanos {
    let at = |after: u64| begin + Nanos::from_micros(after);
    match op {
        R(after, page, pages) => model.read(at(after), Lba(page), pages),
        W(after, page, pages) => model.write(at(after), Lba(page), pages),
        F(after) => model.flush(at(after)),
        T(after, page, pages) => model.trim(at(after), Lba(page), pages),
    }
}

/// A drive with its first 16 pages on flash: pages 0 and 1 on die 0, 2 and 3 on die 1, and so on, twice around.
fn prefilled_model(drive: DriveProfile) -> SsdModel {
    let mut model = SsdModel::new(drive, 4096);
    for stripe in 0..8 {
        model.write(Nanos::from_millis(10 * stripe), Lba(2 * stripe), 2);
    }
    model.flush(Nanos::from_millis(100));
    assert_eq!(model.buffered_pages(), 0);
    model
}

/// Applies the operations and gives the completion of the last in microseconds after `BEGIN`.
fn completion_us(mut model: SsdModel, ops: &[Op]) -> u64 {
    let done = ops.iter().map(|&op| apply(&mut model, BEGIN, op)).last().unwrap();
    (done - BEGIN).0 / 1_000
}

#[test]
fn each_operation_takes_its_modelled_time() {
    let capacitors = DriveProfile { flush: FlushModel::Immediate, ..TEST_PROFILE };
    // The expected completion of the last operation in microseconds.
    let table: [(&str, u64, DriveProfile, &[Op]); 22] = [
        ("a page: command, cells, channel, link", 70, TEST_PROFILE, &[R(0, 0, 1)]),
        ("a stripe: its pages are read together", 85, TEST_PROFILE, &[R(0, 0, 2)]),
        ("two stripes on two dies and channels", 95, TEST_PROFILE, &[R(0, 0, 4)]),
        ("never written: no die", 10, TEST_PROFILE, &[R(0, 20, 1)]),
        ("two reads of one die", 120, TEST_PROFILE, &[R(0, 0, 1), R(0, 1, 1)]),
        ("two dies and channels: the link", 75, TEST_PROFILE, &[R(0, 0, 1), R(0, 2, 1)]),
        ("two dies, one channel", 80, TEST_PROFILE, &[R(0, 0, 1), R(0, 4, 1)]),
        ("a busy die delays no other die", 75, TEST_PROFILE, &[R(0, 0, 1), R(0, 1, 1), R(0, 2, 1)]),
        ("a write: command, link", 8, TEST_PROFILE, &[W(0, 30, 1)]),
        ("read from the buffer", 30, TEST_PROFILE, &[W(0, 30, 1), R(20, 30, 1)]),
        ("read from the buffer while programmed", 30, TEST_PROFILE, &[W(0, 30, 2), R(20, 30, 1)]),
        ("read when it is programmed", 670, TEST_PROFILE, &[W(0, 30, 2), R(600, 30, 1)]),
        // The program starts when both pages have arrived, at 13, and ends at 13 + 20 + 500.
        ("a read after a program", 598, TEST_PROFILE, &[W(0, 30, 2), R(20, 0, 1)]),
        ("a read before a program", 80, TEST_PROFILE, &[W(0, 30, 2), R(10, 0, 1)]),
        ("a read on another die during a program", 90, TEST_PROFILE, &[W(0, 30, 2), R(20, 2, 1)]),
        // The ninth page waits for the first program, at 533, the eleventh for the second, at 543.
        ("the buffer is full", 553, TEST_PROFILE, &[W(0, 30, 12)]),
        (
            "written twice, kept once",
            53,
            TEST_PROFILE,
            &[W(0, 30, 7), W(0, 30, 1), W(10, 37, 1), W(20, 36, 1)],
        ),
        // Half a stripe is programmed: from 20 on, channel 20, cells 500, mapping 100.
        ("a flush", 640, TEST_PROFILE, &[W(0, 30, 1), F(20)]),
        ("a flush of nothing new", 1003, TEST_PROFILE, &[W(0, 30, 1), F(20), F(1000)]),
        ("a flush during a flush", 640, TEST_PROFILE, &[W(0, 30, 1), F(20), F(30)]),
        ("a flush with capacitors", 23, capacitors, &[W(0, 30, 1), F(20)]),
        ("trimmed: no die", 20, TEST_PROFILE, &[T(0, 0, 2), R(10, 0, 1)]),
    ];
    for (name, want, drive, ops) in table {
        assert_eq!(completion_us(prefilled_model(drive), ops), want, "{name}");
    }
}

#[test]
fn prefilled_pages_are_read_from_dies() {
    let prefilled = || SsdModel::new(TEST_PROFILE, 4096).prefilled();
    assert_eq!(completion_us(prefilled(), &[R(0, 20, 1)]), 70);
    assert_eq!(completion_us(prefilled(), &[R(0, 20, 1), R(0, 21, 1)]), 120);
    assert_eq!(completion_us(prefilled(), &[W(0, 20, 1), R(10, 20, 1)]), 20);
}

#[test]
fn a_partial_page_write_reads_the_page_without_delaying_the_host() {
    let mut model = SsdModel::new(TEST_PROFILE, 512);
    model.write(Nanos::ZERO, Lba(0), 16);
    let done = model.write(BEGIN, Lba(3), 1);
    assert_eq!(done - BEGIN, Nanos(3_000 + 625));
    assert_eq!(model.statistics().reads, 1);
    // The page is in the buffer now; a page that was never written needs no read.
    model.write(BEGIN + Nanos(10), Lba(4), 1);
    model.write(BEGIN + Nanos(20), Lba(160), 1);
    assert_eq!(model.statistics().reads, 1);
}

#[test]
fn the_slc_cache_is_fast_until_full_and_again_after_idle_time() {
    // Two SLC blocks of 8 pages, each on one die.
    let idle_delay = Nanos::from_millis(50);
    let slc_cache = SlcCache { bytes: 16 * 4096, page_program: Nanos::from_micros(100), idle_delay };
    let mut model = SsdModel::new(DriveProfile { slc_cache: Some(slc_cache), ..TEST_PROFILE }, 4096);
    let mut programs = |begin: Nanos| {
        for stripe in 0..24 {
            model.write(begin + Nanos::from_millis(stripe), Lba(2 * stripe), 2);
        }
        let after = begin + Nanos::from_millis(30);
        model.read(after, Lba(0), 1);
        let SsdStatistics { slc_programs, programs, pages_moved, .. } = model.statistics();
        (*slc_programs, *programs, *pages_moved)
    };
    assert_eq!(programs(Nanos::ZERO), (8, 16, 0));
    // All SLC pages have moved, and the next writes are as fast.
    let (slc, dense, moved) = programs(BEGIN);
    assert_eq!((slc, dense, moved), (16, 16 + 8 + 16, 16));
}

/// Fills the drive's `pages` and overwrites them at random `rounds` times, one page per command.
fn churn(model: &mut SsdModel, pages: u64, rounds: u64, seed: u64) -> Nanos {
    let mut random = Prng::new(seed);
    let mut now = Nanos::ZERO;
    for page in 0..pages {
        now = model.write(now, Lba(page), 1);
    }
    for _ in 0..rounds * pages {
        now = model.write(now, Lba(random.below(pages)), 1);
    }
    now
}

#[test]
fn garbage_collection_frees_stale_blocks_and_skips_trimmed_pages() {
    let pages = TEST_PROFILE.capacity_bytes / 4096;
    let mut full = SsdModel::new(TEST_PROFILE, 4096);
    let now = churn(&mut full, pages, 4, 1);
    full.flush(now);
    assert_eq!(full.mapped_pages(), pages);
    let full = full.statistics();
    assert!(full.erases > 100 && full.pages_moved > pages, "{full:?}");

    let mut trimmed = SsdModel::new(TEST_PROFILE, 4096);
    let now = churn(&mut trimmed, pages, 0, 1);
    trimmed.trim(now, Lba(pages / 2), pages / 2);
    assert!(trimmed.mapped_pages() <= pages / 2);
    let mut random = Prng::new(2);
    let mut now = now;
    for _ in 0..4 * pages {
        now = trimmed.write(now, Lba(random.below(pages / 2)), 1);
    }
    let moved = trimmed.statistics().pages_moved;
    assert!(moved * 10 < full.pages_moved, "{moved} of {}", full.pages_moved);
}

#[test]
fn garbage_collection_delays_reads() {
    let pages = TEST_PROFILE.capacity_bytes / 4096;
    let mean = |rounds| {
        let mut model = SsdModel::new(TEST_PROFILE, 4096);
        let mut now = churn(&mut model, pages, rounds, 3);
        let (mut random, mut total) = (Prng::new(4), Nanos::ZERO);
        for _ in 0..80 {
            now = model.write(now + Nanos::from_millis(2), Lba(random.below(pages)), 1);
            let soon = now + Nanos::from_micros(50);
            total = total + (model.read(soon, Lba(random.below(pages)), 1) - soon);
        }
        total.0 / 80_000
    };
    let (new, worn) = (mean(0), mean(4));
    assert!(worn > 2 * new, "{new} µs when new, {worn} µs when worn");
}

/// The write amplification of greedy collection under uniform overwrites, with `spread` = physical over used space:
/// a / (a + W(−a·e^−a)), W being Lambert's function (Xiang and Kurkoski, "An Improved Analytical Expression for Write
/// Amplification in NAND Flash", 2012; Desnoyers, 2012). For 1.3 they give 2.36.
fn greedy_write_amplification(spread: f64) -> f64 {
    let argument = -spread * (-spread).exp();
    // The principal branch lies between −1 and 0: halve the interval.
    let (mut low, mut high) = (-1.0_f64, 0.0_f64);
    for _ in 0..100 {
        let middle = (low + high) / 2.0;
        if middle * middle.exp() < argument { low = middle } else { high = middle }
    }
    spread / (spread + low)
}

#[test]
fn write_amplification_matches_the_greedy_gc_formula() {
    assert!((greedy_write_amplification(1.3) - 2.36).abs() < 0.01, "{}", greedy_write_amplification(1.3));
    // 4 dies of 200 blocks of 128 pages.
    let physical = 4 * 200 * 128;
    for percent in [90, 80, 70] {
        let used = physical * percent / 100;
        let capacity_bytes = used * 4096;
        let drive =
            DriveProfile { capacity_bytes, pages_per_block: 64, blocks_per_plane: 200, ..TEST_PROFILE };
        let mut model = SsdModel::new(drive, 4096);
        let mut now = churn(&mut model, used, 4, 5);
        let before = model.statistics().clone();
        let mut random = Prng::new(6);
        for _ in 0..4 * used {
            now = model.write(now, Lba(random.below(used)), 1);
        }
        let after = model.statistics();
        let written = (after.host_pages_written - before.host_pages_written) as f64;
        let measured = (after.flash_pages_written - before.flash_pages_written) as f64 / written;
        // Each die has three spare and two open blocks: between zero and five are outside the formula.
        let least = greedy_write_amplification(physical as f64 / used as f64);
        let most = greedy_write_amplification((physical - 4 * 5 * 128) as f64 / used as f64);
        println!("{percent} % used: {measured:.3}, expected {least:.3} to {most:.3}");
        assert!(
            (least..most).contains(&measured),
            "{percent} % used: {measured:.3}, not {least:.3} to {most:.3}"
        );
    }
}

fn random_op(random: &mut Prng, pages: u64) -> Op {
    let (page, count) = (random.below(pages), 1 + random.below(12));
    let count = count.min(pages - page);
    match random.below(20) {
        0 => F(0),
        1 => T(0, page, count),
        2..=9 => R(0, page, count),
        _ => W(0, page, count),
    }
}

#[test]
fn random_operations_never_finish_early_and_all_die_time_is_accounted() {
    let slc_cache = SlcCache {
        bytes: 64 * 4096,
        page_program: Nanos::from_micros(100),
        idle_delay: Nanos::from_millis(5),
    };
    for seed in 0..40 {
        let drive = DriveProfile { slc_cache: (seed % 2 == 0).then_some(slc_cache), ..TEST_PROFILE };
        let pages = drive.capacity_bytes / 4096;
        let run = || {
            let (mut random, mut model) = (Prng::new(seed), SsdModel::new(drive, 4096));
            let (mut now, mut trace) = (Nanos::ZERO, Vec::new());
            for _ in 0..4_000 {
                let pause = if random.one_in(500) { 50_000_000 } else { 200_000 };
                now = now + Nanos(random.below(pause));
                // Cores read their clocks at different moments.
                let seen = now - Nanos(random.below(3_000));
                let op = random_op(&mut random, pages);
                let done = apply(&mut model, seen, op);
                assert!(done > seen, "{op:?} completed before its submission");
                trace.push(done);
            }
            // On an idle drive an operation takes its own time, independent of history.
            let idle = now + Nanos::from_secs(10);
            model.write(idle, Lba(0), 2);
            let idle = idle + Nanos::from_secs(10);
            assert_eq!(model.read(idle, Lba(0), 1), idle + Nanos::from_micros(70), "seed {seed}");
            (model.statistics().clone(), trace)
        };
        let (statistics, trace) = run();
        assert_eq!((&statistics, &trace), (&run().0, &run().1), "seed {seed} does not repeat");
        let busy: u64 = statistics.die_busy.iter().map(|busy| busy.0 / 1_000).sum();
        let SsdStatistics { reads, programs, slc_programs, erases, .. } = statistics;
        assert_eq!(busy, 50 * reads + 500 * programs + 100 * slc_programs + 2_000 * erases);
        assert_eq!(statistics.flash_pages_written, 2 * (programs + slc_programs));
        assert!(statistics.buffer_pages_max <= 8 && erases > 0 && statistics.pages_moved > 0);
        assert_eq!(slc_programs > 0, seed % 2 == 0);
    }
}

#[test]
fn the_mapping_table_grows_with_written_pages_only() {
    let mut model = SsdModel::new(EVO_970, 4096);
    let empty = model.memory_bytes();
    assert!(empty < 2 << 20, "{empty} bytes for an empty drive");
    let gib = (1 << 30) / 4096;
    let mut now = Nanos::ZERO;
    for at in (0..gib).step_by(32) {
        now = model.write(now, Lba(at), 32);
    }
    let once = model.memory_bytes() - empty;
    // 4 bytes for each page's address and 4 for its reverse entry, and an open block of 2,048 SLC pages per die.
    assert!(once as u64 <= 8 * gib + 16 * 4 * 2048, "{once} bytes for {gib} pages");
    for round in 1..20 {
        for at in (0..gib).step_by(32) {
            now = model.write(now, Lba((at + round * 4096) % gib), 32);
        }
    }
    model.flush(now);
    assert_eq!(model.mapped_pages(), gib);
    let again = model.memory_bytes() - empty;
    assert!(again < 2 * once, "{again} bytes after twenty times as much was written, {once} after the first");
}
