//! The NetKVS poster's Table 1: puts of 32 KiB values in order, RocksDB on a remote disk against the hash engine
//! behind Key Value commands, and the same engine in the client between them.
//!
//! ```text
//!  emulated guest ─ (a) db_bench ─ RocksDB ─ ext4 ─ the kernel's nvme-tcp ─┐
//!                 ─ (c) octokv bench ─ hash engine ─ our initiator ────────┼─▶ one node on this machine,
//!                 ─ (d) octokv bench ─ our initiator ──────────────────────┤   each round on fresh namespaces
//!  this machine   ─ (c), (d) in turn ──────────────────────────────────────┘
//! ```
//! The poster's (b), a remote file system, has no figures there and is left out here.

use super::comparison_table::{Row, Series, Settings, sentences, table};
use super::json_report;
use super::output_parser::{self, Measured};
use super::qemu_guest::{Guest, Task};
use crate::child_process::Server;
use crate::cli::Reproduce;
use crate::demo;
use crate::exit_status::{Failure, Outcome};
use anyhow::{Context, anyhow};
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
/// How the directory of its files begins.
const PREFIX: &str = "octokv-netkvs-";
/// Namespaces: the file system's, then those of each round from these numbers on.
const FILES: usize = 2;
const GUEST_KEYS: usize = 10;
const GUEST_BLOCKS: usize = 20;
const NATIVE_KEYS: usize = 30;
const NATIVE_BLOCKS: usize = 40;
const TASK: Task = Task { script: "netkvs.sh", programs: &["db_bench", "mkfs.ext4"] };
/// The guest is ended after so long.
const GUEST_LIMIT_S: u64 = 240;

const IN_GUEST: &str = "Table 1";
const NATIVE: &str = "Table 1 without a guest";
const A_SYNC: &str = "(a) RocksDB on ext4, each put synced";
const A: &str = "(a) RocksDB on ext4, not synced";
const C: &str = "(c) hash engine in the client, on blocks";
const D: &str = "(d) Key Value commands";
const D_TO_A_SYNC: &str = "(d) against (a), each put synced";
const D_TO_A: &str = "(d) against (a), not synced";
const D_TO_C: &str = "(d) against (c)";

/// Runs `octokv reproduce netkvs`.
pub fn run(reproduce: &Reproduce) -> Outcome {
    if let Some(figure) = reproduce.figure.as_ref().filter(|name| *name != ONLY_FIGURE) {
        return Err(Failure::Usage(format!(
            "--figure: the NetKVS poster has no \"{figure}\"; it has {ONLY_FIGURE}"
        )));
    }
    if reproduce.svg.is_some() {
        return Err(Failure::Usage("--svg: the NetKVS poster has a table and nothing to draw".to_owned()));
    }
    let settings = settings(reproduce.quick);
    let directory = match &reproduce.directory {
        Some(place) => TempDir::with_prefix_in(PREFIX, place)
            .with_context(|| format!("a directory in {}", place.display()))?,
        None => demo::directory(PREFIX)?,
    };
    let server = serve(directory.path(), &settings)?;
    eprintln!("netkvs: serving {}", server.url);
    let (in_guest, guest_failed) = guest_rounds(directory.path(), &settings, &server.url)?;
    let native = native_rounds(&settings, &server.url)?;
    drop(server);
    let failed = guest_failed || native.iter().any(|series| series.rounds.iter().any(Result::is_err));
    let rows = [guest_rows(&in_guest), native_rows(&native)].concat();
    if reproduce.json.as_deref() != Some(Path::new("-")) {
        std::io::stdout().write_all(report(&rows, &settings).as_bytes())?;
    }
    if let Some(file) = &reproduce.json {
        json_report::write(file, &settings, &rows)?;
    }
    directory.close().context("the temporary directory")?;
    if failed {
        return Err(anyhow!("not everything that could run did; the rows say what went wrong").into());
    }
    Ok(())
}

