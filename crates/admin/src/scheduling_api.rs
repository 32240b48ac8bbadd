//! The documents of scheduling: what an operator sets, and what the monitor saw in its last window.
//!
//! ```text
//!   GET  /v1/scheduling          SchedulingSettings, all of them
//!   PUT  /v1/scheduling          SchedulingSettings, those that change
//!   GET  /v1/scheduling/window   WindowReport, or 404 before the first window has ended
//! ```
//! Words on one side, `octokv_sched` on the other. Ranges are held there; a name or number that may not be is refused with
//! those that may.

use octokv_base::Nanos;
use octokv_node::monitor::Window;
use octokv_node::tenants::OTHERS;
use octokv_sched::{Chosen, FlowId, FlowSettings, Settings};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// What may be set, each for itself. The defaults are those of [`Settings`].
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SchedulingSettings {
    /// none, round-robin, proportional, inter, intra, hybrid, auto or fair.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policy: Option<String>,
    /// W: how long is measured before the next choice, in milliseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub window_ms: Option<u64>,
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
    pub backwardings_max: Option<u32>,
    /// How long a request is held back at the most, in microseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub held_max_us: Option<u64>,
    /// Whose requests `inter` moves: all, dense or sparse.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub move_flows: Option<String>,
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
    pub hosts: BTreeMap<String, HostSettings>,
}

/// What one host has, each for itself; what is not given is what all have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HostSettings {
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

impl HostSettings {
    fn of(settings: &FlowSettings) -> HostSettings {
        HostSettings {
            weight: Some(settings.weight),
            operations_per_s: Some(settings.operations_per_s.unwrap_or(0)),
            bytes_per_s: Some(settings.bytes_per_s.unwrap_or(0)),
            burst_ms: Some(settings.burst.0 / 1_000_000),
        }
    }

    fn applied(self, mut settings: FlowSettings) -> FlowSettings {
        settings.weight = self.weight.unwrap_or(settings.weight);
        let limit = |into: &mut Option<u64>, value: Option<u64>| {
            *into = value.map_or(*into, |value| (value > 0).then_some(value));
        };
        limit(&mut settings.operations_per_s, self.operations_per_s);
        limit(&mut settings.bytes_per_s, self.bytes_per_s);
        settings.burst = self.burst_ms.map_or(settings.burst, |ms| Nanos(ms.saturating_mul(1_000_000)));
        settings
    }

    /// Both, where both say something the later one.
    fn and(self, later: HostSettings) -> HostSettings {
        HostSettings {
            weight: later.weight.or(self.weight),
            operations_per_s: later.operations_per_s.or(self.operations_per_s),
            bytes_per_s: later.bytes_per_s.or(self.bytes_per_s),
            burst_ms: later.burst_ms.or(self.burst_ms),
        }
    }

    /// Whether nothing is said.
    pub fn is_empty(&self) -> bool {
        *self == HostSettings::default()
    }
}

impl SchedulingSettings {
    /// All of them, as they are.
    pub fn of(settings: &Settings) -> SchedulingSettings {
        SchedulingSettings {
            policy: Some(settings.policy.to_string()),
            window_ms: Some(settings.window.0 / 1_000_000),
            overload: Some(settings.overload),
            imbalance_difference: Some(settings.imbalance_difference),
            imbalance_ratio: Some(settings.imbalance_ratio),
            fairness: Some(settings.fairness),
            alpha: Some(settings.alpha),
            backwardings_max: Some(settings.backwardings_max),
            held_max_us: Some(settings.held_max.0 / 1_000),
            move_flows: Some(settings.move_flows.to_string()),
            in_flight: Some(settings.in_flight),
            operations_per_s: Some(settings.flow.operations_per_s.unwrap_or(0)),
            bytes_per_s: Some(settings.flow.bytes_per_s.unwrap_or(0)),
            burst_ms: Some(settings.flow.burst.0 / 1_000_000),
            hosts: settings
                .tenants
                .iter()
                .map(|(host, flow)| (host.clone(), HostSettings::of(flow)))
                .collect(),
        }
    }

