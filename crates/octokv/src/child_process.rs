//! A server process of this same binary, to be killed.

use anyhow::{Context, Result, bail};
use octokv_client::Url;
use std::ffi::OsStr;
use std::io::{BufRead, BufReader};
use std::net::{SocketAddr, ToSocketAddrs};
use std::path::Path;
use std::process::{Child, Command, Stdio};

/// A running `octokv serve`. Dropped, it is killed.
pub struct ChildServer {
    child: Child,
    /// Where it is found.
    pub url: Url,
}

impl ChildServer {
    /// Starts one on a device and waits for its ready line.
    pub fn start(device: &Path) -> Result<ChildServer> {
        ChildServer::start_with_flags(&[
            "--listen".as_ref(),
            "127.0.0.1:0".as_ref(),
            "--device".as_ref(),
            device.as_os_str(),
        ])
    }

    /// Starts one with these flags and waits for its ready line.
    pub fn start_with_flags(flags: &[&OsStr]) -> Result<ChildServer> {
        let binary = std::env::current_exe().context("this program's own file")?;
        let mut child = Command::new(binary)
            .arg("serve")
            .args(flags)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .context("a server process cannot be started")?;
        let mut line = String::new();
        let read = child.stdout.take().map(|out| BufReader::new(out).read_line(&mut line));
        let url = line.trim_end().strip_prefix("ready ").and_then(|url| url.parse().ok());
        match (read, url) {
            (Some(Ok(_)), Some(url)) => Ok(ChildServer { child, url }),
            _ => {
                let _ = child.kill();
                let status = child.wait().context("the server process")?;
                bail!("the server process did not get ready: {status}")
            }
        }
    }

    /// Ends it as a power cut would: SIGKILL, no last words.
    pub fn kill(&mut self) -> Result<()> {
        self.child.kill().context("the server process cannot be killed")
    }
}

impl Drop for ChildServer {
    fn drop(&mut self) {
        // It may have ended already; in either case nothing of it is left behind.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The address of a URL's host.
pub fn resolve_address(url: &Url) -> Result<SocketAddr> {
    let addresses = (url.host.as_str(), url.port).to_socket_addrs();
    let mut addresses = addresses.with_context(|| format!("host \"{}\"", url.host))?;
    addresses.next().with_context(|| format!("host \"{}\" has no address", url.host))
}
