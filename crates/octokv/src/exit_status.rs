//! Results of commands: messages and exit codes.

use std::io;
use std::process::ExitCode;

/// A failed command.
#[derive(Debug)]
pub enum CliError {
    /// Invalid arguments or settings: exit code 2.
    Usage(String),
    /// The key does not exist: exit code 3.
    KeyNotFound(String),
    /// Any other failure: exit code 1.
    Failed(anyhow::Error),
}

/// Result of a command.
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

/// Prints the error of a command on standard error and returns the exit code.
pub fn to_exit_code(outcome: CliResult) -> ExitCode {
    let (code, message) = match outcome {
        Ok(()) => return ExitCode::SUCCESS,
        // The reader of the output has closed it (`octokv list | head`).
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
