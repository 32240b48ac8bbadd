//! The blocking interface: [`BlockingClient`], which waits for each response.

use crate::client::Client;
use crate::config::ClientConfig;
use crate::controller_info::ControllerInfo;
use crate::error::Error;
use crate::scan::{Pair, Scan, ScanOptions};
use octokv_wire::kv::StoreMode;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;

/// A blocking client of one namespace. Clones share its connections and may be used from any thread.
#[derive(Clone, Debug)]
pub struct BlockingClient(Client);

struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// Runs a future on this thread, which parks while the future is pending.
fn block_on<F: Future>(future: F) -> F::Output {
    let mut future = pin!(future);
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    let mut context = Context::from_waker(&waker);
    loop {
        match future.as_mut().poll(&mut context) {
            Poll::Ready(output) => return output,
            Poll::Pending => std::thread::park(),
        }
    }
}

/// A scan whose pairs are waited for. An iterator: it goes on after an error, and ends behind the last pair.
pub struct BlockingScan(Scan);

impl BlockingScan {
    /// The number of snapshots ([`Scan::snapshots`]).
    pub fn snapshots(&self) -> u32 {
        self.0.snapshots()
    }

    /// Moves the scan ([`Scan::seek`]).
    ///
    /// # Errors
    /// As there.
    pub fn seek(&mut self, key: &[u8]) -> Result<(), Error> {
        block_on(self.0.seek(key))
    }
}

impl Iterator for BlockingScan {
    type Item = Result<Pair, Error>;

    fn next(&mut self) -> Option<Result<Pair, Error>> {
        block_on(self.0.next()).transpose()
    }
}

impl BlockingClient {
    /// Connects to `nvme+tcp://HOST:PORT/NQN?nsid=N`.
    ///
    /// # Errors
    /// As [`crate::Client::connect`].
    pub fn connect(url: &str) -> Result<BlockingClient, Error> {
        block_on(Client::connect(url)).map(BlockingClient)
    }

    /// Connects with another configuration than the default; the URL overrides its subsystem and namespace.
    ///
    /// # Errors
    /// As [`crate::Client::connect`].
    pub fn connect_with(url: &str, config: ClientConfig) -> Result<BlockingClient, Error> {
        block_on(Client::connect_with(url, config)).map(BlockingClient)
    }

    /// Limits of the controller and its namespace.
    pub fn controller_info(&self) -> &ControllerInfo {
        self.0.controller_info()
    }

    /// Stores a value unconditionally.
    ///
    /// # Errors
    /// As [`crate::Client::put`].
    pub fn put(&self, key: &[u8], value: &[u8]) -> Result<(), Error> {
        block_on(self.0.put(key, value))
    }

    /// Stores a value under the condition of `mode`. Returns false if the condition failed.
    ///
    /// # Errors
    /// As [`crate::Client::put`].
    pub fn put_with(&self, key: &[u8], value: &[u8], mode: StoreMode) -> Result<bool, Error> {
        block_on(self.0.put_with(key, value, mode))
    }

    /// Reads a value; `None` if the key does not exist.
    ///
    /// # Errors
    /// As [`crate::Client::get`].
    pub fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>, Error> {
        block_on(self.0.get(key))
    }

    /// Deletes a key. Returns false if the node reports that the key did not exist.
    ///
    /// # Errors
    /// As [`crate::Client::delete`].
    pub fn delete(&self, key: &[u8]) -> Result<bool, Error> {
        block_on(self.0.delete(key))
    }

    /// Length of the value, in bytes; `None` if the key does not exist.
    ///
    /// # Errors
    /// As [`crate::Client::exist`].
    pub fn exist(&self, key: &[u8]) -> Result<Option<u32>, Error> {
        block_on(self.0.exist(key))
    }

    /// Up to `limit` keys from `start` (empty: from the beginning), in the node's order.
    ///
    /// # Errors
    /// As [`crate::Client::list`].
    pub fn list(&self, start: &[u8], limit: usize) -> Result<Vec<Vec<u8>>, Error> {
        block_on(self.0.list(start, limit))
    }

    /// A scan of the pairs of a range of keys, in order, as they are now.
    ///
    /// # Errors
    /// As [`crate::Client::scan`].
    pub fn scan(&self, options: ScanOptions) -> Result<BlockingScan, Error> {
        block_on(self.0.scan(options)).map(BlockingScan)
    }

    /// Makes all acknowledged writes durable.
    ///
    /// # Errors
    /// As [`crate::Client::flush`].
    pub fn flush(&self) -> Result<(), Error> {
        block_on(self.0.flush())
    }

    /// Reads `count` blocks from block `first` of a block namespace.
    ///
    /// # Errors
    /// As [`crate::Client::read_blocks`].
    pub fn read_blocks(&self, first: u64, count: u64) -> Result<Vec<u8>, Error> {
        block_on(self.0.read_blocks(first, count))
    }

    /// Writes whole blocks from block `first` of a block namespace.
    ///
    /// # Errors
    /// As [`crate::Client::write_blocks`].
    pub fn write_blocks(&self, first: u64, data: &[u8]) -> Result<(), Error> {
        block_on(self.0.write_blocks(first, data))
    }

    /// The async client of the same connections.
    pub fn as_async(&self) -> &Client {
        &self.0
    }
}
