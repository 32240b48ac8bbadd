//! Which chunk is prepared next, by tables and beside an allocator in random use.

#![expect(clippy::single_range_in_vec_init, reason = "lists of ranges, some of one")]

use super::*;
use crate::common::allocator::FitPolicy;
use octokv_base::Prng;
use std::cell::Cell;

const UNIT_BYTES: u32 = 4096;

fn config(ahead_units: u64, cores: usize, areas: Vec<(PrepareArea, Range<u64>)>) -> PrepareConfig {
    PrepareConfig { ahead_bytes: ahead_units * u64::from(UNIT_BYTES), unit_bytes: UNIT_BYTES, cores, areas }
}

fn next_use(journal_unit: u32) -> NextUse {
    NextUse { journal_unit, images_area: 0, images_units: 0 }
}

fn preparer(config: PrepareConfig, space: &SpaceAllocator, unwritten: &[Range<u64>]) -> Preparer {
    Preparer::new(config, space, unwritten.iter().cloned()).expect("something was never written")
}

fn chunks(preparer: &mut Preparer, space: &SpaceAllocator, next_use: NextUse) -> Vec<PrepareChunk> {
    std::iter::from_fn(|| preparer.next_chunk(space, next_use)).collect()
}

fn units(chunks: &[PrepareChunk]) -> Vec<Range<u64>> {
    chunks.iter().map(|chunk| chunk.units.clone()).collect()
}

#[test]
fn nothing_is_prepared_of_a_volume_that_was_written_before() {
    let space = SpaceAllocator::new(100, 1_024, 1, FitPolicy::Next);
    assert!(Preparer::new(config(256, 1, Vec::new()), &space, std::iter::empty()).is_none());
    assert!(Preparer::new(config(256, 1, Vec::new()), &space, std::iter::once(0..100)).is_none());
}

#[test]
fn chunks_follow_the_allocation_up_to_the_configured_space_and_only_where_nothing_was_written() {
    let space = SpaceAllocator::new(100, 1_024, 1, FitPolicy::Next);
    let mut preparer = preparer(config(256, 1, Vec::new()), &space, &[150..300, 310..5_000]);
    // Chunks of 16 units from 100 on: the first three were written.
    let first = chunks(&mut preparer, &space, next_use(0));
    let starts: Vec<u64> = first.iter().map(|chunk| chunk.units.start).collect();
    assert_eq!(starts, (148..356).step_by(16).collect::<Vec<_>>(), "up to 256 units after 100");
    assert_eq!(chunks(&mut preparer, &space, next_use(0)), []);
    space.allocate(0, &Cell::new(0), 40).unwrap();
    assert_eq!(units(&chunks(&mut preparer, &space, next_use(0))), [356..372, 372..388, 388..404]);
}

#[test]
fn what_is_in_use_is_no_lead_and_the_search_goes_on_behind_it() {
    let space = SpaceAllocator::new(0, 1_024, 1, FitPolicy::Next);
    assert!(space.mark_used(crate::common::allocator::Extent { location: 0, units: 700 }));
    let mut preparer = preparer(config(64, 1, Vec::new()), &space, &[512..1_024]);
    let expected: Vec<_> = (700..764).step_by(4).map(|start| start..start + 4).collect();
    assert_eq!(units(&chunks(&mut preparer, &space, next_use(0))), expected);
}

#[test]
fn each_core_has_its_share_and_a_full_partition_is_followed_by_the_next() {
    let space = SpaceAllocator::new(0, 1_024, 4, FitPolicy::Next);
    let mut preparer = preparer(config(512, 2, Vec::new()), &space, &[0..1_024]);
    let prepared = units(&chunks(&mut preparer, &space, next_use(0)));
    let of = |range: Range<u64>| prepared.iter().filter(|units| range.contains(&units.start)).count();
    // Partitions of 256 units in chunks of 16: a share is 256.
    assert_eq!([0..256, 256..512, 512..768, 768..1_024].map(of), [16, 0, 16, 0]);
    let core = Cell::new(0);
    for _ in 0..25 {
        space.allocate(0, &core, 10).unwrap();
        let more = units(&chunks(&mut preparer, &space, next_use(0)));
        assert!(more.iter().all(|units| (256..512).contains(&units.start)), "{more:?}");
    }
    // Six units are left in its partition.
    assert!(space.next_unit(0) == 250);
    assert_eq!(preparer.record_chunks[1].remaining, 0);
    assert_eq!(preparer.record_chunks[3].remaining, 16);
}

#[test]
fn a_fast_writer_is_not_raced_for_the_chunk_that_it_is_about_to_use() {
    let space = SpaceAllocator::new(0, 4_096, 1, FitPolicy::Next);
    let mut preparer = preparer(config(1_024, 1, Vec::new()), &space, &[0..4_096]);
    let core = Cell::new(0);
    let mut next_start = || preparer.next_chunk(&space, next_use(0)).unwrap().units.start;
    // The writer moves by 100 units between two chunks of 64, so those that begin within 200 units of it are left to it.
    let mut starts = Vec::new();
    for _ in 0..10 {
        space.allocate(0, &core, 100).unwrap();
        starts.push(next_start());
    }
    assert_eq!(starts, [320, 448, 512, 640, 704, 832, 960, 1_024, 1_152, 1_216]);
    assert_eq!(next_start(), 1_088, "it pauses");
}

