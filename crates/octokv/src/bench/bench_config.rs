//! The flags of `octokv bench` as a plan. Whatever makes no sense is a usage error, before anything is connected.

use crate::cli::{BenchArgs, DistributionArg as Named};
use crate::exit_status::CliError;
use octokv_base::{KEY_BYTES_MAX, Nanos};
use octokv_bench::key_distribution::ZIPF_THETA_DEFAULT;
use octokv_bench::{BenchConfig, KeyDistribution, SizeDistribution, StopCondition, Workload};

/// The most bytes of a value.
const VALUE_BYTES_MAX: usize = 1 << 30;

/// The plan that is asked for; with `--rates` its rate is the first of them.
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
            Named::Uniform => KeyDistribution::Uniform,
            Named::Zipf => KeyDistribution::Zipf,
            Named::Latest => KeyDistribution::Latest,
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

/// The rates that each workload is run at: one after the other, or once without any.
pub fn rates(bench: &BenchArgs) -> impl Iterator<Item = Option<f64>> {
    let rates = bench.rates.iter().copied().chain(bench.rate).map(Some);
    let none = bench.rates.is_empty() && bench.rate.is_none();
    rates.chain(none.then_some(None))
}
