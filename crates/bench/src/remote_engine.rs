//! NetKVS's architecture (c): the hash engine on this side, on the node's namespace of blocks.
//!
//! ```text
//!  streams (tasks) ─▶ HashEngine ─▶ RemoteDevice ─▶ session ─▶ node          one OS thread, one loop:
//!  turn: time, session and its answers, tasks that they woke, the engine's own work, rest
//! ```
//! Each of the plan's threads × depth operations in flight is a task that does one operation after another.
//! The connections are as many as with Key Value commands, one per thread, or as the node grants.

use crate::engine_op::{Operated, format_settings, operate};
use crate::kv_worker::{connect, disconnect};
use crate::op_generator::Chooser;
use crate::recorder::{Answered, Tally};
use crate::runner::{Error, Node, Shared};
use crate::system_under_test::EngineSettings;
use crate::{Clock, Plan};
use octokv_base::{Buffer, Lba, Nanos, Pool};
use octokv_client::{Reconnect, Remote, Settings};
use octokv_device::{Device, DeviceError};
use octokv_engine::hash::superblock::{SUPERBLOCK_STRIDE_BYTES, SUPERBLOCKS};
use octokv_engine::hash::{self, HashEngine, OpenError, OpenSettings};
use octokv_runtime::{Busy, Channel, Doorbell, Handle, Idle, RealSockets, Tasks, block_on};
use std::cell::RefCell;
use std::future::Future;
use std::net::SocketAddr;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::atomic::Ordering;

/// A put has so many device operations in flight at most.
const OPERATIONS_OF_A_PUT: usize = 4;
const DEPTH_MAX: usize = 128;

/// The namespace as a device of this thread.
struct Ground {
    remote: Remote<RealSockets>,
    channel: Channel,
    device: Rc<dyn Device>,
    now: Clock,
}

impl Ground {
    fn connect(address: SocketAddr, settings: Settings, now: Clock) -> Result<Ground, Error> {
        let session = connect(address, settings, now).map_err(Error::Connect)?;
        let remote = Remote::new(session, now()).map_err(Error::Connect)?;
        let channel = remote.channel();
        let device: Rc<dyn Device> = Rc::new(remote.device(&channel));
        Ok(Ground { remote, channel, device, now })
    }

    /// Runs a future to its end, turning the session meanwhile.
    fn finish<T>(&self, future: impl Future<Output = T>) -> T {
        block_on(future, || {
            self.remote.turn((self.now)());
            self.channel.poll();
        })
    }

    fn failed(&self, error: impl Into<OpenError>) -> Error {
        Error::Open { name: self.device.name().to_owned(), error: error.into() }
    }

    /// Ends the session in good order.
    fn leave(self) {
        let Ground { remote, channel, device, now } = self;
        drop((device, channel));
        if let Some(session) = remote.into_session() {
            disconnect(session, now);
        }
    }
}

/// Formats the namespace where that is asked for, or where nothing was ever written to it.
///
/// # Errors
/// When it cannot be reached or formatted.
pub fn prepare(
    plan: &Plan,
    node: &Node,
    engine: EngineSettings,
    format: bool,
    now: Clock,
) -> Result<(), Error> {
    let client = Settings { reconnect: Reconnect::Never, ..node.client.clone() };
    let ground = Ground::connect(node.address, client, now)?;
    let blank = ground.finish(is_blank(&*ground.device)).map_err(|error| ground.failed(error))?;
    if format || blank {
        let settings = format_settings(plan.value_sizes.most(), engine.seed);
        let formatted = ground.finish(hash::format(&*ground.device, &settings));
        formatted.map_err(|error| ground.failed(error))?;
    }
    ground.leave();
    Ok(())
}

/// Whether the part that a format writes is all zeros.
async fn is_blank(device: &dyn Device) -> Result<bool, DeviceError> {
    let bytes = (SUPERBLOCKS * SUPERBLOCK_STRIDE_BYTES).min(device.geometry().bytes()) as usize;
    let buffer = device.read(Lba(0), Buffer::zeroed(bytes)).await.into_read()?;
    Ok(buffer.iter().all(|&byte| byte == 0))
}

/// What the streams share.
struct Run<'a> {
    shared: &'a Shared,
    engine: Rc<HashEngine>,
    pool: Pool,
    chooser: RefCell<Chooser>,
    tally: RefCell<Tally>,
    failure: RefCell<Option<Error>>,
    until: Nanos,
}

