//! The acknowledgement log: writes with known acknowledgements, verified against the node after a crash.
//!
//! ```text
//!            submit              acknowledged                         node lost
//!  known ──────────▶ in flight ──────────────▶ known (new state)   in flight ─────▶ in doubt
//!    ▲                                                                                 │
//!    └──────────────────── verify: the old state, or the one in doubt ─────────────────┘
//! ```
//! A key is absent or has a version; every version's value differs in length and in every byte. Each key
//! has at most one write in flight, so the values that may be read after a crash are known exactly.

use crate::platform::Clock;
use crate::values::{self, ValueGenerator};
use octokv_base::{Key, Nanos, Prng};
use octokv_client::{Command, Error, Response, Session, StoreMode, SubmitError, Value};
use octokv_runtime::KernelSockets;
use std::fmt;

/// The longest value that is written, in bytes.
pub const VALUE_BYTES_MAX: usize = 12_000;
const KEY_BYTES: usize = 16;
/// Longest wait for an event of the session.
const WAIT_MAX: Nanos = Nanos::from_millis(1);

/// The version of a key; 0 if it is absent.
type Version = u64;
const ABSENT: Version = 0;

#[derive(Clone, Copy, Debug, Default)]
struct KeyState {
    /// The last acknowledged version.
    acknowledged: Version,
    /// The version in flight, or in doubt after the node was lost.
    in_flight: Option<Version>,
}

/// The acknowledgement log of a set of keys.
pub struct AckLog {
    keys: Vec<KeyState>,
    values: ValueGenerator,
    random: Prng,
    next_version: Version,
    acknowledged_writes: u64,
}

/// The decision of a caller of [`AckLog::write`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WriteControl {
    /// Submit more writes.
    Continue,
    /// Submit no more; wait for the writes in flight.
    Stop,
}

/// An acknowledged write that the node lost, or a value that was never written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LostWrite {
    /// The key.
    pub key: Key,
    /// The acknowledged version; 0 for a deletion, or if the key was never written.
    pub acknowledged: u64,
    /// The version in flight at the crash.
    pub in_doubt: Option<u64>,
    /// Length of the value read, in bytes; `None` if the key does not exist.
    pub read_bytes: Option<usize>,
}

impl fmt::Display for LostWrite {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let named = |version: Version| match version {
            ABSENT => "absent".to_owned(),
            version => format!("version {version} ({} B)", value_bytes(version)),
        };
        write!(f, "key {}: {} was acknowledged", self.key, named(self.acknowledged))?;
        if let Some(version) = self.in_doubt {
            write!(f, ", {} was in flight", named(version))?;
        }
        match self.read_bytes {
            None => f.write_str("; the key does not exist"),
            Some(bytes) => write!(f, "; the key has another value, of {bytes} B"),
        }
    }
}

/// Why writing or verifying failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AckLogError {
    /// The node returned a value that the log excludes.
    #[error("{0}")]
    LostWrite(LostWrite),
    /// A command failed.
    #[error("key {0}: {1}")]
    Command(Key, Error),
    /// The connection was lost.
    #[error(transparent)]
    ConnectionLost(Error),
}

fn value_bytes(version: Version) -> usize {
    1 + (octokv_base::prng::mix64(version) % VALUE_BYTES_MAX as u64) as usize
}

impl AckLog {
    /// Creates a log of `keys` keys, all absent.
    pub fn new(keys: usize, seed: u64) -> AckLog {
        AckLog {
            keys: vec![KeyState::default(); keys],
            values: ValueGenerator::new(seed, VALUE_BYTES_MAX),
            random: Prng::new(seed),
            next_version: 1,
            acknowledged_writes: 0,
        }
    }

    /// Number of acknowledged writes.
    pub fn acknowledged_count(&self) -> u64 {
        self.acknowledged_writes
    }