fn settings(quick: bool) -> Settings {
    Settings {
        rounds: if quick { 1 } else { 3 },
        threads: THREADS,
        guest_operations_per_thread: if quick { 10 } else { 100 },
        native_operations_per_thread: if quick { 20 } else { 400 },
        key_bytes: KEY_BYTES,
        value_bytes: VALUE_BYTES,
    }
}

/// The node: namespace 1, which nobody uses, the file system's blocks, and each round's two.
fn serve(directory: &Path, settings: &Settings) -> Result<Server, Failure> {
    let place = directory.display();
    let mut text = format!(
        "device = \"{place}/device\"\nsize = \"64MiB\"\nlisten = [\"127.0.0.1:0\"]\nadmin = \"none\"\nstate = \"none\"\n"
    );
    let mut namespace = |nsid: usize, kind: &str, operations: usize| {
        // Room for everything twice: what is replaced later, RocksDB's log beside its tables.
        let size = (operations * settings.threads * (VALUE_BYTES + 8192) * 2).max(256 << 20);
        let _ = write!(
            text,
            "\n[[namespace]]\nnsid = {nsid}\nkind = \"{kind}\"\ndevice = \"{place}/{nsid}\"\nsize = {size}\n"
        );
    };
    let (guest, native) = (settings.guest_operations_per_thread, settings.native_operations_per_thread);
    // RocksDB's figures are of its log and its first tables: 1 GiB holds all of it.
    namespace(FILES, "block", guest.max((1 << 30) / (settings.threads * (VALUE_BYTES + 8192) * 2)));
    for round in 0..settings.rounds {
        namespace(GUEST_KEYS + round, "kv", guest);
        namespace(GUEST_BLOCKS + round, "block", guest);
        namespace(NATIVE_KEYS + round, "kv", native);
        namespace(NATIVE_BLOCKS + round, "block", native);
    }
    let config = directory.join("octokv.toml");
    std::fs::write(&config, text).context("the node's configuration")?;
    Ok(Server::with(&["--config".as_ref(), config.as_os_str()])?)
}

/// All rounds in the guest, and whether something went wrong that need not have.
fn guest_rounds(directory: &Path, settings: &Settings, url: &Url) -> Result<([Series; 4], bool), Failure> {
    let guest = Guest::unpack(directory, TASK)?;
    if let Some(missing) = guest.missing()? {
        eprintln!("netkvs: the guest cannot be booted here; missing: {missing}");
        let why = || vec![Err(format!("missing: {missing}"))];
        return Ok((guest_series([why(), why(), why(), why()]), false));
    }
    eprintln!("netkvs: in the guest, {} rounds of (a) synced, (a), (c), (d)", settings.rounds);
    let pairs: Vec<String> = (0..settings.rounds)
        .map(|round| format!("{}:{}", GUEST_KEYS + round, GUEST_BLOCKS + round))
        .collect();
    let console = guest.boot(
        &[
            ("OCTOKV_PORT", url.port.to_string()),
            ("OCTOKV_NQN", url.subsystem.clone()),
            ("OCTOKV_FILES", FILES.to_string()),
            ("OCTOKV_ROUNDS", pairs.join(",")),
            ("OCTOKV_THREADS", settings.threads.to_string()),
            ("OCTOKV_OPS", settings.guest_operations_per_thread.to_string()),
            ("OCTOKV_VALUE", settings.value_bytes.to_string()),
        ],
        GUEST_LIMIT_S,
    )?;
    let runs = output_parser::of_console(&console);
    let of = |wanted: &str, figures: fn(&str) -> Measured| -> Vec<Measured> {
        let named = runs.iter().filter(|(name, _)| name == wanted);
        let mut rounds: Vec<Measured> = named
            .map(|(_, printed)| printed.as_ref().map_err(Clone::clone).and_then(|text| figures(text)))
            .collect();
        // Rounds that a guest which ended early did not come to.
        let last = console.lines().map(str::trim).rfind(|line| !line.is_empty()).unwrap_or_default();
        rounds.resize(settings.rounds, Err(format!("the guest did not come to it: {last}")));
        rounds
    };
    let rounds = [
        of("a-sync", output_parser::of_db_bench),
        of("a", output_parser::of_db_bench),
        of("c", output_parser::of_bench),
        of("d", output_parser::of_bench),
    ];
    let failed = rounds.iter().flatten().any(Result::is_err);
    Ok((guest_series(rounds), failed))
}

