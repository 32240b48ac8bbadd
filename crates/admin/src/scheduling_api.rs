//! JSON documents of scheduling: the configuration, and the report of the last sampling interval.
//!
//! ```text
//!   GET  /v2/scheduling            SchedConfigPatch with every field
//!   PUT  /v2/scheduling            SchedConfigPatch with the fields to change
//!   GET  /v2/scheduling/interval   SchedulingReport, or 404 before the first sampling interval has ended
//! ```
//! Conversions between these documents and `octokv_sched`, which validates the values.

use crate::device_load_report::DeviceLoadReport;
use crate::log_report::LogReport;
use crate::tree_report::TreeReport;
use octokv_base::Nanos;
use octokv_engine::CompactionStatistics;
use octokv_node::NamespaceStatus;
use octokv_node::monitor::IntervalReport;
use octokv_node::tenants::OVERFLOW_TENANT;
use octokv_sched::{PolicyAction, SchedConfig, TenantId, TenantQos};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Path of the scheduling configuration.
pub const SCHEDULING_PATH: &str = "/v2/scheduling";
/// Path of the report of the last complete sampling interval.
pub const SCHEDULING_INTERVAL_PATH: &str = "/v2/scheduling/interval";
/// Paths of version 1 and their successors: the documents of version 1 had other field names.
pub const RENAMED_PATHS: [(&str, &str); 2] =
    [("/v1/scheduling", SCHEDULING_PATH), ("/v1/scheduling/window", SCHEDULING_INTERVAL_PATH)];
/// Former names of fields of [`SchedConfigPatch`], each with the present name.
pub const RENAMED_SETTINGS: [(&str, &str); 3] =
    [("window_ms", "interval_ms"), ("backwardings_max", "requeues_max"), ("move_flows", "migrate_tenants")];

/// The present name of a scheduling setting, if `key` is a former name.
pub fn renamed_setting(key: &str) -> Option<&'static str> {
    RENAMED_SETTINGS.iter().find(|(old, _)| *old == key).map(|(_, new)| *new)
}

/// The field name in a deserialization error of serde that reads "… unknown field `NAME`, expected …".
pub fn unknown_field(message: &str) -> Option<&str> {
    let (_, rest) = message.split_once("unknown field `")?;
    rest.split_once('`').map(|(name, _)| name)
}

/// A partial scheduling configuration: absent fields leave a setting unchanged. Defaults are those of [`SchedConfig`].
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SchedConfigPatch {
    /// none, round-robin, proportional, inter, intra, hybrid, auto or fair.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policy: Option<String>,
    /// W: length of a sampling interval in milliseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub interval_ms: Option<u64>,
    /// T_OL of OctoKV: load of a core, 0 to 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub overload: Option<f64>,
    /// T_LB of OctoKV: difference of loads, 0 to 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub imbalance_difference: Option<f64>,
    /// T_LB of OctoFAS: ratio of loads, 0 to 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub imbalance_ratio: Option<f64>,
    /// Tenants are treated unfairly at or below this ratio of slowdowns, 0 to 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fairness: Option<f64>,
    /// Requeues per unit of a dense tenant's intensity ÷ the mean of sparse tenants.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub alpha: Option<f64>,
    /// Maximum requeues of a request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub requeues_max: Option<u32>,
    /// Maximum time of a request in the requeue queue, in microseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub held_max_us: Option<u64>,
    /// Tenants whose requests `inter` migrates: all, dense or sparse.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub migrate_tenants: Option<String>,
    /// Maximum requests in flight from a core's fair queue.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub in_flight: Option<u32>,
    /// Limit in operations per second for each host on each core under `fair`; 0 for no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub operations_per_s: Option<u64>,
    /// Limit in bytes per second for each host on each core under `fair`; 0 for no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes_per_s: Option<u64>,
    /// Burst tolerance of the limits, in milliseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub burst_ms: Option<u64>,
    /// QoS of single hosts under `fair`, by NQN, instead of the above.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub hosts: BTreeMap<String, TenantQosPatch>,
}

/// A partial QoS of one host: absent fields keep their value or the default of all hosts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TenantQosPatch {
    /// Share in proportion to other hosts' weights (default 1), 1 to 1000.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weight: Option<u32>,
    /// Limit in operations per second on each core; 0 for no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub operations_per_s: Option<u64>,
    /// Limit in bytes per second on each core; 0 for no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes_per_s: Option<u64>,
    /// Burst tolerance of the limits, in milliseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub burst_ms: Option<u64>,
}

