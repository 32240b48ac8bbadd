//! Writers that remember what was acknowledged, to be held against the node after a crash.
//!
//! ```text
//!            submit            answered                          node gone
//!  settled ──────────▶ open ───────────▶ settled (new state)      open ─────▶ in doubt
//!     ▲                                                                          │
//!     └──────────────────── verify: the old state, or one of those in doubt ─────┘
//! ```
//! A key is absent or has a version; every version's value differs in length and in every byte. Each key
//! has at most one write on its way, so what may be read after a crash is known exactly.

use crate::Clock;
use crate::values::{self, Values};
use octokv_base::{Key, Nanos, Random};
use octokv_client::{Answer, Command, Error, Rejected, Session, StoreMode, Value};
use octokv_runtime::RealSockets;
use std::fmt;

/// The longest value that is written, in bytes.
pub const VALUE_BYTES_MAX: usize = 12_000;
const KEY_BYTES: usize = 16;
/// How long one wait for news lasts at most.
const PATIENCE: Nanos = Nanos::from_millis(1);

/// The version of a key; 0 when it is absent.
type Version = u64;
const ABSENT: Version = 0;

#[derive(Clone, Copy, Debug, Default)]
struct Entry {
    /// What was acknowledged last.
    settled: Version,
    /// What is on its way, or was when the node was lost.
    open: Option<Version>,
}

/// What was written and acknowledged.
pub struct Ledger {
    entries: Vec<Entry>,
    values: Values,
    random: Random,
    next: Version,
    acknowledged: u64,
}

/// What a caller of [`Ledger::write`] wants next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flow {
    /// More writes.
    GoOn,
    /// No more; those on their way are waited for.
    Enough,
}

/// A promise that the node broke.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Broken {
    /// Whose value.
    pub key: Key,
    /// The version that was acknowledged; 0 for a deletion, or never written.
    pub acknowledged: u64,
    /// The version that was on its way at the crash.
    pub in_doubt: Option<u64>,
    /// The length of what was read, or `None` when the key was not there.
    pub read_bytes: Option<usize>,
}

impl fmt::Display for Broken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let named = |version: Version| match version {
            ABSENT => "absent".to_owned(),
            version => format!("version {version} ({} B)", value_bytes(version)),
        };
        write!(f, "key {}: acknowledged was {}", self.key, named(self.acknowledged))?;
        if let Some(version) = self.in_doubt {
            write!(f, ", on its way was {}", named(version))?;
        }
        match self.read_bytes {
            None => f.write_str("; now it does not exist"),
            Some(bytes) => write!(f, "; now it has another value, of {bytes} B"),
        }
    }
}

