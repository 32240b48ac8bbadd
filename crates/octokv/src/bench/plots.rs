//! The files of `octokv bench --svg`.

use crate::exit_status::CliResult;
use anyhow::Context;
use octokv_bench::plot;
use octokv_bench::workload_result::WorkloadResult;
use std::path::Path;

/// Draws the results: one list per workload, of one result per rate.
///
/// # Errors
/// If a file cannot be written.
pub fn write(directory: &Path, results: &[Vec<WorkloadResult>], with_rates: bool) -> CliResult {
    for (number, of_workload) in results.iter().enumerate() {
        let Some(workload) = of_workload.first().map(|result| result.workload) else { continue };
        let save = |kind: &str, text: String| {
            let path = directory.join(format!("{}-{workload}-{kind}.svg", number + 1));
            std::fs::write(&path, text).with_context(|| format!("picture {}", path.display()))
        };
        save("latency", plot::latency_percentiles(workload, of_workload))?;
        save("throughput", plot::throughput_over_time(workload, of_workload))?;
        if with_rates {
            save("rates", plot::latency_by_throughput(workload, of_workload))?;
        }
    }
    Ok(())
}
