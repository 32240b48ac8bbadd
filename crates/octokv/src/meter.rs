//! Progress of long work, on standard error: a bar on a terminal, plain lines elsewhere.

use indicatif::{ProgressBar, ProgressStyle};
use std::io::IsTerminal;

/// Parts of the whole that a bar, or the lines, are made of.
const PARTS: u64 = 1000;
/// Without a terminal, one line per so many parts.
const PARTS_PER_LINE: u64 = 250;

/// The progress of one piece of work.
pub struct Meter {
    what: String,
    bar: Option<ProgressBar>,
    told: u64,
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
        Meter { what: what.to_owned(), bar, told: 0 }
    }

    /// Shows that `part` (0 to 1) is done.
    pub fn show(&mut self, part: f64, message: &str) {
        let parts = (part.clamp(0.0, 1.0) * PARTS as f64) as u64;
        match &self.bar {
            Some(bar) => {
                bar.set_message(message.to_owned());
                bar.set_position(parts);
            }
            None if parts / PARTS_PER_LINE > self.told => {
                self.told = parts / PARTS_PER_LINE;
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
