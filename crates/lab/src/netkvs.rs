//! The NetKVS poster's Table 1: puts of 32 KiB values in order, RocksDB on a remote disk against the hash engine
//! behind Key Value commands, and the same engine in the client between them.
//!
//! ```text
//!  emulated guest ─ (a) db_bench ─ RocksDB ─ ext4 ─ the kernel's nvme-tcp ─┐
//!                 ─ (c) octokv bench ─ hash engine ─ our initiator ────────┼─▶ one node on this machine,
//!                 ─ (d) octokv bench ─ our initiator ──────────────────────┤   each round on new namespaces
//!  this machine   ─ (c), (d) alternating ──────────────────────────────────┘
//! ```
//! The poster has no results of (b), a remote file system, so it is left out.

use crate::cli::ReproduceArgs;
use crate::comparison_table::{
    MetricRow, NetkvsReportConfig, SystemSeries, format_differences, format_table,
};
use crate::error::{LabError, LabResult};
use crate::json_report;
use crate::octokv_binary::octokv_binary;
use crate::output_parser::{self, SampleResult};
use crate::qemu_guest::{GuestTask, QemuGuest};
use anyhow::{Context, anyhow};
use octokv_bench::child_process::last_line;
use octokv_bench::server_process::ServerProcess;
use octokv_bench::temporary_directory::temporary_directory;
use octokv_client::Url;
use std::fmt::Write as _;
use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};
use tempfile::TempDir;

/// The table's throughput times its average latency, in puts of 32 KiB, gives 15.0 for both of its rows.
const THREADS: usize = 15;
const VALUE_BYTES: usize = 32 << 10;
const KEY_BYTES: usize = 16;
const ONLY_FIGURE: &str = "table-1";
/// Prefix of the temporary directory.
const DIRECTORY_PREFIX: &str = "octokv-netkvs-";
/// Namespace ids: the file system's, and the first of each kind; each round takes the next.
const FILE_SYSTEM_NSID: usize = 2;
const GUEST_KV_NSID: usize = 10;
const GUEST_BLOCK_NSID: usize = 20;
const NATIVE_KV_NSID: usize = 30;
const NATIVE_BLOCK_NSID: usize = 40;
const GUEST_TASK: GuestTask = GuestTask { script: "netkvs.sh", programs: &["db_bench", "mkfs.ext4"] };
/// Time limit of the guest, in seconds.
const GUEST_LIMIT_S: u64 = 240;

const FIGURE_GUEST: &str = "Table 1";
const FIGURE_NATIVE: &str = "Table 1 without a guest";
const SERIES_A_SYNC: &str = "(a) RocksDB on ext4, each put synced";
const SERIES_A: &str = "(a) RocksDB on ext4, not synced";
const SERIES_C: &str = "(c) hash engine in the client, on blocks";
const SERIES_D: &str = "(d) Key Value commands";
const RATIO_D_A_SYNC: &str = "(d) against (a), each put synced";
const RATIO_D_A: &str = "(d) against (a), not synced";
const RATIO_D_C: &str = "(d) against (c)";

/// Runs `octokv reproduce netkvs`.
///
/// # Errors
/// [`LabError::Usage`] for an unknown figure or `--svg`; [`LabError::Failed`] if a run failed that this machine supports.
pub fn run(reproduce: &ReproduceArgs) -> LabResult {
    if let Some(figure) = reproduce.figure.as_ref().filter(|name| *name != ONLY_FIGURE) {
        return Err(LabError::Usage(format!(
            "--figure: the NetKVS poster has no \"{figure}\"; it has {ONLY_FIGURE}"
        )));
    }
    if reproduce.svg.is_some() {
        return Err(LabError::Usage("--svg: the NetKVS poster has a table and no figure".to_owned()));
    }
    let config = config_for(reproduce.quick);
    let directory = match &reproduce.directory {
        Some(parent) => TempDir::with_prefix_in(DIRECTORY_PREFIX, parent)
            .with_context(|| format!("a directory in {}", parent.display()))?,
        None => temporary_directory(DIRECTORY_PREFIX)?,
    };
    let server = start_node(directory.path(), &config)?;
    eprintln!("netkvs: serving {}", server.url);
    let (in_guest, guest_failed) = guest_rounds(directory.path(), &config, &server.url)?;
    let native = native_rounds(&config, &server.url)?;
    drop(server);
    let failed = guest_failed || native.iter().any(|series| series.rounds.iter().any(Result::is_err));
    let rows = [guest_rows(&in_guest), native_rows(&native)].concat();
    if reproduce.json.as_deref() != Some(Path::new("-")) {
        std::io::stdout().write_all(text_report(&rows, &config).as_bytes())?;
    }
    if let Some(file) = &reproduce.json {
        json_report::write_report(file, &config, &rows)?;
    }
    directory.close().context("the temporary directory")?;
    if failed {
        return Err(anyhow!("a run failed that this machine supports; its rows have the reason").into());
    }
    Ok(())
}

