//! The benchmark configuration from the flags of `octokv bench`. Invalid combinations fail before anything is
//! connected.

use crate::cli::{BenchArgs, DistributionArg};
use crate::exit_status::CliError;
use octokv_base::{KEY_BYTES_MAX, Nanos};
use octokv_bench::key_distribution::ZIPF_THETA_DEFAULT;
use octokv_bench::{BenchConfig, KeyDistribution, SizeDistribution, StopCondition, Workload};

/// Maximum value size in bytes.
const VALUE_BYTES_MAX: usize = 1 << 30;

/// Builds the configuration; the rate is set per run, see [`rates`].
///
/// # Errors
/// A usage error with the flag.
pub fn from_flags(bench: &BenchArgs) -> Result<BenchConfig, CliError> {
    let span = |name: &str, seconds: f64| match seconds {
        seconds if (0.0..=1e6).contains(&seconds) => Ok(Nanos((seconds * 1e9) as u64)),
        _ => usage_error(format!("--{name} {seconds}: must be from 0 to 1000000")),
    };
    let sizes = |name: &str, sizes: &SizeDistribution, most: usize| match sizes.max_bytes() <= most {
        true => Ok(sizes.clone()),
        false => usage_error(format!("--{name} {sizes}: must be at most {most}")),
    };
    if matches!(bench.key_size.0, SizeDistribution::Weighted(_)) {
        return usage_error(format!("--key-size {}: must be N or A..B", bench.key_size.0));
    }
    let config = BenchConfig {
        workloads: bench.workload.clone(),
        key_sizes: sizes("key-size", &bench.key_size.0, KEY_BYTES_MAX)?,
        value_sizes: sizes("value-size", &bench.value_size.0, VALUE_BYTES_MAX)?,
        keys: bench.num,
        distribution: bench.distribution.map(|named| match named {
            DistributionArg::Uniform => KeyDistribution::Uniform,
            DistributionArg::Zipf => KeyDistribution::Zipf,
            DistributionArg::Latest => KeyDistribution::Latest,
        }),
        zipf_theta: bench.zipf.unwrap_or(ZIPF_THETA_DEFAULT),
        rate: None,
        threads: bench.threads,
        depth: bench.depth,
        stop: match bench.seconds {
            Some(seconds) => StopCondition::Time(span("seconds", seconds)?),
            None => StopCondition::Operations(bench.ops.unwrap_or(bench.num)),
        },
        warm_up: span("warm-up", bench.warm_up)?,
        seed: bench.seed,
        verify: !bench.no_verify,
        scan_length: bench.scan_length,
        write_rate: bench.write_rate,
        tolerates_errors: bench.tolerate_errors,
    };
    for rate in rates(bench) {
        let one = BenchConfig { rate, ..config.clone() };
        one.validate().map_err(|invalid| CliError::Usage(invalid.to_string()))?;
    }
    let drawn: Vec<KeyDistribution> =
        config.workloads.iter().filter_map(|&workload: &Workload| config.distribution_of(workload)).collect();
    if bench.distribution.is_some() && drawn.is_empty() {
        return usage_error("--distribution: none of these workloads draws keys".to_owned());
    }
    if bench.zipf.is_some() && !drawn.iter().any(|kind| kind.is_skewed()) {
        return usage_error("--zipf: none of these workloads draws keys by zipf or latest".to_owned());
    }
    Ok(config)
}

fn usage_error<T>(what: String) -> Result<T, CliError> {
    Err(CliError::Usage(what))
}

/// The rates of each workload: those given, or one closed-loop run.
pub fn rates(bench: &BenchArgs) -> impl Iterator<Item = Option<f64>> {
    let rates = bench.rates.iter().copied().chain(bench.rate).map(Some);
    let none = bench.rates.is_empty() && bench.rate.is_none();
    rates.chain(none.then_some(None))
}
