//! What an operator can change of a running node: in the node and in the state file together.
//!
//! In: requests in the words of [`crate::words`]. Out: what is now, or why it is not.
//! Invariants: what was answered with success is in the file, so that a restart finds it; what was refused has
//! changed neither node nor file. One change at a time.

use crate::api_types::{AddNamespace, AnaGroup, CoreFigures, Existing, Figures, Kind, Namespace};
use crate::scheduling_api::{SchedulingSettings, WindowReport};
use crate::state_file::{Added, State, StateFile};
use octokv_base::{NamespaceId, Nanos};
use octokv_engine::hash::FormatSettings;
use octokv_node::{
    ANA_GROUPS_MAX, ChangeError, Content, DeviceSettings, NAMESPACE_ID_MAX, NamespaceReport,
    NamespaceSettings, OpenError, RunningNode, StartError, StopError,
};
use octokv_nvmf::{AnaState, HealthFacts, Hosts};
use octokv_wire::nqn;
use std::collections::BTreeSet;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The device that is the node's memory.
pub const MEMORY: &str = "memory";
/// Every host, among the names of hosts.
pub const ANY: &str = "any";
const BLOCK_BYTES: u32 = 4096;
const SECOND: u64 = 1_000_000_000;

/// Why something was not done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refused {
    /// It cannot be.
    Invalid(String),
    /// It is not there.
    Missing(String),
    /// It is there.
    Exists(String),
    /// It failed.
    Failed(String),
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (Refused::Invalid(why) | Refused::Missing(why) | Refused::Exists(why) | Refused::Failed(why)) =
            self;
        f.write_str(why)
    }
}

impl std::error::Error for Refused {}

impl From<ChangeError> for Refused {
    fn from(error: ChangeError) -> Refused {
        let why = error.to_string();
        match error {
            ChangeError::Exists(_) => Refused::Exists(why),
            ChangeError::Missing(_) => Refused::Missing(why),
            ChangeError::Open(StartError::Device { error: OpenError::Missing, .. }) => {
                Refused::Invalid(format!("{why}; a size makes it (--size)"))
            }
            ChangeError::Open(_) | ChangeError::ValueTooLong { .. } => Refused::Invalid(why),
            ChangeError::Stopping | ChangeError::NotClosed(_) => Refused::Failed(why),
        }
    }
}

/// The words for states of asymmetric access.
const ANA_STATES: [(&str, AnaState); 5] = [
    ("optimized", AnaState::Optimized),
    ("non-optimized", AnaState::NonOptimized),
    ("inaccessible", AnaState::Inaccessible),
    ("persistent-loss", AnaState::PersistentLoss),
    ("change", AnaState::Change),
];

/// The state of asymmetric access of this name.
pub fn ana_state(name: &str) -> Option<AnaState> {
    ANA_STATES.iter().find(|(word, _)| *word == name).map(|(_, state)| *state)
}

fn ana_name(state: AnaState) -> &'static str {
    ANA_STATES.iter().find(|(_, one)| *one == state).map_or("unknown", |(word, _)| word)
}

/// Who may connect, by a list of names.
pub fn hosts_of<'a>(names: impl IntoIterator<Item = &'a String>) -> Hosts {
    let names: BTreeSet<String> = names.into_iter().cloned().collect();
    if names.contains(ANY) { Hosts::Any } else { Hosts::Listed(names) }
}

/// Namespaces of a state, as a node takes them. `format` says how volumes of keys are made.
///
/// # Errors
/// The identity that cannot be read.
pub fn namespaces_of(state: &State, format: FormatSettings) -> Result<Vec<NamespaceSettings>, String> {
    state.namespaces.iter().map(|added| settings_of(added, format)).collect()
}

