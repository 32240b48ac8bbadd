//! Requests on keys that have an owner core: where they start, how they wait for a full ring, how they end.

use super::*;
use crate::monitor::IntervalReport;
use octokv_base::Key;
use octokv_sched::migration_plan::{CoreMigrations, MigrationQuota, SpreadOrder};
use octokv_sched::{Decision, IntervalCounters, PolicyAction, SchedConfig, TenantRule, compute_metrics};

const KEYS: NamespaceId = NamespaceId(3);
const OTHER_KEYS: NamespaceId = NamespaceId(4);
const TENANT: TenantId = TenantId(1);
const NODE_REQUESTS: usize = 8;
const WORKERS: usize = 64;

/// Core 0 of three, whose requests never end, and the mailboxes of the others. The first byte of a key is its owner core.
struct OwningCore {
    reactor: Reactor<PeerSockets, AnyEngine, StuckWorker>,
    others: [Mailbox<CoreMessage>; 2],
    now: Nanos,
}

impl OwningCore {
    fn new(ring_capacity: usize) -> OwningCore {
        let core_wakers: Vec<_> = (0..3).map(|_| CoreWaker::without_eventfd()).collect();
        let mut mailboxes = mesh(&core_wakers, ring_capacity);
        let others = [mailboxes.remove(1), mailboxes.remove(1)];
        let (parts, _) = reactor_parts(PeerSockets::default(), mailboxes.remove(0), 0, &core_wakers[0]);
        let workers = stuck_workers(WORKERS, &core_wakers[0]);
        let request_queue = RequestQueue::new(2 * WORKERS, |_, _| ());
        let mut reactor = assemble(parts, Rc::default(), request_queue, workers);
        reactor.requests.owner_queues = OwnerQueues::new(3, NODE_REQUESTS);
        let namespaces = &mut reactor.requests.namespaces;
        namespaces.has_owner_cores = Rc::new(Cell::new(true));
        namespaces.owner_core = Box::new(|request| {
            assert!([KEYS, OTHER_KEYS].contains(&request.namespace));
            Some(usize::from(*request.operation.key()?.as_bytes().first()?))
        });
        namespaces.is_served = Box::new(|namespace| namespace == KEYS);
        OwningCore { reactor, others, now: Nanos(1) }
    }

    /// A connection receives one request for each of these operations; their slots count from `first_slot`.
    fn admit(&mut self, namespace: NamespaceId, first_slot: u16, operations: Vec<RequestOperation>) {
        let slots = (first_slot..).zip(operations);
        let mut requests: Vec<_> =
            slots.map(|(slot, operation)| IoRequest { slot, namespace, operation }).collect();
        let Reactor { requests: of_core, links, accounting, .. } = &mut self.reactor;
        of_core.admit((0, TENANT), &mut requests, links, accounting, self.now);
    }

    /// Core 1 sends core 0 a request for each of these operations.
    fn send_to_core_0(&mut self, operations: Vec<RequestOperation>) {
        for operation in operations {
            let request = PendingRequest { operation, tenant: TENANT, ..read_request(CoreId(1), KEYS, 0) };
            assert!(self.others[0].send(0, CoreMessage::Execute(request)).is_ok(), "the ring has space");
        }
    }

    fn run_iteration(&mut self) -> bool {
        self.now = self.now + Nanos::from_micros(10);
        self.reactor.run_iteration(self.now)
    }

    /// Slots of the requests that another core has received, and of the completions, by [`COMPLETION`].
    fn received_by(&mut self, core: usize) -> Vec<u16> {
        std::iter::from_fn(|| match self.others[core - 1].receive()? {
            CoreMessage::Execute(request) => Some(request.slot),
            CoreMessage::Completed(completion) => Some(COMPLETION + completion.slot),
            CoreMessage::NewConnection { .. } => unreachable!("no connection is accepted"),
        })
        .collect()
    }

    /// Applies a decision under which every request of every tenant would migrate to core 1.
    fn apply(&mut self, action: PolicyAction) {
        let mut decision = Decision::initial(3);
        decision.action = action;
        decision.tenants = vec![TenantRule { tenant: TENANT, dense: true, migrates: true, requeues: 2 }];
        decision.plan.cores[0] = CoreMigrations {
            events_expected: 1_000,
            quotas: vec![MigrationQuota { to: CoreId(1), events: 1_000 }],
            order: SpreadOrder::RoundRobin,
        };
        let counters = IntervalCounters::default();
        let interval = IntervalReport {
            number: 1,
            ended_at: self.now,
            length: self.now,
            decision,
            metrics: compute_metrics(&counters),
            counters,
            hosts: Vec::new(),
            weights: Vec::new(),
            config: SchedConfig::default(),
            measured_by_core: 0,
            measure_duration: Nanos::ZERO,
        };
        let requests = &mut self.reactor.requests;
        requests.scheduler.apply_decision(&interval, &mut requests.queue, self.now);
    }
}

/// Added to the slot of a completion.
const COMPLETION: u16 = 1_000;

/// Reads a key of a core.
fn retrieve(owner: u8) -> RequestOperation {
    RequestOperation::Retrieve { key: Key::new(&[owner, 7]).expect("two bytes"), limit_bytes: 100 }
}

/// Reads `count` keys of a core.
fn retrieves(owner: u8, count: usize) -> Vec<RequestOperation> {
    (0..count).map(|_| retrieve(owner)).collect()
}