impl TenantQosPatch {
    fn from_qos(config: &TenantQos) -> TenantQosPatch {
        TenantQosPatch {
            weight: Some(config.weight),
            operations_per_s: Some(config.operations_per_s.unwrap_or(0)),
            bytes_per_s: Some(config.bytes_per_s.unwrap_or(0)),
            burst_ms: Some(config.burst.0 / 1_000_000),
        }
    }

    fn apply_to(self, mut config: TenantQos) -> TenantQos {
        config.weight = self.weight.unwrap_or(config.weight);
        let limit = |into: &mut Option<u64>, value: Option<u64>| {
            *into = value.map_or(*into, |value| (value > 0).then_some(value));
        };
        limit(&mut config.operations_per_s, self.operations_per_s);
        limit(&mut config.bytes_per_s, self.bytes_per_s);
        config.burst = self.burst_ms.map_or(config.burst, |ms| Nanos(ms.saturating_mul(1_000_000)));
        config
    }

    /// Combines two patches; `later` takes precedence.
    fn merge(self, later: TenantQosPatch) -> TenantQosPatch {
        TenantQosPatch {
            weight: later.weight.or(self.weight),
            operations_per_s: later.operations_per_s.or(self.operations_per_s),
            bytes_per_s: later.bytes_per_s.or(self.bytes_per_s),
            burst_ms: later.burst_ms.or(self.burst_ms),
        }
    }

    /// Whether no field is present.
    pub fn is_empty(&self) -> bool {
        *self == TenantQosPatch::default()
    }
}

impl SchedConfigPatch {
    /// All settings of a configuration.
    pub fn from_config(config: &SchedConfig) -> SchedConfigPatch {
        SchedConfigPatch {
            policy: Some(config.policy.to_string()),
            interval_ms: Some(config.interval.0 / 1_000_000),
            overload: Some(config.overload),
            imbalance_difference: Some(config.imbalance_difference),
            imbalance_ratio: Some(config.imbalance_ratio),
            fairness: Some(config.fairness),
            alpha: Some(config.alpha),
            requeues_max: Some(config.requeues_max),
            held_max_us: Some(config.held_max.0 / 1_000),
            migrate_tenants: Some(config.migrate_tenants.to_string()),
            in_flight: Some(config.in_flight),
            operations_per_s: Some(config.default_qos.operations_per_s.unwrap_or(0)),
            bytes_per_s: Some(config.default_qos.bytes_per_s.unwrap_or(0)),
            burst_ms: Some(config.default_qos.burst.0 / 1_000_000),
            hosts: config
                .tenants
                .iter()
                .map(|(host, tenant)| (host.clone(), TenantQosPatch::from_qos(tenant)))
                .collect(),
        }
    }

    /// Applies the patch to a configuration.
    ///
    /// # Errors
    /// A message with the first invalid setting and its valid values.
    pub fn apply_to(&self, config: &SchedConfig) -> Result<SchedConfig, String> {
        let mut new = config.clone();
        let name = |error: octokv_sched::SettingError| error.to_string();
        if let Some(policy) = &self.policy {
            new.policy = policy.parse().map_err(name)?;
        }
        if let Some(selected) = &self.migrate_tenants {
            new.migrate_tenants = selected.parse().map_err(name)?;
        }
        // Saturates, so that a value beyond every range fails the range check.
        let span = |into: &mut Nanos, value: Option<u64>, unit: u64| {
            *into = value.map_or(*into, |value| Nanos(value.saturating_mul(unit)));
        };
        span(&mut new.interval, self.interval_ms, 1_000_000);
        span(&mut new.held_max, self.held_max_us, 1_000);
        new.overload = self.overload.unwrap_or(new.overload);
        new.imbalance_difference = self.imbalance_difference.unwrap_or(new.imbalance_difference);
        new.imbalance_ratio = self.imbalance_ratio.unwrap_or(new.imbalance_ratio);
        new.fairness = self.fairness.unwrap_or(new.fairness);
        new.alpha = self.alpha.unwrap_or(new.alpha);
        new.requeues_max = self.requeues_max.unwrap_or(new.requeues_max);
        new.in_flight = self.in_flight.unwrap_or(new.in_flight);
        let Self { operations_per_s, bytes_per_s, burst_ms, .. } = *self;
        new.default_qos = TenantQosPatch { weight: None, operations_per_s, bytes_per_s, burst_ms }
            .apply_to(new.default_qos);
        for (host, change) in &self.hosts {
            let before = new.qos_of(host);
            new.tenants.insert(host.clone(), change.apply_to(before));
        }
        new.check().map_err(name)?;
        Ok(new)
    }

