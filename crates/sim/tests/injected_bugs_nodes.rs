//! Each bug injected into the client's treatment of time and of lost connections is found with many nodes, within a bounded
//! number of seeds, like those of the engine (`injected_bugs.rs`).

use octokv_base::Nanos;
use octokv_client::bug_injection::{InjectedBug, inject};
use octokv_sim::nodes_scenario::draw_nodes_plan;
use octokv_sim::scenario::{FaultKind, FaultedHost};
use octokv_sim::{KvScenarioPlan, run_scenario};

/// The first of these seeds whose plan, after `change`, violates a guarantee, and the violation.
fn find(
    bug: impl Into<Option<InjectedBug>>,
    seeds: u64,
    change: impl Fn(&mut KvScenarioPlan),
) -> Option<(u64, String)> {
    inject(bug.into());
    let found = (0..seeds).find_map(|seed| {
        let mut plan = draw_nodes_plan(seed);
        change(&mut plan);
        Some((seed, run_scenario(&plan).err()?))
    });
    inject(None);
    found
}

#[test]
fn a_sent_write_that_is_reported_as_not_executed_is_found() {
    let (seed, message) = find(InjectedBug::ForgetSentWrites, 60, |_| ()).expect("found in 60 seeds");
    println!("after {} seeds: {}", seed + 1, message.lines().next().unwrap_or_default());
    assert!(message.contains("not linearizable"), "{message}");
}

/// Clients that pause with unsent commands for longer than their command timeout.
fn pause_clients(plan: &mut KvScenarioPlan) {
    if plan.keeps_connections {
        return;
    }
    plan.hosts.iter_mut().for_each(|host| host.command_timeout = Nanos::from_millis(40));
    let hosts = plan.hosts.len();
    let faults = plan.phases.iter_mut().flat_map(|phase| &mut phase.faults);
    for (index, fault) in faults.enumerate() {
        (fault.kind, fault.duration) =
            (FaultKind::Pause { host: FaultedHost::Client(index % hosts) }, Nanos::from_millis(60));
    }
}

#[test]
fn a_write_that_is_sent_after_it_was_reported_as_not_executed_is_found() {
    let bug = InjectedBug::SendAbortedCommands;
    let (seed, message) = find(bug, 60, pause_clients).expect("found in 60 seeds");
    println!("after {} seeds: {}", seed + 1, message.lines().next().unwrap_or_default());
    assert!(message.contains("not linearizable"), "{message}");
    assert_eq!(find(None, 60, pause_clients), None);
}

#[test]
fn a_keep_alive_that_is_late_by_another_clock_is_found_if_clocks_drift_and_not_otherwise() {
    let (seed, message) = find(InjectedBug::KeepAliveLate, 60, |_| ()).expect("found in 60 seeds");
    println!("after {} seeds: {}", seed + 1, message.lines().next().unwrap_or_default());
    assert!(message.contains("a connection was lost without an injected fault"), "{message}");
    assert_eq!(find(InjectedBug::KeepAliveLate, 20, |plan| plan.clocks.clear()), None);
}
