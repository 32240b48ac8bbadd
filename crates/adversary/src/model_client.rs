//! A client that keeps account of every key it has: keys of 1 to 1024 bytes, values of none to the longest, over
//! lost connections, full devices and nodes that were killed.
//!
//! ```text
//!             acknowledged                    connection lost before the answer
//!   one state ────────────▶ one state         one state ──────────────────────▶ two states: either may be found
//! ```
//! In: a client, which may fail at any time. Out: the first thing found that was never stored, or is missing.
//! Invariant: an operation that was refused has changed nothing.

use anyhow::{Result, bail, ensure};
use octokv_base::{Random, prng::mix};
use octokv_bench::values::Values;
use octokv_client::Error;
use octokv_client::blocking::Client;

/// Lengths of keys, in turn.
const KEY_BYTES: [usize; 7] = [2, 3, 16, 17, 100, 500, 1024];
/// Keys of one keeper.
const KEYS: usize = 200;

/// One version of a key, or none.
type Version = Option<u64>;

/// What one client has stored.
pub struct Keeper {
    name: u8,
    value_bytes_max: usize,
    values: Values,
    random: Random,
    /// The states that each key may be in: one, and more where an outcome is not known.
    keys: Vec<Vec<Version>>,
    next: u64,
    /// Operations acknowledged, refused for lack of room, and refused as busy.
    pub counts: [u64; 3],
}

/// Whether the connection can still be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Link {
    /// Yes.
    Up,
    /// No.
    Lost,
}

impl Keeper {
    /// A keeper of no keys yet. Keepers of one namespace have different names.
    pub fn new(name: u8, value_bytes_max: usize) -> Keeper {
        let seed = u64::from(name) + 1000;
        Keeper {
            name,
            value_bytes_max,
            values: Values::new(seed, value_bytes_max),
            random: Random::new(seed),
            keys: vec![vec![None]; KEYS],
            next: 1,
            counts: [0; 3],
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
        let draw = mix(version) as usize;
        let most = match draw % 16 {
            0 => 0,
            1..=9 => 4096,
            10..=14 => 64 << 10,
            _ => self.value_bytes_max,
        };
        let bytes = if draw.is_multiple_of(64) { most } else { (draw >> 8) % (most + 1) };
        let mut value = vec![0; bytes.min(self.value_bytes_max)];
        self.values.make(version, &mut value);
        value
    }

    /// One operation, of any kind, on any key.
    ///
    /// # Errors
    /// When the node has something else than it may have.
    pub fn step(&mut self, client: &Client) -> Result<Link> {
        let index = self.random.below(KEYS as u64) as usize;
        match self.random.below(10) {
            0..=4 => self.put(client, index),
            5..=7 => self.look(client, index),
            8 => self.delete(client, index),
            _ => self.ask(client, index),
        }
    }

    fn put(&mut self, client: &Client, index: usize) -> Result<Link> {
        let version = self.next;
        self.next += 1;
        let outcome = client.put(&self.key(index), &self.value(version));
        self.changed(index, Some(version), outcome)
    }

    fn delete(&mut self, client: &Client, index: usize) -> Result<Link> {
        let outcome = client.delete(&self.key(index)).map(drop);
        self.changed(index, None, outcome)
    }

    fn changed(&mut self, index: usize, to: Version, outcome: Result<(), Error>) -> Result<Link> {
        match outcome {
            Ok(()) => {
                self.counts[0] += 1;
                self.keys[index] = vec![to];
                Ok(Link::Up)
            }
            Err(error) => {
                let link = self.failed(&error)?;
                if link == Link::Lost && !self.keys[index].contains(&to) {
                    self.keys[index].push(to);
                }
                Ok(link)
            }
        }
    }

    /// Reads a key and compares; what is found settles what was in doubt.
    fn look(&mut self, client: &Client, index: usize) -> Result<Link> {
        match client.get(&self.key(index)) {
            Ok(found) => {
                self.counts[0] += 1;
                let is = |version: &Version| match (version, &found) {
                    (None, None) => true,
                    (Some(version), Some(found)) => self.value(*version) == *found,
                    _ => false,
                };
                let Some(&version) = self.keys[index].iter().find(|version| is(version)) else {
                    bail!(
                        "key {} of {} B may be at {:?}; read: {:?} B",
                        index,
                        self.key(index).len(),
                        self.keys[index],
                        found.map(|value| value.len())
                    );
                };
                self.keys[index] = vec![version];
                Ok(Link::Up)
            }
            Err(error) => self.failed(&error),
        }
    }

    /// Asks for what needs no value: the length, a listing from the key on.
    fn ask(&mut self, client: &Client, index: usize) -> Result<Link> {
        let key = self.key(index);
        let found = match client.exist(&key) {
            Ok(found) => found,
            Err(error) => return self.failed(&error),
        };
        let may_be = |version: &Version| version.map(|version| self.value(version).len() as u32) == found;
        let fits = self.keys[index].iter().any(may_be);
        ensure!(fits, "key {index} may be at {:?}; its length is {found:?}", self.keys[index]);
        match client.list(&key, 50) {
            // A key that is there begins its own list.
            Ok(list) if self.keys[index].len() == 1 => {
                self.counts[0] += 1;
                let listed = list.first() == Some(&key);
                ensure!(listed == found.is_some(), "key {index} is listed: {listed}, exists: {found:?}");
                Ok(Link::Up)
            }
            Ok(_) => Ok(Link::Up),
            Err(error) => self.failed(&error),
        }
    }

    fn failed(&mut self, error: &Error) -> Result<Link> {
        match error {
            Error::CapacityExceeded => self.counts[1] += 1,
            Error::Busy => self.counts[2] += 1,
            Error::OutcomeUnknown
            | Error::Disconnected(_)
            | Error::Connect(..)
            | Error::TimedOut
            | Error::Closed => return Ok(Link::Lost),
            other => bail!("{other}"),
        }
        Ok(Link::Up)
    }

    /// Reads every key. Gives how many there are, or `None` when the connection was lost on the way.
    ///
    /// # Errors
    /// The first promise that the node broke.
    pub fn verify(&mut self, client: &Client) -> Result<Option<usize>> {
        for index in 0..KEYS {
            let busy = self.counts[2];
            loop {
                if self.look(client, index)? == Link::Lost {
                    return Ok(None);
                }
                if self.counts[2] == busy {
                    break;
                }
                ensure!(self.counts[2] < busy + 100, "the node stays busy");
            }
        }
        Ok(Some(self.keys.iter().filter(|states| states[0].is_some()).count()))
    }
}
