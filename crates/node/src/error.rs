//! Errors of starting, stopping and changing a node. Each names the device, core, address or setting at fault.

use octokv_base::NamespaceId;
use octokv_device::DeviceError;
use octokv_engine::common::superblock::SuperblockError;
use octokv_engine::{EngineError, EngineKind, OpenError};
use octokv_sys::file::DeviceOpenError;
use std::net::SocketAddr;
use std::{fmt, io};

/// Why io_uring, which the configuration requires, is unavailable.
#[derive(Debug)]
pub struct UringUnavailable(pub(crate) io::Error);

impl fmt::Display for UringUnavailable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let UringUnavailable(error) = self;
        match error.kind() {
            io::ErrorKind::PermissionDenied => write!(
                f,
                "io_uring is forbidden here ({error}): use driver \"threads\", or allow the system calls \
                 io_uring_setup, io_uring_enter and io_uring_register (the container's seccomp profile, \
                 kernel.io_uring_disabled)"
            ),
            io::ErrorKind::Unsupported => {
                write!(f, "this kernel has no io_uring ({error}): use driver \"threads\"")
            }
            _ => write!(f, "io_uring failed ({error}): driver \"threads\" works without it"),
        }
    }
}

impl std::error::Error for UringUnavailable {}

/// Why a node did not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// A device failed to open.
    #[error("device {name}: {error}")]
    Device {
        /// The device's name or path.
        name: String,
        /// The cause.
        error: DeviceOpenError,
    },
    /// A device holds no usable volume.
    #[error("device {name}: {error}{}", volume_hint(name, error))]
    Volume {
        /// The device's name or path.
        name: String,
        /// The cause.
        error: OpenError,
    },
    /// A listen address is unavailable.
    #[error("cannot listen on {address}: {error}")]
    Listen {
        /// The configured address.
        address: SocketAddr,
        /// The cause.
        error: io::Error,
    },
    /// A core does not exist, or its reactor failed to start.
    #[error("cannot run on core {core}: {error}")]
    Core {
        /// The processor's number.
        core: usize,
        /// The cause.
        error: io::Error,
    },
    /// io_uring is configured and unavailable.
    #[error(transparent)]
    Driver(UringUnavailable),
    /// A setting has an invalid value.
    #[error("{name}: {why}")]
    InvalidSetting {
        /// The setting's name in the configuration.
        name: &'static str,
        /// The valid values.
        why: String,
    },
    /// A system call failed that every node needs.
    #[error(transparent)]
    System(io::Error),
}

impl StartError {
    /// Names the core on which a system call failed. Other errors name their subject already.
    pub(crate) fn on_core(self, core: usize) -> StartError {
        match self {
            StartError::System(error) => StartError::Core { core, error },
            named => named,
        }
    }
}

/// What the operator can do about a volume that did not open, as the end of a message.
fn volume_hint(name: &str, error: &OpenError) -> String {
    if let OpenError::Superblock(SuperblockError::Engine { found, .. }) = error
        && let Some(engine) = EngineKind::from_number(*found)
    {
        return format!(
            "; it was left unchanged (--engine {engine} serves it, --format discards its contents)"
        );
    }
    match error {
        _ if error.is_damage() => format!("; `octokv check --device {name}` reports its intact structures"),
        OpenError::Superblock(_) => "; it was left unchanged (--format discards its contents)".to_owned(),
        _ => String::new(),
    }
}

/// Why a volume was not shut down cleanly. Acknowledged writes are safe: the next start replays the journal.
#[derive(Debug, thiserror::Error)]
pub enum CloseError {
    /// The calling thread failed to open a queue to the device.
    #[error("device {name}: cannot open a queue for the last checkpoint: {error}")]
    Queue {
        /// The device's name or path.
        name: String,
        /// The cause.
        error: io::Error,
    },
    /// The last checkpoint of a Key Value volume failed.
    #[error("device {name}: the last checkpoint failed: {error}")]
    Checkpoint {
        /// The device's name or path.
        name: String,
        /// The cause.
        error: EngineError,
    },
    /// The last flush of a block namespace's device failed.
    #[error("device {name}: the last flush failed: {error}")]
    Flush {
        /// The device's name or path.
        name: String,
        /// The cause.
        error: DeviceError,
    },
}

