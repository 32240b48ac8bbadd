//! The baseline trait, its environment, its report and its errors.

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
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A store that ours is compared with.
pub trait Baseline {
    /// The kind of baseline.
    fn kind(&self) -> BaselineKind;

    /// Checks that it supports a configuration.
    ///
    /// # Errors
    /// A message with the first flag that it does not support.
    fn check_supported(&self, config: &BenchConfig) -> Result<(), String>;

    /// Runs the one workload of a configuration. Stored keys stay for the next workload.
    ///
    /// # Errors
    /// If the baseline does not start, fails, or prints output that cannot be parsed.
    fn run(
        &mut self,
        config: &BenchConfig,
        progress: &mut dyn FnMut(WorkloadProgress),
    ) -> Result<WorkloadResult, BaselineError>;

    /// Version, command lines and notes, for the report.
    fn info(&self) -> BaselineInfo;
}

/// The kinds of baselines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BaselineKind {
    /// RocksDB, driven by db_bench.
    RocksDb,
    /// Redis with its append-only file.
    Redis,
    /// Valkey with its append-only file.
    Valkey,
}

impl BaselineKind {
    /// All kinds.
    pub const ALL: [BaselineKind; 3] = [BaselineKind::RocksDb, BaselineKind::Redis, BaselineKind::Valkey];

    /// Its name on the command line and in reports.
    pub fn name(self) -> &'static str {
        match self {
            BaselineKind::RocksDb => "rocksdb",
            BaselineKind::Redis => "redis",
            BaselineKind::Valkey => "valkey",
        }
    }

    /// Its program, found in PATH.
    pub fn program(self) -> &'static str {
        match self {
            BaselineKind::RocksDb => "db_bench",
            BaselineKind::Redis => "redis-server",
            BaselineKind::Valkey => "valkey-server",
        }
    }

    /// The Debian package of the program.
    pub fn package(self) -> &'static str {
        match self {
            BaselineKind::RocksDb => "rocksdb-tools",
            BaselineKind::Redis => "redis-server",
            BaselineKind::Valkey => "valkey-server",
        }
    }

    /// Whether it runs in the process of its load generator, without a network.
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

/// The environment of a baseline.
#[derive(Clone)]
pub struct BaselineEnv {
    /// Its own directory, which the baseline creates.
    pub directory: PathBuf,
    /// Creates that directory, or empties it.
    pub recreate: fn(&Path) -> std::io::Result<()>,
    /// Starts and terminates its processes.
    pub processes: Arc<ChildProcesses>,
    /// Clock and threads.
    pub platform: GeneratorPlatform,
    /// The cores of our load generator.
    pub cores: Vec<Option<usize>>,
    /// Polling of our load generator.
    pub polling: Polling,
    /// Options that make an embedded baseline like an engine in this process; `None` beside a node.
    pub embedded: Option<EmbeddedOptions>,
}

/// The memory that an embedded baseline gets, as an engine in this process has it. Both then use direct I/O alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EmbeddedOptions {
    /// Bytes of its cache of blocks.
    pub cache_bytes: u64,
    /// Bytes of a memtable; `None` for its default.
    pub write_buffer_bytes: Option<usize>,
}

impl BaselineEnv {
    /// Creates or empties the directory.
    ///
    /// # Errors
    /// [`BaselineError::Files`] with the failure of the file system.
    pub(crate) fn recreate_directory(&self) -> Result<(), BaselineError> {
        let directory = &self.directory;
        (self.recreate)(directory)
            .map_err(|error| BaselineError::Files { directory: directory.clone(), error })
    }
}

/// Version, command lines and notes of a baseline, for the report.
#[derive(Clone, Debug, Serialize)]
pub struct BaselineInfo {
    /// Its name.
    pub baseline: &'static str,
    /// The version that it prints; `None` before it ran.
    pub version: Option<String>,
    /// Whether its operations cross no network.
    pub embedded: bool,
    /// The command lines that ran, each once, in order.
    pub as_run: Vec<String>,
    /// Notes for readers of its results.
    pub notes: Vec<String>,
}

impl BaselineInfo {
    pub(crate) fn new(kind: BaselineKind) -> BaselineInfo {
        let (embedded, notes) = (kind.is_embedded(), Vec::new());
        BaselineInfo { baseline: kind.name(), version: None, embedded, as_run: Vec::new(), notes }
    }

    /// Adds a command line with its purpose.
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

/// Why a baseline has no result.
#[derive(Debug, thiserror::Error)]
pub enum BaselineError {
    /// Its program cannot be started.
    #[error("{program} cannot be started: {error}")]
    Start {
        /// The program.
        program: &'static str,
        /// The failure.
        error: std::io::Error,
    },
    /// Its program exited with an error, or before it was ready.
    #[error("{program} failed; its last output line: {last_line}")]
    Failed {
        /// The program.
        program: &'static str,
        /// The last line of its output.
        last_line: String,
    },
    /// Its output has no result.
    #[error("{program} printed no result; its last output line: {last_line}")]
    Output {
        /// The program.
        program: &'static str,
        /// The last line of its output.
        last_line: String,
    },
    /// Its directory cannot be created or emptied.
    #[error("directory {}: {error}", .directory.display())]
    Files {
        /// The kind of baseline.
        directory: PathBuf,
        /// The failure.
        error: std::io::Error,
    },
    /// Our load generator failed on it.
    #[error("{baseline}: {error}")]
    Load {
        /// The baseline.
        baseline: &'static str,
        /// The failure.
        error: BenchError,
    },
}

/// The last line of an output that is not empty, which usually has the error.
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