fn config_for(quick: bool) -> NetkvsReportConfig {
    NetkvsReportConfig {
        rounds: if quick { 1 } else { 3 },
        threads: THREADS,
        guest_operations_per_thread: if quick { 10 } else { 100 },
        native_operations_per_thread: if quick { 20 } else { 400 },
        key_bytes: KEY_BYTES,
        value_bytes: VALUE_BYTES,
    }
}

/// Starts the node with an unused namespace 1, the block namespace of the file system, and the namespaces of each round.
fn start_node(directory: &Path, run_config: &NetkvsReportConfig) -> Result<ServerProcess, LabError> {
    let directory_path = directory.display();
    let mut text = format!(
        "device = \"{directory_path}/device\"\nsize = \"64MiB\"\nlisten = [\"127.0.0.1:0\"]\nadmin = \"none\"\nstate = \"none\"\n"
    );
    let mut namespace = |nsid: usize, kind: &str, operations: usize| {
        // Twice the size of the data: replaced records, and RocksDB's log beside its tables.
        let size = (operations * run_config.threads * (VALUE_BYTES + 8192) * 2).max(256 << 20);
        let _ = write!(
            text,
            "\n[[namespace]]\nnsid = {nsid}\nkind = \"{kind}\"\ndevice = \"{directory_path}/{nsid}\"\nsize = {size}\n"
        );
    };
    let (guest, native) = (run_config.guest_operations_per_thread, run_config.native_operations_per_thread);
    // RocksDB writes its log and its first tables: 1 GiB holds all of it.
    namespace(
        FILE_SYSTEM_NSID,
        "block",
        guest.max((1 << 30) / (run_config.threads * (VALUE_BYTES + 8192) * 2)),
    );
    for round in 0..run_config.rounds {
        namespace(GUEST_KV_NSID + round, "kv", guest);
        namespace(GUEST_BLOCK_NSID + round, "block", guest);
        namespace(NATIVE_KV_NSID + round, "kv", native);
        namespace(NATIVE_BLOCK_NSID + round, "block", native);
    }
    let config = directory.join("octokv.toml");
    std::fs::write(&config, text).context("the node's configuration")?;
    Ok(ServerProcess::start_with_flags(&octokv_binary()?, &["--config".as_ref(), config.as_os_str()])?)
}

/// Runs all rounds in the guest. Returns the series, and whether a run failed that this machine supports.
fn guest_rounds(
    directory: &Path,
    config: &NetkvsReportConfig,
    url: &Url,
) -> Result<([SystemSeries; 4], bool), LabError> {
    let guest = QemuGuest::unpack(directory, GUEST_TASK)?;
    if let Some(missing) = guest.missing_dependencies()? {
        eprintln!("netkvs: the guest cannot be booted here; missing: {missing}");
        let missing_series = || vec![Err(format!("missing: {missing}"))];
        return Ok((guest_series(std::array::from_fn(|_| missing_series())), false));
    }
    eprintln!("netkvs: in the guest, {} rounds of (a) synced, (a), (c), (d)", config.rounds);
    let pairs: Vec<String> = (0..config.rounds)
        .map(|round| format!("{}:{}", GUEST_KV_NSID + round, GUEST_BLOCK_NSID + round))
        .collect();
    let console = guest.boot(
        &[
            ("OCTOKV_PORT", url.port.to_string()),
            ("OCTOKV_NQN", url.subsystem.clone()),
            ("OCTOKV_FILES", FILE_SYSTEM_NSID.to_string()),
            ("OCTOKV_ROUNDS", pairs.join(",")),
            ("OCTOKV_THREADS", config.threads.to_string()),
            ("OCTOKV_OPS", config.guest_operations_per_thread.to_string()),
            ("OCTOKV_VALUE", config.value_bytes.to_string()),
        ],
        GUEST_LIMIT_S,
    )?;
    let runs = output_parser::parse_console(&console);
    let of = |wanted: &str, parse: fn(&str) -> SampleResult| -> Vec<SampleResult> {
        let named = runs.iter().filter(|(name, _)| name == wanted);
        let mut rounds: Vec<SampleResult> = named
            .map(|(_, printed)| printed.as_ref().map_err(Clone::clone).and_then(|text| parse(text)))
            .collect();
        // Rounds that did not run because the guest ended early.
        let last = last_line(&console).unwrap_or_default();
        rounds.resize(config.rounds, Err(format!("the guest ended before this run: {last}")));
        rounds
    };
    let rounds = [
        of("a-sync", output_parser::parse_db_bench),
        of("a", output_parser::parse_db_bench),
        of("c", output_parser::parse_bench),
        of("d", output_parser::parse_bench),
    ];
    let failed = rounds.iter().flatten().any(Result::is_err);
    Ok((guest_series(rounds), failed))
}

