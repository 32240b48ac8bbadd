//! `octokv sched`, `octokv stats`: scheduling configuration and metrics of a running node.

use crate::admin::{AdminArgs, print_json, to_cli_error};
use crate::arg_parsers::{parse_finite, parse_host_nqn};
use crate::exit_status::{CliError, CliResult};
use crate::size::Size;
use clap::{Args, Subcommand};
use octokv_admin::device_load_report::{DeviceLoadReport, DeviceTokenReport, OperationLoadReport};
use octokv_admin::http_client::{self, AdminClientError};
use octokv_admin::log_report::LogReport;
use octokv_admin::scheduling_api::{
    SCHEDULING_INTERVAL_PATH, SCHEDULING_PATH, SchedConfigPatch, SchedulingReport, TenantQosPatch,
};
use octokv_admin::tree_report::{SnapshotReport, TreeReport};
use std::io::{IsTerminal, Write};
use std::time::Duration;

/// Poll interval of the live table.
const POLL_INTERVAL: Duration = Duration::from_millis(200);

/// Scheduling.
#[derive(Debug, Subcommand)]
pub enum SchedCommand {
    /// Change settings, now and after every restart. They apply from the next sampling interval.
    Set(Box<SchedSetArgs>),
    /// Set weight and limits of one host under fair, on each core; absent flags change nothing.
    Host(SchedHostArgs),
    /// Print all settings, one per line.
    Show {
        #[command(flatten)]
        admin_args: AdminArgs,
    },
}

/// Settings to change; absent flags change nothing.
#[derive(Debug, Args)]
pub struct SchedSetArgs {
    /// none, round-robin or proportional (OctoKV), inter, intra, hybrid or auto (OctoFAS), or fair.
    #[arg(long)]
    pub policy: Option<String>,
    /// Setting interval_ms: length of the sampling interval in milliseconds, 10 to 60000.
    #[arg(long, value_name = "MS")]
    pub window_ms: Option<u64>,
    /// T_OL of OctoKV: round-robin and proportional act only while a core's load is above this, 0 to 1.
    #[arg(long, value_name = "PART", value_parser = parse_finite)]
    pub overload: Option<f64>,
    /// T_LB of OctoKV: and only while the greatest and the least load differ by more than this, 0 to 1.
    #[arg(long, value_name = "PART", value_parser = parse_finite)]
    pub imbalance_difference: Option<f64>,
    /// T_LB of OctoFAS: auto balances below this ratio of least to greatest load, 0 to 1.
    #[arg(long, value_name = "RATIO", value_parser = parse_finite)]
    pub imbalance_ratio: Option<f64>,
    /// auto restores fairness at or below this ratio of least to greatest slowdown, 0 to 1.
    #[arg(long, value_name = "RATIO", value_parser = parse_finite)]
    pub fairness: Option<f64>,
    /// Requeues of a dense host's request per unit of its intensity relative to sparse hosts, 0 to 100.
    #[arg(long, value_parser = parse_finite)]
    pub alpha: Option<f64>,
    /// Setting requeues_max: maximum requeues of a request, 0 to 1000.
    #[arg(long, value_name = "COUNT")]
    pub backwardings_max: Option<u32>,
    /// Maximum time of a request in the requeue queue in microseconds, 10 to 1000000.
    #[arg(long, value_name = "US")]
    pub held_max_us: Option<u64>,
    /// Setting migrate_tenants: hosts whose requests inter migrates: all, dense or sparse.
    #[arg(long, value_name = "HOSTS")]
    pub move_flows: Option<String>,
    /// Maximum requests in flight from a core's fair queue, 1 to 4096.
    #[arg(long, value_name = "COUNT")]
    pub in_flight: Option<u32>,
    /// Limit of each host on each core under fair, in operations per second; 0 for no limit.
    #[arg(long, value_name = "RATE")]
    pub operations_per_s: Option<u64>,
    /// Limit of each host on each core under fair, in bytes per second; 0 for no limit.
    #[arg(long, value_name = "RATE")]
    pub bytes_per_s: Option<u64>,
    /// Burst tolerance of the limits in milliseconds, 1 to 10000.
    #[arg(long, value_name = "MS")]
    pub burst_ms: Option<u64>,
    #[command(flatten)]
    pub admin_args: AdminArgs,
}

