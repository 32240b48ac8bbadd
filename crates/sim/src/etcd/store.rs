//! A multi-version key-value store as etcd's: every revision is readable and watchable until compaction.
//!
//! In: puts and deletes within a transaction, reads at a revision. Out: values, changes by revision. Holds for each key
//! its versions in ascending order, and for each revision its changes in the order of their execution.
//!
//! Invariants: a transaction without changes has no revision; a version's revision is that of its transaction; reads
//! and changes before the compaction revision are refused. Tested in `tests/etcd_model.rs` and `tests/etcd_real.rs`.

use octokv_cluster::etcd::{
    DeleteRequest, EtcdError, KeyChange, KeyRange, KeyValue, LeaseId, PutRequest, RangeEnd, RangeRequest,
    ResponseBody, Revision, WatchEvent,
};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;

/// The state of a key from a revision on; `None` for a tombstone.
#[derive(Clone, Debug)]
struct KeyVersion {
    revision: Revision,
    state: Option<KeyValue>,
}

/// The store.
#[derive(Clone, Debug)]
pub struct MvccStore {
    revision: Revision,
    /// Revision 0 before the first compaction.
    compacted: Revision,
    /// Whether compaction keeps the deletions of its own revision for watches.
    keeps_tombstones: bool,
    keys: BTreeMap<Vec<u8>, Vec<KeyVersion>>,
    changes: BTreeMap<Revision, Vec<KeyChange>>,
}

impl MvccStore {
    /// An empty store. etcd before 3.4.34, 3.5.16 and 3.6 forgets the deletions of the compaction's own revision, so
    /// that a watch from that revision misses them (etcd issue 18089): `keeps_tombstones` is false for these.
    pub fn new(keeps_tombstones: bool) -> MvccStore {
        MvccStore {
            revision: Revision(1),
            compacted: Revision(0),
            keeps_tombstones,
            keys: BTreeMap::new(),
            changes: BTreeMap::new(),
        }
    }

    /// The newest revision.
    pub fn revision(&self) -> Revision {
        self.revision
    }

    /// The oldest readable revision; 0 before the first compaction.
    pub fn compacted(&self) -> Revision {
        self.compacted
    }

    /// Whether a revision can be read.
    ///
    /// # Errors
    /// If it is in the future or compacted.
    pub fn check_revision(&self, revision: Option<Revision>) -> Result<(), EtcdError> {
        match revision {
            Some(revision) if revision > self.revision => Err(EtcdError::FutureRevision),
            Some(revision) if revision < self.compacted => Err(EtcdError::Compacted),
            _ => Ok(()),
        }
    }

    /// Reads keys.
    ///
    /// # Errors
    /// If the revision is in the future or compacted.
    pub fn range(&self, request: &RangeRequest) -> Result<ResponseBody, EtcdError> {
        self.check_revision(request.revision)?;
        Ok(self.range_at(request, request.revision.unwrap_or(self.revision)))
    }

    fn range_at(&self, request: &RangeRequest, revision: Revision) -> ResponseBody {
        let found: Vec<&KeyValue> = self.values(&request.range, revision).collect();
        let count = found.len() as u64;
        if request.count_only {
            return ResponseBody::Range { kvs: Vec::new(), more: false, count };
        }
        let limit = if request.limit == 0 { found.len() } else { request.limit as usize };
        let shown = |kv: &KeyValue| match request.keys_only {
            true => KeyValue { value: Vec::new(), ..kv.clone() },
            false => kv.clone(),
        };
        let kvs = found.iter().take(limit).map(|kv| shown(kv)).collect();
        ResponseBody::Range { kvs, more: found.len() > limit, count }
    }

    /// The present keys of a range at a readable revision, in order.
    pub fn values(&self, range: &KeyRange, revision: Revision) -> impl Iterator<Item = &KeyValue> {
        let keys = bounds(range).map(|bounds| self.keys.range::<[u8], _>(bounds));
        keys.into_iter().flatten().filter_map(move |(_, versions)| state_at(versions, revision))
    }

    /// The value of a key at a readable revision.
    pub fn value(&self, key: &[u8], revision: Revision) -> Option<&KeyValue> {
        state_at(self.keys.get(key)?, revision)
    }

    /// The changes of a range from a revision on, by revision. REQUIRES: `from` is not before the compaction.
    pub fn changes(&self, range: &KeyRange, from: Revision) -> Vec<(Revision, Vec<KeyChange>)> {
        let mut found = Vec::new();
        for (&revision, changes) in self.changes.range(from..) {
            let matching: Vec<KeyChange> =
                changes.iter().filter(|change| range.contains(change.key())).cloned().collect();
            if !matching.is_empty() {
                found.push((revision, matching));
            }
        }
        found
    }

