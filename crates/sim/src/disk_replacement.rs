//! The replacement of a disk that hangs, while a node serves: the volume by production's code, then each core.
//!
//! ```text
//!   a device was given up ─▶ empty disk ─▶ AnyVolume::replace, beside clients ─▶ core after core ─▶ its keys are lost
//!                         └── the node crashed meanwhile ─▶ started with the former disk: absent, or not yet replaced
//!   next recovery: opened with the disk that was replaced ─▶ has to be refused
//! ```
//! In: a node whose serving device has failed. Out: the keys that may be lost between the beginning and the end of it, which the history has as a deletion.

use crate::history::CallId;
use crate::node_under_test::{KvNodeUnderTest, TaskResult};
use crate::sim_device::SimStorage;
use crate::stats::PROGRESS_TIMEOUT;
use octokv_base::{BufferPool, Key};
use octokv_engine::{AnyVolume, DeviceReport, OpenError, Volume};
use octokv_node::control::replace_on_cores;
use octokv_node::{CoreNamespace, NamespaceVolume};

/// Disks that replace others have the numbers above this one, which is higher than those of the plan and of added disks.
const REPLACED_ABOVE: usize = 64;

/// Whether other devices have recorded that this one was replaced.
pub(crate) fn is_replaced(report: &DeviceReport) -> bool {
    matches!(report.failure, Some(OpenError::DeviceReplaced { .. }))
}

/// A replacement in which the node crashed.
pub(crate) struct CutReplacement {
    /// The keys that the disk had, with the calls by which they are lost.
    pub lost: Vec<(usize, CallId)>,
    /// Whether the volume had ended it.
    pub has_ended: bool,
}

/// A replacement under way.
pub struct DiskReplacement {
    at: usize,
    slot: usize,
    former_number: usize,
    /// The result of the volume's part.
    replaced: TaskResult<Result<(), OpenError>>,
}

impl DiskReplacement {
    /// Whether the volume's part has ended.
    ///
    /// # Errors
    /// It failed.
    pub fn has_ended(&self) -> Result<bool, String> {
        match &*self.replaced.borrow() {
            None => Ok(false),
            Some(Ok(())) => Ok(true),
            Some(Err(error)) => Err(format!("a disk is not replaced: {error}")),
        }
    }
}

impl KvNodeUnderTest {
    /// The place of a device that has failed, or that others know as replaced, in the list that the running node has.
    pub fn failed_device(&self) -> Option<usize> {
        let running = self.running.as_ref()?;
        let has_failed = running.devices.iter().position(|device| device.has_failed());
        has_failed.or_else(|| {
            // Reports are in the order of the list.
            let reports = running.volume.device_reports();
            reports.iter().position(is_replaced)
        })
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
        self.spanned().expect("it is on several devices").place_of_newest(key) == at
    }

    /// Begins to put an empty disk, or the one of the replacement that a crash cut, in the place of a device that has failed.
    ///
    /// # Panics
    /// If the node is down.
    pub fn begin_replacement(&mut self, at: usize) -> DiskReplacement {
        let (slot, sim, plan) = (self.order.borrow()[at], self.sim_node.sim.clone(), self.sim_node.plan);
        let empty = || SimStorage::new(&sim, self.sim_node.host, plan.disk, false);
        let storage = match self.cut_replacement.take() {
            Some((of, storage)) if of == slot => storage,
            _ => empty(),
        };
        self.retired.push((slot, std::mem::replace(&mut self.storages[slot], storage)));
        let former_number = std::mem::replace(&mut self.numbers[slot], REPLACED_ABOVE + self.retired.len());
        let new = self.sim_node.device(&self.storages[slot], self.numbers[slot]);
        let running = self.running.as_mut().expect("the node is up");
        running.devices[at] = new;
        let (devices, volume) = (running.devices.clone(), running.volume.clone());
        let (format, config) = (self.format(), self.open_config());
        let replaced = self.spawn_task_on(devices, move |devices| async move {
            let pool = BufferPool::new(plan.pool_bytes);
            let prepare = |volume: &AnyVolume| {
                if plan.has_owner_cores {
                    volume.assign_owner_cores(plan.cores);
                }
            };
            volume.replace((&devices, at, true), &pool, (&config, &format), prepare).await
        });
        DiskReplacement { at, slot, former_number, replaced }
    }

    /// Waits for the end of a replacement, and has every core use the new disk.
    ///
    /// # Errors
    /// It failed, or a core does not respond.
    pub fn finish_replacement(&mut self, replacement: &DiskReplacement) -> Result<(), String> {
        let (DiskReplacement { at, replaced, .. }, sim) = (replacement, &self.sim_node.sim);
        sim.run_until_true(sim.now() + PROGRESS_TIMEOUT, || replaced.borrow().is_some());
        let outcome = replaced.borrow_mut().take().ok_or("the replacement of a disk does not end")?;
        outcome.map_err(|error| format!("a disk is not replaced: {error}"))?;
        let Some(running) = &self.running else { return Ok(()) };
        let Some(id) = running.namespace.get() else { return Ok(()) };
        let (volume, devices) = (NamespaceVolume::Kv(running.volume.clone()), running.devices.clone());
        let core_namespace = CoreNamespace { id, volume, devices };
        replace_on_cores(self.sim_node.plan.cores, &core_namespace, *at, |core, change| {
            self.sim_node.change_namespaces(core, change)
        })
        .map_err(|error| format!("a core does not get the new disk: {error:?}"))
    }

    /// Puts the former disk back in its place, for a crash in a replacement: the node's configuration still names it.
    pub fn undo_replacement(&mut self, replacement: DiskReplacement) {
        let (slot, former) = self.retired.pop().expect("it was replaced last");
        assert_eq!(slot, replacement.slot);
        let new = std::mem::replace(&mut self.storages[slot], former);
        self.numbers[slot] = replacement.former_number;
        self.cut_replacement = Some((slot, new));
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