/// QoS of one host.
#[derive(Debug, Args)]
pub struct SchedHostArgs {
    /// The host's NQN.
    #[arg(value_parser = parse_host_nqn)]
    pub nqn: String,
    /// Share of the cores' time relative to other hosts (weight 1), 1 to 1000.
    #[arg(long)]
    pub weight: Option<u32>,
    /// Limit in operations per second; 0 for no limit.
    #[arg(long, value_name = "RATE")]
    pub operations_per_s: Option<u64>,
    /// Limit in bytes per second; 0 for no limit.
    #[arg(long, value_name = "RATE")]
    pub bytes_per_s: Option<u64>,
    /// Burst tolerance of the limits in milliseconds, 1 to 10000.
    #[arg(long, value_name = "MS")]
    pub burst_ms: Option<u64>,
    #[command(flatten)]
    pub admin_args: AdminArgs,
}

/// Arguments of `stats`.
#[derive(Debug, Args)]
pub struct StatsArgs {
    /// Print the last sampling interval and exit; the default unless standard output is a terminal.
    #[arg(long)]
    pub once: bool,
    #[command(flatten)]
    pub admin_args: AdminArgs,
}

/// Runs `octokv sched`.
///
/// # Errors
/// The node's error, or an unreachable node.
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
                return Err(CliError::Usage("sched set: no setting given (see --help)".to_owned()));
            }
            http_client::put(&set.admin_args.socket_path()?, SCHEDULING_PATH, Some(&change))
                .map_err(to_cli_error)
        }
        SchedCommand::Host(one) => {
            let SchedHostArgs { weight, operations_per_s, bytes_per_s, burst_ms, .. } = *one;
            let host = TenantQosPatch { weight, operations_per_s, bytes_per_s, burst_ms };
            if host.is_empty() {
                return Err(CliError::Usage("sched host: no setting given (see --help)".to_owned()));
            }
            let hosts = [(one.nqn.clone(), host)].into();
            let change = SchedConfigPatch { hosts, ..SchedConfigPatch::default() };
            http_client::put(&one.admin_args.socket_path()?, SCHEDULING_PATH, Some(&change))
                .map_err(to_cli_error)
        }
        SchedCommand::Show { admin_args } => {
            let config: SchedConfigPatch =
                http_client::get(&admin_args.socket_path()?, SCHEDULING_PATH).map_err(to_cli_error)?;
            if admin_args.json {
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
///
/// # Errors
/// The node's error, or an unreachable node.
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
                        // Moves the cursor to the upper left corner and clears the screen.
                        print!("\x1b[H\x1b[2J");
                    }
                    print_interval(&interval)?;
                }
                if !live {
                    return Ok(());
                }
            }
            // The first sampling interval has not ended yet.
            Err(AdminClientError::Status(404, _)) => {}
            Err(error) => return Err(to_cli_error(error)),
        }
        std::thread::sleep(POLL_INTERVAL);
    }
}

