//! Waiting for many descriptors at once (epoll).
//!
//! Streams are watched by edges, for both directions, once and for all: no further system call while
//! they live, and one that is not being read (back-pressure) does not keep its core awake. Whoever
//! reads must therefore remember what is readable until "nothing" comes back. Other descriptors
//! (a doorbell, an io_uring) are watched by level.

use octokv_base::Nanos;
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};

/// What happened to a watched descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PollEvent {
    /// The token it was watched under.
    pub token: u64,
    /// Bytes, a stream, an end or an error can be had.
    pub readable: bool,
    /// A stream that was full (or not yet connected) takes bytes, or has failed.
    pub writable: bool,
}

/// How a descriptor is watched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Interest {
    /// Told once per change, both directions.
    EdgeReadWrite,
    /// Told as long as it is readable.
    LevelRead,
    /// Told once per signal; it need never be drained. For an [`crate::event::EventFd`].
    EdgeRead,
}

const EVENTS_PER_WAIT: usize = 256;

/// A set of watched descriptors.
pub struct Poller {
    epoll: OwnedFd,
    events: Box<[libc::epoll_event]>,
}

impl Poller {
    /// Watches nothing yet.
    pub fn new() -> io::Result<Poller> {
        // SAFETY: a system call with plain arguments.
        let fd = unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: `fd` was just made, is open, and nobody else owns it.
        let epoll = unsafe { OwnedFd::from_raw_fd(fd) };
        Ok(Poller { epoll, events: vec![libc::epoll_event { events: 0, u64: 0 }; EVENTS_PER_WAIT].into() })
    }

    /// Watches a descriptor. Closing it ends that.
    pub fn add(&self, descriptor: impl AsFd, token: u64, interest: Interest) -> io::Result<()> {
        self.add_raw(descriptor.as_fd().as_raw_fd(), token, interest)
    }

    /// Watches a descriptor that somebody else keeps. A number that is not open is an error.
    pub fn add_raw(&self, descriptor: RawFd, token: u64, interest: Interest) -> io::Result<()> {
        let flags = match interest {
            Interest::EdgeReadWrite => libc::EPOLLIN | libc::EPOLLOUT | libc::EPOLLRDHUP | libc::EPOLLET,
            Interest::LevelRead => libc::EPOLLIN,
            Interest::EdgeRead => libc::EPOLLIN | libc::EPOLLET,
        };
        let mut event = libc::epoll_event { events: flags as u32, u64: token };
        self.epoll_ctl(libc::EPOLL_CTL_ADD, descriptor, &mut event)
    }

    /// Stops watching a descriptor that stays open.
    pub fn remove(&self, descriptor: impl AsFd) -> io::Result<()> {
        let mut unused = libc::epoll_event { events: 0, u64: 0 };
        self.epoll_ctl(libc::EPOLL_CTL_DEL, descriptor.as_fd().as_raw_fd(), &mut unused)
    }

    fn epoll_ctl(&self, operation: i32, descriptor: RawFd, event: &mut libc::epoll_event) -> io::Result<()> {
        // SAFETY: `event` is a live epoll_event; the kernel checks both descriptors.
        let done = unsafe { libc::epoll_ctl(self.epoll.as_raw_fd(), operation, descriptor, event) };
        if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    /// Waits until something happens, at most `span` ([`Nanos::NEVER`]: for ever, zero: not at all),
    /// and gives what did to `each`. A signal may end the wait early.
    pub fn wait(&mut self, timeout: Nanos, mut on_event: impl FnMut(PollEvent)) {
        let count = if timeout == Nanos::ZERO { self.poll_now() } else { self.wait_timeout(timeout) };
        for event in self.events.iter().take(count) {
            let bits = event.events as i32;
            let failed = bits & (libc::EPOLLERR | libc::EPOLLHUP) != 0;
            let readable = failed || bits & (libc::EPOLLIN | libc::EPOLLRDHUP) != 0;
            let writable = failed || bits & libc::EPOLLOUT != 0;
            on_event(PollEvent { token: event.u64, readable, writable });
        }
    }

    fn poll_now(&mut self) -> usize {
        let epoll = self.epoll.as_raw_fd();
        // SAFETY: `events` has room for EVENTS_PER_WAIT events and lives through the call.
        let got = unsafe { libc::epoll_wait(epoll, self.events.as_mut_ptr(), EVENTS_PER_WAIT as i32, 0) };
        got.max(0) as usize
    }

    fn wait_timeout(&mut self, timeout: Nanos) -> usize {
        let time = libc::timespec {
            tv_sec: (timeout.0 / 1_000_000_000) as libc::time_t,
            tv_nsec: (timeout.0 % 1_000_000_000) as libc::c_long,
        };
        let timespec_ptr = if timeout == Nanos::NEVER { std::ptr::null() } else { &raw const time };
        let events = self.events.as_mut_ptr();
        let (epoll, capacity) = (self.epoll.as_raw_fd(), EVENTS_PER_WAIT as i32);
        let no_mask = std::ptr::null::<libc::sigset_t>();
        // SAFETY: `events` has room for `room` events, `until` is null or a live timespec, and a null
        // mask leaves signals as they are; all live through the call.
        let got = unsafe {
            libc::syscall(libc::SYS_epoll_pwait2, epoll, events, capacity, timespec_ptr, no_mask, 0)
        };
        got.max(0) as usize
    }
}
