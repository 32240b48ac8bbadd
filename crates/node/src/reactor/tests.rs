//! Messages of other cores: how many an iteration takes, and when it takes none; sessions with peers meanwhile.
//! `iterators`: the order of commands on one iterator. `owners`: requests on keys that have an owner core. `wakeups`: what must not be slept over.

mod iterators;
mod owners;
mod wakeups;

use super::owner_queues::OwnerQueues;
use super::*;
use crate::block_backend::{BlockBackend, BlockVolume};
use crate::core_metrics::RequestTiming;
use crate::core_roles::CoreRoles;
use crate::namespace_table::NamespaceBackend;
use crate::request_queue::TicketId;
use octokv_base::NamespaceId;
use octokv_client::{ClientConfig, PeerConfig};
use octokv_device::Device;
use octokv_device::power_loss::PowerLossDisk;
use octokv_engine::AnyEngine;
use octokv_nvmf::{LbaRange, RequestOperation};
use octokv_runtime::{
    CoreWaker, CpuTime, DetachedSocket, DeviceDriver, ReceiveStatus, SendStatus, mesh, open_device_queue,
};
use octokv_sched::TenantId;
use std::cell::Cell;
use std::io;
use std::pin::Pin;

const RING_CAPACITY: usize = 1024;
const BLOCKS: NamespaceId = NamespaceId(1);
const BLOCK_BYTES: u32 = 4096;

const PEER_SOCKET: SocketId = SocketId(7);

/// Sockets of a core without connections, which counts what it receives from a silent peer.
#[derive(Clone, Default)]
struct PeerSockets {
    connected: Rc<Cell<bool>>,
    receives: Rc<Cell<u32>>,
}

impl Sockets for PeerSockets {
    fn listen(&mut self, _: SocketAddr) -> io::Result<(ListenerId, SocketAddr)> {
        Err(io::ErrorKind::Unsupported.into())
    }
    fn accept(&mut self, _: ListenerId) -> Option<(SocketId, SocketAddr)> {
        None
    }
    fn connect(&mut self, _: SocketAddr) -> io::Result<SocketId> {
        self.connected.set(true);
        Ok(PEER_SOCKET)
    }
    fn detach(&mut self, _: SocketId) -> Option<DetachedSocket> {
        None
    }
    fn attach(&mut self, _: DetachedSocket) -> SocketId {
        unreachable!("nothing is detached")
    }
    fn receive(&mut self, socket: SocketId, _: &mut [u8]) -> ReceiveStatus {
        assert_eq!(socket, PEER_SOCKET);
        self.receives.set(self.receives.get() + 1);
        ReceiveStatus::WouldBlock
    }
    fn send(&mut self, _: SocketId, _: &[IoSlice<'_>]) -> SendStatus {
        SendStatus::WouldBlock
    }
    fn ready(&mut self, out: &mut Vec<SocketId>) {
        out.extend(self.connected.get().then_some(PEER_SOCKET));
    }
    fn close(&mut self, _: SocketId) {}
}

/// Core 1 of two, with one block namespace on `disk`, and the mailbox of core 0.
struct TwoCores {
    reactor: Box<dyn ReactorLoop<PeerSockets>>,
    sockets: PeerSockets,
    peers: PollGroup,
    handle: ReactorHandle,
    sender: Mailbox<CoreMessage>,
    disk: PowerLossDisk,
    completions: octokv_base::Prng,
    now: Nanos,
}

/// The parts of core `core`, which serves one block namespace on the returned disk.
fn reactor_parts<S>(
    sockets: S,
    mailbox: Mailbox<CoreMessage>,
    core: usize,
    core_waker: &Arc<CoreWaker>,
) -> (ReactorParts<S, AnyEngine>, PowerLossDisk) {
    let (queue, _) = open_device_queue(DeviceDriver::Threads, 1, core_waker).expect("worker threads");
    let devices = DeviceHandle::new(queue, 1);
    let handle = ReactorHandle::new(Arc::clone(core_waker), devices, CpuTime::simulated());
    let disk = PowerLossDisk::new(vec![0; 64 << 10], BLOCK_BYTES);
    let (device, pool): (Rc<dyn Device>, _) = (Rc::new(disk.clone()), BufferPool::new(8 << 20));
    let namespaces = Rc::new(NamespaceTable::<AnyEngine>::new(CoreRoles::SHARED));
    let volume = BlockVolume::new(BLOCK_BYTES, device.geometry().bytes());
    let backend = BlockBackend::new(volume, device, pool.clone(), handle.clone(), Rc::from("disk"));
    namespaces.insert(BLOCKS, NamespaceBackend::Block(backend));
    let monitor = Monitor::new(mailbox.core_count(), octokv_sched::SchedConfig::default(), || Nanos::ZERO);
    let parts = ReactorParts {
        sockets,
        listeners: Vec::new(),
        roles: CoreRoles::SHARED,
        mailbox,
        core,
        handle,
        target: Target::new(SubsystemConfig::new("nqn.2026-11.io.octokv:node"), Vec::new()),
        namespaces,
        pool,
        peers: PollGroup::new(Arc::clone(core_waker)),
        requests_max: RING_CAPACITY,
        monitor: Arc::new(monitor.expect("the defaults are valid")),
        costs: SimulatedCosts::default(),
    };
    (parts, disk)
}

/// A worker that never ends a request.
type StuckWorker = Pin<Box<dyn Future<Output = Infallible>>>;

fn stuck_workers(count: usize, core_waker: &Arc<CoreWaker>) -> WorkerPool<PendingRequest, StuckWorker> {
    WorkerPool::new(count, Arc::clone(core_waker), |job_slot: Rc<JobSlot<PendingRequest>>| {
        Box::pin(async move {
            job_slot.next_job().await;
            std::future::pending().await
        }) as StuckWorker
    })
}

/// A read of the first block by a connection of `home_core`.
fn read_request(home_core: CoreId, namespace: NamespaceId, slot: u16) -> PendingRequest {
    PendingRequest {
        home_core,
        connection: 0,
        slot,
        namespace,
        operation: RequestOperation::Read { range: LbaRange { lba: octokv_base::Lba(0), blocks: 1 } },
        tenant: TenantId(0),
        timing: RequestTiming::default(),
        ticket_id: TicketId::NONE,
    }
}

impl TwoCores {
    fn new(requests_max: usize) -> TwoCores {
        let core_wakers = [CoreWaker::without_eventfd(), CoreWaker::without_eventfd()];
        let mut mailboxes = mesh(&core_wakers, RING_CAPACITY);
        let (mailbox, sender) = (mailboxes.remove(1), mailboxes.remove(0));
        let (sockets, peers) = (PeerSockets::default(), PollGroup::new(Arc::clone(&core_wakers[1])));
        let (parts, disk) = reactor_parts(sockets.clone(), mailbox, 1, &core_wakers[1]);
        let handle = parts.handle.clone();
        let reactor = Box::new(new_reactor(ReactorParts { requests_max, peers: peers.clone(), ..parts }));
        let (completions, now) = (octokv_base::Prng::new(1), Nanos(1));
        TwoCores { reactor, sockets, peers, handle, sender, disk, completions, now }
    }

