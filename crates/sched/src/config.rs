//! The scheduling configuration and its validation.
//!
//! In: names and numbers of a configuration file or of a request to a running node. Out: a [`SchedConfig`] that
//! [`SchedConfig::check`] accepts, or a [`SettingError`] with the setting, its value and the valid ones.
//!
//! Sources: W, T_OL and the first T_LB are OctoKV §IV-D with the values of its §V; the second T_LB, the fairness
//! threshold and alpha are OctoFAS §4.2 and §4.3. If a paper gives no value, the default here has its reason beside it.

use octokv_base::Nanos;
use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

/// Minimum similarity (0 to 1) of a wrong name and a valid one for a suggestion.
const SIMILARITY_MIN: f64 = 0.5;

/// The scheduling policy of a node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Policy {
    /// Every request executes on the core of its connection, in arrival order.
    #[default]
    None,
    /// OctoKV load balancing, equal parts to each core with free capacity.
    RoundRobin,
    /// OctoKV load balancing, in proportion to the cores' free capacity.
    Proportional,
    /// OctoFAS between cores (Algorithm 2), always.
    Inter,
    /// OctoFAS within a core (Algorithm 3), always.
    Intra,
    /// Both at once (Algorithm 4), always.
    Hybrid,
    /// One of the three, or none, by the conditions of each interval (Algorithm 1).
    Auto,
    /// A fair queue of our own on every core, with weights and limits.
    Fair,
}

impl Policy {
    /// All policies, in the order of their discriminants.
    pub const ALL: [Policy; 8] = [
        Policy::None,
        Policy::RoundRobin,
        Policy::Proportional,
        Policy::Inter,
        Policy::Intra,
        Policy::Hybrid,
        Policy::Auto,
        Policy::Fair,
    ];
    const NAMES: [&str; 8] =
        ["none", "round-robin", "proportional", "inter", "intra", "hybrid", "auto", "fair"];

    /// Its name in configurations and reports.
    pub fn name(self) -> &'static str {
        Policy::NAMES[self as usize]
    }
}

/// The tenants whose requests `inter` migrates to other cores (OctoFAS §4.3.1).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MigrateTenants {
    /// All tenants: the most throughput (OctoFAS Fig. 7).
    #[default]
    All,
    /// Dense tenants only: the fairest.
    Dense,
    /// Sparse tenants only: for comparison; it makes them wait.
    Sparse,
}

impl MigrateTenants {
    /// All choices, in the order of their discriminants.
    pub const ALL: [MigrateTenants; 3] = [MigrateTenants::All, MigrateTenants::Dense, MigrateTenants::Sparse];
    const NAMES: [&str; 3] = ["all", "dense", "sparse"];

    /// Its name in configurations and reports.
    pub fn name(self) -> &'static str {
        MigrateTenants::NAMES[self as usize]
    }

    /// Whether requests of such a tenant migrate.
    pub fn includes(self, dense: bool) -> bool {
        match self {
            MigrateTenants::All => true,
            MigrateTenants::Dense => dense,
            MigrateTenants::Sparse => !dense,
        }
    }
}

impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl fmt::Display for MigrateTenants {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Policy {
    type Err = SettingError;
    fn from_str(given: &str) -> Result<Policy, SettingError> {
        name_index("policy", given, &Policy::NAMES).map(|at| Policy::ALL[at])
    }
}

impl FromStr for MigrateTenants {
    type Err = SettingError;
    fn from_str(given: &str) -> Result<MigrateTenants, SettingError> {
        name_index("migrate_tenants", given, &MigrateTenants::NAMES).map(|at| MigrateTenants::ALL[at])
    }
}

/// The index of a name among the valid ones.
fn name_index(
    setting: &'static str,
    given: &str,
    names: &'static [&'static str],
) -> Result<usize, SettingError> {
    if let Some(at) = names.iter().position(|name| *name == given) {
        return Ok(at);
    }
    let wrong = given.to_lowercase().replace('_', "-");
    let alike = |name: &str| strsim::normalized_damerau_levenshtein(&wrong, name);
    let best = names.iter().copied().max_by(|a, b| alike(a).total_cmp(&alike(b)));
    let nearest = best.filter(|name| alike(name) >= SIMILARITY_MIN);
    Err(SettingError::UnknownName { setting, given: given.to_owned(), nearest, names })
}

/// A value or bound of a setting, for messages.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum SettingValue {
    /// A ratio or a factor.
    Number(f64),
    /// A number of items.
    Count(u64),
    /// A duration.
    Duration(Nanos),
}

