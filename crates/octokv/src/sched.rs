//! `octokv sched`, `octokv stats`: who is served where and when on a node that runs, and what its monitor sees.

use crate::admin::{At, document, failed};
use crate::exit_status::{Failure, Outcome};
use clap::{Args, Subcommand};
use octokv_admin::http_client::{self, Error};
use octokv_admin::scheduling_api::{HostSettings, SchedulingSettings, WindowReport};
use std::io::{IsTerminal, Write};
use std::time::Duration;

/// How often a live table looks for a new window.
const LOOK_EVERY: Duration = Duration::from_millis(200);

/// Scheduling.
#[derive(Debug, Subcommand)]
pub enum Sched {
    /// Change it, now and after every restart. It holds from the end of the window that runs.
    Set(Box<Set>),
    /// Say what one host has under fair, its limits on each core; what is not given stays as it is.
    Host(OneHost),
    /// Print all of it, a setting per line.
    Show {
        #[command(flatten)]
        at: At,
    },
}

/// What may be set; what is not given stays as it is.
#[derive(Debug, Args)]
pub struct Set {
    /// none, round-robin or proportional (OctoKV), inter, intra, hybrid or auto (OctoFAS), or fair.
    #[arg(long)]
    pub policy: Option<String>,
    /// How long is measured before the next choice, in milliseconds: 10 to 60000.
    #[arg(long, value_name = "MS")]
    pub window_ms: Option<u64>,
    /// T_OL: round-robin and proportional move nothing while no core is busier than this, 0 to 1.
    #[arg(long, value_name = "PART", value_parser = finite)]
    pub overload: Option<f64>,
    /// T_LB of OctoKV: nor while the busiest and the least busy core differ by no more than this, 0 to 1.
    #[arg(long, value_name = "PART", value_parser = finite)]
    pub imbalance_difference: Option<f64>,
    /// T_LB of OctoFAS: auto takes load for unbalanced below this ratio of least to most, 0 to 1.
    #[arg(long, value_name = "RATIO", value_parser = finite)]
    pub imbalance_ratio: Option<f64>,
    /// auto takes flows for treated unfairly at or below this ratio of slowdowns, 0 to 1.
    #[arg(long, value_name = "RATIO", value_parser = finite)]
    pub fairness: Option<f64>,
    /// How often a request of a dense flow goes back, for each time that it is more intense than sparse ones, 0 to 100.
    #[arg(long, value_parser = finite)]
    pub alpha: Option<f64>,
    /// The most times that a request goes back, 0 to 1000.
    #[arg(long, value_name = "COUNT")]
    pub backwardings_max: Option<u32>,
    /// How long a request is held back at the most, in microseconds: 10 to 1000000.
    #[arg(long, value_name = "US")]
    pub held_max_us: Option<u64>,
    /// Whose requests inter moves: all, dense or sparse.
    #[arg(long, value_name = "FLOWS")]
    pub move_flows: Option<String>,
    /// Requests of a core that fair lets run at a time, 1 to 4096.
    #[arg(long, value_name = "COUNT")]
    pub in_flight: Option<u32>,
    /// The most operations a second of a host on a core under fair; 0 for no limit.
    #[arg(long, value_name = "RATE")]
    pub operations_per_s: Option<u64>,
    /// The most bytes a second of a host on a core under fair; 0 for no limit.
    #[arg(long, value_name = "RATE")]
    pub bytes_per_s: Option<u64>,
    /// How much of unused limits is kept, in milliseconds: 1 to 10000.
    #[arg(long, value_name = "MS")]
    pub burst_ms: Option<u64>,
    #[command(flatten)]
    pub at: At,
}

/// What one host has.
#[derive(Debug, Args)]
pub struct OneHost {
    /// The host's NQN.
    #[arg(value_parser = crate::cli::nqn)]
    pub nqn: String,
    /// Its part of the cores' time beside the others', who have 1: 1 to 1000.
    #[arg(long)]
    pub weight: Option<u32>,
    /// The most operations a second; 0 for no limit.
    #[arg(long, value_name = "RATE")]
    pub operations_per_s: Option<u64>,
    /// The most bytes a second; 0 for no limit.
    #[arg(long, value_name = "RATE")]
    pub bytes_per_s: Option<u64>,
    /// How much of unused limits is kept, in milliseconds: 1 to 10000.
    #[arg(long, value_name = "MS")]
    pub burst_ms: Option<u64>,
    #[command(flatten)]
    pub at: At,
}

/// Arguments of `stats`.
#[derive(Debug, Args)]
pub struct Stats {
    /// Print the last window and end, on a terminal, too; elsewhere that is what happens.
    #[arg(long)]
    pub once: bool,
    #[command(flatten)]
    pub at: At,
}

/// A number that a JSON document can carry.
fn finite(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(number) if number.is_finite() => Ok(number),
        Ok(_) => Err("a finite number is needed".to_owned()),
        Err(error) => Err(error.to_string()),
    }
}

