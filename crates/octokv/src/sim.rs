//! `octokv sim`: runs simulations seed by seed until one fails, all are done, or the time is up.
//!
//! A failure prints the command that replays it.

use crate::cli::{SeedRange, SimArgs};
use crate::exit_status::{CliError, CliResult};
use crate::progress::ProgressReporter;
use anyhow::anyhow;
use octokv_base::Nanos;
use octokv_sim::SweepConfig;
use octokv_sys::clock;

/// Number of seeds without `--seeds` and `--minutes`.
const DEFAULT_SEEDS: u64 = 100;

/// Runs `octokv sim`.
///
/// # Errors
/// Invalid flags, or the first seed that failed.
pub fn run(sim: &SimArgs) -> CliResult {
    let limit = match sim.minutes {
        None => Nanos::NEVER,
        Some(minutes) if (0.0..=1e6).contains(&minutes) => Nanos((minutes * 60e9) as u64),
        Some(minutes) => {
            return Err(CliError::Usage(format!("--minutes {minutes}: must be from 0 to 1000000")));
        }
    };
    let SeedRange(seeds) = sim.seeds.clone().unwrap_or(SeedRange(match sim.minutes {
        Some(_) => 0..u64::MAX,
        None => 0..DEFAULT_SEEDS,
    }));
    let config = SweepConfig { scenario: sim.scenario, ..SweepConfig::new(seeds.clone()) };
    let (begin, mut runs, mut crashes) = (clock::now(), 0u64, 0);
    let (mut offloaded, mut queued) = (0, 0);
    let mut reporter = ProgressReporter::new("sim");
    // A panic of a simulated node is a finding, reported in the outcome.
    std::panic::set_hook(Box::new(|_| {}));
    let outcome = octokv_sim::run_sweep(&config, |report| {
        runs += 1;
        crashes += report.stats.crashes;
        offloaded += report.stats.offloaded;
        queued += report.stats.queued;
        let elapsed = clock::now().since(begin);
        let by_seeds = runs as f64 / (seeds.end - seeds.start) as f64;
        let by_time = elapsed.as_secs_f64() / limit.as_secs_f64();
        reporter.update(by_seeds.max(by_time), &format!("{runs} seeds, {crashes} crashes"));
        elapsed < limit
    });
    drop(std::panic::take_hook());
    drop(reporter);
    if let Some(failure) = &outcome.failure {
        return Err(anyhow!("{failure}").into());
    }
    let seconds = clock::now().since(begin).as_secs_f64();
    println!(
        "{} {} passed: {} operations ({offloaded} offloaded, {queued} queued), {crashes} crashes, {seconds:.1} s",
        outcome.seeds,
        if outcome.seeds == 1 { "seed" } else { "seeds" },
        outcome.operations
    );
    Ok(())
}
