//! The double of etcd against a naive reference, which keeps every change and computes each response from all of them.

use crate::etcd_script::{DoubleClient, Step, steps};
use octokv_base::Nanos;
use octokv_cluster::WatchUpdate;
use octokv_cluster::etcd::{
    Compare, CompareResult, CompareTarget, EtcdError, EtcdRequest, EtcdResponse, KeyChange, KeyRange,
    KeyValue, LEASE_TTL_MAX_S, LeaseId, LeaseTimeToLive, PutRequest, RangeEnd, RangeRequest, ResponseBody,
    Revision, TxnOperation, TxnRequest, WatchEvent, WatchRequest,
};
use octokv_sim::etcd::EtcdConfig;
use proptest::prelude::*;
use proptest::test_runner::RngSeed;
use std::collections::{BTreeMap, BTreeSet};

const CHECK_MS: u64 = 500;

/// Every change since the beginning, and what does not follow from them.
struct Reference {
    changes: Vec<KeyChange>,
    revision: u64,
    compacted: u64,
    keeps_tombstones: bool,
    /// Time to live in seconds and deadline in milliseconds.
    leases: BTreeMap<LeaseId, (i64, u64)>,
    now_ms: u64,
}

impl Reference {
    /// All keys at a revision.
    fn state(&self, revision: u64) -> BTreeMap<Vec<u8>, KeyValue> {
        let mut state = BTreeMap::new();
        for change in self.changes.iter().filter(|change| change.revision().0 <= revision) {
            match change {
                KeyChange::Put(kv) => drop(state.insert(kv.key.clone(), kv.clone())),
                KeyChange::Delete { key, .. } => drop(state.remove(key)),
            }
        }
        state
    }

    fn values(&self, range: &KeyRange, revision: u64) -> Vec<KeyValue> {
        self.state(revision).into_values().filter(|kv| range.contains(&kv.key)).collect()
    }

    fn range(&self, request: &RangeRequest, newest: u64) -> ResponseBody {
        let mut kvs = self.values(&request.range, request.revision.map_or(newest, |revision| revision.0));
        let count = kvs.len() as u64;
        if request.limit > 0 {
            kvs.truncate(request.limit as usize);
        }
        if request.keys_only {
            kvs.iter_mut().for_each(|kv| kv.value.clear());
        }
        match request.count_only {
            true => ResponseBody::Range { kvs: Vec::new(), more: false, count },
            false => ResponseBody::Range { more: (kvs.len() as u64) < count, kvs, count },
        }
    }

    fn check_readable(&self, revision: Option<Revision>) -> Result<(), EtcdError> {
        match revision {
            Some(Revision(revision)) if revision > self.revision => Err(EtcdError::FutureRevision),
            Some(Revision(revision)) if revision < self.compacted => Err(EtcdError::Compacted),
            _ => Ok(()),
        }
    }

    fn put(&mut self, put: &PutRequest) -> ResponseBody {
        let revision = Revision(self.revision + 1);
        let previous = self.state(revision.0).remove(&put.key);
        self.changes.push(KeyChange::Put(KeyValue {
            key: put.key.clone(),
            create_revision: previous.as_ref().map_or(revision, |kv| kv.create_revision),
            mod_revision: revision,
            version: previous.as_ref().map_or(1, |kv| kv.version + 1),
            value: put.value.clone(),
            lease: put.lease,
        }));
        ResponseBody::Put { previous: previous.filter(|_| put.with_previous) }
    }

    fn delete(&mut self, range: &KeyRange, with_previous: bool) -> ResponseBody {
        let revision = Revision(self.revision + 1);
        let deleted = self.values(range, revision.0);
        let changes = deleted.iter().map(|kv| KeyChange::Delete { key: kv.key.clone(), revision });
        self.changes.extend(changes);
        let count = deleted.len() as u64;
        ResponseBody::Deleted { count, previous: if with_previous { deleted } else { Vec::new() } }
    }

