//! A disk that is added to a volume on several, while a node serves: the volume by production's code, then each core.
//!
//! ```text
//!   new disk ─▶ AnyVolume::add, beside clients ─▶ core after core ─▶ partitions move to it
//!      └── failed, or the node crashed meanwhile ─▶ set aside ─▶ given at the next start, or only if the others need it ─▶ added again otherwise
//! ```
//! In: a node whose devices all serve. Out: the node with one disk more. Invariant: a disk that was set aside is the next one that is added, with whatever it holds.

use crate::node_under_test::{KvNodeUnderTest, TaskResult};
use crate::sim_device::{SimDevice, SimStorage};
use octokv_base::{BufferPool, Key};
use octokv_engine::spanned::SPAN_PARTITIONS;
use octokv_engine::{AnyVolume, MoveStage, OpenError, SpannedVolume};
use octokv_node::control::{CoreChangeError, extend_on_cores};
use octokv_node::{CoreNamespace, NamespaceVolume};

/// A disk that is being added.
pub struct DiskAddition {
    storage: SimStorage,
    device: SimDevice,
    /// The result of the volume's part.
    pub added: TaskResult<Result<(), OpenError>>,
}

impl KvNodeUnderTest {
    /// The running volume, if it is on several devices.
    pub(crate) fn spanned(&self) -> Option<&SpannedVolume<AnyVolume>> {
        match self.volume() {
            Some(AnyVolume::Spanned(volume)) => Some(volume),
            _ => None,
        }
    }

    /// How far moves of partitions are; at rest if the node is down, or on one device.
    pub fn move_stage(&self) -> MoveStage {
        self.spanned().map_or(MoveStage::AtRest, SpannedVolume::move_stage)
    }

    /// Whether the partition of a key moves from or to the device in a place.
    pub fn is_key_moving(&self, at: usize, key: &Key) -> bool {
        let of_key = self.spanned().and_then(|volume| volume.move_of(key));
        of_key.is_some_and(|between| between.contains(&at))
    }

    /// The disks that were added.
    pub fn disks_added(&self) -> usize {
        self.storages.len() - self.sim_node.plan.devices
    }

    /// The completed commands at which the next disk is due; `u64::MAX` without one.
    pub fn next_addition_at(&self) -> u64 {
        self.sim_node.plan.additions.get(self.disks_added()).copied().unwrap_or(u64::MAX)
    }

    /// Whether a disk was set aside.
    pub fn has_disk_aside(&self) -> bool {
        self.aside.is_some()
    }

    /// Whether the node is up, and all its devices serve.
    pub fn is_healthy(&self) -> bool {
        self.running.is_some() && self.failed_device().is_none()
    }

    /// Whether partitions are as the sizes of the devices demand, and nothing is left over where they were.
    pub fn is_balanced(&self) -> bool {
        let Some(volume) = self.spanned() else { return true };
        if volume.move_stage() != MoveStage::AtRest {
            return false;
        }
        let (devices, (map, _)) = (self.storages.len(), volume.placement());
        let equal = SPAN_PARTITIONS / devices;
        let count = |device: usize| map.iter().filter(|&&of| usize::from(of) == device).count();
        (0..devices).all(|device| (equal - 1..=equal + 2).contains(&count(device)))
    }

    /// Begins to add a disk: that which was set aside, or an empty one. Its device is one of those that `running` has once it ends.
    ///
    /// # Panics
    /// If the node is down.
    pub fn begin_addition(&mut self) -> DiskAddition {
        let (sim, plan) = (self.sim_node.sim.clone(), self.sim_node.plan);
        let empty = || SimStorage::new(&sim, self.sim_node.host, plan.disk, false);
        let storage = self.aside.take().unwrap_or_else(empty);
        let device = self.sim_node.device(&storage, self.number_of_added());
        let running = self.running.as_ref().expect("the node is up");
        let devices = running.devices.iter().chain([&device]).cloned().collect();
        let (format, config, volume) = (self.format(), self.open_config(), running.volume.clone());
        let added = self.spawn_task_on(devices, move |devices| async move {
            let pool = BufferPool::new(plan.pool_bytes);
            let prepare = |volume: &AnyVolume| {
                if plan.has_owner_cores {
                    volume.assign_owner_cores(plan.cores);
                }
            };
            volume.add(&devices, &pool, (&config, &format), prepare).await
        });
        DiskAddition { storage, device, added }
    }

    /// Sets the disk of an addition aside, which did not end or failed.
    pub fn set_aside(&mut self, addition: DiskAddition) {
        self.aside = Some(addition.storage);
    }

    /// Takes the disk of an addition that has ended as one of the volume.
    pub fn finish_addition(&mut self, addition: DiskAddition) {
        self.take_storage(addition.storage);
        self.running.iter_mut().for_each(|running| running.devices.push(addition.device.clone()));
    }

    /// Gives the first cores the disk that was added last. `between` runs before each of them.
    ///
    /// # Errors
    /// A core does not respond, or cannot open the disk.
    pub fn extend_cores(&self, cores: usize, mut between: impl FnMut()) -> Result<(), CoreChangeError> {
        let Some(running) = &self.running else { return Ok(()) };
        let Some(id) = running.namespace.get() else { return Ok(()) };
        let (volume, devices) = (NamespaceVolume::Kv(running.volume.clone()), running.devices.clone());
        let namespace = CoreNamespace { id, volume, devices };
        extend_on_cores(cores, &namespace, |core, change| {
            between();
            self.sim_node.change_namespaces(core, change)
        })
    }

    /// Gives the node the disk that was set aside when it is opened next.
    pub fn take_aside(&mut self) {
        if let Some(storage) = self.aside.take() {
            self.take_storage(storage);
        }
    }

    /// Sets the disk aside that was taken last. REQUIRES: the node is stopped.
    pub fn put_back(&mut self) {
        self.aside = self.storages.pop();
        self.numbers.pop();
        let last = self.storages.len();
        self.order.borrow_mut().retain(|&at| at != last);
    }

    fn number_of_added(&self) -> usize {
        self.storages.len()
    }

    fn take_storage(&mut self, storage: SimStorage) {
        let number = self.number_of_added();
        self.numbers.push(number);
        self.order.borrow_mut().push(self.storages.len());
        self.storages.push(storage);
    }
}
