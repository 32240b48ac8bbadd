//! Stored values of features, cleared by a controller reset.

/// Values that only their own Get Features returns: they change no behaviour.
#[derive(Debug, Default)]
pub(crate) struct FeatureValues {
    pub arbitration: u32,
    pub error_recovery: u32,
    pub write_atomicity: u32,
    pub temperature: u32,
    /// Bytes 0 to 2 of host behaviour support (feature 16h).
    pub host_behavior: [u8; 3],
}
