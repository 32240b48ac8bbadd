//! The conformance suite of engines: random sequential and concurrent operations, and reopenings, against a model.
//!
//! In: an [`EngineFixture`], which formats and opens one engine, and a list of [`Operation`]s or a seed. Out: a panic with
//! the step or the seed at which engine and model differ. The tests of each engine call these functions.
//!
//! Values identify the operation that wrote them ([`value_of`]), which detects values that were never stored, mixtures of
//! two values, and values of another key.

use crate::linearizability::{Call, CallHistory, CallResult, Observed};
use crate::{DeleteOutcome, Engine, FormatConfig, OpenConfig, PutMode, PutOutcome, Volume};
use octokv_base::{Buffer, BufferPool, Key, Prng, RecordLayout};
use octokv_device::Device;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fmt;
use std::future::Future;
use std::marker::PhantomData;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};

/// One engine under test: how it is formatted and opened.
pub trait EngineFixture {
    /// The engine.
    type Engine: Engine + 'static;
    /// Creates an empty store on the device.
    fn format(&self, device: Rc<dyn Device>) -> impl Future<Output = ()>;
    /// Whether the engine's statistics have the exact number of keys.
    const COUNTS_KEYS: bool = true;
    /// Opens the store on the device, also after a crash.
    fn open(&self, device: Rc<dyn Device>) -> impl Future<Output = Result<Self::Engine, String>>;
}

/// A volume of one device as a fixture, opened with a handle on core 0.
pub struct VolumeFixture<V> {
    /// The configuration of its format.
    pub format: FormatConfig,
    /// How it is opened.
    pub open: OpenConfig,
    /// Buffer memory of an opening, in bytes.
    pub pool_bytes: usize,
    volume: PhantomData<V>,
}

impl<V> VolumeFixture<V> {
    /// With 64 MiB of buffers.
    pub fn new(format: FormatConfig, open: OpenConfig) -> VolumeFixture<V> {
        VolumeFixture { format, open, pool_bytes: 64 << 20, volume: PhantomData }
    }
}

impl<V: Volume> EngineFixture for VolumeFixture<V> {
    type Engine = V::Engine;

    async fn format(&self, device: Rc<dyn Device>) {
        V::format(&[device], &self.format).await.expect("formats");
    }

    async fn open(&self, device: Rc<dyn Device>) -> Result<V::Engine, String> {
        let (pool, devices) = (BufferPool::new(self.pool_bytes), [device]);
        let volume = V::open(&devices, &pool, self.open.clone(), &self.format).await;
        Ok(volume.map_err(|error| error.to_string())?.engine(0, &devices, pool))
    }
}

/// Runs futures concurrently, one poll at a time, in a random order. A future is polled only after it was woken, so a
/// lost wake-up shows as a deadlock.
#[derive(Default)]
pub struct TaskSet {
    tasks: Vec<Task>,
}

struct Task {
    future: Pin<Box<dyn Future<Output = ()>>>,
    is_woken: Arc<WokenFlag>,
}

struct WokenFlag(AtomicBool);

impl Wake for WokenFlag {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::SeqCst);
    }
}

impl TaskSet {
    /// Adds a future.
    pub fn add(&mut self, future: impl Future<Output = ()> + 'static) {
        self.tasks
            .push(Task { future: Box::pin(future), is_woken: Arc::new(WokenFlag(AtomicBool::new(true))) });
    }

    /// The number of unfinished futures.
    pub fn len(&self) -> usize {
        self.tasks.len()
    }

    /// Whether all futures have finished.
    pub fn is_empty(&self) -> bool {
        self.tasks.is_empty()
    }

    /// Polls one woken future. False if none is woken.
    pub fn step(&mut self, random: &mut Prng) -> bool {
        let woken = |at: &usize| self.tasks[*at].is_woken.0.load(Ordering::SeqCst);
        let ready: Vec<usize> = (0..self.tasks.len()).filter(woken).collect();
        if ready.is_empty() {
            return false;
        }
        let at = ready[random.below(ready.len() as u64) as usize];
        let Task { future, is_woken: woken } = &mut self.tasks[at];
        woken.0.store(false, Ordering::SeqCst);
        let waker = Waker::from(Arc::clone(woken));
        if future.as_mut().poll(&mut Context::from_waker(&waker)) == Poll::Ready(()) {
            drop(self.tasks.swap_remove(at));
        }
        true
    }

