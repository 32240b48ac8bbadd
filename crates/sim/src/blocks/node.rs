//! The node under test of block simulations: a [`SimNode`] with the production block backend on several disks, whose
//! namespaces are added and removed while it runs.
//!
//! ```text
//!   Off ──boot──▶ Up ──attach, detach (core by core, as in the real node)──▶ Up ──stop──▶ Off
//! ```
//! In: calls to start it, and the disk that each namespace serves. Out: disk contents.

use super::scenario::{BlockScenarioPlan, DiskPlan};
use crate::faulty_disk::DiskFaults;
use crate::sim_node::SimNode;
use octokv_base::NamespaceId;
use octokv_engine::hash::HashEngine;
use octokv_node::block_backend::{BlockBackend, BlockVolume};
use octokv_node::namespace_table::NamespaceBackend;
use octokv_nvmf::{NamespaceInfo, NamespaceKind, Target};
use octokv_runtime::simulated::{SimDiskId, SimEnv};
use std::rc::Rc;
use std::sync::Arc;

/// Backends of a removed namespace, until the last request on it ends.
#[derive(Default)]
pub struct DrainingBackends(Vec<Rc<NamespaceBackend<HashEngine>>>);

impl DrainingBackends {
    /// Whether the last request on the namespace has ended.
    pub fn is_drained(&self) -> bool {
        self.0.iter().all(|backend| Rc::strong_count(backend) == 1)
    }
}

/// A node with block namespaces.
pub struct BlockNodeUnderTest {
    /// Its host, reactors and target.
    pub sim_node: SimNode,
    disks: Vec<(SimDiskId, DiskPlan)>,
}

impl BlockNodeUnderTest {
    /// A stopped node with empty disks.
    pub fn new(sim: &SimEnv, plan: &BlockScenarioPlan, faults: DiskFaults) -> BlockNodeUnderTest {
        let sim_node = SimNode::new(sim, plan.node, faults);
        let disks = plan.disks.iter().map(|disk| (sim.add_disk(sim_node.host, disk.disk), *disk)).collect();
        BlockNodeUnderTest { sim_node, disks }
    }

    /// The contents of a disk.
    pub fn read_disk(&self, disk: usize) -> Vec<u8> {
        let (disk, plan) = self.disks[disk];
        let mut bytes = vec![0; plan.disk.size_bytes as usize];
        self.sim_node.sim.read_disk(disk, 0, &mut bytes);
        bytes
    }

    /// Starts the node without namespaces.
    pub fn boot(&mut self) {
        self.sim_node.sim.start_host(self.sim_node.host);
        let target = Target::new(self.sim_node.subsystem_config(), Vec::new());
        self.sim_node.start(target, |_, _, _| ());
    }

    /// Number of reactor cores.
    pub fn cores(&self) -> usize {
        self.sim_node.plan.cores
    }

    /// The target, or `None` while the node is down.
    pub fn target(&self) -> Option<&Arc<Target>> {
        self.sim_node.running().map(|running| &running.target)
    }

    /// State that all cores share for one attachment of a disk's namespace.
    pub fn volume(&self, disk: usize) -> Arc<BlockVolume> {
        let DiskPlan { disk, block_bytes, .. } = self.disks[disk].1;
        BlockVolume::new(block_bytes, disk.size_bytes)
    }

    /// Attaches a namespace to one core.
    pub fn attach_namespace(&self, core: usize, disk: usize, id: NamespaceId, volume: &Arc<BlockVolume>) {
        let Some(running) = self.sim_node.running() else { return };
        let core = &running.cores[core];
        let (pool, handle) = (core.pool.clone(), core.handle.clone());
        let (volume, device, name) = (
            Arc::clone(volume),
            self.sim_node.open_device(self.disks[disk].0, &core.handle),
            Rc::from("simulated disk"),
        );
        let backend =
            NamespaceBackend::Block(BlockBackend { volume, device, pool, handle, device_name: name });
        core.pending_namespaces.borrow_mut().push((id, backend));
        core.handle.core_waker().notify();
    }

    /// Makes a namespace visible to hosts. REQUIRES: every core has it attached.
    pub fn publish_namespace(&self, disk: usize, id: NamespaceId, ana_group: u32) {
        let Some(running) = self.sim_node.running() else { return };
        let DiskPlan { disk: config, block_bytes, .. } = self.disks[disk].1;
        let added = running.target.add_namespace(NamespaceInfo {
            id,
            nguid: [1 + disk as u8; 16],
            size_bytes: config.size_bytes / u64::from(block_bytes) * u64::from(block_bytes),
            used_bytes: Arc::default(),
            kind: NamespaceKind::Block { block_bytes },
            ana_group,
        });
        assert!(added.is_ok(), "the operator adds a namespace once");
    }

    /// Detaches a namespace from one core; `draining` takes its backend.
    pub fn detach_namespace(&self, core: usize, id: NamespaceId, draining: &mut DrainingBackends) {
        let Some(running) = self.sim_node.running() else { return };
        running.cores[core].pending_namespaces.borrow_mut().retain(|(pending, _)| *pending != id);
        draining.0.extend(running.cores[core].namespaces.remove(id));
    }
}
