//! `octokv reproduce`: the papers' experiments, with their progress on standard error.

use crate::exit_status::{CliError, CliResult};
use crate::progress::ProgressReporter;
use octokv_lab::{LabError, LabProgress, ReproduceArgs};

/// Runs `octokv reproduce`.
pub fn run(reproduce: &ReproduceArgs) -> CliResult {
    let mut reporter = Some(ProgressReporter::new(reproduce.paper.name()));
    let result = octokv_lab::run(reproduce, &mut |progress| match progress {
        LabProgress::Figure { name, fraction } => {
            if let Some(reporter) = &mut reporter {
                reporter.update(fraction, name);
            }
        }
        // The bar is removed before the text is printed.
        LabProgress::Finished => drop(reporter.take()),
    });
    result.map_err(|error| match error {
        LabError::Usage(message) => CliError::Usage(message),
        LabError::Failed(error) => CliError::Failed(error),
    })
}