    /// Ends a change: its revision is the store's if it changed anything.
    fn commit(&mut self) {
        self.revision = self.changes.iter().map(|change| change.revision().0).fold(self.revision, u64::max);
    }

    fn lease_keys(&self, lease: LeaseId) -> Vec<Vec<u8>> {
        self.state(self.revision).into_values().filter(|kv| kv.lease == lease).map(|kv| kv.key).collect()
    }

    fn revoke(&mut self, lease: LeaseId) -> Result<ResponseBody, EtcdError> {
        if !self.leases.contains_key(&lease) {
            return Err(EtcdError::LeaseNotFound);
        }
        for key in self.lease_keys(lease) {
            self.delete(&KeyRange::key(key), false);
        }
        self.leases.remove(&lease);
        self.commit();
        Ok(ResponseBody::Revoked)
    }

    fn check_put(&self, put: &PutRequest) -> Result<(), EtcdError> {
        match put.lease == LeaseId::NONE || self.leases.contains_key(&put.lease) {
            true => Ok(()),
            false => Err(EtcdError::LeaseNotFound),
        }
    }

    fn holds(&self, compare: &Compare) -> bool {
        let mut values = self.values(&compare.range, self.revision);
        if values.is_empty() {
            if matches!(compare.target, CompareTarget::Value(_)) {
                return false;
            }
            values.push(KeyValue::default());
        }
        values.iter().all(|kv| {
            let (equal, less) = match &compare.target {
                CompareTarget::Version(version) => (kv.version == *version, kv.version < *version),
                CompareTarget::CreateRevision(revision) => {
                    (kv.create_revision == *revision, kv.create_revision < *revision)
                }
                CompareTarget::ModRevision(revision) => {
                    (kv.mod_revision == *revision, kv.mod_revision < *revision)
                }
                CompareTarget::Value(value) => (kv.value == *value, kv.value < *value),
                CompareTarget::Lease(lease) => (kv.lease == *lease, kv.lease < *lease),
            };
            match compare.result {
                CompareResult::Equal => equal,
                CompareResult::NotEqual => !equal,
                CompareResult::Less => less,
                CompareResult::Greater => !less && !equal,
            }
        })
    }

    fn txn(&mut self, txn: &TxnRequest) -> Result<ResponseBody, EtcdError> {
        for branch in [&txn.success, &txn.failure] {
            let mut puts = BTreeSet::new();
            for operation in branch {
                if let TxnOperation::Put(put) = operation
                    && !puts.insert(put.key.clone())
                {
                    return Err(EtcdError::DuplicateKey);
                }
            }
            let deletes_put = branch.iter().any(|operation| match operation {
                TxnOperation::Delete(delete) if delete.range.end != RangeEnd::Unbounded => {
                    puts.iter().any(|key| delete.range.contains(key))
                }
                _ => false,
            });
            if deletes_put {
                return Err(EtcdError::DuplicateKey);
            }
        }
        let succeeded = txn.compare.iter().all(|compare| self.holds(compare));
        let branch = if succeeded { &txn.success } else { &txn.failure };
        for operation in branch {
            if let TxnOperation::Put(put) = operation {
                self.check_put(put)?;
            }
        }
        for operation in branch {
            if let TxnOperation::Range(range) = operation {
                self.check_readable(range.revision)?;
            }
        }
        let mut bodies = Vec::new();
        for operation in branch {
            bodies.push(match operation {
                TxnOperation::Range(range) => self.range(range, self.revision + 1),
                TxnOperation::Put(put) => self.put(put),
                TxnOperation::Delete(delete) => self.delete(&delete.range, delete.with_previous),
            });
        }
        self.commit();
        Ok(ResponseBody::Txn { succeeded, bodies })
    }

