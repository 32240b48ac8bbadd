//! Errors of starting, stopping and changing a node. Each names the device, core, address or setting at fault.

use octokv_base::NamespaceId;
use octokv_device::DeviceError;
use octokv_engine::EngineError;
use octokv_engine::hash::OpenError;
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
#[derive(Debug)]
pub enum StartError {
    /// A device failed to open.
    Device {
        /// The device's name or path.
        name: String,
        /// The cause.
        error: DeviceOpenError,
    },
    /// A device holds no usable volume.
    Volume {
        /// The device's name or path.
        name: String,
        /// The cause.
        error: OpenError,
    },
    /// A listen address is unavailable.
    Listen {
        /// The configured address.
        address: SocketAddr,
        /// The cause.
        error: io::Error,
    },
    /// A core does not exist, or its reactor failed to start.
    Core {
        /// The processor's number.
        core: usize,
        /// The cause.
        error: io::Error,
    },
    /// io_uring is configured and unavailable.
    Driver(UringUnavailable),
    /// A setting has an invalid value.
    InvalidSetting {
        /// The setting's name in the configuration.
        name: &'static str,
        /// The valid values.
        why: String,
    },
    /// A system call failed that every node needs.
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

impl fmt::Display for StartError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            StartError::Device { name, error } => write!(f, "device {name}: {error}"),
            StartError::Volume { name, error } => {
                write!(f, "device {name}: {error}")?;
                match error {
                    _ if error.is_damage() => {
                        write!(f, "; `octokv check --device {name}` reports its intact structures")
                    }
                    OpenError::Superblock(_) => {
                        f.write_str("; it was left unchanged (--format discards its contents)")
                    }
                    _ => Ok(()),
                }
            }
            StartError::Listen { address, error } => write!(f, "cannot listen on {address}: {error}"),
            StartError::Core { core, error } => write!(f, "cannot run on core {core}: {error}"),
            StartError::Driver(unavailable) => unavailable.fmt(f),
            StartError::InvalidSetting { name, why } => write!(f, "{name}: {why}"),
            StartError::System(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for StartError {}

/// Why a volume was not shut down cleanly. Acknowledged writes are safe: the next start replays the journal.
#[derive(Debug)]
pub enum CloseError {
    /// The calling thread failed to open a queue to the device.
    Queue {
        /// The device's name or path.
        name: String,
        /// The cause.
        error: io::Error,
    },
    /// The last checkpoint of a Key Value volume failed.
    Checkpoint {
        /// The device's name or path.
        name: String,
        /// The cause.
        error: EngineError,
    },
    /// The last flush of a block namespace's device failed.
    Flush {
        /// The device's name or path.
        name: String,
        /// The cause.
        error: DeviceError,
    },
}

impl fmt::Display for CloseError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CloseError::Queue { name, error } => {
                write!(f, "device {name}: cannot open a queue for the last checkpoint: {error}")
            }
            CloseError::Checkpoint { name, error } => {
                write!(f, "device {name}: the last checkpoint failed: {error}")
            }
            CloseError::Flush { name, error } => write!(f, "device {name}: the last flush failed: {error}"),
        }
    }
}

impl std::error::Error for CloseError {}

/// Why a node did not shut down cleanly. Acknowledged writes are safe nevertheless.
#[derive(Debug)]
pub enum StopError {
    /// A volume was not shut down cleanly.
    NotClosedCleanly(CloseError),
    /// A reactor thread had panicked: a bug of this program.
    CoreEnded {
        /// The processor's number.
        core: usize,
    },
}

impl fmt::Display for StopError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            StopError::NotClosedCleanly(error) => error.fmt(f),
            StopError::CoreEnded { core } => {
                write!(f, "the reactor thread of core {core} ended unexpectedly")
            }
        }
    }
}

impl std::error::Error for StopError {}

/// Why a namespace of a running node was not added or removed.
#[derive(Debug)]
pub enum NamespaceChangeError {
    /// The identifier is in use.
    Exists(NamespaceId),
    /// No namespace has the identifier.
    Missing(NamespaceId),
    /// The configuration is invalid or the namespace failed to open.
    Open(StartError),
    /// The volume allows longer values than the node was started for.
    ValueTooLong {
        /// Longest value of the volume, in bytes.
        volume_bytes_max: usize,
        /// Longest value of the node, in bytes.
        node_bytes_max: u32,
    },
    /// The node is stopping.
    Stopping,
    /// The namespace is removed, but its volume was not shut down cleanly: the next open replays its journal.
    NotClosedCleanly(CloseError),
}

impl fmt::Display for NamespaceChangeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NamespaceChangeError::Exists(id) => write!(f, "there is a namespace {id} already"),
            NamespaceChangeError::Missing(id) => write!(f, "there is no namespace {id}"),
            NamespaceChangeError::Open(error) => error.fmt(f),
            NamespaceChangeError::ValueTooLong { volume_bytes_max: volume, node_bytes_max: node } => write!(
                f,
                "the volume holds values of up to {volume} bytes, and this node was started with \
                 value_bytes_max = {node}"
            ),
            NamespaceChangeError::Stopping => f.write_str("the node is stopping"),
            NamespaceChangeError::NotClosedCleanly(error) => {
                write!(f, "the namespace is removed; its volume was not shut down cleanly: {error}")
            }
        }
    }
}

impl std::error::Error for NamespaceChangeError {}

#[cfg(test)]
mod tests {
    use super::*;
    use octokv_engine::hash::superblock::SuperblockError;

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
