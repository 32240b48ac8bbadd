//! `octokv demo`: puts, gets, a kill under load, a restart and a benchmark within seconds, on a temporary file.
//!
//! Three parts: a node in this process and a client; a node in a child process, killed while it writes, restarted and
//! verified against the acknowledged writes; a benchmark of that node.

use crate::bench::{PLATFORM, run_kv, session_config};
use crate::exit_status::{CliError, CliResult};
use crate::progress::ProgressReporter;
use crate::serve;
use crate::size::Size;
use anyhow::{Context, anyhow, ensure};
use octokv_base::Nanos;
use octokv_bench::ack_log::{AckLog, WriteControl};
use octokv_bench::kv_worker::{DEFAULT_POLLING, connect, disconnect};
use octokv_bench::server_process::{ServerProcess, resolve_address};
use octokv_bench::temporary_directory::temporary_directory;
use octokv_bench::{BenchConfig, SizeDistribution, StopCondition, Workload};
use octokv_client::blocking::BlockingClient;
use octokv_client::{ClientConfig, Reconnect, Session, Url};
use octokv_node::{DeviceConfig, NodeConfig};
use octokv_runtime::KernelSockets;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;

const DEVICE_BYTES: u64 = 256 << 20;
const ACK_LOG_KEYS: usize = 2_000;
const ACK_LOG_DEPTH: usize = 64;
/// The kill follows this many acknowledged writes of the load, or this time.
const KILL_AFTER_WRITES: u64 = 5_000;
const KILL_AFTER: Nanos = Nanos::from_millis(1_500);
const BENCH_KEYS: u64 = 4_000;
const BENCH_TIME: Nanos = Nanos::from_millis(700);

/// Runs `octokv demo`.
///
/// # Errors
/// The first step that failed.
pub fn run() -> CliResult {
    println!("octokv demo: a key-value storage node over NVMe/TCP, on a temporary file\n");
    // Dropped on every return: the directory and the file are removed.
    let directory = temporary_directory("octokv-demo-")?;
    let device = directory.path().join("device");
    first_steps(&device)?;
    kill_and_recover(&device)?;
    run_bench(&device)?;
    directory.close().context("the temporary directory")?;
    println!("The temporary file is gone. Next: octokv serve, then octokv put KEY VALUE (see README.md)");
    Ok(())
}

