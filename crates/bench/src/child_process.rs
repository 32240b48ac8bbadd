//! A child process that is killed when it is dropped, and its output.
//!
//! ```text
//!   spawn ─▶ a thread reads the pipe to its end ─▶ ProcessOutput: text kept, lines searched, waiters notified
//! ```
//! In: a command. Out: the process, and its output on one stream. Invariants: no process outlives its
//! [`ChildProcess`]; a process never blocks on a full pipe, because its output is read until the end; at least the last
//! [`OUTPUT_BYTES_MAX`] bytes of output are kept.

use octokv_base::Nanos;
use octokv_sys::{clock, thread};
use std::io::{self, BufRead, BufReader, Read};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Bytes of output that are kept; twice as many are held at most.
pub const OUTPUT_BYTES_MAX: usize = 8 << 20;

/// A running process. Dropping it kills the process and waits for its end.
#[derive(Debug)]
pub struct ChildProcess {
    child: Child,
}

impl ChildProcess {
    /// Starts a process without standard input. Its output goes where `command` sends it.
    ///
    /// # Errors
    /// If it cannot be started.
    pub fn spawn(command: &mut Command) -> io::Result<ChildProcess> {
        Ok(ChildProcess { child: command.stdin(Stdio::null()).spawn()? })
    }

    /// Starts a process without standard input, and keeps its standard output.
    ///
    /// # Errors
    /// If it cannot be started, or the thread that reads its output cannot.
    pub fn spawn_with_stdout(command: &mut Command) -> io::Result<(ChildProcess, ProcessOutput)> {
        let mut process = ChildProcess::spawn(command.stdout(Stdio::piped()))?;
        let stdout = process.child.stdout.take().ok_or_else(|| io::Error::other("no standard output"))?;
        Ok((process, ProcessOutput::read_in_background(stdout)?))
    }

    /// Starts a process without standard input, and keeps its standard output and its standard error as one text.
    ///
    /// # Errors
    /// If it cannot be started, or the thread that reads its output cannot.
    pub fn spawn_with_output(command: &mut Command) -> io::Result<(ChildProcess, ProcessOutput)> {
        let (reader, writer) = io::pipe()?;
        command.stdout(writer.try_clone()?).stderr(writer);
        let started = ChildProcess::spawn(command);
        // The command holds the other end of the pipe, which would keep it open.
        command.stdout(Stdio::null()).stderr(Stdio::null());
        Ok((started?, ProcessOutput::read_in_background(reader)?))
    }

    /// The process id.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// The process, for signals.
    pub fn child(&mut self) -> &mut Child {
        &mut self.child
    }

    /// The exit status if the process has ended.
    ///
    /// # Errors
    /// If the kernel does not return it.
    pub fn try_wait(&mut self) -> io::Result<Option<ExitStatus>> {
        self.child.try_wait()
    }

    /// Waits for the end of the process.
    ///
    /// # Errors
    /// If the kernel does not return its exit status.
    pub fn wait(&mut self) -> io::Result<ExitStatus> {
        self.child.wait()
    }

    /// Kills the process with SIGKILL and waits for its end.
    ///
    /// # Errors
    /// If it cannot be killed, or its exit status is not available.
    pub fn kill(&mut self) -> io::Result<ExitStatus> {
        self.child.kill()?;
        self.child.wait()
    }
}

impl Drop for ChildProcess {
    fn drop(&mut self) {
        // The process may have ended already; in either case none is left.
        let _ = self.kill();
    }
}

/// Why a process did not print the expected line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotReady {
    /// Its output ended first.
    Ended,
    /// The limit passed first.
    TimedOut,
}

/// The output of a process, read by a thread of its own. Clones share it.
#[derive(Clone, Debug)]
pub struct ProcessOutput {
    shared: Arc<(Mutex<OutputBuffer>, Condvar)>,
}

#[derive(Debug, Default)]
struct OutputBuffer {
    bytes: Vec<u8>,
    /// Bytes before `bytes` that are no longer kept.
    dropped_bytes: usize,
    ended: bool,
}

impl OutputBuffer {
    fn push(&mut self, line: &[u8]) {
        self.bytes.extend_from_slice(line);
        if self.bytes.len() > 2 * OUTPUT_BYTES_MAX {
            let excess = self.bytes.len() - OUTPUT_BYTES_MAX;
            self.bytes.drain(..excess);
            self.dropped_bytes += excess;
        }
    }
}

impl ProcessOutput {
    /// Reads a stream to its end on a thread of its own.
    ///
    /// # Errors
    /// If the thread cannot be started.
    pub fn read_in_background(stream: impl Read + Send + 'static) -> io::Result<ProcessOutput> {
        let output = ProcessOutput { shared: Arc::default() };
        let reader = output.clone();
        thread::spawn("octokv-output", move || reader.read_to_end(stream))?;
        Ok(output)
    }

