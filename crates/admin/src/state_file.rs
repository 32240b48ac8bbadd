//! State file: the settings changed at run time, and counters of starts and run time.
//!
//! One TOML file, replaced atomically: written to a temporary file, synced, renamed, the directory synced. A crash
//! leaves the old or the new file. Loading an invalid file fails and leaves it as it is. The format is in
//! docs/FORMATS.md.

use crate::api_types::NamespaceType;
use crate::device_names::DeviceNames;
use crate::scheduling_api::{RENAMED_SETTINGS, SchedConfigPatch};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::fs::{File, TryLockError};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Format version that [`StateFile::save`] writes. [`StateFile::load`] also reads version 1 and converts it.
const STATE_VERSION: u32 = 2;
/// Maximum wait for the lock of another process.
const LOCK_TIMEOUT: Duration = Duration::from_secs(2);
const LOCK_RETRY_INTERVAL: Duration = Duration::from_millis(5);

/// A namespace added at run time.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AddedNamespace {
    /// Namespace ID.
    pub nsid: u32,
    /// Its command set.
    pub kind: NamespaceType,
    /// Absolute paths, or "memory".
    pub device: DeviceNames,
    /// Size of each in memory, in bytes; `None` for files, which exist already.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size_bytes: Option<u64>,
    /// Storage engine of a key-value namespace. A file of an earlier octokv names none: it had one engine.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub engine: Option<String>,
    /// Memory of its cache of values in bytes; `None` without one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cache_bytes: Option<u64>,
    /// Never-written space that is written ahead of its use, in bytes; `None` for the default of its kind.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prepare_bytes: Option<u64>,
    /// Space of each of several devices for values of overloaded others, in bytes; `None` without.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub swap_bytes: Option<u64>,
    /// Block size in bytes of a block namespace.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub block_bytes: Option<u32>,
    /// ANA group, 1 to 32.
    pub ana_group: u32,
    /// Unique identity of the namespace (NGUID suffix), in hexadecimal.
    pub identity: String,
}

/// The contents of the file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PersistedState {
    /// Format version of the file. A load converts version 1 to the current one.
    pub version: u32,
    /// Number of starts of the node.
    #[serde(default)]
    pub starts: u64,
    /// Number of earlier runs without a clean shutdown.
    #[serde(default)]
    pub unclean_shutdowns: u64,
    /// Run time in seconds up to the last save.
    #[serde(default)]
    pub run_seconds: u64,
    /// Mean busy time of the cores in seconds up to the last save.
    #[serde(default)]
    pub busy_seconds: u64,
    /// True while the node runs, and after an unclean shutdown.
    #[serde(default)]
    pub running: bool,
    /// Host list: NQNs, "any" for every host. `None` while the configuration applies.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hosts: Option<BTreeSet<String>>,
    /// Changed ANA states by group number.
    #[serde(default)]
    pub ana: BTreeMap<String, String>,
    /// Changed scheduling settings, applied over the configuration.
    #[serde(default, skip_serializing_if = "SchedConfigPatch::is_empty")]
    pub scheduling: SchedConfigPatch,
    /// Namespaces added at run time, in nsid order.
    #[serde(default, rename = "namespace")]
    pub namespaces: Vec<AddedNamespace>,
}

impl Default for PersistedState {
    fn default() -> PersistedState {
        PersistedState {
            version: STATE_VERSION,
            starts: 0,
            unclean_shutdowns: 0,
            run_seconds: 0,
            busy_seconds: 0,
            running: false,
            hosts: None,
            ana: BTreeMap::new(),
            scheduling: SchedConfigPatch::default(),
            namespaces: Vec::new(),
        }
    }
}

/// An unusable state file: its path and the reason.
#[derive(Debug, thiserror::Error)]
#[error("state file {}: {reason}", path.display())]
pub struct StateError {
    path: PathBuf,
    reason: String,
}

