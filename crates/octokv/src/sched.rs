//! `octokv sched`, `octokv stats`: who is served where and when on a node that runs, and what its monitor sees.

use crate::admin::{AdminArgs, print_json, to_cli_error};
use crate::exit_status::{CliError, CliResult};
use clap::{Args, Subcommand};
use octokv_admin::http_client::{self, AdminClientError};
use octokv_admin::scheduling_api::{
    SCHEDULING_INTERVAL_PATH, SCHEDULING_PATH, SchedConfigPatch, SchedulingReport, TenantQosPatch,
};
use std::io::{IsTerminal, Write};
use std::time::Duration;

/// How often a live table looks for a new window.
const POLL_INTERVAL: Duration = Duration::from_millis(200);

/// Scheduling.
#[derive(Debug, Subcommand)]
pub enum SchedCommand {
    /// Change it, now and after every restart. It holds from the end of the window that runs.
    Set(Box<SchedSetArgs>),
    /// Say what one host has under fair, its limits on each core; what is not given stays as it is.
    Host(SchedHostArgs),
    /// Print all of it, a setting per line.
    Show {
        #[command(flatten)]
        admin_args: AdminArgs,
    },
}

/// What may be set; what is not given stays as it is.
#[derive(Debug, Args)]
pub struct SchedSetArgs {
    /// none, round-robin or proportional (OctoKV), inter, intra, hybrid or auto (OctoFAS), or fair.
    #[arg(long)]
    pub policy: Option<String>,
    /// How long is measured before the next choice, in milliseconds: 10 to 60000.
    #[arg(long, value_name = "MS")]
    pub window_ms: Option<u64>,
    /// T_OL: round-robin and proportional move nothing while no core is busier than this, 0 to 1.
    #[arg(long, value_name = "PART", value_parser = parse_finite)]
    pub overload: Option<f64>,
    /// T_LB of OctoKV: nor while the busiest and the least busy core differ by no more than this, 0 to 1.
    #[arg(long, value_name = "PART", value_parser = parse_finite)]
    pub imbalance_difference: Option<f64>,
    /// T_LB of OctoFAS: auto takes load for unbalanced below this ratio of least to most, 0 to 1.
    #[arg(long, value_name = "RATIO", value_parser = parse_finite)]
    pub imbalance_ratio: Option<f64>,
    /// auto takes flows for treated unfairly at or below this ratio of slowdowns, 0 to 1.
    #[arg(long, value_name = "RATIO", value_parser = parse_finite)]
    pub fairness: Option<f64>,
    /// How often a request of a dense flow goes back, for each time that it is more intense than sparse ones, 0 to 100.
    #[arg(long, value_parser = parse_finite)]
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
    pub admin_args: AdminArgs,
}

/// What one host has.
#[derive(Debug, Args)]
pub struct SchedHostArgs {
    /// The host's NQN.
    #[arg(value_parser = crate::cli::parse_host_nqn)]
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
    pub admin_args: AdminArgs,
}

/// Arguments of `stats`.
#[derive(Debug, Args)]
pub struct StatsArgs {
    /// Print the last window and end, on a terminal, too; elsewhere that is what happens.
    #[arg(long)]
    pub once: bool,
    #[command(flatten)]
    pub admin_args: AdminArgs,
}

/// A number that a JSON document can carry.
fn parse_finite(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(number) if number.is_finite() => Ok(number),
        Ok(_) => Err("a finite number is needed".to_owned()),
        Err(error) => Err(error.to_string()),
    }
}

