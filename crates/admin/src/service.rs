//! Applies run-time changes to the node and to the state file.
//!
//! In: requests as documents of [`crate::api_types`]. Out: the new state, or an error. Invariants: a change that
//! succeeded is in the file, so a restart finds it; a change that failed has changed neither node nor file. Changes are
//! serialized by the state lock.

use crate::api_types::{
    AddNamespace, AnaGroupStatus, ExistingDataMode, NamespaceSummary, NamespaceType, NodeCoreStatus,
    NodeStatus,
};
use crate::device_load_report::DeviceLoadReport;
use crate::device_names::DeviceNames;
use crate::log_report::LogReport;
use crate::namespace_summary::{namespace_summary, namespace_type};
use crate::scheduling_api::{
    CacheReport, CompactionReport, PreparedReport, SchedConfigPatch, SchedulingReport,
};
use crate::state_file::{AddedNamespace, PersistedState, StateFile};
use crate::tree_report::TreeReport;
use octokv_base::{NamespaceId, Nanos};
use octokv_engine::{EngineKind, FormatConfig};
use octokv_node::{
    ANA_GROUPS_MAX, CommandSetConfig, DeviceOpenError, NAMESPACE_ID_MAX, NamespaceChangeError,
    NamespaceConfig, PREPARE_BYTES_MAX, RunningNode, StartError, StopError,
};
use octokv_nvmf::{AnaState, HealthStatus, HostAcl};
use octokv_wire::nqn;
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Entry of the host list that allows every host.
pub const ANY_HOST: &str = "any";
const DEFAULT_BLOCK_BYTES: u32 = 4096;
const NANOS_PER_SECOND: u64 = 1_000_000_000;

/// A failed change; the text is one sentence for the user.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AdminError {
    /// The request is invalid.
    #[error("{0}")]
    Invalid(String),
    /// The resource does not exist.
    #[error("{0}")]
    NotFound(String),
    /// The resource already exists.
    #[error("{0}")]
    AlreadyExists(String),
    /// The operation failed.
    #[error("{0}")]
    Failed(String),
}

impl From<NamespaceChangeError> for AdminError {
    fn from(error: NamespaceChangeError) -> AdminError {
        let why = error.to_string();
        match error {
            NamespaceChangeError::Exists(_) => AdminError::AlreadyExists(why),
            NamespaceChangeError::Missing(_) | NamespaceChangeError::NoSuchDevice { .. } => {
                AdminError::NotFound(why)
            }
            NamespaceChangeError::Open(StartError::Device { error: DeviceOpenError::NotFound, .. }) => {
                AdminError::Invalid(format!("{why}; with a size (--size) it is created"))
            }
            NamespaceChangeError::Open(_)
            | NamespaceChangeError::DeviceServes(_)
            | NamespaceChangeError::ValueTooLong { .. } => AdminError::Invalid(why),
            NamespaceChangeError::Stopping | NamespaceChangeError::NotClosedCleanly(_) => {
                AdminError::Failed(why)
            }
        }
    }
}

/// Names of the ANA states.
const ANA_STATE_NAMES: [(&str, AnaState); 5] = [
    ("optimized", AnaState::Optimized),
    ("non-optimized", AnaState::NonOptimized),
    ("inaccessible", AnaState::Inaccessible),
    ("persistent-loss", AnaState::PersistentLoss),
    ("change", AnaState::Change),
];

/// The ANA state of this name.
pub fn parse_ana_state(name: &str) -> Option<AnaState> {
    ANA_STATE_NAMES.iter().find(|(word, _)| *word == name).map(|(_, state)| *state)
}

fn ana_state_name(state: AnaState) -> &'static str {
    ANA_STATE_NAMES.iter().find(|(_, one)| *one == state).map_or("unknown", |(word, _)| word)
}

