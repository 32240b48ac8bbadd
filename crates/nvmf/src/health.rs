//! The node's part of the health log (log page 02h); connections count the other part.

/// The health of the node at the time it was set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HealthStatus {
    /// Starts of the node on its devices.
    pub power_cycles: u64,
    /// Runs that ended without a clean shutdown.
    pub unsafe_shutdowns: u64,
    /// Total run time in seconds.
    pub power_on_seconds: u64,
    /// Total time in seconds in which the controllers executed I/O commands.
    pub busy_seconds: u64,
    /// Spare capacity of the media, 0 to 100.
    pub available_spare_percent: u8,
    /// The media accepts no writes.
    pub read_only: bool,
    /// One of several devices is not available.
    pub degraded: bool,
}

impl Default for HealthStatus {
    fn default() -> HealthStatus {
        HealthStatus {
            power_cycles: 0,
            unsafe_shutdowns: 0,
            power_on_seconds: 0,
            busy_seconds: 0,
            available_spare_percent: 100,
            read_only: false,
            degraded: false,
        }
    }
}

/// Spare capacity below this causes a critical warning.
pub(crate) const SPARE_THRESHOLD_PERCENT: u8 = 10;
/// Critical warning bit: spare capacity is below its threshold.
pub(crate) const WARNING_SPARE: u8 = 1 << 0;
/// Critical warning bit: the reliability of the subsystem is degraded.
pub(crate) const WARNING_DEGRADED: u8 = 1 << 2;
/// Critical warning bit: the media is read only.
pub(crate) const WARNING_READ_ONLY: u8 = 1 << 3;

impl HealthStatus {
    /// The critical warning bits.
    pub(crate) fn critical_warnings(&self) -> u8 {
        let mut warnings = 0;
        if self.available_spare_percent < SPARE_THRESHOLD_PERCENT {
            warnings |= WARNING_SPARE;
        }
        if self.degraded {
            warnings |= WARNING_DEGRADED;
        }
        if self.read_only {
            warnings |= WARNING_READ_ONLY;
        }
        warnings
    }
}
