//! The replicated state of an etcd cluster: the store and the leases, changed by requests one after the other.
//!
//! In: requests in the order of the log. Out: responses, equal on every member. Time is not part of the state: the
//! leader alone decides when a lease ends and enters a [`EtcdRequest::LeaseRevoke`] into the log.
//!
//! Invariant: the keys of a lease are the present keys whose value names it. A request that fails changes nothing.

use super::store::{MvccStore, MvccTransaction};
use octokv_cluster::etcd::{
    Compare, CompareResult, CompareTarget, DeleteRequest, EtcdError, EtcdRequest, EtcdResponse, KeyRange,
    KeyValue, LEASE_TTL_MAX_S, LeaseId, PutRequest, RangeEnd, RangeRequest, ResponseBody, Revision,
    TXN_OPERATIONS_MAX, TxnOperation, TxnRequest,
};
use std::collections::{BTreeMap, BTreeSet};

/// A lease without its deadline.
#[derive(Clone, Debug, Default)]
pub struct LeaseState {
    /// Its time to live, in seconds.
    pub ttl_s: i64,
    /// Its keys.
    pub keys: BTreeSet<Vec<u8>>,
}

/// The store and the leases.
#[derive(Clone, Debug)]
pub struct EtcdState {
    store: MvccStore,
    leases: BTreeMap<LeaseId, LeaseState>,
    lease_ttl_min_s: i64,
}

impl EtcdState {
    /// An empty state. Leases live for at least `lease_ttl_min_s` seconds.
    pub fn new(keeps_tombstones: bool, lease_ttl_min_s: i64) -> EtcdState {
        EtcdState { store: MvccStore::new(keeps_tombstones), leases: BTreeMap::new(), lease_ttl_min_s }
    }

    /// The store.
    pub fn store(&self) -> &MvccStore {
        &self.store
    }

    /// The leases.
    pub fn leases(&self) -> &BTreeMap<LeaseId, LeaseState> {
        &self.leases
    }

    /// Reads keys.
    ///
    /// # Errors
    /// If the start of the range is empty, or the revision is in the future or compacted.
    pub fn read(&self, request: &RangeRequest) -> Result<EtcdResponse, EtcdError> {
        check_key(&request.range.start)?;
        Ok(EtcdResponse { body: self.store.range(request)?, revision: self.store.revision() })
    }

    /// Executes a request of the log.
    ///
    /// # Errors
    /// As the request's in etcd's API; nothing has changed.
    ///
    /// # Panics
    /// If the request is not one of the log: a keep-alive or a read of a lease's remaining time.
    pub fn apply(&mut self, request: &EtcdRequest) -> Result<EtcdResponse, EtcdError> {
        let body = match request {
            EtcdRequest::Range(range) => return self.read(range),
            EtcdRequest::Put(put) => {
                self.check_put(put)?;
                self.execute(|transaction, leases| put_body(transaction, leases, put))
            }
            EtcdRequest::Delete(delete) => {
                check_key(&delete.range.start)?;
                self.execute(|transaction, leases| delete_body(transaction, leases, delete))
            }
            EtcdRequest::Txn(txn) => self.apply_txn(txn)?,
            EtcdRequest::LeaseGrant { lease, ttl_s } => self.grant(*lease, *ttl_s)?,
            EtcdRequest::LeaseRevoke { lease } => self.revoke(*lease)?,
            EtcdRequest::Compact { revision } => {
                self.store.compact(*revision)?;
                ResponseBody::Compacted
            }
            EtcdRequest::LeaseKeepAlive { .. } | EtcdRequest::LeaseTimeToLive { .. } => {
                panic!("{request:?} does not enter the log")
            }
        };
        Ok(EtcdResponse { revision: self.store.revision(), body })
    }