    /// Core 0 offloads `count` reads to core 1.
    fn offload(&mut self, namespace: NamespaceId, count: u16) {
        for slot in 0..count {
            let request = read_request(CoreId(0), namespace, slot);
            assert!(self.sender.send(1, CoreMessage::Execute(request)).is_ok(), "the ring has space");
        }
    }

    fn run_iteration(&mut self) -> bool {
        self.now = self.now + Nanos::from_micros(10);
        self.reactor.run_iteration(self.now)
    }

    /// Messages that core 1 has not received.
    fn waiting_messages(&self) -> usize {
        RING_CAPACITY - self.sender.free_slots(1)
    }

    /// Slots of the completions that core 0 has received.
    fn completed_slots(&mut self) -> Vec<u16> {
        std::iter::from_fn(|| match self.sender.receive()? {
            CoreMessage::Completed(completion) => Some(completion.slot),
            CoreMessage::NewConnection { .. } | CoreMessage::Execute(_) => {
                unreachable!("core 1 offloads nothing")
            }
        })
        .collect()
    }
}

#[test]
fn an_iteration_takes_a_bounded_number_of_messages() {
    let mut cores = TwoCores::new(RING_CAPACITY);
    // The namespace does not exist, so each request ends at once.
    cores.offload(NamespaceId(9), 2 * MESSAGES_PER_ITERATION_MAX as u16 + 7);
    for (left, completed) in [(MESSAGES_PER_ITERATION_MAX + 7, 256), (7, 256), (0, 7)] {
        assert!(
            cores.run_iteration(),
            "an iteration that leaves messages has worked: the core does not sleep"
        );
        assert_eq!((cores.waiting_messages(), cores.completed_slots().len()), (left, completed));
    }
}

#[test]
fn messages_stay_in_the_ring_while_requests_wait_for_workers() {
    let mut cores = TwoCores::new(4);
    cores.offload(BLOCKS, 20);
    for _ in 0..10 {
        cores.run_iteration();
    }
    // Four requests run, four wait for workers.
    assert_eq!((cores.reactor.requests(), cores.waiting_messages()), (8, 12));
    let mut completed = Vec::new();
    for _ in 0..1_000 {
        cores.disk.complete_one(&mut cores.completions);
        cores.run_iteration();
        assert!(cores.reactor.requests() <= 8, "{} requests", cores.reactor.requests());
        completed.extend(cores.completed_slots());
    }
    completed.sort_unstable();
    assert_eq!(completed, (0..20).collect::<Vec<u16>>());
}

#[test]
fn every_message_is_taken_before_a_namespace_is_attached() {
    let mut cores = TwoCores::new(4);
    cores.offload(NamespaceId(9), 600);
    cores.reactor.fail_missing_namespaces(Nanos(1));
    assert_eq!((cores.waiting_messages(), cores.reactor.requests()), (0, 0));
    cores.run_iteration();
    assert_eq!(cores.completed_slots().len(), 600);
}

#[test]
fn sessions_with_peers_receive_while_requests_wait_for_workers() {
    let mut cores = TwoCores::new(4);
    let config = PeerConfig { client: ClientConfig::default(), buffer_bytes_max: 1 << 20 };
    let address = "127.0.0.1:4420".parse().expect("an address");
    let peer = cores.peers.connect(address, config, cores.now).expect("the first peer");
    cores.offload(BLOCKS, 20);
    for _ in 0..10 {
        cores.run_iteration();
    }
    assert_eq!(cores.reactor.requests(), 8, "four of them wait for workers");
    let before = cores.sockets.receives.get();
    for _ in 0..5 {
        assert!(!cores.run_iteration(), "nothing has arrived");
    }
    assert_eq!(cores.sockets.receives.get() - before, 5);
    // A sleeping core wakes for the connect timeout.
    let deadline = cores.peers.next_deadline();
    assert!(deadline < Nanos::NEVER && cores.handle.next_deadline() <= deadline);
    (cores.now, cores.completions) = (deadline, octokv_base::Prng::new(2));
    cores.run_iteration();
    assert!(peer.ended().is_some() && cores.peers.is_empty());
}
