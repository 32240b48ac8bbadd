//! The commands in flight of one outgoing session, by token.
//!
//! ```text
//!   (free) ──insert──▶ Waiting ──complete──▶ Completed ──take, abandon──▶ (free)
//!                         └──abandon──▶ Abandoned ──complete──▶ (free)
//! ```
//! In: completions of the session, futures that poll or are dropped. Out: responses, wake-ups of futures. Invariants: a
//! token is reused only after its command has completed, so a late response never completes another command; a command
//! counts against the bounds until it completes, whether or not its future still exists.

use crate::bug_injection::{self, InjectedBug};
use crate::command::Response;
use crate::error::Error;
use slab::Slab;
use std::task::{Poll, Waker};

enum CommandState {
    /// In flight; the waker of the future that awaits it.
    Waiting(Option<Waker>),
    /// The future has not taken the response yet.
    Completed(Result<Response, Error>),
    /// In flight; its future was dropped.
    Abandoned,
}

struct InFlightCommand {
    state: CommandState,
    buffer_bytes: usize,
}

/// Bounds of the commands in flight.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CommandLimits {
    /// Most commands.
    pub commands: usize,
    /// Most bytes of their buffers; one command alone may exceed it.
    pub buffer_bytes: usize,
}

/// The commands of one session. See the module documentation.
pub(crate) struct PeerCommands {
    limits: CommandLimits,
    commands: Slab<InFlightCommand>,
    in_flight: usize,
    buffer_bytes: usize,
    completed_count: u64,
}

impl PeerCommands {
    /// No commands, with these bounds.
    pub fn new(limits: CommandLimits) -> PeerCommands {
        PeerCommands { limits, commands: Slab::new(), in_flight: 0, buffer_bytes: 0, completed_count: 0 }
    }

    /// Whether a command with this much buffer memory is within the bounds. A command that exceeds the bytes is
    /// admitted alone.
    pub fn has_room(&self, buffer_bytes: usize) -> bool {
        self.in_flight == 0
            || (self.in_flight < self.limits.commands
                && self.buffer_bytes.saturating_add(buffer_bytes) <= self.limits.buffer_bytes)
    }

    /// The token of the next [`PeerCommands::insert`].
    pub fn next_token(&self) -> u64 {
        self.commands.vacant_key() as u64
    }

    /// Adds a submitted command. REQUIRES: [`PeerCommands::has_room`]; it was submitted with
    /// [`PeerCommands::next_token`].
    pub fn insert(&mut self, buffer_bytes: usize) {
        self.in_flight += 1;
        self.buffer_bytes += buffer_bytes;
        assert!(self.in_flight <= self.limits.commands, "{} commands in flight", self.in_flight);
        assert!(
            self.buffer_bytes <= self.limits.buffer_bytes || self.in_flight == 1,
            "{} bytes in flight",
            self.buffer_bytes
        );
        self.commands.insert(InFlightCommand { state: CommandState::Waiting(None), buffer_bytes });
    }

    /// Completes a command and wakes its future.
    ///
    /// # Panics
    /// If no command with this token is in flight: a command completes once.
    pub fn complete(&mut self, token: u64, result: Result<Response, Error>) {
        let was_aborted = matches!(result, Err(Error::OutcomeUnknown | Error::Disconnected(_)));
        if was_aborted && bug_injection::is_injected(InjectedBug::ForgetAbortedCommands) {
            return;
        }
        let token = token as usize;
        if bug_injection::is_injected(InjectedBug::ReuseAbandonedTokens) && !self.is_in_flight(token) {
            return;
        }
        let command = self.commands.get_mut(token).expect("a token is in use until its command completes");
        let before = std::mem::replace(&mut command.state, CommandState::Completed(result));
        assert!(!matches!(before, CommandState::Completed(_)), "token {token} completed twice");
        self.in_flight -= 1;
        self.buffer_bytes -= command.buffer_bytes;
        self.completed_count += 1;
        match before {
            CommandState::Waiting(waker) => waker.into_iter().for_each(Waker::wake),
            CommandState::Abandoned | CommandState::Completed(_) => drop(self.commands.remove(token)),
        }
    }

