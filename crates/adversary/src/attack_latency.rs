//! What attacks cost others: the latency of an honest host while each attack goes on and while it rests.
//!
//! ```text
//!   one run per attack:   quiet │ attack │ quiet │ attack │ …       a slice each, an honest host all the while
//!                         ─ settles ─ counted ─                     open loop: late counts from when it was due
//! ```
//! Quiet and attacked slices take turns within one run, so that a machine that is slow for a while is slow for both.
//! Of each slice a quantile is taken, and the median of these is told, so that a pause of the machine is not.
//! The node has the first core; the honest host and the attackers have the last one, the attackers at the lowest
//! priority, so that they take only time that the honest host leaves. What still is contention between them shows in
//! the first row, `control`: as much load from well-behaved hosts; and in the columns that count from `begin`, which
//! leave out how late the honest host itself came to begin an operation, before the node knew of it.

use crate::attacks::{Attack, AttackThread};
use crate::node_process::NodeProcess;
use crate::raw_connection::{RawConnection, TargetAddr};
use crate::reference_client::{LatencySlice, MeasurePhase, ReferenceClient, ReferenceClientConfig};
use anyhow::{Context, Result};
use std::path::PathBuf;
use std::time::Duration;

/// What to measure.
#[derive(Clone, Debug)]
pub struct AttackLatencyConfig {
    /// The binary of the node.
    pub binary: PathBuf,
    /// `memory`, or a file that is made.
    pub device: String,
    /// How many slices of each kind.
    pub rounds: u32,
    /// How long one is.
    pub slice: Duration,
    /// Operations of the honest host, a second.
    pub rate: u64,
    /// Keys that the node holds besides the honest host's.
    pub keys: u32,
}

/// How long the node may settle after an attack before a slice counts as quiet.
const SETTLE_TIME: Duration = Duration::from_millis(50);

/// Runs the attacks, one after the other, and prints a row for each.
///
/// # Errors
/// When the node or the honest host fails.
pub fn run(settings: &AttackLatencyConfig, attacks: &[&'static Attack]) -> Result<()> {
    let directory = tempfile::tempdir()?;
    let cores = octokv_sys::thread::allowed_cores();
    let (first, last) = (cores[0], cores[cores.len() - 1]);
    let text = format!(
        "device = \"{}\"\nsize = \"512MiB\"\nlisten = [\"127.0.0.1:0\"]\ncores = [{first}]\n",
        settings.device
    );
    let node = NodeProcess::start(&settings.binary, &text, directory.path())?;
    octokv_sys::thread::pin_to_core(last)?;
    store_keys(node.target_addr(), settings.keys).context("filling the node")?;
    println!(
        "node on core {first}, hosts on core {last}; {} operations a second of 4 KiB, {} keys; {} rounds of {} ms",
        settings.rate,
        settings.keys,
        settings.rounds,
        settings.slice.as_millis()
    );
    println!(
        "{:<15} {:>9} {:>9} {:>9} {:>9} {:>6}  {:>10} {:>9} {:>6}  {:>8}  what",
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
        measure_attack(settings, &node, attack)
            .with_context(|| format!("{}: {}", attack.name, node.stderr_log()))?;
    }
    node.stop()
}

fn measure_attack(settings: &AttackLatencyConfig, node: &NodeProcess, attack: &'static Attack) -> Result<()> {
    let plan = ReferenceClientConfig {
        ops_per_s: settings.rate,
        value_bytes_min: 4096,
        value_bytes_max: 4096,
        key_count: 512,
        realtime_priority: true,
        ..ReferenceClientConfig::default()
    };
    let reference_client = ReferenceClient::start(node.target_addr(), plan)?;
    let attacker = AttackThread::start(attack, node.target_addr(), true)?;
    for _ in 0..settings.rounds {
        std::thread::sleep(SETTLE_TIME);
        reference_client.begin_slice(MeasurePhase::Quiet);
        std::thread::sleep(settings.slice);
        reference_client.begin_slice(MeasurePhase::Attacked);
        attacker.resume();
        std::thread::sleep(settings.slice);
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

/// A quantile of each slice of a phase, and of these the median, in microseconds: of what happens in most slices
/// nothing is lost, and a pause of the machine in one of them is left out.
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

/// The value at a quantile, 0 where there is none.
fn quantile_of(mut values: Vec<u64>, quantile: f64) -> u64 {
    values.sort_unstable();
    let index = (values.len() as f64 * quantile) as usize;
    values.get(index.min(values.len().saturating_sub(1))).copied().unwrap_or(0)
}

/// Gives a node keys, so that lists are long.
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
