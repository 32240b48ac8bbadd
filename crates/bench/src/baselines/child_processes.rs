//! Processes that a run starts, and that end with it, however it ends.
//! In: commands. Out: their output. Invariants: a process that was started is waited for; once all were ended
//! ([`Children::end_all`], from any thread, a signal's watcher too) no other starts.

use std::io::{self, ErrorKind, PipeReader, Read};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The processes of a run. Dropped, it ends them.
#[derive(Debug, Default)]
pub struct Children(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    running: Vec<Child>,
    over: bool,
}

impl Children {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts a process without input. Gives its number and all that it prints, on either stream.
    ///
    /// # Errors
    /// When it cannot be started, or all were ended.
    pub fn start(&self, command: &mut Command) -> io::Result<(u32, PipeReader)> {
        let (reader, writer) = io::pipe()?;
        command.stdin(Stdio::null()).stdout(writer.try_clone()?).stderr(writer);
        let mut state = self.state();
        if state.over {
            return Err(ErrorKind::Interrupted.into());
        }
        let started = command.spawn();
        // The command has the other end of the pipe, which would keep it open.
        command.stdout(Stdio::null()).stderr(Stdio::null());
        let child = started?;
        let id = child.id();
        state.running.push(child);
        Ok((id, reader))
    }

    /// Runs a process to its end. Gives how it ended and what it printed.
    ///
    /// # Errors
    /// When it cannot be started or read from, or was ended by [`Children::end_all`].
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
    pub fn end(&self, id: u32) {
        if let Some(child) = self.take(id) {
            end(child);
        }
    }

    /// Ends all of them at once, and whatever is to start later does not.
    pub fn end_all(&self) {
        let mut state = self.state();
        state.over = true;
        state.running.drain(..).for_each(end);
    }

    fn take(&self, id: u32) -> Option<Child> {
        let running = &mut self.state().running;
        let at = running.iter().position(|child| child.id() == id)?;
        Some(running.swap_remove(at))
    }
}

impl Drop for Children {
    fn drop(&mut self) {
        self.end_all();
    }
}

fn end(mut child: Child) {
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
    fn both_streams_are_heard_and_the_end_is_told() {
        let children = Children::default();
        let (status, printed) = children.run(&mut shell("echo one; echo two >&2; exit 3")).unwrap();
        assert_eq!((status.code(), printed.as_str()), (Some(3), "one\ntwo\n"));
        assert!(children.run(&mut Command::new("/nowhere/at/all")).is_err());
    }

    #[test]
    fn what_is_ended_is_gone_and_nothing_starts_after_all_were() {
        let children = Children::default();
        let (_, mut one) = children.start(&mut shell("echo up; exec sleep 1000")).unwrap();
        let (id, mut other) = children.start(&mut shell("exec sleep 1000")).unwrap();
        // Ended once it runs: before, it might have said nothing.
        let mut said = [0; 3];
        one.read_exact(&mut said).unwrap();
        assert_eq!(&said, b"up\n");
        children.end(id);
        children.end_all();
        // Their ends of the pipes are closed.
        assert_eq!(one.read_to_end(&mut Vec::new()).unwrap(), 0);
        assert_eq!(other.read_to_end(&mut Vec::new()).unwrap(), 0);
        let refused = children.run(&mut shell("exit 0")).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Interrupted);
    }
}
