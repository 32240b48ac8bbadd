//! Executes commands of groups at once, on the engine in memory; leaves some to the long way, at random.

use super::*;
use octokv_base::{DataRef, Received};
use octokv_nvmf::{DirectBackend, DirectOperation, DirectStage, LbaRange};
use octokv_wire::send_buffer::ResponseData;

/// See the module header.
pub struct DirectMemory<'a> {
    pub engine: &'a mut MemoryEngine,
    pub target: &'a Target,
    /// Whether nothing has to schedule the commands.
    pub is_open: bool,
    /// Operations so far; their number decides which way the next one takes.
    pub operations: &'a mut u64,
    /// Of the group.
    pub namespace: NamespaceId,
    /// All loans of the connection.
    pub loans: &'a mut Vec<Vec<u8>>,
    /// Commands that were completed at once.
    pub at_once: &'a mut u64,
}

impl DirectMemory<'_> {
    /// Executes an operation, unless it is the turn of the long way.
    fn execute_some(&mut self, operation: RequestOperation) -> Option<RequestOutcome> {
        *self.operations += 1;
        let waits = self.operations.is_multiple_of(7);
        (!waits).then(|| self.engine.execute(self.target, self.namespace, operation))
    }
}

/// Gives data to a connection, and holds what it asks for.
pub fn give(data: DataRef<'_>, loans: &mut Vec<Vec<u8>>, mut receive: impl FnMut(DataRef<'_>) -> Received) {
    if let Received::Lent(bytes) = receive(data) {
        assert!(matches!(data, DataRef::Borrowed(_)), "a shared buffer need not be lent");
        loans.push(data.as_bytes()[..bytes].to_vec());
    }
}

/// The bytes of a response.
pub fn resolve<'a>(loans: &'a [Vec<u8>], data: &'a ResponseData) -> &'a [u8] {
    match data {
        ResponseData::Kept(buffer) => buffer,
        ResponseData::Lent(loan, _) => &loans[*loan as usize],
    }
}

/// The operation as the long way has it.
pub fn request_operation(key: &[u8], operation: DirectOperation<'_>) -> RequestOperation {
    let key = Key::new(key).unwrap();
    match operation {
        DirectOperation::Store { mode, value } => {
            let from = RECORD_LAYOUT.value_offset(key.len());
            let mut record = Buffer::zeroed(from + value.len());
            record[from..].copy_from_slice(value);
            RequestOperation::Store { key, mode, record, value_bytes: value.len() as u32 }
        }
        DirectOperation::Delete => RequestOperation::Delete { key },
        DirectOperation::Exist => RequestOperation::Exist { key },
    }
}

impl DirectBackend for DirectMemory<'_> {
    type Lookup = Option<DirectStage>;

    fn is_open(&self) -> bool {
        self.is_open
    }
    fn select(&mut self, namespace: NamespaceId) -> bool {
        self.namespace = namespace;
        true
    }
    fn begin_lookup(&mut self, key: &[u8]) -> Option<Self::Lookup> {
        (!key.len().is_multiple_of(5)).then_some(None)
    }
    fn advance_lookups(&mut self, lookups: &mut [Self::Lookup], stage: DirectStage) {
        for lookup in lookups {
            assert_eq!(stage == DirectStage::Records, lookup.is_some(), "each stage once, in order");
            *lookup = Some(stage);
        }
    }
    fn prefetch_blocks(&mut self, _: LbaRange) -> bool {
        true
    }
    fn begin_execution(&mut self) {}
    fn retrieve(
        &mut self,
        key: &[u8],
        _: &Self::Lookup,
        receive: impl FnMut(DataRef<'_>) -> Received,
    ) -> Option<bool> {
        let operation = RequestOperation::Retrieve { key: Key::new(key).unwrap(), limit_bytes: u32::MAX };
        match self.execute_some(operation)? {
            RequestOutcome::Value { buffer, offset, bytes } => {
                give(DataRef::Borrowed(&buffer[offset..offset + bytes]), self.loans, receive);
                Some(true)
            }
            RequestOutcome::NotFound => Some(false),
            other => panic!("{other:?}"),
        }
    }
    fn execute(
        &mut self,
        key: &[u8],
        _: &Self::Lookup,
        operation: DirectOperation<'_>,
    ) -> Option<RequestOutcome> {
        self.execute_some(request_operation(key, operation))
    }
    fn read_blocks(&mut self, range: LbaRange, receive: impl FnMut(DataRef<'_>) -> Received) -> Option<()> {
        match self.execute_some(RequestOperation::Read { range })? {
            RequestOutcome::Blocks { buffer } => {
                give(DataRef::Borrowed(&buffer), self.loans, receive);
                Some(())
            }
            other => panic!("{other:?}"),
        }
    }
    fn end_execution(&mut self, commands: usize, _: u64) {
        *self.at_once += commands as u64;
    }
}
