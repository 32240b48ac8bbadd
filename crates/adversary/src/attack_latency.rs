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

use crate::attacks::{Attack, Attacker};
use crate::node_process::Node;
use crate::raw_connection::{Peer, Victim};
use crate::reference_client::{Honest, Phase, Plan, Slice};
use anyhow::{Context, Result};
use std::path::PathBuf;
use std::time::Duration;

/// What to measure.
#[derive(Clone, Debug)]
pub struct Settings {
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
const SETTLING: Duration = Duration::from_millis(50);

/// Runs the attacks, one after the other, and prints a row for each.
///
/// # Errors
/// When the node or the honest host fails.
pub fn run(settings: &Settings, attacks: &[&'static Attack]) -> Result<()> {
    let directory = tempfile::tempdir()?;
    let cores = octokv_sys::thread::cores();
    let (first, last) = (cores[0], cores[cores.len() - 1]);
    let text = format!(
        "device = \"{}\"\nsize = \"512MiB\"\nlisten = [\"127.0.0.1:0\"]\ncores = [{first}]\n",
        settings.device
    );
    let node = Node::start(&settings.binary, &text, directory.path())?;
    octokv_sys::thread::pin(last)?;
    fill(node.victim(), settings.keys).context("filling the node")?;
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
        row(settings, &node, attack).with_context(|| format!("{}: {}", attack.name, node.said()))?;
    }
    node.stop()
}

fn row(settings: &Settings, node: &Node, attack: &'static Attack) -> Result<()> {
    let plan = Plan {
        rate: settings.rate,
        value_bytes_min: 4096,
        value_bytes_max: 4096,
        keys: 512,
        goes_first: true,
        ..Plan::default()
    };
    let honest = Honest::start(node.victim(), plan)?;
    let attacker = Attacker::start(attack, node.victim(), true)?;
    for _ in 0..settings.rounds {
        std::thread::sleep(SETTLING);
        honest.enter(Phase::Quiet);
        std::thread::sleep(settings.slice);
        honest.enter(Phase::Attacked);
        attacker.go();
        std::thread::sleep(settings.slice);
        honest.enter(Phase::Uncounted);
        attacker.rest();
    }
    attacker.end();
    let report = honest.finish()?;
    let slices = &report.slices;
    let quiet_p50 = typical_us(slices, Phase::Quiet, 0.5, |slice| &slice.from_due_ns);
    let p50 = typical_us(slices, Phase::Attacked, 0.5, |slice| &slice.from_due_ns);
    let quiet_due = typical_us(slices, Phase::Quiet, 0.99, |slice| &slice.from_due_ns);
    let due = typical_us(slices, Phase::Attacked, 0.99, |slice| &slice.from_due_ns);
    let quiet_begin = typical_us(slices, Phase::Quiet, 0.99, |slice| &slice.from_begin_ns);
    let begin = typical_us(slices, Phase::Attacked, 0.99, |slice| &slice.from_begin_ns);
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
        node.holdings()?.resident_bytes >> 20,
        attack.what
    );
    Ok(())
}

/// A quantile of each slice of a phase, and of these the median, in microseconds: of what happens in most slices
/// nothing is lost, and a pause of the machine in one of them is left out.
fn typical_us(slices: &[Slice], phase: Phase, quantile: f64, times: impl Fn(&Slice) -> &Vec<u64>) -> f64 {
    let of_slice = |slice: &Slice| at(times(slice).clone(), quantile);
    let all = slices.iter().filter(|slice| slice.phase == phase).map(of_slice).collect();
    at(all, 0.5) as f64 / 1000.0
}

/// The value at a quantile, 0 where there is none.
fn at(mut values: Vec<u64>, quantile: f64) -> u64 {
    values.sort_unstable();
    let index = (values.len() as f64 * quantile) as usize;
    values.get(index.min(values.len().saturating_sub(1))).copied().unwrap_or(0)
}

/// Gives a node keys, so that lists are long.
fn fill(victim: &Victim, keys: u32) -> Result<()> {
    let (_admin, mut io) = Peer::pair(victim, 128)?;
    let numbers: Vec<u32> = (0..keys).collect();
    for numbers in numbers.chunks(100) {
        let mut bytes = Vec::new();
        for (id, number) in (0..).zip(numbers) {
            let key = format!("fill{number:010}");
            bytes.extend(
                io.capsule(&crate::command_builder::store_here(id, key.as_bytes(), &[7; 64]), &[7; 64]),
            );
        }
        io.send(&bytes)?;
        for _ in numbers {
            crate::raw_connection::granted(&io.completion()?)?;
        }
    }
    Ok(())
}