impl fmt::Display for SettingValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            SettingValue::Number(number) => write!(f, "{number}"),
            SettingValue::Count(count) => write!(f, "{count}"),
            SettingValue::Duration(Nanos(ns)) if ns > 0 && ns % 1_000_000_000 == 0 => {
                write!(f, "{} s", ns / 1_000_000_000)
            }
            SettingValue::Duration(Nanos(ns)) if ns > 0 && ns % 1_000_000 == 0 => {
                write!(f, "{} ms", ns / 1_000_000)
            }
            SettingValue::Duration(Nanos(ns)) if ns > 0 && ns % 1_000 == 0 => write!(f, "{} µs", ns / 1_000),
            SettingValue::Duration(Nanos(ns)) => write!(f, "{ns} ns"),
        }
    }
}

/// An invalid setting.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum SettingError {
    /// The setting has no choice of this name.
    #[error("{setting}: there is no \"{given}\"; {}It is one of {}", suggestion(*.nearest), .names.join(", "))]
    UnknownName {
        /// Key of the setting.
        setting: &'static str,
        /// The name given.
        given: String,
        /// The most similar valid name.
        nearest: Option<&'static str>,
        /// All valid names.
        names: &'static [&'static str],
    },
    /// The value is outside of the setting's range.
    #[error("{setting}: {given} is not within {least} to {most}")]
    OutOfRange {
        /// Key of the setting, without its unit.
        setting: &'static str,
        /// The value given.
        given: SettingValue,
        /// Least valid value.
        least: SettingValue,
        /// Greatest valid value.
        most: SettingValue,
    },
}

fn suggestion(nearest: Option<&str>) -> String {
    nearest.map_or(String::new(), |name| format!("did you mean \"{name}\"? "))
}

/// Quality of service of one tenant. Only [`crate::fair_queue`] uses it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TenantQos {
    /// Share of service in proportion to the weights of other tenants, 1 to 1000.
    pub weight: u32,
    /// Rate limit in operations per second on each core, 1 to 10 million; `None` for no limit.
    pub operations_per_s: Option<u64>,
    /// Rate limit in bytes per second on each core, 1 KiB to 1 TiB; `None` for no limit.
    pub bytes_per_s: Option<u64>,
    /// Burst tolerance of both limits, as a time at the limit's rate: 1 ms to 10 s. Over any time `t` a tenant gets no
    /// more than `rate × (t + burst)` and one request.
    pub burst: Nanos,
}

impl TenantQos {
    /// Least and greatest valid `weight`.
    pub const WEIGHT_RANGE: (u64, u64) = (1, 1000);
    const OPERATIONS_PER_S_RANGE: (u64, u64) = (1, 10_000_000);
    const BYTES_PER_S_RANGE: (u64, u64) = (1 << 10, 1 << 40);
    const BURST_RANGE: (Nanos, Nanos) = (Nanos::from_millis(1), Nanos::from_secs(10));

    /// Validates all fields.
    ///
    /// # Errors
    /// The first field outside of its range.
    pub fn check(&self) -> Result<(), SettingError> {
        check_count("weight", u64::from(self.weight), TenantQos::WEIGHT_RANGE)?;
        if let Some(rate) = self.operations_per_s {
            check_count("operations_per_s", rate, TenantQos::OPERATIONS_PER_S_RANGE)?;
        }
        if let Some(rate) = self.bytes_per_s {
            check_count("bytes_per_s", rate, TenantQos::BYTES_PER_S_RANGE)?;
        }
        check_duration("burst", self.burst, TenantQos::BURST_RANGE)
    }
}

impl Default for TenantQos {
    /// Weight 1 without limits. A burst of a tenth of a second smooths hosts that send in batches and is too short to
    /// show in metrics of one second.
    fn default() -> TenantQos {
        TenantQos { weight: 1, operations_per_s: None, bytes_per_s: None, burst: Nanos::from_millis(100) }
    }
}