/// Runs `octokv sched`.
pub fn sched(command: &SchedCommand) -> CliResult {
    match command {
        SchedCommand::Set(set) => {
            let change = SchedConfigPatch {
                policy: set.policy.clone(),
                interval_ms: set.window_ms,
                overload: set.overload,
                imbalance_difference: set.imbalance_difference,
                imbalance_ratio: set.imbalance_ratio,
                fairness: set.fairness,
                alpha: set.alpha,
                requeues_max: set.backwardings_max,
                held_max_us: set.held_max_us,
                migrate_tenants: set.move_flows.clone(),
                in_flight: set.in_flight,
                operations_per_s: set.operations_per_s,
                bytes_per_s: set.bytes_per_s,
                burst_ms: set.burst_ms,
                ..SchedConfigPatch::default()
            };
            if change.is_empty() {
                return Err(CliError::Usage("sched set: nothing to set was given (see --help)".to_owned()));
            }
            http_client::put(&set.admin_args.socket_path()?, SCHEDULING_PATH, Some(&change))
                .map_err(to_cli_error)
        }
        SchedCommand::Host(one) => {
            let SchedHostArgs { weight, operations_per_s, bytes_per_s, burst_ms, .. } = *one;
            let host = TenantQosPatch { weight, operations_per_s, bytes_per_s, burst_ms };
            if host.is_empty() {
                return Err(CliError::Usage("sched host: nothing to set was given (see --help)".to_owned()));
            }
            let hosts = [(one.nqn.clone(), host)].into();
            let change = SchedConfigPatch { hosts, ..SchedConfigPatch::default() };
            http_client::put(&one.admin_args.socket_path()?, SCHEDULING_PATH, Some(&change))
                .map_err(to_cli_error)
        }
        SchedCommand::Show { admin_args: at } => {
            let config: SchedConfigPatch =
                http_client::get(&at.socket_path()?, SCHEDULING_PATH).map_err(to_cli_error)?;
            if at.json {
                return print_json(&config);
            }
            let value = serde_json::to_value(&config).map_err(|error| anyhow::anyhow!("{error}"))?;
            let mut out = std::io::stdout().lock();
            for (name, value) in value.as_object().into_iter().flatten().filter(|(name, _)| *name != "hosts")
            {
                match value.as_str() {
                    Some(text) => writeln!(out, "{name:<22} {text}")?,
                    None => writeln!(out, "{name:<22} {value}")?,
                }
            }
            for (host, TenantQosPatch { weight, operations_per_s, bytes_per_s, burst_ms }) in &config.hosts {
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
pub fn stats(arguments: &StatsArgs) -> CliResult {
    let socket = arguments.admin_args.socket_path()?;
    let live = std::io::stdout().is_terminal() && !arguments.once && !arguments.admin_args.json;
    let mut shown = 0;
    loop {
        match http_client::get::<SchedulingReport>(&socket, SCHEDULING_INTERVAL_PATH) {
            Ok(interval) if arguments.admin_args.json => return print_json(&interval),
            Ok(interval) => {
                if interval.number != shown {
                    shown = interval.number;
                    if live {
                        // The cursor to the upper left corner, and nothing below it.
                        print!("\x1b[H\x1b[2J");
                    }
                    print_interval(&interval)?;
                }
                if !live {
                    return Ok(());
                }
            }
            // The first window has not ended yet.
            Err(AdminClientError::Status(404, _)) => {}
            Err(error) => return Err(to_cli_error(error)),
        }
        std::thread::sleep(POLL_INTERVAL);
    }
}

fn print_interval(interval: &SchedulingReport) -> CliResult {
    let mut out = std::io::stdout().lock();
    let SchedulingReport { number, length_ms, policy, action, fairness, load_balance, .. } = interval;
    writeln!(out, "window {number}, {length_ms:.0} ms, policy {policy}: {action}")?;
    write!(out, "fairness {fairness:.2}, load balance {load_balance:.2}")?;
    writeln!(out, " ({:.2} if nothing had been moved)", interval.natural_load_balance)?;
    writeln!(out, "\ncore   busy  target     kv  device  queue  requests     moved  for others")?;
    for (index, core) in interval.cores.iter().enumerate() {
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
            core.offloaded,
            core.executed_for_others
        )?;
    }
    writeln!(out, "\n operations/s     MiB/s   in node  waited  network  slowdown  host")?;
    for tenant in &interval.tenants {
        let slowdown = tenant.slowdown.map_or("-".to_owned(), |slowdown| format!("{slowdown:.2}"));
        let host = if tenant.host.is_empty() { "(others)" } else { &tenant.host };
        let mark = match (tenant.dense, tenant.migrates, tenant.requeues) {
            (_, _, back @ 1..) => format!("  dense, goes back {back} times"),
            (_, true, _) => "  moves".to_owned(),
            (true, ..) => "  dense".to_owned(),
            _ => String::new(),
        };
        writeln!(
            out,
            "{:>13.0} {:>9.1} {:>6.0} us {:>4.0} us {:>5.0} us {slowdown:>9}  {host}{mark}",
            tenant.operations_s,
            tenant.bytes_s / f64::from(1 << 20),
            tenant.latency_us,
            tenant.waited_us,
            tenant.round_trip_us,
        )?;
    }
    writeln!(out, "\nmeasured by core {} in {:.0} us", interval.measured_by, interval.took_us)?;
    Ok(())
}
