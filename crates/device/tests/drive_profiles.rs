//! The modelled drives against their data sheets, measured by a host with a fixed queue depth.
//!
//! Each number has its tolerance; cases that a sheet does not cover are fixed at the model's value, so that a change of
//! the model is visible.

use octokv_base::{Lba, Nanos, Prng};
use octokv_device::ssd_model::SsdModel;
use octokv_device::ssd_model::drive_profiles::{COSMOS_PLUS, DCT_983, DRIVE_PROFILES, DriveProfile, EVO_970};
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Pages of 4 KiB that hosts use in these runs: 4 GiB.
const PAGES: u64 = (4 << 30) / 4096;
const GB: u64 = 1_000_000_000;

/// A host: submits one operation at a time and gives its completion time.
type Host<'a> = dyn FnMut(&mut SsdModel, Nanos) -> Nanos + 'a;

/// Keeps `depth` operations in flight from `begin` on until `count` have completed. Gives the duration.
fn run_closed_loop(model: &mut SsdModel, begin: Nanos, depth: u64, count: u64, host: &mut Host) -> Nanos {
    // The host submits the next operation at each completion, in the order of completion.
    let mut in_flight: BinaryHeap<_> = (0..depth).map(|_| Reverse(host(model, begin))).collect();
    let mut last = begin;
    for _ in 0..count {
        let Reverse(done) = in_flight.pop().expect("as many as the depth");
        last = done;
        in_flight.push(Reverse(host(model, done)));
    }
    last - begin
}

fn per_second(count: u64, span: Nanos) -> f64 {
    count as f64 / span.as_secs_f64()
}

/// A drive with `PAGES` written sequentially and flushed, and a time at which it is idle.
fn filled_model(drive: &DriveProfile) -> (SsdModel, Nanos) {
    let mut model = SsdModel::new(*drive, 4096);
    let mut now = Nanos::ZERO;
    for at in (0..PAGES).step_by(32) {
        now = model.write(now, Lba(at), 32);
    }
    let settled = model.flush(now) + Nanos::from_millis(100);
    (model, settled)
}

fn random_reads(drive: &DriveProfile, depth: u64) -> f64 {
    let ((mut model, begin), mut random) = (filled_model(drive), Prng::new(1));
    let mut host = |model: &mut SsdModel, now| model.read(now, Lba(random.below(PAGES)), 1);
    per_second(200_000, run_closed_loop(&mut model, begin, depth, 200_000, &mut host))
}

fn random_writes(drive: &DriveProfile, depth: u64) -> f64 {
    let ((mut model, begin), mut random) = (filled_model(drive), Prng::new(2));
    let mut host = |model: &mut SsdModel, now| model.write(now, Lba(random.below(PAGES)), 1);
    per_second(200_000, run_closed_loop(&mut model, begin, depth, 200_000, &mut host))
}

/// MB/s of sequential reads of 128 KiB at depth 32.
fn sequential_reads(drive: &DriveProfile) -> f64 {
    let ((mut model, begin), mut at) = (filled_model(drive), 0);
    let mut host = |model: &mut SsdModel, now| {
        at = (at + 32) % PAGES;
        model.read(now, Lba(at), 32)
    };
    per_second(20_000 * 128 * 1024, run_closed_loop(&mut model, begin, 32, 20_000, &mut host)) / 1e6
}

/// MB/s of sequential writes of 128 KiB at depth 32 to a new drive, in some ranges of the bytes written.
fn sequential_writes<const N: usize>(drive: &DriveProfile, ranges: [(u64, u64); N]) -> [f64; N] {
    const COMMAND: u64 = 128 * 1024;
    let (mut model, mut at, mut now, mut written) = (SsdModel::new(*drive, 4096), 0, Nanos::ZERO, 0);
    let mut host = |model: &mut SsdModel, now| {
        at += 32;
        model.write(now, Lba(at - 32), 32)
    };
    ranges.map(|(from, to)| {
        now = now + run_closed_loop(&mut model, now, 32, (from - written) / COMMAND, &mut host);
        let count = (to - from) / COMMAND;
        let span = run_closed_loop(&mut model, now, 32, count, &mut host);
        (now, written) = (now + span, to);
        per_second(count * COMMAND, span) / 1e6
    })
}

fn assert_within_percent(name: &str, measured: f64, sheet: f64, within: f64) {
    let off = 100.0 * (measured / sheet - 1.0);
    println!("{name}: {measured:.0}, wanted {sheet:.0}: {off:+.1} %");
    assert!(off.abs() <= within, "{name}: {measured:.0}, not within {within} % of {sheet:.0}");
}

#[test]
fn a_970_evo_reads_and_writes_as_its_sheet_says() {
    let drive = &EVO_970;
    assert_within_percent("4 KiB random read, depth 1, IOPS", random_reads(drive, 1), 15_000.0, 2.0);
    assert_within_percent("4 KiB random read, depth 128, IOPS", random_reads(drive, 128), 370_000.0, 5.0);
    assert_within_percent("4 KiB random write, depth 1, IOPS", random_writes(drive, 1), 50_000.0, 2.0);
    assert_within_percent("4 KiB random write, depth 128, IOPS", random_writes(drive, 128), 450_000.0, 2.0);
    assert_within_percent("128 KiB sequential read, MB/s", sequential_reads(drive), 3_400.0, 2.0);
    let ranges = [(GB, 4 * GB), (20 * GB, 43 * GB / 2), (23 * GB, 25 * GB)];
    let [first, last, beyond] = sequential_writes(drive, ranges);
    assert_within_percent("128 KiB sequential write, SLC cache, MB/s", first, 2_300.0, 2.0);
    assert_within_percent("up to the 22nd GB, MB/s", last, 2_300.0, 2.0);
    assert_within_percent("beyond, MB/s", beyond, 600.0, 2.0);
}