    /// Runs all futures to completion. `advance_io` makes progress outside them, and gives whether there was any.
    ///
    /// # Panics
    /// If no future is woken and `advance_io` makes no progress.
    pub fn run(&mut self, random: &mut Prng, mut advance_io: impl FnMut(&mut Prng) -> bool) {
        while !self.tasks.is_empty() {
            let io_first = random.one_in(2) && advance_io(random);
            let progressed = io_first || self.step(random) || advance_io(random);
            assert!(progressed, "deadlock: {} operations and no I/O in flight", self.tasks.len());
        }
    }
}

/// The `index`-th key of a set: short ones, and every seventh longer than a standard command carries.
pub fn key_of(index: u64) -> Key {
    let text = match index % 7 {
        6 => format!("{index:04}-{}", "long".repeat(1 + index as usize % 60)),
        _ => format!("key{index}"),
    };
    Key::new(text.as_bytes()).expect("within the limit")
}

/// The value that operation `operation` stores under `key`: every byte depends on both.
pub fn value_of(key: &Key, operation: u64, bytes: usize) -> Vec<u8> {
    let mut value = vec![0; bytes];
    let mixed = |seed: u64, &byte: &u8| octokv_base::prng::mix64(seed ^ u64::from(byte));
    let seed = key.as_bytes().iter().fold(operation, mixed);
    Prng::new(seed).fill(&mut value);
    if let Some(front) = value.get_mut(..8) {
        front.copy_from_slice(&operation.to_le_bytes());
    }
    value
}

/// The operation that stored this value under `key`.
///
/// # Panics
/// If no operation can have stored it.
pub fn operation_of(key: &Key, value: &[u8]) -> u64 {
    let front: [u8; 8] = value.get(..8).and_then(|front| front.try_into().ok()).expect("a value of ours");
    let operation = u64::from_le_bytes(front);
    assert!(value == value_of(key, operation, value.len()), "a value of {key} that was never stored");
    operation
}

/// The record buffer of a put, with the value at its offset.
pub fn record_of(layout: RecordLayout, key: &Key, value: &[u8]) -> Buffer {
    let offset = layout.value_offset(key.len());
    let mut buffer = Buffer::zeroed(offset + value.len());
    buffer[offset..].copy_from_slice(value);
    buffer
}

/// A random length of at least 8 bytes, from a mixture of small, medium and large.
pub fn random_length(random: &mut Prng, bytes_max: u64) -> usize {
    let bound = [64, 600, 5_000, bytes_max][random.below(4) as usize].min(bytes_max);
    8 + random.below(bound - 7) as usize
}

/// One operation of [`run_operations`]. Keys are numbers of [`key_of`].
#[derive(Clone, Copy)]
pub enum Operation {
    /// Stores a value of this length under the key.
    Put {
        /// The key.
        key: u64,
        /// Its condition.
        mode: PutMode,
        /// The value's length.
        bytes: usize,
    },
    /// Reads the key.
    Get(u64),
    /// Deletes the key.
    Delete(u64),
    /// Looks for the key.
    Exist(u64),
    /// Lists all keys, up to `limit` keys from the one at position `start` (counted round), and all from an unknown key.
    List {
        /// The position.
        start: usize,
        /// At least 1.
        limit: usize,
    },
    /// Shuts the store down, cleanly or not, and opens it again.
    Reopen {
        /// Whether it is closed before.
        clean: bool,
    },
}

/// One line, also in a failing list.
impl fmt::Debug for Operation {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Operation::Put { key, mode, bytes } => write!(f, "put key {key}, {bytes} bytes, {mode:?}"),
            Operation::Get(key) => write!(f, "get key {key}"),
            Operation::Delete(key) => write!(f, "delete key {key}"),
            Operation::Exist(key) => write!(f, "exist key {key}"),
            Operation::List { start, limit } => write!(f, "list {limit} from position {start}"),
            Operation::Reopen { clean } => {
                write!(f, "reopen, {}", if *clean { "closed" } else { "not closed" })
            }
        }
    }
}

