//! An iteration that leaves something to do of which no event will tell must return that it worked: a core sleeps after
//! one that did not.

use super::*;
use octokv_client::{ClientConfig, Command, Session, Value};
use octokv_nvmf::{NamespaceInfo, NamespaceKind};
use octokv_runtime::simulated::{SimEnv, SimEnvConfig, SimHostId, SimSockets};
use octokv_sched::{Policy, SchedConfig};

/// Core 0 of two with a listener on a simulated network, the mailbox of core 1, and a host.
struct ListeningCore {
    sim: SimEnv,
    reactor: Reactor<SimSockets, AnyEngine, StuckWorker>,
    other_core: Mailbox<CoreMessage>,
    host: SimHostId,
    address: SocketAddr,
}

impl ListeningCore {
    fn new(ring_capacity: usize) -> ListeningCore {
        let sim = SimEnv::new(SimEnvConfig::new(1));
        let (node, host) = (sim.add_host(), sim.add_host());
        let core_wakers = [CoreWaker::without_eventfd(), CoreWaker::without_eventfd()];
        let mut mailboxes = mesh(&core_wakers, ring_capacity);
        let (other_core, mailbox) = (mailboxes.remove(1), mailboxes.remove(0));
        let mut sockets = sim.sockets(node);
        let address = SocketAddr::new(sim.address(node), 4420);
        let (listener, _) = sockets.listen(address).expect("the port is free");
        let (parts, _) = reactor_parts(sockets, mailbox, 0, &core_wakers[0]);
        let info = NamespaceInfo {
            id: BLOCKS,
            nguid: [1; 16],
            size_bytes: 64 << 10,
            used_bytes: octokv_base::SharedSum::default(),
            kind: NamespaceKind::Block { block_bytes: BLOCK_BYTES },
            ana_group: 1,
            tokens: None,
        };
        let parts = ReactorParts {
            listeners: vec![(listener, address)],
            target: Target::new(parts.target.config().clone(), vec![info]),
            ..parts
        };
        let workers = stuck_workers(4, &core_wakers[0]);
        let request_queue = RequestQueue::new(node_requests_max(parts.target.config()), |_, _| ());
        let reactor = assemble(parts, Rc::default(), request_queue, workers);
        ListeningCore { sim, reactor, other_core, host, address }
    }

    /// Runs an iteration, after the time that bytes spend on the link.
    fn run_iteration(&mut self) -> bool {
        self.sim.run_until(self.sim.now() + Nanos::from_micros(100));
        self.reactor.run_iteration(self.sim.now())
    }

    /// A connected host with one connection of each kind, both on this core.
    fn connect(&mut self) -> Session<SimSockets> {
        let sockets = self.sim.sockets(self.host);
        let mut session = Session::new(sockets, self.address, ClientConfig::default(), self.sim.now());
        while !session.is_live() {
            session.poll(self.sim.now(), |_, _| ());
            assert!(session.ended().is_none(), "{:?}", session.ended());
            self.run_iteration();
        }
        session
    }
}

#[test]
fn a_connection_behind_a_full_ring_is_not_slept_over() {
    let mut core = ListeningCore::new(1);
    let mut sockets = core.sim.sockets(core.host);
    for _ in 0..4 {
        sockets.connect(core.address).expect("the node is up");
    }
    // Two in each iteration, every second one for the other core, whose ring has space for one.
    assert!(core.run_iteration() && core.run_iteration());
    assert_eq!((core.reactor.connections(), core.reactor.acceptor.unassigned()), (2, 1));
    for _ in 0..5 {
        assert!(core.run_iteration(), "the core slept with an accepted connection in its hands");
    }
    assert!(matches!(core.other_core.receive(), Some(CoreMessage::NewConnection { .. })));
    core.run_iteration();
    assert!(matches!(core.other_core.receive(), Some(CoreMessage::NewConnection { .. })));
    assert!(!core.run_iteration(), "and with nothing left to do it may sleep");
}

#[test]
fn requests_that_a_stalled_connection_starts_for_others_are_not_slept_over() {
    let mut core = ListeningCore::new(RING_CAPACITY);
    let mut session = core.connect();
    // One request of the fair queue at a time.
    let config = SchedConfig {
        policy: Policy::Fair,
        in_flight: 1,
        interval: Nanos::from_millis(10),
        ..SchedConfig::default()
    };
    core.reactor.accounting.monitor.set_config(config).expect("within its range");
    while core.reactor.accounting.last_interval < 2 {
        core.run_iteration();
    }
    // The connection waits for a buffer.
    let pool_bytes = core.reactor.pool.budget_bytes();
    let _all_buffers = core.reactor.pool.take(pool_bytes).expect("none is in use");
    let write = Command::Write {
        lba: octokv_base::Lba(0),
        data: Value::Slice(&[7; BLOCK_BYTES as usize]),
        force_unit_access: false,
    };
    session.submit(write, 1).expect("a slot is free");
    session.poll(core.sim.now(), |_, _| ());
    let has_stalled = |core: &ListeningCore| core.reactor.connections.iter().any(ConnectionIo::is_stalled);
    while !has_stalled(&core) {
        core.run_iteration();
    }
    // Of two requests of another tenant the first is done, so the second may begin.
    let (now, reactor) = (core.sim.now(), &mut core.reactor);
    for slot in 0..2 {
        let request = PendingRequest { tenant: TenantId(9), ..read_request(CoreId(0), BLOCKS, slot) };
        reactor.requests.enqueue(request, &reactor.accounting, now);
    }
    let first = reactor.requests.queue.pop().expect("the first begins at once");
    assert_eq!((reactor.requests.queue.len(), reactor.requests.scheduler.len()), (0, 1));
    reactor.requests.scheduler.on_complete(first.ticket_id, &RequestOutcome::Flushed);

    assert!(reactor.resume_stalled(now), "it started a request");
    assert_eq!((reactor.requests.scheduler.len(), reactor.requests.workers.running()), (0, 1));
    assert!(has_stalled(&core), "the connection itself made no progress");
    assert!(!core.reactor.resume_stalled(now), "and now there is nothing to do");
}