    /// Combines two patches; `later` takes precedence.
    #[must_use]
    pub fn merge(self, later: SchedConfigPatch) -> SchedConfigPatch {
        SchedConfigPatch {
            policy: later.policy.or(self.policy),
            interval_ms: later.interval_ms.or(self.interval_ms),
            overload: later.overload.or(self.overload),
            imbalance_difference: later.imbalance_difference.or(self.imbalance_difference),
            imbalance_ratio: later.imbalance_ratio.or(self.imbalance_ratio),
            fairness: later.fairness.or(self.fairness),
            alpha: later.alpha.or(self.alpha),
            requeues_max: later.requeues_max.or(self.requeues_max),
            held_max_us: later.held_max_us.or(self.held_max_us),
            migrate_tenants: later.migrate_tenants.or(self.migrate_tenants),
            in_flight: later.in_flight.or(self.in_flight),
            operations_per_s: later.operations_per_s.or(self.operations_per_s),
            bytes_per_s: later.bytes_per_s.or(self.bytes_per_s),
            burst_ms: later.burst_ms.or(self.burst_ms),
            hosts: later.hosts.into_iter().fold(self.hosts, |mut hosts, (host, change)| {
                let before = hosts.remove(&host).unwrap_or_default();
                hosts.insert(host, before.merge(change));
                hosts
            }),
        }
    }

    /// Whether no field is present.
    pub fn is_empty(&self) -> bool {
        *self == SchedConfigPatch::default()
    }
}

/// Metrics of one core in a sampling interval.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CoreSchedulingReport {
    /// Busy part of the interval, 0 to 1.
    pub utilisation: f64,
    /// R_oF: share of sockets and protocol in its busy time, 0 to 1.
    pub target_share: f64,
    /// R_KV: share of the storage engine.
    pub kv_share: f64,
    /// R_D: share of device submissions and completions.
    pub device_share: f64,
    /// Load without migration, in parts of one core.
    pub natural_load: f64,
    /// Mean number of requests of its connections in progress.
    pub queue_depth: f64,
    /// Requests of its connections.
    pub requests: u64,
    /// Part of `requests` executed on other cores.
    pub offloaded: u64,
    /// Requests of other cores' connections that it executed.
    pub executed_for_others: u64,
}

/// Metrics of one tenant in a sampling interval.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TenantSchedulingReport {
    /// Host NQN; empty for the tenant of all hosts beyond the limit.
    pub host: String,
    /// Intensity: completed requests per second.
    pub operations_s: f64,
    /// Bytes of its connections per second, both directions.
    pub bytes_s: f64,
    /// Mean time of a request in the node, in microseconds.
    pub latency_us: f64,
    /// Part of `latency_us` spent waiting behind other tenants.
    pub waited_us: f64,
    /// Network part of the response time, in microseconds; 0 if unknown.
    pub round_trip_us: f64,
    /// Response time ÷ response time alone; `None` without a response.
    pub slowdown: Option<f64>,
    /// Whether it is dense.
    pub dense: bool,
    /// Whether its requests may migrate.
    pub migrates: bool,
    /// How often its local requests are requeued.
    pub requeues: u32,
}

/// Metrics of a sampling interval and the resulting decision.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SchedulingReport {
    /// Number of the interval since the start.
    pub number: u64,
    /// Its length in milliseconds.
    pub length_ms: f64,
    /// The configured policy.
    pub policy: String,
    /// The selected action: nothing, balance, inter, intra, hybrid or fair.
    pub action: String,
    /// Whether a core was above T_OL.
    pub overloaded: bool,
    /// Whether loads were imbalanced.
    pub imbalanced: bool,
    /// Whether tenants were treated unfairly.
    pub unfair: bool,
    /// F: least slowdown ÷ greatest, 0 to 1.
    pub fairness: f64,
    /// LB: least utilisation ÷ greatest, as measured.
    pub load_balance: f64,
    /// LB of the loads without migration: the input of decisions.
    pub natural_load_balance: f64,
    /// Index of the core that computed the metrics.
    pub measured_by: usize,
    /// Time of that computation in microseconds.
    pub took_us: f64,
    /// Metrics by core.
    pub cores: Vec<CoreSchedulingReport>,
    /// Metrics by tenant.
    pub tenants: Vec<TenantSchedulingReport>,
    /// Caches of values, by namespace; an earlier node has none.
    #[serde(default)]
    pub caches: Vec<CacheReport>,
    /// Space that was written ahead of its use, by namespace that has any; an earlier node reports none.
    #[serde(default)]
    pub prepared: Vec<PreparedReport>,
    /// Values in pieces and their compaction, by namespace that has or had any; an earlier node reports none.
    #[serde(default)]
    pub compacted: Vec<CompactionReport>,
    /// Trees of ordered engines, by namespace that has one; an earlier node reports none.
    #[serde(default)]
    pub trees: Vec<TreeReport>,
    /// Logs of log engines, by namespace that has them; an earlier node reports none.
    #[serde(default)]
    pub logs: Vec<LogReport>,
    /// The devices of namespaces on several; an earlier node reports none.
    #[serde(default)]
    pub devices: Vec<DeviceLoadReport>,
}

