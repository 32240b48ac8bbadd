//! Executes commands of a connection at once, on the backends of its core: the short way of a request.
//!
//! In: the commands of one connection, in groups. Out: the outcome of each, or `None` if it takes the long way.
//!
//! Processor time is accounted per group: parsing to the stage target, execution and replies to the stage kv. The requests of
//! a group count as started, executed and completed when it ends.

use super::accounting::GroupAccounting;
use crate::bug_injection::{self, InjectedBug};
use crate::kv_backend::{put_mode, put_outcome};
use crate::loans::Loans;
use crate::namespace_table::{NamespaceBackend, NamespaceTable};
use octokv_base::{DataRef, NamespaceId, Received};
use octokv_engine::{DeleteOutcome, Engine, FoundNow, KeyLookup, LookupStage};
use octokv_nvmf::{DirectBackend, DirectOperation, DirectStage, LbaRange, RequestOutcome};
use std::rc::Rc;

/// See the module header.
pub(super) struct DirectExecutor<'a, E> {
    namespaces: &'a NamespaceTable<E>,
    accounting: GroupAccounting<'a>,
    is_open: bool,
    /// What responses of the connection are sent from.
    loans: Loans,
    /// The backend of the group.
    backend: Option<(NamespaceId, Rc<NamespaceBackend<E>>)>,
}

impl<'a, E: Engine> DirectExecutor<'a, E> {
    /// For one connection and its loans; `is_open` if nothing has to schedule its requests.
    pub fn new(
        namespaces: &'a NamespaceTable<E>,
        accounting: GroupAccounting<'a>,
        is_open: bool,
        loans: Loans,
    ) -> DirectExecutor<'a, E> {
        DirectExecutor { namespaces, accounting, is_open, loans, backend: None }
    }

    /// What responses of the connection are sent from, now.
    pub fn into_loans(self) -> Loans {
        self.loans
    }

    #[inline]
    fn backend(&self) -> Option<&NamespaceBackend<E>> {
        self.backend.as_ref().map(|(_, backend)| &**backend)
    }

    #[inline]
    fn engine(&self) -> Option<&E> {
        match self.backend()? {
            NamespaceBackend::Kv(kv_backend) => Some(&kv_backend.engine),
            NamespaceBackend::Block(_) => None,
        }
    }
}

impl<E: Engine> DirectBackend for DirectExecutor<'_, E> {
    type Lookup = KeyLookup;

    #[inline]
    fn is_open(&self) -> bool {
        self.is_open
    }

    #[inline]
    fn select(&mut self, namespace: NamespaceId) -> bool {
        if self.backend.as_ref().is_none_or(|(id, _)| *id != namespace) {
            self.backend = self.namespaces.get(namespace).map(|backend| (namespace, backend));
        }
        match self.backend() {
            Some(NamespaceBackend::Kv(kv_backend)) => kv_backend.engine.may_end_at_once(),
            Some(NamespaceBackend::Block(block_backend)) => block_backend.is_in_memory(),
            None => false,
        }
    }

    #[inline]
    fn begin_lookup(&mut self, key: &[u8]) -> Option<KeyLookup> {
        self.engine()?.begin_lookup(key)
    }

    #[inline]
    fn advance_lookups(&mut self, lookups: &mut [KeyLookup], stage: DirectStage) {
        let Some(engine) = self.engine() else { return };
        let stage = match stage {
            DirectStage::Entries => LookupStage::Entry,
            DirectStage::Records => LookupStage::Record,
        };
        lookups.iter_mut().for_each(|lookup| engine.advance_lookup(lookup, stage));
    }

    fn prefetch_blocks(&mut self, range: LbaRange) -> bool {
        match self.backend() {
            Some(NamespaceBackend::Block(block_backend)) => block_backend.prefetch_in_place(range),
            Some(NamespaceBackend::Kv(_)) | None => false,
        }
    }

    fn begin_execution(&mut self) {
        self.accounting.begin_group();
    }

    #[inline]
    fn retrieve(
        &mut self,
        key: &[u8],
        lookup: &KeyLookup,
        receive: impl FnMut(DataRef<'_>) -> Received,
    ) -> Option<bool> {
        match self.engine()?.get_now(key, lookup, receive)? {
            FoundNow::Missing => return Some(false),
            FoundNow::Taken => {}
            FoundNow::Lent(bytes) => self.loans.push(bytes),
        }
        Some(true)
    }

    #[inline]
    fn execute(
        &mut self,
        key: &[u8],
        lookup: &KeyLookup,
        operation: DirectOperation<'_>,
    ) -> Option<RequestOutcome> {
        let engine = self.engine()?;
        let outcome = Some(match operation {
            DirectOperation::Store { mode, value } => {
                put_outcome(engine.put_now(key, lookup, put_mode(mode), value)?)
            }
            DirectOperation::Delete => match engine.delete_now(key, lookup)? {
                DeleteOutcome::Deleted => RequestOutcome::Deleted,
                DeleteOutcome::NotFound => RequestOutcome::NotFound,
                DeleteOutcome::NotNewer(_) => unreachable!("a standard command carries no version"),
            },
            DirectOperation::Exist => match engine.exist_now(key, lookup)? {
                Some(bytes) => RequestOutcome::Exists { value_bytes: bytes as u32 },
                None => RequestOutcome::NotFound,
            },
        });
        outcome.filter(|_| !bug_injection::is_injected(InjectedBug::ExecuteTwice))
    }

    #[inline]
    fn read_blocks(&mut self, range: LbaRange, receive: impl FnMut(DataRef<'_>) -> Received) -> Option<()> {
        let held = match self.backend()? {
            NamespaceBackend::Block(block_backend) => block_backend.read_in_place(range, receive)?,
            NamespaceBackend::Kv(_) => return None,
        };
        if let Some(bytes) = held {
            self.loans.push(bytes);
        }
        Some(())
    }

    fn end_execution(&mut self, commands: usize, bytes: u64) {
        self.accounting.end_group(commands, bytes);
    }
}
