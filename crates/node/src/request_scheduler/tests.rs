//! Tables and sequences of one core's scheduling.

use super::*;
use crate::core_metrics::{RequestTiming, SharedCoreMetrics};
use octokv_base::{Buffer, Key, NamespaceId};
use octokv_nvmf::StoreMode;
use octokv_runtime::CpuTime;
use octokv_sched::{Decision, IntervalCounters, TenantRule, compute_metrics};
use std::sync::Arc;

const DENSE: TenantId = TenantId(1);
const SPARSE: TenantId = TenantId(2);
const LIMITS: SchedulerLimits =
    SchedulerLimits { requests_max: 1_000, node_requests_max: 1_000, queued_bytes_max: 3 * 4096 };
const NOW: Nanos = Nanos(1_000);

/// An interval with this decision, in which requests of the dense tenant are requeued twice.
fn interval_report(action: PolicyAction, in_flight: u32) -> IntervalReport {
    let counters = IntervalCounters::default();
    let tenant_rule =
        |tenant, requeues| TenantRule { tenant, dense: requeues > 0, migrates: false, requeues };
    let mut decision = Decision::initial(2);
    (decision.action, decision.tenants) = (action, vec![tenant_rule(DENSE, 2), tenant_rule(SPARSE, 0)]);
    IntervalReport {
        number: 1,
        ended_at: NOW,
        length: NOW,
        decision,
        metrics: compute_metrics(&counters),
        counters,
        hosts: Vec::new(),
        weights: Vec::new(),
        config: SchedConfig { in_flight, ..SchedConfig::default() },
        measured_by_core: 0,
        measure_duration: Nanos::ZERO,
    }
}

fn request(slot: u16, tenant: TenantId, operation: RequestOperation) -> PendingRequest {
    let (timing, ticket_id) = (RequestTiming::default(), TicketId::NONE);
    PendingRequest {
        home_core: CoreId(0),
        connection: 0,
        slot,
        namespace: NamespaceId(1),
        operation,
        tenant,
        timing,
        ticket_id,
    }
}

fn store(slot: u16, tenant: TenantId) -> PendingRequest {
    let (key, record) = (Key::new(b"key").unwrap(), Buffer::zeroed(4096));
    request(slot, tenant, RequestOperation::Store { key, mode: StoreMode::Upsert, record, value_bytes: 100 })
}

struct SchedulerFixture {
    scheduler: RequestScheduler,
    queue: RequestQueue,
    metrics: MetricsWriter,
    core_metrics: Arc<[SharedCoreMetrics]>,
}

impl SchedulerFixture {
    fn new() -> SchedulerFixture {
        let core_metrics: Arc<[SharedCoreMetrics]> =
            [SharedCoreMetrics::new(2, TENANTS_MAX), SharedCoreMetrics::new(2, TENANTS_MAX)].into();
        let metrics = MetricsWriter::new(Arc::clone(&core_metrics), CoreId(0), &CpuTime::simulated());
        SchedulerFixture {
            scheduler: RequestScheduler::new(CoreId(0), 2, LIMITS),
            queue: RequestQueue::new(LIMITS.node_requests_max, |_, _| ()),
            metrics,
            core_metrics,
        }
    }

    fn shared_metrics(&self) -> &SharedCoreMetrics {
        &self.core_metrics[0]
    }

    fn apply_action(&mut self, action: PolicyAction, in_flight: u32) {
        self.scheduler.apply_decision(&interval_report(action, in_flight), &mut self.queue, NOW);
    }

    fn enqueue(&mut self, request: PendingRequest) {
        self.scheduler.enqueue(request, &mut self.queue, &self.metrics, NOW);
    }

    /// Runs one iteration and returns the requests that start in it.
    fn run_iteration(&mut self) -> Vec<PendingRequest> {
        self.scheduler.begin_iteration(NOW);
        self.scheduler.poll(&mut self.queue, &self.metrics, NOW);
        // A second poll of the same iteration requeues nothing again.
        self.scheduler.poll(&mut self.queue, &self.metrics, NOW);
        std::iter::from_fn(|| self.queue.pop()).collect()
    }

    fn started_slots(&mut self) -> Vec<u16> {
        self.run_iteration().iter().map(|request| request.slot).collect()
    }
}

