//! The front door for threads: [`crate::BlockingClient`], waiting for each answer.

use crate::config::ClientConfig;
use crate::controller_info::ControllerInfo;
use crate::error::Error;
use octokv_wire::kv::StoreMode;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;

/// A connected client of one namespace. Clones share its connections and may be used from any thread.
#[derive(Clone, Debug)]
pub struct BlockingClient(crate::Client);

struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// Runs a future on this thread, which sleeps while it waits.
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

impl BlockingClient {
    /// As [`crate::BlockingClient::connect`].
    ///
    /// # Errors
    /// As there.
    pub fn connect(url: &str) -> Result<BlockingClient, Error> {
        block_on(crate::Client::connect(url)).map(BlockingClient)
    }

    /// As [`crate::BlockingClient::connect_with`].
    ///
    /// # Errors
    /// As there.
    pub fn connect_with(url: &str, config: ClientConfig) -> Result<BlockingClient, Error> {
        block_on(crate::Client::connect_with(url, config)).map(BlockingClient)
    }

    /// What is known of the controller and its namespace.
    pub fn controller_info(&self) -> &ControllerInfo {
        self.0.controller_info()
    }

    /// Stores a value, whether there is one or not.
    ///
    /// # Errors
    /// As [`crate::BlockingClient::put`].
    pub fn put(&self, key: &[u8], value: &[u8]) -> Result<(), Error> {
        block_on(self.0.put(key, value))
    }

    /// As [`crate::BlockingClient::put_with`].
    ///
    /// # Errors
    /// As there.
    pub fn put_with(&self, key: &[u8], value: &[u8], mode: StoreMode) -> Result<bool, Error> {
        block_on(self.0.put_with(key, value, mode))
    }

    /// Reads a value.
    ///
    /// # Errors
    /// As [`crate::BlockingClient::get`].
    pub fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>, Error> {
        block_on(self.0.get(key))
    }

    /// As [`crate::BlockingClient::delete`].
    ///
    /// # Errors
    /// As there.
    pub fn delete(&self, key: &[u8]) -> Result<bool, Error> {
        block_on(self.0.delete(key))
    }

    /// The length of the value in bytes, if there is one.
    ///
    /// # Errors
    /// As [`crate::BlockingClient::exist`].
    pub fn exist(&self, key: &[u8]) -> Result<Option<u32>, Error> {
        block_on(self.0.exist(key))
    }

    /// As [`crate::BlockingClient::list`].
    ///
    /// # Errors
    /// As there.
    pub fn list(&self, start: &[u8], limit: usize) -> Result<Vec<Vec<u8>>, Error> {
        block_on(self.0.list(start, limit))
    }

    /// As [`crate::BlockingClient::flush`].
    ///
    /// # Errors
    /// As there.
    pub fn flush(&self) -> Result<(), Error> {
        block_on(self.0.flush())
    }

    /// As [`crate::BlockingClient::read_blocks`].
    ///
    /// # Errors
    /// As there.
    pub fn read_blocks(&self, first: u64, count: u64) -> Result<Vec<u8>, Error> {
        block_on(self.0.read_blocks(first, count))
    }

    /// As [`crate::BlockingClient::write_blocks`].
    ///
    /// # Errors
    /// As there.
    pub fn write_blocks(&self, first: u64, data: &[u8]) -> Result<(), Error> {
        block_on(self.0.write_blocks(first, data))
    }

    /// The async client inside.
    pub fn as_async(&self) -> &crate::Client {
        &self.0
    }
}