impl Operation {
    /// A random one on few keys.
    pub fn random(random: &mut Prng) -> Operation {
        let key = random.below(60);
        match random.below(20) {
            0..8 => {
                let mode = [PutMode::Upsert, PutMode::AddOnly, PutMode::UpdateOnly][random.below(3) as usize];
                Operation::Put { key, mode, bytes: random_length(random, 9_000) }
            }
            8..12 => Operation::Get(key),
            12..15 => Operation::Delete(key),
            15..18 => Operation::Exist(key),
            18 => Operation::List { start: key as usize, limit: 1 + random.below(5) as usize },
            _ => Operation::Reopen { clean: random.one_in(2) },
        }
    }
}

/// [`run_operations`] with the random operations of a seed.
///
/// # Panics
/// If an outcome differs.
pub fn sequential<S: EngineFixture>(
    fixture: &S,
    device: &Rc<dyn Device>,
    seed: u64,
    steps: usize,
    idle: IdleHook,
) {
    let mut random = Prng::new(seed);
    let operations: Vec<Operation> = (0..steps).map(|_| Operation::random(&mut random)).collect();
    run_operations(fixture, device, &operations, idle);
}

/// Runs operations one after the other on a new store; each outcome is compared with a map.
///
/// # Panics
/// If an outcome differs.
pub fn run_operations<S: EngineFixture>(
    fixture: &S,
    device: &Rc<dyn Device>,
    operations: &[Operation],
    idle: IdleHook,
) {
    let mut model: BTreeMap<Key, Vec<u8>> = BTreeMap::new();
    block_on(fixture.format(Rc::clone(device)), idle);
    let mut engine = block_on(fixture.open(Rc::clone(device)), idle).expect("opens after format");
    for (step, operation) in operations.iter().enumerate() {
        match *operation {
            Operation::Put { key, mode, bytes } => {
                let key = key_of(key);
                let value = value_of(&key, step as u64, bytes);
                let put =
                    engine.put(&key, mode, record_of(engine.record_layout(), &key, &value), value.len());
                let want = match (mode, model.contains_key(&key)) {
                    (PutMode::AddOnly, true) => PutOutcome::Exists,
                    (PutMode::UpdateOnly, false) => PutOutcome::NotFound,
                    _ => PutOutcome::Stored,
                };
                assert_eq!(block_on(put, idle), Ok(want), "step {step}: {operation:?}");
                if want == PutOutcome::Stored {
                    model.insert(key, value);
                }
            }
            Operation::Get(key) => {
                let key = key_of(key);
                let found = block_on(engine.get(&key), idle).expect("no fault");
                let found = found.map(|value| value.as_bytes().to_vec());
                assert!(found.as_ref() == model.get(&key), "step {step}: {operation:?}: another value");
            }
            Operation::Delete(key) => {
                let key = key_of(key);
                let want = match model.remove(&key) {
                    Some(_) => DeleteOutcome::Deleted,
                    None => DeleteOutcome::NotFound,
                };
                assert_eq!(block_on(engine.delete(&key), idle), Ok(want), "step {step}: {operation:?}");
            }
            Operation::Exist(key) => {
                let key = key_of(key);
                let bytes = block_on(engine.exist(&key), idle).expect("no fault");
                assert_eq!(bytes, model.get(&key).map(Vec::len), "step {step}: {operation:?}");
            }
            Operation::List { start, limit } => assert_list_matches(&engine, &model, start, limit, idle),
            Operation::Reopen { clean } => {
                if clean {
                    block_on(engine.close(), idle).expect("closes");
                }
                drop(engine);
                engine = block_on(fixture.open(Rc::clone(device)), idle).expect("opens again");
                let keys = engine.statistics().keys;
                let is_right = keys == model.len() as u64 || !S::COUNTS_KEYS;
                assert!(is_right, "step {step}: {operation:?}: {keys} keys instead of {}", model.len());
            }
        }
    }
}