#[test]
fn a_request_starts_on_the_owner_of_its_key_under_every_policy() {
    use PolicyAction::{Balance, Fair, Hybrid, Inter, Intra, Nothing};
    for action in [Nothing, Balance(SpreadOrder::RoundRobin), Inter, Intra, Hybrid, Fair] {
        let mut core = OwningCore::new(RING_CAPACITY);
        core.apply(action);
        let list = || RequestOperation::List {
            start: Key::new(&[]).expect("empty"),
            limit_bytes: 8,
            long_keys: false,
        };
        let operations = vec![retrieve(2), retrieve(0), retrieve(1), list(), retrieve(2)];
        core.admit(KEYS, 0, operations);
        // The list has no owner: the policy places it, and only without one it stays.
        let listed_by_policy = if action == Nothing { vec![2] } else { vec![2, 3] };
        assert_eq!(core.received_by(1), listed_by_policy, "{action:?}");
        assert_eq!(core.received_by(2), [0, 4], "{action:?}");
        let here = 5 - 2 - listed_by_policy.len();
        assert_eq!(core.reactor.requests.count(), here, "{action:?}");
        // A core that stops follows no policy, but the owners.
        core.reactor.begin_drain();
        core.admit(KEYS, 5, vec![retrieve(1), list()]);
        assert_eq!((core.received_by(1), core.reactor.requests.count()), (vec![5], here + 1), "{action:?}");
    }
}

#[test]
fn a_request_of_another_core_is_never_offloaded_again() {
    let mut core = OwningCore::new(RING_CAPACITY);
    core.apply(PolicyAction::Inter);
    core.send_to_core_0(vec![retrieve(0), RequestOperation::Flush, retrieve(0)]);
    core.run_iteration();
    assert_eq!(core.reactor.requests.workers.running(), 3);
    assert_eq!((core.received_by(1), core.received_by(2)), (vec![], vec![]));
}

#[test]
#[should_panic(expected = "starts on a core that does not own it")]
fn a_request_that_another_core_should_execute_is_a_bug() {
    let mut core = OwningCore::new(RING_CAPACITY);
    // Some of them wait for workers, and were checked already.
    core.send_to_core_0(retrieves(0, WORKERS + 6));
    core.run_iteration();
    assert_eq!(core.reactor.requests.queue.len(), 6);
    core.send_to_core_0(vec![retrieve(2)]);
    core.run_iteration();
}

#[test]
fn requests_wait_in_order_for_a_full_ring_and_for_no_other() {
    let mut core = OwningCore::new(2);
    core.admit(KEYS, 0, retrieves(1, 5));
    core.admit(KEYS, 5, retrieves(2, 1));
    assert_eq!(core.received_by(2), [5], "the full ring to core 1 delays nothing else");
    assert_eq!(core.reactor.requests.count(), 3, "three wait");
    for _ in 0..5 {
        assert!(core.run_iteration(), "the core slept with requests in its hands");
    }
    core.reactor.begin_drain();
    assert!(core.run_iteration() && !core.reactor.is_drained(), "a node does not stop without them");
    assert_eq!(core.received_by(1), [0, 1]);
    // Newer requests do not overtake those that wait.
    core.admit(KEYS, 6, retrieves(1, 1));
    assert!(core.run_iteration());
    assert_eq!(core.received_by(1), [2, 3]);
    assert!(core.run_iteration());
    assert_eq!(core.received_by(1), [4, 6]);
    assert!(!core.run_iteration() && core.reactor.is_drained(), "nothing is left");
}

#[test]
fn completions_are_sent_before_the_requests_that_wait() {
    let mut core = OwningCore::new(1);
    core.admit(KEYS, 0, retrieves(1, 3));
    let PendingRequest { home_core, connection, slot, tenant, timing, ticket_id, .. } =
        read_request(CoreId(1), KEYS, 7);
    let outcome = RequestOutcome::NotFound;
    core.reactor.links.push_completion(RequestCompletion {
        home_core,
        connection,
        slot,
        outcome,
        tenant,
        timing,
        ticket_id,
    });
    core.run_iteration();
    let mut received = core.received_by(1);
    for _ in 0..3 {
        core.run_iteration();
        received.extend(core.received_by(1));
    }
    assert_eq!(received, [0, COMPLETION + 7, 1, 2]);
}

#[test]
fn requests_that_wait_for_an_owner_end_with_their_namespace() {
    let mut core = OwningCore::new(1);
    core.admit(KEYS, 0, retrieves(1, 2));
    core.admit(OTHER_KEYS, 2, retrieves(1, 2));
    core.admit(OTHER_KEYS, 4, retrieves(2, 2));
    assert_eq!(core.reactor.requests.count(), 4);
    core.reactor.requests.fail_missing_namespaces();
    let failed = core.reactor.requests.take_completions();
    assert_eq!(failed.iter().map(|completion| completion.slot).collect::<Vec<_>>(), [2, 3, 5]);
    assert!(failed.iter().all(|completion| matches!(completion.outcome, RequestOutcome::NotReady)));
    assert_eq!(core.reactor.requests.count(), 1);
    assert_eq!((core.received_by(1), core.received_by(2)), (vec![0], vec![4]));
    core.run_iteration();
    assert_eq!((core.received_by(1), core.received_by(2)), (vec![1], vec![]));
}

#[test]
#[should_panic(expected = "more requests wait for owner cores than command slots")]
fn more_requests_for_owners_than_the_bound_are_a_bug() {
    let mut core = OwningCore::new(1);
    core.admit(KEYS, 0, retrieves(1, 1 + NODE_REQUESTS));
    assert_eq!(core.reactor.requests.count(), NODE_REQUESTS);
    core.admit(KEYS, 20, retrieves(2, 2));
}
