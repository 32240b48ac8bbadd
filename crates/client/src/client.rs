//! The async interface: a handle for any executor and any thread.
//!
//! Clones share one I/O thread and its connections. Dropping a future does not cancel its command: a write may still be
//! executed.

use crate::command::{Response, ResponseData};
use crate::config::ClientConfig;
use crate::controller_info::ControllerInfo;
use crate::error::Error;
use crate::io_thread::{self, ClientShared, OwnedCommand};
use octokv_base::{KEY_BYTES_MAX, Key, Lba};
use octokv_wire::kv::{StoreMode, UncheckedKeyList};
use octokv_wire::nvm::LbaRange;
use std::sync::Arc;

/// An async client of one namespace.
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
/// Data of a Retrieve that only reads the value's length from the completion, in bytes.
const LENGTH_PROBE_BYTES: u32 = 4;

impl Client {
    /// Connects to `nvme+tcp://HOST:PORT/NQN?nsid=N`.
    ///
    /// # Errors
    /// [`Error::Url`], [`Error::UnknownHost`], [`Error::Os`], or [`Error::Connect`] if the node is
    /// unreachable or rejects the connection.
    pub async fn connect(url: &str) -> Result<Client, Error> {
        Client::connect_with(url, ClientConfig::default()).await
    }

    /// Connects with another configuration than the default; the URL overrides its subsystem and namespace.
    ///
    /// # Errors
    /// As [`Client::connect`].
    pub async fn connect_with(url: &str, config: ClientConfig) -> Result<Client, Error> {
        let parsed = url.parse().map_err(|reason| Error::Url(url.to_string(), reason))?;
        let (shared, connected) = io_thread::start(parsed, config)?;
        // From here, dropping this future ends the thread.
        let mut handle = ClientHandle { shared, controller_info: ControllerInfo::unknown() };
        handle.controller_info = connected.await?;
        Ok(Client(Arc::new(handle)))
    }

    /// Limits of the controller and its namespace.
    pub fn controller_info(&self) -> &ControllerInfo {
        &self.0.controller_info
    }

    /// Stores a value unconditionally.
    ///
    /// # Errors
    /// [`Error::KeyLength`], [`Error::ValueLength`], [`Error::CapacityExceeded`]; [`Error::OutcomeUnknown`]
    /// if the connection was lost before the response; any connection error.
    pub async fn put(&self, key: &[u8], value: &[u8]) -> Result<(), Error> {
        self.put_with(key, value, StoreMode::Upsert).await.map(|_| ())
    }

    /// Stores a value under the condition of `mode`. Returns false if the condition failed: the key exists
    /// ([`StoreMode::AddOnly`]) or does not ([`StoreMode::UpdateOnly`]).
    ///
    /// # Errors
    /// As [`Client::put`].
    pub async fn put_with(&self, key: &[u8], value: &[u8], mode: StoreMode) -> Result<bool, Error> {
        self.put_shared(key, value.into(), mode).await
    }

    /// [`Client::put_with`] without a copy of the value.
    ///
    /// # Errors
    /// As [`Client::put`].
    pub async fn put_shared(&self, key: &[u8], value: Arc<[u8]>, mode: StoreMode) -> Result<bool, Error> {
        let key = self.check_key(key)?;
        match self.submit(OwnedCommand::Store { key, value, mode }).await? {
            Response::NotFound | Response::AlreadyExists => Ok(false),
            _ => Ok(true),
        }
    }

    /// Reads a value; `None` if the key does not exist.
    ///
    /// # Errors
    /// [`Error::KeyLength`], [`Error::UnrecoveredRead`], [`Error::DataDigest`], [`Error::DataLength`], or any
    /// connection error.
    pub async fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>, Error> {
        Ok(self.get_data(key).await?.map(|data| data.to_vec()))
    }

    /// [`Client::get`] without a copy: returns the receive buffer.
    ///
    /// # Errors
    /// As [`Client::get`].
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

    /// Deletes a key. Returns false if the node reports that the key did not exist; by default an NVMe node
    /// does not report it, and the result is true.
    ///
    /// # Errors
    /// [`Error::KeyLength`]; [`Error::OutcomeUnknown`] if the connection was lost before the response; any
    /// connection error.
    pub async fn delete(&self, key: &[u8]) -> Result<bool, Error> {
        let key = self.check_key(key)?;
        Ok(!matches!(self.submit(OwnedCommand::Delete { key }).await?, Response::NotFound))
    }

    /// Length of the value, in bytes; `None` if the key does not exist.
    ///
    /// # Errors
    /// [`Error::KeyLength`], or any connection error.
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

