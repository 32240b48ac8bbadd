//! What the node knows of its health that no connection counts: a part of log 02h.

/// Facts for the health log, as they are at the moment when they are set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HealthStatus {
    /// How often the node was started on its devices.
    pub power_cycles: u64,
    /// How often it ended without a shutdown.
    pub unsafe_shutdowns: u64,
    /// How long it has run in all, in seconds.
    pub power_on_seconds: u64,
    /// How long its controllers were busy with I/O commands, in seconds.
    pub busy_seconds: u64,
    /// Spare capacity of the media that is left.
    pub available_spare_percent: u8,
    /// The media takes no more writes.
    pub read_only: bool,
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
        }
    }
}

/// Below this much spare capacity hosts are warned.
pub(crate) const SPARE_THRESHOLD_PERCENT: u8 = 10;
/// Critical warning: spare capacity is below its threshold.
pub(crate) const WARNING_SPARE: u8 = 1 << 0;
/// Critical warning: the media is read only.
pub(crate) const WARNING_READ_ONLY: u8 = 1 << 3;

impl HealthStatus {
    /// The critical warning bits.
    pub(crate) fn critical_warnings(&self) -> u8 {
        let mut warnings = 0;
        if self.available_spare_percent < SPARE_THRESHOLD_PERCENT {
            warnings |= WARNING_SPARE;
        }
        if self.read_only {
            warnings |= WARNING_READ_ONLY;
        }
        warnings
    }
}