    fn execute<T>(
        &mut self,
        run: impl FnOnce(&mut MvccTransaction<'_>, &mut BTreeMap<LeaseId, LeaseState>) -> T,
    ) -> T {
        let mut transaction = self.store.begin();
        let value = run(&mut transaction, &mut self.leases);
        transaction.commit();
        value
    }

    fn check_put(&self, put: &PutRequest) -> Result<(), EtcdError> {
        check_key(&put.key)?;
        match put.lease == LeaseId::NONE || self.leases.contains_key(&put.lease) {
            true => Ok(()),
            false => Err(EtcdError::LeaseNotFound),
        }
    }

    fn grant(&mut self, lease: LeaseId, ttl_s: i64) -> Result<ResponseBody, EtcdError> {
        if ttl_s > LEASE_TTL_MAX_S {
            return Err(EtcdError::LeaseTtlTooLarge);
        }
        if self.leases.contains_key(&lease) {
            return Err(EtcdError::LeaseExists);
        }
        let ttl_s = ttl_s.max(self.lease_ttl_min_s);
        self.leases.insert(lease, LeaseState { ttl_s, keys: BTreeSet::new() });
        Ok(ResponseBody::Lease { lease, ttl_s })
    }

    fn revoke(&mut self, lease: LeaseId) -> Result<ResponseBody, EtcdError> {
        let ended = self.leases.remove(&lease).ok_or(EtcdError::LeaseNotFound)?;
        self.execute(|transaction, _| {
            for key in ended.keys {
                transaction.delete(&DeleteRequest { range: KeyRange::key(key), with_previous: false });
            }
        });
        Ok(ResponseBody::Revoked)
    }

    fn apply_txn(&mut self, txn: &TxnRequest) -> Result<ResponseBody, EtcdError> {
        check_txn(txn)?;
        let revision = self.store.revision();
        let succeeded = txn.compare.iter().all(|compare| holds(&self.store, compare, revision));
        let branch = if succeeded { &txn.success } else { &txn.failure };
        for operation in branch {
            if let TxnOperation::Put(put) = operation {
                self.check_put(put)?;
            }
        }
        for operation in branch {
            if let TxnOperation::Range(range) = operation {
                self.store.check_revision(range.revision)?;
            }
        }
        let bodies = self.execute(|transaction, leases| {
            let mut bodies = Vec::with_capacity(branch.len());
            for operation in branch {
                bodies.push(match operation {
                    TxnOperation::Range(range) => transaction.range(range),
                    TxnOperation::Put(put) => put_body(transaction, leases, put),
                    TxnOperation::Delete(delete) => delete_body(transaction, leases, delete),
                });
            }
            bodies
        });
        Ok(ResponseBody::Txn { succeeded, bodies })
    }
}

fn check_key(key: &[u8]) -> Result<(), EtcdError> {
    if key.is_empty() { Err(EtcdError::EmptyKey) } else { Ok(()) }
}

fn put_body(
    transaction: &mut MvccTransaction<'_>,
    leases: &mut BTreeMap<LeaseId, LeaseState>,
    put: &PutRequest,
) -> ResponseBody {
    detach(leases, transaction.lease_of(&put.key), &put.key);
    if let Some(lease) = leases.get_mut(&put.lease) {
        lease.keys.insert(put.key.clone());
    }
    let previous = transaction.put(put);
    ResponseBody::Put { previous: previous.filter(|_| put.with_previous) }
}

fn delete_body(
    transaction: &mut MvccTransaction<'_>,
    leases: &mut BTreeMap<LeaseId, LeaseState>,
    delete: &DeleteRequest,
) -> ResponseBody {
    let deleted = transaction.delete(delete);
    for kv in &deleted {
        detach(leases, kv.lease, &kv.key);
    }
    let count = deleted.len() as u64;
    ResponseBody::Deleted { count, previous: if delete.with_previous { deleted } else { Vec::new() } }
}

fn detach(leases: &mut BTreeMap<LeaseId, LeaseState>, lease: LeaseId, key: &[u8]) {
    if let Some(lease) = leases.get_mut(&lease) {
        lease.keys.remove(key);
    }
}

fn check_txn(txn: &TxnRequest) -> Result<(), EtcdError> {
    let most = txn.compare.len().max(txn.success.len()).max(txn.failure.len());
    if most > TXN_OPERATIONS_MAX {
        return Err(EtcdError::TooManyOperations);
    }
    for compare in &txn.compare {
        check_key(&compare.range.start)?;
    }
    for operation in txn.success.iter().chain(&txn.failure) {
        check_key(match operation {
            TxnOperation::Range(range) => &range.range.start,
            TxnOperation::Put(put) => &put.key,
            TxnOperation::Delete(delete) => &delete.range.start,
        })?;
    }
    check_duplicates(&txn.success)?;
    check_duplicates(&txn.failure)
}

/// No key may be put twice, or put and deleted. etcd does not check deletions without an end.
fn check_duplicates(branch: &[TxnOperation]) -> Result<(), EtcdError> {
    let mut put_keys = BTreeSet::new();
    for operation in branch {
        if let TxnOperation::Put(put) = operation
            && !put_keys.insert(put.key.as_slice())
        {
            return Err(EtcdError::DuplicateKey);
        }
    }
    for operation in branch {
        if let TxnOperation::Delete(delete) = operation
            && delete.range.end != RangeEnd::Unbounded
            && put_keys.iter().any(|key| delete.range.contains(key))
        {
            return Err(EtcdError::DuplicateKey);
        }
    }
    Ok(())
}

/// Whether a condition holds for every key of its range.
fn holds(store: &MvccStore, compare: &Compare, revision: Revision) -> bool {
    let mut values = store.values(&compare.range, revision).peekable();
    if values.peek().is_none() {
        let has_value = matches!(compare.target, CompareTarget::Value(_));
        return !has_value && holds_for(compare, &KeyValue::default());
    }
    values.all(|kv| holds_for(compare, kv))
}

fn holds_for(compare: &Compare, kv: &KeyValue) -> bool {
    let order = match &compare.target {
        CompareTarget::Version(version) => kv.version.cmp(version),
        CompareTarget::CreateRevision(revision) => kv.create_revision.cmp(revision),
        CompareTarget::ModRevision(revision) => kv.mod_revision.cmp(revision),
        CompareTarget::Value(value) => kv.value.cmp(value),
        CompareTarget::Lease(lease) => kv.lease.cmp(lease),
    };
    match compare.result {
        CompareResult::Equal => order.is_eq(),
        CompareResult::NotEqual => order.is_ne(),
        CompareResult::Greater => order.is_gt(),
        CompareResult::Less => order.is_lt(),
    }
}
