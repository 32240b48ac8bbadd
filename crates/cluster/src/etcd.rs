//! Requests, responses, watches and errors of etcd's v3 API, as far as membership needs them.
//!
//! The contract is etcd's (API reference and API guarantees of v3.4): every change of the store gives it the next
//! revision; all changes of a transaction or of a lease's end share one. A key keeps the revisions of its creation and
//! last change and counts its changes since the creation. Past revisions can be read and watched until compaction.
//! Not included: sort orders, nested transactions, authentication, and the administration of the etcd cluster itself.

/// A revision of the whole store. An empty store has revision 1; 0 stands for none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Revision(pub u64);

impl Revision {
    /// The revision after this one.
    pub const fn next(self) -> Revision {
        Revision(self.0 + 1)
    }

    /// The revision before this one; 0 stays 0.
    pub const fn previous(self) -> Revision {
        Revision(self.0.saturating_sub(1))
    }
}

/// Identifies a lease, chosen by the client. 0 stands for none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LeaseId(pub i64);

impl LeaseId {
    /// No lease.
    pub const NONE: LeaseId = LeaseId(0);
}

/// A key with its value at one revision.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct KeyValue {
    /// The key.
    pub key: Vec<u8>,
    /// The revision that created the key.
    pub create_revision: Revision,
    /// The revision of its last change.
    pub mod_revision: Revision,
    /// The number of puts since its creation, the creation included.
    pub version: u64,
    /// The value.
    pub value: Vec<u8>,
    /// The lease whose end deletes the key.
    pub lease: LeaseId,
}

/// The end of a [`KeyRange`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RangeEnd {
    /// The range is its start alone.
    Single,
    /// The range ends before this key.
    Before(Vec<u8>),
    /// The range has no end.
    Unbounded,
}

/// A range of keys in the order of their bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyRange {
    /// The first key.
    pub start: Vec<u8>,
    /// The end.
    pub end: RangeEnd,
}

impl KeyRange {
    /// One key.
    pub fn key(key: impl Into<Vec<u8>>) -> KeyRange {
        KeyRange { start: key.into(), end: RangeEnd::Single }
    }

    /// All keys with this prefix.
    pub fn prefix(prefix: impl Into<Vec<u8>>) -> KeyRange {
        let start: Vec<u8> = prefix.into();
        let mut end = start.clone();
        // The smallest key above all with the prefix: its last byte below 255, incremented.
        while end.last() == Some(&u8::MAX) {
            end.pop();
        }
        let end = match end.last_mut() {
            Some(last) => {
                *last += 1;
                RangeEnd::Before(end)
            }
            None => RangeEnd::Unbounded,
        };
        KeyRange { start: if start.is_empty() { vec![0] } else { start }, end }
    }

    /// All keys.
    pub fn all() -> KeyRange {
        KeyRange { start: vec![0], end: RangeEnd::Unbounded }
    }

    /// Whether the range contains a key.
    pub fn contains(&self, key: &[u8]) -> bool {
        match &self.end {
            RangeEnd::Single => self.start == key,
            RangeEnd::Before(end) => self.start.as_slice() <= key && key < end.as_slice(),
            RangeEnd::Unbounded => self.start.as_slice() <= key,
        }
    }
}

/// Reads keys.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RangeRequest {
    /// The keys.
    pub range: KeyRange,
    /// The revision to read at; `None` for the newest.
    pub revision: Option<Revision>,
    /// The maximum number of keys returned; 0 for no maximum.
    pub limit: u64,
    /// Whether the member may respond from its own, possibly stale, state. Otherwise the read is linearizable.
    pub serializable: bool,
    /// Whether values are left out.
    pub keys_only: bool,
    /// Whether only the number of keys is returned.
    pub count_only: bool,
}

impl RangeRequest {
    /// A linearizable read of the newest revision.
    pub fn new(range: KeyRange) -> RangeRequest {
        RangeRequest {
            range,
            revision: None,
            limit: 0,
            serializable: false,
            keys_only: false,
            count_only: false,
        }
    }
}

/// Stores a value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PutRequest {
    /// The key, not empty.
    pub key: Vec<u8>,
    /// The value.
    pub value: Vec<u8>,
    /// The lease whose end deletes the key; replaces the key's previous lease.
    pub lease: LeaseId,
    /// Whether the response has the previous value.
    pub with_previous: bool,
}

