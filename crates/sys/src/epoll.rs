//! Readiness of many descriptors (epoll).
//!
//! A stream is watched edge-triggered in both directions, once for its lifetime: no further system call, and a stream
//! that is not read (back-pressure) does not keep its core awake. The reader must therefore treat a stream as readable
//! until a receive would block. Other descriptors are watched level-triggered or, if they are not drained,
//! edge-triggered. Tested in `octokv-runtime`'s `tests/kernel_sockets.rs`.

use octokv_base::Nanos;
use rustix::event::Timespec;
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};

/// A readiness event of a watched descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PollEvent {
    /// The token that the descriptor was added with.
    pub token: u64,
    /// A read would return bytes, a connection, the end of the stream, or an error.
    pub readable: bool,
    /// A write would be accepted or return an error, after it would have blocked before.
    pub writable: bool,
}

/// The readiness that a descriptor is watched for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Interest {
    /// One event per change of readability or writability.
    EdgeReadWrite,
    /// An event as long as the descriptor is readable.
    LevelRead,
    /// One event per signal; the descriptor is never drained. For an [`crate::eventfd::EventFd`].
    EdgeRead,
}

/// Events returned by one wait; later ones are returned by the next.
const EVENTS_PER_WAIT: usize = 256;

/// An epoll instance.
pub struct Poller {
    epoll: OwnedFd,
}

impl Poller {
    /// A poller without descriptors.
    ///
    /// # Errors
    /// Fails if the process is out of descriptors.
    pub fn new() -> io::Result<Poller> {
        Ok(Poller { epoll: epoll::create(CreateFlags::CLOEXEC)? })
    }

    /// Watches a descriptor under a token. Closing the descriptor removes it.
    ///
    /// # Errors
    /// Fails if the descriptor is watched already (EEXIST), the kernel is out of memory, or the user's limit of epoll
    /// watches is reached.
    pub fn add(&self, descriptor: impl AsFd, token: u64, interest: Interest) -> io::Result<()> {
        let flags = match interest {
            Interest::EdgeReadWrite => EventFlags::IN | EventFlags::OUT | EventFlags::RDHUP | EventFlags::ET,
            Interest::LevelRead => EventFlags::IN,
            Interest::EdgeRead => EventFlags::IN | EventFlags::ET,
        };
        Ok(epoll::add(&self.epoll, descriptor, EventData::new_u64(token), flags)?)
    }

    /// Stops watching a descriptor that stays open.
    ///
    /// # Errors
    /// Fails with ENOENT if the descriptor is not watched.
    pub fn remove(&self, descriptor: impl AsFd) -> io::Result<()> {
        Ok(epoll::delete(&self.epoll, descriptor)?)
    }

    /// Waits for events, at most `timeout` ([`Nanos::NEVER`]: no limit, zero: no wait), and calls `on_event` for each. A
    /// signal may end the wait early.
    pub fn wait(&mut self, timeout: Nanos, mut on_event: impl FnMut(PollEvent)) {
        let limit = Timespec {
            tv_sec: (timeout.0 / 1_000_000_000) as i64,
            tv_nsec: (timeout.0 % 1_000_000_000) as i64,
        };
        let limit = (timeout != Nanos::NEVER).then_some(&limit);
        // Uninitialized: the kernel initializes the events that it returns.
        let mut buffer = [const { MaybeUninit::<Event>::uninit() }; EVENTS_PER_WAIT];
        // Fails only if interrupted by a signal: no event.
        let Ok((events, _)) = epoll::wait(&self.epoll, &mut buffer, limit) else { return };
        for &mut Event { flags, data, .. } in events {
            let failed = flags.intersects(EventFlags::ERR | EventFlags::HUP);
            let readable = failed || flags.intersects(EventFlags::IN | EventFlags::RDHUP);
            let writable = failed || flags.contains(EventFlags::OUT);
            on_event(PollEvent { token: data.u64(), readable, writable });
        }
    }
}
