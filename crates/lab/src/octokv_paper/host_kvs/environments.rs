//! The environments of Host KVS and OctoKV: an emulated guest over the network, and this machine.
//!
//! ```text
//!   guest         Host KVS ─ ext4 ─ the kernel's nvme-tcp ─┐
//!                 OctoKV ─ our initiator ──────────────────┼─▶ nodes on this machine, a 970 EVO's times under them
//!   this machine  OctoKV ─ our initiator ─ loopback ───────┼─▶ nodes, on files of the disk
//!                 Host KVS ────────────────────────────────┴─▶ files of the same disk, without a node or a network
//! ```
//! In: trials. Out: the results of their rounds. Each round of each trial has a namespace, or a file system, of its own.

use super::trials::{ComparedSystem, HostKvsTrial, TrialResult, parse_bench_ops};
use crate::octokv_binary::octokv_binary;
use crate::output_parser::{error_line, parse_console};
use crate::qemu_guest::{GuestTask, QemuGuest};
use anyhow::{Context, Result};
use octokv_bench::child_process::last_line;
use octokv_bench::server_process::ServerProcess;
use octokv_bench::temporary_directory::temporary_directory;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use tempfile::TempDir;

/// Prefix of the temporary directory.
const DIRECTORY_PREFIX: &str = "octokv-host-kvs-";
/// Files of Host KVS: more than threads, so that threads seldom share one.
pub const DB_FILES: usize = 16;
const GUEST_TASK: GuestTask = GuestTask { script: "host-kvs.sh", programs: &["mkfs.ext4"] };
/// Time limit of the guest, in seconds.
const GUEST_LIMIT_S: u64 = 170;
/// Namespace id of the guest's file system, and the first of the trials.
const FILE_SYSTEM_NSID: usize = 2;
const TRIAL_NSID_MIN: usize = 10;
/// Database files of a little more than 64 MiB each, and the metadata of the file system.
const FILE_SYSTEM_BYTES: usize = 2 << 30;
/// Name of the warm-up run: an emulated processor is slow on code that it runs for the first time.
const WARM_UP_NAME: &str = "w";

/// Number of rounds and operations.
#[derive(Clone, Copy, Debug)]
pub struct RunCounts {
    /// Rounds, in which every trial runs once.
    pub rounds: usize,
    /// Puts, and gets, of each thread in the guest.
    pub guest_operations: usize,
    /// The same on this machine.
    pub machine_operations: usize,
}

/// By trial: the result of each round.
pub type TrialRounds = Vec<Vec<TrialResult>>;

/// Two nodes that differ in durability, on files that are removed with them.
struct NodePair {
    flush: ServerProcess,
    no_flush: ServerProcess,
    directory: TempDir,
}

/// Trials of an environment.
pub struct TrialEnvironment<'a> {
    /// The trials, each in every round.
    pub trials: &'a [HostKvsTrial],
    /// Number of rounds and operations.
    pub counts: RunCounts,
    /// Directory for files; `None` for the system's temporary directory.
    pub directory: Option<&'a Path>,
}

fn nsid_of(round: usize, trial: usize, trials: usize) -> usize {
    TRIAL_NSID_MIN + round * trials + trial
}

