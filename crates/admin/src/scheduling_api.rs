//! The documents of scheduling: what an operator sets, and what the monitor saw in its last window.
//!
//! ```text
//!   GET  /v2/scheduling            SchedConfigPatch with every field
//!   PUT  /v2/scheduling            SchedConfigPatch with the fields to change
//!   GET  /v2/scheduling/interval   SchedulingReport, or 404 before the first sampling interval has ended
//! ```
//! Words on one side, `octokv_sched` on the other. Ranges are held there; a name or number that may not be is refused with
//! those that may.

use octokv_base::Nanos;
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

/// What may be set, each for itself. The defaults are those of [`Settings`].
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SchedConfigPatch {
    /// none, round-robin, proportional, inter, intra, hybrid, auto or fair.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policy: Option<String>,
    /// W: how long is measured before the next choice, in milliseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub interval_ms: Option<u64>,
    /// T_OL of OctoKV.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub overload: Option<f64>,
    /// T_LB of OctoKV, a difference.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub imbalance_difference: Option<f64>,
    /// T_LB of OctoFAS, a ratio.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub imbalance_ratio: Option<f64>,
    /// At or below this fairness flows are treated unfairly.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fairness: Option<f64>,
    /// Backwardings for each time that a dense flow is more intense than the sparse ones.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub alpha: Option<f64>,
    /// The most backwardings of a request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub requeues_max: Option<u32>,
    /// How long a request is held back at the most, in microseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub held_max_us: Option<u64>,
    /// Whose requests `inter` moves: all, dense or sparse.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub migrate_tenants: Option<String>,
    /// Requests of a core that its fair queue lets run at a time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub in_flight: Option<u32>,
    /// The most operations a second of a host on a core under `fair`; 0 for no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub operations_per_s: Option<u64>,
    /// The most bytes a second of a host on a core under `fair`; 0 for no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes_per_s: Option<u64>,
    /// How much of unused limits is kept, in milliseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub burst_ms: Option<u64>,
    /// What these hosts have under `fair` instead of the above.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub hosts: BTreeMap<String, TenantQosPatch>,
}

/// What one host has, each for itself; what is not given is what all have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TenantQosPatch {
    /// Its part beside the others', who have 1: 1 to 1000.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weight: Option<u32>,
    /// The most operations a second on a core; 0 for no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub operations_per_s: Option<u64>,
    /// The most bytes a second on a core; 0 for no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes_per_s: Option<u64>,
    /// How much of unused limits is kept, in milliseconds.
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

    /// Both, where both say something the later one.
    fn merge(self, later: TenantQosPatch) -> TenantQosPatch {
        TenantQosPatch {
            weight: later.weight.or(self.weight),
            operations_per_s: later.operations_per_s.or(self.operations_per_s),
            bytes_per_s: later.bytes_per_s.or(self.bytes_per_s),
            burst_ms: later.burst_ms.or(self.burst_ms),
        }
    }

    /// Whether nothing is said.
    pub fn is_empty(&self) -> bool {
        *self == TenantQosPatch::default()
    }
}

impl SchedConfigPatch {
    /// All of them, as they are.
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

    /// Settings with these changed.
    ///
    /// # Errors
    /// What may not be, and what may.
    pub fn apply_to(&self, config: &SchedConfig) -> Result<SchedConfig, String> {
        let mut new = config.clone();
        let name = |error: octokv_sched::SettingError| error.to_string();
        if let Some(policy) = &self.policy {
            new.policy = policy.parse().map_err(name)?;
        }
        if let Some(selected) = &self.migrate_tenants {
            new.migrate_tenants = selected.parse().map_err(name)?;
        }
        // Saturated, so that what is beyond every range is refused as that.
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

    /// Both, where both say something the later one.
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

    /// Whether nothing is said.
    pub fn is_empty(&self) -> bool {
        *self == SchedConfigPatch::default()
    }
}

/// One core in a window.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CoreSchedulingReport {
    /// The busy part of it, 0 to 1.
    pub utilisation: f64,
    /// R_oF, R_KV and R_D: how its busy time was divided.
    pub target_share: f64,
    /// R_KV.
    pub kv_share: f64,
    /// R_D.
    pub device_share: f64,
    /// Its load as if nothing had been moved.
    pub natural_load: f64,
    /// Requests of its connections that were begun and not answered, on average.
    pub queue_depth: f64,
    /// Requests of its connections.
    pub requests: u64,
    /// Of these, that ran on other cores.
    pub offloaded: u64,
    /// Requests of other cores that it ran.
    pub executed_for_others: u64,
}

/// One flow in a window.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TenantSchedulingReport {
    /// Its host; empty for all hosts that are not told apart.
    pub host: String,
    /// Its intensity: requests that were answered a second.
    pub operations_s: f64,
    /// Bytes of its connections a second, both ways.
    pub bytes_s: f64,
    /// The mean time of a request in the node, and how much of it was waiting behind other flows, in microseconds.
    pub latency_us: f64,
    /// How much of it.
    pub waited_us: f64,
    /// The network's part of its response time, in microseconds; 0 where it is not known.
    pub round_trip_us: f64,
    /// How many times longer responses took than they would have alone; nothing where none came.
    pub slowdown: Option<f64>,
    /// Whether it is dense, whether its requests may move, and how often those that stay go back.
    pub dense: bool,
    /// Whether they may move.
    pub migrates: bool,
    /// How often they go back.
    pub requeues: u32,
}

/// What the monitor saw in a window, and what was chosen by it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SchedulingReport {
    /// Its number since the start.
    pub number: u64,
    /// How long it was, in milliseconds.
    pub length_ms: f64,
    /// The policy that chose.
    pub policy: String,
    /// What it chose: nothing, balance, inter, intra, hybrid or fair.
    pub action: String,
    /// Whether a core was above T_OL.
    pub overloaded: bool,
    /// Whether loads were out of balance.
    pub imbalanced: bool,
    /// Whether flows were treated unfairly.
    pub unfair: bool,
    /// F: the least slowdown over the most.
    pub fairness: f64,
    /// LB: the least utilisation over the most, as it was measured.
    pub load_balance: f64,
    /// The same of loads as if nothing had been moved, which is what is chosen by.
    pub natural_load_balance: f64,
    /// Which core measured.
    pub measured_by: usize,
    /// How long that took it, in microseconds.
    pub took_us: f64,
    /// By core.
    pub cores: Vec<CoreSchedulingReport>,
    /// The flows there were.
    pub tenants: Vec<TenantSchedulingReport>,
}

impl SchedulingReport {
    /// Of a window.
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
                // Whoever left before the window ended has no name any more.
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
                    // JSON has no infinity: a flow that is not answered at all has none.
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
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use octokv_sched::Policy;

    #[test]
    fn all_settings_come_back_and_only_those_given_change() {
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
