//! An engine on the client's side, over the network, on a node's namespace of blocks: node and client are the
//! production code in a virtual world with resets, partitions, kills and power cuts; what was acknowledged is there
//! whenever the volume is opened again.

use octokv_base::{Key, NamespaceId, Nanos, Pool, Random};
use octokv_client::bug_injection::{self as client_planted, Bug as ClientBug};
use octokv_client::{Remote, Session, Settings};
use octokv_device::{Device, FileDevice, Geometry};
use octokv_engine::bug_injection::{self as engine_planted, Bug as EngineBug};
use octokv_engine::conformance::{key_of, operation_of, record_of, value_of};
use octokv_engine::hash::{self, FormatSettings, HashEngine, OpenSettings};
use octokv_engine::{Durability, Engine, Fault, Put, PutMode};
use octokv_node::block_backend::{BlockVolume, Blocks};
use octokv_node::monitor::Scheduling;
use octokv_node::namespace_table::{Store, Stores};
use octokv_node::{Costs, Parts, Turns, reactor};
use octokv_nvmf::{NamespaceInfo, NamespaceKind, Target, TargetSettings};
use octokv_runtime::simulated::{
    CrashPlan, DiskId, DiskSettings, HostId, Stop, VirtualSockets, VirtualWorld, WorldSettings,
};
use octokv_runtime::{Busy, Channel, Doorbell, Handle, Sockets, mesh};
use octokv_sim::node_under_test::handle_without_devices;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;

const NQN: &str = "nqn.2026-11.io.octokv:node";
const KEYS: u64 = 12;
/// Tasks of the client; each has keys of its own.
const TASKS: u64 = 3;
/// Longer than anything may take.
const PATIENCE: Nanos = Nanos::from_secs(120);

struct Place {
    world: VirtualWorld,
    node: HostId,
    disk: DiskId,
    client: HostId,
    block_bytes: u32,
    durability: Durability,
}

/// What was promised, and what was tried since the volume was opened.
#[derive(Default)]
struct Ledger {
    settled: BTreeMap<Key, u64>,
    stored: BTreeMap<Key, u64>,
    tried: BTreeMap<Key, Vec<u64>>,
    operation: u64,
    answered: u64,
    /// Tasks that have ended: with their work, or with the engine's writing.
    ended: u64,
    failure: Option<String>,
}

type Shared<T> = Rc<RefCell<T>>;

impl Place {
    fn new(seed: u64) -> Place {
        let mut random = Random::new(seed);
        let world = VirtualWorld::new(WorldSettings::new(seed));
        let (node, client) = (world.add_host(), world.add_host());
        let block_bytes = [512, 4096][random.below(2) as usize];
        let size_bytes = 8 << 20;
        let disk =
            world.add_disk(node, DiskSettings { size_bytes, block_bytes: 512, ..DiskSettings::default() });
        let durability = [Durability::Flush, Durability::Device][random.below(2) as usize];
        Place { world, node, disk, client, block_bytes, durability }
    }

    fn address(&self) -> SocketAddr {
        SocketAddr::new(self.world.address(self.node), 4420)
    }

    /// Starts the node: one core, one namespace.
    fn boot(&self) {
        let world = &self.world;
        world.start_host(self.node);
        let doorbell = Doorbell::silent();
        let channel = Channel::new(Box::new(world.queue(self.node)), 16);
        let handle = Handle::new(doorbell.clone(), channel.clone(), Busy::virtual_time());
        let media = world.media(self.disk);
        let blocks = media.size_bytes / u64::from(media.block_bytes);
        let geometry = Geometry { block_bytes: media.block_bytes, blocks, volatile: false };
        let file = channel.open(&media).expect("a virtual disk opens");
        let device: Rc<dyn Device> = Rc::new(FileDevice::new(channel, file, geometry, "disk".to_owned()));
        let volume = BlockVolume::new(self.block_bytes, geometry.bytes());
        let info = NamespaceInfo {
            id: NamespaceId(1),
            nguid: [3; 16],
            size_bytes: geometry.bytes(),
            used_bytes: Default::default(),
            kind: NamespaceKind::Block { block_bytes: self.block_bytes },
            ana_group: 1,
        };
        let target = Target::new(TargetSettings::new(NQN), vec![info]);
        let pool = Pool::new(16 << 20);
        let stores: Rc<Stores<HashEngine>> = Rc::default();
        let (own, name) = (pool.clone(), Rc::from("disk"));
        let store = Blocks { volume, device, pool: own, handle: handle.clone(), name };
        stores.insert(NamespaceId(1), Store::Blocks(store));
        let mut sockets = world.sockets(self.node);
        let listeners = vec![sockets.listen(self.address()).expect("nobody else is on this host")];
        let mailbox = mesh(&[doorbell], 4).pop().expect("one core");
        let scheduling = Scheduling::new(1, octokv_sched::Settings::default(), || Nanos::ZERO);
        let mut turns = reactor(Parts {
            sockets,
            local_address: |_: &VirtualSockets, _| None,
            listeners,
            mailbox,
            core: 0,
            handle: handle.clone(),
            target,
            stores,
            pool,
            requests_max: 64,
            scheduling: Arc::new(scheduling.expect("defaults")),
            costs: Costs::default(),
        });
        world.add_reactor(self.node, handle, move |now| turns.turn(now));
    }

