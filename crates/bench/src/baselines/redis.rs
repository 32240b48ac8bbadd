//! Redis and Valkey: a server that we start on the loopback interface, driven by our load generator.
//!
//! ```text
//!   none ──▶ running ──▶ terminated, its files removed     a fill starts with a new server in an empty directory
//! ```
//! Its own load generator has no zipf distribution and verifies no values, so ours implements its protocol
//! (`resp_worker`): the same connections, depth, keys, values and clock as with a node, over TCP as well.
//! Invariants: a write is acknowledged after its append-only file is synced (`appendfsync always`); the file is not
//! rewritten meanwhile; dropping the [`RedisBaseline`] terminates the server.

use crate::baselines::baseline::{
    Baseline, BaselineEnv, BaselineError, BaselineInfo, BaselineKind, last_line,
};
use crate::baselines::resp;
use crate::config::{BenchConfig, StopCondition};
use crate::error::TargetFailure;
use crate::runner::run;
use crate::system_under_test::SystemUnderTest;
use crate::workload::{Workload, WorkloadOp};
use crate::workload_result::WorkloadResult;
use crate::workload_state::{TargetNode, WorkloadProgress};
use octokv_base::Nanos;
use octokv_client::ClientConfig;
use octokv_runtime::Polling;
use octokv_sys::socket::Listener;
use std::net::{Ipv4Addr, SocketAddr};
use std::process::Command;
use std::time::Duration;

/// Start attempts, each with another port, because another process can take the free port.
const START_ATTEMPTS: usize = 3;
/// Time that a server has to accept connections.
const READY_MAX: Duration = Duration::from_secs(60);
/// Operations in flight on a connection while it is loaded, and bytes of values over all connections.
const PRELOAD_DEPTH: usize = 16;
const PRELOAD_BYTES: usize = 64 << 20;

/// A Redis or Valkey server.
pub struct RedisBaseline {
    kind: BaselineKind,
    env: BaselineEnv,
    info: BaselineInfo,
    server: Option<RunningServer>,
}

struct RunningServer {
    id: u32,
    address: SocketAddr,
}

impl RedisBaseline {
    /// Creates the baseline of kind Redis or Valkey without starting its server.
    pub fn new(kind: BaselineKind, env: BaselineEnv) -> RedisBaseline {
        let mut info = BaselineInfo::new(kind);
        info.add_note("it holds every value in memory: its reads touch no disk");
        info.add_note(match env.polling {
            Polling::Busy => "our generator spins while it waits for it",
            Polling::Adaptive { .. } => "our generator spins, then sleeps while it waits for it",
            Polling::Sleep => "our generator sleeps while it waits for it",
        });
        RedisBaseline { kind, env, info, server: None }
    }

    fn stop_server(&mut self) {
        if let Some(server) = self.server.take() {
            self.env.processes.terminate(server.id);
        }
    }

    /// Starts a new, empty server.
    fn restart(&mut self) -> Result<(), BaselineError> {
        self.stop_server();
        let mut last = String::new();
        for _ in 0..START_ATTEMPTS {
            self.env.recreate_directory()?;
            match self.start()? {
                Ok(server) => {
                    self.server = Some(server);
                    return Ok(());
                }
                Err(output) => last = output,
            }
        }
        Err(BaselineError::Failed { program: self.kind.program(), last_line: last_line(&last) })
    }

    /// Starts a server; on a failed start returns its output.
    fn start(&mut self) -> Result<Result<RunningServer, String>, BaselineError> {
        let program = self.kind.program();
        let failed = |error| BaselineError::Start { program, error };
        let address = free_address().map_err(failed)?;
        let mut command = Command::new(program);
        command.args(["--bind", "127.0.0.1", "--port", &address.port().to_string(), "--dir"]);
        command.arg(&self.env.directory);
        command.args(SERVER_OPTIONS.as_flattened());
        // The port differs with each start, so the report has a placeholder.
        let mut shown = Command::new(program);
        shown.args(["--bind", "127.0.0.1", "--port", "PORT", "--dir"]).arg(&self.env.directory);
        self.info.add_command_line(shown.args(SERVER_OPTIONS.as_flattened()), "");
        let (id, output) = self.env.processes.start(&mut command).map_err(failed)?;
        let ready = output.wait_line(READY_MAX, |line| {
            if let Some((_, version)) = line.split_once(" version=") {
                self.info.version = version.split([',', ' ']).next().map(str::to_owned);
            }
            line.contains("Ready to accept connections").then_some(())
        });
        if ready.is_err() {
            self.env.processes.terminate(id);
            return Ok(Err(output.text()));
        }
        Ok(Ok(RunningServer { id, address }))
    }

