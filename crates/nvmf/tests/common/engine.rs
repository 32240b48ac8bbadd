//! An in-memory engine: values in one sorted map, blocks in another.

use super::*;
use octokv_base::Lba;
use octokv_nvmf::{IteratorHandle, IteratorRequest, LbaRange};
use octokv_wire::iterator::{PairListWriter, buffer_bytes_for};
use std::sync::Mutex;

/// An iterator: a copy of what it yields, in its direction.
struct TestIterator {
    pairs: Vec<(Key, Vec<u8>)>,
    reverse: bool,
    next: Mutex<usize>,
}

/// The contents of all namespaces.
#[derive(Default)]
pub struct MemoryEngine {
    pub values: BTreeMap<(u32, Key), Vec<u8>>,
    /// Blocks that are not all zeros.
    pub blocks: BTreeMap<(u32, u64), Vec<u8>>,
    /// Whether the last write of blocks forced unit access.
    pub forced_unit_access: Option<bool>,
}

impl MemoryEngine {
    /// Executes a request on the current namespaces, and checks the guarantees of the target.
    pub fn execute(
        &mut self,
        target: &Target,
        namespace: NamespaceId,
        operation: RequestOperation,
    ) -> RequestOutcome {
        self.execute_on(target.namespaces().get(namespace), namespace, operation)
    }

    /// Executes a request on a namespace as of the request's submission.
    pub fn execute_on(
        &mut self,
        info: Option<&NamespaceInfo>,
        namespace: NamespaceId,
        operation: RequestOperation,
    ) -> RequestOutcome {
        let Some(info) = info else { return RequestOutcome::NotReady };
        match (info.kind, operation) {
            (_, RequestOperation::Flush) => RequestOutcome::Flushed,
            (NamespaceKind::KeyValue { .. }, operation) => self.on_keys(namespace, operation),
            (NamespaceKind::Block { block_bytes }, operation) => {
                let blocks = info.size_bytes / u64::from(block_bytes);
                self.on_blocks(namespace, block_bytes as usize, blocks, operation)
            }
        }
    }

    fn on_keys(&mut self, namespace: NamespaceId, operation: RequestOperation) -> RequestOutcome {
        let values = &mut self.values;
        match operation {
            RequestOperation::Store { key, mode, record, value_bytes } => {
                let from = RECORD_LAYOUT.value_offset(key.len());
                assert_eq!(record.len(), from + value_bytes as usize);
                let location = (namespace.0, key);
                match mode {
                    StoreMode::AddOnly if values.contains_key(&location) => RequestOutcome::AlreadyExists,
                    StoreMode::UpdateOnly if !values.contains_key(&location) => RequestOutcome::NotFound,
                    StoreMode::Upsert | StoreMode::AddOnly | StoreMode::UpdateOnly => {
                        values.insert(location, record[from..].to_vec());
                        RequestOutcome::Stored
                    }
                }
            }
            RequestOperation::Retrieve { key, .. } => match values.get(&(namespace.0, key)) {
                Some(value) => {
                    let mut buffer = Buffer::zeroed(value.len() + 64);
                    buffer[64..].copy_from_slice(value);
                    RequestOutcome::Value { buffer: buffer.into(), offset: 64, bytes: value.len() }
                }
                None => RequestOutcome::NotFound,
            },
            RequestOperation::Delete { key } => match values.remove(&(namespace.0, key)) {
                Some(_) => RequestOutcome::Deleted,
                None => RequestOutcome::NotFound,
            },
            RequestOperation::Exist { key } => match values.get(&(namespace.0, key)) {
                Some(value) => RequestOutcome::Exists { value_bytes: value.len() as u32 },
                None => RequestOutcome::NotFound,
            },
            RequestOperation::List { start, limit_bytes, long_keys } => {
                let mut buffer = Buffer::zeroed(limit_bytes as usize);
                let mut list = kv::KeyListWriter::new(&mut buffer).unwrap();
                for (at, key) in values.range((namespace.0, start)..).map(|(location, _)| location) {
                    let fits = long_keys || key.len() <= 16;
                    if *at != namespace.0 || (fits && !list.push(key.as_bytes())) {
                        break;
                    }
                }
                let bytes = list.used_bytes();
                RequestOutcome::Listing { buffer, bytes }
            }
            RequestOperation::CreateIterator(request) => {
                let IteratorRequest { lower, upper, reverse, keys_only } = *request;
                let is_within = |key: &Key| *key >= lower && (upper.is_empty() || *key < upper);
                let of_namespace =
                    values.iter().filter(|((at, key), _)| *at == namespace.0 && is_within(key));
                let mut pairs: Vec<_> = of_namespace
                    .map(|((_, key), value)| {
                        (key.clone(), if keys_only { Vec::new() } else { value.clone() })
                    })
                    .collect();
                if reverse {
                    pairs.reverse();
                }
                let iterator = TestIterator { pairs, reverse, next: Mutex::new(0) };
                RequestOutcome::IteratorCreated(IteratorHandle(Arc::new(iterator)))
            }
            RequestOperation::SeekIterator { iterator, key } => {
                let iterator: &TestIterator = iterator.0.downcast_ref().expect("one of ours");
                let is_passed = |other: &Key| if iterator.reverse { *other > key } else { *other < key };
                *iterator.next.lock().unwrap() =
                    iterator.pairs.partition_point(|(other, _)| is_passed(other));
                RequestOutcome::Sought
            }
            RequestOperation::NextPairs { iterator, limit_bytes, pairs_max } => {
                let iterator: &TestIterator = iterator.0.downcast_ref().expect("one of ours");
                let mut next = iterator.next.lock().unwrap();
                let mut buffer = Buffer::zeroed(limit_bytes as usize);
                let mut list = PairListWriter::new(&mut buffer, pairs_max).unwrap();
                for (key, value) in &iterator.pairs[*next..] {
                    if !list.has_space(key.len(), value.len()) {
                        break;
                    }
                    list.push(key.as_bytes(), value);
                }
                let count = list.count();
                *next += count as usize;
                let is_end = *next == iterator.pairs.len();
                if let Some((key, value)) = iterator.pairs.get(*next).filter(|_| count == 0) {
                    let buffer_bytes = buffer_bytes_for(key.len(), value.len()) as u32;
                    return RequestOutcome::PairTooLarge { buffer_bytes };
                }
                let bytes = list.finish(is_end);
                RequestOutcome::Pairs { buffer, bytes, count, is_end }
            }
            other => unreachable!("not a Key Value operation: {other:?}"),
        }
    }