#[test]
fn the_drive_of_the_leed_paper_reads_and_writes_as_its_sheet_says() {
    let drive = &DCT_983;
    assert_within_percent("4 KiB random read, depth 1, µs", 1e6 / random_reads(drive, 1), 85.0, 2.0);
    assert_within_percent("4 KiB random read, depth 128, IOPS", random_reads(drive, 128), 400_000.0, 10.0);
    assert_within_percent("4 KiB random read, depth 256, IOPS", random_reads(drive, 256), 400_000.0, 5.0);
    assert_within_percent("4 KiB random write, depth 1, µs", 1e6 / random_writes(drive, 1), 50.0, 2.0);
    assert_within_percent(
        "4 KiB random write, depth 128, new, IOPS",
        random_writes(drive, 128),
        256_000.0,
        5.0,
    );
    assert_within_percent("128 KiB sequential read, MB/s", sequential_reads(drive), 3_000.0, 2.0);
    let [written] = sequential_writes(drive, [(GB, 4 * GB)]);
    assert_within_percent("128 KiB sequential write, MB/s", written, 1_050.0, 2.0);
}

#[test]
fn a_cosmos_plus_reads_whole_pages_over_slow_channels() {
    let drive = &COSMOS_PLUS;
    // A user of the board measured 1.4 GB/s.
    assert_within_percent("128 KiB sequential read, MB/s", sequential_reads(drive), 1_400.0, 5.0);
    // 10 command, 48 page, 90.2 channel, 1.2 link.
    assert_within_percent("4 KiB random read, depth 1, µs", 1e6 / random_reads(drive, 1), 149.4, 1.0);
    // 8 channels, each a page in 90.2 µs: at most 88.6 K; random choice leaves channels idle.
    assert_within_percent("4 KiB random read, depth 128, IOPS", random_reads(drive, 128), 86_000.0, 2.0);
    // 10 command, 1.2 link; the buffer of 16 MiB hides the dies.
    assert_within_percent("4 KiB random write, depth 1, µs", 1e6 / random_writes(drive, 1), 11.2, 1.0);
    // One command in 5 µs.
    assert_within_percent("4 KiB random write, depth 128, IOPS", random_writes(drive, 128), 200_000.0, 2.0);
    // 64 dies, each a page in 850 µs.
    let [written] = sequential_writes(drive, [(GB, 4 * GB)]);
    assert_within_percent("128 KiB sequential write, MB/s", written, 1_233.0, 3.0);
}

/// IOPS and write amplification of random writes over the whole of a scaled-down drive in steady state.
fn worn_random_writes(drive: &DriveProfile) -> (f64, f64) {
    let drive = drive.scaled_down(24, 400);
    let pages = drive.capacity_bytes / 4096 / 32 * 32;
    let (mut model, mut random, mut now) = (SsdModel::new(drive, 4096), Prng::new(3), Nanos::ZERO);
    for at in (0..pages).step_by(32) {
        now = model.write(now, Lba(at), 32);
    }
    let mut host = |model: &mut SsdModel, now| model.write(now, Lba(random.below(pages)), 1);
    now = now + run_closed_loop(&mut model, now, 128, 2 * pages, &mut host);
    let before = model.statistics().clone();
    let span = run_closed_loop(&mut model, now, 128, pages / 2, &mut host);
    let after = model.statistics();
    let written = (after.host_pages_written - before.host_pages_written) as f64;
    let flash = (after.flash_pages_written - before.flash_pages_written) as f64;
    (per_second(pages / 2, span), flash / written)
}

#[test]
fn a_worn_drive_of_the_leed_paper_writes_as_its_sheet_says() {
    let (iops, amplification) = worn_random_writes(&DCT_983);
    println!("write amplification {amplification:.2}");
    assert_within_percent("4 KiB random write, worn, IOPS", iops, 40_000.0, 10.0);
}

/// The time of a durable write of 4 KiB: the write, then a flush. No data sheet states it.
#[test]
fn a_flush_takes_a_drive_without_capacitors_about_a_millisecond() {
    let durable = |drive: &DriveProfile| {
        let ((mut model, now), mut at) = (filled_model(drive), 0);
        let mut host = |model: &mut SsdModel, now| {
            at += 1;
            let written = model.write(now, Lba(at), 1);
            model.flush(written)
        };
        1e6 / per_second(1_000, run_closed_loop(&mut model, now, 1, 1_000, &mut host))
    };
    assert_within_percent("970-evo: write and flush, µs", durable(&EVO_970), 750.0, 5.0);
    assert_within_percent("leed: write and flush, µs", durable(&DCT_983), 100.0, 5.0);
}

#[test]
fn every_drive_has_a_name_of_its_own() {
    for drive in DRIVE_PROFILES {
        assert_eq!(DriveProfile::by_name(drive.name), Some(drive));
    }
    assert_eq!(DriveProfile::by_name("970"), None);
}
