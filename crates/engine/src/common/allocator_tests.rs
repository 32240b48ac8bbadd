//! The allocator against a model, and what its searches skip.

use super::*;
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::test_runner::RngSeed;
use std::fmt;

#[derive(Clone, Copy)]
enum Operation {
    /// Of a number of units.
    Allocate(u64),
    /// Of the longest free run, up to a number of units.
    AllocateLongest(u64),
    /// Of the first free run in a range: the third of the partition in which the range begins, and its length in units.
    AllocateWithin(u64, u64),
    /// Of one of the runs that are held, if any; the number counts round.
    Free(usize),
}

/// One line, also in a failing list.
impl fmt::Debug for Operation {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Operation::Allocate(units) => write!(f, "allocate {units}"),
            Operation::AllocateLongest(units) => write!(f, "allocate up to {units}"),
            Operation::AllocateWithin(third, units) => write!(f, "within {units} from third {third}"),
            Operation::Free(number) => write!(f, "free held run {number}"),
        }
    }
}

/// In parts, so that a failing list loses whole parts first.
fn operations() -> impl Strategy<Value = Vec<Operation>> {
    let operation = (0..16, 1..=12_u64, 1..=200_u64).prop_map(|(kind, small, large)| match kind {
        0..7 => Operation::Allocate(small),
        7 => Operation::Allocate(large),
        8 => Operation::AllocateWithin(small % 3, large),
        9 => Operation::AllocateLongest(large + 2),
        _ => Operation::Free(large as usize),
    });
    vec(vec(operation, 0..=110), 0..=110).prop_map(|parts| parts.concat())
}

fn assert_agrees_with_a_model(fit: FitPolicy, units: u64, operations: &[Operation]) {
    let mut partition = BitmapPartition::new(units);
    let mut model = vec![true; units as usize];
    let mut held: Vec<Extent> = Vec::new();
    let mut last_end = 0;
    for operation in operations {
        let length = match *operation {
            Operation::Allocate(length) => length,
            Operation::AllocateWithin(third, length) => {
                let start = third * units / 3;
                let range = start as usize..(start + length).min(units) as usize;
                let free = range.clone().filter(|&at| model[at]).count() as u64;
                assert_eq!(partition.count_free(start, length), free);
                let first = range.clone().find(|&at| model[at]);
                let run = first.map(|at| (at, (at..range.end).take_while(|&at| model[at]).count()));
                let got = partition.allocate_within(start, length);
                assert_eq!(got, run.map(|(at, length)| (at as u64, length as u64)), "the run in {range:?}");
                if let Some((at, length)) = run {
                    model[at..at + length].fill(false);
                    held.push(Extent { location: at as u64, units: length as u64 });
                }
                continue;
            }
            Operation::AllocateLongest(length) => {
                let free = |at: usize| (at..units as usize).take_while(|&at| model[at]).count() as u64;
                let lengths: Vec<u64> = (0..units as usize).map(|at| free(at).min(length)).collect();
                let most = lengths.iter().copied().max().filter(|&most| most >= 3);
                let expected = most.map(|most| (lengths.iter().position(|&it| it == most).unwrap(), most));
                let got = partition.allocate_longest(length, 3);
                assert_eq!(got, expected.map(|(at, units)| (at as u64, units)), "up to {length} units");
                if let Some((at, units)) = got {
                    last_end = (at + units) as usize;
                    model[at as usize..(at + units) as usize].fill(false);
                    held.push(Extent { location: at, units });
                }
                continue;
            }
            Operation::Free(_) if held.is_empty() => continue,
            Operation::Free(number) => {
                let freed = held.swap_remove(number % held.len());
                partition.set_free(freed.location, freed.units);
                model[freed.location as usize..(freed.location + freed.units) as usize].fill(true);
                continue;
            }
        };
        let fitting = model.windows(length as usize).enumerate();
        let mut fitting = fitting.filter(|(_, run)| run.iter().all(|&free| free)).map(|(at, _)| at);
        let expected = match fit {
            FitPolicy::First => fitting.next(),
            FitPolicy::Next => {
                let lowest = fitting.next();
                let mut all = lowest.into_iter().chain(fitting);
                all.find(|&at| at >= last_end).or(lowest)
            }
        };
        let got = partition.allocate(length, fit);
        assert_eq!(got, expected.map(|at| at as u64), "the location of {length} units");
        if let Some(at) = got {
            last_end = (at + length) as usize;
            model[at as usize..(at + length) as usize].fill(false);
            held.push(Extent { location: at, units: length });
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 40, rng_seed: RngSeed::Fixed(1), failure_persistence: None, max_shrink_iters: 4_000,
        ..ProptestConfig::default()
    })]

    #[test]
    fn both_fit_policies_agree_with_a_model(
        fit in prop_oneof![Just(FitPolicy::First), Just(FitPolicy::Next)],
        units in 500..4_500_u64,
        operations in operations(),
    ) {
        assert_agrees_with_a_model(fit, units, &operations);
    }
}