/// The access control list of a list of NQNs.
pub fn host_acl<'a>(names: impl IntoIterator<Item = &'a String>) -> HostAcl {
    let names: BTreeSet<String> = names.into_iter().cloned().collect();
    if names.contains(ANY_HOST) { HostAcl::Any } else { HostAcl::Listed(names) }
}

/// The node configurations of the added namespaces. `format` applies to key-value volumes.
///
/// # Errors
/// A message with the namespace whose identity is not hexadecimal.
pub fn namespace_configs(
    state: &PersistedState,
    format: FormatConfig,
) -> Result<Vec<NamespaceConfig>, String> {
    state.namespaces.iter().map(|added| namespace_config(added, format)).collect()
}

fn namespace_config(added: &AddedNamespace, format: FormatConfig) -> Result<NamespaceConfig, String> {
    let block_bytes = added.block_bytes.unwrap_or(DEFAULT_BLOCK_BYTES);
    let identity = u64::from_str_radix(&added.identity, 16).map_err(|_| {
        format!("namespace {}: identity \"{}\" is not hexadecimal", added.nsid, added.identity)
    })?;
    Ok(NamespaceConfig {
        id: NamespaceId(added.nsid),
        devices: added.device.to_configs(
            added.size_bytes,
            // The smallest block, so that any unit of a key-value volume is a multiple.
            if added.kind == NamespaceType::Kv { 512 } else { block_bytes },
        ),
        drive_profile: None,
        cache_bytes: added.cache_bytes.unwrap_or(0),
        prepare_bytes: added.prepare_bytes.unwrap_or(match added.kind {
            NamespaceType::Kv => PREPARE_BYTES_MAX,
            NamespaceType::Block => 0,
        }),
        command_set: match added.kind {
            NamespaceType::Kv => {
                let engine = added.engine.as_deref().map_or(Ok(EngineKind::default()), str::parse);
                let engine = engine.map_err(|error| format!("namespace {}: engine: {error}", added.nsid))?;
                CommandSetConfig::KeyValue {
                    format: FormatConfig {
                        engine,
                        namespace: added.nsid,
                        swap_bytes: added.swap_bytes.unwrap_or(0),
                        ..format
                    },
                }
            }
            NamespaceType::Block => CommandSetConfig::Blocks { block_bytes },
        },
        // Hosts may have written anything to a block namespace.
        existing_data: match added.kind {
            NamespaceType::Kv => octokv_node::ExistingDataPolicy::Check,
            NamespaceType::Block => octokv_node::ExistingDataPolicy::Keep,
        },
        ana_group: added.ana_group,
        required: false,
        nguid_suffix: identity,
    })
}

/// See the module header.
pub struct AdminService {
    pub(crate) node: RunningNode,
    /// The state file; without it every change fails.
    pub(crate) state_file: Option<StateFile>,
    state: Mutex<PersistedState>,
    /// Host list of the configuration.
    configured_hosts: BTreeSet<String>,
    format: FormatConfig,
    platform: AdminPlatform,
    started_at: Nanos,
    /// Run time and busy time in seconds before this start.
    earlier_run_and_busy_seconds: (u64, u64),
}

/// Clock and randomness.
#[derive(Clone, Copy)]
pub struct AdminPlatform {
    /// Nanoseconds since any fixed point.
    pub now: fn() -> Nanos,
    /// Source of namespace identities.
    pub random: fn() -> std::io::Result<u64>,
}

impl AdminService {
    /// Creates the service of a node that was started with this state.
    pub fn new(
        node: RunningNode,
        file: Option<StateFile>,
        state: PersistedState,
        configured_hosts: BTreeSet<String>,
        platform: AdminPlatform,
    ) -> AdminService {
        let (format, started) = (node.config().format, (platform.now)());
        let before = (state.run_seconds, state.busy_seconds);
        let state = Mutex::new(state);
        AdminService {
            node,
            state_file: file,
            state,
            configured_hosts,
            format,
            platform,
            started_at: started,
            earlier_run_and_busy_seconds: before,
        }
    }

