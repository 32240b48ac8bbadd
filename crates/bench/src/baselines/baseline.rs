//! A baseline: what each of them offers, is given, reports and fails with.

use crate::baselines::child_processes::ChildProcesses;
use crate::child_process;
use crate::config::BenchConfig;
use crate::error::BenchError;
use crate::name_lookup::{self, UnknownName};
use crate::platform::GeneratorPlatform;
use crate::workload_result::WorkloadResult;
use crate::workload_state::WorkloadProgress;
use octokv_runtime::Polling;
use serde::Serialize;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A store beside ours.
pub trait Baseline {
    /// Which one.
    fn kind(&self) -> BaselineKind;

    /// What it cannot do of a plan.
    ///
    /// # Errors
    /// The first such thing, in words.
    fn check_supported(&self, config: &BenchConfig) -> Result<(), String>;

    /// Runs the one workload of a plan; what was stored stays for the next.
    ///
    /// # Errors
    /// When the peer does not start, fails, or says what cannot be understood.
    fn run(
        &mut self,
        config: &BenchConfig,
        progress: &mut dyn FnMut(WorkloadProgress),
    ) -> Result<WorkloadResult, BaselineError>;

    /// What it was, for the report.
    fn info(&self) -> BaselineInfo;
}

/// The peers that there are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BaselineKind {
    /// RocksDB, by db_bench.
    RocksDb,
    /// Redis with its append-only file.
    Redis,
    /// Valkey, the same.
    Valkey,
}

impl BaselineKind {
    /// All of them.
    pub const ALL: [BaselineKind; 3] = [BaselineKind::RocksDb, BaselineKind::Redis, BaselineKind::Valkey];

    /// Its name on the command line and in reports.
    pub fn name(self) -> &'static str {
        match self {
            BaselineKind::RocksDb => "rocksdb",
            BaselineKind::Redis => "redis",
            BaselineKind::Valkey => "valkey",
        }
    }

    /// The program that runs, looked for as a shell does.
    pub fn program(self) -> &'static str {
        match self {
            BaselineKind::RocksDb => "db_bench",
            BaselineKind::Redis => "redis-server",
            BaselineKind::Valkey => "valkey-server",
        }
    }

    /// Debian's package with the program.
    pub fn package(self) -> &'static str {
        match self {
            BaselineKind::RocksDb => "rocksdb-tools",
            BaselineKind::Redis => "redis-server",
            BaselineKind::Valkey => "valkey-server",
        }
    }

    /// Whether it runs in the process of its load, without a network.
    pub fn is_embedded(self) -> bool {
        self == BaselineKind::RocksDb
    }
}

impl std::str::FromStr for BaselineKind {
    type Err = UnknownName;
    fn from_str(text: &str) -> Result<BaselineKind, UnknownName> {
        name_lookup::find_by_name("baseline", text, &BaselineKind::ALL, BaselineKind::name)
    }
}

/// What a peer stands on.
#[derive(Clone)]
pub struct BaselineEnv {
    /// Its directory, for itself alone; whether it is there is the peer's business.
    pub directory: PathBuf,
    /// Makes that directory, or makes it anew: empty.
    pub recreate: fn(&Path) -> std::io::Result<()>,
    /// What starts its processes and ends them.
    pub processes: Arc<ChildProcesses>,
    /// Clock and threads.
    pub platform: GeneratorPlatform,
    /// The cores of our generator, where it drives the peer.
    pub cores: Vec<Option<usize>>,
    /// How that generator rests.
    pub polling: Polling,
}

impl BaselineEnv {
    /// The directory, empty.
    ///
    /// # Errors
    /// What the system says.
    pub(crate) fn recreate_directory(&self) -> Result<(), BaselineError> {
        let directory = &self.directory;
        (self.recreate)(directory)
            .map_err(|error| BaselineError::Files { directory: directory.clone(), error })
    }
}

