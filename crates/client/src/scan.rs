//! Scans: the pairs of a range of keys, in order, by an iterator of the node.
//!
//! ```text
//!   create ─▶ next, next, … ─▶ end            one snapshot
//!              └─ connection lost, iterator expired ─▶ create behind the last key ─▶ next, …     another snapshot
//! ```
//! In: bounds and direction. Out: pairs, each key at most once and in order. Invariant: pairs of one snapshot are of one moment;
//! [`Scan::snapshots`] tells how many there were.

use crate::client::Client;
use crate::command::{RemoteIterator, Response, ResponseData};
use crate::error::Error;
use crate::io_thread::OwnedCommand;
use octokv_base::{KEY_BYTES_MAX, Key};
use octokv_wire::Status;
use octokv_wire::iterator::PairList;

/// Length of the pairs of one command, unless one pair is longer, in bytes.
const LIMIT_BYTES: u32 = 256 << 10;
/// Snapshots that may be lost one after another without a pair in between.
const LOST_SNAPSHOTS_MAX: u32 = 3;

/// What a scan yields.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ScanOptions {
    /// Lowest key; empty for no bound.
    pub lower: Vec<u8>,
    /// Key below which all keys are; empty for no bound.
    pub upper: Vec<u8>,
    /// Whether the highest key comes first.
    pub reverse: bool,
    /// Whether values are left out: each is then empty.
    pub keys_only: bool,
    /// Most pairs of one command, at least 1.
    pub pairs_per_command: u32,
}

impl Default for ScanOptions {
    fn default() -> ScanOptions {
        ScanOptions {
            lower: Vec::new(),
            upper: Vec::new(),
            reverse: false,
            keys_only: false,
            pairs_per_command: 1024,
        }
    }
}

/// A key and its value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pair {
    /// The key.
    pub key: Vec<u8>,
    /// The value.
    pub value: Vec<u8>,
}

/// Where another snapshot begins.
enum ResumePoint {
    Start,
    /// Where a seek moved the scan.
    From(Key),
    /// Behind the last key that was received.
    Behind(Vec<u8>),
}

/// A scan of a namespace. Dropping it ends its iterator at the node.
pub struct Scan {
    client: Client,
    options: ScanOptions,
    /// `None` before the next snapshot.
    iterator: Option<RemoteIterator>,
    /// The pairs that were received, from the last to the next.
    received: Vec<Pair>,
    is_at_end: bool,
    resume: ResumePoint,
    limit_bytes: u32,
    snapshots: u32,
}

impl Client {
    /// A scan of the pairs of a range of keys, in order, as they are now.
    ///
    /// # Errors
    /// [`Error::NoIterators`], [`Error::TooManyIterators`], [`Error::KeyLength`]; the node's status if the bounds are reversed; or any
    /// connection error.
    pub async fn scan(&self, options: ScanOptions) -> Result<Scan, Error> {
        Scan::new(self.clone(), options).await
    }
}

impl Scan {
    async fn new(client: Client, options: ScanOptions) -> Result<Scan, Error> {
        let mut scan = Scan {
            client,
            options,
            iterator: None,
            received: Vec::new(),
            is_at_end: false,
            resume: ResumePoint::Start,
            limit_bytes: LIMIT_BYTES,
            snapshots: 0,
        };
        scan.iterator().await?;
        Ok(scan)
    }

    /// The number of snapshots from which pairs came or will come: 1, unless the connection was lost or the iterator expired.
    pub fn snapshots(&self) -> u32 {
        self.snapshots
    }

