//! The links between hosts: latency, bandwidth and window. `net` sends bytes over them.

use octokv_base::Nanos;

/// The properties of a link, in each direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SimLinkConfig {
    /// The time from the end of transmission to arrival.
    pub latency: Nanos,
    /// The maximum of the uniform random addition to each segment's latency.
    pub jitter: Nanos,
    /// The bandwidth. 0: unlimited.
    pub bytes_per_second: u64,
    /// The maximum of one stream's bytes on the link and unread at the receiver.
    pub window_bytes: usize,
    /// Whether sends are split into segments that arrive separately, and receives return short counts.
    pub fragments: bool,
}

impl Default for SimLinkConfig {
    /// An idle 25 Gbit/s network.
    fn default() -> SimLinkConfig {
        SimLinkConfig {
            latency: Nanos::from_micros(10),
            jitter: Nanos::from_micros(2),
            bytes_per_second: 3_125_000_000,
            window_bytes: 1 << 20,
            fragments: false,
        }
    }
}

/// One direction of a link.
#[derive(Clone, Copy)]
pub(crate) struct SimLink {
    pub(crate) config: SimLinkConfig,
    /// Whether bytes wait until the cut ends.
    pub(crate) is_cut: bool,
    /// When the bytes sent so far have left.
    pub(crate) free_at: Nanos,
}
