//! A server process of the `octokv` binary: started, waited for until it is ready, killed when dropped.

use crate::child_process::{ChildProcess, NotReady, ProcessOutput};
use octokv_client::Url;
use std::ffi::OsStr;
use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

/// Time that a server has to become ready: formatting and recovery included.
pub const READY_MAX: Duration = Duration::from_secs(300);

/// A running `octokv serve`. Dropping it kills the process.
#[derive(Debug)]
pub struct ServerProcess {
    process: ChildProcess,
    /// Standard output is read until the end, so that the server never blocks on it.
    _stdout: ProcessOutput,
    /// The URL of its namespace 1.
    pub url: Url,
}

impl ServerProcess {
    /// Starts `octokv serve` on a device, at a free port, and waits for its ready line.
    ///
    /// # Errors
    /// If the process cannot be started, or does not become ready within [`READY_MAX`].
    pub fn start(binary: &Path, device: &Path) -> io::Result<ServerProcess> {
        let listen = ["--listen".as_ref(), "127.0.0.1:0".as_ref()];
        let device = ["--device".as_ref(), device.as_os_str()];
        ServerProcess::start_with_flags(binary, &[listen, device].concat())
    }

    /// Starts `octokv serve` with these flags and waits for its ready line.
    ///
    /// # Errors
    /// If the process cannot be started, or does not become ready within [`READY_MAX`].
    pub fn start_with_flags(binary: &Path, flags: &[&OsStr]) -> io::Result<ServerProcess> {
        ServerProcess::start_command(Command::new(binary).arg("serve").args(flags))
    }

    /// Starts a command that serves, and waits for its ready line: `ready URL` on standard output. Standard error goes
    /// where `command` sends it.
    ///
    /// # Errors
    /// If the process cannot be started, or does not become ready within [`READY_MAX`].
    pub fn start_command(command: &mut Command) -> io::Result<ServerProcess> {
        let started = ChildProcess::spawn_with_stdout(command);
        let (mut process, stdout) =
            started.map_err(|error| with_context("a server process cannot be started", error))?;
        match stdout.wait_line(READY_MAX, |line| line.strip_prefix("ready ")?.trim_end().parse().ok()) {
            Ok(url) => Ok(ServerProcess { process, _stdout: stdout, url }),
            Err(NotReady::TimedOut) => Err(io::Error::new(
                io::ErrorKind::TimedOut,
                format!("the server process is not ready after {} s", READY_MAX.as_secs()),
            )),
            Err(NotReady::Ended) => {
                let status = process.wait().map_err(|error| with_context("the server process", error))?;
                let printed = stdout.text();
                Err(io::Error::other(format!(
                    "the server process ended before it was ready: {status} {printed}"
                )))
            }
        }
    }

    /// The process, for its id, its exit status and signals.
    pub fn process(&mut self) -> &mut ChildProcess {
        &mut self.process
    }

    /// The process id.
    pub fn id(&self) -> u32 {
        self.process.id()
    }

    /// Kills the process with SIGKILL, as a power cut would end it, and waits for its end.
    ///
    /// # Errors
    /// If the process cannot be killed.
    pub fn kill(&mut self) -> io::Result<()> {
        let killed = self.process.kill();
        killed.map(drop).map_err(|error| with_context("the server process cannot be killed", error))
    }
}

/// Resolves the host of a URL to its first address.
///
/// # Errors
/// If the host cannot be resolved or has no address.
pub fn resolve_address(url: &Url) -> io::Result<SocketAddr> {
    let name = format!("host \"{}\"", url.host);
    let addresses = (url.host.as_str(), url.port).to_socket_addrs();
    let mut addresses = addresses.map_err(|error| with_context(&name, error))?;
    addresses.next().ok_or_else(|| io::Error::other(format!("{name} has no address")))
}

fn with_context(context: &str, error: io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{context}: {error}"))
}