    fn on_blocks(
        &mut self,
        namespace: NamespaceId,
        block_bytes: usize,
        blocks: u64,
        operation: RequestOperation,
    ) -> RequestOutcome {
        let exists = |lba: Lba, count: u64| {
            assert!(count > 0 && lba.0 + count <= blocks, "{lba:?} and {count} more of {blocks} blocks");
        };
        match operation {
            RequestOperation::Read { range } => {
                exists(range.lba, range.blocks.into());
                RequestOutcome::Blocks { buffer: self.read(namespace, range, block_bytes) }
            }
            RequestOperation::Write { lba, data, force_unit_access } => {
                assert!(data.len().is_multiple_of(block_bytes));
                exists(lba, (data.len() / block_bytes) as u64);
                for (at, block) in (lba.0..).zip(data.chunks_exact(block_bytes)) {
                    self.blocks.insert((namespace.0, at), block.to_vec());
                }
                self.forced_unit_access = Some(force_unit_access);
                RequestOutcome::Written
            }
            RequestOperation::Compare { lba, data } => {
                assert!(data.len().is_multiple_of(block_bytes));
                let range = LbaRange { lba, blocks: (data.len() / block_bytes) as u32 };
                exists(lba, range.blocks.into());
                match self.read(namespace, range, block_bytes)[..] == data[..] {
                    true => RequestOutcome::Verified,
                    false => RequestOutcome::Mismatch,
                }
            }
            RequestOperation::WriteZeroes { range, force_unit_access, .. } => {
                self.forced_unit_access = Some(force_unit_access);
                exists(range.lba, range.blocks.into());
                self.zero(namespace, range)
            }
            RequestOperation::Deallocate { ranges } => {
                assert!(!ranges.is_empty());
                for range in ranges {
                    exists(range.lba, range.blocks.into());
                    self.zero(namespace, range);
                }
                RequestOutcome::Written
            }
            RequestOperation::Verify { range } => {
                exists(range.lba, range.blocks.into());
                RequestOutcome::Verified
            }
            other => unreachable!("not a block operation: {other:?}"),
        }
    }

    fn read(&self, namespace: NamespaceId, range: LbaRange, block_bytes: usize) -> Buffer {
        let mut buffer = Buffer::zeroed(range.blocks as usize * block_bytes);
        let (first, end) = (range.lba.0, range.lba.0 + u64::from(range.blocks));
        for ((_, lba), block) in self.blocks.range((namespace.0, first)..(namespace.0, end)) {
            // A namespace that reuses an identifier may have another block size.
            let at = (lba - first) as usize * block_bytes;
            let bytes = block.len().min(block_bytes);
            buffer[at..at + bytes].copy_from_slice(&block[..bytes]);
        }
        buffer
    }

    fn zero(&mut self, namespace: NamespaceId, range: LbaRange) -> RequestOutcome {
        let (first, end) = (range.lba.0, range.lba.0 + u64::from(range.blocks));
        let existing: Vec<_> = self
            .blocks
            .range((namespace.0, first)..(namespace.0, end))
            .map(|(location, _)| *location)
            .collect();
        existing.iter().for_each(|location| drop(self.blocks.remove(location)));
        RequestOutcome::Written
    }
}