/// Runs `octokv sched`.
pub fn sched(command: &Sched) -> Outcome {
    match command {
        Sched::Set(set) => {
            let change = SchedulingSettings {
                policy: set.policy.clone(),
                window_ms: set.window_ms,
                overload: set.overload,
                imbalance_difference: set.imbalance_difference,
                imbalance_ratio: set.imbalance_ratio,
                fairness: set.fairness,
                alpha: set.alpha,
                backwardings_max: set.backwardings_max,
                held_max_us: set.held_max_us,
                move_flows: set.move_flows.clone(),
                in_flight: set.in_flight,
                operations_per_s: set.operations_per_s,
                bytes_per_s: set.bytes_per_s,
                burst_ms: set.burst_ms,
                ..SchedulingSettings::default()
            };
            if change.is_empty() {
                return Err(Failure::Usage("sched set: nothing to set was given (see --help)".to_owned()));
            }
            http_client::put(&set.at.socket()?, "/v1/scheduling", Some(&change)).map_err(failed)
        }
        Sched::Host(one) => {
            let OneHost { weight, operations_per_s, bytes_per_s, burst_ms, .. } = *one;
            let host = HostSettings { weight, operations_per_s, bytes_per_s, burst_ms };
            if host.is_empty() {
                return Err(Failure::Usage("sched host: nothing to set was given (see --help)".to_owned()));
            }
            let hosts = [(one.nqn.clone(), host)].into();
            let change = SchedulingSettings { hosts, ..SchedulingSettings::default() };
            http_client::put(&one.at.socket()?, "/v1/scheduling", Some(&change)).map_err(failed)
        }
        Sched::Show { at } => {
            let settings: SchedulingSettings =
                http_client::get(&at.socket()?, "/v1/scheduling").map_err(failed)?;
            if at.json {
                return document(&settings);
            }
            let value = serde_json::to_value(&settings).map_err(|error| anyhow::anyhow!("{error}"))?;
            let mut out = std::io::stdout().lock();
            for (name, value) in value.as_object().into_iter().flatten().filter(|(name, _)| *name != "hosts")
            {
                match value.as_str() {
                    Some(text) => writeln!(out, "{name:<22} {text}")?,
                    None => writeln!(out, "{name:<22} {value}")?,
                }
            }
            for (host, HostSettings { weight, operations_per_s, bytes_per_s, burst_ms }) in &settings.hosts {
                let all = [weight.map(u64::from), *operations_per_s, *bytes_per_s, *burst_ms];
                let [weight, operations, bytes, burst] = all.map(Option::unwrap_or_default);
                writeln!(
                    out,
                    "host {host}: weight {weight}, operations_per_s {operations}, bytes_per_s {bytes}, burst_ms {burst}"
                )?;
            }
            Ok(())
        }
    }
}

/// Runs `octokv stats`.
pub fn stats(arguments: &Stats) -> Outcome {
    let socket = arguments.at.socket()?;
    let live = std::io::stdout().is_terminal() && !arguments.once && !arguments.at.json;
    let mut shown = 0;
    loop {
        match http_client::get::<WindowReport>(&socket, "/v1/scheduling/window") {
            Ok(window) if arguments.at.json => return document(&window),
            Ok(window) => {
                if window.number != shown {
                    shown = window.number;
                    if live {
                        // The cursor to the upper left corner, and nothing below it.
                        print!("\x1b[H\x1b[2J");
                    }
                    show(&window)?;
                }
                if !live {
                    return Ok(());
                }
            }
            // The first window has not ended yet.
            Err(Error::Refused(404, _)) => {}
            Err(error) => return Err(failed(error)),
        }
        std::thread::sleep(LOOK_EVERY);
    }
}

fn show(window: &WindowReport) -> Outcome {
    let mut out = std::io::stdout().lock();
    let WindowReport { number, length_ms, policy, chosen, fairness, load_balance, .. } = window;
    writeln!(out, "window {number}, {length_ms:.0} ms, policy {policy}: {chosen}")?;
    write!(out, "fairness {fairness:.2}, load balance {load_balance:.2}")?;
    writeln!(out, " ({:.2} if nothing had been moved)", window.natural_load_balance)?;
    writeln!(out, "\ncore   busy  target     kv  device  queue  requests     moved  for others")?;
    for (index, core) in window.cores.iter().enumerate() {
        let percent = |part: f64| format!("{:.0} %", part * 100.0);
        // A core that did nothing has no parts of it.
        let share = |part: f64| if core.utilisation > 0.0 { percent(part) } else { "-".to_owned() };
        writeln!(
            out,
            "{index:<4} {:>6}  {:>6} {:>6}  {:>6} {:>6.1} {:>9} {:>9} {:>11}",
            percent(core.utilisation),
            share(core.target_share),
            share(core.kv_share),
            share(core.device_share),
            core.queue_depth,
            core.requests,
            core.moved,
            core.ran_for_others
        )?;
    }
    writeln!(out, "\n operations/s     MiB/s   in node  waited  network  slowdown  host")?;
    for flow in &window.flows {
        let slowdown = flow.slowdown.map_or("-".to_owned(), |slowdown| format!("{slowdown:.2}"));
        let host = if flow.host.is_empty() { "(others)" } else { &flow.host };
        let mark = match (flow.dense, flow.moves, flow.backwardings) {
            (_, _, back @ 1..) => format!("  dense, goes back {back} times"),
            (_, true, _) => "  moves".to_owned(),
            (true, ..) => "  dense".to_owned(),
            _ => String::new(),
        };
        writeln!(
            out,
            "{:>13.0} {:>9.1} {:>6.0} us {:>4.0} us {:>5.0} us {slowdown:>9}  {host}{mark}",
            flow.operations_s,
            flow.bytes_s / f64::from(1 << 20),
            flow.latency_us,
            flow.waited_us,
            flow.round_trip_us,
        )?;
    }
    writeln!(out, "\nmeasured by core {} in {:.0} us", window.measured_by, window.took_us)?;
    Ok(())
}