impl Run<'_> {
    /// One operation after another until the workload ends or something fails.
    async fn stream(&self) {
        let now = self.shared.host.now;
        loop {
            let started = now();
            if started >= self.until || self.shared.crew.failed.load(Ordering::Relaxed) {
                return;
            }
            let operation = self.shared.next_operation(&mut self.chooser.borrow_mut());
            let Some(operation) = operation else { return };
            match operate(self.shared, &*self.engine, &self.pool, operation).await {
                Ok(Operated { found, value_bytes }) => {
                    let answered = Answered { started, now: now(), found, value_bytes, keys_listed: 0 };
                    self.tally.borrow_mut().answered(answered);
                }
                Err(error) => {
                    self.shared.crew.failed.store(true, Ordering::Release);
                    self.failure.borrow_mut().get_or_insert(error);
                    return;
                }
            }
            self.shared.done.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// Drives all streams of a workload on this thread.
pub(crate) fn drive(shared: &Shared, settings: EngineSettings) -> Result<Tally, Error> {
    // There is one worker, so nobody waits for it and it waits for nobody.
    shared.crew.connected.fetch_add(1, Ordering::AcqRel);
    let (plan, now) = (&shared.plan, shared.host.now);
    let depth = (plan.depth * OPERATIONS_OF_A_PUT).clamp(OPERATIONS_OF_A_PUT, DEPTH_MAX) as u16;
    let queues = u16::try_from(plan.threads).unwrap_or(u16::MAX);
    let ground = Ground::connect(shared.address, Settings { queues, depth, ..shared.client.clone() }, now)?;
    let pool = Pool::new(settings.pool_bytes);
    let open = OpenSettings { durability: settings.durability, cores: 1 };
    let format = format_settings(plan.value_sizes.most(), settings.seed);
    let volume = ground.finish(hash::open(&ground.device, &pool, open, &format));
    let volume = volume.map_err(|error| ground.failed(error))?;
    let engine = Rc::new(HashEngine::new(volume, 0, Rc::clone(&ground.device), pool.clone()));
    let begin = now();
    let run = Run {
        shared,
        engine: Rc::clone(&engine),
        pool,
        chooser: RefCell::new(shared.chooser(0)),
        tally: RefCell::new(Tally::new(begin + plan.warm_up)),
        failure: RefCell::new(None),
        until: shared.until(begin),
    };
    turn_until_done(&ground, &run)?;
    let Run { tally, failure, .. } = run;
    if let Some(error) = failure.into_inner() {
        return Err(error);
    }
    ground.finish(engine.checkpoint(true)).map_err(Error::Close)?;
    drop(engine);
    ground.leave();
    Ok(tally.into_inner())
}

/// The loop of this thread.
fn turn_until_done(ground: &Ground, run: &Run<'_>) -> Result<(), Error> {
    let (shared, now) = (run.shared, ground.now);
    let doorbell = Doorbell::silent();
    let handle = Handle::new(doorbell.clone(), ground.channel.clone(), Busy::real());
    let idle = ground
        .remote
        .with_session(|session| Idle::new(shared.polling, doorbell.clone(), session.sockets_mut(), None));
    let mut idle = idle.map_err(|error| Error::Thread(error.raw_os_error().unwrap_or_default()))?;
    let (engine, own) = (Rc::clone(&run.engine), handle.clone());
    // A checkpoint that fails is tried again; where it matters, the next put fails, too.
    handle.spawn(async move { engine.maintain(&own, |_| ()).await });
    let count = shared.plan.threads * shared.plan.depth;
    let mut streams: Tasks<Pin<Box<dyn Future<Output = ()> + '_>>> = Tasks::new(count, doorbell);
    handle.begin_turn(now());
    for _ in 0..count {
        let started = streams.spawn(Box::pin(run.stream()));
        assert!(started.is_ok(), "there is room for every stream");
    }
    loop {
        let turn = now();
        handle.begin_turn(turn);
        let mut busy = ground.remote.turn(turn);
        busy |= ground.channel.poll() > 0;
        busy |= streams.poll_ready() + handle.run_background() > 0;
        if streams.running() == 0 && run.engine.volume().is_idle() {
            break;
        }
        let deadline = ground.remote.next_deadline().min(handle.next_deadline());
        ground.remote.with_session(|session| idle.rest(busy, now(), false, deadline, session.sockets_mut()));
    }
    handle.shutdown();
    Ok(())
}
