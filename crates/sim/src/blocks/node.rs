//! The node under test of block simulations: a [`SimNode`] with the production block backend on several disks, whose
//! namespaces are added and removed while it runs.
//!
//! ```text
//!   Off ──boot──▶ Up ──add, remove (core by core, as in the real node)──▶ Up ──stop──▶ Off
//! ```
//! In: calls to start it and to change it, and the disk that each namespace serves. Out: disk contents.

use super::scenario::{BlockScenarioPlan, DiskPlan};
use crate::faulty_disk::DiskFaults;
use crate::operator::{ANA_GROUPS, ReconfigurableNode};
use crate::sim_device::{SimDevice, SimStorage};
use crate::sim_node::{NodesUnderTest, SimNode};
use octokv_base::{NamespaceId, SharedSum};
use octokv_node::block_backend::BlockVolume;
use octokv_node::control::CoreChangeError;
use octokv_node::{CoreNamespace, NamespaceVolume};
use octokv_nvmf::{NamespaceInfo, NamespaceKind, Target};
use octokv_runtime::simulated::{HostFailure, SimEnv};
use std::sync::Arc;

/// A node with block namespaces.
pub struct BlockNodeUnderTest {
    /// Its host, reactors and target.
    pub sim_node: SimNode,
    disks: Vec<(SimStorage, DiskPlan)>,
}

impl NodesUnderTest for BlockNodeUnderTest {
    fn sim_nodes(&self) -> Vec<&SimNode> {
        vec![&self.sim_node]
    }
}

impl BlockNodeUnderTest {
    /// A stopped node with empty disks.
    pub fn new(sim: &SimEnv, plan: &BlockScenarioPlan, faults: DiskFaults) -> BlockNodeUnderTest {
        let sim_node = SimNode::new(sim, plan.node, faults);
        let storage = |disk: &DiskPlan| SimStorage::new(sim, sim_node.host, disk.disk, disk.is_in_memory);
        let disks = plan.disks.iter().map(|disk| (storage(disk), *disk)).collect();
        BlockNodeUnderTest { sim_node, disks }
    }

    /// The contents of a disk.
    pub fn read_disk(&self, disk: usize) -> Vec<u8> {
        let (storage, plan) = &self.disks[disk];
        storage.read(&self.sim_node.sim, plan.disk.size_bytes as usize)
    }

    /// Starts the node; it serves each disk as the namespace of these with the disk's index.
    pub fn boot(&mut self, ids: &[NamespaceId]) {
        self.sim_node.sim.start_host(self.sim_node.host);
        let namespaces = ids.iter().enumerate().map(|(disk, &id)| self.namespace(disk, id));
        let (namespaces, infos): (Vec<_>, Vec<_>) = namespaces.unzip();
        let target = Target::new(self.sim_node.subsystem_config(), infos);
        self.sim_node.start(target, &namespaces);
    }

    /// Stops the node. Memory is lost.
    pub fn stop(&mut self, failure: HostFailure) {
        self.sim_node.stop(failure);
        self.disks.iter_mut().for_each(|(storage, _)| storage.end_process());
    }

    /// A new namespace on a disk: as cores and as hosts see it.
    fn namespace(&self, disk: usize, id: NamespaceId) -> (CoreNamespace<SimDevice>, NamespaceInfo) {
        let (storage, DiskPlan { disk: config, block_bytes, .. }) = &self.disks[disk];
        let block_bytes = *block_bytes;
        let volume = BlockVolume::new(block_bytes, config.size_bytes);
        let info = NamespaceInfo {
            id,
            nguid: [1 + disk as u8; 16],
            size_bytes: volume.size_bytes(),
            used_bytes: SharedSum::default(),
            kind: NamespaceKind::Block { block_bytes },
            ana_group: 1 + disk as u32 % ANA_GROUPS,
            tokens: None,
        };
        let (volume, device) = (NamespaceVolume::Block(volume), self.sim_node.device(storage, 0));
        (CoreNamespace { id, volume, devices: vec![device] }, info)
    }
}

impl ReconfigurableNode for BlockNodeUnderTest {
    fn target(&self) -> Option<&Arc<Target>> {
        self.sim_node.running().map(|running| &running.target)
    }

    fn add_namespace(
        &self,
        disk: usize,
        id: NamespaceId,
        between: impl FnMut(),
    ) -> Result<(), CoreChangeError> {
        let (namespace, info) = self.namespace(disk, id);
        self.sim_node.add_namespace(&namespace, info, between)
    }

    fn remove_namespace(
        &self,
        _disk: usize,
        id: NamespaceId,
        between: impl FnMut(),
    ) -> Result<(), CoreChangeError> {
        self.sim_node.remove_namespace(id, between)
    }
}