fn first_steps(device: &Path) -> CliResult {
    println!("1. A node on a file of {}, and a client", Size(DEVICE_BYTES));
    let node = serve::start_node(NodeConfig {
        devices: vec![DeviceConfig::File { path: device.to_owned(), create_bytes: Some(DEVICE_BYTES) }],
        listen: vec![SocketAddr::from((Ipv4Addr::LOCALHOST, 0))],
        ..NodeConfig::default()
    })?;
    let url = serve::node_url(&node)?;
    println!("   serving  {url}");
    let client = BlockingClient::connect(&url.to_string()).context("the node just started")?;
    let picture: Vec<u8> = (0..100_000u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let values: [(&str, &[u8]); 3] =
        [("hello", b"world"), ("greeting", "Grüezi mitenand".as_bytes()), ("picture", &picture)];
    for (key, value) in values {
        client.put(key.as_bytes(), value).with_context(|| format!("put {key}"))?;
        println!("   put      {key:<10} {:>7} bytes", value.len());
    }
    for (key, value) in values {
        let found = client.get(key.as_bytes()).with_context(|| format!("get {key}"))?;
        ensure_value_matches(found.as_deref() == Some(value), key)?;
        let text =
            std::str::from_utf8(value).map_or("the same bytes".to_owned(), |text| format!("\"{text}\""));
        println!("   get      {key:<10} {text}");
    }
    let count = client.list(b"", usize::MAX).context("list")?.len();
    println!("   list     {count} keys");
    client.delete(b"picture").context("delete")?;
    let gone = client.exist(b"picture").context("exist")?.is_none();
    ensure_value_matches(gone, "picture")?;
    println!("   delete   picture; its space is free again");
    drop(client);
    node.stop().map_err(|error| anyhow!("{error}"))?;
    println!("   stopped  cleanly\n");
    Ok(())
}

fn ensure_value_matches(right: bool, key: &str) -> CliResult {
    Ok((|| {
        ensure!(right, "key {key} does not have the value that was put");
        Ok(())
    })()?)
}

fn kill_and_recover(device: &Path) -> CliResult {
    println!("2. A server process, killed (SIGKILL) in the middle of {ACK_LOG_DEPTH} writes at a time");
    let mut server = start_server(device)?;
    let mut session = connect_session(&server.url)?;
    let mut ack_log = AckLog::new(ACK_LOG_KEYS, 2026);
    let begin = (PLATFORM.now)();
    let (mut killed, mut problem) = (None, None);
    let written = ack_log.write(&mut session, PLATFORM.now, ACK_LOG_DEPTH, |acknowledged| {
        let elapsed = (PLATFORM.now)().since(begin);
        if killed.is_none() && (acknowledged >= KILL_AFTER_WRITES || elapsed >= KILL_AFTER) {
            killed = Some(elapsed);
            problem = server.kill().err();
        }
        WriteControl::Continue
    });
    written.map_err(|error| anyhow!("{error}"))?;
    if let Some(error) = problem {
        return Err(error.into());
    }
    let elapsed = killed.ok_or_else(|| anyhow!("the server was lost before it was killed"))?;
    println!(
        "   killed   after {:.1} s: {} writes acknowledged (durable: each behind a flush), {} in doubt",
        elapsed.as_secs_f64(),
        ack_log.acknowledged_count(),
        ack_log.in_doubt_count()
    );
    drop(server);
    let begin = (PLATFORM.now)();
    let server = start_server(device)?;
    let restart_ms = (PLATFORM.now)().since(begin).as_secs_f64() * 1e3;
    println!("   restart  ready after {restart_ms:.0} ms");
    let mut session = self::connect_session(&server.url)?;
    let keys =
        ack_log.verify(&mut session, PLATFORM.now, ACK_LOG_DEPTH).map_err(|error| anyhow!("{error}"))?;
    disconnect(session, PLATFORM.now);
    println!("   verify   every acknowledged write is there: {keys} keys read back and compared\n");
    Ok(())
}

fn start_server(device: &Path) -> Result<ServerProcess, CliError> {
    let binary = std::env::current_exe().context("this program's own file")?;
    Ok(ServerProcess::start(&binary, device)?)
}

fn connect_session(url: &Url) -> Result<Session<KernelSockets>, CliError> {
    let config = ClientConfig {
        queue_depth: ACK_LOG_DEPTH as u16,
        reconnect: Reconnect::Never,
        ..session_config(url)
    };
    let session = connect(resolve_address(url)?, config, PLATFORM.now);
    Ok(session.map_err(|error| anyhow!("{error}"))?)
}

fn run_bench(device: &Path) -> CliResult {
    println!("3. A benchmark on this machine: 4 KiB values, every put durable before it is acknowledged");
    let server = start_server(device)?;
    println!("   {:<24} {:>10} {:>12} {:>12}", "", "ops/s", "mean", "p99");
    let (puts, time) = (StopCondition::Operations(BENCH_KEYS), StopCondition::Time(BENCH_TIME));
    let table = [
        ("put, 12 clients", Workload::FillSequential, 12, 1, puts),
        ("get, 12 clients", Workload::ReadRandom, 12, 1, time),
        ("get, 128 in flight", Workload::ReadRandom, 1, 128, time),
    ];
    for (name, workload, threads, depth, end) in table {
        let config = BenchConfig {
            workloads: vec![workload],
            // Another length than the keys of the acknowledgement log, so the two sets are disjoint.
            key_sizes: SizeDistribution::Fixed(12),
            value_sizes: SizeDistribution::Fixed(4096),
            keys: BENCH_KEYS,
            threads,
            depth,
            stop: end,
            ..BenchConfig::default()
        };
        for f in run_kv(&config, &server.url, &[None], DEFAULT_POLLING, ProgressReporter::silent())? {
            println!(
                "   {name:<24} {:>10.0} {:>9.0} us {:>9.0} us",
                f.throughput_ops_s, f.latency_us_mean, f.latency_us_p99
            );
        }
    }
    println!();
    Ok(())
}
