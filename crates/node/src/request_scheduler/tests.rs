//! Tables and courses of one core's choices.

use super::*;
use crate::core_metrics::{Board, Stamp};
use octokv_base::{Buffer, Key, NamespaceId};
use octokv_nvmf::StoreMode;
use octokv_runtime::Busy;
use octokv_sched::{Counters, Decision, FlowRule, measure};
use std::sync::Arc;

const DENSE: FlowId = FlowId(1);
const SPARSE: FlowId = FlowId(2);
const NOW: Nanos = Nanos(1_000);

/// A window in which this was chosen, requests of the dense flow going back twice.
fn window(chosen: Chosen, in_flight: u32) -> Window {
    let counters = Counters::default();
    let rule = |flow, backwardings| FlowRule { flow, dense: backwardings > 0, moves: false, backwardings };
    let mut decision = Decision::at_start(2);
    (decision.chosen, decision.flows) = (chosen, vec![rule(DENSE, 2), rule(SPARSE, 0)]);
    Window {
        number: 1,
        ended: NOW,
        length: NOW,
        decision,
        figures: measure(&counters),
        counters,
        hosts: Vec::new(),
        weights: Vec::new(),
        settings: Settings { in_flight, ..Settings::default() },
        measured_by: 0,
        took: Nanos::ZERO,
    }
}

fn job(slot: u32, flow: FlowId, operation: Operation) -> Job {
    let (stamp, note) = (Stamp::default(), Note::NONE);
    Job { home: CoreId(0), link: 0, slot, namespace: NamespaceId(1), operation, flow, stamp, note }
}

fn store(slot: u32, flow: FlowId) -> Job {
    let (key, record) = (Key::new(b"key").unwrap(), Buffer::zeroed(4096));
    job(slot, flow, Operation::Store { key, mode: StoreMode::Upsert, record, value_bytes: 100 })
}

struct Core {
    dispatch: Dispatch,
    jobs: Jobs,
    tally: Tally,
    boards: Arc<[Board]>,
}

impl Core {
    fn new() -> Core {
        let boards: Arc<[Board]> = [Board::new(2, FLOWS_MAX), Board::new(2, FLOWS_MAX)].into();
        let tally = Tally::new(Arc::clone(&boards), CoreId(0), &Busy::virtual_time());
        Core {
            dispatch: Dispatch::new(CoreId(0), 2, 1_000, 3 * 4096),
            jobs: Jobs::new(|_, _| ()),
            tally,
            boards,
        }
    }

    fn board(&self) -> &Board {
        &self.boards[0]
    }

    fn choose(&mut self, chosen: Chosen, in_flight: u32) {
        self.dispatch.choose(&window(chosen, in_flight), &mut self.jobs, NOW);
    }

    fn keep(&mut self, job: Job) {
        self.dispatch.keep(job, &mut self.jobs, &self.tally, NOW);
    }

    /// One turn: those that begin in it.
    fn turn(&mut self) -> Vec<Job> {
        self.dispatch.turn(NOW);
        self.dispatch.poll(&mut self.jobs, &self.tally, NOW);
        // Another poll of the same turn sends nobody back again.
        self.dispatch.poll(&mut self.jobs, &self.tally, NOW);
        std::iter::from_fn(|| self.jobs.pop()).collect()
    }

    fn slots(&mut self) -> Vec<u32> {
        self.turn().iter().map(|job| job.slot).collect()
    }
}

#[test]
fn dense_requests_go_back_and_others_do_not() {
    let mut core = Core::new();
    assert!(core.dispatch.is_plain());
    core.choose(Chosen::Intra, 32);
    assert!(!core.dispatch.is_plain());
    let foreign = Job { home: CoreId(1), ..job(2, DENSE, Operation::Flush) };
    for job in [job(0, DENSE, Operation::Flush), job(1, SPARSE, Operation::Flush), foreign] {
        core.keep(job);
    }
    assert_eq!(core.slots(), [1, 2], "sparse ones, and those that another core sent");
    assert_eq!((core.slots(), core.dispatch.len()), (vec![], 1));
    assert_eq!((core.slots(), core.dispatch.len()), (vec![0], 0), "in the third turn");
}