    pub(crate) fn lock_state(&self) -> MutexGuard<'_, PersistedState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Saves a changed state; without a file, or if the write fails, nothing changes.
    pub(crate) fn persist(
        &self,
        state: &mut PersistedState,
        changed: PersistedState,
    ) -> Result<(), AdminError> {
        let Some(file) = &self.state_file else {
            return Err(AdminError::Failed(
                "the node has no state file, so the change would not survive a restart: start it with --state FILE"
                    .to_owned(),
            ));
        };
        file.save(&changed).map_err(|error| AdminError::Failed(error.to_string()))?;
        *state = changed;
        Ok(())
    }

    /// All namespaces in nsid order, offline ones included.
    pub fn namespaces(&self) -> Vec<NamespaceSummary> {
        let state = self.lock_state();
        let added = |nsid| state.namespaces.iter().any(|one| one.nsid == nsid);
        let mut all: Vec<NamespaceSummary> =
            self.node.namespaces().iter().map(|one| namespace_summary(one, added(one.config.id.0))).collect();
        for (config, why) in self.node.offline() {
            let (nsid, device) = (config.id.0, DeviceNames::of_configs(&config.devices));
            let (kind, engine, block_bytes) = namespace_type(&config.command_set);
            all.push(NamespaceSummary {
                nsid,
                kind,
                device,
                devices: Vec::new(),
                size_bytes: 0,
                used_bytes: 0,
                keys: None,
                engine,
                block_bytes,
                cache_bytes: config.cache_bytes,
                prepare_bytes: config.prepare_bytes,
                ana_group: config.ana_group,
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
    /// See [`AdminError`]; neither node nor state file has changed.
    pub fn add_namespace(&self, request: &AddNamespace) -> Result<NamespaceSummary, AdminError> {
        let invalid = |why: &str| AdminError::Invalid(why.to_owned());
        let mut state = self.lock_state();
        if request.kind == NamespaceType::Kv && request.block_bytes.is_some() {
            return Err(invalid("block_size: only for a block namespace"));
        }
        if request.kind == NamespaceType::Kv && request.existing == ExistingDataMode::Keep {
            return Err(invalid("keep: only for a block namespace"));
        }
        if request.kind == NamespaceType::Block && request.swap_bytes.is_some_and(|bytes| bytes > 0) {
            return Err(invalid("swap_bytes: only for a key-value namespace"));
        }
        let engine = self.engine_of(request)?;
        if request.device.is_incomplete() {
            return Err(invalid("device: a path, or \"memory\""));
        }
        if request.device.has_memory() && request.size_bytes.is_none() {
            return Err(invalid("size: required for memory"));
        }
        let nsid = match request.nsid {
            Some(nsid) => nsid,
            None => self.lowest_free_nsid().ok_or_else(|| invalid("nsid: all are in use"))?,
        };
        let identity = (self.platform.random)().map_err(|error| AdminError::Failed(error.to_string()))?;
        let mut added = AddedNamespace {
            nsid,
            kind: request.kind,
            device: request.device.absolute().map_err(AdminError::Invalid)?,
            size_bytes: request.size_bytes,
            engine: engine.map(|kind| kind.name().to_owned()),
            cache_bytes: request.cache_bytes.filter(|&bytes| bytes > 0),
            prepare_bytes: request.prepare_bytes,
            swap_bytes: request.swap_bytes.filter(|&bytes| bytes > 0),
            block_bytes: (request.kind == NamespaceType::Block)
                .then(|| request.block_bytes.unwrap_or(DEFAULT_BLOCK_BYTES)),
            ana_group: request.ana_group.unwrap_or(1),
            identity: format!("{identity:016x}"),
        };
        let mut config = namespace_config(&added, self.format).map_err(AdminError::Failed)?;
        config.existing_data = match request.existing {
            ExistingDataMode::Check => octokv_node::ExistingDataPolicy::Check,
            ExistingDataMode::GiveUp => octokv_node::ExistingDataPolicy::Discard,
            ExistingDataMode::Keep => octokv_node::ExistingDataPolicy::Keep,
        };
        if self.state_file.is_none() {
            // Fails before anything is created.
            self.persist(&mut state, PersistedState::default())?;
        }
        // A dangling symbolic link is the user's file, too.
        let new_files: Vec<PathBuf> =
            added.device.paths().filter(|path| path.symlink_metadata().is_err()).collect();
        let undo_files = |error: AdminError| {
            for path in &new_files {
                // If the removal fails, an unused empty file remains.
                let _ = std::fs::remove_file(path);
            }
            error
        };
        let report = self.node.add_namespace(&config).map_err(|error| undo_files(error.into()))?;
        if !added.device.has_memory() {
            // The files exist from now on: if one is missing at a restart, it must not be created again, empty.
            added.size_bytes = None;
        }
        let mut changed = state.clone();
        changed.namespaces.retain(|one| one.nsid != nsid);
        changed.namespaces.push(added);
        changed.namespaces.sort_by_key(|one| one.nsid);
        if let Err(error) = self.persist(&mut state, changed) {
            let _ = self.node.remove_namespace(config.id);
            // Hosts have seen the namespace and may have written: its file stays.
            return Err(error);
        }
        Ok(namespace_summary(&report, true))
    }

    /// The engine of a namespace to add; `None` for a block namespace.
    fn engine_of(&self, request: &AddNamespace) -> Result<Option<EngineKind>, AdminError> {
        match (request.kind, &request.engine) {
            (NamespaceType::Kv, None) => Ok(Some(self.format.engine)),
            (NamespaceType::Kv, Some(name)) => {
                let unknown = |error| AdminError::Invalid(format!("engine: {error}"));
                name.parse::<EngineKind>().map(Some).map_err(unknown)
            }
            (NamespaceType::Block, None) => Ok(None),
            (NamespaceType::Block, Some(_)) => {
                Err(AdminError::Invalid("engine: only for a key-value namespace".to_owned()))
            }
        }
    }

    fn lowest_free_nsid(&self) -> Option<u32> {
        let served = self.node.namespaces().into_iter().map(|one| one.config.id.0);
        let taken: BTreeSet<u32> =
            served.chain(self.node.offline().into_iter().map(|(one, _)| one.id.0)).collect();
        (1..=NAMESPACE_ID_MAX).find(|nsid| !taken.contains(nsid))
    }

    /// Removes a namespace that was added at run time. The data stays on its device.
    ///
    /// # Errors
    /// See [`AdminError`]; with [`AdminError::Failed`] the namespace may be removed without a clean close.
    pub fn remove_namespace(&self, nsid: u32) -> Result<(), AdminError> {
        let mut state = self.lock_state();
        if !state.namespaces.iter().any(|one| one.nsid == nsid) {
            let served = self.node.namespaces().iter().any(|one| one.config.id.0 == nsid);
            return Err(if served {
                AdminError::Invalid(format!("namespace {nsid} is in the configuration: remove it there"))
            } else {
                AdminError::NotFound(format!("namespace {nsid} does not exist"))
            });
        }
        let mut changed = state.clone();
        changed.namespaces.retain(|one| one.nsid != nsid);
        self.persist(&mut state, changed)?;
        Ok(self.node.remove_namespace(NamespaceId(nsid))?)
    }

    /// The host list: NQNs, "any" for every host.
    pub fn hosts(&self) -> BTreeSet<String> {
        self.lock_state().hosts.clone().unwrap_or_else(|| self.configured_hosts.clone())
    }

    /// Adds a host, or "any", to the host list.
    ///
    /// # Errors
    /// [`AdminError::Invalid`] for an invalid NQN, [`AdminError::Failed`] if the state cannot be saved.
    pub fn allow_host(&self, name: &str) -> Result<(), AdminError> {
        if name != ANY_HOST {
            nqn::check(name)
                .map_err(|why| AdminError::Invalid(format!("\"{name}\" is not a valid NQN: {why}")))?;
        }
        self.update_hosts(|hosts| {
            hosts.insert(name.to_owned());
            Ok(())
        })
    }

    /// Removes a host, or "any", from the host list; hosts no longer allowed are disconnected.
    ///
    /// # Errors
    /// [`AdminError::NotFound`] for a host that is not listed, [`AdminError::Failed`] if the state cannot be saved.
    pub fn deny_host(&self, name: &str) -> Result<(), AdminError> {
        self.update_hosts(|hosts| match hosts.remove(name) {
            true => Ok(()),
            false if hosts.contains(ANY_HOST) => Err(AdminError::NotFound(format!(
                "{name} is not listed, and \"any\" allows every host: deny \"any\" and allow the others by name"
            ))),
            false => Err(AdminError::NotFound(format!("{name} is not listed"))),
        })
    }

    fn update_hosts(
        &self,
        change: impl FnOnce(&mut BTreeSet<String>) -> Result<(), AdminError>,
    ) -> Result<(), AdminError> {
        let mut state = self.lock_state();
        let mut hosts = state.hosts.clone().unwrap_or_else(|| self.configured_hosts.clone());
        change(&mut hosts)?;
        let changed = PersistedState { hosts: Some(hosts.clone()), ..state.clone() };
        self.persist(&mut state, changed)?;
        self.node.target().set_host_acl(host_acl(&hosts));
        Ok(())
    }

    /// The ANA groups with a namespace or with a configured state.
    pub fn ana_groups(&self) -> Vec<AnaGroupStatus> {
        let describe = |(group, state)| AnaGroupStatus { group, state: ana_state_name(state).to_owned() };
        self.node.target().ana_states().into_iter().map(describe).collect()
    }

    /// Sets the state of an ANA group.
    ///
    /// # Errors
    /// [`AdminError::Invalid`] for an unknown state or group, [`AdminError::Failed`] if the state cannot be saved.
    pub fn set_ana_state(&self, group: u32, name: &str) -> Result<(), AdminError> {
        let names = ANA_STATE_NAMES.map(|(name, _)| name).join(", ");
        let new =
            parse_ana_state(name).ok_or_else(|| AdminError::Invalid(format!("state: one of {names}")))?;
        if !(1..=ANA_GROUPS_MAX).contains(&group) {
            return Err(AdminError::Invalid(format!("group: must be 1 to {ANA_GROUPS_MAX}")));
        }
        let mut state = self.lock_state();
        let mut changed = state.clone();
        changed.ana.insert(group.to_string(), name.to_owned());
        self.persist(&mut state, changed)?;
        self.node.target().set_ana_state(group, new);
        Ok(())
    }

    /// The scheduling configuration with every field.
    pub fn scheduling(&self) -> SchedConfigPatch {
        SchedConfigPatch::from_config(&self.node.monitor().config())
    }

    /// Changes the scheduling configuration, now and after every restart.
    ///
    /// # Errors
    /// [`AdminError::Invalid`] with the valid values, [`AdminError::Failed`] if the state cannot be saved.
    pub fn set_scheduling(&self, change: SchedConfigPatch) -> Result<(), AdminError> {
        let mut state = self.lock_state();
        let scheduling = self.node.monitor();
        let config = change.apply_to(&scheduling.config()).map_err(AdminError::Invalid)?;
        let mut changed = state.clone();
        changed.scheduling = changed.scheduling.merge(change);
        self.persist(&mut state, changed)?;
        self.node.set_scheduling(config).map_err(|error| AdminError::Invalid(error.to_string()))
    }

    /// The report of the last complete sampling interval.
    ///
    /// # Errors
    /// [`AdminError::NotFound`] before the first interval has ended.
    pub fn last_interval(&self) -> Result<SchedulingReport, AdminError> {
        let interval = self.node.monitor().last_interval();
        let none = || AdminError::NotFound("the first sampling interval has not ended yet".to_owned());
        let interval = interval.ok_or_else(none)?;
        let namespaces = self.node.namespaces();
        Ok(SchedulingReport {
            caches: namespaces.iter().filter_map(CacheReport::of).collect(),
            prepared: namespaces.iter().filter_map(PreparedReport::of).collect(),
            compacted: namespaces.iter().filter_map(CompactionReport::of).collect(),
            trees: namespaces.iter().flat_map(TreeReport::all_of).collect(),
            logs: namespaces.iter().flat_map(LogReport::all_of).collect(),
            devices: namespaces.iter().flat_map(DeviceLoadReport::all_of).collect(),
            ..SchedulingReport::from_interval(&interval)
        })
    }

    /// Status and resource usage of the node.
    pub fn status(&self) -> NodeStatus {
        let target = self.node.target();
        let number = |count: usize| count as u64;
        let cores = self.node.core_statuses();
        let cores = cores.iter().zip(self.node.processors()).map(|(core, &processor)| NodeCoreStatus {
            processor: number(processor),
            role: core.role.into(),
            connections: number(core.connections),
            requests: number(core.requests),
            buffer_bytes: number(core.buffer_bytes_in_use),
            buffer_memory_bytes: number(core.buffer_bytes_resident),
            device_operations: number(core.device_operations),
            background_tasks: number(core.background_tasks),
            draining_namespaces: number(core.draining_namespaces),
        });
        NodeStatus {
            connections: number(target.connection_count()),
            controllers: number(target.controllers().len()),
            namespaces: number(self.node.namespaces().len()),
            keys: self.node.statistics().keys,
            errors: target.counters().errors,
            cores: cores.collect(),
        }
    }

    /// The running node.
    pub fn node(&self) -> &RunningNode {
        &self.node
    }

    /// Updates the health log with run time, busy time and state; with `persist` also the state file.
    pub fn update_health(&self, persist: bool) {
        let (run_seconds, busy_seconds) = (self.run_seconds(), self.busy_seconds());
        let target = self.node.target();
        target.set_health(HealthStatus {
            power_on_seconds: run_seconds,
            busy_seconds,
            read_only: self.node.is_read_only(),
            degraded: self.node.is_degraded(),
            ..target.health()
        });
        let mut state = self.lock_state();
        let changed = PersistedState { run_seconds, busy_seconds, ..state.clone() };
        if let Some(file) = self.state_file.as_ref().filter(|_| persist) {
            match file.save(&changed) {
                Ok(()) => *state = changed,
                Err(error) => tracing::warn!(%error, "the run time of the node cannot be saved"),
            }
        }
    }

    fn run_seconds(&self) -> u64 {
        self.earlier_run_and_busy_seconds.0
            + (self.platform.now)().since(self.started_at).0 / NANOS_PER_SECOND
    }

    fn busy_seconds(&self) -> u64 {
        let cores = self.node.core_statuses();
        let busy: u64 = cores.iter().map(|core| core.busy_time.0 / NANOS_PER_SECOND).sum();
        self.earlier_run_and_busy_seconds.1 + busy / cores.len().max(1) as u64
    }

    /// Stops the node and saves a clean shutdown.
    ///
    /// # Errors
    /// The error of the node's stop; the state file then keeps an unclean shutdown.
    pub fn stop(self) -> Result<(), StopError> {
        let (run_seconds, busy_seconds) = (self.run_seconds(), self.busy_seconds());
        let state = self.state.into_inner().unwrap_or_else(PoisonError::into_inner);
        self.node.stop()?;
        if let Some(file) = &self.state_file
            && let Err(error) =
                file.save(&PersistedState { run_seconds, busy_seconds, running: false, ..state })
        {
            tracing::warn!(%error, "the clean shutdown cannot be saved");
        }
        Ok(())
    }
}
