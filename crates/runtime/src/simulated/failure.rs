//! Host failures: how a host stops, and which unflushed writes a power loss keeps.

/// How a host fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HostFailure {
    /// The process is killed. The kernel survives: it completes the disk operations in flight and resets the streams.
    ProcessKilled,
    /// Power is lost. Peers receive nothing until the host is back; the disks keep the writes that the model
    /// selects.
    PowerLoss(CrashModel),
}

/// Which of the unflushed writes survive a power loss.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CrashModel {
    /// All of them, writes in flight included.
    KeepAll,
    /// None.
    LoseAll,
    /// A random subset of the writes, each whole.
    RandomWrites,
    /// A random subset of the 512-byte sectors of each write: torn writes.
    TornWrites,
}