/// Runs (c) and (d) alternating on this machine, each round on new namespaces.
fn native_rounds(config: &NetkvsReportConfig, url: &Url) -> Result<[SystemSeries; 2], LabError> {
    eprintln!("netkvs: without a guest, {} rounds of (c), (d)", config.rounds);
    let (mut c, mut d) = (Vec::new(), Vec::new());
    for round in 0..config.rounds {
        c.push(run_bench(config, url, NATIVE_BLOCK_NSID + round, &["--system", "remote-engine"])?);
        d.push(run_bench(config, url, NATIVE_KV_NSID + round, &[])?);
    }
    let series = |name, rounds| SystemSeries {
        figure: FIGURE_NATIVE,
        name,
        paper: [None; 3],
        rounds,
        notes: [NOTE_NATIVE; 3],
    };
    Ok([series(SERIES_C, c), series(SERIES_D, d)])
}

fn run_bench(
    config: &NetkvsReportConfig,
    url: &Url,
    namespace: usize,
    more: &[&str],
) -> Result<SampleResult, LabError> {
    let url = format!("nvme+tcp://{}:{}/{}?nsid={namespace}", url.host, url.port, url.subsystem);
    let number = |number: usize| number.to_string();
    let output = Command::new(octokv_binary()?)
        .args(["bench", "--workload", "fillseq", "--depth", "1", "--json", "-", "--url", &url])
        .args(["--key-size", &number(KEY_BYTES), "--value-size", &number(VALUE_BYTES)])
        .args(["--threads", &number(config.threads)])
        .args(["--num", &number(config.threads * config.native_operations_per_thread)])
        .args(more)
        .stdin(Stdio::null())
        .output()
        .context("octokv bench cannot be started")?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    Ok(match output.status.success() {
        true => output_parser::parse_bench(&text(&output.stdout)),
        false => Err(format!("octokv bench: {}", output_parser::error_line(&text(&output.stderr)))),
    })
}

const NOTE_NATIVE: &str = "Both ends and the load share this machine; the poster has no such row.";
const NOTE_EMULATED: &str = "The guest's processor and network are emulated in software on the machine that also runs the \
                        node, where the poster had two servers, 10 Gbps Ethernet and an NVMe SSD.";
const NOTE_TAIL: &str = "The tail here is that of this machine's disk under flushes and of an emulated scheduler; the \
                    poster's is RocksDB's stalls on an SSD, after more data than we write.";
const NOTE_TAIL_D: &str = "The tail here is that of this machine's disk under flushes and of an emulated scheduler; the \
                         poster's engine acknowledged without a flush, as far as it says.";
const NOTE_RATE: &str = "With 15 puts in flight the throughput is 15 divided by the latency: what makes the one differ \
                    makes the other.";
const NOTE_RATIO: &str = "Emulation makes the client's instructions dear and leaves the node's alone, so that what (d) takes \
                     off the client weighs more or less than on the poster's servers.";
const NOTE_RATIO_UNSYNCED: &str = "The poster does not say whether RocksDB synced: unsynced puts end in the client's \
                              memory, and (d)'s are durable.";
const NOTE_RATIO_THROUGHPUT: &str =
    "The poster's +183 % is its text's; its own table, 638 against 255 MB/s, gives +150 %.";

/// The four series of the guest.
fn guest_series([a_sync, a, c, d]: [Vec<SampleResult>; 4]) -> [SystemSeries; 4] {
    let series =
        |name, paper, rounds, notes| SystemSeries { figure: FIGURE_GUEST, name, paper, rounds, notes };
    let baseline = [Some(1_835.0), Some(21_224.0), Some(255.0)];
    let ours = [Some(735.0), Some(1_853.0), Some(638.0)];
    [
        series(SERIES_A_SYNC, baseline, a_sync, [NOTE_EMULATED, NOTE_TAIL, NOTE_RATE]),
        series(SERIES_A, baseline, a, [NOTE_EMULATED, NOTE_TAIL, NOTE_RATE]),
        series(SERIES_C, [None; 3], c, ["The poster draws (c) and does not measure it."; 3]),
        series(SERIES_D, ours, d, [NOTE_EMULATED, NOTE_TAIL_D, NOTE_RATE]),
    ]
}

