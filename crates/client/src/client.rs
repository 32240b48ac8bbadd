//! The async front door: a handle that any executor can use from any thread.
//!
//! Clones share one I/O thread and its connections. A future that is dropped does not take its command
//! back: a write may still be carried out.

use crate::command::{Answer, Data};
use crate::config::Settings;
use crate::controller_init::Facts;
use crate::error::Error;
use crate::io_thread::{self, Request, Shared};
use octokv_base::{KEY_BYTES_MAX, Key, Lba};
use octokv_wire::kv::{StoreMode, UncheckedList};
use octokv_wire::nvm::Range;
use std::sync::Arc;

/// A connected client of one namespace.
#[derive(Clone)]
pub struct Client(Arc<Handle>);

struct Handle {
    shared: Arc<Shared>,
    facts: Facts,
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.shared.close();
    }
}

const LIST_BYTES: u32 = 64 << 10;
/// Enough to have the length of a value, in the completion, without the value.
const PROBE_BYTES: u32 = 4;

impl Client {
    /// Connects to `nvme+tcp://HOST:PORT/NQN?nsid=N`.
    ///
    /// # Errors
    /// When the URL is none or the node cannot be reached, or refuses.
    pub async fn connect(url: &str) -> Result<Client, Error> {
        Client::connect_with(url, Settings::default()).await
    }

    /// Connects with other settings than the default; subsystem and namespace are those of the URL.
    ///
    /// # Errors
    /// As [`Client::connect`].
    pub async fn connect_with(url: &str, settings: Settings) -> Result<Client, Error> {
        let parsed = url.parse().map_err(|why| Error::Url(url.to_string(), why))?;
        let (shared, connected) = io_thread::start(parsed, settings)?;
        // From here on, dropping this future ends the thread.
        let mut handle = Handle { shared, facts: Facts::unknown() };
        handle.facts = connected.await?;
        Ok(Client(Arc::new(handle)))
    }

    /// What is known of the controller and its namespace.
    pub fn facts(&self) -> &Facts {
        &self.0.facts
    }

    /// Stores a value, whether there is one or not.
    ///
    /// # Errors
    /// [`Error::OutcomeUnknown`] when the connection was lost before the answer.
    pub async fn put(&self, key: &[u8], value: &[u8]) -> Result<(), Error> {
        self.put_with(key, value, StoreMode::Upsert).await.map(|_| ())
    }

    /// Stores a value; false when `mode` forbade it: there is one ([`StoreMode::AddOnly`]) or there is
    /// none ([`StoreMode::UpdateOnly`]).
    ///
    /// # Errors
    /// As [`Client::put`].
    pub async fn put_with(&self, key: &[u8], value: &[u8], mode: StoreMode) -> Result<bool, Error> {
        self.put_shared(key, value.into(), mode).await
    }

    /// As [`Client::put_with`], without copying the value.
    ///
    /// # Errors
    /// As [`Client::put`].
    pub async fn put_shared(&self, key: &[u8], value: Arc<[u8]>, mode: StoreMode) -> Result<bool, Error> {
        let key = self.key(key)?;
        match self.ask(Request::Store { key, value, mode }).await? {
            Answer::NotFound | Answer::AlreadyExists => Ok(false),
            _ => Ok(true),
        }
    }

    /// Reads a value.
    ///
    /// # Errors
    /// When it cannot be read; that there is none is `None`.
    pub async fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>, Error> {
        Ok(self.get_data(key).await?.map(|data| data.to_vec()))
    }

    /// As [`Client::get`], in the buffer that it was received into.
    ///
    /// # Errors
    /// As [`Client::get`].
    pub async fn get_data(&self, key: &[u8]) -> Result<Option<Data>, Error> {
        let key = self.key(key)?;
        match self.ask(Request::Retrieve { key, limit_bytes: u32::MAX }).await? {
            Answer::Value { data, full_bytes } if data.len() < full_bytes as usize => {
                Err(Error::DataLength { said: full_bytes, came: data.len() as u32 })
            }
            Answer::Value { data, .. } => Ok(Some(data)),
            _ => Ok(None),
        }
    }

    /// Removes a value. False when the node says that there was none; by default an NVMe node does not
    /// say so, and the answer is true.
    ///
    /// # Errors
    /// As [`Client::put`].
    pub async fn delete(&self, key: &[u8]) -> Result<bool, Error> {
        let key = self.key(key)?;
        Ok(!matches!(self.ask(Request::Delete { key }).await?, Answer::NotFound))
    }

    /// The length of the value in bytes, if there is one.
    ///
    /// # Errors
    /// When the node cannot be asked.
    pub async fn exist(&self, key: &[u8]) -> Result<Option<u32>, Error> {
        let key = self.key(key)?;
        match self.ask(Request::Exist { key: key.clone() }).await? {
            Answer::Exists { value_bytes: Some(bytes) } => Ok(Some(bytes)),
            Answer::Exists { value_bytes: None } => {
                match self.ask(Request::Retrieve { key, limit_bytes: PROBE_BYTES }).await? {
                    Answer::Value { full_bytes, .. } => Ok(Some(full_bytes)),
                    _ => Ok(None),
                }
            }
            _ => Ok(None),
        }
    }

