//! NetKVS's architecture (c): the hash engine in this process, on a block namespace of the node.
//!
//! ```text
//!  streams (tasks) ─▶ engine ─▶ RemoteDevice     ─▶ session ─▶ node          one OS thread, one loop:
//!  iteration: time, session and its responses, tasks that these woke, background work of the engine, idle
//! ```
//! Each of the threads × depth operations in flight is a task that runs one operation after another.
//! There is one connection per thread, as with Key Value commands, or as many as the node grants.

use crate::config::BenchConfig;
use crate::engine_op::format_config;
use crate::engine_streams::StreamContext;
use crate::error::BenchError;
use crate::kv_worker::{connect, disconnect};
use crate::platform::Clock;
use crate::recorder::Recorder;
use crate::system_under_test::LocalEngineConfig;
use crate::workload_state::{TargetNode, WorkloadState};
use octokv_base::BufferPool;
use octokv_client::{ClientConfig, Reconnect, RemoteSession};
use octokv_device::Device;
use octokv_engine::common::superblock_io::is_blank;
use octokv_engine::{AnyEngine, AnyVolume, Engine, OpenConfig, OpenError, Volume, WallClock};
use octokv_runtime::{CoreWaker, CpuTime, DeviceHandle, IdlePolicy, KernelSockets, ReactorHandle, block_on};
use std::future::Future;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::atomic::Ordering;

/// Upper bound of device operations in flight per put.
const DEVICE_OPS_PER_PUT: usize = 4;
const QUEUE_DEPTH_MAX: usize = 128;

/// The namespace as a device of this thread.
struct RemoteNamespace {
    remote: RemoteSession<KernelSockets>,
    channel: DeviceHandle,
    device: Rc<dyn Device>,
    now: Clock,
}

impl RemoteNamespace {
    fn connect(
        address: SocketAddr,
        settings: ClientConfig,
        now: Clock,
    ) -> Result<RemoteNamespace, BenchError> {
        let session = connect(address, settings, now).map_err(BenchError::Connect)?;
        let remote = RemoteSession::new(session, now()).map_err(BenchError::Connect)?;
        let channel = remote.channel();
        let device: Rc<dyn Device> = Rc::new(remote.device(&channel));
        Ok(RemoteNamespace { remote, channel, device, now })
    }

    /// Runs a future to completion and polls the session meanwhile.
    fn run_until_complete<T>(&self, future: impl Future<Output = T>) -> T {
        block_on(future, || {
            self.remote.poll((self.now)());
            self.channel.poll();
        })
    }

    fn open_error(&self, error: impl Into<OpenError>) -> BenchError {
        BenchError::Open { name: self.device.name().to_owned(), error: error.into() }
    }

    /// Closes the session with a clean shutdown.
    fn close(self) {
        let RemoteNamespace { remote, channel, device, now } = self;
        drop((device, channel));
        if let Some(session) = remote.into_session() {
            disconnect(session, now);
        }
    }
}

/// Formats the namespace if `format` is set or the namespace is blank.
///
/// # Errors
/// If it cannot be connected to, read or formatted.
pub fn format_if_needed(
    config: &BenchConfig,
    node: &TargetNode,
    engine: LocalEngineConfig,
    format: bool,
    now: Clock,
) -> Result<(), BenchError> {
    let client = ClientConfig { reconnect: Reconnect::Never, ..node.client.clone() };
    let namespace = RemoteNamespace::connect(node.address, client, now)?;
    let blank = namespace
        .run_until_complete(is_blank(&*namespace.device))
        .map_err(|error| namespace.open_error(error))?;
    if format || blank {
        let settings = format_config(config.value_sizes.max_bytes(), engine.seed);
        let formatted = namespace
            .run_until_complete(AnyVolume::format(std::slice::from_ref(&namespace.device), &settings));
        formatted.map_err(|error| namespace.open_error(error))?;
    }
    namespace.close();
    Ok(())
}

/// Runs all streams of a workload on this thread.
pub(crate) fn run_worker(
    shared: &WorkloadState,
    settings: LocalEngineConfig,
) -> Result<Recorder, BenchError> {
    // There is one worker, so no worker waits for another.
    shared.group.connected.fetch_add(1, Ordering::AcqRel);
    let (config, now) = (&shared.config, shared.platform.now);
    let depth = (config.depth * DEVICE_OPS_PER_PUT).clamp(DEVICE_OPS_PER_PUT, QUEUE_DEPTH_MAX) as u16;
    let queues = u16::try_from(config.threads).unwrap_or(u16::MAX);
    let namespace = RemoteNamespace::connect(
        shared.address,
        ClientConfig { io_queues: queues, queue_depth: depth, ..shared.client.clone() },
        now,
    )?;
    let pool = BufferPool::new(settings.pool_bytes);
    let open = OpenConfig {
        durability: settings.durability,
        cores: 1,
        cache_bytes: 0,
        prepare_bytes: 0,
        compact_bytes_per_second: 0,
        tree: OpenConfig::TREE,
        swap_gap: OpenConfig::SWAP_GAP,
        clock: WallClock::default(),
        tokens: None,
    };
    let format = format_config(config.value_sizes.max_bytes(), settings.seed);
    let devices = std::slice::from_ref(&namespace.device);
    let volume = namespace.run_until_complete(AnyVolume::open(devices, &pool, open, &format));
    let volume = volume.map_err(|error| namespace.open_error(error))?;
    let engine = Rc::new(volume.engine(0, devices, pool.clone()));
    let context = StreamContext::new(shared, 0, &engine, volume.info().has_iterators, pool);
    run_event_loop(&namespace, &context, (shared, &engine, &volume))?;
    let recorder = context.finish()?;
    namespace.run_until_complete(engine.close()).map_err(BenchError::Close)?;
    drop(engine);
    namespace.close();
    Ok(recorder)
}

/// The event loop of this thread.
fn run_event_loop(
    namespace: &RemoteNamespace,
    context: &StreamContext<'_>,
    (shared, engine, volume): (&WorkloadState, &Rc<AnyEngine>, &AnyVolume),
) -> Result<(), BenchError> {
    let now = namespace.now;
    let doorbell = CoreWaker::without_eventfd();
    let handle = ReactorHandle::new(doorbell.clone(), namespace.channel.clone(), CpuTime::measured());
    let idle = namespace.remote.with_session(|session| {
        IdlePolicy::new(shared.polling, doorbell.clone(), session.sockets_mut(), None)
    });
    let mut idle = idle.map_err(|error| BenchError::Thread(error.raw_os_error().unwrap_or_default()))?;
    let (engine, background) = (Rc::clone(engine), handle.clone());
    // A failed checkpoint is retried; if it matters, the next put fails too.
    handle.spawn(async move { engine.maintain(&background, |_| ()).await });
    let count = shared.config.threads * shared.config.depth;
    handle.begin_iteration(now());
    let mut streams = context.start(count, shared.has_writer(0), &handle, doorbell);
    loop {
        let iteration_start = now();
        handle.begin_iteration(iteration_start);
        let mut busy = namespace.remote.poll(iteration_start);
        busy |= namespace.channel.poll() > 0;
        busy |= streams.poll_ready() + handle.poll_background() > 0;
        if streams.running() == 0 && volume.is_idle() {
            break;
        }
        let deadline = namespace.remote.next_deadline().min(handle.next_deadline());
        namespace
            .remote
            .with_session(|session| idle.spin_or_sleep(busy, now(), false, deadline, session.sockets_mut()));
    }
    handle.shutdown();
    Ok(())
}