/// (c) and (d) in turn on this machine, each round on fresh namespaces.
fn native_rounds(settings: &Settings, url: &Url) -> Result<[Series; 2], Failure> {
    eprintln!("netkvs: without a guest, {} rounds of (c), (d)", settings.rounds);
    let (mut c, mut d) = (Vec::new(), Vec::new());
    for round in 0..settings.rounds {
        c.push(bench(settings, url, NATIVE_BLOCKS + round, &["--system", "remote-engine"])?);
        d.push(bench(settings, url, NATIVE_KEYS + round, &[])?);
    }
    let series =
        |name, rounds| Series { figure: NATIVE, name, paper: [None; 3], rounds, notes: [NATIVE_NOTE; 3] };
    Ok([series(C, c), series(D, d)])
}

fn bench(settings: &Settings, url: &Url, namespace: usize, more: &[&str]) -> Result<Measured, Failure> {
    let url = format!("nvme+tcp://{}:{}/{}?nsid={namespace}", url.host, url.port, url.subsystem);
    let number = |number: usize| number.to_string();
    let output = Command::new(std::env::current_exe().context("this program's own file")?)
        .args(["bench", "--workload", "fillseq", "--depth", "1", "--json", "-", "--url", &url])
        .args(["--key-size", &number(KEY_BYTES), "--value-size", &number(VALUE_BYTES)])
        .args(["--threads", &number(settings.threads)])
        .args(["--num", &number(settings.threads * settings.native_operations_per_thread)])
        .args(more)
        .stdin(Stdio::null())
        .output()
        .context("octokv bench cannot be started")?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    Ok(match output.status.success() {
        true => output_parser::of_bench(&text(&output.stdout)),
        false => Err(format!("octokv bench: {}", output_parser::last_line(&text(&output.stderr)))),
    })
}

const NATIVE_NOTE: &str = "Both ends and the load share this machine; the poster has no such row.";
const EMULATED: &str = "The guest's processor and network are emulated in software on the machine that also runs the \
                        node, where the poster had two servers, 10 Gbps Ethernet and an NVMe SSD.";
const TAIL: &str = "The tail here is that of this machine's disk under flushes and of an emulated scheduler; the \
                    poster's is RocksDB's stalls on an SSD, after more data than we write.";
const TAIL_OF_D: &str = "The tail here is that of this machine's disk under flushes and of an emulated scheduler; the \
                         poster's engine acknowledged without a flush, as far as it says.";
const RATE: &str = "With 15 puts in flight the throughput is 15 divided by the latency: what makes the one differ \
                    makes the other.";
const RATIO: &str = "Emulation makes the client's instructions dear and leaves the node's alone, so that what (d) takes \
                     off the client weighs more or less than on the poster's servers.";
const RATIO_UNSYNCED: &str = "The poster does not say whether RocksDB synced: unsynced puts end in the client's \
                              memory, and (d)'s are durable.";
const RATIO_RATE: &str =
    "The poster's +183 % is its text's; its own table, 638 against 255 MB/s, gives +150 %.";

/// The four series of the guest.
fn guest_series([a_sync, a, c, d]: [Vec<Measured>; 4]) -> [Series; 4] {
    let series = |name, paper, rounds, notes| Series { figure: IN_GUEST, name, paper, rounds, notes };
    let baseline = [Some(1_835.0), Some(21_224.0), Some(255.0)];
    let ours = [Some(735.0), Some(1_853.0), Some(638.0)];
    [
        series(A_SYNC, baseline, a_sync, [EMULATED, TAIL, RATE]),
        series(A, baseline, a, [EMULATED, TAIL, RATE]),
        series(C, [None; 3], c, ["The poster draws (c) and does not measure it."; 3]),
        series(D, ours, d, [EMULATED, TAIL_OF_D, RATE]),
    ]
}

