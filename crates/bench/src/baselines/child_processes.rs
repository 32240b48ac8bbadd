//! The processes of a comparison, terminated when it ends.
//!
//! In: commands. Out: their output. Invariants: every started process is waited for; after
//! [`ChildProcesses::terminate_all`], from any thread (a signal handler's too), no process starts.

use crate::child_process::{ChildProcess, ProcessOutput};
use std::io::{self, ErrorKind};
use std::process::{Command, ExitStatus};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The processes of a run. Dropping it terminates them.
#[derive(Debug, Default)]
pub struct ChildProcesses(Mutex<ProcessTable>);

#[derive(Debug, Default)]
struct ProcessTable {
    running: Vec<ChildProcess>,
    terminated: bool,
}

impl ChildProcesses {
    fn lock_table(&self) -> MutexGuard<'_, ProcessTable> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts a process without input. Returns its id and its output, of both streams.
    ///
    /// # Errors
    /// If it cannot be started; [`ErrorKind::Interrupted`] after [`ChildProcesses::terminate_all`].
    pub fn start(&self, command: &mut Command) -> io::Result<(u32, ProcessOutput)> {
        let mut table = self.lock_table();
        if table.terminated {
            return Err(ErrorKind::Interrupted.into());
        }
        let (process, output) = ChildProcess::spawn_with_output(command)?;
        let id = process.id();
        table.running.push(process);
        Ok((id, output))
    }

    /// Runs a process to its end. Returns its exit status and its output.
    ///
    /// # Errors
    /// If it cannot be started; [`ErrorKind::Interrupted`] if [`ChildProcesses::terminate_all`] ended it.
    pub fn run(&self, command: &mut Command) -> io::Result<(ExitStatus, String)> {
        let (id, output) = self.start(command)?;
        let printed = output.wait_end();
        // Its end of the pipe is closed: it has ended, or prints nothing more.
        match self.take(id) {
            Some(mut process) => Ok((process.wait()?, printed)),
            None => Err(ErrorKind::Interrupted.into()),
        }
    }

    /// Kills one process and waits for its end.
    pub fn terminate(&self, id: u32) {
        drop(self.take(id));
    }

    /// Kills all processes and waits for their end. No process starts afterwards.
    pub fn terminate_all(&self) {
        let mut table = self.lock_table();
        table.terminated = true;
        table.running.clear();
    }

    fn take(&self, id: u32) -> Option<ChildProcess> {
        let running = &mut self.lock_table().running;
        let at = running.iter().position(|process| process.id() == id)?;
        Some(running.swap_remove(at))
    }
}

impl Drop for ChildProcesses {
    fn drop(&mut self) {
        self.terminate_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    #[test]
    fn both_output_streams_and_the_exit_status_are_returned() {
        let children = ChildProcesses::default();
        let (status, printed) = children.run(&mut shell("echo one; echo two >&2; exit 3")).unwrap();
        assert_eq!((status.code(), printed.as_str()), (Some(3), "one\ntwo\n"));
        assert!(children.run(&mut Command::new("/nowhere/at/all")).is_err());
    }

    #[test]
    fn terminated_processes_are_gone_and_no_other_starts() {
        let children = ChildProcesses::default();
        let (_, one) = children.start(&mut shell("echo up; exec sleep 1000")).unwrap();
        let (id, other) = children.start(&mut shell("exec sleep 1000")).unwrap();
        // Killed once it runs: before, it might have printed nothing.
        one.wait_line(Duration::from_secs(60), |line| (line == "up").then_some(())).unwrap();
        children.terminate(id);
        children.terminate_all();
        // Their ends of the pipes are closed.
        assert_eq!((one.wait_end().as_str(), other.wait_end().as_str()), ("up\n", ""));
        let refused = children.run(&mut shell("exit 0")).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Interrupted);
    }
}
