//! Executes commands of groups at once, on the engine in memory; leaves some to the long way, at random.

use super::*;
use octokv_nvmf::{DirectBackend, DirectOperation, DirectStage, LbaRange, ReceiveData};

/// See the module header.
pub struct DirectMemory<'a> {
    pub engine: &'a mut MemoryEngine,
    pub target: &'a Target,
    /// Whether nothing has to schedule the commands.
    pub is_open: bool,
    /// Operations so far; their number decides which way the next one takes.
    pub operations: &'a mut u64,
    /// Commands that were completed at once.
    pub at_once: &'a mut u64,
}

impl DirectMemory<'_> {
    /// Executes an operation, unless it is the turn of the long way.
    fn execute_some(
        &mut self,
        namespace: NamespaceId,
        operation: RequestOperation,
    ) -> Option<RequestOutcome> {
        *self.operations += 1;
        let waits = self.operations.is_multiple_of(7);
        (!waits).then(|| self.engine.execute(self.target, namespace, operation))
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
    fn serves(&mut self, _: NamespaceId) -> bool {
        true
    }
    fn begin_lookup(&mut self, _: NamespaceId, key: &[u8]) -> Option<Self::Lookup> {
        (!key.len().is_multiple_of(5)).then_some(None)
    }
    fn advance_lookup(&mut self, _: NamespaceId, lookup: &mut Self::Lookup, stage: DirectStage) {
        assert_eq!(stage == DirectStage::Records, lookup.is_some(), "each stage once, in order");
        *lookup = Some(stage);
    }
    fn prefetch_blocks(&mut self, _: NamespaceId, _: LbaRange) -> bool {
        true
    }
    fn begin_execution(&mut self) {}
    fn retrieve(
        &mut self,
        namespace: NamespaceId,
        key: &[u8],
        _: &Self::Lookup,
        receive: &mut ReceiveData<'_>,
    ) -> Option<bool> {
        let operation = RequestOperation::Retrieve { key: Key::new(key).unwrap(), limit_bytes: u32::MAX };
        match self.execute_some(namespace, operation)? {
            RequestOutcome::Value { buffer, offset, bytes } => {
                receive(octokv_base::DataRef::Borrowed(&buffer[offset..offset + bytes])).then_some(true)
            }
            RequestOutcome::NotFound => Some(false),
            other => panic!("{other:?}"),
        }
    }
    fn execute(
        &mut self,
        namespace: NamespaceId,
        key: &[u8],
        _: &Self::Lookup,
        operation: DirectOperation<'_>,
    ) -> Option<RequestOutcome> {
        self.execute_some(namespace, request_operation(key, operation))
    }
    fn read_blocks(
        &mut self,
        namespace: NamespaceId,
        range: LbaRange,
        receive: &mut ReceiveData<'_>,
    ) -> Option<()> {
        match self.execute_some(namespace, RequestOperation::Read { range })? {
            RequestOutcome::Blocks { buffer } => {
                receive(octokv_base::DataRef::Borrowed(&buffer)).then_some(())
            }
            other => panic!("{other:?}"),
        }
    }
    fn end_execution(&mut self, commands: usize, _: u64) {
        *self.at_once += commands as u64;
    }
}