/// What a peer was.
#[derive(Clone, Debug, Serialize)]
pub struct BaselineInfo {
    /// Its name.
    pub baseline: &'static str,
    /// As it says itself; none before it ran.
    pub version: Option<String>,
    /// Whether its operations cross no network.
    pub embedded: bool,
    /// The command lines that were run, each once, in order.
    pub as_run: Vec<String>,
    /// What a reader of its figures should know.
    pub notes: Vec<String>,
}

impl BaselineInfo {
    pub(crate) fn new(kind: BaselineKind) -> BaselineInfo {
        let (embedded, notes) = (kind.is_embedded(), Vec::new());
        BaselineInfo { baseline: kind.name(), version: None, embedded, as_run: Vec::new(), notes }
    }

    /// A command line was run, for what.
    pub(crate) fn add_command_line(&mut self, command: &std::process::Command, purpose: &str) {
        let words = std::iter::once(command.get_program()).chain(command.get_args());
        let shell_quoted = |word: &std::ffi::OsStr| match word.to_string_lossy() {
            word if word.is_empty() || word.contains(' ') => format!("'{word}'"),
            word => word.into_owned(),
        };
        let mut line = words.map(shell_quoted).collect::<Vec<_>>().join(" ");
        if !purpose.is_empty() {
            line = format!("{line}    # {purpose}");
        }
        if !self.as_run.contains(&line) {
            self.as_run.push(line);
        }
    }

    pub(crate) fn add_note(&mut self, note: &str) {
        if !self.notes.iter().any(|known| known == note) {
            self.notes.push(note.to_owned());
        }
    }
}

/// Why a peer has no figures.
#[derive(Debug)]
pub enum BaselineError {
    /// Its program cannot be started.
    Start {
        /// The program.
        program: &'static str,
        /// Why.
        error: std::io::Error,
    },
    /// Its program ended with an error, or too early.
    Failed {
        /// The program.
        program: &'static str,
        /// Its last words.
        last_line: String,
    },
    /// What it printed has no figures.
    Output {
        /// The program.
        program: &'static str,
        /// Its last words.
        last_line: String,
    },
    /// Its directory cannot be made or emptied.
    Files {
        /// Which one.
        directory: PathBuf,
        /// Why.
        error: std::io::Error,
    },
    /// Our generator failed on it.
    Load {
        /// The peer.
        baseline: &'static str,
        /// How.
        error: BenchError,
    },
}

impl fmt::Display for BaselineError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            BaselineError::Start { program, error } => write!(f, "{program} cannot be started: {error}"),
            BaselineError::Failed { program, last_line } => {
                write!(f, "{program} failed; it said last: {last_line}")
            }
            BaselineError::Output { program, last_line } => {
                write!(f, "{program} gave no figures; it said last: {last_line}")
            }
            BaselineError::Files { directory, error } => {
                write!(f, "directory {}: {error}", directory.display())
            }
            BaselineError::Load { baseline, error } => write!(f, "{baseline}: {error}"),
        }
    }
}

impl std::error::Error for BaselineError {}

/// The line that says most of what went wrong: the last that is not empty.
pub(crate) fn last_line(text: &str) -> String {
    child_process::last_line(text).unwrap_or("nothing").to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_parse_back_to_baselines() {
        for kind in BaselineKind::ALL {
            assert_eq!(kind.name().parse(), Ok(kind));
        }
        let error = "lmdb".parse::<BaselineKind>().unwrap_err().to_string();
        assert!(error.contains("lmdb") && error.contains("rocksdb, redis, valkey"), "{error}");
    }

    #[test]
    fn a_command_line_is_listed_once_with_shell_quotes() {
        let mut info = BaselineInfo::new(BaselineKind::Redis);
        let mut command = std::process::Command::new("redis-server");
        command.args(["--save", "", "--dir", "a b"]);
        info.add_command_line(&command, "");
        info.add_command_line(&command, "");
        info.add_command_line(&command, "again");
        let line = "redis-server --save '' --dir 'a b'";
        assert_eq!(info.as_run, [line.to_owned(), format!("{line}    # again")]);
    }
}
