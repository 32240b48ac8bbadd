//! Processes that a run starts, and that end with it, however it ends.
//! In: commands. Out: their output. Invariants: a process that was started is waited for; once all were ended
//! ([`ChildProcesses::end_all`], from any thread, a signal's watcher too) no other starts.

use std::io::{self, ErrorKind, PipeReader, Read};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The processes of a run. Dropped, it ends them.
#[derive(Debug, Default)]
pub struct ChildProcesses(Mutex<ProcessTable>);

#[derive(Debug, Default)]
struct ProcessTable {
    running: Vec<Child>,
    terminated: bool,
}

impl ChildProcesses {
    fn lock_table(&self) -> MutexGuard<'_, ProcessTable> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts a process without input. Gives its number and all that it prints, on either stream.
    ///
    /// # Errors
    /// When it cannot be started, or all were ended.
    pub fn start(&self, command: &mut Command) -> io::Result<(u32, PipeReader)> {
        let (reader, writer) = io::pipe()?;
        command.stdin(Stdio::null()).stdout(writer.try_clone()?).stderr(writer);
        let mut table = self.lock_table();
        if table.terminated {
            return Err(ErrorKind::Interrupted.into());
        }
        let started = command.spawn();
        // The command has the other end of the pipe, which would keep it open.
        command.stdout(Stdio::null()).stderr(Stdio::null());
        let child = started?;
        let id = child.id();
        table.running.push(child);
        Ok((id, reader))
    }

    /// Runs a process to its end. Gives how it ended and what it printed.
    ///
    /// # Errors
    /// When it cannot be started or read from, or was ended by [`ChildProcesses::end_all`].
    pub fn run(&self, command: &mut Command) -> io::Result<(ExitStatus, String)> {
        let (id, mut reader) = self.start(command)?;
        let mut printed = Vec::new();
        let read = reader.read_to_end(&mut printed);
        // Its end of the pipe is closed: it has ended, or has nothing more to say.
        let status = match self.take(id) {
            Some(mut child) => child.wait()?,
            None => return Err(ErrorKind::Interrupted.into()),
        };
        read?;
        Ok((status, String::from_utf8_lossy(&printed).into_owned()))
    }

    /// Ends one process at once and waits for it.
    pub fn terminate(&self, id: u32) {
        if let Some(child) = self.take(id) {
            kill_and_wait(child);
        }
    }

    /// Ends all of them at once, and whatever is to start later does not.
    pub fn terminate_all(&self) {
        let mut table = self.lock_table();
        table.terminated = true;
        table.running.drain(..).for_each(kill_and_wait);
    }

    fn take(&self, id: u32) -> Option<Child> {
        let running = &mut self.lock_table().running;
        let at = running.iter().position(|child| child.id() == id)?;
        Some(running.swap_remove(at))
    }
}

impl Drop for ChildProcesses {
    fn drop(&mut self) {
        self.terminate_all();
    }
}

fn kill_and_wait(mut child: Child) {
    // It may have ended already; in either case nothing of it is left behind.
    let _ = child.kill();
    let _ = child.wait();
}

#[cfg(test)]
mod tests {
    use super::*;

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
        let (_, mut one) = children.start(&mut shell("echo up; exec sleep 1000")).unwrap();
        let (id, mut other) = children.start(&mut shell("exec sleep 1000")).unwrap();
        // Ended once it runs: before, it might have said nothing.
        let mut output = [0; 3];
        one.read_exact(&mut output).unwrap();
        assert_eq!(&output, b"up\n");
        children.terminate(id);
        children.terminate_all();
        // Their ends of the pipes are closed.
        assert_eq!(one.read_to_end(&mut Vec::new()).unwrap(), 0);
        assert_eq!(other.read_to_end(&mut Vec::new()).unwrap(), 0);
        let refused = children.run(&mut shell("exit 0")).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Interrupted);
    }
}