#[test]
fn the_journal_is_prepared_around_its_ring_and_never_behind() {
    let space = SpaceAllocator::new(2_000, 64, 1, FitPolicy::Next);
    let ring = PrepareArea::Journal { copy: 0 };
    let mut preparer = preparer(config(1_600, 1, vec![(ring, 1_000..1_160)]), &space, &[1_000..1_160]);
    // A chunk has 10 units, a sixteenth of the ring; 100 units are wanted ahead.
    let ahead = |preparer: &mut Preparer, unit| units(&chunks(preparer, &space, next_use(unit)));
    let expected = |range: Range<u64>| range.step_by(10).map(|start| start..start + 10).collect::<Vec<_>>();
    assert_eq!(
        ahead(&mut preparer, 35),
        expected(1_040..1_140),
        "a chunk that batches may be in is left out"
    );
    assert_eq!(ahead(&mut preparer, 64), expected(1_140..1_160));
    assert_eq!(ahead(&mut preparer, 120), [], "what batches have passed was written");
    assert!(preparer.chunks[0].remaining <= 1);
}

#[test]
fn only_the_next_checkpoints_area_is_prepared_and_as_much_as_it_needs() {
    let space = SpaceAllocator::new(2_000, 64, 1, FitPolicy::Next);
    let areas = (0..2).map(|area| {
        let start = 1_000 + 160 * u64::from(area);
        (PrepareArea::Images { area, copy: 0 }, start..start + 160)
    });
    let mut preparer = preparer(config(1_600, 1, areas.collect()), &space, &[0..1_999]);
    let ahead = |preparer: &mut Preparer, images_area, images_units| {
        units(&chunks(preparer, &space, NextUse { journal_unit: 0, images_area, images_units }))
    };
    assert_eq!(ahead(&mut preparer, 0, 15), [1_000..1_010, 1_010..1_020]);
    assert_eq!(ahead(&mut preparer, 0, 20), []);
    assert_eq!(ahead(&mut preparer, 1, 1), [1_160..1_170]);
    assert_eq!(ahead(&mut preparer, 0, 1_000_000).len(), 14);
}

#[test]
fn pauses_follow_the_duration_of_a_chunk_within_limits() {
    let pause = |micros, is_urgent| pause_after(Nanos::from_micros(micros), is_urgent);
    assert_eq!(pause(1_000, true), Nanos::from_micros(1_000 * PAUSE_FACTORS[0]));
    assert_eq!(pause(1_000, false), Nanos::from_micros(1_000 * PAUSE_FACTORS[1]));
    assert_eq!(pause(0, true), PAUSE_LIMITS[0]);
    assert_eq!(pause(10_000_000, false), PAUSE_LIMITS[1]);
}

/// Beside random allocations and releases on several cores: no chunk is named twice, the lead is bounded, and in the end
/// everything was prepared or used.
#[test]
fn every_chunk_is_named_once_and_never_too_early() {
    for seed in 0..20 {
        let mut random = Prng::new(seed);
        let (partitions, cores) = (1 << random.below(4), 1 + random.below(3) as usize);
        let space = SpaceAllocator::new(64, 8_192, partitions, FitPolicy::Next);
        let ahead_units = 64 << random.below(6);
        let mut preparer = preparer(config(ahead_units, cores, Vec::new()), &space, &[0..10_000]);
        let cells: Vec<Cell<usize>> =
            (0..cores).map(|core| Cell::new(space.initial_partition(core, cores))).collect();
        let (mut was_prepared, mut was_used) = (vec![false; 8_256], vec![false; 8_256]);
        let mut held = Vec::new();
        for _ in 0..6_000 {
            if random.one_in(3) {
                let Some(chunk) = preparer.next_chunk(&space, next_use(0)) else { continue };
                for unit in chunk.units.clone() {
                    assert!(!std::mem::replace(&mut was_prepared[unit as usize], true), "{chunk:?} twice");
                }
                let unused = (64..8_256).filter(|&unit| was_prepared[unit] && !was_used[unit]).count() as u64;
                assert!(
                    unused <= 2 * ahead_units + 2 * 8_192 / 16,
                    "seed {seed}: {unused} units are prepared"
                );
            } else if random.one_in(8) && !held.is_empty() {
                space.release(held.swap_remove(random.below(held.len() as u64) as usize));
            } else if let Some(extent) =
                space.allocate(0, &cells[random.below(cores as u64) as usize], 1 + random.below(12))
            {
                was_used[extent.location as usize..(extent.location + extent.units) as usize].fill(true);
                held.push(extent);
            }
        }
        held.into_iter().for_each(|extent| space.release(extent));
        let mut last = Vec::new();
        while !preparer.is_done() {
            match preparer.next_chunk(&space, next_use(0)) {
                Some(chunk) => last.push(chunk),
                None => match space.allocate(0, &cells[0], 8) {
                    Some(_) => {}
                    None => break,
                },
            }
        }
        assert!(preparer.is_done() || space.free_units() < 8, "seed {seed}");
    }
}
