//! Progress of long operations on standard error: a bar on a terminal, plain lines elsewhere.

use indicatif::{ProgressBar, ProgressStyle};
use std::io::IsTerminal;
use std::time::{Duration, Instant};

/// Resolution of bar and lines.
const STEPS: u64 = 1000;
/// Interval of lines without a terminal; a shorter operation prints nothing.
const LINE_INTERVAL: Duration = Duration::from_secs(5);

/// Progress of one operation.
pub struct ProgressReporter {
    label: String,
    bar: Option<ProgressBar>,
    prints_lines: bool,
    last_line_at: Instant,
}

impl ProgressReporter {
    /// Progress with a label.
    pub fn new(what: &str) -> ProgressReporter {
        let bar = std::io::stderr().is_terminal().then(|| {
            let bar = ProgressBar::new(STEPS);
            let style = ProgressStyle::with_template("{prefix:14} [{bar:40}] {percent:>3} %  {msg}");
            bar.set_style(style.expect("a template that is right").progress_chars("=> "));
            bar.set_prefix(what.to_owned());
            bar
        });
        let lines = bar.is_none();
        ProgressReporter { label: what.to_owned(), bar, prints_lines: lines, last_line_at: Instant::now() }
    }

    /// Progress of a short operation: prints nothing.
    pub fn silent() -> ProgressReporter {
        ProgressReporter {
            label: String::new(),
            bar: None,
            prints_lines: false,
            last_line_at: Instant::now(),
        }
    }

    /// Runs `print`, which writes lines to the same terminal, without a bar in between.
    pub fn suspend<T>(&self, print: impl FnOnce() -> T) -> T {
        match &self.bar {
            Some(bar) => bar.suspend(print),
            None => print(),
        }
    }

    /// Shows that `part` (0 to 1) is done.
    pub fn update(&mut self, part: f64, message: &str) {
        let parts = (part.clamp(0.0, 1.0) * STEPS as f64) as u64;
        match &self.bar {
            Some(bar) => {
                bar.set_message(message.to_owned());
                bar.set_position(parts);
            }
            None if self.prints_lines && self.last_line_at.elapsed() >= LINE_INTERVAL => {
                self.last_line_at = Instant::now();
                eprintln!("{}: {} %, {message}", self.label, parts * 100 / STEPS);
            }
            None => {}
        }
    }
}

impl Drop for ProgressReporter {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}
