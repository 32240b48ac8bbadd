//! One request on a Key Value namespace, carried out by an engine: the operation's words into the engine's and back.
//!
//! In: an operation whose key, lengths and buffers the target has checked. Out: exactly one outcome.
//! Faults of the world are logged here, once, with key and device; the host gets a status.

use crate::fair_yield::{Pace, Place};
use octokv_base::{Buffer, Key, Nanos, Pool};
use octokv_engine::{Delete, Engine, Fault, Hint, KeySink, Put, PutMode};
use octokv_nvmf::{Operation, Outcome, StoreMode};
use octokv_runtime::Handle;
use octokv_wire::kv::ListWriter;
use std::rc::Rc;

/// How long a read waits for a buffer before the host is told that the node is busy.
const BUFFER_WAIT: Nanos = Nanos::from_millis(500);
const BUFFER_RETRY: Nanos = Nanos::from_micros(200);
/// The longest key of the standard commands, in bytes.
const STANDARD_KEY_BYTES: usize = octokv_wire::kv::KEY_BYTES_MAX;

/// What performing needs of its core.
pub struct Performer<E> {
    /// The core's handle on the store.
    pub engine: E,
    /// The core's buffers.
    pub pool: Pool,
    /// The core's time.
    pub handle: Handle,
    /// What the device is called in messages.
    pub device: Rc<str>,
    /// Listings, which may be long, take turns.
    pub listings: Pace,
}

/// A buffer of a core, waited for where there is none at once.
pub(crate) async fn take_buffer(pool: &Pool, handle: &Handle, bytes: usize) -> Option<Buffer> {
    let give_up = handle.now() + BUFFER_WAIT;
    loop {
        match pool.take(bytes) {
            None if handle.now() < give_up => handle.sleep(BUFFER_RETRY).await,
            taken => return taken,
        }
    }
}

/// Where the keys of one listing go.
struct Listing<'a> {
    writer: ListWriter<'a>,
    long_keys: bool,
    place: Place<'a>,
    handle: &'a Handle,
}

impl KeySink for Listing<'_> {
    fn offer(&mut self, key: &[u8]) -> bool {
        // A standard command has no way to name a longer key.
        (!self.long_keys && key.len() > STANDARD_KEY_BYTES) || self.writer.push(key)
    }

    async fn turn(&mut self) {
        self.place.turn(self.handle).await;
    }
}

impl<E: Engine> Performer<E> {
    /// Carries an operation out.
    pub async fn perform(&self, operation: Operation) -> Outcome {
        match operation {
            Operation::Store { key, mode, record, value_bytes } => {
                let mode = match mode {
                    StoreMode::Upsert => PutMode::Upsert,
                    StoreMode::AddOnly => PutMode::AddOnly,
                    StoreMode::UpdateOnly => PutMode::UpdateOnly,
                };
                match self.engine.put(&key, mode, record, value_bytes as usize).await {
                    Ok(Put::Stored) => Outcome::Stored,
                    Ok(Put::Exists) => Outcome::AlreadyExists,
                    Ok(Put::NotFound) => Outcome::NotFound,
                    Ok(Put::Full) => Outcome::CapacityExceeded,
                    Ok(Put::TooLong) => Outcome::InvalidValueSize,
                    Err(fault) => self.failed("store", &key, fault),
                }
            }
            Operation::Retrieve { key, .. } => self.retrieve(&key).await,
            Operation::Delete { key } => match self.engine.delete(&key).await {
                Ok(Delete::Deleted) => Outcome::Deleted,
                Ok(Delete::NotFound) => Outcome::NotFound,
                Err(fault) => self.failed("delete", &key, fault),
            },
            Operation::Exist { key } => match self.engine.exist(&key).await {
                Ok(Some(bytes)) => Outcome::Exists { value_bytes: bytes as u32 },
                Ok(None) => Outcome::NotFound,
                Err(fault) => self.failed("exist", &key, fault),
            },
            Operation::List { start, limit_bytes, long_keys } => {
                // In memory of its own: a task has room for the largest of its futures, and is moved into its place.
                Box::pin(self.list(&start, limit_bytes as usize, long_keys)).await
            }
            Operation::Flush => match self.engine.flush().await {
                Ok(()) => Outcome::Flushed,
                Err(fault) => self.failed("flush", &Key::new(&[]).expect("short"), fault),
            },
            Operation::Read { .. }
            | Operation::Write { .. }
            | Operation::Compare { .. }
            | Operation::WriteZeroes { .. }
            | Operation::Deallocate { .. }
            | Operation::Verify { .. } => {
                unreachable!("the target dispatches on the namespace's command set")
            }
        }
    }

    /// Says that an operation comes soon.
    pub fn expect(&self, operation: &Operation, hint: Hint) {
        if let Operation::Store { key, .. }
        | Operation::Retrieve { key, .. }
        | Operation::Delete { key }
        | Operation::Exist { key } = operation
        {
            self.engine.expect(key, hint);
        }
    }

    async fn retrieve(&self, key: &Key) -> Outcome {
        let give_up = self.handle.now() + BUFFER_WAIT;
        loop {
            match self.engine.get(key).await {
                Ok(Some(value)) => {
                    let (offset, bytes) = (value.offset, value.bytes);
                    return Outcome::Value { buffer: value.buffer, offset, bytes };
                }
                Ok(None) => return Outcome::NotFound,
                Err(Fault::NoMemory) if self.handle.now() < give_up => {
                    self.handle.sleep(BUFFER_RETRY).await;
                }
                Err(fault) => return self.failed("retrieve", key, fault),
            }
        }
    }

    async fn list(&self, start: &Key, limit_bytes: usize, long_keys: bool) -> Outcome {
        let Some(mut buffer) = self.pool.take(limit_bytes) else { return Outcome::Busy };
        let Some(writer) = ListWriter::new(&mut buffer) else { return Outcome::InvalidValueSize };
        let place = self.listings.enter();
        let mut sink = Listing { writer, long_keys, place, handle: &self.handle };
        match self.engine.list(start, &mut sink).await {
            Ok(()) => {
                let bytes = sink.writer.bytes();
                drop(sink);
                Outcome::Listing { buffer, bytes }
            }
            Err(fault) => self.failed("list", start, fault),
        }
    }

    fn failed(&self, command: &'static str, key: &Key, fault: Fault) -> Outcome {
        if fault == Fault::NoMemory {
            tracing::info!(command, %key, "out of buffers: the host is told to try again");
            return Outcome::Busy;
        }
        tracing::error!(command, %key, device = &*self.device, %fault, "command failed");
        Outcome::Unrecovered
    }
}