/// Called while a future waits, to make progress outside the engine.
pub type IdleHook<'a> = &'a RefCell<dyn FnMut() + 'a>;

fn block_on<T>(future: impl Future<Output = T>, idle: IdleHook) -> T {
    octokv_runtime::block_on(future, || (idle.borrow_mut())())
}

/// A full listing has each key once; a listing from a key begins with it and has the same order.
fn assert_list_matches(
    engine: &impl Engine,
    model: &BTreeMap<Key, Vec<u8>>,
    start: usize,
    limit: usize,
    idle: IdleHook,
) {
    let list = |start: &Key, limit: usize| {
        let mut keys = Vec::new();
        let mut sink = |key: &[u8]| {
            let has_space = keys.len() < limit;
            if has_space {
                keys.push(Key::new(key).expect("within the limit"));
            }
            has_space
        };
        block_on(engine.list(start, &mut sink), idle).expect("no fault");
        keys
    };
    let empty = Key::new(&[]).expect("short");
    let all = list(&empty, usize::MAX);
    let mut sorted = all.clone();
    sorted.sort();
    assert_eq!(sorted, model.keys().cloned().collect::<Vec<_>>(), "a full listing");
    if !all.is_empty() {
        let at = start % all.len();
        let end = (at + limit).min(all.len());
        assert_eq!(list(&all[at], limit), all[at..end], "{limit} keys from position {at}");
    }
    let absent = Key::new(b"never stored").expect("short");
    let after = list(&absent, usize::MAX);
    assert_eq!(after[..], all[all.len() - after.len()..], "an unknown start begins at the next key");
}

/// Crowds of operations on few keys at once; what each saw must have one order that explains it.
pub fn concurrent<E: Engine + 'static>(
    engines: &[Rc<E>],
    seed: u64,
    operations: u64,
    advance_io: impl FnMut(&mut Prng) -> bool,
) {
    let mut random = Prng::new(seed);
    let history = Rc::new(RefCell::new(CallHistory::default()));
    let mut tasks = TaskSet::default();
    let mut advance_io = advance_io;
    for operation in 1..=operations {
        let engine = Rc::clone(&engines[random.below(engines.len() as u64) as usize]);
        let key = key_of(random.below(5));
        let length = random_length(&mut random, 6_000);
        tasks.add(run_call(engine, Rc::clone(&history), key, operation, length, random.below(6)));
        while tasks.len() >= 8 {
            if !advance_io(&mut random) || random.one_in(3) {
                tasks.step(&mut random);
            }
        }
    }
    tasks.run(&mut random, advance_io);
    if let Err(violation) = history.borrow().check() {
        panic!("seed {seed}: {violation}");
    }
}

async fn run_call<E: Engine>(
    engine: Rc<E>,
    history: Rc<RefCell<CallHistory>>,
    key: Key,
    operation: u64,
    length: usize,
    kind: u64,
) {
    let call = |call: Call| history.borrow_mut().begin(key.clone(), call);
    let end = |id, outcome| history.borrow_mut().end(id, outcome);
    match kind {
        0 | 1 => {
            let value = value_of(&key, operation, length);
            let id = call(Call::Put { operation, bytes: length as u32, mode: PutMode::Upsert });
            let put = engine
                .put(&key, PutMode::Upsert, record_of(engine.record_layout(), &key, &value), length)
                .await;
            assert_eq!(put, Ok(PutOutcome::Stored));
            end(id, CallResult::Acknowledged);
        }
        2 => {
            let id = call(Call::Delete);
            let outcome = match engine.delete(&key).await.expect("no fault") {
                DeleteOutcome::Deleted => CallResult::Acknowledged,
                DeleteOutcome::NotFound => CallResult::ConditionFailed,
                DeleteOutcome::NotNewer(version) => panic!("{key}: version {version}, of a key without one"),
            };
            end(id, outcome);
        }
        _ => {
            let id = call(Call::Get);
            let found = engine.get(&key).await.expect("no fault");
            let seen = found.map(|value| Observed::Value(operation_of(&key, value.as_bytes())));
            end(id, CallResult::Observed(seen.unwrap_or(Observed::Absent)));
        }
    }
}