    fn run_load(
        &self,
        config: &BenchConfig,
        progress: &mut dyn FnMut(WorkloadProgress),
    ) -> Result<WorkloadResult, BaselineError> {
        let baseline = self.kind.name();
        let address = self.server.as_ref().expect("a server was started").address;
        let node = TargetNode { name: baseline.to_owned(), address, client: ClientConfig::default() };
        let BaselineEnv { cores, polling, platform, .. } = &self.env;
        let outcome = run(
            config,
            &SystemUnderTest::RespServer(baseline),
            &[node],
            cores,
            *polling,
            *platform,
            progress,
        );
        let mut results =
            outcome.map_err(|TargetFailure { error, .. }| BaselineError::Load { baseline, error })?;
        Ok(results.remove(0))
    }
}

/// Options of the server besides address and directory.
const SERVER_OPTIONS: [[&str; 2]; 9] = [
    ["--appendonly", "yes"],
    ["--appendfsync", "always"],
    ["--no-appendfsync-on-rewrite", "no"],
    ["--auto-aof-rewrite-percentage", "0"],
    ["--save", ""],
    ["--protected-mode", "yes"],
    ["--daemonize", "no"],
    ["--maxmemory", "0"],
    ["--loglevel", "notice"],
];

/// An address of the loopback interface with a free port.
fn free_address() -> std::io::Result<SocketAddr> {
    Listener::bind(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)))?.local_address()
}

impl Baseline for RedisBaseline {
    fn kind(&self) -> BaselineKind {
        self.kind
    }

    fn check_supported(&self, config: &BenchConfig) -> Result<(), String> {
        if let Some(unsupported) = config
            .workloads
            .iter()
            .find(|workload| workload.includes(WorkloadOp::List) || workload.includes(WorkloadOp::Scan))
        {
            return Err(format!(
                "--workload {}: it keeps keys in no order and lists none",
                unsupported.name()
            ));
        }
        if config.workloads.iter().any(|workload| workload.has_writer()) {
            return Err(
                "--workload readwhilewriting: our generator for it has no writer beside others".to_owned()
            );
        }
        match config.value_sizes.max_bytes() {
            bytes if bytes > resp::VALUE_BYTES_MAX => Err("--value-size: at most 512 MiB".to_owned()),
            _ => Ok(()),
        }
    }

    fn run(
        &mut self,
        config: &BenchConfig,
        progress: &mut dyn FnMut(WorkloadProgress),
    ) -> Result<WorkloadResult, BaselineError> {
        let is_fill = config.workloads[0].is_fill();
        let is_new = self.server.is_none();
        if is_fill || is_new {
            self.restart()?;
        }
        if is_new && !is_fill {
            let fits = PRELOAD_BYTES / config.value_sizes.max_bytes().max(1) / config.threads.max(1);
            let preload = BenchConfig {
                workloads: vec![Workload::FillSequential],
                stop: StopCondition::Operations(config.keys),
                depth: config.depth.max(PRELOAD_DEPTH.min(fits)),
                rate: None,
                warm_up: Nanos::ZERO,
                ..config.clone()
            };
            self.run_load(&preload, progress)?;
            self.info.add_note("every key was loaded before the first workload, not measured");
        }
        self.run_load(config, progress)
    }

    fn info(&self) -> BaselineInfo {
        self.info.clone()
    }
}

impl Drop for RedisBaseline {
    fn drop(&mut self) {
        self.stop_server();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_server_syncs_a_write_before_its_reply() {
        assert!(
            SERVER_OPTIONS.contains(&["--appendonly", "yes"])
                && SERVER_OPTIONS.contains(&["--appendfsync", "always"])
        );
        assert_ne!(free_address().unwrap().port(), 0);
    }
}
