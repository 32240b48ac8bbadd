//! Trees of the model of `version_model_tests.rs` of which tables cannot be read for a time: reads find the last writes, the others are compacted, and once all tables
//! can be read again, the tree is as if they always could.

use super::compaction::CompactionSettings;
use super::version_model_tests::{Load, TestTree, settings};
use octokv_base::Prng;

/// Any table of the current version that is not postponed, of the levels up to one.
fn any_table(tree: &mut TestTree, lowest_level: usize) -> Option<u64> {
    let version = tree.set.current();
    let tables = version.tables().filter(|(level, _)| *level <= lowest_level).map(|(_, table)| table.id());
    let tables: Vec<u64> = tables.filter(|id| !tree.postponed.contains(id)).collect();
    let index = tree.random.below(tables.len().max(1) as u64) as usize;
    tables.get(index).copied()
}

/// How many tables a reader of a key may have to look at in level 0.
fn level0_depth(tree: &TestTree) -> usize {
    let version = tree.set.current();
    let level0 = version.level0();
    let depth = |key: &[u8]| level0.iter().filter(|table| table.overlaps(key, key)).count();
    level0.iter().flat_map(|table| [depth(table.first_key()), depth(table.last_key())]).max().unwrap_or(0)
}

#[test]
fn reads_find_the_last_writes_whichever_tables_cannot_be_read_for_a_time() {
    let mut around = 0;
    for seed in 0..60 {
        let load = [
            Load::Uniform { keys: 400, deletes: 10 },
            Load::Uniform { keys: 4000, deletes: 10 },
            Load::Uniform { keys: 60_000, deletes: 40 },
            Load::DeleteAll,
        ][seed as usize % 4];
        let mut random = Prng::new(seed);
        let mut tree = TestTree::new(seed, settings(&mut random));
        for _ in 0..60 {
            tree.flush(load);
            if random.one_in(3)
                && let Some(id) = any_table(&mut tree, random.below(4) as usize)
            {
                tree.postponed.insert(id);
            }
            if random.one_in(10) {
                tree.postponed.clear();
            }
            for _ in 0..random.below(4) {
                tree.begin();
                around += tree.running.iter().filter(|it| !it.kept_keys.is_empty()).count();
            }
            while !tree.running.is_empty() && !random.one_in(3) {
                tree.end_one();
                tree.check();
            }
            match tree.snapshot {
                None if random.one_in(8) => tree.take_snapshot(),
                Some(_) if random.one_in(8) => tree.snapshot = None,
                _ => {}
            }
        }
        // Also while something cannot be read, compactions end when writes do.
        tree.settle();
        tree.postponed.clear();
        tree.settle();
        tree.check_settled();
    }
    assert!(around > 200, "{around} compactions around tables that cannot be read");
}

#[test]
fn level_0_goes_on_while_a_table_stays_unreadable() {
    for seed in 0..20 {
        let mut tree = TestTree::new(seed, settings(&mut Prng::new(seed)));
        let load = Load::Uniform { keys: 4000, deletes: 5 };
        (0..20).for_each(|_| tree.flush(load));
        tree.settle();
        // Of level 1, or, in every third tree, one of level 0 that has keys of all tables.
        let lowest = if seed % 3 == 0 { 0 } else { 1 };
        if lowest == 0 {
            tree.flush(load);
        }
        let id = any_table(&mut tree, lowest).expect("there is one");
        tree.postponed.insert(id);
        let before = (tree.flushed_bytes, tree.written_bytes);
        for flush in 0..200 {
            tree.flush(load);
            tree.settle();
            let depth = level0_depth(&tree);
            assert!(depth <= 20, "seed {seed}: {depth} tables of level 0 share keys after {flush} flushes");
        }
        let flushed = tree.flushed_bytes - before.0;
        let amplification = (tree.written_bytes - before.1) as f64 / flushed as f64;
        println!("seed {seed}: write amplification {amplification:.1}");
        assert!(amplification < 10.0, "seed {seed}: {amplification}");
        tree.postponed.clear();
        tree.settle();
        tree.check_settled();
    }
}

#[test]
fn a_table_that_cannot_be_read_is_moved_and_not_written() {
    // Of disjoint tables none has to be read.
    let settings = CompactionSettings { garbage_permille: 1000, ..settings(&mut Prng::new(1)) };
    let mut tree = TestTree::new(1, settings);
    for _ in 0..60 {
        tree.flush(Load::Sequential);
        let ids: Vec<u64> = tree.set.current().tables().map(|(_, table)| table.id()).collect();
        tree.postponed.extend(ids);
        tree.settle();
    }
    tree.check_settled();
    assert_eq!(tree.written_bytes, tree.flushed_bytes);
}
