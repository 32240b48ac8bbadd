//! Latency of the reference client without and under each attack.
//!
//! ```text
//!   one run per attack:   quiet │ attack │ quiet │ attack │ …       a slice each, the reference client runs throughout
//!                         ─ warm up ─ counted ─                     open loop: latency counts from the due time
//! ```
//! Quiet and attacked slices alternate within one run, so a temporary slowdown of the machine affects both. The result
//! is the median over slices of a quantile of each, which excludes pauses of the machine.
//! The node runs on the first core; the reference client and the attackers share the last one, the attackers at the
//! lowest priority, so they use only time that the reference client leaves idle. The remaining contention between them
//! shows in the first row, `control` (the same load from well-behaved hosts), and is excluded from the columns that
//! count from `begin`: those exclude the delay of the reference client itself before it submits an operation.

use crate::attacks::{Attack, AttackThread};
use crate::node_process::NodeProcess;
use crate::raw_connection::{RawConnection, TargetAddr};
use crate::reference_client::{LatencySlice, MeasurePhase, ReferenceClient, ReferenceClientConfig};
use anyhow::{Context, Result};
use std::path::PathBuf;
use std::time::Duration;

/// Configuration of a measurement.
#[derive(Clone, Debug)]
pub struct AttackLatencyConfig {
    /// Path of the octokv binary.
    pub binary: PathBuf,
    /// `memory`, or the path of a device file to create.
    pub device: String,
    /// Slices without and under attack, for each attack.
    pub rounds: u32,
    /// Duration of a slice.
    pub slice: Duration,
    /// Operations per second of the reference client.
    pub rate: u64,
    /// Number of keys on the node besides the reference client's.
    pub keys: u32,
}

/// Pause after an attack before a quiet slice begins.
const SETTLE_TIME: Duration = Duration::from_millis(50);

/// Runs the attacks one after another and prints a table row for each.
///
/// # Errors
/// If the node or the reference client fails.
pub fn run(config: &AttackLatencyConfig, attacks: &[&'static Attack]) -> Result<()> {
    let directory = tempfile::tempdir()?;
    let cores = octokv_sys::thread::allowed_cores();
    let (first, last) = (cores[0], cores[cores.len() - 1]);
    let text = format!(
        "device = \"{}\"\nsize = \"512MiB\"\nlisten = [\"127.0.0.1:0\"]\ncores = [{first}]\n",
        config.device
    );
    let node = NodeProcess::start(&config.binary, &text, directory.path())?;
    octokv_sys::thread::pin_to_core(last)?;
    store_keys(node.target_addr(), config.keys).context("storing the initial keys")?;
    println!(
        "node on core {first}, hosts on core {last}; {} operations a second of 4 KiB, {} keys; {} rounds of {} ms",
        config.rate,
        config.keys,
        config.rounds,
        config.slice.as_millis()
    );
    println!(
        "{:<15} {:>9} {:>9} {:>9} {:>9} {:>6}  {:>10} {:>9} {:>6}  {:>8}  attack",
        "us, from due:",
        "quiet p50",
        "p99",
        "under p50",
        "p99",
        "p99 x",
        "begin: p99",
        "under p99",
        "p99 x",
        "RSS MiB"
    );
    for attack in attacks {
        measure_attack(config, &node, attack)
            .with_context(|| format!("{}: {}", attack.name, node.stderr_log()))?;
    }
    node.stop()
}

fn measure_attack(config: &AttackLatencyConfig, node: &NodeProcess, attack: &'static Attack) -> Result<()> {
    let plan = ReferenceClientConfig {
        ops_per_s: config.rate,
        value_bytes_min: 4096,
        value_bytes_max: 4096,
        key_count: 512,
        realtime_priority: true,
        ..ReferenceClientConfig::default()
    };
    let reference_client = ReferenceClient::start(node.target_addr(), plan)?;
    let attacker = AttackThread::start(attack, node.target_addr(), true)?;
    for _ in 0..config.rounds {
        std::thread::sleep(SETTLE_TIME);
        reference_client.begin_slice(MeasurePhase::Quiet);
        std::thread::sleep(config.slice);
        reference_client.begin_slice(MeasurePhase::Attacked);
        attacker.resume();
        std::thread::sleep(config.slice);
        reference_client.begin_slice(MeasurePhase::Uncounted);
        attacker.pause();
    }
    attacker.stop();
    let report = reference_client.finish()?;
    let slices = &report.slices;
    let quiet_p50 =
        median_of_quantiles_us(slices, MeasurePhase::Quiet, 0.5, |slice| &slice.latencies_from_due_ns);
    let p50 =
        median_of_quantiles_us(slices, MeasurePhase::Attacked, 0.5, |slice| &slice.latencies_from_due_ns);
    let quiet_due =
        median_of_quantiles_us(slices, MeasurePhase::Quiet, 0.99, |slice| &slice.latencies_from_due_ns);
    let due =
        median_of_quantiles_us(slices, MeasurePhase::Attacked, 0.99, |slice| &slice.latencies_from_due_ns);
    let quiet_begin =
        median_of_quantiles_us(slices, MeasurePhase::Quiet, 0.99, |slice| &slice.latencies_from_begin_ns);
    let begin =
        median_of_quantiles_us(slices, MeasurePhase::Attacked, 0.99, |slice| &slice.latencies_from_begin_ns);
    println!(
        "{:<15} {:>9.0} {:>9.0} {:>9.0} {:>9.0} {:>6.2}  {:>10.0} {:>9.0} {:>6.2}  {:>8}  {}",
        attack.name,
        quiet_p50,
        quiet_due,
        p50,
        due,
        due / quiet_due,
        quiet_begin,
        begin,
        begin / quiet_begin,
        node.resource_usage()?.resident_bytes >> 20,
        attack.description
    );
    Ok(())
}

/// The median over the slices of a phase of a quantile of each, in microseconds: keeps an effect that occurs in most
/// slices, and excludes a machine pause in one of them.
fn median_of_quantiles_us(
    slices: &[LatencySlice],
    phase: MeasurePhase,
    quantile: f64,
    times: impl Fn(&LatencySlice) -> &Vec<u64>,
) -> f64 {
    let of_slice = |slice: &LatencySlice| quantile_of(times(slice).clone(), quantile);
    let all = slices.iter().filter(|slice| slice.phase == phase).map(of_slice).collect();
    quantile_of(all, 0.5) as f64 / 1000.0
}

/// The value at a quantile; 0 for an empty list.
fn quantile_of(mut values: Vec<u64>, quantile: f64) -> u64 {
    values.sort_unstable();
    let index = (values.len() as f64 * quantile) as usize;
    values.get(index.min(values.len().saturating_sub(1))).copied().unwrap_or(0)
}

/// Stores keys, so that lists are long.
fn store_keys(target: &TargetAddr, keys: u32) -> Result<()> {
    let (_admin, mut io) = RawConnection::connect_pair(target, 128)?;
    let numbers: Vec<u32> = (0..keys).collect();
    for numbers in numbers.chunks(100) {
        let mut bytes = Vec::new();
        for (id, number) in (0..).zip(numbers) {
            let key = format!("fill{number:010}");
            bytes.extend(
                io.capsule(&crate::command_builder::store_in_capsule(id, key.as_bytes(), &[7; 64]), &[7; 64]),
            );
        }
        io.send(&bytes)?;
        for _ in numbers {
            crate::raw_connection::expect_success(&io.receive_completion()?)?;
        }
    }
    Ok(())
}
