//! The values of a controller's features.

/// Values of features that only their own Get reads.
#[derive(Debug, Default)]
pub(crate) struct FeatureValues {
    pub arbitration: u32,
    pub error_recovery: u32,
    pub write_atomicity: u32,
    pub temperature: u32,
    /// What the host says of itself: bytes 0 to 2 of host behaviour support.
    pub host_behavior: [u8; 3],
}