/// Deletes keys.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeleteRequest {
    /// The keys.
    pub range: KeyRange,
    /// Whether the response has the deleted values.
    pub with_previous: bool,
}

/// The attribute of a key that a [`Compare`] reads, and the value to compare it with. An absent key has the attributes
/// 0 and no value: a comparison of its value is false.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CompareTarget {
    /// The number of puts since its creation.
    Version(u64),
    /// The revision of its creation.
    CreateRevision(Revision),
    /// The revision of its last change.
    ModRevision(Revision),
    /// Its value.
    Value(Vec<u8>),
    /// Its lease.
    Lease(LeaseId),
}

/// The relation that a [`Compare`] requires, with the key's attribute on the left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CompareResult {
    /// They are equal.
    Equal,
    /// They differ.
    NotEqual,
    /// The key's is greater.
    Greater,
    /// The key's is less.
    Less,
}

/// A condition of a transaction, which must hold for every key of its range; an empty range is one absent key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Compare {
    /// The keys.
    pub range: KeyRange,
    /// The attribute and the value to compare it with.
    pub target: CompareTarget,
    /// The required relation.
    pub result: CompareResult,
}

/// An operation of a transaction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TxnOperation {
    /// A read, which sees the operations before it.
    Range(RangeRequest),
    /// A put.
    Put(PutRequest),
    /// A delete.
    Delete(DeleteRequest),
}

/// A transaction: one atomic change under one revision.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TxnRequest {
    /// The conditions.
    pub compare: Vec<Compare>,
    /// Executed if all conditions hold.
    pub success: Vec<TxnOperation>,
    /// Executed otherwise.
    pub failure: Vec<TxnOperation>,
}

/// The most conditions, and operations of each branch, of a transaction (etcd's default of `--max-txn-ops`).
pub const TXN_OPERATIONS_MAX: usize = 128;

/// The longest time to live of a lease, in seconds.
pub const LEASE_TTL_MAX_S: i64 = 9_000_000_000;

/// A request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EtcdRequest {
    /// Reads keys.
    Range(RangeRequest),
    /// Stores a value.
    Put(PutRequest),
    /// Deletes keys.
    Delete(DeleteRequest),
    /// Executes a transaction.
    Txn(TxnRequest),
    /// Creates a lease.
    LeaseGrant {
        /// Its identifier, not [`LeaseId::NONE`].
        lease: LeaseId,
        /// The requested time to live, in seconds; the store may grant more.
        ttl_s: i64,
    },
    /// Restarts the time to live of a lease.
    LeaseKeepAlive {
        /// The lease.
        lease: LeaseId,
    },
    /// Ends a lease and deletes its keys, under one revision.
    LeaseRevoke {
        /// The lease.
        lease: LeaseId,
    },
    /// Reads the remaining time and the keys of a lease.
    LeaseTimeToLive {
        /// The lease.
        lease: LeaseId,
    },
    /// Forgets all revisions before this one, except each key's newest value at it.
    Compact {
        /// The oldest revision that remains readable.
        revision: Revision,
    },
}

/// The response to a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EtcdResponse {
    /// The store's revision after the request.
    pub revision: Revision,
    /// What depends on the request.
    pub body: ResponseBody,
}

/// The part of a response that depends on the request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ResponseBody {
    /// Keys read.
    Range {
        /// The keys in their order, at most as many as the limit.
        kvs: Vec<KeyValue>,
        /// Whether the limit left keys out.
        more: bool,
        /// The number of keys in the range, whatever the limit.
        count: u64,
    },
    /// A value was stored.
    Put {
        /// The previous value, if requested and present.
        previous: Option<KeyValue>,
    },
    /// Keys were deleted.
    Deleted {
        /// How many.
        count: u64,
        /// The deleted values in the order of keys, if requested.
        previous: Vec<KeyValue>,
    },
    /// A transaction was executed.
    Txn {
        /// Whether all conditions held.
        succeeded: bool,
        /// The responses to the operations of the executed branch.
        bodies: Vec<ResponseBody>,
    },
    /// A lease was created, or its time to live restarted.
    Lease {
        /// The lease.
        lease: LeaseId,
        /// Its time to live, in seconds.
        ttl_s: i64,
    },
    /// A lease was ended.
    Revoked,
    /// The time to live of a lease; `None` if there is no such lease.
    TimeToLive(Option<LeaseTimeToLive>),
    /// The store was compacted.
    Compacted,
}