/// The values in pieces of a namespace, and what compaction did; its counts are since the namespace was opened.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CompactionReport {
    /// Namespace ID.
    pub nsid: u32,
    /// Values that are in pieces now.
    pub values_in_pieces: u64,
    /// Values in pieces that became one record.
    pub joined_values: u64,
    /// Records that were moved to make a run of free space.
    pub moved_records: u64,
    /// The records of both in bytes.
    pub moved_bytes: u64,
}

/// The never-written space of a namespace's file that was written with zeros ahead of its use.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PreparedReport {
    /// Namespace ID.
    pub nsid: u32,
    /// Bytes since the namespace was opened.
    pub prepared_bytes: u64,
}

/// The cache of values of a namespace; its counts are since the namespace was opened.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CacheReport {
    /// Namespace ID.
    pub nsid: u32,
    /// Its configured size in bytes.
    pub capacity_bytes: u64,
    /// Memory of its entries in bytes, their part of the tables included.
    pub used_bytes: u64,
    /// Number of entries.
    pub entries: u64,
    /// Reads that an entry served.
    pub hits: u64,
    /// Reads that went to the engine.
    pub misses: u64,
    /// Entries that had to leave for others.
    pub evictions: u64,
}

impl CacheReport {
    /// The cache of a namespace, if it has one.
    pub fn of(namespace: &NamespaceStatus) -> Option<CacheReport> {
        let cache = namespace.cache?;
        Some(CacheReport {
            nsid: namespace.config.id.0,
            capacity_bytes: cache.capacity_bytes,
            used_bytes: cache.used_bytes,
            entries: cache.entries,
            hits: cache.hits,
            misses: cache.misses,
            evictions: cache.evictions,
        })
    }
}

impl PreparedReport {
    /// What was prepared of a namespace, if anything was.
    pub fn of(namespace: &NamespaceStatus) -> Option<PreparedReport> {
        let (nsid, prepared_bytes) = (namespace.config.id.0, namespace.prepared_bytes);
        (prepared_bytes > 0).then_some(PreparedReport { nsid, prepared_bytes })
    }
}

impl CompactionReport {
    /// That of a namespace, if it has values in pieces or compaction did something. A tree has a [`TreeReport`] instead.
    pub fn of(namespace: &NamespaceStatus) -> Option<CompactionReport> {
        let compaction = namespace.compaction;
        (compaction != CompactionStatistics::default() && namespace.tree.is_none()).then_some(
            CompactionReport {
                nsid: namespace.config.id.0,
                values_in_pieces: compaction.values_in_pieces,
                joined_values: compaction.joined_values,
                moved_records: compaction.moved_records,
                moved_bytes: compaction.moved_bytes,
            },
        )
    }
}