    /// A session that is live.
    fn connect(&self) -> Result<Session<VirtualSockets>, String> {
        let settings = Settings {
            namespace: NamespaceId(1),
            queues: 2,
            depth: 16,
            command_timeout: Nanos::from_secs(2),
            ..Settings::default()
        };
        let sockets = self.world.sockets(self.client);
        let session = Session::new(sockets, self.address(), settings, self.world.now());
        let session = Rc::new(RefCell::new(Some(session)));
        let (handle, own) = (handle_without_devices(&self.world, self.client), Rc::clone(&session));
        let handle_too = handle.clone();
        let id = self.world.add_reactor(self.client, handle, move |now| {
            let mut own = own.borrow_mut();
            let Some(session) = own.as_mut() else { return false };
            let busy = session.poll(now, |_, _| ());
            handle_too.want_turn_at(session.next_deadline());
            busy
        });
        let over = |session: &Session<_>| session.is_live() || session.ended().is_some();
        let done = || session.borrow().as_ref().is_none_or(over);
        self.world.run_while_not(self.world.now() + PATIENCE, done);
        self.world.remove_reactor(id);
        let session = session.borrow_mut().take().ok_or("it was there")?;
        if session.is_live() { Ok(session) } else { Err(format!("no connection: {:?}", session.ended())) }
    }

    /// One life of the client's engine: it opens the volume, looks everything up, puts until its writing ends or
    /// the work is done, and dies. `faults` is called with how many puts are answered.
    fn live(&self, ledger: &Shared<Ledger>, first: bool, mut faults: impl FnMut(u64)) -> Result<(), String> {
        let remote = Remote::new(self.connect()?, self.world.now()).map_err(|error| error.to_string())?;
        let channel = remote.channel();
        let device: Rc<dyn Device> = Rc::new(remote.device(&channel));
        let handle = Handle::new(Doorbell::silent(), channel.clone(), Busy::virtual_time());
        let own = handle.clone();
        let id = self.world.add_reactor(self.client, handle.clone(), move |now| {
            let mut worked = own.begin_turn(now) > 0;
            worked |= remote.turn(now);
            worked |= channel.poll() > 0;
            worked |= own.run_background() > 0;
            worked |= channel.poll() > 0;
            own.want_turn_at(remote.next_deadline());
            worked
        });
        let begun = {
            let mut ledger = ledger.borrow_mut();
            (ledger.ended, ledger.answered) = (0, 0);
            ledger.operation
        };
        let settings = OpenSettings { durability: self.durability, cores: 1 };
        let format = FormatSettings { unit_bytes: self.block_bytes, seed: 5, ..FormatSettings::default() };
        let (shared, own) = (Rc::clone(ledger), handle.clone());
        handle.spawn(async move {
            let pool = Pool::new(16 << 20);
            let opened = async {
                if first {
                    hash::format(&*device, &format).await?;
                }
                hash::open(&device, &pool, settings, &format).await
            };
            let engine = match opened.await {
                Ok(volume) => Rc::new(HashEngine::new(volume, 0, device, pool)),
                Err(error) => return fail(&shared, format!("it does not open: {error}")),
            };
            if let Err(what) = audit(&engine, &shared).await {
                return fail(&shared, what);
            }
            let (kept, clock) = (Rc::clone(&engine), own.clone());
            own.spawn(async move { kept.maintain(&clock, |_| ()).await });
            for task in 0..TASKS {
                let random = Random::new(begun ^ task << 32);
                own.spawn(work(Rc::clone(&engine), Rc::clone(&shared), own.clone(), settings, task, random));
            }
        });
        let deadline = self.world.now() + PATIENCE;
        let mut finished = false;
        while !finished && self.world.now() < deadline {
            self.world.step(self.world.now() + Nanos::from_millis(1));
            let answered = ledger.borrow().answered;
            faults(answered);
            finished = ledger.borrow().ended == TASKS || ledger.borrow().failure.is_some();
        }
        handle.shutdown();
        self.world.remove_reactor(id);
        match ledger.borrow_mut().failure.take() {
            Some(what) => Err(what),
            None if finished => Ok(()),
            None => Err("standstill".to_owned()),
        }
    }
}

fn fail(ledger: &Shared<Ledger>, what: String) {
    ledger.borrow_mut().failure.get_or_insert(what);
}

/// Every key holds what was promised last, or what was tried after it.
async fn audit(engine: &HashEngine, ledger: &Shared<Ledger>) -> Result<(), String> {
    for index in 0..KEYS {
        let key = key_of(index);
        let found = engine.get(&key).await.map_err(|fault| format!("{key}: {fault}"))?;
        let found = found.map(|value| operation_of(&key, value.as_bytes()));
        let mut ledger = ledger.borrow_mut();
        let settled = ledger.settled.get(&key).copied();
        let tried = ledger.tried.remove(&key).unwrap_or_default();
        if found != settled && !found.is_some_and(|found| tried.contains(&found) && Some(found) > settled) {
            return Err(format!("{key}: promised was {settled:?}, found {found:?}, tried {tried:?}"));
        }
        ledger.settled.extend(found.map(|found| (key, found)));
    }
    ledger.borrow_mut().stored.clear();
    Ok(())
}