#[test]
fn a_full_partition_takes_from_the_next_and_all_comes_back() {
    for fit in [FitPolicy::First, FitPolicy::Next] {
        let space = SpaceAllocator::new(10, 1_000, 4, fit);
        let preferred_partition = Cell::new(space.initial_partition(1, 2));
        let mut held: Vec<Extent> =
            std::iter::from_fn(|| space.allocate(0, &preferred_partition, 3)).collect();
        assert!(held.len() * 3 + 4 * 2 >= 1_000, "{} runs", held.len());
        assert!(held.iter().all(|e| e.location >= 10 && e.location + 3 <= 1_010));
        held.drain(..).for_each(|extent| space.release(extent));
        assert_eq!(space.free_units(), 1_000);
    }
}

#[test]
fn the_longest_run_of_all_partitions_is_taken_if_it_is_long_enough() {
    let space = SpaceAllocator::new(10, 1_000, 4, FitPolicy::First);
    // Of 256, 256, 256 and 232 units.
    let taken = |location, units| assert!(space.mark_used(Extent { location, units }));
    taken(10, 200);
    taken(10 + 256 + 100, 100);
    let longest =
        |longest, shortest| space.allocate_longest(longest, shortest).map(|it| (it.location, it.units));
    assert_eq!(longest(300, 257), None);
    assert_eq!(longest(300, 40), Some((10 + 512, 256)));
    assert_eq!(longest(50, 50), Some((210, 50)), "the lowest that is long enough");
    assert_eq!(longest(300, 40), Some((10 + 768, 232)));
    assert_eq!(longest(300, 40), Some((10 + 256, 100)));
    assert!(space.has_run(56) && !space.has_run(57));
    assert_eq!(longest(300, 57), None);
    assert_eq!(longest(300, 56), Some((10 + 256 + 200, 56)));
    assert_eq!(space.free_units(), 6);
}

#[test]
fn one_core_allocates_contiguous_space_on_a_device() {
    let space = SpaceAllocator::new(0, 4_096, 8, FitPolicy::Next);
    let (one, other) = (Cell::new(space.initial_partition(0, 2)), Cell::new(space.initial_partition(1, 2)));
    for i in 0..50_u64 {
        let hash = i.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        assert_eq!(space.allocate(hash, &one, 5).unwrap().location, i * 5);
        assert_eq!(space.allocate(hash, &other, 3).unwrap().location, 2_048 + i * 3);
    }
    // Freed space before the last allocation is not reused while there is space after it.
    space.release(Extent { location: 0, units: 5 });
    assert_eq!(space.allocate(0, &one, 5).unwrap().location, 250);
}

#[test]
fn recovery_marks_each_existing_unit_used_once() {
    let space = SpaceAllocator::new(10, 1_000, 4, FitPolicy::First);
    let claim = |location, units| space.mark_used(Extent { location, units });
    assert!(claim(10, 5) && claim(1_009, 1));
    assert!(!claim(14, 2) && !claim(9, 1) && !claim(1_008, 2) && !claim(u64::MAX, 2));
    assert!(!claim(1_010, 1) && !claim(5_000, 1), "behind the last unit");
    // A partition has 256 units; a run is in one of them.
    assert!(!claim(10 + 512 - 1, 2) && claim(10 + 256, 256) && !claim(10 + 256, 1));
    assert_eq!(space.free_units(), 1_000 - 5 - 1 - 256);
}

#[test]
fn first_fit_spreads_records_over_the_partitions_by_hash() {
    let space = SpaceAllocator::new(0, 4_096, 8, FitPolicy::First);
    for partition in 0..8 {
        for hash in [partition << 61, (partition << 61) + (1 << 60)] {
            let extent = space.allocate(hash, &Cell::new(0), 1).unwrap();
            assert_eq!(extent.location / 512, partition, "hash {hash:x}");
        }
    }
}

#[test]
fn a_search_starts_behind_the_space_that_earlier_searches_found_full() {
    let mut partition = BitmapPartition::new(1_000);
    for i in 0..100 {
        assert_eq!(partition.allocate(3, FitPolicy::First), Some(i * 3));
    }
    // No run of 3 units begins before 300, so none of 4 does; a shorter one might.
    let floors = |partition: &BitmapPartition| [1, 2, 3, 4, 64, 200].map(|units| partition.floor(units));
    assert_eq!(floors(&partition), [0, 0, 300, 300, 300, 300]);
    partition.set_free(30, 3);
    partition.set_free(33, 2);
    assert_eq!(floors(&partition), [0, 0, 30, 30, 30, 30]);
    // Joined with the free units before it.
    assert_eq!(partition.allocate(5, FitPolicy::First), Some(30));
    assert_eq!(floors(&partition), [0, 0, 30, 30, 35, 35]);
    assert_eq!(partition.allocate(900, FitPolicy::First), None);
    assert_eq!(partition.allocate(64, FitPolicy::First), Some(300));
    assert_eq!(partition.allocate(2, FitPolicy::First), Some(364));
    assert_eq!(floors(&partition), [0, 366, 366, 366, 366, 366]);
    while partition.allocate(2, FitPolicy::First).is_some() {}
    assert_eq!(partition.floor(2), 1_024, "there is none up to the end of the last word");
}

#[test]
#[should_panic(expected = "units 4..7 are freed and partly free already")]
fn freeing_a_free_unit_is_a_bug() {
    let mut partition = BitmapPartition::new(100);
    partition.allocate(6, FitPolicy::First);
    partition.set_free(4, 3);
}