/// Why a node did not shut down cleanly. Acknowledged writes are safe nevertheless.
#[derive(Debug, thiserror::Error)]
pub enum StopError {
    /// A volume was not shut down cleanly.
    #[error(transparent)]
    NotClosedCleanly(CloseError),
    /// A reactor thread had panicked: a bug of this program.
    #[error("the reactor thread of core {core} ended unexpectedly")]
    CoreEnded {
        /// The processor's number.
        core: usize,
    },
}

/// Why a namespace of a running node was not added or removed.
#[derive(Debug, thiserror::Error)]
pub enum NamespaceChangeError {
    /// The identifier is in use.
    #[error("there is a namespace {0} already")]
    Exists(NamespaceId),
    /// No namespace has the identifier.
    #[error("there is no namespace {0}")]
    Missing(NamespaceId),
    /// The configuration is invalid or the namespace failed to open.
    #[error(transparent)]
    Open(StartError),
    /// The namespace has no device of this name.
    #[error("namespace {id} has no device {name:?}: its devices are {of}")]
    NoSuchDevice {
        /// The namespace.
        id: NamespaceId,
        /// The name.
        name: String,
        /// The names of its devices.
        of: String,
    },
    /// The device that is said to be lost serves its keys.
    #[error("device {0} is available: what it holds is not lost")]
    DeviceServes(String),
    /// The volume allows longer values than the node was started for.
    #[error(
        "the volume holds values of up to {volume_bytes_max} bytes, and this node was started with \
         value_bytes_max = {node_bytes_max}"
    )]
    ValueTooLong {
        /// Longest value of the volume, in bytes.
        volume_bytes_max: usize,
        /// Longest value of the node, in bytes.
        node_bytes_max: u32,
    },
    /// The node is stopping.
    #[error("the node is stopping")]
    Stopping,
    /// The namespace is removed, but its volume was not shut down cleanly: the next open replays its journal.
    #[error("the namespace is removed; its volume was not shut down cleanly: {0}")]
    NotClosedCleanly(CloseError),
}

/// Why a compaction did not begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CompactionStartError {
    /// No namespace has the identifier.
    #[error("there is no namespace {0}")]
    Missing(NamespaceId),
    /// The namespace has blocks.
    #[error("namespace {0} has blocks: there is nothing to compact")]
    Blocks(NamespaceId),
    /// One has begun and not ended.
    #[error("a compaction of namespace {0} is in progress")]
    InProgress(NamespaceId),
    /// The node is stopping.
    #[error("the node is stopping")]
    Stopping,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_uring_error_names_the_reason_and_the_workaround() {
        let message = |errno| UringUnavailable(io::Error::from_raw_os_error(errno)).to_string();
        let table: [(i32, &[&str]); 3] = [
            (1, &["forbidden", "os error 1", "seccomp", "kernel.io_uring_disabled", "driver \"threads\""]),
            (38, &["no io_uring", "os error 38", "driver \"threads\""]),
            (12, &["failed", "os error 12", "driver \"threads\""]),
        ];
        for (errno, parts) in table {
            for part in parts {
                assert!(message(errno).contains(part), "no {part} in {}", message(errno));
            }
        }
    }

    #[test]
    fn a_damaged_volume_names_its_device_and_the_command_that_reads_it() {
        let error = OpenError::Superblock(SuperblockError::Damaged);
        let message = StartError::Volume { name: "/dev/nvme7n1".to_owned(), error }.to_string();
        assert!(message.starts_with("device /dev/nvme7n1: "), "{message}");
        assert!(message.contains("`octokv check --device /dev/nvme7n1`"), "{message}");
    }
}
