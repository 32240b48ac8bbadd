//! What the tests of the binary share: a server process, the client's commands, a place for files.

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

/// What a node says where io_uring is refused to it.
pub const WITHOUT_IO_URING: &str = "io_uring is not available here";

/// What is left of standard error without the line that a node owes where io_uring is refused to it.
pub fn beside_the_driver(stderr: &str) -> String {
    stderr.split_inclusive('\n').filter(|line| !line.contains(WITHOUT_IO_URING)).collect()
}

/// A directory on a file system with direct transfers, gone at the end.
pub fn directory() -> TempDir {
    TempDir::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

/// What a finished command said.
pub struct Said {
    pub code: i32,
    pub stdout: Vec<u8>,
    pub stderr: String,
}

impl Said {
    fn new(output: Output) -> Said {
        Said {
            code: output.status.code().expect("the command was not killed"),
            stdout: output.stdout,
            stderr: String::from_utf8(output.stderr).unwrap(),
        }
    }

    pub fn text(&self) -> &str {
        std::str::from_utf8(&self.stdout).unwrap()
    }

    /// Asserts exit code 0 and silence on standard error, and gives standard output.
    #[track_caller]
    pub fn fine(&self) -> &str {
        assert_eq!((self.code, self.stderr.as_str()), (0, ""));
        self.text()
    }

    /// Asserts the exit code, one line on standard error that holds every part, and no output.
    #[track_caller]
    pub fn refused(&self, code: i32, parts: &[&str]) {
        assert_eq!(self.code, code, "{}", self.stderr);
        for part in parts {
            assert!(self.stderr.contains(part), "no \"{part}\" in {}", self.stderr);
        }
        assert!(self.stdout.is_empty(), "{}", self.text());
    }
}

/// Runs `body` on a thread of its own to which, with all that it starts, io_uring is refused.
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
pub fn octokv<S: AsRef<std::ffi::OsStr>>(arguments: impl IntoIterator<Item = S>) -> Said {
    Said::new(command(arguments).output().unwrap())
}

/// Runs the binary to its end with something on standard input.
pub fn octokv_fed<S: AsRef<std::ffi::OsStr>>(arguments: impl IntoIterator<Item = S>, input: &[u8]) -> Said {
    let mut child = command(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(input).unwrap();
    Said::new(child.wait_with_output().unwrap())
}

fn command<S: AsRef<std::ffi::OsStr>>(arguments: impl IntoIterator<Item = S>) -> Command {
    let mut command = Command::new(OCTOKV);
    command.args(arguments).env_remove("OCTOKV_URL").stdin(Stdio::null());
    command
}

/// Runs `octokv serve` where it is to refuse.
pub fn refused_to_serve(device: &Path, arguments: &[&str]) -> Said {
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
    /// Starts one with these arguments and waits for the ready line. `directory` keeps its last words.
    pub fn start_with(directory: &Path, arguments: &[&str]) -> Server {
        let stderr = directory.join(format!("stderr-{}", arguments.len()));
        // Nodes that a test kills leave no sockets in a directory of the machine's.
        let own: &[&str] = if arguments.contains(&"--admin") { &[] } else { &["--admin", "none"] };
        let mut serve = command(["serve"].iter().chain(arguments).chain(own));
        let started = ServerProcess::start_command(serve.stderr(File::create(&stderr).unwrap()));
        let process =
            started.unwrap_or_else(|error| panic!("{error}, {}", std::fs::read_to_string(&stderr).unwrap()));
        Server { url: process.url.to_string(), process, stderr }
    }

    /// Starts one on the file `device` of a directory, on any free port.
    pub fn start(directory: &Path, size: &str) -> Server {
        let device = directory.join("device");
        let device = device.to_str().unwrap();
        Server::start_with(directory, &["--device", device, "--size", size, "--listen", "127.0.0.1:0"])
    }

    /// Runs a command of the client against it.
    pub fn run(&self, arguments: &[&str]) -> Said {
        octokv(arguments.iter().copied().chain(["--url", &self.url]))
    }

    /// Puts a value and asserts that it worked.
    #[track_caller]
    pub fn put(&self, key: &str, value: &str) {
        assert_eq!(self.run(&["put", key, value]).fine(), "");
    }

    /// Asserts the value of a key.
    #[track_caller]
    pub fn has(&self, key: &str, value: &str) {
        assert_eq!(self.run(&["get", key]).fine(), value);
    }

    /// Processor time it has used, in hundredths of a second.
    pub fn ticks(&self) -> u64 {
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

    /// All that it said on standard error.
    pub fn all_said(&self) -> String {
        std::fs::read_to_string(&self.stderr).unwrap()
    }

    /// What it said on standard error, beside the one line that it owes where io_uring is refused to it.
    pub fn said(&self) -> String {
        beside_the_driver(&self.all_said())
    }

    /// SIGKILL, and waits for its end.
    pub fn kill(&mut self) {
        self.process.kill().unwrap();
    }

    /// A signal by name, and how it ended then.
    pub fn signal(&mut self, name: &str) -> ExitStatus {
        let pid = self.process.id().to_string();
        // The shell's own kill: nothing needs to be installed.
        let sent = Command::new("sh").args(["-c", &format!("kill -{name} {pid}")]).status().unwrap();
        assert!(sent.success());
        self.process.process().wait().unwrap()
    }

    /// Ends it in order.
    #[track_caller]
    pub fn stop(mut self) {
        let status = self.signal("TERM");
        assert!(status.success(), "{status}: {}", self.said());
    }
}