/// The remaining time and the keys of a lease.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeaseTimeToLive {
    /// Its time to live after a keep-alive, in seconds.
    pub granted_ttl_s: i64,
    /// The remaining time, in whole seconds, rounded down.
    pub remaining_s: i64,
    /// Its keys, in order.
    pub keys: Vec<Vec<u8>>,
}

/// A watch of keys.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WatchRequest {
    /// The keys.
    pub range: KeyRange,
    /// The first revision of interest; `None` for the next one.
    pub start_revision: Option<Revision>,
    /// Whether events have the previous value.
    pub with_previous: bool,
    /// Whether the store sends [`crate::WatchUpdate::Progress`] from time to time while nothing changes.
    pub progress_notify: bool,
}

/// A change of one key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WatchEvent {
    /// The change.
    pub change: KeyChange,
    /// The value before the change, if requested, present, and not compacted.
    pub previous: Option<KeyValue>,
}

/// How a key changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KeyChange {
    /// A value was stored.
    Put(KeyValue),
    /// The key was deleted, by a request or by the end of its lease.
    Delete {
        /// The key.
        key: Vec<u8>,
        /// The revision of the deletion.
        revision: Revision,
    },
}

impl KeyChange {
    /// The changed key.
    pub fn key(&self) -> &[u8] {
        match self {
            KeyChange::Put(kv) => &kv.key,
            KeyChange::Delete { key, .. } => key,
        }
    }

    /// The revision of the change.
    pub fn revision(&self) -> Revision {
        match self {
            KeyChange::Put(kv) => kv.mod_revision,
            KeyChange::Delete { revision, .. } => *revision,
        }
    }
}

/// Why a request failed or a watch ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EtcdError {
    /// The revision was compacted.
    #[error("the revision was compacted")]
    Compacted,
    /// The revision is newer than the store.
    #[error("the revision is in the future")]
    FutureRevision,
    /// The key is empty.
    #[error("the key is empty")]
    EmptyKey,
    /// Two operations of a transaction change one key.
    #[error("two operations of a transaction change one key")]
    DuplicateKey,
    /// A transaction has more than [`TXN_OPERATIONS_MAX`] conditions or operations.
    #[error("the transaction has too many operations")]
    TooManyOperations,
    /// The range of a watch contains no key.
    #[error("the watched range is empty")]
    EmptyRange,
    /// No such lease.
    #[error("no such lease")]
    LeaseNotFound,
    /// A lease with this identifier exists.
    #[error("the lease exists")]
    LeaseExists,
    /// The time to live exceeds [`LEASE_TTL_MAX_S`].
    #[error("the time to live of the lease is too large")]
    LeaseTtlTooLarge,
    /// The cluster has no leader. The request was not applied and will not be.
    #[error("the etcd cluster has no leader")]
    NoLeader,
    /// No response in time, or the connection was lost: whether the request was applied, or will be, is unknown.
    #[error("no response from etcd: the outcome is unknown")]
    Unknown,
}

impl EtcdError {
    /// Whether the request may have been applied, or may still be.
    pub fn has_unknown_outcome(self) -> bool {
        self == EtcdError::Unknown
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prefix_range_contains_exactly_the_keys_with_the_prefix() {
        let cases: &[(&[u8], &[u8], bool)] = &[
            (b"ab", b"ab", true),
            (b"ab", b"abc", true),
            (b"ab", b"ab\xff\xff", true),
            (b"ab", b"ac", false),
            (b"ab", b"a", false),
            (b"a\xff", b"a\xff\xff", true),
            (b"a\xff", b"b", false),
            (b"\xff", b"\xff\x01", true),
            (b"\xff", b"\xfe", false),
            (b"", b"a", true),
        ];
        for (prefix, key, contained) in cases {
            assert_eq!(KeyRange::prefix(*prefix).contains(key), *contained, "{prefix:?} {key:?}");
        }
    }
}
