//! How a command ends: what is said, and the exit code.

use std::io;
use std::process::ExitCode;

/// Why a command did not do what it was asked.
#[derive(Debug)]
pub enum CliError {
    /// What was asked makes no sense: exit code 2.
    Usage(String),
    /// The key does not exist: exit code 3.
    KeyNotFound(String),
    /// Anything else: exit code 1.
    Failed(anyhow::Error),
}

/// The end of a command.
pub type CliResult = Result<(), CliError>;

impl From<anyhow::Error> for CliError {
    fn from(error: anyhow::Error) -> CliError {
        CliError::Failed(error)
    }
}

impl From<io::Error> for CliError {
    fn from(error: io::Error) -> CliError {
        CliError::Failed(error.into())
    }
}

/// Says what went wrong, on standard error, and gives the exit code.
pub fn to_exit_code(outcome: CliResult) -> ExitCode {
    let (code, message) = match outcome {
        Ok(()) => return ExitCode::SUCCESS,
        // Whoever read our output has seen enough (`octokv list | head`).
        Err(CliError::Failed(error)) if is_broken_pipe(&error) => return ExitCode::SUCCESS,
        Err(CliError::Failed(error)) => (1, format!("{error:#}")),
        Err(CliError::Usage(message)) => (2, message),
        Err(CliError::KeyNotFound(message)) => (3, message),
    };
    eprintln!("octokv: {message}");
    ExitCode::from(code)
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    let io = error.chain().find_map(|cause| cause.downcast_ref::<io::Error>());
    io.is_some_and(|error| error.kind() == io::ErrorKind::BrokenPipe)
}