#[test]
fn what_is_held_begins_when_the_choice_changes_and_when_the_node_stops() {
    let mut core = Core::new();
    core.choose(Chosen::Hybrid, 32);
    core.keep(job(0, DENSE, Operation::Flush));
    core.choose(Chosen::Hybrid, 32);
    assert_eq!(core.dispatch.len(), 1, "the same choice again changes nothing");
    core.choose(Chosen::Nothing, 32);
    assert!(core.dispatch.is_plain());
    assert_eq!(core.slots(), [0]);
    core.choose(Chosen::Fair, 1);
    (0..4).for_each(|slot| core.keep(job(slot, SPARSE, Operation::Flush)));
    core.dispatch.drain(&mut core.jobs);
    core.keep(job(4, SPARSE, Operation::Flush));
    assert_eq!((core.slots(), core.dispatch.len()), (vec![0, 1, 2, 3, 4], 0));
}

#[test]
fn so_many_run_at_a_time_by_turns_and_the_next_when_one_has_ended() {
    let mut core = Core::new();
    core.choose(Chosen::Fair, 2);
    (0..4).for_each(|slot| core.keep(job(slot, DENSE, Operation::Flush)));
    core.keep(job(9, SPARSE, Operation::Flush));
    let running = core.turn();
    assert_eq!(running.iter().map(|job| job.slot).collect::<Vec<_>>(), [0, 1]);
    assert!(core.dispatch.is_charging() && core.turn().is_empty());
    core.dispatch.done(running[0].note, &Outcome::Flushed);
    assert_eq!(core.slots(), [9], "who asks for little goes before those who wait already");
    core.dispatch.done(running[1].note, &Outcome::Flushed);
    core.dispatch.done(Note::NONE, &Outcome::Flushed);
    assert_eq!(core.slots(), [2]);
}

#[test]
fn on_a_core_that_several_flows_keep_busy_only_a_few_run() {
    let most_that_ran = |flows: &[FlowId]| {
        let mut core = Core::new();
        core.choose(Chosen::Fair, 32);
        let mut ran = Vec::new();
        for turn in 0..100 {
            let now = NOW + Nanos::from_millis(turn);
            core.dispatch.turn(now);
            (0..8)
                .for_each(|slot| core.keep(job(slot, flows[slot as usize % flows.len()], Operation::Flush)));
            core.dispatch.poll(&mut core.jobs, &core.tally, now);
            let running: Vec<Job> = std::iter::from_fn(|| core.jobs.pop()).collect();
            ran.push(running.len());
            // There is always something to do, and what runs has ended when the core is through with it.
            core.dispatch.turned(true);
            running.iter().for_each(|job| core.dispatch.done(job.note, &Outcome::Flushed));
        }
        ran.into_iter().skip(50).max()
    };
    assert_eq!(most_that_ran(&[DENSE]), Some(8), "there is nobody to be fair to");
    assert_eq!(most_that_ran(&[DENSE, SPARSE]), Some(1));
}

#[test]
fn a_tenant_that_weighs_more_has_more_turns() {
    let mut core = Core::new();
    let mut chosen = window(Chosen::Fair, 1);
    chosen.hosts = vec![(DENSE, "dense".to_owned()), (SPARSE, "sparse".to_owned())];
    let heavy = FlowSettings { weight: 3, ..FlowSettings::default() };
    chosen.settings.tenants.insert("sparse".to_owned(), heavy);
    core.dispatch.choose(&chosen, &mut core.jobs, NOW);
    for slot in 0..40 {
        core.keep(job(slot, DENSE, Operation::Flush));
        core.keep(job(slot, SPARSE, Operation::Flush));
    }
    let mut served = [0, 0];
    for turn in 0..40 {
        let began = core.turn().remove(0);
        served[usize::from(began.flow == SPARSE)] += 1;
        core.dispatch.done(began.note, &Outcome::Flushed);
        if turn == 19 {
            assert!((14..=16).contains(&served[1]), "{served:?} of weights 1 and 3");
            // From here on they weigh the same.
            chosen.settings.tenants.clear();
            core.dispatch.choose(&chosen, &mut core.jobs, NOW);
            served = [0, 0];
        }
    }
    assert!((9..=11).contains(&served[1]), "{served:?} of equal weights");
}

