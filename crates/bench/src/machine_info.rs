//! The machine that measured, as reports name it.

use octokv_sys::{machine, thread};
use serde::Serialize;

/// The machine that ran a benchmark.
#[derive(Clone, Debug, Serialize)]
pub struct MachineInfo {
    /// Model name of the processor.
    pub processor: String,
    /// Cores that the process may use.
    pub cores: usize,
    /// Memory of the machine, in bytes.
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