/// Exclusive lock of a state file until this is dropped.
#[derive(Debug)]
pub struct StateFileLock(#[expect(dead_code, reason = "held for its lock")] File);

/// Path of a state file.
#[derive(Clone, Debug)]
pub struct StateFile(PathBuf);

impl StateFile {
    /// A state file at a path; it may be missing.
    pub fn new(path: &Path) -> StateFile {
        StateFile(path.to_owned())
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        &self.0
    }

    fn error(&self, why: impl fmt::Display) -> StateError {
        StateError { path: self.0.clone(), reason: why.to_string() }
    }

    /// Locks the file for this process: two nodes with one file would overwrite each other's changes. The lock is on a
    /// second file, since the state file itself is replaced.
    ///
    /// # Errors
    /// If another node holds the lock for `LOCK_TIMEOUT`, or the lock file cannot be opened.
    pub fn lock(&self) -> Result<StateFileLock, StateError> {
        let mut lock_path = self.0.clone().into_os_string();
        lock_path.push(".lock");
        let mut options = std::fs::OpenOptions::new();
        let file = options.write(true).create(true).truncate(false).mode(0o600).open(lock_path);
        let file = file.map_err(|error| self.error(error))?;
        let deadline = Instant::now() + LOCK_TIMEOUT;
        loop {
            match file.try_lock() {
                Ok(()) => return Ok(StateFileLock(file)),
                // The kernel releases the lock of a killed process with a delay.
                Err(TryLockError::WouldBlock) if Instant::now() < deadline => {
                    std::thread::sleep(LOCK_RETRY_INTERVAL)
                }
                Err(TryLockError::WouldBlock) => {
                    return Err(self.error("another node uses it"));
                }
                Err(TryLockError::Error(error)) => return Err(self.error(error)),
            }
        }
    }

    /// Reads the file; a missing file gives the default state.
    ///
    /// # Errors
    /// If it cannot be read, is not valid TOML with the known fields, or has an unknown version.
    pub fn load(&self) -> Result<PersistedState, StateError> {
        let text = match std::fs::read_to_string(&self.0) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                return Ok(PersistedState::default());
            }
            read => read.map_err(|error| self.error(error))?,
        };
        let mut table: toml::Table = toml::from_str(&text).map_err(|error| self.error(error.message()))?;
        match table.get("version").and_then(toml::Value::as_integer) {
            Some(1) => convert_version_1(&mut table),
            Some(version) if version != i64::from(STATE_VERSION) => {
                return Err(self.error(format!(
                    "format version {version}; this octokv reads versions 1 to {STATE_VERSION}"
                )));
            }
            // Without a number the deserialization below fails with a message that names the field.
            Some(_) | None => {}
        }
        table.try_into().map_err(|error: toml::de::Error| self.error(error.message()))
    }

    /// Replaces the file.
    ///
    /// # Errors
    /// If it cannot be written; the old file then remains.
    pub fn save(&self, state: &PersistedState) -> Result<(), StateError> {
        let text = toml::to_string(state).map_err(|error| self.error(error))?;
        let parent = self.0.parent().filter(|parent| !parent.as_os_str().is_empty());
        let parent = parent.unwrap_or(Path::new("."));
        let write = || -> std::io::Result<()> {
            // A fixed name: the next save replaces the file that a crash left.
            let mut new = self.0.clone().into_os_string();
            new.push(".new");
            let mut options = std::fs::OpenOptions::new();
            options.write(true).create(true).truncate(true).mode(0o600);
            let mut file = options.open(&new)?;
            file.write_all(b"# Written by octokv serve: settings changed at run time, and counters.\n")?;
            file.write_all(text.as_bytes())?;
            file.sync_all()?;
            std::fs::rename(&new, &self.0)?;
            std::fs::File::open(parent)?.sync_all()
        };
        write().map_err(|error| self.error(error))
    }
}

/// Converts a version 1 table to version 2, in which one field and three scheduling settings have other names.
fn convert_version_1(table: &mut toml::Table) {
    table.insert("version".to_owned(), i64::from(STATE_VERSION).into());
    rename_field(table, "unclean_stops", "unclean_shutdowns");
    if let Some(toml::Value::Table(scheduling)) = table.get_mut("scheduling") {
        for (old, new) in RENAMED_SETTINGS {
            rename_field(scheduling, old, new);
        }
    }
}