#[test]
fn on_a_core_a_tenant_weighs_what_the_last_window_says_and_else_what_is_set() {
    let mut core = Core::new();
    let mut chosen = window(Chosen::Fair, 1);
    let mut served = |chosen: &Window, turns: usize| {
        core.dispatch.choose(chosen, &mut core.jobs, NOW);
        let mut served = [0, 0];
        for slot in 0..turns as u32 {
            core.keep(job(slot, DENSE, Operation::Flush));
            core.keep(job(slot, SPARSE, Operation::Flush));
            for began in core.turn() {
                served[usize::from(began.flow == SPARSE)] += 1;
                core.dispatch.done(began.note, &Outcome::Flushed);
            }
        }
        served
    };
    // Both are known before either has a weight of its own, and always wait.
    served(&chosen, 20);
    chosen.weights = vec![(SPARSE, vec![WEIGHT_UNIT * 4, 1])];
    let [dense, sparse] = served(&chosen, 100);
    assert!((75..=85).contains(&sparse) && dense + sparse == 100, "{dense} and {sparse} of weights 1 and 4");
    chosen.weights = Vec::new();
    let [dense, sparse] = served(&chosen, 100);
    assert!((47..=53).contains(&sparse), "{dense} and {sparse} of equal weights");
}

#[test]
fn a_flow_whose_buffers_wait_is_full_and_no_other_is() {
    let mut core = Core::new();
    core.choose(Chosen::Fair, 1);
    (0..4).for_each(|slot| core.keep(store(slot, DENSE)));
    assert!(!core.dispatch.is_full(DENSE), "three buffers wait");
    core.keep(store(4, DENSE));
    assert!(core.dispatch.is_full(DENSE) && !core.dispatch.is_full(SPARSE));
    let first = core.turn().remove(0);
    core.dispatch.done(first.note, &Outcome::Stored);
    assert_eq!(core.slots(), [1]);
    assert!(!core.dispatch.is_full(DENSE));
    core.choose(Chosen::Nothing, 1);
    assert!(!core.dispatch.is_full(DENSE) && core.slots() == [2, 3, 4]);
}

#[test]
fn who_waits_for_others_is_told_apart_from_who_waits_for_its_limit() {
    let mut core = Core::new();
    let mut chosen = window(Chosen::Fair, 1);
    chosen.hosts = vec![(DENSE, "dense".to_owned()), (SPARSE, "sparse".to_owned())];
    let limited = FlowSettings { operations_per_s: Some(1), ..FlowSettings::default() };
    chosen.settings.tenants.insert("sparse".to_owned(), limited);
    core.dispatch.choose(&chosen, &mut core.jobs, NOW);
    (0..3).for_each(|slot| core.keep(job(slot, SPARSE, Operation::Flush)));
    let running = core.turn();
    running.iter().for_each(|job| core.dispatch.done(job.note, &Outcome::Flushed));
    (0..3).for_each(|slot| core.keep(job(slot, DENSE, Operation::Flush)));
    let seen = core.board().seen();
    let of = |flow: FlowId| (seen.flows[flow.0 as usize].held, seen.flows[flow.0 as usize].outdone);
    assert!(of(SPARSE).0 >= 2 && of(SPARSE).1 == 0, "its limit holds it: {:?}", of(SPARSE));
    assert!(of(DENSE).1 >= 2 && of(DENSE).0 == of(DENSE).1, "one runs at a time: {:?}", of(DENSE));
}

#[test]
fn a_core_whose_requests_wait_for_one_that_does_not_end_looks_again_soon() {
    let mut core = Core::new();
    core.choose(Chosen::Fair, 1);
    assert_eq!(core.dispatch.next_deadline(NOW), Nanos::NEVER);
    core.keep(job(0, DENSE, Operation::Flush));
    assert_eq!(core.turn().len(), 1);
    core.keep(job(1, SPARSE, Operation::Flush));
    assert!(core.dispatch.next_deadline(NOW) <= NOW + Nanos::from_millis(5));
}