    /// A change as a watch sends it now.
    pub fn event(&self, change: KeyChange, with_previous: bool) -> WatchEvent {
        let before = change.revision().previous();
        // A transaction may delete and then put a key: its creation has no previous value.
        let is_creation = matches!(&change, KeyChange::Put(kv) if kv.create_revision == kv.mod_revision);
        let is_readable = with_previous && !is_creation && before >= self.compacted;
        let previous = is_readable.then(|| self.value(change.key(), before).cloned()).flatten();
        WatchEvent { change, previous }
    }

    /// Begins a transaction. Its changes are visible at once; [`MvccTransaction::commit`] ends it.
    pub fn begin(&mut self) -> MvccTransaction<'_> {
        let revision = self.revision.next();
        MvccTransaction { store: self, revision, changes: Vec::new() }
    }

    /// Forgets everything before `revision` but each key's newest value.
    ///
    /// # Errors
    /// If the revision is in the future, or compacted already.
    pub fn compact(&mut self, revision: Revision) -> Result<(), EtcdError> {
        if revision <= self.compacted {
            return Err(EtcdError::Compacted);
        }
        if revision > self.revision {
            return Err(EtcdError::FutureRevision);
        }
        self.compacted = revision;
        self.keys.retain(|_, versions| {
            // The newest version up to the revision stays, unless it is a tombstone.
            let newer = versions.partition_point(|version| version.revision <= revision);
            let first = match newer.checked_sub(1) {
                Some(newest) if versions[newest].state.is_some() => newest,
                _ => newer,
            };
            versions.drain(..first);
            !versions.is_empty()
        });
        self.changes = self.changes.split_off(&revision);
        if let Some(changes) = self.changes.get_mut(&revision) {
            // A transaction may put and then delete a key: only its last change stays.
            let mut seen = BTreeSet::new();
            changes.reverse();
            changes.retain(|change| {
                let is_last = seen.insert(change.key().to_vec());
                is_last && (self.keeps_tombstones || matches!(change, KeyChange::Put(_)))
            });
            changes.reverse();
        }
        Ok(())
    }
}

type KeyBounds<'a> = (Bound<&'a [u8]>, Bound<&'a [u8]>);

/// The bounds of a range; `None` if it is empty.
fn bounds(range: &KeyRange) -> Option<KeyBounds<'_>> {
    let start = range.start.as_slice();
    let end = match &range.end {
        RangeEnd::Single => Bound::Included(start),
        RangeEnd::Before(end) if end.as_slice() <= start => return None,
        RangeEnd::Before(end) => Bound::Excluded(end.as_slice()),
        RangeEnd::Unbounded => Bound::Unbounded,
    };
    Some((Bound::Included(start), end))
}

fn state_at(versions: &[KeyVersion], revision: Revision) -> Option<&KeyValue> {
    let newer = versions.partition_point(|version| version.revision <= revision);
    versions[..newer].last()?.state.as_ref()
}

/// A transaction in progress.
pub struct MvccTransaction<'a> {
    store: &'a mut MvccStore,
    /// The revision of its changes.
    revision: Revision,
    changes: Vec<KeyChange>,
}

impl MvccTransaction<'_> {
    /// Stores a value. Returns the previous one.
    pub fn put(&mut self, request: &PutRequest) -> Option<KeyValue> {
        let revision = self.revision;
        let versions = self.store.keys.entry(request.key.clone()).or_default();
        let previous = state_at(versions, revision).cloned();
        let (create_revision, version) =
            previous.as_ref().map_or((revision, 1), |kv| (kv.create_revision, kv.version + 1));
        let kv = KeyValue {
            key: request.key.clone(),
            create_revision,
            mod_revision: revision,
            version,
            value: request.value.clone(),
            lease: request.lease,
        };
        versions.push(KeyVersion { revision, state: Some(kv.clone()) });
        self.changes.push(KeyChange::Put(kv));
        previous
    }

    /// Deletes keys. Returns their values.
    pub fn delete(&mut self, request: &DeleteRequest) -> Vec<KeyValue> {
        let revision = self.revision;
        let deleted: Vec<KeyValue> = self.store.values(&request.range, revision).cloned().collect();
        for kv in &deleted {
            let versions = self.store.keys.get_mut(&kv.key).expect("a present key has versions");
            versions.push(KeyVersion { revision, state: None });
            self.changes.push(KeyChange::Delete { key: kv.key.clone(), revision });
        }
        deleted
    }

    /// Reads keys: at the newest revision with the changes so far, at another without them.
    /// REQUIRES: the requested revision has been checked by [`MvccStore::check_revision`].
    pub fn range(&self, request: &RangeRequest) -> ResponseBody {
        self.store.range_at(request, request.revision.unwrap_or(self.revision))
    }

    /// The lease of a key before the next change.
    pub fn lease_of(&self, key: &[u8]) -> LeaseId {
        self.store.value(key, self.revision).map_or(LeaseId::NONE, |kv| kv.lease)
    }

    /// Ends the transaction. Returns the store's revision.
    pub fn commit(self) -> Revision {
        if !self.changes.is_empty() {
            self.store.revision = self.revision;
            self.store.changes.insert(self.revision, self.changes);
        }
        self.store.revision
    }
}
