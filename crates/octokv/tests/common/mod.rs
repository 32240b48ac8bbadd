//! Shared by the tests of the binary: a server process, the client commands, temporary directories.

#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    dead_code,
    reason = "tests start processes and make files, and not every test uses every helper"
)]

use octokv_bench::server_process::ServerProcess;
use octokv_sys::seccomp::{SeccompErrno, deny_io_uring};
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Output, Stdio};
use tempfile::TempDir;

/// The binary under test.
pub const OCTOKV: &str = env!("CARGO_BIN_EXE_octokv");

/// The warning of a node without io_uring.
pub const IO_URING_UNAVAILABLE: &str = "io_uring is not available here";

/// Standard error without the warning of a node without io_uring.
pub fn without_driver_warning(stderr: &str) -> String {
    stderr.split_inclusive('\n').filter(|line| !line.contains(IO_URING_UNAVAILABLE)).collect()
}

/// A temporary directory on a file system with direct I/O.
pub fn temp_directory() -> TempDir {
    TempDir::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

/// Exit code and output of a finished command.
pub struct CommandOutput {
    pub code: i32,
    pub stdout: Vec<u8>,
    pub stderr: String,
}

impl CommandOutput {
    fn new(output: Output) -> CommandOutput {
        CommandOutput {
            code: output.status.code().expect("the command was not killed"),
            stdout: output.stdout,
            stderr: String::from_utf8(output.stderr).unwrap(),
        }
    }

    pub fn text(&self) -> &str {
        std::str::from_utf8(&self.stdout).unwrap()
    }

    /// Asserts exit code 0 and empty standard error, and returns standard output.
    #[track_caller]
    pub fn stdout_ok(&self) -> &str {
        assert_eq!((self.code, self.stderr.as_str()), (0, ""));
        self.text()
    }

    /// Asserts the exit code, every part on standard error, and empty standard output.
    #[track_caller]
    pub fn assert_failed(&self, code: i32, parts: &[&str]) {
        assert_eq!(self.code, code, "{}", self.stderr);
        for part in parts {
            assert!(self.stderr.contains(part), "no \"{part}\" in {}", self.stderr);
        }
        assert!(self.stdout.is_empty(), "{}", self.text());
    }
}

/// Runs `body` on its own thread, on which, and in its child processes, io_uring is denied.
pub fn without_io_uring<T: Send>(refusal: SeccompErrno, body: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| {
        let refused = scope.spawn(|| {
            deny_io_uring(refusal).unwrap();
            body()
        });
        refused.join().unwrap()
    })
}

/// Runs the binary to its end.
pub fn octokv<S: AsRef<std::ffi::OsStr>>(arguments: impl IntoIterator<Item = S>) -> CommandOutput {
    CommandOutput::new(command(arguments).output().unwrap())
}

/// Runs the binary to its end with this standard input.
pub fn octokv_with_stdin<S: AsRef<std::ffi::OsStr>>(
    arguments: impl IntoIterator<Item = S>,
    input: &[u8],
) -> CommandOutput {
    let mut child = command(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(input).unwrap();
    CommandOutput::new(child.wait_with_output().unwrap())
}

fn command<S: AsRef<std::ffi::OsStr>>(arguments: impl IntoIterator<Item = S>) -> Command {
    let mut command = Command::new(OCTOKV);
    command.args(arguments).env_remove("OCTOKV_URL").stdin(Stdio::null());
    command
}

/// Runs `octokv serve`, which must fail to start.
pub fn serve_expecting_failure(device: &Path, arguments: &[&str]) -> CommandOutput {
    let fixed = ["serve", "--listen", "127.0.0.1:0", "--device", device.to_str().unwrap()];
    octokv(fixed.iter().chain(arguments))
}

/// A running `octokv serve`.
pub struct Server {
    process: ServerProcess,
    pub url: String,
    stderr: PathBuf,
}

impl Server {
    /// Starts a server with these arguments and waits for the ready line. Its standard error is a file in `directory`.
    pub fn start_with(directory: &Path, arguments: &[&str]) -> Server {
        let stderr = directory.join(format!("stderr-{}", arguments.len()));
        // Killed nodes must leave no sockets in the machine's runtime directory.
        let own: &[&str] = if arguments.contains(&"--admin") { &[] } else { &["--admin", "none"] };
        let mut serve = command(["serve"].iter().chain(arguments).chain(own));
        let started = ServerProcess::start_command(serve.stderr(File::create(&stderr).unwrap()));
        let process =
            started.unwrap_or_else(|error| panic!("{error}, {}", std::fs::read_to_string(&stderr).unwrap()));
        Server { url: process.url.to_string(), process, stderr }
    }

    /// Starts a server on the file `device` of a directory, on a free port.
    pub fn start(directory: &Path, size: &str) -> Server {
        let device = directory.join("device");
        let device = device.to_str().unwrap();
        Server::start_with(directory, &["--device", device, "--size", size, "--listen", "127.0.0.1:0"])
    }

    /// Runs a client command against it.
    pub fn run(&self, arguments: &[&str]) -> CommandOutput {
        octokv(arguments.iter().copied().chain(["--url", &self.url]))
    }

    /// Stores a value and asserts success.
    #[track_caller]
    pub fn put(&self, key: &str, value: &str) {
        assert_eq!(self.run(&["put", key, value]).stdout_ok(), "");
    }

    /// Asserts the value of a key.
    #[track_caller]
    pub fn assert_value(&self, key: &str, value: &str) {
        assert_eq!(self.run(&["get", key]).stdout_ok(), value);
    }

    /// CPU time used, in hundredths of a second.
    pub fn cpu_ticks(&self) -> u64 {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.process.id())).unwrap();
        let fields: Vec<&str> = stat.rsplit(')').next().unwrap().split_whitespace().collect();
        fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
    }

    /// Its process id.
    pub fn id(&self) -> u32 {
        self.process.id()
    }

    /// `HOST:PORT` of its ready line.
    pub fn authority(&self) -> &str {
        self.url.strip_prefix("nvme+tcp://").unwrap().split('/').next().unwrap()
    }

    /// All of its standard error.
    pub fn stderr_text(&self) -> String {
        std::fs::read_to_string(&self.stderr).unwrap()
    }

    /// Its standard error without the warning of a node without io_uring.
    pub fn unexpected_stderr(&self) -> String {
        without_driver_warning(&self.stderr_text())
    }

    /// Sends SIGKILL and waits for its end.
    pub fn kill(&mut self) {
        self.process.kill().unwrap();
    }

    /// Sends a signal by name and returns the exit status.
    pub fn signal(&mut self, name: &str) -> ExitStatus {
        let pid = self.process.id().to_string();
        // The shell's builtin: needs no package.
        let sent = Command::new("sh").args(["-c", &format!("kill -{name} {pid}")]).status().unwrap();
        assert!(sent.success());
        self.process.process().wait().unwrap()
    }

    /// Stops it cleanly.
    #[track_caller]
    pub fn stop(mut self) {
        let status = self.signal("TERM");
        assert!(status.success(), "{status}: {}", self.unexpected_stderr());
    }
}
