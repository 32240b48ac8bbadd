//! The front door for threads: [`crate::Client`], waiting for each answer.

use crate::config::Settings;
use crate::controller_init::Facts;
use crate::error::Error;
use octokv_wire::kv::StoreMode;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;

/// A connected client of one namespace. Clones share its connections and may be used from any thread.
#[derive(Clone, Debug)]
pub struct Client(crate::Client);

struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// Runs a future on this thread, which sleeps while it waits.
fn wait<F: Future>(future: F) -> F::Output {
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

impl Client {
    /// As [`crate::Client::connect`].
    ///
    /// # Errors
    /// As there.
    pub fn connect(url: &str) -> Result<Client, Error> {
        wait(crate::Client::connect(url)).map(Client)
    }

    /// As [`crate::Client::connect_with`].
    ///
    /// # Errors
    /// As there.
    pub fn connect_with(url: &str, settings: Settings) -> Result<Client, Error> {
        wait(crate::Client::connect_with(url, settings)).map(Client)
    }

    /// What is known of the controller and its namespace.
    pub fn facts(&self) -> &Facts {
        self.0.facts()
    }

    /// Stores a value, whether there is one or not.
    ///
    /// # Errors
    /// As [`crate::Client::put`].
    pub fn put(&self, key: &[u8], value: &[u8]) -> Result<(), Error> {
        wait(self.0.put(key, value))
    }

    /// As [`crate::Client::put_with`].
    ///
    /// # Errors
    /// As there.
    pub fn put_with(&self, key: &[u8], value: &[u8], mode: StoreMode) -> Result<bool, Error> {
        wait(self.0.put_with(key, value, mode))
    }

    /// Reads a value.
    ///
    /// # Errors
    /// As [`crate::Client::get`].
    pub fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>, Error> {
        wait(self.0.get(key))
    }

    /// As [`crate::Client::delete`].
    ///
    /// # Errors
    /// As there.
    pub fn delete(&self, key: &[u8]) -> Result<bool, Error> {
        wait(self.0.delete(key))
    }

    /// The length of the value in bytes, if there is one.
    ///
    /// # Errors
    /// As [`crate::Client::exist`].
    pub fn exist(&self, key: &[u8]) -> Result<Option<u32>, Error> {
        wait(self.0.exist(key))
    }

    /// As [`crate::Client::list`].
    ///
    /// # Errors
    /// As there.
    pub fn list(&self, start: &[u8], limit: usize) -> Result<Vec<Vec<u8>>, Error> {
        wait(self.0.list(start, limit))
    }

    /// As [`crate::Client::flush`].
    ///
    /// # Errors
    /// As there.
    pub fn flush(&self) -> Result<(), Error> {
        wait(self.0.flush())
    }

    /// As [`crate::Client::read_blocks`].
    ///
    /// # Errors
    /// As there.
    pub fn read_blocks(&self, first: u64, count: u64) -> Result<Vec<u8>, Error> {
        wait(self.0.read_blocks(first, count))
    }

    /// As [`crate::Client::write_blocks`].
    ///
    /// # Errors
    /// As there.
    pub fn write_blocks(&self, first: u64, data: &[u8]) -> Result<(), Error> {
        wait(self.0.write_blocks(first, data))
    }

    /// The async client inside.
    pub fn as_async(&self) -> &crate::Client {
        &self.0
    }
}
