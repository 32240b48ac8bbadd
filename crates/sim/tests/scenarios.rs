//! Every scenario passes many seeds, and each seed is deterministic.

use octokv_sim::nodes_scenario::{NODES, draw_nodes_plan};
use octokv_sim::scenario::FaultKind;
use octokv_sim::{KvScenarioPlan, Scenario, SweepConfig, run_seed, run_sweep};

#[expect(clippy::disallowed_methods, reason = "prints the simulator's speed")]
fn assert_scenario_holds(scenario: Scenario) {
    let config = SweepConfig { scenario: Some(scenario), repeat_every: 10, ..SweepConfig::new(0..60) };
    let began = std::time::Instant::now();
    let outcome = run_sweep(&config, |_| true);
    if let Some(failure) = outcome.failure {
        panic!("{failure}");
    }
    let seconds = began.elapsed().as_secs_f64();
    println!("{}: {:.0} simulated operations/s", scenario.name(), outcome.operations as f64 / seconds);
    assert!(outcome.seeds == 60 && outcome.operations > 30_000, "{outcome:?}");
    assert_eq!(outcome.undecided_keys, 0);
}

#[test]
fn calm_holds() {
    assert_scenario_holds(Scenario::Calm);
}

#[test]
fn crashes_hold() {
    assert_scenario_holds(Scenario::Crashes);
}

#[test]
fn network_holds() {
    assert_scenario_holds(Scenario::Network);
}

#[test]
fn disk_holds() {
    assert_scenario_holds(Scenario::Disk);
}

#[test]
fn everything_holds() {
    assert_scenario_holds(Scenario::Everything);
}

#[test]
fn blocks_hold() {
    assert_scenario_holds(Scenario::Blocks);
}

#[test]
fn namespaces_hold() {
    assert_scenario_holds(Scenario::Namespaces);
}

#[test]
fn remote_holds() {
    assert_scenario_holds(Scenario::Remote);
}

#[test]
fn nodes_hold() {
    assert_scenario_holds(Scenario::Nodes);
}

#[test]
fn memory_holds() {
    assert_scenario_holds(Scenario::Memory);
}

#[test]
fn ordered_holds() {
    assert_scenario_holds(Scenario::Ordered);
}

#[test]
fn devices_hold() {
    assert_scenario_holds(Scenario::Devices);
}

#[test]
fn log_holds() {
    assert_scenario_holds(Scenario::Log);
}

#[test]
fn commands_on_memory_end_at_once_or_wait_and_both_are_rejected_and_cut() {
    let (mut in_place, mut operations, mut changes, mut rejected, mut offloaded, mut crashes) =
        (0, 0, 0, 0, 0, 0);
    for seed in 100..130 {
        let stats = run_seed(seed, Scenario::Memory, false).unwrap();
        in_place += stats.in_place;
        operations += stats.operations;
        changes += stats.admin_changes;
        rejected += stats.rejected_commands;
        offloaded += stats.offloaded;
        crashes += stats.crashes;
    }
    assert!(in_place > operations / 8, "{in_place} accesses in place for {operations} commands");
    assert!(changes > 100 && rejected > 100, "{changes} changes, {rejected} commands rejected");
    assert!(offloaded > 100 && crashes > 6, "{offloaded} requests offloaded, {crashes} crashes");
    let blocks: u64 = (0..30).map(|seed| run_seed(seed, Scenario::Blocks, false).unwrap().in_place).sum();
    assert!(blocks > 150, "{blocks} accesses in place to blocks");
}

