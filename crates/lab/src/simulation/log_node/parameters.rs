//! Parameters of the simulated node of LEED, and the source of each. Drive, core time and objects' lengths are those of
//! [`crate::simulation::log_store::parameters`].

/// Drives of the node. The paper's, §4.1 and §4.8.
pub const NODE_DRIVES: usize = 4;
/// Cores that execute requests. The paper's, §3.4: cores 0 to 3 of eight.
pub const STORAGE_CORES: usize = 4;
/// Objects of the whole node. Our choice, for memory: as many as one drive has in the runs with one.
pub const NODE_OBJECTS: u32 = 800_000;
/// Inserts in flight while the volume is filled. Our choice: 16 a drive, as with one.
pub const FILL_REQUESTS: usize = 64;