impl TrialEnvironment<'_> {
    fn all_failed_with(&self, why: &str) -> TrialRounds {
        self.trials.iter().map(|_| vec![Err(why.to_owned())]).collect()
    }

    fn directory(&self) -> Result<TempDir> {
        match self.directory {
            Some(parent) => TempDir::with_prefix_in(DIRECTORY_PREFIX, parent)
                .with_context(|| format!("a directory in {}", parent.display())),
            None => Ok(temporary_directory(DIRECTORY_PREFIX)?),
        }
    }

    /// Configuration of a node with the namespaces of all trials of its durability.
    fn node_config(&self, directory: &Path, is_flush: bool, operations: usize, nand: Option<&str>) -> String {
        let (directory_path, durability) = (directory.display(), if is_flush { "flush" } else { "device" });
        let mut text = format!(
            "device = \"{directory_path}/{durability}-1\"\nsize = \"64MiB\"\nlisten = [\"127.0.0.1:0\"]\nadmin = \"none\"\n\
             state = \"none\"\ndurability = \"{durability}\"\n"
        );
        let mut add_namespace = |nsid: usize, kind: &str, size: usize| {
            let _ = write!(
                text,
                "\n[[namespace]]\nnsid = {nsid}\nkind = \"{kind}\"\ndevice = \"{directory_path}/{durability}-{nsid}\"\n\
                 size = {size}\nnand = \"{}\"\n",
                nand.unwrap_or("none")
            );
        };
        if is_flush && nand.is_some() {
            add_namespace(FILE_SYSTEM_NSID, "block", FILE_SYSTEM_BYTES);
        }
        for round in 0..self.counts.rounds {
            for (number, trial) in self.trials.iter().enumerate() {
                let kind = match (trial.system, is_flush) {
                    (ComparedSystem::OctoKv, true) | (ComparedSystem::OctoKvNoFlush, false) => "kv",
                    (ComparedSystem::Blocks, true) => "block",
                    _ => continue,
                };
                // Twice the size of the data.
                let record = (trial.kib << 10) + 8192;
                let size = (operations * trial.threads * record * 2).max(64 << 20).next_multiple_of(1 << 20);
                add_namespace(nsid_of(round, number, self.trials.len()), kind, size);
            }
        }
        text
    }

    fn start_nodes(&self, operations: usize, nand: Option<&str>) -> Result<NodePair> {
        let directory = self.directory()?;
        let start = |is_flush: bool| -> Result<ServerProcess> {
            let file = directory.path().join(if is_flush { "flush.toml" } else { "device.toml" });
            std::fs::write(&file, self.node_config(directory.path(), is_flush, operations, nand))
                .context("the node's configuration")?;
            Ok(ServerProcess::start_with_flags(&octokv_binary()?, &["--config".as_ref(), file.as_os_str()])?)
        };
        Ok(NodePair { flush: start(true)?, no_flush: start(false)?, directory })
    }

    /// Runs the trials in the guest. Returns also whether a trial failed that this machine supports.
    pub fn run_in_guest(&self) -> (TrialRounds, bool) {
        let run = || -> Result<(TrialRounds, bool)> {
            let scripts = self.directory()?;
            let guest = QemuGuest::unpack(scripts.path(), GUEST_TASK)?;
            if let Some(missing) = guest.missing_dependencies()? {
                eprintln!("octokv: the guest cannot be booted here; missing: {missing}");
                return Ok((self.all_failed_with(&format!("missing: {missing}")), false));
            }
            let nodes = self.start_nodes(self.counts.guest_operations, Some("970-evo"))?;
            eprintln!("octokv: Host KVS and OctoKV in the guest, {} rounds", self.counts.rounds);
            let url = &nodes.flush.url;
            let variables = [
                ("OCTOKV_PORT", url.port.to_string()),
                ("OCTOKV_NQN", url.subsystem.clone()),
                ("OCTOKV_FILES", FILE_SYSTEM_NSID.to_string()),
                ("OCTOKV_DB_FILES", DB_FILES.to_string()),
                ("OCTOKV_RUNS", self.guest_run_list(url.port, nodes.no_flush.url.port)),
            ];
            let console = guest.boot(&variables, GUEST_LIMIT_S)?;
            let rounds = self.parse_guest_console(&console);
            // A slow machine does not complete all rounds in time; one of each trial is sufficient.
            let failed = rounds.iter().any(|rounds| rounds.iter().all(Result::is_err));
            Ok((rounds, failed))
        };
        run().unwrap_or_else(|error| (self.all_failed_with(&format!("{error:#}")), true))
    }

    /// The list of runs in the format of the guest's script: a warm-up, then round by round.
    fn guest_run_list(&self, port: u16, port_no_flush: u16) -> String {
        let mut entries = vec![format!("{WARM_UP_NAME}:h:0:{port}:2:20:4")];
        for round in 0..self.counts.rounds {
            for (number, trial) in self.trials.iter().enumerate() {
                let HostKvsTrial { system, threads, kib } = *trial;
                let port = if system == ComparedSystem::OctoKvNoFlush { port_no_flush } else { port };
                let nsid = nsid_of(round, number, self.trials.len());
                let (letter, keys) = (system.script_letter(), threads * self.counts.guest_operations);
                entries.push(format!("{round}.{number}:{letter}:{nsid}:{port}:{threads}:{keys}:{kib}"));
            }
        }
        entries.join(",")
    }

    fn parse_guest_console(&self, console: &str) -> TrialRounds {
        let runs = parse_console(console);
        let last = last_line(console).unwrap_or_default();
        let of = |name: String| match runs.iter().find(|(begun, _)| *begun == name) {
            Some((_, printed)) => {
                printed.as_ref().map_err(Clone::clone).and_then(|text| parse_bench_ops(text))
            }
            None => Err(format!("the guest ended before this run: {last}")),
        };
        let rounds = |number| (0..self.counts.rounds).map(|round| of(format!("{round}.{number}"))).collect();
        (0..self.trials.len()).map(rounds).collect()
    }

    /// Runs the trials on this machine. Returns also whether one failed.
    pub fn run_native(&self) -> (TrialRounds, bool) {
        let run = || -> Result<TrialRounds> {
            let nodes = self.start_nodes(self.counts.machine_operations, None)?;
            eprintln!("octokv: Host KVS and OctoKV on this machine, {} rounds", self.counts.rounds);
            let mut all: TrialRounds = self.trials.iter().map(|_| Vec::new()).collect();
            for round in 0..self.counts.rounds {
                for (number, trial) in self.trials.iter().enumerate() {
                    let nsid = nsid_of(round, number, self.trials.len());
                    all[number].push(self.run_bench(&nodes, trial, nsid)?);
                }
            }
            Ok(all)
        };
        match run() {
            Ok(rounds) => {
                let failed = rounds.iter().flatten().any(Result::is_err);
                (rounds, failed)
            }
            Err(error) => (self.all_failed_with(&format!("{error:#}")), true),
        }
    }

    fn run_bench(&self, nodes: &NodePair, trial: &HostKvsTrial, nsid: usize) -> Result<TrialResult> {
        let url = match trial.system {
            ComparedSystem::OctoKvNoFlush => &nodes.no_flush.url,
            ComparedSystem::HostKvs | ComparedSystem::OctoKv | ComparedSystem::Blocks => &nodes.flush.url,
        };
        let url = format!("nvme+tcp://{}:{}/{}?nsid={nsid}", url.host, url.port, url.subsystem);
        let files: PathBuf = nodes.directory.path().join("files");
        let mut command = Command::new(octokv_binary()?);
        command.args(["bench", "--workload", "fillseq,readrandom", "--key-size", "4", "--depth", "1"]);
        command.args([
            "--value-size",
            &(trial.kib << 10).to_string(),
            "--threads",
            &trial.threads.to_string(),
        ]);
        command.args(["--num", &(trial.threads * self.counts.machine_operations).to_string(), "--json", "-"]);
        match trial.system {
            ComparedSystem::HostKvs => {
                std::fs::create_dir(&files).context("a directory for Host KVS's files")?;
                command.args(["--system", "host-kvs", "--host-kvs-files", &DB_FILES.to_string()]);
                command.arg("--host-kvs-dir").arg(&files);
            }
            ComparedSystem::OctoKv | ComparedSystem::OctoKvNoFlush => drop(command.args(["--url", &url])),
            ComparedSystem::Blocks => drop(command.args(["--system", "remote-engine", "--url", &url])),
        }
        let output = command.stdin(Stdio::null()).output().context("octokv bench cannot be started")?;
        if trial.system == ComparedSystem::HostKvs {
            std::fs::remove_dir_all(&files).context("Host KVS's files")?;
        }
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        Ok(match output.status.success() {
            true => parse_bench_ops(&text(&output.stdout)),
            false => Err(format!("octokv bench: {}", error_line(&text(&output.stderr)))),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::trials::trials_for;
    use super::*;

    fn environment(trials: &[HostKvsTrial]) -> TrialEnvironment<'_> {
        let amount = RunCounts { rounds: 3, guest_operations: 60, machine_operations: 200 };
        TrialEnvironment { trials, counts: amount, directory: None }
    }

    #[test]
    fn the_guest_run_list_fits_on_a_kernel_command_line() {
        let trials = trials_for(true, true);
        let words = environment(&trials).guest_run_list(65_535, 65_535);
        assert_eq!(words.split(',').count(), 1 + 3 * trials.len());
        // Of 2,048 bytes, with room for the kernel's own.
        assert!(words.len() < 1_600, "{} bytes: {words}", words.len());
    }

    #[test]
    fn every_run_has_its_own_namespace_on_the_node_with_its_durability() {
        let trials = trials_for(true, true);
        let work = environment(&trials);
        let config = |is_flush| {
            work.node_config(Path::new("/d"), is_flush, 60, Some("970-evo")).parse::<toml::Table>()
        };
        let (flush, no_flush) = (config(true).unwrap(), config(false).unwrap());
        assert_eq!(
            (flush["durability"].as_str(), no_flush["durability"].as_str()),
            (Some("flush"), Some("device"))
        );
        let count = |system| 3 * trials.iter().filter(|trial| trial.system == system).count();
        let has = |table: &toml::Table| table["namespace"].as_array().map_or(0, Vec::len);
        assert_eq!(has(&flush), 1 + count(ComparedSystem::OctoKv) + count(ComparedSystem::Blocks));
        assert_eq!(has(&no_flush), count(ComparedSystem::OctoKvNoFlush));
    }

    #[test]
    fn a_console_is_split_into_rounds_and_missing_ones_say_so() {
        let trials = trials_for(false, true);
        let work = environment(&trials);
        let part = |workload: &str, us: usize| {
            format!(
                "{{\"workload\": \"{workload}\", \"not_found\": 0, \"latency_us_mean\": {us}, \"throughput_ops_s\": 1}}"
            )
        };
        let run = |name: &str, us| {
            let (put, get) = (part("fillseq", us), part("readrandom", us));
            format!("result: {name} begin\r\n{{\r\n\"results\": [{put}, {get}]}}\r\nresult: {name} end 0\r\n")
        };
        let console =
            [run("w", 9), run("0.0", 10), run("0.1", 11), run("1.0", 12), "kernel panic\r\n".to_owned()]
                .concat();
        let rounds = work.parse_guest_console(&console);
        let us =
            |trial: usize, round: usize| rounds[trial][round].as_ref().map(|sample| sample.put.mean_us).ok();
        assert_eq!((us(0, 0), us(1, 0), us(0, 1), us(1, 1)), (Some(10.0), Some(11.0), Some(12.0), None));
        assert!(rounds[1][1].as_ref().unwrap_err().ends_with("ended before this run: kernel panic"));
        assert!(rounds.iter().all(|rounds| rounds.len() == 3));
    }
}
