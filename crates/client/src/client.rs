//! The async front door: a handle that any executor can use from any thread.
//!
//! Clones share one I/O thread and its connections. A future that is dropped does not take its command
//! back: a write may still be carried out.

use crate::command::{Response, ResponseData};
use crate::config::ClientConfig;
use crate::controller_info::ControllerInfo;
use crate::error::Error;
use crate::io_thread::{self, ClientShared, OwnedCommand};
use octokv_base::{KEY_BYTES_MAX, Key, Lba};
use octokv_wire::kv::{StoreMode, UncheckedKeyList};
use octokv_wire::nvm::LbaRange;
use std::sync::Arc;

/// A connected client of one namespace.
#[derive(Clone)]
pub struct Client(Arc<ClientHandle>);

struct ClientHandle {
    shared: Arc<ClientShared>,
    controller_info: ControllerInfo,
}

impl Drop for ClientHandle {
    fn drop(&mut self) {
        self.shared.close();
    }
}

const LIST_BUFFER_BYTES: u32 = 64 << 10;
/// Enough to have the length of a value, in the completion, without the value.
const LENGTH_PROBE_BYTES: u32 = 4;

impl Client {
    /// Connects to `nvme+tcp://HOST:PORT/NQN?nsid=N`.
    ///
    /// # Errors
    /// When the URL is none or the node cannot be reached, or refuses.
    pub async fn connect(url: &str) -> Result<Client, Error> {
        Client::connect_with(url, ClientConfig::default()).await
    }

    /// Connects with other settings than the default; subsystem and namespace are those of the URL.
    ///
    /// # Errors
    /// As [`BlockingClient::connect`].
    pub async fn connect_with(url: &str, config: ClientConfig) -> Result<Client, Error> {
        let parsed = url.parse().map_err(|why| Error::Url(url.to_string(), why))?;
        let (shared, connected) = io_thread::start(parsed, config)?;
        // From here on, dropping this future ends the thread.
        let mut handle = ClientHandle { shared, controller_info: ControllerInfo::unknown() };
        handle.controller_info = connected.await?;
        Ok(Client(Arc::new(handle)))
    }

