//! Progress of an experiment, for the caller to show.

/// One change of the progress.
#[derive(Clone, Copy, Debug)]
pub enum LabProgress<'a> {
    /// A figure starts.
    Figure {
        /// Its name, as `--figure` takes it.
        name: &'a str,
        /// The part of all figures that is done, 0 to 1.
        fraction: f64,
    },
    /// All figures are done; text follows on standard output.
    Finished,
}

/// Receives each change.
pub type ProgressSink<'a> = &'a mut dyn FnMut(LabProgress<'_>);