    /// The next pair; `None` behind the last one.
    ///
    /// # Errors
    /// [`Error::UnrecoveredRead`] at a pair that the node cannot read, behind which the next call goes on; any other status of the
    /// node; or any connection error, after which a call may be repeated.
    pub async fn next(&mut self) -> Result<Option<Pair>, Error> {
        let mut lost = 0;
        loop {
            if let Some(pair) = self.received.pop() {
                return Ok(Some(pair));
            }
            if self.is_at_end {
                return Ok(None);
            }
            let iterator = self.iterator().await?;
            let (limit_bytes, pairs_max) = (self.limit_bytes, self.options.pairs_per_command.max(1));
            let command = OwnedCommand::NextPairs { iterator, limit_bytes, pairs_max };
            match self.client.submit(command).await {
                Ok(Response::Pairs { pairs }) => self.receive(&pairs)?,
                Ok(response) => unreachable!("a Next completed with {response:?}"),
                Err(Error::PairTooLarge { buffer_bytes }) if buffer_bytes > self.limit_bytes => {
                    self.limit_bytes = buffer_bytes;
                }
                Err(Error::UnknownIterator) if lost < LOST_SNAPSHOTS_MAX => {
                    lost += 1;
                    self.iterator = None;
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Moves the scan to the first key from `key` on, in its direction and within its bounds.
    ///
    /// # Errors
    /// [`Error::KeyLength`], or as for [`Scan::next`]; the scan is then where it was.
    pub async fn seek(&mut self, key: &[u8]) -> Result<(), Error> {
        let sought = checked_key(key)?;
        for _ in 0..=LOST_SNAPSHOTS_MAX {
            let iterator = self.iterator().await?;
            match self.client.submit(OwnedCommand::SeekIterator { iterator, key: sought.clone() }).await {
                Ok(_) => {
                    self.received.clear();
                    self.is_at_end = false;
                    self.resume = ResumePoint::From(sought);
                    return Ok(());
                }
                Err(Error::UnknownIterator) => self.iterator = None,
                Err(error) => return Err(error),
            }
        }
        Err(Error::UnknownIterator)
    }

    /// The iterator at the node. A new one begins where the last one was lost.
    async fn iterator(&mut self) -> Result<RemoteIterator, Error> {
        if let Some(iterator) = self.iterator {
            return Ok(iterator);
        }
        let ScanOptions { lower, upper, reverse, keys_only, .. } = &self.options;
        let (lower, upper) = match &self.resume {
            ResumePoint::Behind(last) if *reverse => (lower, last),
            ResumePoint::Behind(last) => (last, upper),
            ResumePoint::Start | ResumePoint::From(_) => (lower, upper),
        };
        let (lower, upper) = (checked_key(lower)?, checked_key(upper)?);
        let (reverse, keys_only) = (*reverse, *keys_only);
        let command = OwnedCommand::CreateIterator { lower, upper, reverse, keys_only };
        let iterator = match self.client.submit(command).await {
            Ok(Response::IteratorCreated(iterator)) => iterator,
            Ok(response) => unreachable!("a Create completed with {response:?}"),
            // Only another namespace of the node has iterators.
            Err(Error::Status(status)) if status.is(Status::INVALID_OPCODE) => {
                return Err(Error::NoIterators);
            }
            Err(error) => return Err(error),
        };
        if let ResumePoint::From(key) = &self.resume {
            let sought = self.client.submit(OwnedCommand::SeekIterator { iterator, key: key.clone() }).await;
            if let Err(error) = sought {
                // It is not where the scan is.
                self.client.submit_and_forget(OwnedCommand::DestroyIterator { iterator });
                return Err(error);
            }
        }
        self.iterator = Some(iterator);
        self.snapshots += 1;
        Ok(iterator)
    }

    fn receive(&mut self, data: &ResponseData) -> Result<(), Error> {
        let malformed =
            |_| Error::DataLength { expected_bytes: self.limit_bytes, received_bytes: data.len() as u32 };
        let list = PairList::check(data).map_err(malformed)?;
        // An iterator that goes on begins with the last key of the one before.
        let is_known = |key: &[u8]| matches!(&self.resume, ResumePoint::Behind(last) if last == key);
        let pairs = list.pairs().skip_while(|(key, _)| is_known(key));
        self.received = pairs.map(|(key, value)| Pair { key: key.to_vec(), value: value.to_vec() }).collect();
        if let Some(last) = self.received.last() {
            self.resume = ResumePoint::Behind(last.key.clone());
        }
        self.received.reverse();
        self.is_at_end = list.is_end();
        Ok(())
    }
}

impl Drop for Scan {
    fn drop(&mut self) {
        if let Some(iterator) = self.iterator.take() {
            self.client.submit_and_forget(OwnedCommand::DestroyIterator { iterator });
        }
    }
}

fn checked_key(key: &[u8]) -> Result<Key, Error> {
    Key::new(key).ok_or(Error::KeyLength { have: key.len(), max: KEY_BYTES_MAX })
}
