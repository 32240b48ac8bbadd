//! Redis and Valkey: a server of our own on the loopback interface, driven by our own generator.
//!
//! ```text
//!   none ──▶ running ──▶ ended, its files removed          a fill begins with a new server in an empty directory
//! ```
//! Its own load generator draws no keys by zipf and compares no values, so ours speaks its protocol
//! (`resp_worker`): the same connections, depth, keys, values and clock as with a node, over TCP as with one.
//! Invariants: a write is answered when the append-only file with it is synced (`appendfsync always`); nothing rewrites
//! that file meanwhile; the server ends with this value.

use crate::baselines::{Account, Error, Ground, Kind, Peer, last_line, resp};
use crate::config::{End, Plan};
use crate::report::Figures;
use crate::runner::{Failed, Node, Progress, run};
use crate::system_under_test::System;
use crate::workload::{Action, Workload};
use octokv_base::Nanos;
use octokv_client::Settings;
use octokv_runtime::Polling;
use octokv_sys::socket::Listener;
use std::io::{BufRead, BufReader, Read};
use std::net::{Ipv4Addr, SocketAddr};
use std::process::Command;

/// How often another port is tried when somebody took the one that was free.
const TRIES: usize = 3;
/// Operations in flight on a connection while it is loaded, and bytes of values over all connections.
const LOAD_DEPTH: usize = 16;
const LOAD_BYTES: usize = 64 << 20;

/// A server in a place.
pub struct Redis {
    kind: Kind,
    ground: Ground,
    account: Account,
    server: Option<Server>,
}

struct Server {
    id: u32,
    address: SocketAddr,
}

impl Redis {
    /// Not started yet. `kind` says which of the two.
    pub fn new(kind: Kind, ground: Ground) -> Redis {
        let mut account = Account::new(kind);
        account.note("it holds every value in memory: its reads touch no disk");
        account.note(match ground.polling {
            Polling::Busy => "our generator spins while it waits for it",
            Polling::Adaptive { .. } => "our generator spins, then sleeps while it waits for it",
            Polling::Sleep => "our generator sleeps while it waits for it",
        });
        Redis { kind, ground, account, server: None }
    }

    fn end(&mut self) {
        if let Some(server) = self.server.take() {
            self.ground.children.end(server.id);
        }
    }

    /// A new server with nothing in it.
    fn restart(&mut self) -> Result<(), Error> {
        self.end();
        let mut last = String::new();
        for _ in 0..TRIES {
            self.ground.empty_directory()?;
            match self.start()? {
                Ok(server) => {
                    self.server = Some(server);
                    return Ok(());
                }
                Err(said) => last = said,
            }
        }
        Err(Error::Ended { program: self.kind.program(), said: last_line(&last) })
    }

    /// A server, or what one said before it ended.
    fn start(&mut self) -> Result<Result<Server, String>, Error> {
        let program = self.kind.program();
        let failed = |error| Error::Start { program, error };
        let address = free_address().map_err(failed)?;
        let mut command = Command::new(program);
        command.args(["--bind", "127.0.0.1", "--port", &address.port().to_string(), "--dir"]);
        command.arg(&self.ground.directory);
        command.args(OPTIONS.as_flattened());
        // The port of this start says nothing to a reader.
        let mut told = Command::new(program);
        told.args(["--bind", "127.0.0.1", "--port", "PORT", "--dir"]).arg(&self.ground.directory);
        self.account.ran(told.args(OPTIONS.as_flattened()), "");
        let (id, printed) = self.ground.children.start(&mut command).map_err(failed)?;
        let (mut printed, mut said, mut line) = (BufReader::new(printed), String::new(), Vec::new());
        loop {
            line.clear();
            let bytes = printed.read_until(b'\n', &mut line).map_err(failed)?;
            let line = String::from_utf8_lossy(&line);
            if let Some((_, version)) = line.split_once(" version=") {
                self.account.version = version.split([',', ' ', '\n']).next().map(str::to_owned);
            }
            if line.contains("Ready to accept connections") {
                break;
            }
            if bytes == 0 {
                self.ground.children.end(id);
                return Ok(Err(said));
            }
            said.push_str(&line);
        }
        // Whoever does not listen to the rest of it stops it when the pipe is full.
        let listen = Box::new(move || {
            let _ = std::io::copy(&mut printed.by_ref(), &mut std::io::sink());
        });
        (self.ground.host.spawn)(None, listen).map_err(failed)?;
        Ok(Ok(Server { id, address }))
    }

    fn load(&self, plan: &Plan, progress: &mut dyn FnMut(Progress)) -> Result<Figures, Error> {
        let peer = self.kind.name();
        let address = self.server.as_ref().expect("a server was started").address;
        let node = Node { name: peer.to_owned(), address, client: Settings::default() };
        let Ground { cores, polling, host, .. } = &self.ground;
        let ran = run(plan, &System::Resp(peer), &[node], cores, *polling, *host, progress);
        let mut figures = ran.map_err(|Failed { error, .. }| Error::Load { peer, error })?;
        Ok(figures.remove(0))
    }
}

/// What is given to the server beside the place.
const OPTIONS: [[&str; 2]; 9] = [
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

/// A port of the loopback interface that is free now.
fn free_address() -> std::io::Result<SocketAddr> {
    Listener::bind(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)))?.address()
}

impl Peer for Redis {
    fn kind(&self) -> Kind {
        self.kind
    }

    fn check(&self, plan: &Plan) -> Result<(), String> {
        if let Some(lists) = plan.workloads.iter().find(|workload| workload.does(Action::List)) {
            return Err(format!("--workload {}: it keeps keys in no order and lists none", lists.name()));
        }
        match plan.value_sizes.most() {
            most if most > resp::VALUE_BYTES_MAX => Err("--value-size: at most 512 MiB".to_owned()),
            _ => Ok(()),
        }
    }

    fn run(&mut self, plan: &Plan, progress: &mut dyn FnMut(Progress)) -> Result<Figures, Error> {
        let fills = plan.workloads[0].is_fill();
        let is_new = self.server.is_none();
        if fills || is_new {
            self.restart()?;
        }
        if is_new && !fills {
            let fits = LOAD_BYTES / plan.value_sizes.most().max(1) / plan.threads.max(1);
            let load = Plan {
                workloads: vec![Workload::FillSequential],
                end: End::Operations(plan.keys),
                depth: plan.depth.max(LOAD_DEPTH.min(fits)),
                rate: None,
                warm_up: Nanos::ZERO,
                ..plan.clone()
            };
            self.load(&load, progress)?;
            self.account.note("every key was loaded before the first workload, not measured");
        }
        self.load(plan, progress)
    }

    fn account(&self) -> Account {
        self.account.clone()
    }
}

impl Drop for Redis {
    fn drop(&mut self) {
        self.end();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_write_is_synced_before_it_is_answered() {
        assert!(OPTIONS.contains(&["--appendonly", "yes"]) && OPTIONS.contains(&["--appendfsync", "always"]));
        assert_ne!(free_address().unwrap().port(), 0);
    }
}
