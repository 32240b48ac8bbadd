//! The roles of a node's cores: all the same, or a static mapping between cores and drives (LEED, SIGCOMM 2023, §3.4).
//!
//! ```text
//!   shared   every core has connections and executes requests
//!   static   cores 0 .. drive_cores      execute the requests of their drives, and have no connection
//!            cores drive_cores .. cores  have the connections, and execute no request
//! ```
//! The administration has a thread of its own, on no core of the node. Commands that a memory device or a cache answers at once
//! reach no drive, and end on the core of their connection under either.
//!
//! Invariants: core 0 executes requests; one core accepts connections, and has connections.

/// See the module header.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CoreRoles {
    /// 0 if every core has both roles.
    drive_cores: usize,
}

/// What a core is for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CoreRole {
    /// Connections and requests.
    #[default]
    Shared,
    /// Requests of its drives.
    Drives,
    /// Connections.
    Network,
}

impl CoreRoles {
    /// Every core has both roles.
    pub const SHARED: CoreRoles = CoreRoles { drive_cores: 0 };

    /// The first `drive_cores` cores are for drives and the others for the network; 0 for [`CoreRoles::SHARED`]. REQUIRES: the node
    /// has more cores.
    pub fn with_drive_cores(drive_cores: usize) -> CoreRoles {
        CoreRoles { drive_cores }
    }

    /// The number of cores for drives alone; `None` if every core has both roles.
    pub fn drive_cores(self) -> Option<usize> {
        (self.drive_cores > 0).then_some(self.drive_cores)
    }

    /// The role of a core.
    pub fn role_of(self, core: usize) -> CoreRole {
        match self.drive_cores() {
            None => CoreRole::Shared,
            Some(drive_cores) if core < drive_cores => CoreRole::Drives,
            Some(_) => CoreRole::Network,
        }
    }

    /// The core that listens and accepts.
    pub fn accepting_core(self) -> usize {
        self.drive_cores
    }

    /// The core that has a connection, by its place in their order.
    ///
    /// # Panics
    /// The node has no core for connections.
    pub fn core_of_connection(self, place: usize, cores: usize) -> usize {
        self.drive_cores + place % (cores - self.drive_cores)
    }
}

/// The processors of a node in the order of its cores: those for drives first.
pub fn order_by_role(processors: &[usize], for_drives: &[usize]) -> Vec<usize> {
    let others = processors.iter().filter(|processor| !for_drives.contains(processor));
    for_drives.iter().chain(others).copied().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_are_on_network_cores_in_rotation() {
        let of =
            |roles: CoreRoles| (0..6).map(|place| roles.core_of_connection(place, 4)).collect::<Vec<_>>();
        assert_eq!(of(CoreRoles::SHARED), [0, 1, 2, 3, 0, 1]);
        assert_eq!(of(CoreRoles::with_drive_cores(1)), [1, 2, 3, 1, 2, 3]);
        assert_eq!(of(CoreRoles::with_drive_cores(3)), [3; 6]);
        assert_eq!([0, 1, 3].map(|cores| CoreRoles::with_drive_cores(cores).accepting_core()), [0, 1, 3]);
    }

    #[test]
    fn cores_for_drives_come_first() {
        let roles =
            |drive_cores| [0, 1, 2].map(|core| CoreRoles::with_drive_cores(drive_cores).role_of(core));
        assert_eq!(roles(0), [CoreRole::Shared; 3]);
        assert_eq!(roles(2), [CoreRole::Drives, CoreRole::Drives, CoreRole::Network]);
        assert_eq!(order_by_role(&[0, 4, 2, 6], &[6, 4]), [6, 4, 0, 2]);
        assert_eq!(order_by_role(&[3, 1], &[]), [3, 1]);
    }
}
