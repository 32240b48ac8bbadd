//! Random scripts of etcd requests, and a client that runs them on the double.
//!
//! Revisions in a script are relative to the store's when the step runs, so that they matter: `Revision(2)` is the
//! newest, greater ones lie back, smaller ones in the future. [`Step::resolve`] makes them absolute.

use octokv_base::Nanos;
use octokv_cluster::etcd::{
    Compare, CompareResult, CompareTarget, DeleteRequest, EtcdError, EtcdRequest, EtcdResponse, KeyRange,
    LeaseId, PutRequest, RangeEnd, RangeRequest, Revision, TxnOperation, TxnRequest, WatchRequest,
};
use octokv_cluster::{MembershipStore, StoreDelivery, WatchUpdate};
use octokv_sim::etcd::{EtcdCluster, EtcdConfig, EtcdConnection};
use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

/// A step of a script.
#[derive(Clone, Debug)]
pub enum Step {
    /// A request.
    Request(EtcdRequest),
    /// A watch.
    Watch(WatchRequest),
    /// Lets time pass, in milliseconds. Not part of scripts for a real etcd.
    Wait(u64),
}

impl Step {
    /// The step with absolute revisions, at the store's present one. None lies before `oldest`.
    pub fn resolve(&self, newest: Revision, oldest: Revision) -> Step {
        let absolute = |relative: Revision| Revision((newest.0 + 2).saturating_sub(relative.0).max(oldest.0));
        let mut step = self.clone();
        match &mut step {
            Step::Request(request) => for_each_revision(request, |revision| *revision = absolute(*revision)),
            Step::Watch(watch) => watch.start_revision = watch.start_revision.map(absolute),
            Step::Wait(_) => {}
        }
        step
    }
}

/// Calls `change` with each revision in a request.
fn for_each_revision(request: &mut EtcdRequest, mut change: impl FnMut(&mut Revision)) {
    match request {
        EtcdRequest::Range(range) => range.revision.iter_mut().for_each(change),
        EtcdRequest::Compact { revision } => change(revision),
        EtcdRequest::Txn(txn) => {
            for compare in &mut txn.compare {
                if let CompareTarget::CreateRevision(revision) | CompareTarget::ModRevision(revision) =
                    &mut compare.target
                {
                    change(revision);
                }
            }
            for operation in txn.success.iter_mut().chain(&mut txn.failure) {
                if let TxnOperation::Range(range) = operation {
                    range.revision.iter_mut().for_each(&mut change);
                }
            }
        }
        _ => {}
    }
}

fn key() -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![20 => "[ab]{1,2}".prop_map(String::into_bytes), 1 => Just(Vec::new())]
}

fn range() -> impl Strategy<Value = KeyRange> {
    prop_oneof![
        4 => key().prop_map(KeyRange::key),
        1 => "[ab]{0,1}".prop_map(KeyRange::prefix),
        1 => Just(KeyRange::all()),
        1 => ("[ab]{1,2}", "[abc]{1,2}").prop_filter_map("an empty interval", |(start, end)| {
            let (start, end) = (start.into_bytes(), end.into_bytes());
            (start < end).then_some(KeyRange { start, end: RangeEnd::Before(end) })
        }),
    ]
}

fn revision() -> impl Strategy<Value = Revision> {
    prop_oneof![1 => 0..=1_u64, 6 => 2..=8_u64, 2 => 9..=30_u64].prop_map(Revision)
}

fn lease() -> impl Strategy<Value = LeaseId> {
    prop_oneof![3 => Just(0), 2 => 1..=3_i64].prop_map(LeaseId)
}

fn range_request() -> impl Strategy<Value = RangeRequest> {
    let flag = || prop::bool::weighted(0.15);
    (
        range(),
        option::weighted(0.4, revision()),
        prop_oneof![3 => Just(0), 1 => 1..=3_u64],
        flag(),
        flag(),
        flag(),
    )
        .prop_map(|(range, revision, limit, serializable, keys_only, count_only)| RangeRequest {
            range,
            revision,
            limit,
            serializable,
            keys_only,
            count_only,
        })
}

fn put() -> impl Strategy<Value = PutRequest> {
    (key(), "[xyz]{0,2}", lease(), any::<bool>()).prop_map(|(key, value, lease, with_previous)| PutRequest {
        key,
        value: value.into_bytes(),
        lease,
        with_previous,
    })
}

fn delete() -> impl Strategy<Value = DeleteRequest> {
    (range(), any::<bool>()).prop_map(|(range, with_previous)| DeleteRequest { range, with_previous })
}

fn compare() -> impl Strategy<Value = Compare> {
    let target = prop_oneof![
        (0..4_u64).prop_map(CompareTarget::Version),
        revision().prop_map(CompareTarget::CreateRevision),
        revision().prop_map(CompareTarget::ModRevision),
        "[xyz]{0,2}".prop_map(|value| CompareTarget::Value(value.into_bytes())),
        lease().prop_map(CompareTarget::Lease),
    ];
    let result = prop_oneof![
        Just(CompareResult::Equal),
        Just(CompareResult::NotEqual),
        Just(CompareResult::Greater),
        Just(CompareResult::Less),
    ];
    (range(), target, result).prop_map(|(range, target, result)| Compare { range, target, result })
}

