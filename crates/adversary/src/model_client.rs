//! A client with a model of every key: keys of 1 to 1024 bytes, values of 0 to the maximum length, across lost
//! connections, full devices and node kills.
//!
//! ```text
//!             acknowledged                    connection lost before the response
//!   one state ────────────▶ one state         one state ──────────────────────▶ two states: a read may find either
//! ```
//! In: a client, whose connection may fail at any time. Out: the first value that was never stored or is missing.
//! Invariant: a rejected operation has no effect.

use anyhow::{Result, bail, ensure};
use octokv_base::{Prng, prng::mix64};
use octokv_bench::values::ValueGenerator;
use octokv_client::Error;
use octokv_client::blocking::BlockingClient;

/// Key lengths, by key index modulo 7.
const KEY_BYTES: [usize; 7] = [2, 3, 16, 17, 100, 500, 1024];
/// Keys of one client.
const KEYS: usize = 200;

/// Version of the value that a key holds; `None` for no value.
type KeyVersion = Option<u64>;

/// Model of the keys of one client.
pub struct ModelClient {
    name: u8,
    value_bytes_max: usize,
    values: ValueGenerator,
    random: Prng,
    /// Versions that each key may hold: one, or more after writes of unknown outcome.
    possible_versions: Vec<Vec<KeyVersion>>,
    next_version: u64,
    /// Operations acknowledged, rejected with capacity exceeded, and rejected as busy.
    pub outcome_counts: [u64; 3],
}

/// State of the connection after an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConnState {
    /// Connected.
    Up,
    /// Lost; operations in flight have an unknown outcome.
    Lost,
}

impl ModelClient {
    /// A model without values. Clients of one namespace need different names, which prefix their keys.
    pub fn new(name: u8, value_bytes_max: usize) -> ModelClient {
        let seed = u64::from(name) + 1000;
        ModelClient {
            name,
            value_bytes_max,
            values: ValueGenerator::new(seed, value_bytes_max),
            random: Prng::new(seed),
            possible_versions: vec![vec![None]; KEYS],
            next_version: 1,
            outcome_counts: [0; 3],
        }
    }

    fn key(&self, index: usize) -> Vec<u8> {
        if index == 0 {
            return vec![self.name];
        }
        let mut key = vec![index as u8; KEY_BYTES[index % KEY_BYTES.len()]];
        key[0] = self.name;
        key
    }

    fn value(&self, version: u64) -> Vec<u8> {
        let draw = mix64(version) as usize;
        let most = match draw % 16 {
            0 => 0,
            1..=9 => 4096,
            10..=14 => 64 << 10,
            _ => self.value_bytes_max,
        };
        let bytes = if draw.is_multiple_of(64) { most } else { (draw >> 8) % (most + 1) };
        let mut value = vec![0; bytes.min(self.value_bytes_max)];
        self.values.fill(version, &mut value);
        value
    }

    /// Executes one random operation on a random key.
    ///
    /// # Errors
    /// If a result contradicts the model, or for an unexpected error.
    pub fn step(&mut self, client: &BlockingClient) -> Result<ConnState> {
        let index = self.random.below(KEYS as u64) as usize;
        match self.random.below(10) {
            0..=4 => self.put(client, index),
            5..=7 => self.read_and_check(client, index),
            8 => self.delete(client, index),
            _ => self.check_existence(client, index),
        }
    }

    fn put(&mut self, client: &BlockingClient, index: usize) -> Result<ConnState> {
        let version = self.next_version;
        self.next_version += 1;
        let outcome = client.put(&self.key(index), &self.value(version));
        self.apply_write_result(index, Some(version), outcome)
    }

    fn delete(&mut self, client: &BlockingClient, index: usize) -> Result<ConnState> {
        let outcome = client.delete(&self.key(index)).map(drop);
        self.apply_write_result(index, None, outcome)
    }

    fn apply_write_result(
        &mut self,
        index: usize,
        to: KeyVersion,
        outcome: Result<(), Error>,
    ) -> Result<ConnState> {
        match outcome {
            Ok(()) => {
                self.outcome_counts[0] += 1;
                self.possible_versions[index] = vec![to];
                Ok(ConnState::Up)
            }
            Err(error) => {
                let state = self.classify_error(&error)?;
                if state == ConnState::Lost && !self.possible_versions[index].contains(&to) {
                    self.possible_versions[index].push(to);
                }
                Ok(state)
            }
        }
    }

    /// Reads a key and compares it with the model; a match resolves an unknown outcome.
    fn read_and_check(&mut self, client: &BlockingClient, index: usize) -> Result<ConnState> {
        match client.get(&self.key(index)) {
            Ok(found) => {
                self.outcome_counts[0] += 1;
                let matches = |version: &KeyVersion| match (version, &found) {
                    (None, None) => true,
                    (Some(version), Some(found)) => self.value(*version) == *found,
                    _ => false,
                };
                let Some(&version) = self.possible_versions[index].iter().find(|version| matches(version))
                else {
                    bail!(
                        "key {} of {} B may be at {:?}; read: {:?} B",
                        index,
                        self.key(index).len(),
                        self.possible_versions[index],
                        found.map(|value| value.len())
                    );
                };
                self.possible_versions[index] = vec![version];
                Ok(ConnState::Up)
            }
            Err(error) => self.classify_error(&error),
        }
    }

    /// Checks existence, length and listing of a key against the model.
    fn check_existence(&mut self, client: &BlockingClient, index: usize) -> Result<ConnState> {
        let key = self.key(index);
        let found = match client.exist(&key) {
            Ok(found) => found,
            Err(error) => return self.classify_error(&error),
        };
        let may_be = |version: &KeyVersion| version.map(|version| self.value(version).len() as u32) == found;
        let fits = self.possible_versions[index].iter().any(may_be);
        ensure!(fits, "key {index} may be at {:?}; its length is {found:?}", self.possible_versions[index]);
        match client.list(&key, 50) {
            // A list begins with its start key, if that exists.
            Ok(list) if self.possible_versions[index].len() == 1 => {
                self.outcome_counts[0] += 1;
                let listed = list.first() == Some(&key);
                ensure!(listed == found.is_some(), "key {index} is listed: {listed}, exists: {found:?}");
                Ok(ConnState::Up)
            }
            Ok(_) => Ok(ConnState::Up),
            Err(error) => self.classify_error(&error),
        }
    }

    fn classify_error(&mut self, error: &Error) -> Result<ConnState> {
        match error {
            Error::CapacityExceeded => self.outcome_counts[1] += 1,
            Error::Busy => self.outcome_counts[2] += 1,
            Error::OutcomeUnknown
            | Error::Disconnected(_)
            | Error::Connect(..)
            | Error::TimedOut
            | Error::Closed => return Ok(ConnState::Lost),
            other => bail!("{other}"),
        }
        Ok(ConnState::Up)
    }

    /// Reads every key. Returns the number of keys with a value, or `None` if the connection was lost.
    ///
    /// # Errors
    /// The first contradiction with the model.
    pub fn verify_all(&mut self, client: &BlockingClient) -> Result<Option<usize>> {
        for index in 0..KEYS {
            let busy = self.outcome_counts[2];
            loop {
                if self.read_and_check(client, index)? == ConnState::Lost {
                    return Ok(None);
                }
                if self.outcome_counts[2] == busy {
                    break;
                }
                ensure!(self.outcome_counts[2] < busy + 100, "the node rejects every retry as busy");
            }
        }
        Ok(Some(self.possible_versions.iter().filter(|states| states[0].is_some()).count()))
    }
}
