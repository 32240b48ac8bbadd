//! One core with an engine on a modelled drive, without a network: futures run on it in virtual time, one engine after the other beside
//! its background work.
//!
//! ```text
//!   DriveCore::run(future)        run_engine: work beside maintenance ─▶ idle ─▶ close
//! ```
//! In: a drive; a future, or an engine with work on it. Out: what they return.
//!
//! Invariant: results are a function of the arguments.

use super::node::host_handle;
use super::ssd_device::ModelledDrive;
use octokv_base::Nanos;
use octokv_device::Device;
use octokv_engine::{Engine, Volume};
use octokv_node::OpenDevice;
use octokv_runtime::simulated::{HostFailure, SimEnv, SimEnvConfig, SimHostId};
use octokv_runtime::{CoreWaker, ReactorHandle};
use std::cell::RefCell;
use std::future::{Future, poll_fn};
use std::pin::pin;
use std::rc::Rc;

/// Time of a reactor iteration without simulated work.
const MIN_ITERATION_COST: Nanos = Nanos(100);
/// The time limit of one future.
const RUN_LIMIT: Nanos = Nanos::from_secs(100_000);
/// How often the end of an engine's background work is looked for.
const IDLE_POLL_INTERVAL: Nanos = Nanos::from_millis(1);

/// A simulated core with a drive.
pub struct DriveCore {
    sim: SimEnv,
    host: SimHostId,
    handle: ReactorHandle,
    device: Rc<dyn Device>,
}

impl DriveCore {
    /// A core with the drive that `create` makes for the simulation.
    ///
    /// # Errors
    /// A message if the drive cannot be opened.
    pub fn new(seed: u64, create: impl FnOnce(&SimEnv) -> ModelledDrive) -> Result<DriveCore, String> {
        let sim =
            SimEnv::new(SimEnvConfig { iteration_cost_min: MIN_ITERATION_COST, ..SimEnvConfig::new(seed) });
        let host = sim.add_host();
        let handle = host_handle(&sim, host, CoreWaker::without_eventfd());
        let own = handle.clone();
        sim.add_reactor(host, handle.clone(), move |now| {
            let fired = own.begin_iteration(now);
            fired + own.poll_background() > 0
        });
        let drive = create(&sim);
        let device = drive.open_for_core(&handle).map_err(|error| error.to_string())?;
        Ok(DriveCore { sim, host, handle, device })
    }

    /// The time of the simulation.
    pub fn now(&self) -> Nanos {
        self.sim.now()
    }

    /// Lets time pass until `at`, at which a drive in use can have been used last.
    pub fn wait_until(&self, at: Nanos) {
        self.sim.run_until(at);
    }

    /// The core.
    pub fn handle(&self) -> &ReactorHandle {
        &self.handle
    }

    /// The drive.
    pub fn device(&self) -> &Rc<dyn Device> {
        &self.device
    }

    /// Runs a future on the core.
    ///
    /// # Errors
    /// The future's, or a message if it does not come to an end.
    pub fn run<T: 'static>(
        &self,
        future: impl Future<Output = Result<T, String>> + 'static,
    ) -> Result<T, String> {
        let result = Rc::new(RefCell::new(None));
        let end = Rc::clone(&result);
        self.handle.spawn(async move { *end.borrow_mut() = Some(future.await) });
        self.sim.run_until_true(self.sim.now() + RUN_LIMIT, || result.borrow().is_some());
        let ended = result.take();
        ended.unwrap_or_else(|| Err("the engine does not come to an end".to_owned()))
    }
}

impl Drop for DriveCore {
    fn drop(&mut self) {
        // Reactors and pending events hold references to the simulation, which would keep it alive.
        self.sim.stop_host(self.host, HostFailure::ProcessKilled);
        while self.sim.step(Nanos::NEVER) {}
    }
}

/// Runs `work` beside the background work of an engine, until nothing is in progress any more; then closes it.
///
/// # Errors
/// Those of `work`; a message if background work or the close failed.
pub async fn run_engine<T>(
    engine: &impl Engine,
    volume: &impl Volume,
    handle: &ReactorHandle,
    work: impl Future<Output = Result<T, String>>,
) -> Result<T, String> {
    let failed = RefCell::new(None);
    let done = {
        let report = |error| {
            failed.borrow_mut().get_or_insert(format!("maintenance: {error}"));
        };
        let mut maintenance = pin!(engine.maintain(handle, report));
        let mut abandoned = pin!(engine.run_abandoned());
        // Maintenance may end, where there is nothing to maintain.
        let mut maintenance_ended = false;
        let mut body = pin!(async {
            let done = work.await;
            while !volume.is_idle() {
                handle.sleep(IDLE_POLL_INTERVAL).await;
            }
            done
        });
        poll_fn(|context| {
            maintenance_ended = maintenance_ended || maintenance.as_mut().poll(context).is_ready();
            let _ = abandoned.as_mut().poll(context);
            body.as_mut().poll(context)
        })
        .await?
    };
    // Operations that have become the engine's own end during the close.
    let mut abandoned = pin!(engine.run_abandoned());
    let mut close = pin!(engine.close());
    let closed = poll_fn(|context| {
        let _ = abandoned.as_mut().poll(context);
        close.as_mut().poll(context)
    });
    closed.await.map_err(|error| format!("close: {error}"))?;
    match failed.take() {
        Some(failed) => Err(failed),
        None => Ok(done),
    }
}
