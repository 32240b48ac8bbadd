//! A server process of the `octokv` binary: started, waited for, killed.

use octokv_client::Url;
use std::ffi::OsStr;
use std::io::{self, BufRead, BufReader};
use std::net::{SocketAddr, ToSocketAddrs};
use std::path::Path;
use std::process::{Child, Command, Stdio};

/// A running `octokv serve`. Dropping it kills the process.
pub struct ServerProcess {
    child: Child,
    /// The URL of its namespace 1.
    pub url: Url,
}

impl ServerProcess {
    /// Starts `octokv serve` on a device, at a free port, and waits for its ready line.
    ///
    /// # Errors
    /// If the process cannot be started or ends before it is ready.
    pub fn start(binary: &Path, device: &Path) -> io::Result<ServerProcess> {
        let listen = ["--listen".as_ref(), "127.0.0.1:0".as_ref()];
        let device = ["--device".as_ref(), device.as_os_str()];
        ServerProcess::start_with_flags(binary, &[listen, device].concat())
    }

    /// Starts `octokv serve` with these flags and waits for its ready line.
    ///
    /// # Errors
    /// If the process cannot be started or ends before it is ready.
    pub fn start_with_flags(binary: &Path, flags: &[&OsStr]) -> io::Result<ServerProcess> {
        let mut child = Command::new(binary)
            .arg("serve")
            .args(flags)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|error| with_context("a server process cannot be started", error))?;
        let mut line = String::new();
        let read = child.stdout.take().map(|out| BufReader::new(out).read_line(&mut line));
        let url = line.trim_end().strip_prefix("ready ").and_then(|url| url.parse().ok());
        match (read, url) {
            (Some(Ok(_)), Some(url)) => Ok(ServerProcess { child, url }),
            _ => {
                let _ = child.kill();
                let status = child.wait().map_err(|error| with_context("the server process", error))?;
                Err(io::Error::other(format!("the server process did not get ready: {status}")))
            }
        }
    }

    /// Kills the process with SIGKILL, as a power cut would end it.
    ///
    /// # Errors
    /// If the process cannot be killed.
    pub fn kill(&mut self) -> io::Result<()> {
        self.child.kill().map_err(|error| with_context("the server process cannot be killed", error))
    }
}

impl Drop for ServerProcess {
    fn drop(&mut self) {
        // The process may have ended already; in either case none is left.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Resolves the host of a URL to its first address.
///
/// # Errors
/// If the host has no address.
pub fn resolve_address(url: &Url) -> io::Result<SocketAddr> {
    let name = format!("host \"{}\"", url.host);
    let addresses = (url.host.as_str(), url.port).to_socket_addrs();
    let mut addresses = addresses.map_err(|error| with_context(&name, error))?;
    addresses.next().ok_or_else(|| io::Error::other(format!("{name} has no address")))
}

fn with_context(what: &str, error: io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{what}: {error}"))
}