#[test]
fn dense_requests_are_requeued_and_others_are_not() {
    let mut core = SchedulerFixture::new();
    assert!(core.scheduler.is_passthrough());
    core.apply_action(PolicyAction::Intra, 32);
    assert!(!core.scheduler.is_passthrough());
    let foreign = PendingRequest { home_core: CoreId(1), ..request(2, DENSE, RequestOperation::Flush) };
    for request in
        [request(0, DENSE, RequestOperation::Flush), request(1, SPARSE, RequestOperation::Flush), foreign]
    {
        core.enqueue(request);
    }
    assert_eq!(core.started_slots(), [1, 2], "sparse requests, and offloaded ones");
    assert_eq!((core.started_slots(), core.scheduler.len()), (vec![], 1));
    assert_eq!((core.started_slots(), core.scheduler.len()), (vec![0], 0), "in the third iteration");
}

#[test]
fn queued_requests_start_when_the_policy_action_changes_and_when_the_node_stops() {
    let mut core = SchedulerFixture::new();
    core.apply_action(PolicyAction::Hybrid, 32);
    core.enqueue(request(0, DENSE, RequestOperation::Flush));
    core.apply_action(PolicyAction::Hybrid, 32);
    assert_eq!(core.scheduler.len(), 1, "an unchanged action releases nothing");
    core.apply_action(PolicyAction::Nothing, 32);
    assert!(core.scheduler.is_passthrough());
    assert_eq!(core.started_slots(), [0]);
    core.apply_action(PolicyAction::Fair, 1);
    (0..4).for_each(|slot| core.enqueue(request(slot, SPARSE, RequestOperation::Flush)));
    core.scheduler.drain(&mut core.queue);
    core.enqueue(request(4, SPARSE, RequestOperation::Flush));
    assert_eq!((core.started_slots(), core.scheduler.len()), (vec![0, 1, 2, 3, 4], 0));
}

#[test]
fn at_most_in_flight_requests_run_and_the_next_starts_when_one_completes() {
    let mut core = SchedulerFixture::new();
    core.apply_action(PolicyAction::Fair, 2);
    (0..4).for_each(|slot| core.enqueue(request(slot, DENSE, RequestOperation::Flush)));
    core.enqueue(request(9, SPARSE, RequestOperation::Flush));
    let running = core.run_iteration();
    assert_eq!(running.iter().map(|request| request.slot).collect::<Vec<_>>(), [0, 1]);
    assert!(core.scheduler.has_open_tickets() && core.run_iteration().is_empty());
    core.scheduler.on_complete(running[0].ticket_id, &RequestOutcome::Flushed);
    assert_eq!(core.started_slots(), [9], "a sparse tenant goes before the backlog");
    core.scheduler.on_complete(running[1].ticket_id, &RequestOutcome::Flushed);
    core.scheduler.on_complete(TicketId::NONE, &RequestOutcome::Flushed);
    assert_eq!(core.started_slots(), [2]);
}

#[test]
fn the_concurrency_limit_falls_on_a_busy_core_with_several_tenants() {
    let most_that_ran = |tenants: &[TenantId]| {
        let mut core = SchedulerFixture::new();
        core.apply_action(PolicyAction::Fair, 32);
        let mut ran = Vec::new();
        for iteration in 0..100 {
            let now = NOW + Nanos::from_millis(iteration);
            core.scheduler.begin_iteration(now);
            (0..8).for_each(|slot| {
                core.enqueue(request(slot, tenants[slot as usize % tenants.len()], RequestOperation::Flush))
            });
            core.scheduler.poll(&mut core.queue, &core.metrics, now);
            let running: Vec<PendingRequest> = std::iter::from_fn(|| core.queue.pop()).collect();
            ran.push(running.len());
            // The core always has work, and requests complete within their iteration.
            core.scheduler.end_iteration(true);
            running
                .iter()
                .for_each(|request| core.scheduler.on_complete(request.ticket_id, &RequestOutcome::Flushed));
        }
        ran.into_iter().skip(50).max()
    };
    assert_eq!(most_that_ran(&[DENSE]), Some(8), "one tenant alone is not limited");
    assert_eq!(most_that_ran(&[DENSE, SPARSE]), Some(1));
}