fn print_interval(interval: &SchedulingReport) -> CliResult {
    let mut out = std::io::stdout().lock();
    let SchedulingReport { number, length_ms, policy, action, fairness, load_balance, .. } = interval;
    writeln!(out, "interval {number}, {length_ms:.0} ms, policy {policy}: {action}")?;
    write!(out, "fairness {fairness:.2}, load balance {load_balance:.2}")?;
    writeln!(out, " ({:.2} without migration)", interval.natural_load_balance)?;
    writeln!(out, "\ncore   busy  target     kv  device  queue  requests offloaded  for others")?;
    for (index, core) in interval.cores.iter().enumerate() {
        let percent = |part: f64| format!("{:.0} %", part * 100.0);
        // An idle core has no shares.
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
            (_, _, requeues @ 1..) => format!("  dense, requeued up to {requeues} times"),
            (_, true, _) => "  migrates".to_owned(),
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
    for cache in &interval.caches {
        let reads = cache.hits + cache.misses;
        let hit_percent = if reads > 0 { cache.hits as f64 * 100.0 / reads as f64 } else { 0.0 };
        write!(out, "\ncache of namespace {}: {hit_percent:.1} % of {reads} reads, ", cache.nsid)?;
        write!(out, "{} of {} used, ", Size(cache.used_bytes), Size(cache.capacity_bytes))?;
        write!(out, "{} entries, {} evicted", cache.entries, cache.evictions)?;
    }
    for prepared in &interval.prepared {
        let (nsid, bytes) = (prepared.nsid, Size(prepared.prepared_bytes));
        write!(out, "\nprepared of namespace {nsid}: {bytes}")?;
    }
    for compacted in &interval.compacted {
        let (nsid, bytes) = (compacted.nsid, Size(compacted.moved_bytes));
        write!(out, "\ncompaction of namespace {nsid}: {} values in pieces, ", compacted.values_in_pieces)?;
        write!(out, "{} joined, ", compacted.joined_values)?;
        write!(out, "{} records moved, {bytes} written", compacted.moved_records)?;
    }
    if !interval.caches.is_empty() || !interval.prepared.is_empty() || !interval.compacted.is_empty() {
        writeln!(out)?;
    }
    for device in &interval.devices {
        print_device(&mut out, device)?;
    }
    for tree in &interval.trees {
        print_tree(&mut out, tree)?;
    }
    for log in &interval.logs {
        print_log(&mut out, log)?;
    }
    writeln!(out, "\nmeasured by core {} in {:.0} us", interval.measured_by, interval.took_us)?;
    Ok(())
}

/// The device in a headline, if there are several.
fn device_name(device: Option<u16>) -> String {
    device.map_or_else(String::new, |index| format!(", device {index}"))
}

fn print_device(out: &mut impl Write, device: &DeviceLoadReport) -> CliResult {
    let DeviceLoadReport {
        nsid,
        index,
        device: name,
        failure,
        reads,
        writes,
        flushes,
        errors,
        in_flight,
        ..
    } = device;
    write!(out, "\ndevice {index} of namespace {nsid}, {name}")?;
    match failure {
        Some(why) => writeln!(out, ": NOT AVAILABLE: {why}")?,
        None => writeln!(out)?,
    }
    for (what, load) in [("reads", reads), ("writes", writes), ("flushes", flushes)] {
        let OperationLoadReport { operations, bytes, mean_us, max_us } = *load;
        write!(out, "  {operations} {what}")?;
        if bytes > 0 {
            write!(out, " of {}", Size(bytes))?;
        }
        writeln!(out, ": mean {mean_us:.0} us, longest {max_us:.0} us")?;
    }
    writeln!(out, "  {errors} failed, {in_flight} in flight")?;
    let (put, got) = (Size(device.put_bytes), Size(device.got_bytes));
    write!(out, "  {put} put, {got} read by hosts")?;
    match device.write_amplification {
        Some(times) => writeln!(out, "; {times:.2} bytes written for each put")?,
        None => writeln!(out)?,
    }
    if device.swapped_puts + device.merged_values > 0 || device.swapped_keys > 0 {
        let DeviceLoadReport { swapped_keys, swapped_puts, merged_values, .. } = device;
        writeln!(
            out,
            "  {swapped_keys} keys on other devices: {swapped_puts} puts swapped, {merged_values} values merged back"
        )?;
    }
    if let Some(tokens) = device.tokens {
        let DeviceTokenReport { capacity, active, waiting, get_cost, put_cost, delete_cost } = tokens;
        write!(out, "  {active} of {capacity} tokens active, {waiting} wait; ")?;
        writeln!(out, "a get costs {get_cost}, a put {put_cost}, a delete {delete_cost}")?;
    }
    Ok(())
}

fn print_log(out: &mut impl Write, log: &LogReport) -> CliResult {
    let LogReport { nsid, stores, segments, chunks, free_chunks, key_chunks, value_chunks, .. } = log;
    let device = device_name(log.device);
    writeln!(out, "\nlogs of namespace {nsid}{device}: {stores} stores, {segments} segments")?;
    write!(out, "  {chunks} chunks of {}: {free_chunks} free, ", Size(log.chunk_bytes))?;
    write!(out, "{} for live data at most, {} retired, ", log.capacity_chunks, log.retired_chunks)?;
    writeln!(out, "{} pinned by device errors", log.pinned_chunks)?;
    let [keys, values, entries, segment_table, chunk_table, moved] = [
        log.key_live_bytes,
        log.value_live_bytes,
        log.entry_bytes,
        log.segment_table_bytes,
        log.chunk_table_bytes,
        log.moved_bytes,
    ]
    .map(Size);
    writeln!(out, "  key logs: {key_chunks} chunks, {keys} live; {entries} of entries")?;
    writeln!(out, "  value logs: {value_chunks} chunks, {values} live")?;
    writeln!(out, "  memory: segment tables {segment_table}, chunk table {chunk_table}")?;
    let LogReport {
        batches, images, markers, splits, waited_writes, repeated_reads, image_cache_hits, ..
    } = log;
    writeln!(out, "  {batches} batches: {images} segment images, {markers} markers; {splits} splits")?;
    write!(out, "  {waited_writes} writes waited for space; {repeated_reads} reads repeated, ")?;
    writeln!(out, "{image_cache_hits} segment images found in memory")?;
    let LogReport { compaction_rounds, moved_images, visited_segments, moved_values, .. } = log;
    write!(out, "  compaction: {compaction_rounds} rounds, {moved_images} images moved, ")?;
    writeln!(out, "{visited_segments} segments visited, {moved_values} values moved: {moved}")?;
    if log.failed_splits > 0 {
        writeln!(out, "  splits that device failures or a lack of memory ended: {}", log.failed_splits)?;
    }
    let (passes, read, skipped) = (log.scrub_passes, Size(log.scrub_read_bytes), log.scrub_skipped_segments);
    writeln!(out, "  scrub: {passes} passes, {read} read, {skipped} segments skipped")?;
    let (buckets, values) = (log.scrub_damaged_buckets, log.scrub_damaged_values);
    if buckets > 0 || values > 0 {
        writeln!(out, "  damage found by the scrub: {buckets} buckets of keys, {values} values")?;
    }
    if log.lost_values > 0 || log.lost_stores > 0 {
        writeln!(out, "  damage: {} values lost, {} stores lost", log.lost_values, log.lost_stores)?;
    }
    if log.miscounts > 0 {
        writeln!(out, "  damage: {} counts of live contents were wrong (octokv check)", log.miscounts)?;
    }
    Ok(())
}

fn print_tree(out: &mut impl Write, tree: &TreeReport) -> CliResult {
    let device = device_name(tree.device);
    writeln!(out, "\ntree of namespace {}{device}: level  tables       bytes", tree.nsid)?;
    let lowest = tree.levels.iter().rposition(|level| level.tables > 0).unwrap_or(0);
    for (number, level) in tree.levels.iter().enumerate().take(lowest + 1) {
        writeln!(out, "{number:>28} {:>7} {:>11}", level.tables, Size(level.bytes).to_string())?;
    }
    let TreeReport { memtables, flushes, compactions, moved_values, segments, iterators, .. } = tree;
    let [memtable_bytes, flushed, written, moved, pending] =
        [tree.memtable_bytes, tree.flushed_bytes, tree.compacted_bytes, tree.moved_bytes, tree.pending_bytes]
            .map(Size);
    writeln!(out, "  {memtables} memtables: {memtable_bytes}; {flushes} flushes: {flushed} written")?;
    write!(out, "  {compactions} compactions: {written} of tables written, ")?;
    writeln!(out, "{moved_values} values moved: {moved}; {pending} pending")?;
    write!(out, "  writes: {} waited, {:.0} ms in all; ", tree.waited_writes, tree.waited_ms)?;
    writeln!(out, "{} delayed, {:.0} ms in all", tree.delayed_writes, tree.delayed_ms)?;
    if tree.postponed_compactions > 0 {
        let TreeReport { postponed_tables, postponed_segments, postponed_compactions, .. } = tree;
        write!(out, "  device errors: {postponed_tables} tables and {postponed_segments} value segments ")?;
        writeln!(out, "postponed; {postponed_compactions} compactions failed")?;
    }
    let [segment_bytes, live, pinned] =
        [tree.segment_bytes, tree.segment_live_bytes, tree.pinned_bytes].map(Size);
    writeln!(out, "  {segments} value segments: {segment_bytes}, {live} of it live")?;
    write!(
        out,
        "  {iterators} iterators, {} expired; {pinned} held by older versions",
        tree.expired_iterators
    )?;
    if let Some(SnapshotReport { sequence, age_s }) = tree.oldest_snapshot {
        write!(out, "; oldest snapshot: {age_s:.0} s, change {sequence} of {}", tree.last_sequence)?;
    }
    writeln!(out)?;
    Ok(())
}
