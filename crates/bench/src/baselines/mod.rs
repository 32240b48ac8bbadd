//! Peers: other stores under the same workloads, on a disk of this machine, in turns with ours.
//!
//! ```text
//!   round 1   ours fillseq, peer fillseq, ours readrandom, peer readrandom     a ratio is of two turns that are
//!   round 2   ours fillseq, ...                                                neighbours; its median is over rounds
//! ```
//! A peer's fill begins with an empty store; other workloads find what the last fill left, or, where there was none,
//! every key, stored beforehand without being measured. A peer runs, and has files, in a directory of its own that the
//! caller makes and removes. Every option that matters is given to it and told as it was ([`Peer::account`]).
//!
//! # Layout
//! - [`rocksdb`]: RocksDB by its own `db_bench`: embedded.
//! - [`redis`]: Redis and Valkey: servers, by our own generator.
//! - [`resp`]: their protocol; `resp_worker`: the generator that speaks it.
//! - [`child_processes`]: processes that end with the run.
//! - [`compare`]: ratios and medians.

pub mod child_processes;
pub mod compare;
pub mod redis;
pub mod resp;
pub(crate) mod resp_worker;
pub mod rocksdb;

use crate::config::Plan;
use crate::name_lookup::{self, UnknownName};
use crate::report::Figures;
use crate::runner::{self, Host, Progress};
use child_processes::Children;
use octokv_runtime::Polling;
use serde::Serialize;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A store beside ours.
pub trait Peer {
    /// Which one.
    fn kind(&self) -> Kind;

    /// What it cannot do of a plan.
    ///
    /// # Errors
    /// The first such thing, in words.
    fn check(&self, plan: &Plan) -> Result<(), String>;

    /// Runs the one workload of a plan; what was stored stays for the next.
    ///
    /// # Errors
    /// When the peer does not start, fails, or says what cannot be understood.
    fn run(&mut self, plan: &Plan, progress: &mut dyn FnMut(Progress)) -> Result<Figures, Error>;

    /// What it was, for the report.
    fn account(&self) -> Account;
}

/// The peers that there are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// RocksDB, by db_bench.
    RocksDb,
    /// Redis with its append-only file.
    Redis,
    /// Valkey, the same.
    Valkey,
}

impl Kind {
    /// All of them.
    pub const ALL: [Kind; 3] = [Kind::RocksDb, Kind::Redis, Kind::Valkey];

    /// Its name on the command line and in reports.
    pub fn name(self) -> &'static str {
        match self {
            Kind::RocksDb => "rocksdb",
            Kind::Redis => "redis",
            Kind::Valkey => "valkey",
        }
    }

    /// The program that runs, looked for as a shell does.
    pub fn program(self) -> &'static str {
        match self {
            Kind::RocksDb => "db_bench",
            Kind::Redis => "redis-server",
            Kind::Valkey => "valkey-server",
        }
    }

    /// Debian's package with the program.
    pub fn package(self) -> &'static str {
        match self {
            Kind::RocksDb => "rocksdb-tools",
            Kind::Redis => "redis-server",
            Kind::Valkey => "valkey-server",
        }
    }

    /// Whether it runs in the process of its load, without a network.
    pub fn is_embedded(self) -> bool {
        self == Kind::RocksDb
    }

    /// The peer in a place.
    pub fn peer(self, ground: Ground) -> Box<dyn Peer> {
        match self {
            Kind::RocksDb => Box::new(rocksdb::RocksDb::new(ground)),
            Kind::Redis | Kind::Valkey => Box::new(redis::Redis::new(self, ground)),
        }
    }
}

impl std::str::FromStr for Kind {
    type Err = UnknownName;
    fn from_str(text: &str) -> Result<Kind, UnknownName> {
        name_lookup::find("peer", text, &Kind::ALL, Kind::name)
    }
}

/// What a peer stands on.
#[derive(Clone)]
pub struct Ground {
    /// Its directory, for itself alone; whether it is there is the peer's business.
    pub directory: PathBuf,
    /// Makes that directory, or makes it anew: empty.
    pub empty: fn(&Path) -> std::io::Result<()>,
    /// What starts its processes and ends them.
    pub children: Arc<Children>,
    /// Clock and threads.
    pub host: Host,
    /// The cores of our generator, where it drives the peer.
    pub cores: Vec<Option<usize>>,
    /// How that generator rests.
    pub polling: Polling,
}