#[test]
fn every_fault_of_a_scenario_occurs() {
    let of = |scenario| {
        let stats = (100..112).map(|seed| run_seed(seed, scenario, false).unwrap());
        stats.fold([0; 5], |sum, one| {
            let [crashes, checkpoints, errors, corrupted, cache_hits] = sum;
            [
                crashes + one.crashes,
                checkpoints + one.checkpoints,
                errors + one.device_errors,
                corrupted + one.corrupted_bits,
                cache_hits + one.cache_hits,
            ]
        })
    };
    let [crashes, checkpoints, _, _, cache_hits] = of(Scenario::Crashes);
    assert!(crashes > 12 && checkpoints > 0, "{crashes} crashes, {checkpoints} checkpoints");
    assert!(cache_hits > 100, "{cache_hits} reads from a cache");
    let [_, _, errors, corrupted, _] = of(Scenario::Disk);
    assert!(errors > 12 && corrupted > 6, "{errors} errors, {corrupted} corrupted bits");
    let [crashes, _, errors, ..] = of(Scenario::Nodes);
    assert!(crashes > 6 && errors > 12, "{crashes} crashes, {errors} errors");
}

#[test]
fn plans_of_nodes_have_every_fault() {
    let mut seen = std::collections::BTreeMap::new();
    for seed in 0..60 {
        let plan = draw_nodes_plan(seed);
        assert!(plan.nodes.len() == NODES && plan.clocks.len() == NODES + plan.hosts.len());
        let mut count = |what: String| *seen.entry(what).or_insert(0) += 1;
        count(format!("keeps connections: {}", plan.keeps_connections));
        for phase in &plan.phases {
            assert!(!plan.keeps_connections || phase.faults.is_empty());
            for fault in &phase.faults {
                let text = format!("{:?}", fault.kind);
                let first = text.split([' ', '{']).next().unwrap_or_default().to_owned();
                count(format!("{first} {}", if text.contains("Node(") { "of a node" } else { "" }));
                if let FaultKind::LinkCut { to_node, .. } = fault.kind {
                    count(format!("cut to a node: {to_node}"));
                }
            }
            count(format!("{:?}", phase.end).split([' ', '{']).next().unwrap_or_default().to_owned());
        }
    }
    for (what, count) in &seen {
        assert!(*count > 3, "{what}: {count}");
    }
    // Nine kinds of faults, two of them of nodes too, cuts in two directions, two kinds of plans, four ends of phases.
    assert_eq!(seen.len(), 9 + 2 + 2 + 2 + 4, "{seen:?}");
    let lost: u64 = (0..12).map(|seed| run_seed(seed, Scenario::Nodes, false).unwrap().disks_lost).sum();
    assert!(lost > 3, "{lost} disks lost");
}

#[test]
fn every_fault_and_change_of_block_scenarios_occurs() {
    let of = |scenario| {
        let stats = (100..116).map(|seed| run_seed(seed, scenario, false).unwrap());
        stats.fold([0; 6], |sum, one| {
            let [crashes, errors, changes, rejected, fenced, undecided] = sum;
            [
                crashes + one.crashes,
                errors + one.device_errors,
                changes + one.admin_changes,
                rejected + one.rejected_commands,
                fenced + one.fenced_sessions,
                undecided + one.undecided_keys,
            ]
        })
    };
    let [crashes, errors, changes, ..] = of(Scenario::Blocks);
    assert!(
        crashes > 6 && errors > 6 && changes == 0,
        "{crashes} crashes, {errors} errors, {changes} changes"
    );
    let [_, _, changes, rejected, ..] = of(Scenario::Namespaces);
    assert!(changes > 100 && rejected > 100, "{changes} changes, {rejected} commands rejected");
    let [crashes, errors, _, _, fenced, undecided] = of(Scenario::Remote);
    assert!(crashes > 6 && errors > 6 && fenced > 6, "{crashes} crashes, {errors} errors, {fenced} fenced");
    assert_eq!(undecided, 0);
}

#[test]
fn a_plan_depends_on_seed_and_scenario_alone() {
    let drawn = |seed, scenario| format!("{:?}", KvScenarioPlan::draw(seed, scenario));
    assert_eq!(drawn(1, Scenario::Everything), drawn(1, Scenario::Everything));
    assert_ne!(drawn(1, Scenario::Everything), drawn(2, Scenario::Everything));
    assert_ne!(drawn(1, Scenario::Calm), drawn(1, Scenario::Network));
}