fn settings_of(added: &Added, format: FormatSettings) -> Result<NamespaceSettings, String> {
    let block_bytes = added.block_bytes.unwrap_or(BLOCK_BYTES);
    let identity = u64::from_str_radix(&added.identity, 16)
        .map_err(|_| format!("namespace {}: identity \"{}\"", added.nsid, added.identity))?;
    Ok(NamespaceSettings {
        id: NamespaceId(added.nsid),
        device: device_of(&added.device, added.size_bytes, added.kind, block_bytes),
        nand: None,
        content: match added.kind {
            Kind::Kv => Content::KeyValue { format: FormatSettings { namespace: added.nsid, ..format } },
            Kind::Block => Content::Blocks { block_bytes },
        },
        // Hosts of a namespace of blocks may have put anything there.
        existing: match added.kind {
            Kind::Kv => octokv_node::Existing::Check,
            Kind::Block => octokv_node::Existing::Keep,
        },
        ana_group: added.ana_group,
        required: false,
        identity,
    })
}

fn device_of(device: &str, size_bytes: Option<u64>, kind: Kind, block_bytes: u32) -> DeviceSettings {
    if device != MEMORY {
        return DeviceSettings::File { path: device.into(), create_bytes: size_bytes };
    }
    // The smallest block that there is, so that any unit of a volume of keys fits.
    let block_bytes = if kind == Kind::Kv { 512 } else { block_bytes };
    DeviceSettings::Memory { bytes: size_bytes.unwrap_or(0), block_bytes }
}

/// See the module's text.
pub struct Operator {
    node: RunningNode,
    /// Where changes are kept; without it none is made.
    file: Option<StateFile>,
    state: Mutex<State>,
    /// Who may connect by the configuration.
    configured_hosts: BTreeSet<String>,
    format: FormatSettings,
    machine: Machine,
    started: Nanos,
    /// How long the node had run before this start, and been busy, in seconds.
    before: (u64, u64),
}

/// Time and randomness.
#[derive(Clone, Copy)]
pub struct Machine {
    /// Nanoseconds since any fixed point.
    pub now: fn() -> Nanos,
    /// Draws identities of namespaces.
    pub random: fn() -> std::io::Result<u64>,
}