impl Ground {
    /// The directory, empty.
    ///
    /// # Errors
    /// What the system says.
    fn empty_directory(&self) -> Result<(), Error> {
        let directory = &self.directory;
        (self.empty)(directory).map_err(|error| Error::Files { directory: directory.clone(), error })
    }
}

/// What a peer was.
#[derive(Clone, Debug, Serialize)]
pub struct Account {
    /// Its name.
    pub peer: &'static str,
    /// As it says itself; none before it ran.
    pub version: Option<String>,
    /// Whether its operations cross no network.
    pub embedded: bool,
    /// The command lines that were run, each once, in order.
    pub as_run: Vec<String>,
    /// What a reader of its figures should know.
    pub notes: Vec<String>,
}

impl Account {
    fn new(kind: Kind) -> Account {
        let (embedded, notes) = (kind.is_embedded(), Vec::new());
        Account { peer: kind.name(), version: None, embedded, as_run: Vec::new(), notes }
    }

    /// A command line was run, for what.
    fn ran(&mut self, command: &std::process::Command, purpose: &str) {
        let words = std::iter::once(command.get_program()).chain(command.get_args());
        let quoted = |word: &std::ffi::OsStr| match word.to_string_lossy() {
            word if word.is_empty() || word.contains(' ') => format!("'{word}'"),
            word => word.into_owned(),
        };
        let mut line = words.map(quoted).collect::<Vec<_>>().join(" ");
        if !purpose.is_empty() {
            line = format!("{line}    # {purpose}");
        }
        if !self.as_run.contains(&line) {
            self.as_run.push(line);
        }
    }

    fn note(&mut self, note: &str) {
        if !self.notes.iter().any(|known| known == note) {
            self.notes.push(note.to_owned());
        }
    }
}

/// Why a peer has no figures.
#[derive(Debug)]
pub enum Error {
    /// Its program cannot be started.
    Start {
        /// The program.
        program: &'static str,
        /// Why.
        error: std::io::Error,
    },
    /// Its program ended with an error, or too early.
    Ended {
        /// The program.
        program: &'static str,
        /// Its last words.
        said: String,
    },
    /// What it printed has no figures.
    Output {
        /// The program.
        program: &'static str,
        /// Its last words.
        said: String,
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
        peer: &'static str,
        /// How.
        error: runner::Error,
    },
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Start { program, error } => write!(f, "{program} cannot be started: {error}"),
            Error::Ended { program, said } => write!(f, "{program} failed; it said last: {said}"),
            Error::Output { program, said } => write!(f, "{program} gave no figures; it said last: {said}"),
            Error::Files { directory, error } => write!(f, "directory {}: {error}", directory.display()),
            Error::Load { peer, error } => write!(f, "{peer}: {error}"),
        }
    }
}

impl std::error::Error for Error {}

/// The line that says most of what went wrong: the last that is not empty.
fn last_line(text: &str) -> String {
    let last = text.lines().map(str::trim).rfind(|line| !line.is_empty());
    last.unwrap_or("nothing").to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_lead_to_peers_and_back() {
        for kind in Kind::ALL {
            assert_eq!(kind.name().parse(), Ok(kind));
        }
        let error = "lmdb".parse::<Kind>().unwrap_err().to_string();
        assert!(error.contains("lmdb") && error.contains("rocksdb, redis, valkey"), "{error}");
    }

    #[test]
    fn a_command_is_told_as_a_shell_takes_it_and_once() {
        let mut account = Account::new(Kind::Redis);
        let mut command = std::process::Command::new("redis-server");
        command.args(["--save", "", "--dir", "a b"]);
        account.ran(&command, "");
        account.ran(&command, "");
        account.ran(&command, "again");
        let line = "redis-server --save '' --dir 'a b'";
        assert_eq!(account.as_run, [line.to_owned(), format!("{line}    # again")]);
    }
}