impl SchedulingReport {
    /// Converts the monitor's report.
    pub fn from_interval(interval: &IntervalReport) -> SchedulingReport {
        let cores = interval.metrics.cores.iter().map(|core| CoreSchedulingReport {
            utilisation: core.utilisation,
            target_share: core.shares.target,
            kv_share: core.shares.kv,
            device_share: core.shares.device,
            natural_load: core.natural.total(),
            queue_depth: core.queue_depth,
            requests: core.own_requests,
            offloaded: core.offloaded,
            executed_for_others: core.executed_for_others,
        });
        let host = |tenant: TenantId| {
            interval
                .hosts
                .iter()
                .find(|(one, _)| *one == tenant)
                .map(|(_, host)| host.clone())
                // A tenant that disconnected during the interval has no name any more.
                .unwrap_or_else(
                    || if tenant == OVERFLOW_TENANT { String::new() } else { "(gone)".to_owned() },
                )
        };
        let micros = |nanos: Nanos| nanos.0 as f64 / 1e3;
        let tenants =
            interval.metrics.tenants.iter().zip(&interval.counters.tenants).map(|(tenant, counted)| {
                let each = |sum: Nanos| micros(sum) / tenant.requests.max(1) as f64;
                let rule = interval.decision.rule(tenant.tenant);
                TenantSchedulingReport {
                    host: host(tenant.tenant),
                    operations_s: tenant.intensity,
                    bytes_s: tenant.bytes_per_s,
                    latency_us: each(counted.latency),
                    waited_us: each(counted.waited),
                    round_trip_us: micros(counted.round_trip),
                    // JSON has no infinity: a tenant without any response has no slowdown.
                    slowdown: tenant.slowdown.filter(|slowdown| slowdown.is_finite()),
                    dense: rule.dense,
                    migrates: rule.migrates,
                    requeues: rule.requeues,
                }
            });
        let decision = &interval.decision;
        let action = match decision.action {
            PolicyAction::Nothing => "nothing",
            PolicyAction::Balance(_) => "balance",
            PolicyAction::Inter => "inter",
            PolicyAction::Intra => "intra",
            PolicyAction::Hybrid => "hybrid",
            PolicyAction::Fair => "fair",
        };
        SchedulingReport {
            number: interval.number,
            length_ms: micros(interval.length) / 1e3,
            policy: interval.config.policy.to_string(),
            action: action.to_owned(),
            overloaded: decision.overloaded,
            imbalanced: decision.imbalanced,
            unfair: decision.unfair,
            fairness: interval.metrics.fairness,
            load_balance: interval.metrics.utilisation_balance,
            natural_load_balance: interval.metrics.natural_balance,
            measured_by: interval.measured_by_core,
            took_us: micros(interval.measure_duration),
            cores: cores.collect(),
            tenants: tenants.collect(),
            caches: Vec::new(),
            prepared: Vec::new(),
            compacted: Vec::new(),
            trees: Vec::new(),
            logs: Vec::new(),
            devices: Vec::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use octokv_sched::Policy;

    #[test]
    fn settings_round_trip_and_a_patch_changes_only_its_fields() {
        let defaults = SchedConfig::default();
        assert_eq!(SchedConfigPatch::from_config(&defaults).apply_to(&defaults), Ok(defaults.clone()));
        let change = SchedConfigPatch {
            policy: Some("hybrid".to_owned()),
            interval_ms: Some(250),
            operations_per_s: Some(70),
            ..SchedConfigPatch::default()
        };
        let new = change.apply_to(&defaults).unwrap();
        assert_eq!((new.policy, new.interval), (Policy::Hybrid, Nanos::from_millis(250)));
        assert_eq!(new.default_qos.operations_per_s, Some(70));
        let back = SchedConfigPatch { operations_per_s: Some(0), ..change.clone() };
        assert_eq!(change.merge(back).apply_to(&new).unwrap().default_qos.operations_per_s, None);
        assert!(SchedConfigPatch::default().is_empty());
        let of = |weight, operations_per_s| {
            let host = TenantQosPatch { weight, operations_per_s, ..TenantQosPatch::default() };
            SchedConfigPatch { hosts: [("a".to_owned(), host)].into(), ..SchedConfigPatch::default() }
        };
        let both = of(Some(4), None).merge(of(None, Some(9)));
        let tenant = both.apply_to(&defaults).unwrap().qos_of("a");
        assert_eq!((tenant.weight, tenant.operations_per_s), (4, Some(9)));
        assert_eq!(both.apply_to(&defaults).unwrap().qos_of("b"), defaults.default_qos);
    }

    #[test]
    fn invalid_values_fail_with_the_valid_range() {
        for (change, parts) in [
            (r#"{"policy":"hybird"}"#, ["hybird", "hybrid"]),
            (r#"{"interval_ms":9}"#, ["interval", "10 ms"]),
            (r#"{"interval_ms":18446744073709551615}"#, ["interval", "60 s"]),
            (r#"{"overload":1.5}"#, ["overload", "1"]),
            (r#"{"in_flight":0}"#, ["in_flight", "4096"]),
            (r#"{"migrate_tenants":"some"}"#, ["migrate_tenants", "dense"]),
            (r#"{"hosts":{"a":{"weight":0}}}"#, ["weight", "1000"]),
        ] {
            let change: SchedConfigPatch = serde_json::from_str(change).unwrap();
            let error = change.apply_to(&SchedConfig::default()).unwrap_err();
            assert!(parts.iter().all(|part| error.contains(part)), "{error}");
        }
        for (old, new) in RENAMED_SETTINGS {
            let error = serde_json::from_str::<SchedConfigPatch>(&format!("{{\"{old}\":9}}")).unwrap_err();
            assert_eq!(unknown_field(&error.to_string()).and_then(renamed_setting), Some(new));
        }
        let unknown = serde_json::from_str::<SchedConfigPatch>(r#"{"intervals_ms":9}"#).unwrap_err();
        assert!(unknown.to_string().contains("interval_ms"), "{unknown}");
    }
}