impl Operator {
    /// The operator of a node that was started with this state.
    pub fn new(
        node: RunningNode,
        file: Option<StateFile>,
        state: State,
        configured_hosts: BTreeSet<String>,
        machine: Machine,
    ) -> Operator {
        let (format, started) = (node.settings().format, (machine.now)());
        let before = (state.run_seconds, state.busy_seconds);
        let state = Mutex::new(state);
        Operator { node, file, state, configured_hosts, format, machine, started, before }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps a changed state; without a file, or when it cannot be written, nothing is changed.
    fn keep(&self, state: &mut State, changed: State) -> Result<(), Refused> {
        let Some(file) = &self.file else {
            return Err(Refused::Failed(
                "the node keeps no state, so that the change would not survive a restart: start it with --state FILE"
                    .to_owned(),
            ));
        };
        file.save(&changed).map_err(|error| Refused::Failed(error.to_string()))?;
        *state = changed;
        Ok(())
    }

    /// The namespaces, by rising identifier, those that are not served included.
    pub fn namespaces(&self) -> Vec<Namespace> {
        let state = self.state();
        let added = |nsid| state.namespaces.iter().any(|one| one.nsid == nsid);
        let mut all: Vec<Namespace> =
            self.node.namespaces().iter().map(|one| describe(one, added(one.settings.id.0))).collect();
        for (settings, why) in self.node.offline() {
            let (nsid, device) = (settings.id.0, device_name(&settings.device));
            let (kind, block_bytes) = kind_of(&settings.content);
            all.push(Namespace {
                nsid,
                kind,
                device,
                size_bytes: 0,
                used_bytes: 0,
                keys: None,
                block_bytes,
                ana_group: settings.ana_group,
                added: added(nsid),
                offline: Some(why),
            });
        }
        all.sort_by_key(|one| one.nsid);
        all
    }

    /// Adds a namespace.
    ///
    /// # Errors
    /// Why it is not there.
    pub fn add_namespace(&self, asked: &AddNamespace) -> Result<Namespace, Refused> {
        let invalid = |why: &str| Refused::Invalid(why.to_owned());
        let mut state = self.state();
        if asked.kind == Kind::Kv && asked.block_bytes.is_some() {
            return Err(invalid("block_size: only a namespace of blocks has one"));
        }
        if asked.kind == Kind::Kv && asked.existing == Existing::Keep {
            return Err(invalid("keep: only for a namespace of blocks"));
        }
        if asked.device.is_empty() {
            return Err(invalid("device: a path, or \"memory\""));
        }
        if asked.device == MEMORY && asked.size_bytes.is_none() {
            return Err(invalid("size: memory needs one"));
        }
        let nsid = match asked.nsid {
            Some(nsid) => nsid,
            None => self.free_nsid().ok_or_else(|| invalid("nsid: none is free"))?,
        };
        let identity = (self.machine.random)().map_err(|error| Refused::Failed(error.to_string()))?;
        let mut added = Added {
            nsid,
            kind: asked.kind,
            device: absolute(&asked.device)?,
            size_bytes: asked.size_bytes,
            block_bytes: (asked.kind == Kind::Block).then(|| asked.block_bytes.unwrap_or(BLOCK_BYTES)),
            ana_group: asked.ana_group.unwrap_or(1),
            identity: format!("{identity:016x}"),
        };
        let mut settings = settings_of(&added, self.format).map_err(Refused::Failed)?;
        settings.existing = match asked.existing {
            Existing::Check => octokv_node::Existing::Check,
            Existing::GiveUp => octokv_node::Existing::GiveUp,
            Existing::Keep => octokv_node::Existing::Keep,
        };
        if self.file.is_none() {
            // Refused before anything is made.
            self.keep(&mut state, State::default())?;
        }
        let new_file = (added.device != MEMORY).then(|| PathBuf::from(&added.device));
        // A link that leads nowhere is somebody's, too.
        let new_file = new_file.filter(|path| path.symlink_metadata().is_err());
        let undo_file = |refused: Refused| {
            // Where it cannot be removed, an empty file is left that nobody uses.
            new_file.as_deref().map(std::fs::remove_file);
            refused
        };
        let report = self.node.add_namespace(&settings).map_err(|error| undo_file(error.into()))?;
        if added.device != MEMORY {
            // From now on the file is there: one that is missing at a restart is not made anew, empty.
            added.size_bytes = None;
        }
        let mut changed = state.clone();
        changed.namespaces.retain(|one| one.nsid != nsid);
        changed.namespaces.push(added);
        changed.namespaces.sort_by_key(|one| one.nsid);
        if let Err(refused) = self.keep(&mut state, changed) {
            let _ = self.node.remove_namespace(settings.id);
            // Hosts have seen it, and may have written: its file stays.
            return Err(refused);
        }
        Ok(describe(&report, true))
    }

    fn free_nsid(&self) -> Option<u32> {
        let served = self.node.namespaces().into_iter().map(|one| one.settings.id.0);
        let taken: BTreeSet<u32> =
            served.chain(self.node.offline().into_iter().map(|(one, _)| one.id.0)).collect();
        (1..=NAMESPACE_ID_MAX).find(|nsid| !taken.contains(nsid))
    }

    /// Removes a namespace that was added. Its device keeps what it holds.
    ///
    /// # Errors
    /// Why it is still there; or that it is gone and was not closed in order.
    pub fn remove_namespace(&self, nsid: u32) -> Result<(), Refused> {
        let mut state = self.state();
        if !state.namespaces.iter().any(|one| one.nsid == nsid) {
            let served = self.node.namespaces().iter().any(|one| one.settings.id.0 == nsid);
            return Err(if served {
                Refused::Invalid(format!("namespace {nsid} is of the configuration: take it out there"))
            } else {
                Refused::Missing(format!("there is no namespace {nsid}"))
            });
        }
        let mut changed = state.clone();
        changed.namespaces.retain(|one| one.nsid != nsid);
        self.keep(&mut state, changed)?;
        Ok(self.node.remove_namespace(NamespaceId(nsid))?)
    }

    /// Who may connect: names of hosts, "any" for every host.
    pub fn hosts(&self) -> BTreeSet<String> {
        self.state().hosts.clone().unwrap_or_else(|| self.configured_hosts.clone())
    }

    /// Lets a host connect, or any.
    ///
    /// # Errors
    /// Why it may not.
    pub fn allow(&self, name: &str) -> Result<(), Refused> {
        if name != ANY {
            nqn::check(name)
                .map_err(|why| Refused::Invalid(format!("\"{name}\" is no host's name: {why}")))?;
        }
        self.change_hosts(|hosts| {
            hosts.insert(name.to_owned());
            Ok(())
        })
    }

    /// Lets a host connect no more, or no longer any; those that may not are disconnected.
    ///
    /// # Errors
    /// When it is not listed.
    pub fn deny(&self, name: &str) -> Result<(), Refused> {
        self.change_hosts(|hosts| match hosts.remove(name) {
            true => Ok(()),
            false if hosts.contains(ANY) => Err(Refused::Missing(format!(
                "{name} is not listed, and any host may connect: deny \"any\", and allow those that may"
            ))),
            false => Err(Refused::Missing(format!("{name} is not listed"))),
        })
    }

    fn change_hosts(
        &self,
        change: impl FnOnce(&mut BTreeSet<String>) -> Result<(), Refused>,
    ) -> Result<(), Refused> {
        let mut state = self.state();
        let mut hosts = state.hosts.clone().unwrap_or_else(|| self.configured_hosts.clone());
        change(&mut hosts)?;
        let changed = State { hosts: Some(hosts.clone()), ..state.clone() };
        self.keep(&mut state, changed)?;
        self.node.target().set_hosts(hosts_of(&hosts));
        Ok(())
    }

    /// The groups of asymmetric access that namespaces are in, or that were given a state.
    pub fn ana(&self) -> Vec<AnaGroup> {
        let describe = |(group, state)| AnaGroup { group, state: ana_name(state).to_owned() };
        self.node.target().ana_states().into_iter().map(describe).collect()
    }

    /// Sets the state of a group.
    ///
    /// # Errors
    /// Why it has not changed.
    pub fn set_ana(&self, group: u32, name: &str) -> Result<(), Refused> {
        let names = ANA_STATES.map(|(name, _)| name).join(", ");
        let new = ana_state(name).ok_or_else(|| Refused::Invalid(format!("state: one of {names}")))?;
        if !(1..=ANA_GROUPS_MAX).contains(&group) {
            return Err(Refused::Invalid(format!("group: must be 1 to {ANA_GROUPS_MAX}")));
        }
        let mut state = self.state();
        let mut changed = state.clone();
        changed.ana.insert(group.to_string(), name.to_owned());
        self.keep(&mut state, changed)?;
        self.node.target().set_ana_state(group, new);
        Ok(())
    }

    /// Who is served where and when.
    pub fn scheduling(&self) -> SchedulingSettings {
        SchedulingSettings::of(&self.node.scheduling().settings())
    }

    /// Changes it, now and after every restart.
    ///
    /// # Errors
    /// Why it has not changed.
    pub fn set_scheduling(&self, change: SchedulingSettings) -> Result<(), Refused> {
        let mut state = self.state();
        let scheduling = self.node.scheduling();
        let settings = change.applied(&scheduling.settings()).map_err(Refused::Invalid)?;
        let mut changed = state.clone();
        changed.scheduling = changed.scheduling.and(change);
        self.keep(&mut state, changed)?;
        self.node.set_scheduling(settings).map_err(|error| Refused::Invalid(error.to_string()))
    }

    /// What the monitor saw last.
    ///
    /// # Errors
    /// While no window has ended.
    pub fn window(&self) -> Result<WindowReport, Refused> {
        let window = self.node.scheduling().window();
        let none = || Refused::Missing("no window has ended yet: the first takes as long as one".to_owned());
        window.map(|window| WindowReport::of(&window)).ok_or_else(none)
    }

    /// How the node is.
    pub fn figures(&self) -> Figures {
        let target = self.node.target();
        let number = |count: usize| count as u64;
        let cores = self.node.cores();
        let cores = cores.iter().map(|core| CoreFigures {
            connections: number(core.connections),
            requests: number(core.requests),
            buffer_bytes: number(core.buffer_bytes),
            buffer_memory_bytes: number(core.buffer_memory_bytes),
            device_operations: number(core.device_operations),
            background_tasks: number(core.background_tasks),
            leaving: number(core.leaving),
        });
        Figures {
            connections: number(target.connections()),
            controllers: number(target.controllers().len()),
            namespaces: number(self.node.namespaces().len()),
            keys: self.node.statistics().keys,
            errors: target.statistics().errors,
            cores: cores.collect(),
        }
    }

    /// The node.
    pub fn node(&self) -> &RunningNode {
        &self.node
    }

    /// Tells the health log how long the node has run and how it is; with `keep` the state file, too.
    pub fn note_health(&self, keep: bool) {
        let (run_seconds, busy_seconds) = (self.run_seconds(), self.busy_seconds());
        let target = self.node.target();
        target.set_health(HealthFacts {
            power_on_seconds: run_seconds,
            busy_seconds,
            read_only: self.node.is_read_only(),
            ..target.health()
        });
        let mut state = self.state();
        let changed = State { run_seconds, busy_seconds, ..state.clone() };
        if let Some(file) = self.file.as_ref().filter(|_| keep) {
            match file.save(&changed) {
                Ok(()) => *state = changed,
                Err(error) => tracing::warn!(%error, "how long the node has run is not kept"),
            }
        }
    }

    fn run_seconds(&self) -> u64 {
        self.before.0 + (self.machine.now)().since(self.started).0 / SECOND
    }

    fn busy_seconds(&self) -> u64 {
        let cores = self.node.cores();
        let busy: u64 = cores.iter().map(|core| core.busy.0 / SECOND).sum();
        self.before.1 + busy / cores.len().max(1) as u64
    }

    /// Stops the node, and keeps that it ended in order.
    ///
    /// # Errors
    /// Why it did not end in order.
    pub fn stop(self) -> Result<(), StopError> {
        let (run_seconds, busy_seconds) = (self.run_seconds(), self.busy_seconds());
        let state = self.state.into_inner().unwrap_or_else(PoisonError::into_inner);
        self.node.stop()?;
        if let Some(file) = &self.file
            && let Err(error) = file.save(&State { run_seconds, busy_seconds, running: false, ..state })
        {
            tracing::warn!(%error, "that the node ended in order is not kept");
        }
        Ok(())
    }
}

/// An absolute path, whatever the node's directory will be at its next start.
fn absolute(device: &str) -> Result<String, Refused> {
    if device == MEMORY {
        return Ok(device.to_owned());
    }
    let path = std::path::absolute(Path::new(device));
    let path = path.map_err(|error| Refused::Invalid(format!("device {device}: {error}")))?;
    path.into_os_string().into_string().map_err(|_| Refused::Invalid("device: no UTF-8".to_owned()))
}

fn kind_of(content: &Content) -> (Kind, Option<u32>) {
    match content {
        Content::KeyValue { .. } => (Kind::Kv, None),
        Content::Blocks { block_bytes } => (Kind::Block, Some(*block_bytes)),
    }
}

fn device_name(device: &DeviceSettings) -> String {
    match device {
        DeviceSettings::Memory { .. } => MEMORY.to_owned(),
        DeviceSettings::File { path, .. } => path.display().to_string(),
    }
}

fn describe(report: &NamespaceReport, added: bool) -> Namespace {
    let (kind, block_bytes) = kind_of(&report.settings.content);
    Namespace {
        nsid: report.settings.id.0,
        kind,
        device: report.device.clone(),
        size_bytes: report.size_bytes,
        used_bytes: report.used_bytes,
        keys: report.keys,
        block_bytes,
        ana_group: report.settings.ana_group,
        added,
        offline: None,
    }
}
