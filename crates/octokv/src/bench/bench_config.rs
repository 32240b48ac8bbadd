//! The flags of `octokv bench` as a plan. Whatever makes no sense is a usage error, before anything is connected.

use crate::cli::{Bench, Distribution as Named};
use crate::exit_status::Failure;
use octokv_base::{KEY_BYTES_MAX, Nanos};
use octokv_bench::key_distribution::THETA;
use octokv_bench::{Distribution, End, Plan, Sizes, Workload};

/// The most bytes of a value.
const VALUE_BYTES_MAX: usize = 1 << 30;

/// The plan that is asked for; with `--rates` its rate is the first of them.
pub fn of(bench: &Bench) -> Result<Plan, Failure> {
    let span = |name: &str, seconds: f64| match seconds {
        seconds if (0.0..=1e6).contains(&seconds) => Ok(Nanos((seconds * 1e9) as u64)),
        _ => usage(format!("--{name} {seconds}: must be from 0 to 1000000")),
    };
    let sizes = |name: &str, sizes: &Sizes, most: usize| match sizes.most() <= most {
        true => Ok(sizes.clone()),
        false => usage(format!("--{name} {sizes}: must be at most {most}")),
    };
    if matches!(bench.key_size.0, Sizes::Weighted(_)) {
        return usage(format!("--key-size {}: must be N or A..B", bench.key_size.0));
    }
    let plan = Plan {
        workloads: bench.workload.clone(),
        key_sizes: sizes("key-size", &bench.key_size.0, KEY_BYTES_MAX)?,
        value_sizes: sizes("value-size", &bench.value_size.0, VALUE_BYTES_MAX)?,
        keys: bench.num,
        distribution: bench.distribution.map(|named| match named {
            Named::Uniform => Distribution::Uniform,
            Named::Zipf => Distribution::Zipf,
            Named::Latest => Distribution::Latest,
        }),
        theta: bench.zipf.unwrap_or(THETA),
        rate: None,
        threads: bench.threads,
        depth: bench.depth,
        end: match bench.seconds {
            Some(seconds) => End::Time(span("seconds", seconds)?),
            None => End::Operations(bench.ops.unwrap_or(bench.num)),
        },
        warm_up: span("warm-up", bench.warm_up)?,
        seed: bench.seed,
        verify: !bench.no_verify,
    };
    for rate in rates(bench) {
        let one = Plan { rate, ..plan.clone() };
        one.check().map_err(|invalid| Failure::Usage(invalid.to_string()))?;
    }
    let drawn: Vec<Distribution> =
        plan.workloads.iter().filter_map(|&workload: &Workload| plan.distribution_of(workload)).collect();
    if bench.distribution.is_some() && drawn.is_empty() {
        return usage("--distribution: none of these workloads draws keys".to_owned());
    }
    if bench.zipf.is_some() && !drawn.iter().any(|kind| kind.is_skewed()) {
        return usage("--zipf: none of these workloads draws keys by zipf or latest".to_owned());
    }
    Ok(plan)
}

fn usage<T>(what: String) -> Result<T, Failure> {
    Err(Failure::Usage(what))
}

/// The rates that each workload is run at: one after the other, or once without any.
pub fn rates(bench: &Bench) -> impl Iterator<Item = Option<f64>> {
    let rates = bench.rates.iter().copied().chain(bench.rate).map(Some);
    let none = bench.rates.is_empty() && bench.rate.is_none();
    rates.chain(none.then_some(None))
}
