//! Progress of long work, on standard error: a bar on a terminal, plain lines elsewhere.

use indicatif::{ProgressBar, ProgressStyle};
use std::io::IsTerminal;
use std::time::{Duration, Instant};

/// Parts of the whole that a bar, or the lines, are made of.
const PARTS: u64 = 1000;
/// Without a terminal, one line in so much time; what takes less says nothing.
const TIME_PER_LINE: Duration = Duration::from_secs(5);

/// The progress of one piece of work.
pub struct Meter {
    what: String,
    bar: Option<ProgressBar>,
    lines: bool,
    told: Instant,
}

impl Meter {
    /// Of a piece of work with a name.
    pub fn new(what: &str) -> Meter {
        let bar = std::io::stderr().is_terminal().then(|| {
            let bar = ProgressBar::new(PARTS);
            let style = ProgressStyle::with_template("{prefix:14} [{bar:40}] {percent:>3} %  {msg}");
            bar.set_style(style.expect("a template that is right").progress_chars("=> "));
            bar.set_prefix(what.to_owned());
            bar
        });
        let lines = bar.is_none();
        Meter { what: what.to_owned(), bar, lines, told: Instant::now() }
    }

    /// Of work that is over before anybody wonders: shows nothing.
    pub fn silent() -> Meter {
        Meter { what: String::new(), bar: None, lines: false, told: Instant::now() }
    }

    /// Shows that `part` (0 to 1) is done.
    pub fn show(&mut self, part: f64, message: &str) {
        let parts = (part.clamp(0.0, 1.0) * PARTS as f64) as u64;
        match &self.bar {
            Some(bar) => {
                bar.set_message(message.to_owned());
                bar.set_position(parts);
            }
            None if self.lines && self.told.elapsed() >= TIME_PER_LINE => {
                self.told = Instant::now();
                eprintln!("{}: {} %, {message}", self.what, parts * 100 / PARTS);
            }
            None => {}
        }
    }
}

impl Drop for Meter {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}