    fn read_to_end(&self, stream: impl Read) {
        let (mut stream, mut line) = (BufReader::new(stream), Vec::new());
        loop {
            line.clear();
            // A stream that fails has ended for its reader.
            let bytes = stream.read_until(b'\n', &mut line).unwrap_or(0);
            let mut buffer = self.lock();
            match bytes {
                0 => buffer.ended = true,
                _ => buffer.push(&line),
            }
            drop(buffer);
            self.shared.1.notify_all();
            if bytes == 0 {
                return;
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, OutputBuffer> {
        self.shared.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// All output that is kept, as text.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.lock().bytes).into_owned()
    }

    /// Waits until the output ends, and returns it.
    pub fn wait_end(&self) -> String {
        let mut buffer = self.lock();
        while !buffer.ended {
            buffer = self.shared.1.wait(buffer).unwrap_or_else(PoisonError::into_inner);
        }
        drop(buffer);
        self.text()
    }

    /// Waits until `find` returns a value for a line of the output, from the first line on, but not longer than `limit`.
    /// A line is passed without its end.
    ///
    /// # Errors
    /// [`NotReady::Ended`] if the output ends first, [`NotReady::TimedOut`] if the limit passes first.
    pub fn wait_line<T>(
        &self,
        limit: Duration,
        mut find: impl FnMut(&str) -> Option<T>,
    ) -> Result<T, NotReady> {
        let give_up = clock::now() + Nanos(limit.as_nanos() as u64);
        let mut searched = 0;
        let mut buffer = self.lock();
        loop {
            let from = searched.max(buffer.dropped_bytes) - buffer.dropped_bytes;
            let text = String::from_utf8_lossy(&buffer.bytes[from..]);
            if let Some(found) = text.lines().find_map(&mut find) {
                return Ok(found);
            }
            searched = buffer.dropped_bytes + buffer.bytes.len();
            let left = give_up.since(clock::now());
            if buffer.ended {
                return Err(NotReady::Ended);
            }
            if left == Nanos::ZERO {
                return Err(NotReady::TimedOut);
            }
            let waited = self.shared.1.wait_timeout(buffer, Duration::from_nanos(left.0));
            buffer = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

/// The last line of a text that is not empty, without surrounding blanks.
pub fn last_line(text: &str) -> Option<&str> {
    text.lines().map(str::trim).rfind(|line| !line.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_secs(60);

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    fn number_after_ready(line: &str) -> Option<u32> {
        line.strip_prefix("ready ")?.parse().ok()
    }

    #[test]
    fn a_ready_line_is_found_and_all_output_kept() {
        let mut command = shell("echo one; echo ready 7; echo two >&2; echo three");
        let (mut process, output) = ChildProcess::spawn_with_output(&mut command).unwrap();
        assert_eq!(output.wait_line(LIMIT, number_after_ready), Ok(7));
        assert_eq!(output.wait_end(), "one\nready 7\ntwo\nthree\n");
        assert_eq!(output.wait_line(LIMIT, number_after_ready), Ok(7), "the kept output is searched again");
        assert!(process.wait().unwrap().success());
        assert_eq!(last_line("a\n b \n\n"), Some("b"));
        assert_eq!(last_line(" \n"), None);
    }

    #[test]
    fn a_process_that_ends_or_is_late_is_not_ready() {
        let (_process, output) = ChildProcess::spawn_with_stdout(&mut shell("echo broken; exit 3")).unwrap();
        assert_eq!(output.wait_line(LIMIT, number_after_ready), Err(NotReady::Ended));
        assert_eq!(output.text(), "broken\n");
        let (_process, output) = ChildProcess::spawn_with_stdout(&mut shell("exec sleep 1000")).unwrap();
        let late = output.wait_line(Duration::from_millis(20), number_after_ready);
        assert_eq!(late, Err(NotReady::TimedOut));
    }

    #[test]
    fn dropping_a_process_kills_it() {
        let (process, output) =
            ChildProcess::spawn_with_stdout(&mut shell("echo ready 1; exec sleep 1000")).unwrap();
        output.wait_line(LIMIT, number_after_ready).unwrap();
        drop(process);
        // Its end of the pipe is closed.
        assert_eq!(output.wait_end(), "ready 1\n");
    }

    #[test]
    fn long_output_keeps_its_end() {
        let line = format!("{}\n", "x".repeat(1 << 20));
        let mut buffer = OutputBuffer::default();
        for _ in 0..40 {
            buffer.push(line.as_bytes());
            assert!(buffer.bytes.len() <= 2 * OUTPUT_BYTES_MAX);
        }
        assert!(buffer.bytes.len() >= OUTPUT_BYTES_MAX && buffer.bytes.ends_with(b"x\n"));
        assert_eq!(buffer.dropped_bytes + buffer.bytes.len(), 40 * line.len());
    }
}