/// Why a verification did not come to its end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Failure {
    /// The node has something else than it may have.
    Broken(Broken),
    /// A command failed.
    Command(Key, Error),
    /// The connection was lost.
    Lost(Error),
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Failure::Broken(broken) => broken.fmt(f),
            Failure::Command(key, error) => write!(f, "key {key}: {error}"),
            Failure::Lost(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for Failure {}

fn value_bytes(version: Version) -> usize {
    1 + (octokv_base::prng::mix(version) % VALUE_BYTES_MAX as u64) as usize
}

impl Ledger {
    /// A ledger of so many keys, all absent.
    pub fn new(keys: usize, seed: u64) -> Ledger {
        Ledger {
            entries: vec![Entry::default(); keys],
            values: Values::new(seed, VALUE_BYTES_MAX),
            random: Random::new(seed),
            next: 1,
            acknowledged: 0,
        }
    }

    /// Writes acknowledged so far.
    pub fn acknowledged(&self) -> u64 {
        self.acknowledged
    }

    /// Keys that exist, by what was acknowledged.
    pub fn keys(&self) -> usize {
        self.entries.iter().filter(|entry| entry.settled != ABSENT).count()
    }

    /// Writes whose outcome is not known.
    pub fn in_doubt(&self) -> usize {
        self.entries.iter().filter(|entry| entry.open.is_some()).count()
    }

    /// Writes with `depth` commands in flight until `during`, which is called every turn with the count
    /// of acknowledged writes, has enough, or until the node is lost.
    ///
    /// # Errors
    /// When a write is refused; those on their way are waited for first, since one that is left behind may land after
    /// a later look. A lost node is no error: what was on its way is in doubt.
    pub fn write(
        &mut self,
        session: &mut Session<RealSockets>,
        now: Clock,
        depth: usize,
        mut during: impl FnMut(u64) -> Flow,
    ) -> Result<(), Failure> {
        let mut value = vec![0; VALUE_BYTES_MAX];
        let (mut open, mut enough, mut refused) = (0, false, None);
        loop {
            enough |= refused.is_some();
            enough |= during(self.acknowledged) == Flow::Enough;
            while !enough && open < depth.min(self.entries.len() / 2) {
                match self.submit(session, &mut value)? {
                    true => open += 1,
                    false => break,
                }
            }
            let busy = session.poll(now(), |token, answer| {
                open -= 1;
                if let Err(error) = self.answered(token as usize, answer) {
                    refused.get_or_insert(error);
                }
            });
            if session.ended().is_some() || (enough && open == 0) {
                return refused.map_or(Ok(()), Err);
            }
            if !busy {
                session.sockets_mut().wait(PATIENCE);
            }
        }
    }

    /// Puts one write on its way, on a key that has none. False when the session takes none now.
    fn submit(&mut self, session: &mut Session<RealSockets>, value: &mut [u8]) -> Result<bool, Failure> {
        let index = loop {
            let index = self.random.below(self.entries.len() as u64) as usize;
            if self.entries[index].open.is_none() {
                break index;
            }
        };
        let key = values::key(index as u64, KEY_BYTES);
        let (version, command) = if self.random.one_in(8) {
            (ABSENT, Command::Delete { key: key.clone() })
        } else {
            let bytes = value_bytes(self.next);
            self.values.make(self.next, &mut value[..bytes]);
            let value = Value::Slice(&value[..bytes]);
            (self.next, Command::Store { key: key.clone(), value, mode: StoreMode::Upsert })
        };
        match session.submit(command, index as u64) {
            Ok(()) => {
                self.entries[index].open = Some(version);
                self.next += 1;
                Ok(true)
            }
            Err(Rejected::Invalid(error)) => Err(Failure::Command(key, error)),
            Err(Rejected::Full | Rejected::NotConnected | Rejected::Over) => Ok(false),
        }
    }

    fn answered(&mut self, index: usize, answer: Result<Answer, Error>) -> Result<(), Failure> {
        let entry = &mut self.entries[index];
        match answer {
            Ok(Answer::Stored | Answer::Deleted | Answer::NotFound) => {
                entry.settled = entry.open.take().expect("an answer belongs to a write");
                self.acknowledged += 1;
                Ok(())
            }
            // Sent in part or not at all counts as in doubt too: it cannot be told from here.
            Err(Error::OutcomeUnknown | Error::Disconnected(_)) => Ok(()),
            Ok(other) => unreachable!("a write was answered with {other:?}"),
            Err(error) => {
                if matches!(error, Error::CapacityExceeded | Error::Busy) {
                    // The node says that it was not done.
                    entry.open = None;
                }
                Err(Failure::Command(values::key(index as u64, KEY_BYTES), error))
            }
        }
    }

    /// Reads every key: each has what was acknowledged last, or what was on its way. What is found
    /// settles what was in doubt. Gives how many keys exist.
    ///
    /// # Errors
    /// The first broken promise, or what kept it from being looked for.
    pub fn verify(
        &mut self,
        session: &mut Session<RealSockets>,
        now: Clock,
        depth: usize,
    ) -> Result<usize, Failure> {
        let (mut next, mut open, mut failure) = (0, 0, None);
        while next < self.entries.len() || open > 0 {
            while next < self.entries.len() && open < depth {
                let key = values::key(next as u64, KEY_BYTES);
                let command = Command::Retrieve { key: key.clone(), limit_bytes: u32::MAX };
                match session.submit(command, next as u64) {
                    Ok(()) => (next, open) = (next + 1, open + 1),
                    Err(Rejected::Invalid(error)) => return Err(Failure::Command(key, error)),
                    Err(Rejected::Full | Rejected::NotConnected) => break,
                    Err(Rejected::Over) => {
                        return Err(Failure::Lost(session.ended().unwrap_or(Error::Closed)));
                    }
                }
            }
            let busy = session.poll(now(), |token, answer| {
                open -= 1;
                if let Err(error) = self.found(token as usize, answer) {
                    failure = Some(error);
                }
            });
            if let Some(failure) = failure {
                return Err(failure);
            }
            if !busy {
                session.sockets_mut().wait(PATIENCE);
            }
        }
        Ok(self.keys())
    }

    fn found(&mut self, index: usize, answer: Result<Answer, Error>) -> Result<(), Failure> {
        let key = values::key(index as u64, KEY_BYTES);
        let entry = &mut self.entries[index];
        let bytes = match answer {
            Ok(Answer::Value { data, .. }) => Some(data),
            Ok(Answer::NotFound) => None,
            Ok(other) => unreachable!("a read was answered with {other:?}"),
            Err(error) => return Err(Failure::Command(key, error)),
        };
        let values = &self.values;
        let is = |version: Version| match &bytes {
            None => version == ABSENT,
            Some(bytes) => {
                version != ABSENT && bytes.len() == value_bytes(version) && values.is_right(version, bytes)
            }
        };
        let allowed = [Some(entry.settled), entry.open];
        match allowed.into_iter().flatten().find(|&version| is(version)) {
            Some(version) => {
                *entry = Entry { settled: version, open: None };
                Ok(())
            }
            None => Err(Failure::Broken(Broken {
                key,
                acknowledged: entry.settled,
                in_doubt: entry.open,
                read_bytes: bytes.map(|bytes| bytes.len()),
            })),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_broken_promise_is_told_in_full() {
        let broken = Broken {
            key: values::key(7, KEY_BYTES),
            acknowledged: 3,
            in_doubt: Some(ABSENT),
            read_bytes: Some(12),
        };
        let text = broken.to_string();
        for part in ["0000000000000007", "version 3", "on its way was absent", "of 12 B"] {
            assert!(text.contains(part), "{text}");
        }
    }

    #[test]
    fn what_was_on_its_way_is_allowed_and_nothing_else() {
        let mut ledger = Ledger::new(4, 1);
        let absent = || Ok(Answer::NotFound);
        ledger.entries[0] = Entry { settled: 5, open: Some(ABSENT) };
        assert_eq!(ledger.found(0, absent()), Ok(()));
        assert_eq!(ledger.in_doubt(), 0);
        ledger.entries[1] = Entry { settled: 5, open: Some(6) };
        assert!(matches!(ledger.found(1, absent()), Err(Failure::Broken(b)) if b.read_bytes.is_none()));
        ledger.entries[2] = Entry { settled: ABSENT, open: Some(6) };
        assert_eq!(ledger.found(2, absent()), Ok(()));
    }
}