/// The scheduling configuration: input of [`crate::policy::choose`] and of the structures in this crate.
#[derive(Clone, Debug, PartialEq)]
pub struct SchedConfig {
    /// The policy.
    pub policy: Policy,
    /// W: length of a sampling interval, 10 ms to 60 s.
    pub interval: Nanos,
    /// T_OL of OctoKV: no balancing while no core's load is above it, 0 to 1.
    pub overload: f64,
    /// T_LB of OctoKV: no balancing while the greatest and the least load differ by no more, 0 to 1.
    pub imbalance_difference: f64,
    /// T_LB of OctoFAS: loads are imbalanced if least ÷ greatest is below it, 0 to 1.
    pub imbalance_ratio: f64,
    /// Tenants are treated unfairly if least ÷ greatest slowdown is at or below it, 0 to 1.
    pub fairness: f64,
    /// Requeues of a dense tenant's request per unit of its intensity ÷ the mean intensity of sparse tenants, 0 to 100.
    pub alpha: f64,
    /// Maximum requeues of a request, 0 to 1000.
    pub requeues_max: u32,
    /// Maximum time of a request in the requeue queue, whatever its requeue count, 10 µs to 1 s.
    pub held_max: Nanos,
    /// The tenants whose requests `inter` migrates.
    pub migrate_tenants: MigrateTenants,
    /// Maximum number of requests in flight from a core's fair queue, 1 to 4096 ([`crate::concurrency_limit`]). Fewer
    /// are fairer, more keep devices busy.
    pub in_flight: u32,
    /// QoS of tenants without an entry in `tenants`.
    pub default_qos: TenantQos,
    /// QoS by host NQN.
    pub tenants: BTreeMap<String, TenantQos>,
}

impl SchedConfig {
    const INTERVAL_RANGE: (Nanos, Nanos) = (Nanos::from_millis(10), Nanos::from_secs(60));
    const HELD_MAX_RANGE: (Nanos, Nanos) = (Nanos::from_micros(10), Nanos::from_secs(1));

    /// Validates all settings.
    ///
    /// # Errors
    /// The first setting outside of its range; of a tenant's, the message does not name the tenant.
    pub fn check(&self) -> Result<(), SettingError> {
        check_duration("interval", self.interval, SchedConfig::INTERVAL_RANGE)?;
        check_number("overload", self.overload, (0.0, 1.0))?;
        check_number("imbalance_difference", self.imbalance_difference, (0.0, 1.0))?;
        check_number("imbalance_ratio", self.imbalance_ratio, (0.0, 1.0))?;
        check_number("fairness", self.fairness, (0.0, 1.0))?;
        check_number("alpha", self.alpha, (0.0, 100.0))?;
        check_count("requeues_max", u64::from(self.requeues_max), (0, 1000))?;
        check_duration("held_max", self.held_max, SchedConfig::HELD_MAX_RANGE)?;
        check_count("in_flight", u64::from(self.in_flight), (1, 4096))?;
        self.tenants.values().try_for_each(TenantQos::check)?;
        self.default_qos.check()
    }

    /// The QoS of a tenant by its host NQN.
    pub fn qos_of(&self, name: &str) -> TenantQos {
        self.tenants.get(name).copied().unwrap_or(self.default_qos)
    }
}

impl Default for SchedConfig {
    /// The papers' values. For the values that they leave open:
    /// - `imbalance_ratio` 0.75: a core at OctoKV's T_OL of 0.4 that is OctoKV's T_LB of 0.1 above another gives 0.3 ÷
    ///   0.4, so the conditions of both papers agree at the point at which a core becomes overloaded.
    /// - `alpha` 2: in OctoFAS Fig. 8 (8 threads against 2) throughput has not fallen yet at 5 requeues, and fairness
    ///   visibly gains at 10. Four times the intensity gives 8.
    /// - `requeues_max` 15: beyond it Fig. 8 shows no gain.
    /// - `held_max` 2 ms: more than 15 iterations of a busy core, less than any host's timeout.
    /// - `in_flight` 32: the depth at which one NVMe device comes near its throughput.
    fn default() -> SchedConfig {
        SchedConfig {
            policy: Policy::None,
            interval: Nanos::from_secs(1),
            overload: 0.4,
            imbalance_difference: 0.1,
            imbalance_ratio: 0.75,
            fairness: 0.9,
            alpha: 2.0,
            requeues_max: 15,
            held_max: Nanos::from_millis(2),
            migrate_tenants: MigrateTenants::All,
            in_flight: 32,
            default_qos: TenantQos::default(),
            tenants: BTreeMap::new(),
        }
    }
}

fn check_number(setting: &'static str, given: f64, (least, most): (f64, f64)) -> Result<(), SettingError> {
    if (least..=most).contains(&given) {
        return Ok(());
    }
    let [given, least, most] = [given, least, most].map(SettingValue::Number);
    Err(SettingError::OutOfRange { setting, given, least, most })
}

fn check_count(setting: &'static str, given: u64, (least, most): (u64, u64)) -> Result<(), SettingError> {
    if (least..=most).contains(&given) {
        return Ok(());
    }
    let [given, least, most] = [given, least, most].map(SettingValue::Count);
    Err(SettingError::OutOfRange { setting, given, least, most })
}

