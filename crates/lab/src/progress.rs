//! Progress of an experiment, for the caller to show.

/// One change of the progress.
#[derive(Clone, Copy, Debug)]
pub enum LabProgress<'a> {
    /// A figure starts.
    Figure {
        /// Its name on the command line (`--figure`).
        name: &'a str,
        /// Completed fraction of all figures, 0 to 1.
        fraction: f64,
    },
    /// All figures are done; text follows on standard output.
    Finished,
}

/// Receives each change.
pub type ProgressSink<'a> = &'a mut dyn FnMut(LabProgress<'_>);