    /// Settings with these changed.
    ///
    /// # Errors
    /// What may not be, and what may.
    pub fn applied(&self, settings: &Settings) -> Result<Settings, String> {
        let mut new = settings.clone();
        let name = |error: octokv_sched::SettingError| error.to_string();
        if let Some(policy) = &self.policy {
            new.policy = policy.parse().map_err(name)?;
        }
        if let Some(flows) = &self.move_flows {
            new.move_flows = flows.parse().map_err(name)?;
        }
        // Saturated, so that what is beyond every range is refused as that.
        let span = |into: &mut Nanos, value: Option<u64>, unit: u64| {
            *into = value.map_or(*into, |value| Nanos(value.saturating_mul(unit)));
        };
        span(&mut new.window, self.window_ms, 1_000_000);
        span(&mut new.held_max, self.held_max_us, 1_000);
        new.overload = self.overload.unwrap_or(new.overload);
        new.imbalance_difference = self.imbalance_difference.unwrap_or(new.imbalance_difference);
        new.imbalance_ratio = self.imbalance_ratio.unwrap_or(new.imbalance_ratio);
        new.fairness = self.fairness.unwrap_or(new.fairness);
        new.alpha = self.alpha.unwrap_or(new.alpha);
        new.backwardings_max = self.backwardings_max.unwrap_or(new.backwardings_max);
        new.in_flight = self.in_flight.unwrap_or(new.in_flight);
        let Self { operations_per_s, bytes_per_s, burst_ms, .. } = *self;
        new.flow = HostSettings { weight: None, operations_per_s, bytes_per_s, burst_ms }.applied(new.flow);
        for (host, change) in &self.hosts {
            let before = new.of_tenant(host);
            new.tenants.insert(host.clone(), change.applied(before));
        }
        new.check().map_err(name)?;
        Ok(new)
    }

    /// Both, where both say something the later one.
    #[must_use]
    pub fn and(self, later: SchedulingSettings) -> SchedulingSettings {
        SchedulingSettings {
            policy: later.policy.or(self.policy),
            window_ms: later.window_ms.or(self.window_ms),
            overload: later.overload.or(self.overload),
            imbalance_difference: later.imbalance_difference.or(self.imbalance_difference),
            imbalance_ratio: later.imbalance_ratio.or(self.imbalance_ratio),
            fairness: later.fairness.or(self.fairness),
            alpha: later.alpha.or(self.alpha),
            backwardings_max: later.backwardings_max.or(self.backwardings_max),
            held_max_us: later.held_max_us.or(self.held_max_us),
            move_flows: later.move_flows.or(self.move_flows),
            in_flight: later.in_flight.or(self.in_flight),
            operations_per_s: later.operations_per_s.or(self.operations_per_s),
            bytes_per_s: later.bytes_per_s.or(self.bytes_per_s),
            burst_ms: later.burst_ms.or(self.burst_ms),
            hosts: later.hosts.into_iter().fold(self.hosts, |mut hosts, (host, change)| {
                let before = hosts.remove(&host).unwrap_or_default();
                hosts.insert(host, before.and(change));
                hosts
            }),
        }
    }

    /// Whether nothing is said.
    pub fn is_empty(&self) -> bool {
        *self == SchedulingSettings::default()
    }
}

/// One core in a window.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CoreWindow {
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
    pub moved: u64,
    /// Requests of other cores that it ran.
    pub ran_for_others: u64,
}

/// One flow in a window.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FlowWindow {
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
    pub moves: bool,
    /// How often they go back.
    pub backwardings: u32,
}

/// What the monitor saw in a window, and what was chosen by it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct WindowReport {
    /// Its number since the start.
    pub number: u64,
    /// How long it was, in milliseconds.
    pub length_ms: f64,
    /// The policy that chose.
    pub policy: String,
    /// What it chose: nothing, balance, inter, intra, hybrid or fair.
    pub chosen: String,
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
    pub cores: Vec<CoreWindow>,
    /// The flows there were.
    pub flows: Vec<FlowWindow>,
}