    fn is_in_flight(&self, token: usize) -> bool {
        self.commands.get(token).is_some_and(|command| !matches!(command.state, CommandState::Completed(_)))
    }

    /// Takes the response of a command and frees its token; if there is none yet, `waker` is woken with it.
    pub fn poll(&mut self, token: u64, waker: &Waker) -> Poll<Result<Response, Error>> {
        let command = &mut self.commands[token as usize];
        match &mut command.state {
            CommandState::Waiting(Some(old)) => old.clone_from(waker),
            CommandState::Waiting(none) => *none = Some(waker.clone()),
            CommandState::Abandoned => panic!("an abandoned command is polled"),
            CommandState::Completed(_) => {
                if let CommandState::Completed(result) = self.commands.remove(token as usize).state {
                    return Poll::Ready(result);
                }
            }
        }
        Poll::Pending
    }

    /// Notes that the future of a command is dropped before it returned `Ready`.
    pub fn abandon(&mut self, token: u64) {
        let command = &mut self.commands[token as usize];
        match command.state {
            CommandState::Waiting(_) if bug_injection::is_injected(InjectedBug::ReuseAbandonedTokens) => {
                self.in_flight -= 1;
                self.buffer_bytes -= command.buffer_bytes;
                drop(self.commands.remove(token as usize));
            }
            CommandState::Waiting(_) => command.state = CommandState::Abandoned,
            CommandState::Completed(_) => drop(self.commands.remove(token as usize)),
            CommandState::Abandoned => panic!("a command is abandoned twice"),
        }
    }

    /// Number of commands in flight.
    pub fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// Number of commands completed so far.
    pub fn completed_count(&self) -> u64 {
        self.completed_count
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn commands(commands: usize, buffer_bytes: usize) -> PeerCommands {
        PeerCommands::new(CommandLimits { commands, buffer_bytes })
    }

    fn insert(commands: &mut PeerCommands, buffer_bytes: usize) -> u64 {
        let token = commands.next_token();
        commands.insert(buffer_bytes);
        token
    }

    #[test]
    fn a_token_is_reused_only_after_its_command_has_completed() {
        let mut commands = commands(4, 100);
        let first = insert(&mut commands, 10);
        assert!(commands.poll(first, Waker::noop()).is_pending());
        commands.abandon(first);
        assert_ne!(commands.next_token(), first, "the command is still in flight");
        assert_eq!(commands.in_flight(), 1);
        commands.complete(first, Ok(Response::Stored));
        assert_eq!((commands.next_token(), commands.in_flight()), (first, 0));
        let second = insert(&mut commands, 10);
        commands.complete(second, Ok(Response::Deleted));
        assert_eq!(commands.in_flight(), 0, "a completed command is not in flight");
        assert_ne!(commands.next_token(), second, "its future has not taken the response");
        assert!(matches!(commands.poll(second, Waker::noop()), Poll::Ready(Ok(Response::Deleted))));
        let third = insert(&mut commands, 10);
        assert_eq!(third, second);
        commands.complete(third, Ok(Response::Stored));
        commands.abandon(third);
        assert_eq!(commands.next_token(), third);
    }

    #[test]
    #[should_panic(expected = "completed twice")]
    fn a_second_completion_of_a_command_panics() {
        let mut commands = commands(4, 100);
        let token = insert(&mut commands, 10);
        commands.complete(token, Ok(Response::Stored));
        commands.complete(token, Ok(Response::Stored));
    }

    #[test]
    fn commands_and_bytes_are_bounded_and_a_large_command_runs_alone() {
        let mut commands = commands(3, 100);
        let large = insert(&mut commands, 1_000);
        assert!(!commands.has_room(0));
        commands.complete(large, Ok(Response::Stored));
        let tokens = [60, 30].map(|bytes| insert(&mut commands, bytes));
        assert!(commands.has_room(10) && !commands.has_room(11));
        insert(&mut commands, 10);
        assert!(!commands.has_room(0), "three commands");
        commands.abandon(tokens[0]);
        assert!(!commands.has_room(0), "an abandoned command is in flight");
        commands.complete(tokens[0], Err(Error::Busy));
        assert!(commands.has_room(60) && !commands.has_room(61));
    }
}