    fn has_empty_key(request: &EtcdRequest) -> bool {
        let is_empty = |operation: &TxnOperation| match operation {
            TxnOperation::Range(range) => range.range.start.is_empty(),
            TxnOperation::Put(put) => put.key.is_empty(),
            TxnOperation::Delete(delete) => delete.range.start.is_empty(),
        };
        match request {
            EtcdRequest::Range(range) => range.range.start.is_empty(),
            EtcdRequest::Put(put) => put.key.is_empty(),
            EtcdRequest::Delete(delete) => delete.range.start.is_empty(),
            EtcdRequest::Txn(txn) => {
                txn.compare.iter().any(|compare| compare.range.start.is_empty())
                    || txn.success.iter().chain(&txn.failure).any(is_empty)
            }
            _ => false,
        }
    }

    fn request(&mut self, request: &EtcdRequest) -> Result<EtcdResponse, EtcdError> {
        if Self::has_empty_key(request) {
            return Err(EtcdError::EmptyKey);
        }
        let body = match request {
            EtcdRequest::Range(range) => {
                self.check_readable(range.revision)?;
                self.range(range, self.revision)
            }
            EtcdRequest::Put(put) => {
                self.check_put(put)?;
                self.put(put)
            }
            EtcdRequest::Delete(delete) => self.delete(&delete.range, delete.with_previous),
            EtcdRequest::Txn(txn) => self.txn(txn)?,
            EtcdRequest::LeaseRevoke { lease } => self.revoke(*lease)?,
            EtcdRequest::LeaseGrant { lease, ttl_s } => {
                if *ttl_s > LEASE_TTL_MAX_S {
                    return Err(EtcdError::LeaseTtlTooLarge);
                }
                if self.leases.contains_key(lease) {
                    return Err(EtcdError::LeaseExists);
                }
                let ttl_s = (*ttl_s).max(2);
                self.leases.insert(*lease, (ttl_s, self.now_ms + 1_000 * ttl_s as u64));
                ResponseBody::Lease { lease: *lease, ttl_s }
            }
            EtcdRequest::LeaseKeepAlive { lease } => {
                let now_ms = self.now_ms;
                let (ttl_s, deadline) = self.leases.get_mut(lease).ok_or(EtcdError::LeaseNotFound)?;
                if *deadline <= now_ms {
                    return Err(EtcdError::LeaseNotFound);
                }
                *deadline = now_ms + 1_000 * *ttl_s as u64;
                ResponseBody::Lease { lease: *lease, ttl_s: *ttl_s }
            }
            EtcdRequest::LeaseTimeToLive { lease } => {
                let found = self.leases.get(lease).map(|(ttl_s, deadline)| LeaseTimeToLive {
                    granted_ttl_s: *ttl_s,
                    remaining_s: (deadline.saturating_sub(self.now_ms) / 1_000) as i64,
                    keys: self.lease_keys(*lease),
                });
                ResponseBody::TimeToLive(found)
            }
            EtcdRequest::Compact { revision } => {
                if revision.0 <= self.compacted {
                    return Err(EtcdError::Compacted);
                }
                if revision.0 > self.revision {
                    return Err(EtcdError::FutureRevision);
                }
                self.compacted = revision.0;
                ResponseBody::Compacted
            }
        };
        self.commit();
        Ok(EtcdResponse { revision: Revision(self.revision), body })
    }

    /// Lets time pass; ends leases at the checks.
    fn wait(&mut self, ms: u64) {
        for _ in 0..ms {
            self.now_ms += 1;
            if self.now_ms.is_multiple_of(CHECK_MS) {
                let now_ms = self.now_ms;
                let mut expired: Vec<_> = self.leases.iter().map(|(id, (_, end))| (*end, *id)).collect();
                expired.retain(|(end, _)| *end <= now_ms);
                expired.sort_unstable();
                for (_, lease) in expired {
                    self.revoke(lease).unwrap();
                }
            }
        }
    }