fn rename_field(table: &mut toml::Table, old: &str, new: &str) {
    if let Some(value) = table.remove(old) {
        table.insert(new.to_owned(), value);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn populated_state() -> PersistedState {
        PersistedState {
            starts: 3,
            unclean_shutdowns: 1,
            run_seconds: 99,
            running: true,
            hosts: Some(["any".to_owned(), "nqn.2014-08.org.example:a".to_owned()].into()),
            ana: [("2".to_owned(), "inaccessible".to_owned())].into(),
            scheduling: SchedConfigPatch {
                policy: Some("auto".to_owned()),
                overload: Some(0.5),
                ..SchedConfigPatch::default()
            },
            namespaces: vec![AddedNamespace {
                nsid: 2,
                kind: NamespaceType::Block,
                device: DeviceNames::new(vec!["/srv/blocks.img".to_owned()]),
                size_bytes: None,
                engine: None,
                cache_bytes: None,
                prepare_bytes: None,
                swap_bytes: None,
                block_bytes: Some(4096),
                ana_group: 1,
                identity: "00ff".to_owned(),
            }],
            ..PersistedState::default()
        }
    }

    #[test]
    fn a_saved_state_round_trips() {
        let directory = tempfile::tempdir().unwrap();
        let file = StateFile::new(&directory.path().join("state"));
        assert_eq!(file.load().unwrap(), PersistedState::default(), "a missing file holds nothing");
        file.save(&populated_state()).unwrap();
        assert_eq!(file.load().unwrap(), populated_state());
        file.save(&PersistedState::default()).unwrap();
        assert_eq!(file.load().unwrap(), PersistedState::default());
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 1, "no temporary file remains");
    }

    /// A file as octokv 0.1.0 with format version 1 wrote it.
    const VERSION_1: &str = r#"# Kept by octokv serve: what was changed while the node ran.
version = 1
starts = 3
unclean_stops = 1
run_seconds = 99
busy_seconds = 0
running = true
hosts = ["any", "nqn.2014-08.org.example:a"]

[ana]
2 = "inaccessible"

[scheduling]
policy = "auto"
window_ms = 20
overload = 0.5
backwardings_max = 7
move_flows = "dense"

[[namespace]]
nsid = 2
kind = "block"
device = "/srv/blocks.img"
block_bytes = 4096
ana_group = 1
identity = "00ff"
"#;

    #[test]
    fn the_engine_and_the_cache_of_a_namespace_are_kept() {
        let directory = tempfile::tempdir().unwrap();
        let file = StateFile::new(&directory.path().join("state"));
        let mut state = populated_state();
        state.namespaces[0].kind = NamespaceType::Kv;
        state.namespaces[0].block_bytes = None;
        state.namespaces[0].engine = Some("hash".to_owned());
        state.namespaces[0].cache_bytes = Some(1 << 30);
        state.namespaces[0].prepare_bytes = Some(0);
        file.save(&state).unwrap();
        assert_eq!(file.load().unwrap(), state);
    }

    #[test]
    fn a_version_1_file_is_converted_and_saved_as_version_2() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("state");
        std::fs::write(&path, VERSION_1).unwrap();
        let file = StateFile::new(&path);
        let mut expected = populated_state();
        expected.scheduling.interval_ms = Some(20);
        expected.scheduling.requeues_max = Some(7);
        expected.scheduling.migrate_tenants = Some("dense".to_owned());
        let loaded = file.load().unwrap();
        assert_eq!(loaded, expected);
        assert_eq!(std::fs::read_to_string(&path).unwrap(), VERSION_1, "loading leaves the file as it is");
        file.save(&loaded).unwrap();
        let saved: toml::Table = std::fs::read_to_string(&path).unwrap().parse().unwrap();
        assert_eq!(saved["version"].as_integer(), Some(2));
        assert_eq!(saved["unclean_shutdowns"].as_integer(), Some(1));
        assert_eq!(saved["scheduling"]["interval_ms"].as_integer(), Some(20));
        assert_eq!(file.load().unwrap(), expected);
    }

    #[test]
    fn an_invalid_state_file_fails_with_its_reason() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("state");
        for (text, part) in [
            ("version = 3\n", "version 3; this octokv reads versions 1 to 2"),
            ("version = 0\n", "version 0"),
            ("version = -1\n", "version -1"),
            ("version = \"2\"\n", "invalid type"),
            ("version = 1\nhosst = []\n", "hosst"),
            ("version = 2\nhosst = []\n", "hosst"),
            ("version = 2\nunclean_stops = 1\n", "unclean_stops"),
            ("version = 2\n[scheduling]\nwindow_ms = 20\n", "window_ms"),
            ("\u{0}\u{1}", "state file"),
            ("", "version"),
        ] {
            std::fs::write(&path, text).unwrap();
            let error = StateFile::new(&path).load().unwrap_err().to_string();
            assert!(error.contains(part) && error.contains("state file"), "{error}");
            assert_eq!(std::fs::read_to_string(&path).unwrap(), text, "it is left as it is");
        }
    }
}