fn guest_rows([a_sync, a, c, d]: &[Series; 4]) -> Vec<Row> {
    let paper = [Some(-60.0), Some(-91.0), Some(183.0)];
    [
        a_sync.rows(),
        a.rows(),
        c.rows(),
        d.rows(),
        d.against(a_sync, D_TO_A_SYNC, paper, [RATIO, RATIO, RATIO_RATE]),
        d.against(a, D_TO_A, paper, [RATIO_UNSYNCED, RATIO_UNSYNCED, RATIO_RATE]),
        d.against(c, D_TO_C, [None; 3], ["The poster does not measure (c)."; 3]),
    ]
    .concat()
}

fn native_rows([c, d]: &[Series; 2]) -> Vec<Row> {
    [c.rows(), d.rows(), d.against(c, D_TO_C, [None; 3], [NATIVE_NOTE; 3])].concat()
}

/// Everything for people.
fn report(rows: &[Row], settings: &Settings) -> String {
    let (guest, native): (Vec<Row>, Vec<Row>) = rows.iter().cloned().partition(|row| row.figure == IN_GUEST);
    let rounds = match settings.rounds {
        1 => "one round".to_owned(),
        rounds => format!("median of {rounds} rounds"),
    };
    format!(
        "NetKVS, Table 1: puts of {VALUE_BYTES} B values in order, {THREADS} in flight, {rounds}\n\n\
         In an emulated guest, {} puts each. (b), a remote file system, is left out.\n{}\n\
         Without a guest, on this machine's loopback, {} puts each.\n{}\n\
         MB/s is db_bench's: 2^20 bytes. (c), (d) and the synced (a) acknowledge what survives a power cut.\n\
         The poster leaves open: threads, keys, syncs, compression, durability (docs/REPRODUCTION.md).\n\n{}",
        THREADS * settings.guest_operations_per_thread,
        table(&guest),
        THREADS * settings.native_operations_per_thread,
        table(&native),
        sentences(rows),
    )
}

#[cfg(test)]
mod tests {
    use super::super::output_parser::Sample;
    use super::*;

    #[test]
    fn the_posters_own_figures_are_of_fifteen_puts_in_flight() {
        for (mean_us, mb_s) in [(1_835.0, 255.0), (735.0, 638.0)] {
            let puts_s: f64 = mb_s * f64::from(1 << 20) / VALUE_BYTES as f64;
            assert_eq!((puts_s * mean_us / 1e6).round() as usize, THREADS);
        }
    }

    #[test]
    fn the_report_has_every_system_beside_the_poster_and_says_what_did_not_run() {
        let ran = |mean_us, mb_s| vec![Ok(Sample { mean_us, p99_us: mean_us * 4.0, mb_s })];
        let guest = guest_series([
            ran(9_000.0, 50.0),
            ran(8_000.0, 60.0),
            vec![Err("no disk".to_owned())],
            ran(4_500.0, 100.0),
        ]);
        let series =
            |name, rounds| Series { figure: NATIVE, name, paper: [None; 3], rounds, notes: [NATIVE_NOTE; 3] };
        let native = [series(C, ran(900.0, 500.0)), series(D, ran(600.0, 800.0))];
        let rows = [guest_rows(&guest), native_rows(&native)].concat();
        let text = report(&rows, &settings(true));
        for name in
            [A_SYNC, A, C, D, D_TO_A_SYNC, D_TO_A, D_TO_C, "(b)", "+183 %", "-60 %", "not run: no disk"]
        {
            assert!(text.contains(name), "{name}:\n{text}");
        }
        let ratio = rows.iter().find(|row| row.series == D_TO_A_SYNC && row.x == "throughput").unwrap();
        assert_eq!((ratio.paper, ratio.measured), (Some(183.0), Some(100.0)));
        // Every row with a figure of the poster and one of ours has its sentence.
        let both = rows.iter().filter(|row| row.paper.is_some() && row.measured.is_some());
        assert_eq!(sentences(&rows).lines().count(), both.clone().count());
        assert!(both.clone().all(|row| row.note.ends_with('.')));
    }
}
