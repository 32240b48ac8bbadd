//! Why an experiment did not run.

use std::io;

/// Why a command of this crate failed.
#[derive(Debug)]
pub enum LabError {
    /// The arguments contradict each other or name nothing that exists.
    Usage(String),
    /// A run, or writing its results, failed.
    Failed(anyhow::Error),
}

/// The result of a command of this crate.
pub type LabResult = Result<(), LabError>;

impl From<anyhow::Error> for LabError {
    fn from(error: anyhow::Error) -> LabError {
        LabError::Failed(error)
    }
}

impl From<io::Error> for LabError {
    fn from(error: io::Error) -> LabError {
        LabError::Failed(error.into())
    }
}