    /// Number of keys that exist by the acknowledged writes.
    pub fn key_count(&self) -> usize {
        self.keys.iter().filter(|state| state.acknowledged != ABSENT).count()
    }

    /// Number of writes in flight or in doubt.
    pub fn in_doubt_count(&self) -> usize {
        self.keys.iter().filter(|state| state.in_flight.is_some()).count()
    }

    /// Writes with `depth` commands in flight until `control`, which is called in every iteration with the number of
    /// acknowledged writes, returns [`WriteControl::Stop`], or until the node is lost.
    ///
    /// # Errors
    /// If a write fails, after the other writes in flight have completed: one that is left in flight could complete after a
    /// later verification. A lost node is not an error; its writes in flight are in doubt.
    pub fn write(
        &mut self,
        session: &mut Session<KernelSockets>,
        now: Clock,
        depth: usize,
        mut control: impl FnMut(u64) -> WriteControl,
    ) -> Result<(), AckLogError> {
        let mut value = vec![0; VALUE_BYTES_MAX];
        let (mut open, mut enough, mut refused) = (0, false, None);
        loop {
            enough |= refused.is_some();
            enough |= control(self.acknowledged_writes) == WriteControl::Stop;
            while !enough && open < depth.min(self.keys.len() / 2) {
                match self.submit(session, &mut value)? {
                    true => open += 1,
                    false => break,
                }
            }
            let busy = session.poll(now(), |token, response| {
                open -= 1;
                if let Err(error) = self.record_response(token as usize, response) {
                    refused.get_or_insert(error);
                }
            });
            if session.ended().is_some() || (enough && open == 0) {
                return refused.map_or(Ok(()), Err);
            }
            if !busy {
                session.sockets_mut().wait(WAIT_MAX);
            }
        }
    }

    /// Submits one write, on a key without a write in flight. Returns false if the session has no free slot.
    fn submit(
        &mut self,
        session: &mut Session<KernelSockets>,
        value: &mut [u8],
    ) -> Result<bool, AckLogError> {
        let index = loop {
            let index = self.random.below(self.keys.len() as u64) as usize;
            if self.keys[index].in_flight.is_none() {
                break index;
            }
        };
        let key = values::key(index as u64, KEY_BYTES);
        let (version, command) = if self.random.one_in(8) {
            (ABSENT, Command::Delete { key: key.clone() })
        } else {
            let bytes = value_bytes(self.next_version);
            self.values.fill(self.next_version, &mut value[..bytes]);
            let value = Value::Slice(&value[..bytes]);
            (self.next_version, Command::Store { key: key.clone(), value, mode: StoreMode::Upsert })
        };
        match session.submit(command, index as u64) {
            Ok(()) => {
                self.keys[index].in_flight = Some(version);
                self.next_version += 1;
                Ok(true)
            }
            Err(SubmitError::Invalid(error)) => Err(AckLogError::Command(key, error)),
            Err(SubmitError::QueueFull | SubmitError::NotConnected | SubmitError::Ended) => Ok(false),
        }
    }

    fn record_response(
        &mut self,
        index: usize,
        response: Result<Response, Error>,
    ) -> Result<(), AckLogError> {
        let state = &mut self.keys[index];
        match response {
            Ok(Response::Stored | Response::Deleted | Response::NotFound) => {
                state.acknowledged = state.in_flight.take().expect("a response belongs to a write in flight");
                self.acknowledged_writes += 1;
                Ok(())
            }
            // A command that was not sent is in doubt too: the client cannot distinguish the cases.
            Err(Error::OutcomeUnknown | Error::Disconnected(_)) => Ok(()),
            Ok(other) => unreachable!("a write returned {other:?}"),
            Err(error) => {
                if matches!(error, Error::CapacityExceeded | Error::Busy) {
                    // The node did not execute the write.
                    state.in_flight = None;
                }
                Err(AckLogError::Command(values::key(index as u64, KEY_BYTES), error))
            }
        }
    }