fn guest_rows([a_sync, a, c, d]: &[SystemSeries; 4]) -> Vec<MetricRow> {
    let paper = [Some(-60.0), Some(-91.0), Some(183.0)];
    [
        a_sync.rows(),
        a.rows(),
        c.rows(),
        d.rows(),
        d.compare_to(a_sync, RATIO_D_A_SYNC, paper, [NOTE_RATIO, NOTE_RATIO, NOTE_RATIO_THROUGHPUT]),
        d.compare_to(a, RATIO_D_A, paper, [NOTE_RATIO_UNSYNCED, NOTE_RATIO_UNSYNCED, NOTE_RATIO_THROUGHPUT]),
        d.compare_to(c, RATIO_D_C, [None; 3], ["The poster does not measure (c)."; 3]),
    ]
    .concat()
}

fn native_rows([c, d]: &[SystemSeries; 2]) -> Vec<MetricRow> {
    [c.rows(), d.rows(), d.compare_to(c, RATIO_D_C, [None; 3], [NOTE_NATIVE; 3])].concat()
}

/// Formats the report for readers.
fn text_report(rows: &[MetricRow], config: &NetkvsReportConfig) -> String {
    let (guest, native): (Vec<MetricRow>, Vec<MetricRow>) =
        rows.iter().cloned().partition(|row| row.figure == FIGURE_GUEST);
    let rounds = match config.rounds {
        1 => "one round".to_owned(),
        rounds => format!("median of {rounds} rounds"),
    };
    format!(
        "NetKVS, Table 1: puts of {VALUE_BYTES} B values in order, {THREADS} in flight, {rounds}\n\n\
         In an emulated guest, {} puts each. (b), a remote file system, is left out.\n{}\n\
         Without a guest, on this machine's loopback, {} puts each.\n{}\n\
         MB/s is db_bench's: 2^20 bytes. (c), (d) and the synced (a) acknowledge what survives a power cut.\n\
         The poster leaves open: threads, keys, syncs, compression, durability (docs/REPRODUCTION.md).\n\n{}",
        THREADS * config.guest_operations_per_thread,
        format_table(&guest),
        THREADS * config.native_operations_per_thread,
        format_table(&native),
        format_differences(rows),
    )
}

#[cfg(test)]
mod tests {
    use super::super::output_parser::BenchSample;
    use super::*;

    #[test]
    fn the_posters_figures_imply_fifteen_puts_in_flight() {
        for (mean_us, mb_s) in [(1_835.0, 255.0), (735.0, 638.0)] {
            let puts_s: f64 = mb_s * f64::from(1 << 20) / VALUE_BYTES as f64;
            assert_eq!((puts_s * mean_us / 1e6).round() as usize, THREADS);
        }
    }

    #[test]
    fn the_report_lists_every_system_and_why_some_did_not_run() {
        let measured = |mean_us, mb_s| vec![Ok(BenchSample { mean_us, p99_us: mean_us * 4.0, mb_s })];
        let guest = guest_series([
            measured(9_000.0, 50.0),
            measured(8_000.0, 60.0),
            vec![Err("no disk".to_owned())],
            measured(4_500.0, 100.0),
        ]);
        let series = |name, rounds| SystemSeries {
            figure: FIGURE_NATIVE,
            name,
            paper: [None; 3],
            rounds,
            notes: [NOTE_NATIVE; 3],
        };
        let native = [series(SERIES_C, measured(900.0, 500.0)), series(SERIES_D, measured(600.0, 800.0))];
        let rows = [guest_rows(&guest), native_rows(&native)].concat();
        let text = text_report(&rows, &config_for(true));
        for name in [
            SERIES_A_SYNC,
            SERIES_A,
            SERIES_C,
            SERIES_D,
            RATIO_D_A_SYNC,
            RATIO_D_A,
            RATIO_D_C,
            "(b)",
            "+183 %",
            "-60 %",
            "not run: no disk",
        ] {
            assert!(text.contains(name), "{name}:\n{text}");
        }
        let ratio = rows.iter().find(|row| row.series == RATIO_D_A_SYNC && row.x == "throughput").unwrap();
        assert_eq!((ratio.paper, ratio.measured), (Some(183.0), Some(100.0)));
        // Every row with a number of the poster and one of ours has a sentence.
        let both = rows.iter().filter(|row| row.paper.is_some() && row.measured.is_some());
        assert_eq!(format_differences(&rows).lines().count(), both.clone().count());
        assert!(both.clone().all(|row| row.note.ends_with('.')));
    }
}
