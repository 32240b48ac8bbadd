//! The replacement of a disk that hangs, while a node serves: the volume by production's code, then each core.
//!
//! ```text
//!   a device was given up ─▶ empty disk ─▶ AnyVolume::replace, beside clients ─▶ core after core ─▶ its keys are lost
//!   next recovery: opened with the disk that was replaced ─▶ has to be refused
//! ```
//! In: a node whose serving device has failed. Out: the keys that may be lost between the beginning and the end of it, which the history has as a deletion.

use crate::node_under_test::{KvNodeUnderTest, TaskResult};
use crate::sim_device::SimStorage;
use crate::stats::PROGRESS_TIMEOUT;
use octokv_base::{BufferPool, Key};
use octokv_engine::{AnyVolume, OpenError, Volume};
use octokv_node::control::replace_on_cores;
use octokv_node::{CoreNamespace, NamespaceVolume};

/// Disks that replace others have the numbers above this one, which is higher than those of the plan and of added disks.
const REPLACED_ABOVE: usize = 64;

impl KvNodeUnderTest {
    /// The place of a device that has failed, in the list that the running node has.
    pub fn failed_device(&self) -> Option<usize> {
        self.running.as_ref()?.devices.iter().position(|device| device.has_failed())
    }

    /// Whether a device has failed that the plan replaces.
    pub fn has_disk_to_replace(&self) -> bool {
        self.sim_node.plan.replaces_disks && self.failed_device().is_some()
    }

    /// Whether the device in a place has the newest value of a key.
    ///
    /// # Panics
    /// If the node is down, or on one device.
    pub fn is_key_of(&self, at: usize, key: &Key) -> bool {
        let running = self.running.as_ref().expect("the node is up");
        let AnyVolume::Spanned(volume) = &running.volume else { panic!("it is on one device") };
        volume.place_of_newest(key) == at
    }

    /// Puts an empty disk in the place of a device that has failed, and has every core use it.
    ///
    /// # Errors
    /// It failed, or a core does not respond.
    pub fn replace_device(&mut self, at: usize) -> Result<(), String> {
        let (slot, sim) = (self.order.borrow()[at], self.sim_node.sim.clone());
        let storage = SimStorage::new(&sim, self.sim_node.host, self.sim_node.plan.disk, false);
        self.retired.push((slot, std::mem::replace(&mut self.storages[slot], storage)));
        self.numbers[slot] = REPLACED_ABOVE + self.retired.len();
        let Some(running) = &mut self.running else { return Ok(()) };
        let (volume, namespace) = (running.volume.clone(), running.namespace.get());
        let new = self.sim_node.device(&self.storages[slot], self.numbers[slot]);
        running.devices[at] = new;
        let devices = running.devices.clone();
        let (format, config) = (self.format(), self.open_config());
        let (of_task, plan) = (volume.clone(), self.sim_node.plan);
        let replaced = self.spawn_task_on(devices.clone(), move |devices| async move {
            let pool = BufferPool::new(plan.pool_bytes);
            let prepare = |volume: &AnyVolume| {
                if plan.has_owner_cores {
                    volume.assign_owner_cores(plan.cores);
                }
            };
            of_task.replace((&devices, at, false), &pool, (&config, &format), prepare).await
        });
        sim.run_until_true(sim.now() + PROGRESS_TIMEOUT, || replaced.borrow().is_some());
        let outcome = replaced.borrow_mut().take().ok_or("the replacement of a disk does not end")?;
        outcome.map_err(|error| format!("a disk is not replaced: {error}"))?;
        let Some(id) = namespace else { return Ok(()) };
        let core_namespace = CoreNamespace { id, volume: NamespaceVolume::Kv(volume), devices };
        replace_on_cores(plan.cores, &core_namespace, at, |core, change| {
            self.sim_node.change_namespaces(core, change)
        })
        .map_err(|error| format!("a core does not get the new disk: {error:?}"))
    }

    /// Opens the volume with the disk that was replaced last in its former place, and says why that is absent; `None` if none was replaced.
    pub fn start_opening_with_retired(&self) -> Option<TaskResult<Result<Option<OpenError>, OpenError>>> {
        let (slot, storage) = self.retired.last()?;
        self.sim_node.sim.start_host(self.sim_node.host);
        let mut devices = self.devices();
        let at = self.order.borrow().iter().position(|other| other == slot)?;
        devices[at] = self.sim_node.device(storage, self.numbers[*slot]);
        let (format, config, plan) = (self.format(), self.open_config(), self.sim_node.plan);
        Some(self.spawn_task_on(devices, move |devices| async move {
            let pool = BufferPool::new(plan.pool_bytes);
            let opened = plan.engine.open(&devices, &pool, config, &format).await?;
            // Reports are in the order of the list.
            Ok(opened.device_reports()[at].failure)
        }))
    }
}
