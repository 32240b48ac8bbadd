//! Errors of a node: why it did not start, did not stop in order, or did not change its namespaces.

use octokv_base::NamespaceId;
use octokv_engine::EngineError;
use octokv_engine::hash::OpenError;
use octokv_sys::file::DeviceOpenError as FileError;
use std::net::SocketAddr;
use std::{fmt, io};

/// Why io_uring, which was asked for, cannot be had.
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
            _ => write!(f, "io_uring failed ({error}): driver \"threads\" does without it"),
        }
    }
}

/// Why a node did not start.
#[derive(Debug)]
pub enum StartError {
    /// The device could not be opened.
    Device {
        /// Which.
        name: String,
        /// Why.
        error: FileError,
    },
    /// The device holds no volume that can be used.
    Volume {
        /// Which.
        name: String,
        /// Why.
        error: OpenError,
    },
    /// An address could not be listened on.
    Listen {
        /// Which.
        address: SocketAddr,
        /// Why.
        error: io::Error,
    },
    /// A processor is not there, or a thread could not be started on it.
    Core {
        /// Which.
        core: usize,
        /// Why.
        error: io::Error,
    },
    /// io_uring was asked for and cannot be had.
    Driver(UringUnavailable),
    /// A setting cannot be.
    InvalidSetting {
        /// Which.
        name: &'static str,
        /// What it must be.
        why: String,
    },
    /// The system refused something every node needs.
    System(io::Error),
}

impl fmt::Display for StartError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            StartError::Device { name, error } => write!(f, "device {name}: {error}"),
            StartError::Volume { name, error } => {
                write!(f, "device {name}: {error}")?;
                match error {
                    error if error.is_damage() => f.write_str("; `octokv check` reads what is left"),
                    OpenError::Superblock(_) => {
                        f.write_str("; it was left as it is (--format gives up what it holds)")
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

/// Why a node did not stop in order. What was acknowledged is safe nevertheless.
#[derive(Debug)]
pub enum StopError {
    /// The last checkpoint failed.
    Checkpoint(EngineError),
    /// A core had ended by itself: a bug of ours.
    CoreEnded,
}

impl fmt::Display for StopError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            StopError::Checkpoint(fault) => write!(f, "the last checkpoint failed: {fault}"),
            StopError::CoreEnded => f.write_str("a reactor had ended by itself"),
        }
    }
}

impl std::error::Error for StopError {}

/// Why the namespaces of a running node were not changed.
#[derive(Debug)]
pub enum NamespaceChangeError {
    /// There is a namespace of this identifier.
    Exists(NamespaceId),
    /// There is none.
    Missing(NamespaceId),
    /// Its device cannot be used.
    Open(StartError),
    /// A value of its volume may be longer than this node was started for.
    ValueTooLong {
        /// What the volume takes, in bytes.
        volume_bytes_max: usize,
        /// What the node takes, in bytes.
        node_bytes_max: u32,
    },
    /// The node is stopping.
    Stopping,
    /// It is removed, but was not closed in order: the next opening replays its journal.
    NotClosedCleanly(EngineError),
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
            NamespaceChangeError::NotClosedCleanly(fault) => {
                write!(f, "it is removed; its volume was not closed in order: {fault}")
            }
        }
    }
}

impl std::error::Error for NamespaceChangeError {}

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
}