    /// What is known of the controller and its namespace.
    pub fn controller_info(&self) -> &ControllerInfo {
        &self.0.controller_info
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
    /// As [`BlockingClient::put`].
    pub async fn put_with(&self, key: &[u8], value: &[u8], mode: StoreMode) -> Result<bool, Error> {
        self.put_shared(key, value.into(), mode).await
    }

    /// As [`BlockingClient::put_with`], without copying the value.
    ///
    /// # Errors
    /// As [`BlockingClient::put`].
    pub async fn put_shared(&self, key: &[u8], value: Arc<[u8]>, mode: StoreMode) -> Result<bool, Error> {
        let key = self.check_key(key)?;
        match self.submit(OwnedCommand::Store { key, value, mode }).await? {
            Response::NotFound | Response::AlreadyExists => Ok(false),
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

    /// As [`BlockingClient::get`], in the buffer that it was received into.
    ///
    /// # Errors
    /// As [`BlockingClient::get`].
    pub async fn get_data(&self, key: &[u8]) -> Result<Option<ResponseData>, Error> {
        let key = self.check_key(key)?;
        match self.submit(OwnedCommand::Retrieve { key, limit_bytes: u32::MAX }).await? {
            Response::Value { data, full_bytes } if data.len() < full_bytes as usize => {
                Err(Error::DataLength { expected_bytes: full_bytes, received_bytes: data.len() as u32 })
            }
            Response::Value { data, .. } => Ok(Some(data)),
            _ => Ok(None),
        }
    }

    /// Removes a value. False when the node says that there was none; by default an NVMe node does not
    /// say so, and the answer is true.
    ///
    /// # Errors
    /// As [`BlockingClient::put`].
    pub async fn delete(&self, key: &[u8]) -> Result<bool, Error> {
        let key = self.check_key(key)?;
        Ok(!matches!(self.submit(OwnedCommand::Delete { key }).await?, Response::NotFound))
    }

    /// The length of the value in bytes, if there is one.
    ///
    /// # Errors
    /// When the node cannot be asked.
    pub async fn exist(&self, key: &[u8]) -> Result<Option<u32>, Error> {
        let key = self.check_key(key)?;
        match self.submit(OwnedCommand::Exist { key: key.clone() }).await? {
            Response::Exists { value_bytes: Some(bytes) } => Ok(Some(bytes)),
            Response::Exists { value_bytes: None } => {
                match self.submit(OwnedCommand::Retrieve { key, limit_bytes: LENGTH_PROBE_BYTES }).await? {
                    Response::Value { full_bytes, .. } => Ok(Some(full_bytes)),
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
        let too_long = || Error::KeyLength { have: start.len(), max: KEY_BYTES_MAX };
        let mut from = Key::new(start).ok_or_else(too_long)?;
        let mut keys: Vec<Vec<u8>> = Vec::new();
        while keys.len() < limit {
            let request = OwnedCommand::List { start: from.clone(), limit_bytes: LIST_BUFFER_BYTES };
            let Response::Keys { list } = self.submit(request).await? else { break };
            let malformed = |_| Error::DataLength {
                expected_bytes: LIST_BUFFER_BYTES,
                received_bytes: list.len() as u32,
            };
            let checked = UncheckedKeyList(&list).check().map_err(malformed)?;
            let before = keys.len();
            // A page begins with the key that the last one ended with.
            let known = |key: &&[u8]| before > 0 && keys[before - 1] == *key;
            let fresh: Vec<&[u8]> = checked.keys().skip_while(|key| known(key)).collect();
            keys.extend(fresh.into_iter().map(<[u8]>::to_vec));
            let Some(last) = keys.get(before..).and_then(<[Vec<u8>]>::last) else { break };
            from = Key::new(last).ok_or(Error::KeyLength { have: last.len(), max: KEY_BYTES_MAX })?;
        }
        keys.truncate(limit);
        Ok(keys)
    }

    /// Returns when everything acknowledged is durable.
    ///
    /// # Errors
    /// When the node cannot be asked, or its device failed.
    pub async fn flush(&self) -> Result<(), Error> {
        self.submit(OwnedCommand::Flush).await.map(|_| ())
    }

    /// Reads `count` blocks from block `first` on, of a namespace of blocks.
    ///
    /// # Errors
    /// When they do not exist or cannot be read, or the namespace holds keys and values.
    pub async fn read_blocks(&self, first: u64, count: u64) -> Result<Vec<u8>, Error> {
        let (block_bytes, most_bytes) = self.block_limits()?;
        let have = self.0.controller_info.blocks.map_or(0, |blocks| blocks.block_count);
        if first.checked_add(count).is_none_or(|end| end > have) {
            return Err(Error::BlockRange { first, count, have });
        }
        let mut bytes = Vec::new();
        let mut completion = 0;
        while completion < count {
            let blocks = (count - completion).min(u64::from(most_bytes / block_bytes)) as u32;
            let range = LbaRange { lba: Lba(first + completion), blocks };
            if let Response::Blocks { data } = self.submit(OwnedCommand::Read { range }).await? {
                bytes.extend_from_slice(&data);
            }
            completion += u64::from(blocks);
        }
        Ok(bytes)
    }

    /// Writes whole blocks from block `first` on, of a namespace of blocks. They are durable after a
    /// [`BlockingClient::flush`]. What is more than one command takes is written by several, in order.
    ///
    /// # Errors
    /// As [`BlockingClient::read_blocks`]; [`Error::OutcomeUnknown`] when the connection was lost before the answer.
    pub async fn write_blocks(&self, first: u64, data: &[u8]) -> Result<(), Error> {
        let (block_bytes, most_bytes) = self.block_limits()?;
        if !data.len().is_multiple_of(block_bytes as usize) {
            let (have, max) = (data.len() as u64, u64::from(most_bytes));
            return Err(Error::BlockDataLength { have, block_bytes, max });
        }
        let mut lba = Lba(first);
        for part in data.chunks(most_bytes as usize) {
            self.submit(OwnedCommand::Write { lba, data: part.into(), force_unit_access: false }).await?;
            lba = Lba(lba.0 + (part.len() / block_bytes as usize) as u64);
        }
        Ok(())
    }

    /// Bytes of a block, and the most of one command.
    fn block_limits(&self) -> Result<(u32, u32), Error> {
        let info = &self.0.controller_info;
        let blocks = info.blocks.ok_or(Error::NotBlockNamespace)?;
        Ok((blocks.block_bytes, blocks.command_bytes_max(info.data_bytes_max)))
    }

    fn check_key(&self, bytes: &[u8]) -> Result<Key, Error> {
        let max = self.0.controller_info.key_bytes_max();
        let bad = Error::KeyLength { have: bytes.len(), max };
        if bytes.is_empty() { Err(bad) } else { Key::new(bytes).ok_or(bad) }
    }

    async fn submit(&self, request: OwnedCommand) -> Result<Response, Error> {
        self.0.shared.submit(request).await
    }
}

impl std::fmt::Debug for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Client(controller {})", self.0.controller_info.controller_id)
    }
}