    /// Up to `limit` keys from `start` on (empty: from the beginning), in the node's order. Keys that
    /// come and go meanwhile may or may not be in it.
    ///
    /// # Errors
    /// When the node cannot be asked, or its list is malformed.
    pub async fn list(&self, start: &[u8], limit: usize) -> Result<Vec<Vec<u8>>, Error> {
        let too_long = || Error::KeyBytes { have: start.len(), max: KEY_BYTES_MAX };
        let mut from = Key::new(start).ok_or_else(too_long)?;
        let mut keys: Vec<Vec<u8>> = Vec::new();
        while keys.len() < limit {
            let request = Request::List { start: from.clone(), limit_bytes: LIST_BYTES };
            let Answer::Keys { list } = self.ask(request).await? else { break };
            let malformed = |_| Error::DataLength { said: LIST_BYTES, came: list.len() as u32 };
            let checked = UncheckedList(&list).check().map_err(malformed)?;
            let before = keys.len();
            // A page begins with the key that the last one ended with.
            let known = |key: &&[u8]| before > 0 && keys[before - 1] == *key;
            let fresh: Vec<&[u8]> = checked.keys().skip_while(|key| known(key)).collect();
            keys.extend(fresh.into_iter().map(<[u8]>::to_vec));
            let Some(last) = keys.get(before..).and_then(<[Vec<u8>]>::last) else { break };
            from = Key::new(last).ok_or(Error::KeyBytes { have: last.len(), max: KEY_BYTES_MAX })?;
        }
        keys.truncate(limit);
        Ok(keys)
    }

    /// Returns when everything acknowledged is durable.
    ///
    /// # Errors
    /// When the node cannot be asked, or its device failed.
    pub async fn flush(&self) -> Result<(), Error> {
        self.ask(Request::Flush).await.map(|_| ())
    }

    /// Reads `count` blocks from block `first` on, of a namespace of blocks.
    ///
    /// # Errors
    /// When they do not exist or cannot be read, or the namespace holds keys and values.
    pub async fn read_blocks(&self, first: u64, count: u64) -> Result<Vec<u8>, Error> {
        let (block_bytes, most_bytes) = self.block_limits()?;
        let have = self.0.facts.blocks.map_or(0, |blocks| blocks.count);
        if first.checked_add(count).is_none_or(|end| end > have) {
            return Err(Error::BlockRange { first, count, have });
        }
        let mut bytes = Vec::new();
        let mut done = 0;
        while done < count {
            let blocks = (count - done).min(u64::from(most_bytes / block_bytes)) as u32;
            let range = Range { lba: Lba(first + done), blocks };
            if let Answer::Blocks { data } = self.ask(Request::Read { range }).await? {
                bytes.extend_from_slice(&data);
            }
            done += u64::from(blocks);
        }
        Ok(bytes)
    }

    /// Writes whole blocks from block `first` on, of a namespace of blocks. They are durable after a
    /// [`Client::flush`]. What is more than one command takes is written by several, in order.
    ///
    /// # Errors
    /// As [`Client::read_blocks`]; [`Error::OutcomeUnknown`] when the connection was lost before the answer.
    pub async fn write_blocks(&self, first: u64, data: &[u8]) -> Result<(), Error> {
        let (block_bytes, most_bytes) = self.block_limits()?;
        if !data.len().is_multiple_of(block_bytes as usize) {
            let (have, max) = (data.len() as u64, u64::from(most_bytes));
            return Err(Error::BlockBytes { have, block_bytes, max });
        }
        let mut lba = Lba(first);
        for part in data.chunks(most_bytes as usize) {
            self.ask(Request::Write { lba, data: part.into(), force_unit_access: false }).await?;
            lba = Lba(lba.0 + (part.len() / block_bytes as usize) as u64);
        }
        Ok(())
    }

    /// Bytes of a block, and the most of one command.
    fn block_limits(&self) -> Result<(u32, u32), Error> {
        let facts = &self.0.facts;
        let blocks = facts.blocks.ok_or(Error::NotBlocks)?;
        Ok((blocks.block_bytes, blocks.command_bytes_max(facts.data_bytes_max)))
    }

    fn key(&self, bytes: &[u8]) -> Result<Key, Error> {
        let max = self.0.facts.key_bytes_max();
        let bad = Error::KeyBytes { have: bytes.len(), max };
        if bytes.is_empty() { Err(bad) } else { Key::new(bytes).ok_or(bad) }
    }

    async fn ask(&self, request: Request) -> Result<Answer, Error> {
        self.0.shared.send(request).await
    }
}

impl std::fmt::Debug for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Client(controller {})", self.0.facts.controller_id)
    }
}