impl WindowReport {
    /// Of a window.
    pub fn of(window: &Window) -> WindowReport {
        let cores = window.figures.cores.iter().map(|core| CoreWindow {
            utilisation: core.utilisation,
            target_share: core.shares.target,
            kv_share: core.shares.kv,
            device_share: core.shares.device,
            natural_load: core.natural.total(),
            queue_depth: core.queue_depth,
            requests: core.own_events,
            moved: core.moved,
            ran_for_others: core.ran_for_others,
        });
        let host = |flow: FlowId| {
            window
                .hosts
                .iter()
                .find(|(one, _)| *one == flow)
                .map(|(_, host)| host.clone())
                // Whoever left before the window ended has no name any more.
                .unwrap_or_else(|| if flow == OTHERS { String::new() } else { "(gone)".to_owned() })
        };
        let micros = |nanos: Nanos| nanos.0 as f64 / 1e3;
        let flows = window.figures.flows.iter().zip(&window.counters.flows).map(|(flow, counted)| {
            let each = |sum: Nanos| micros(sum) / flow.requests.max(1) as f64;
            let rule = window.decision.rule(flow.flow);
            FlowWindow {
                host: host(flow.flow),
                operations_s: flow.intensity,
                bytes_s: flow.bytes_per_s,
                latency_us: each(counted.latency),
                waited_us: each(counted.waited),
                round_trip_us: micros(counted.round_trip),
                // JSON has no infinity: a flow that is not answered at all has none.
                slowdown: flow.slowdown.filter(|slowdown| slowdown.is_finite()),
                dense: rule.dense,
                moves: rule.moves,
                backwardings: rule.backwardings,
            }
        });
        let decision = &window.decision;
        let chosen = match decision.chosen {
            Chosen::Nothing => "nothing",
            Chosen::Balance(_) => "balance",
            Chosen::Inter => "inter",
            Chosen::Intra => "intra",
            Chosen::Hybrid => "hybrid",
            Chosen::Fair => "fair",
        };
        WindowReport {
            number: window.number,
            length_ms: micros(window.length) / 1e3,
            policy: window.settings.policy.to_string(),
            chosen: chosen.to_owned(),
            overloaded: decision.overloaded,
            imbalanced: decision.imbalanced,
            unfair: decision.unfair,
            fairness: window.figures.fairness,
            load_balance: window.figures.measured_balance,
            natural_load_balance: window.figures.balance,
            measured_by: window.measured_by,
            took_us: micros(window.took),
            cores: cores.collect(),
            flows: flows.collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use octokv_sched::Policy;

    #[test]
    fn all_settings_come_back_and_only_those_given_change() {
        let defaults = Settings::default();
        assert_eq!(SchedulingSettings::of(&defaults).applied(&defaults), Ok(defaults.clone()));
        let change = SchedulingSettings {
            policy: Some("hybrid".to_owned()),
            window_ms: Some(250),
            operations_per_s: Some(70),
            ..SchedulingSettings::default()
        };
        let new = change.applied(&defaults).unwrap();
        assert_eq!((new.policy, new.window), (Policy::Hybrid, Nanos::from_millis(250)));
        assert_eq!(new.flow.operations_per_s, Some(70));
        let back = SchedulingSettings { operations_per_s: Some(0), ..change.clone() };
        assert_eq!(change.and(back).applied(&new).unwrap().flow.operations_per_s, None);
        assert!(SchedulingSettings::default().is_empty());
        let of = |weight, operations_per_s| {
            let host = HostSettings { weight, operations_per_s, ..HostSettings::default() };
            SchedulingSettings { hosts: [("a".to_owned(), host)].into(), ..SchedulingSettings::default() }
        };
        let both = of(Some(4), None).and(of(None, Some(9)));
        let flow = both.applied(&defaults).unwrap().of_tenant("a");
        assert_eq!((flow.weight, flow.operations_per_s), (4, Some(9)));
        assert_eq!(both.applied(&defaults).unwrap().of_tenant("b"), defaults.flow);
    }

    #[test]
    fn what_may_not_be_is_refused_with_what_may() {
        for (change, parts) in [
            (r#"{"policy":"hybird"}"#, ["hybird", "hybrid"]),
            (r#"{"window_ms":9}"#, ["window", "10 ms"]),
            (r#"{"window_ms":18446744073709551615}"#, ["window", "60 s"]),
            (r#"{"overload":1.5}"#, ["overload", "1"]),
            (r#"{"in_flight":0}"#, ["in_flight", "4096"]),
            (r#"{"move_flows":"some"}"#, ["move_flows", "dense"]),
            (r#"{"hosts":{"a":{"weight":0}}}"#, ["weight", "1000"]),
        ] {
            let change: SchedulingSettings = serde_json::from_str(change).unwrap();
            let error = change.applied(&Settings::default()).unwrap_err();
            assert!(parts.iter().all(|part| error.contains(part)), "{error}");
        }
        let unknown = serde_json::from_str::<SchedulingSettings>(r#"{"windows_ms":9}"#).unwrap_err();
        assert!(unknown.to_string().contains("window_ms"), "{unknown}");
    }
}