fn check_duration(
    setting: &'static str,
    given: Nanos,
    (least, most): (Nanos, Nanos),
) -> Result<(), SettingError> {
    if (least..=most).contains(&given) {
        return Ok(());
    }
    let [given, least, most] = [given, least, most].map(SettingValue::Duration);
    Err(SettingError::OutOfRange { setting, given, least, most })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip() {
        for policy in Policy::ALL {
            assert_eq!(policy.to_string().parse(), Ok(policy));
        }
        for selected in MigrateTenants::ALL {
            assert_eq!(selected.to_string().parse(), Ok(selected));
        }
        assert_eq!(Policy::ALL.map(Policy::name), Policy::NAMES);
        assert_eq!(MigrateTenants::ALL.map(MigrateTenants::name), MigrateTenants::NAMES);
    }

    #[test]
    fn an_unknown_name_is_reported_with_the_valid_ones_and_the_nearest() {
        let error_of = |given: &str| given.parse::<Policy>().unwrap_err().to_string();
        let names = "It is one of none, round-robin, proportional, inter, intra, hybrid, auto, fair";
        for (given, nearest) in [
            ("round_robin", Some("round-robin")),
            ("Proportional", Some("proportional")),
            ("hybird", Some("hybrid")),
            ("quux", None),
            ("", None),
        ] {
            let meant = nearest.map(|name| format!("did you mean \"{name}\"? ")).unwrap_or_default();
            assert_eq!(error_of(given), format!("policy: there is no \"{given}\"; {meant}{names}"));
        }
        assert_eq!(
            "danse".parse::<MigrateTenants>().unwrap_err().to_string(),
            "migrate_tenants: there is no \"danse\"; did you mean \"dense\"? It is one of all, dense, sparse"
        );
    }

    /// The error message of a changed configuration, if it is invalid.
    fn error_after(change: impl Fn(&mut SchedConfig)) -> Option<String> {
        let mut config = SchedConfig::default();
        change(&mut config);
        config.check().err().map(|error| error.to_string())
    }

    #[test]
    fn defaults_are_valid() {
        assert_eq!(error_after(|_| ()), None);
    }

    #[test]
    fn settings_outside_their_range_are_rejected() {
        type Change = fn(&mut SchedConfig, f64);
        let table: &[(Change, [f64; 2], &str, &str)] = &[
            (|s, x| s.interval = Nanos(x as u64), [1e7, 6e10], "interval", "10 ms to 60 s"),
            (|s, x| s.overload = x, [0.0, 1.0], "overload", "0 to 1"),
            (|s, x| s.imbalance_difference = x, [0.0, 1.0], "imbalance_difference", "0 to 1"),
            (|s, x| s.imbalance_ratio = x, [0.0, 1.0], "imbalance_ratio", "0 to 1"),
            (|s, x| s.fairness = x, [0.0, 1.0], "fairness", "0 to 1"),
            (|s, x| s.alpha = x, [0.0, 100.0], "alpha", "0 to 100"),
            (|s, x| s.requeues_max = x as u32, [0.0, 1e3], "requeues_max", "0 to 1000"),
            (|s, x| s.held_max = Nanos(x as u64), [1e4, 1e9], "held_max", "10 µs to 1 s"),
            (|s, x| s.in_flight = x as u32, [1.0, 4096.0], "in_flight", "1 to 4096"),
            (|s, x| s.default_qos.weight = x as u32, [1.0, 1e3], "weight", "1 to 1000"),
            (
                |s, x| s.default_qos.operations_per_s = Some(x as u64),
                [1.0, 1e7],
                "operations_per_s",
                "1 to 10000000",
            ),
            (
                |s, x| s.default_qos.bytes_per_s = Some(x as u64),
                [1024.0, 1_099_511_627_776.0],
                "bytes_per_s",
                "1024 to 1099511627776",
            ),
            (|s, x| s.default_qos.burst = Nanos(x as u64), [1e6, 1e10], "burst", "1 ms to 10 s"),
        ];
        for &(change, [least, most], name, range) in table {
            for right in [least, most] {
                assert_eq!(error_after(|config| change(config, right)), None, "{name} = {right}");
            }
            for wrong in [least - 0.5, most * 1.5, f64::INFINITY] {
                // A count or a duration cannot be below 0.
                if wrong < 0.0 && name == "requeues_max" {
                    continue;
                }
                let message = error_after(|config| change(config, wrong)).unwrap_or_default();
                let (start, end) = (format!("{name}: "), format!(" is not within {range}"));
                assert!(
                    message.starts_with(&start) && message.ends_with(&end),
                    "{name} = {wrong}: {message}"
                );
            }
        }
        let message = error_after(|config| config.alpha = f64::NAN);
        assert_eq!(message.as_deref(), Some("alpha: NaN is not within 0 to 100"));
    }
}
