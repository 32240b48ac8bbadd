//! The machine that measured, as reports name it.

use octokv_sys::{machine, thread};
use serde::Serialize;

/// The machine that measured.
#[derive(Clone, Debug, Serialize)]
pub struct MachineInfo {
    /// Processor model.
    pub processor: String,
    /// Cores that the process may use.
    pub cores: usize,
    /// Memory.
    pub memory_bytes: u64,
    /// Kernel release.
    pub kernel: String,
    /// Processor architecture.
    pub architecture: String,
}

impl MachineInfo {
    /// Describes the machine of this process.
    pub fn of_this_machine() -> MachineInfo {
        MachineInfo {
            processor: machine::processor_name().unwrap_or_else(|| "unknown".to_owned()),
            cores: thread::allowed_cores().len(),
            memory_bytes: machine::memory_bytes(),
            kernel: machine::kernel_release(),
            architecture: std::env::consts::ARCH.to_owned(),
        }
    }
}