#[test]
fn a_tenant_with_a_higher_weight_is_served_more_often() {
    let mut core = SchedulerFixture::new();
    let mut interval = interval_report(PolicyAction::Fair, 1);
    interval.hosts = vec![(DENSE, "dense".to_owned()), (SPARSE, "sparse".to_owned())];
    let limits = TenantQos { weight: 3, ..TenantQos::default() };
    interval.config.tenants.insert("sparse".to_owned(), limits);
    core.scheduler.apply_decision(&interval, &mut core.queue, NOW);
    for slot in 0..40 {
        core.enqueue(request(slot, DENSE, RequestOperation::Flush));
        core.enqueue(request(slot, SPARSE, RequestOperation::Flush));
    }
    let mut served = [0, 0];
    for iteration in 0..40 {
        let started = core.run_iteration().remove(0);
        served[usize::from(started.tenant == SPARSE)] += 1;
        core.scheduler.on_complete(started.ticket_id, &RequestOutcome::Flushed);
        if iteration == 19 {
            assert!((14..=16).contains(&served[1]), "{served:?} of weights 1 and 3");
            // From here on the weights are equal.
            interval.config.tenants.clear();
            core.scheduler.apply_decision(&interval, &mut core.queue, NOW);
            served = [0, 0];
        }
    }
    assert!((9..=11).contains(&served[1]), "{served:?} of equal weights");
}

#[test]
fn a_tenant_weight_is_that_of_the_last_interval_or_else_the_configured_one() {
    let mut core = SchedulerFixture::new();
    let mut interval = interval_report(PolicyAction::Fair, 1);
    let mut served = |chosen: &IntervalReport, iterations: usize| {
        core.scheduler.apply_decision(chosen, &mut core.queue, NOW);
        let mut served = [0, 0];
        for slot in 0..iterations as u16 {
            core.enqueue(request(slot, DENSE, RequestOperation::Flush));
            core.enqueue(request(slot, SPARSE, RequestOperation::Flush));
            for started in core.run_iteration() {
                served[usize::from(started.tenant == SPARSE)] += 1;
                core.scheduler.on_complete(started.ticket_id, &RequestOutcome::Flushed);
            }
        }
        served
    };
    // Both tenants are registered before either has a core weight, and are always backlogged.
    served(&interval, 20);
    interval.weights = vec![(SPARSE, vec![WEIGHT_UNIT * 4, 1])];
    let [dense, sparse] = served(&interval, 100);
    assert!((75..=85).contains(&sparse) && dense + sparse == 100, "{dense} and {sparse} of weights 1 and 4");
    interval.weights = Vec::new();
    let [dense, sparse] = served(&interval, 100);
    assert!((47..=53).contains(&sparse), "{dense} and {sparse} of equal weights");
}

#[test]
fn only_the_tenant_with_too_many_queued_buffer_bytes_is_full() {
    let mut core = SchedulerFixture::new();
    core.apply_action(PolicyAction::Fair, 1);
    (0..4).for_each(|slot| core.enqueue(store(slot, DENSE)));
    assert!(!core.scheduler.is_tenant_full(DENSE), "three buffers are queued");
    core.enqueue(store(4, DENSE));
    assert!(core.scheduler.is_tenant_full(DENSE) && !core.scheduler.is_tenant_full(SPARSE));
    let first = core.run_iteration().remove(0);
    core.scheduler.on_complete(first.ticket_id, &RequestOutcome::Stored);
    assert_eq!(core.started_slots(), [1]);
    assert!(!core.scheduler.is_tenant_full(DENSE));
    core.apply_action(PolicyAction::Nothing, 1);
    assert!(!core.scheduler.is_tenant_full(DENSE) && core.started_slots() == [2, 3, 4]);
}

#[test]
fn waiting_for_other_tenants_is_counted_apart_from_waiting_for_a_limit() {
    let mut core = SchedulerFixture::new();
    let mut interval = interval_report(PolicyAction::Fair, 1);
    interval.hosts = vec![(DENSE, "dense".to_owned()), (SPARSE, "sparse".to_owned())];
    let limited = TenantQos { operations_per_s: Some(1), ..TenantQos::default() };
    interval.config.tenants.insert("sparse".to_owned(), limited);
    core.scheduler.apply_decision(&interval, &mut core.queue, NOW);
    (0..3).for_each(|slot| core.enqueue(request(slot, SPARSE, RequestOperation::Flush)));
    let running = core.run_iteration();
    running
        .iter()
        .for_each(|request| core.scheduler.on_complete(request.ticket_id, &RequestOutcome::Flushed));
    (0..3).for_each(|slot| core.enqueue(request(slot, DENSE, RequestOperation::Flush)));
    let snapshot = core.shared_metrics().snapshot();
    let counts = |tenant: TenantId| {
        (snapshot.tenants[tenant.0 as usize].queued, snapshot.tenants[tenant.0 as usize].backlogged)
    };
    assert!(counts(SPARSE).0 >= 2 && counts(SPARSE).1 == 0, "it waits for its limit: {:?}", counts(SPARSE));
    assert!(
        counts(DENSE).1 >= 2 && counts(DENSE).0 == counts(DENSE).1,
        "one runs at a time: {:?}",
        counts(DENSE)
    );
}