    /// Reads every key and checks that it has the last acknowledged version or the one in doubt, which resolves the doubt.
    /// Returns the number of existing keys.
    ///
    /// # Errors
    /// The first lost write, or the failure of a command or of the connection.
    pub fn verify(
        &mut self,
        session: &mut Session<KernelSockets>,
        now: Clock,
        depth: usize,
    ) -> Result<usize, AckLogError> {
        let (mut next, mut open, mut failure) = (0, 0, None);
        while next < self.keys.len() || open > 0 {
            while next < self.keys.len() && open < depth {
                let key = values::key(next as u64, KEY_BYTES);
                let command = Command::Retrieve { key: key.clone(), limit_bytes: u32::MAX };
                match session.submit(command, next as u64) {
                    Ok(()) => (next, open) = (next + 1, open + 1),
                    Err(SubmitError::Invalid(error)) => return Err(AckLogError::Command(key, error)),
                    Err(SubmitError::QueueFull | SubmitError::NotConnected) => break,
                    Err(SubmitError::Ended) => {
                        return Err(AckLogError::ConnectionLost(session.ended().unwrap_or(Error::Closed)));
                    }
                }
            }
            let busy = session.poll(now(), |token, response| {
                open -= 1;
                if let Err(error) = self.check_value(token as usize, response) {
                    failure = Some(error);
                }
            });
            if let Some(failure) = failure {
                return Err(failure);
            }
            if !busy {
                session.sockets_mut().wait(WAIT_MAX);
            }
        }
        Ok(self.key_count())
    }

    fn check_value(&mut self, index: usize, response: Result<Response, Error>) -> Result<(), AckLogError> {
        let key = values::key(index as u64, KEY_BYTES);
        let state = &mut self.keys[index];
        let bytes = match response {
            Ok(Response::Value { data, .. }) => Some(data),
            Ok(Response::NotFound) => None,
            Ok(other) => unreachable!("a read returned {other:?}"),
            Err(error) => return Err(AckLogError::Command(key, error)),
        };
        let values = &self.values;
        let matches = |version: Version| match &bytes {
            None => version == ABSENT,
            Some(bytes) => {
                version != ABSENT && bytes.len() == value_bytes(version) && values.matches(version, bytes)
            }
        };
        let allowed = [Some(state.acknowledged), state.in_flight];
        match allowed.into_iter().flatten().find(|&version| matches(version)) {
            Some(version) => {
                *state = KeyState { acknowledged: version, in_flight: None };
                Ok(())
            }
            None => Err(AckLogError::LostWrite(LostWrite {
                key,
                acknowledged: state.acknowledged,
                in_doubt: state.in_flight,
                read_bytes: bytes.map(|bytes| bytes.len()),
            })),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lost_write_is_reported_in_full() {
        let lost = LostWrite {
            key: values::key(7, KEY_BYTES),
            acknowledged: 3,
            in_doubt: Some(ABSENT),
            read_bytes: Some(12),
        };
        let text = lost.to_string();
        for part in ["0000000000000007", "version 3", "absent was in flight", "of 12 B"] {
            assert!(text.contains(part), "{text}");
        }
    }

    #[test]
    fn an_in_doubt_write_may_be_read_and_nothing_else() {
        let mut log = AckLog::new(4, 1);
        let absent = || Ok(Response::NotFound);
        log.keys[0] = KeyState { acknowledged: 5, in_flight: Some(ABSENT) };
        assert_eq!(log.check_value(0, absent()), Ok(()));
        assert_eq!(log.in_doubt_count(), 0);
        log.keys[1] = KeyState { acknowledged: 5, in_flight: Some(6) };
        assert!(
            matches!(log.check_value(1, absent()), Err(AckLogError::LostWrite(b)) if b.read_bytes.is_none())
        );
        log.keys[2] = KeyState { acknowledged: ABSENT, in_flight: Some(6) };
        assert_eq!(log.check_value(2, absent()), Ok(()));
    }
}