    /// The events that a watch gets from a revision on.
    fn events(&self, watch: &WatchRequest, from: u64) -> Vec<WatchEvent> {
        let is_replaced = |change: &KeyChange| {
            let of_key =
                |other: &&KeyChange| (other.key(), other.revision()) == (change.key(), change.revision());
            self.changes.iter().rfind(of_key) != Some(change)
        };
        let is_sent = |change: &&KeyChange| {
            let is_tombstone = matches!(change, KeyChange::Delete { .. });
            let is_forgotten = change.revision().0 == self.compacted
                && (is_replaced(change) || is_tombstone && !self.keeps_tombstones);
            change.revision().0 >= from && watch.range.contains(change.key()) && !is_forgotten
        };
        let event = |change: &KeyChange| {
            let before = change.revision().0 - 1;
            let is_creation = matches!(change, KeyChange::Put(kv) if kv.version == 1);
            let has_previous = watch.with_previous && !is_creation && before >= self.compacted;
            let previous = has_previous.then(|| self.state(before).remove(change.key())).flatten();
            WatchEvent { change: change.clone(), previous }
        };
        self.changes.iter().filter(is_sent).map(event).collect()
    }
}

/// A watch as the reference follows it.
struct ReferenceWatch {
    request: WatchRequest,
    next: u64,
    is_live: bool,
}

/// The events of all updates, after checking that no revision is split between two.
fn events_of(updates: &[WatchUpdate]) -> Vec<WatchEvent> {
    let mut events: Vec<WatchEvent> = Vec::new();
    for update in updates {
        if let WatchUpdate::Events { events: new, .. } = update {
            assert!(!new.is_empty());
            let last = events.last().map_or(0, |event| event.change.revision().0);
            assert!(last < new[0].change.revision().0, "a revision in two updates: {updates:?}");
            events.extend(new.iter().cloned());
        }
    }
    events
}

fn run(steps: &[Step], keeps_tombstones: bool) {
    let mut double = DoubleClient::new(EtcdConfig { keeps_tombstones, ..EtcdConfig::immediate() });
    let mut reference = Reference {
        changes: Vec::new(),
        revision: 1,
        compacted: 0,
        keeps_tombstones,
        leases: BTreeMap::new(),
        now_ms: 0,
    };
    let mut watches: BTreeMap<u64, ReferenceWatch> = BTreeMap::new();
    for step in steps {
        let step = step.resolve(double.revision(), Revision(1));
        match &step {
            Step::Request(request) => {
                let (found, wanted) = (double.request(request.clone()), reference.request(request));
                assert_eq!(found, wanted, "{request:?}");
            }
            Step::Watch(request) => {
                let token = double.watch(request.clone());
                let next = request.start_revision.map_or(reference.revision + 1, |start| start.0);
                watches.insert(token, ReferenceWatch { request: request.clone(), next, is_live: true });
            }
            Step::Wait(ms) => {
                double.wait(Nanos::from_millis(*ms));
                reference.wait(*ms);
            }
        }
        double.wait(Nanos::ZERO);
        for (token, watch) in &mut watches {
            let updates = std::mem::take(double.updates.get_mut(token).unwrap());
            check_watch(&reference, watch, &updates);
        }
    }
}

/// Checks the updates of a watch since the last step.
fn check_watch(reference: &Reference, watch: &mut ReferenceWatch, updates: &[WatchUpdate]) {
    if !watch.is_live {
        assert_eq!(updates, [], "after the end of a watch");
    } else if watch.request.range.start.is_empty() {
        watch.is_live = false;
        assert_eq!(updates, [WatchUpdate::Canceled(EtcdError::EmptyKey)]);
    } else if watch.next < reference.compacted {
        watch.is_live = false;
        let compact_revision = Revision(reference.compacted);
        assert_eq!(updates.last(), Some(&WatchUpdate::Compacted { compact_revision }), "{updates:?}");
        assert_eq!(events_of(updates), []);
    } else {
        assert_eq!(events_of(updates), reference.events(&watch.request, watch.next), "{:?}", watch.request);
        watch.next = watch.next.max(reference.revision + 1);
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 400, rng_seed: RngSeed::Fixed(22), failure_persistence: None, max_shrink_iters: 5_000,
        ..ProptestConfig::default()
    })]

    #[test]
    fn random_scripts_agree_with_the_reference(steps in steps(true), keeps_tombstones in any::<bool>()) {
        run(&steps, keeps_tombstones);
    }
}