#[test]
fn a_core_with_queued_requests_wakes_soon_when_none_completes() {
    let mut core = SchedulerFixture::new();
    core.apply_action(PolicyAction::Fair, 1);
    assert_eq!(core.scheduler.next_deadline(NOW), Nanos::NEVER);
    core.enqueue(request(0, DENSE, RequestOperation::Flush));
    assert_eq!(core.run_iteration().len(), 1);
    core.enqueue(request(1, SPARSE, RequestOperation::Flush));
    assert!(core.scheduler.next_deadline(NOW) <= NOW + Nanos::from_millis(5));
}

/// At millisecond `at` of the fair policy: whether each tenant's requests may be executed as they arrive.
fn may_be_direct(core: &SchedulerFixture, at: u64) -> [bool; 2] {
    [DENSE, SPARSE].map(|tenant| core.scheduler.may_execute_directly(tenant, NOW + Nanos::from_millis(at)))
}

#[test]
fn a_policy_with_nothing_to_do_for_a_tenant_lets_its_requests_execute_directly() {
    let mut core = SchedulerFixture::new();
    assert_eq!(may_be_direct(&core, 0), [true, true]);
    core.apply_action(PolicyAction::Intra, 32);
    assert_eq!(may_be_direct(&core, 0), [false, true], "requests of the dense tenant are requeued");
    let mut report = interval_report(PolicyAction::Inter, 32);
    report.decision.tenants[0].requeues = 0;
    report.decision.tenants[1].migrates = true;
    core.scheduler.apply_decision(&report, &mut core.queue, NOW);
    assert_eq!(may_be_direct(&core, 0), [true, false], "and those of the other may migrate");
}

#[test]
fn under_the_fair_queue_a_tenant_alone_executes_directly_and_is_charged() {
    let mut core = SchedulerFixture::new();
    core.apply_action(PolicyAction::Fair, 2);
    assert_eq!(may_be_direct(&core, 100), [false, false], "no request yet");
    let enqueue = |core: &mut SchedulerFixture, request: PendingRequest, at: u64| {
        let now = NOW + Nanos::from_millis(at);
        core.scheduler.enqueue(request, &mut core.queue, &core.metrics, now);
    };
    enqueue(&mut core, store(0, DENSE), 0);
    let first = core.queue.pop().expect("it started");
    assert_eq!(may_be_direct(&core, 9), [false, false]);
    assert_eq!(may_be_direct(&core, 10), [true, false]);
    core.scheduler.on_complete(first.ticket_id, &RequestOutcome::Stored);
    // 5 requests of 1 µs and 8,000 bytes of 0.25 ns.
    let charged =
        |core: &SchedulerFixture| core.shared_metrics().snapshot().tenants[DENSE.0 as usize].charged.0;
    let before = charged(&core);
    let at = NOW + Nanos::from_millis(11);
    core.scheduler.charge_direct(DENSE, 5, 8_000, &core.metrics, at);
    assert_eq!(charged(&core) - before, 7_000);
    core.scheduler.charge_direct(DENSE, 0, 0, &core.metrics, at);
    assert_eq!(charged(&core) - before, 7_000, "a slice without such requests");
    assert_eq!(may_be_direct(&core, 20), [true, false]);
    // Another tenant comes: both wait their turn until one is alone again.
    enqueue(&mut core, store(1, SPARSE), 20);
    assert_eq!(may_be_direct(&core, 29), [false, false]);
    enqueue(&mut core, store(2, DENSE), 29);
    assert_eq!(may_be_direct(&core, 38), [false, false]);
    assert_eq!(may_be_direct(&core, 39), [true, false]);
    // One waits: two are in flight.
    enqueue(&mut core, store(3, DENSE), 39);
    assert_eq!(may_be_direct(&core, 60), [false, false]);
    // Another policy forgets.
    core.apply_action(PolicyAction::Nothing, 2);
    core.apply_action(PolicyAction::Fair, 2);
    assert_eq!(may_be_direct(&core, 60), [false, false]);
}