fn txn() -> impl Strategy<Value = TxnRequest> {
    let operation = || {
        prop_oneof![
            2 => range_request().prop_map(TxnOperation::Range),
            4 => put().prop_map(TxnOperation::Put),
            2 => delete().prop_map(TxnOperation::Delete),
        ]
    };
    (vec(compare(), 0..3), vec(operation(), 0..4), vec(operation(), 0..3))
        .prop_map(|(compare, success, failure)| TxnRequest { compare, success, failure })
}

/// Requests, and watches with or without a start revision.
pub fn steps(waits: bool) -> impl Strategy<Value = Vec<Step>> {
    let some_lease = || (1..=3_i64).prop_map(LeaseId);
    let ttl = prop_oneof![6 => 5..=9_i64, 1 => 0..=1_i64, 1 => Just(10_000_000_000)].prop_map(move |ttl| {
        // A real etcd's time passes while a script runs.
        if waits || ttl > 9 { ttl } else { ttl + 1_000 }
    });
    let request = prop_oneof![
        6 => range_request().prop_map(EtcdRequest::Range),
        9 => put().prop_map(EtcdRequest::Put),
        3 => delete().prop_map(EtcdRequest::Delete),
        7 => txn().prop_map(EtcdRequest::Txn),
        3 => (some_lease(), ttl).prop_map(|(lease, ttl_s)| EtcdRequest::LeaseGrant { lease, ttl_s }),
        1 => some_lease().prop_map(|lease| EtcdRequest::LeaseRevoke { lease }),
        2 => some_lease().prop_map(|lease| EtcdRequest::LeaseKeepAlive { lease }),
        1 => some_lease().prop_map(|lease| EtcdRequest::LeaseTimeToLive { lease }),
        1 => revision().prop_map(|revision| EtcdRequest::Compact { revision }),
    ];
    let watch = (range(), option::of(revision()), any::<bool>()).prop_map(
        |(range, start_revision, with_previous)| WatchRequest {
            range,
            start_revision,
            with_previous,
            progress_notify: false,
        },
    );
    let step = prop_oneof![
        40 => request.prop_map(Step::Request),
        4 => watch.prop_map(Step::Watch),
        u32::from(waits) * 4 => (1..4_000_u64).prop_map(Step::Wait),
    ];
    vec(vec(step, 0..=16), 0..=6).prop_map(|parts| parts.concat())
}

/// A client of the double that waits for each response.
pub struct DoubleClient {
    pub cluster: Rc<RefCell<EtcdCluster>>,
    pub connection: EtcdConnection,
    pub now: Nanos,
    /// The updates of each watch, by token.
    pub updates: BTreeMap<u64, Vec<WatchUpdate>>,
    next_token: u64,
}

impl DoubleClient {
    pub fn new(config: EtcdConfig) -> DoubleClient {
        let cluster = Rc::new(RefCell::new(EtcdCluster::new(config)));
        let connection = EtcdConnection::new(&cluster, 0);
        DoubleClient { cluster, connection, now: Nanos::ZERO, updates: BTreeMap::new(), next_token: 0 }
    }

    pub fn revision(&self) -> Revision {
        self.cluster.borrow().revision()
    }

    /// Runs a request to its response.
    pub fn request(&mut self, request: EtcdRequest) -> Result<EtcdResponse, EtcdError> {
        self.next_token += 1;
        let token = self.next_token;
        self.connection.submit(self.now, token, request).expect("one request at a time");
        loop {
            match self.poll() {
                Some((response_token, result)) if response_token == token => return result,
                Some(other) => panic!("{other:?}"),
                None => self.now = self.now.max(self.connection.next_deadline()),
            }
        }
    }

    /// Begins a watch. Returns its token.
    pub fn watch(&mut self, request: WatchRequest) -> u64 {
        self.next_token += 1;
        self.updates.insert(self.next_token, Vec::new());
        self.connection.watch(self.now, self.next_token, request);
        self.next_token
    }

    /// Lets time pass, and receives the updates that arrive meanwhile.
    pub fn wait(&mut self, duration: Nanos) {
        self.now = self.now + duration;
        if let Some(response) = self.poll() {
            panic!("{response:?}");
        }
    }

    /// The next response; updates of watches are kept.
    pub fn poll(&mut self) -> Option<(u64, Result<EtcdResponse, EtcdError>)> {
        while let Some(delivery) = self.connection.poll(self.now) {
            match delivery {
                StoreDelivery::Response { token, result } => return Some((token, result)),
                StoreDelivery::Watch { token, update } => {
                    self.updates.get_mut(&token).expect("the watch has begun").push(update);
                }
            }
        }
        None
    }
}