/// Puts and flushes until the engine takes no more writes, or there were enough.
async fn work(
    engine: Rc<HashEngine>,
    ledger: Shared<Ledger>,
    handle: Handle,
    settings: OpenSettings,
    task: u64,
    mut random: Random,
) {
    for _ in 0..60 {
        let key = key_of(random.below(KEYS / TASKS) * TASKS + task);
        let operation = {
            let mut ledger = ledger.borrow_mut();
            ledger.operation += 1;
            let operation = ledger.operation;
            ledger.tried.entry(key.clone()).or_default().push(operation);
            operation
        };
        let value = value_of(&key, operation, 8 + random.below(6000) as usize);
        match engine.put(&key, PutMode::Upsert, record_of(&key, &value), value.len()).await {
            Ok(Put::Stored) => {
                let mut ledger = ledger.borrow_mut();
                ledger.answered += 1;
                match settings.durability {
                    Durability::Flush => drop(ledger.settled.insert(key, operation)),
                    Durability::Device => drop(ledger.stored.insert(key, operation)),
                }
            }
            Ok(other) => return fail(&ledger, format!("a put was answered with {other:?}")),
            // It may be the only one that the loss took; the next tells.
            Err(Fault::Device(_)) => {}
            Err(Fault::ReadOnly) => break,
            Err(fault) => return fail(&ledger, format!("a put failed: {fault}")),
        }
        if random.one_in(6) {
            let before = ledger.borrow().stored.clone();
            if engine.flush().await.is_ok() {
                let mut ledger = ledger.borrow_mut();
                for (key, operation) in before {
                    let settled = ledger.settled.entry(key).or_default();
                    *settled = operation.max(*settled);
                }
            }
        }
        if random.one_in(4) {
            handle.sleep(Nanos::from_micros(random.below(400))).await;
        }
    }
    ledger.borrow_mut().ended += 1;
}

/// Plays one seed. The error says what does not hold.
fn play(seed: u64) -> Result<(), String> {
    let (place, mut random) = (Place::new(seed), Random::new(seed ^ 0xabc));
    let ledger: Shared<Ledger> = Rc::default();
    place.boot();
    for life in 0..5 {
        let (at, kind) = (random.below(120), random.below(6));
        let (mut done, mut mend) = (false, None);
        let world = &place.world;
        place.live(&ledger, life == 0, |answered| {
            if mend.is_some_and(|at| at <= world.now()) {
                mend = None;
                world.set_partitioned(place.client, place.node, false);
            }
            if done || answered < at {
                return;
            }
            done = true;
            let stop = match kind {
                0 => {
                    world.reset_streams(place.client, place.node);
                    return;
                }
                1 => {
                    world.set_partitioned(place.client, place.node, true);
                    mend = Some(world.now() + Nanos::from_millis(1 + random.below(4000)));
                    return;
                }
                2 => Stop::Killed,
                3 => Stop::PowerCut(CrashPlan::LoseAll),
                4 => Stop::PowerCut(CrashPlan::Some),
                _ => Stop::PowerCut(CrashPlan::Torn),
            };
            world.stop_host(place.node, stop);
            place.boot();
        })?;
        world.set_partitioned(place.client, place.node, false);
        if random.one_in(2) {
            // Whatever was promised is promised for the node's sake, not for its memory's.
            world.stop_host(place.node, Stop::PowerCut(CrashPlan::LoseAll));
            place.boot();
        }
    }
    place.live(&ledger, false, |_| ())
}

#[test]
fn what_an_engine_on_the_clients_side_promised_is_there_after_every_loss() {
    for seed in 0..30 {
        play(seed).unwrap_or_else(|what| panic!("seed {seed}: {what}"));
    }
}

fn is_found(name: &str) {
    let found = (0..30).find_map(|seed| play(seed).err().map(|what| (seed, what)));
    client_planted::plant(None);
    engine_planted::plant(None);
    let (seed, what) = found.unwrap_or_else(|| panic!("{name} is not found"));
    println!("{name}, after {} seeds: {what}", seed + 1);
}

#[test]
fn a_flush_that_is_answered_before_the_nodes_flush_is_found() {
    client_planted::plant(Some(ClientBug::AnswerFlushEarly));
    is_found("AnswerFlushEarly");
}

#[test]
fn lost_writes_that_are_forgotten_are_found() {
    client_planted::plant(Some(ClientBug::ForgetLostWrites));
    is_found("ForgetLostWrites");
}

#[test]
fn a_flush_that_the_engine_skips_is_found() {
    engine_planted::plant(Some(EngineBug::SkipFlush));
    is_found("SkipFlush");
}
