//! The node under test of block simulations: a [`SimNode`] with the production block backend on several disks, whose
//! namespaces are added and removed while it runs.
//!
//! ```text
//!   Off ──boot──▶ Up ──add, remove (core by core, as in the real node)──▶ Up ──stop──▶ Off
//! ```
//! In: calls to start it and to change it, and the disk that each namespace serves. Out: disk contents.

use super::scenario::{BlockScenarioPlan, DiskPlan};
use crate::faulty_disk::DiskFaults;
use crate::sim_node::{NodesUnderTest, SimDevice, SimNode};
use octokv_base::NamespaceId;
use octokv_node::block_backend::BlockVolume;
use octokv_node::control::{CoreChangeError, attach_to_cores, detach_from_cores};
use octokv_node::{CoreNamespace, NamespaceVolume};
use octokv_nvmf::{NamespaceInfo, NamespaceKind, Target};
use octokv_runtime::simulated::{SimDiskId, SimEnv};
use std::sync::Arc;

/// ANA groups that namespaces are assigned to.
pub const ANA_GROUPS: u32 = 2;

/// A node with block namespaces.
pub struct BlockNodeUnderTest {
    /// Its host, reactors and target.
    pub sim_node: SimNode,
    disks: Vec<(SimDiskId, DiskPlan)>,
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

    /// Starts the node; it serves each disk as the namespace of these with the disk's index.
    pub fn boot(&mut self, ids: &[NamespaceId]) {
        self.sim_node.sim.start_host(self.sim_node.host);
        let namespaces = ids.iter().enumerate().map(|(disk, &id)| self.namespace(disk, id));
        let (namespaces, infos): (Vec<_>, Vec<_>) = namespaces.unzip();
        let target = Target::new(self.sim_node.subsystem_config(), infos);
        self.sim_node.start(target, &namespaces);
    }

    /// The target, or `None` while the node is down.
    pub fn target(&self) -> Option<&Arc<Target>> {
        self.sim_node.running().map(|running| &running.target)
    }

    /// A new namespace on a disk: as cores and as hosts see it.
    fn namespace(&self, disk: usize, id: NamespaceId) -> (CoreNamespace<SimDevice>, NamespaceInfo) {
        let (device, DiskPlan { disk: config, block_bytes, .. }) = self.disks[disk];
        let volume = BlockVolume::new(block_bytes, config.size_bytes);
        let info = NamespaceInfo {
            id,
            nguid: [1 + disk as u8; 16],
            size_bytes: volume.size_bytes(),
            used_bytes: Arc::default(),
            kind: NamespaceKind::Block { block_bytes },
            ana_group: 1 + disk as u32 % ANA_GROUPS,
        };
        let (volume, device) = (NamespaceVolume::Block(volume), self.sim_node.device(device));
        (CoreNamespace { id, volume, device }, info)
    }

    /// Adds a namespace in the real node's order: attach on every core, then publish. `between` runs before each core.
    ///
    /// # Errors
    /// A core does not respond, or cannot open the disk.
    pub fn add_namespace(
        &self,
        disk: usize,
        id: NamespaceId,
        mut between: impl FnMut(),
    ) -> Result<(), CoreChangeError> {
        let Some(target) = self.target() else { return Ok(()) };
        let (namespace, info) = self.namespace(disk, id);
        attach_to_cores(self.sim_node.plan.cores, &namespace, |core, change| {
            between();
            self.sim_node.change_namespaces(core, change)
        })?;
        assert!(target.add_namespace(info).is_ok(), "the operator adds a namespace once");
        Ok(())
    }

    /// Removes a namespace in the real node's order: unpublish, then detach from core after core. `between` runs before
    /// each core.
    ///
    /// # Errors
    /// A core does not respond: requests of the namespace do not end.
    pub fn remove_namespace(
        &self,
        id: NamespaceId,
        mut between: impl FnMut(),
    ) -> Result<(), CoreChangeError> {
        let Some(target) = self.target() else { return Ok(()) };
        target.remove_namespace(id);
        detach_from_cores(self.sim_node.plan.cores, id, |core, change| {
            between();
            self.sim_node.change_namespaces(core, change)
        })
    }
}