    /// Up to `limit` keys from `start` (empty: from the beginning), in the node's order. Keys stored or
    /// deleted during the listing may be missing or included.
    ///
    /// # Errors
    /// [`Error::KeyLength`], [`Error::DataLength`] if a list of the node is malformed, or any connection
    /// error.
    pub async fn list(&self, start: &[u8], limit: usize) -> Result<Vec<Vec<u8>>, Error> {
        let too_long = || Error::KeyLength { have: start.len(), max: KEY_BYTES_MAX };
        let mut from = Key::new(start).ok_or_else(too_long)?;
        let mut keys: Vec<Vec<u8>> = Vec::new();
        while keys.len() < limit {
            let command = OwnedCommand::List { start: from.clone(), limit_bytes: LIST_BUFFER_BYTES };
            let Response::Keys { list } = self.submit(command).await? else { break };
            let malformed = |_| Error::DataLength {
                expected_bytes: LIST_BUFFER_BYTES,
                received_bytes: list.len() as u32,
            };
            let checked = UncheckedKeyList(&list).check().map_err(malformed)?;
            let before = keys.len();
            // A page begins with the last key of the previous page.
            let known = |key: &&[u8]| before > 0 && keys[before - 1] == *key;
            let fresh: Vec<&[u8]> = checked.keys().skip_while(|key| known(key)).collect();
            keys.extend(fresh.into_iter().map(<[u8]>::to_vec));
            let Some(last) = keys.get(before..).and_then(<[Vec<u8>]>::last) else { break };
            from = Key::new(last).ok_or(Error::KeyLength { have: last.len(), max: KEY_BYTES_MAX })?;
        }
        keys.truncate(limit);
        Ok(keys)
    }

    /// Makes all acknowledged writes durable.
    ///
    /// # Errors
    /// The status of a failed device, or any connection error.
    pub async fn flush(&self) -> Result<(), Error> {
        self.submit(OwnedCommand::Flush).await.map(|_| ())
    }

    /// Reads `count` blocks from block `first` of a block namespace.
    ///
    /// # Errors
    /// [`Error::BlockRange`], [`Error::UnrecoveredRead`], [`Error::NotBlockNamespace`], or any connection
    /// error.
    pub async fn read_blocks(&self, first: u64, count: u64) -> Result<Vec<u8>, Error> {
        let (block_bytes, data_bytes_max) = self.block_limits()?;
        let have = self.0.controller_info.blocks.map_or(0, |blocks| blocks.block_count);
        if first.checked_add(count).is_none_or(|end| end > have) {
            return Err(Error::BlockRange { first, count, have });
        }
        let mut bytes = Vec::new();
        let mut read_count = 0;
        while read_count < count {
            let blocks = (count - read_count).min(u64::from(data_bytes_max / block_bytes)) as u32;
            let range = LbaRange { lba: Lba(first + read_count), blocks };
            if let Response::Blocks { data } = self.submit(OwnedCommand::Read { range }).await? {
                bytes.extend_from_slice(&data);
            }
            read_count += u64::from(blocks);
        }
        Ok(bytes)
    }

    /// Writes whole blocks from block `first` of a block namespace. [`Client::flush`] makes them durable.
    /// Data beyond the maximum of one command is written by several commands, in order.
    ///
    /// # Errors
    /// [`Error::BlockRange`], [`Error::BlockDataLength`], [`Error::NotBlockNamespace`];
    /// [`Error::OutcomeUnknown`] if the connection was lost before the response; any connection error.
    pub async fn write_blocks(&self, first: u64, data: &[u8]) -> Result<(), Error> {
        let (block_bytes, data_bytes_max) = self.block_limits()?;
        if !data.len().is_multiple_of(block_bytes as usize) {
            let (have, max) = (data.len() as u64, u64::from(data_bytes_max));
            return Err(Error::BlockDataLength { have, block_bytes, max });
        }
        let mut lba = Lba(first);
        for part in data.chunks(data_bytes_max as usize) {
            self.submit(OwnedCommand::Write { lba, data: part.into(), force_unit_access: false }).await?;
            lba = Lba(lba.0 + (part.len() / block_bytes as usize) as u64);
        }
        Ok(())
    }

    /// Block size and maximum data of one command, in bytes.
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

    pub(crate) async fn submit(&self, command: OwnedCommand) -> Result<Response, Error> {
        self.0.shared.submit(command).await
    }

    /// Submits a command whose response does not matter.
    pub(crate) fn submit_and_forget(&self, command: OwnedCommand) {
        drop(self.0.shared.submit(command));
    }
}

impl std::fmt::Debug for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Client(controller {})", self.0.controller_info.controller_id)
    }
}
