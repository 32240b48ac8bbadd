//! The faults of the etcd double: what each does to a client, and that clients which handle them come out right.

use crate::etcd_script::DoubleClient;
use octokv_base::prng::mix64;
use octokv_base::{Nanos, Prng};
use octokv_cluster::etcd::{
    Compare, CompareResult, CompareTarget, DeleteRequest, EtcdError, EtcdRequest, EtcdResponse, KeyChange,
    KeyRange, LeaseId, PutRequest, RangeRequest, ResponseBody, Revision, TxnOperation, TxnRequest,
    WatchRequest,
};
use octokv_cluster::{MembershipStore, StoreDelivery, WatchUpdate};
use octokv_runtime::simulated::{HostFailure, SimClock, SimEnv, SimEnvConfig};
use octokv_sim::etcd::{
    EtcdCluster, EtcdConfig, EtcdConnection, EtcdFault, EtcdFaultPlan, EtcdStats, MessageFaults, SimEtcd,
};
use octokv_sim::node_under_test::handle_without_devices;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

const SECOND: Nanos = Nanos::from_secs(1);

fn put(key: &str, value: &str, lease: i64) -> EtcdRequest {
    let (key, value) = (key.as_bytes().to_vec(), value.as_bytes().to_vec());
    EtcdRequest::Put(PutRequest { key, value, lease: LeaseId(lease), with_previous: false })
}

fn get(key: &str, serializable: bool) -> EtcdRequest {
    EtcdRequest::Range(RangeRequest { serializable, ..RangeRequest::new(KeyRange::key(key)) })
}

/// The value of a read key.
fn value(result: Result<EtcdResponse, EtcdError>) -> Option<String> {
    let ResponseBody::Range { kvs, .. } = result.expect("the read succeeds").body else { panic!("a read") };
    kvs.first().map(|kv| String::from_utf8(kv.value.clone()).unwrap())
}

fn watch_all(start_revision: Option<Revision>) -> WatchRequest {
    WatchRequest { range: KeyRange::all(), start_revision, with_previous: false, progress_notify: false }
}

impl DoubleClient {
    fn inject(&self, fault: EtcdFault) {
        self.cluster.borrow_mut().inject(self.now, fault);
    }

    /// The value as the cluster holds it.
    fn held(&self, key: &str) -> Option<String> {
        let cluster = self.cluster.borrow();
        let store = cluster.state().store();
        store.value(key.as_bytes(), store.revision()).map(|kv| String::from_utf8(kv.value.clone()).unwrap())
    }

    /// The revisions of the changes that a watch has received.
    fn revisions(&self, watch: u64) -> Vec<u64> {
        let events = self.updates[&watch].iter().flat_map(|update| match update {
            WatchUpdate::Events { events, .. } => events.clone(),
            _ => Vec::new(),
        });
        events.map(|event| event.change.revision().0).collect()
    }
}

#[test]
fn a_lost_request_is_not_applied_and_a_lost_response_is() {
    let mut client = DoubleClient::new(EtcdConfig::new(1));
    let request = MessageFaults { lose_request_one_in: 1, ..MessageFaults::default() };
    client.inject(EtcdFault::Messages(request));
    assert_eq!(client.request(put("a", "1", 0)), Err(EtcdError::Unknown));
    assert_eq!(client.held("a"), None);
    let response = MessageFaults { lose_response_one_in: 1, ..MessageFaults::default() };
    client.inject(EtcdFault::Messages(response));
    assert_eq!(client.request(put("a", "2", 0)), Err(EtcdError::Unknown));
    assert_eq!(client.held("a").as_deref(), Some("2"));
    let stats = client.cluster.borrow().stats();
    assert_eq!((stats.lost_messages, stats.unknown_outcomes), (2, 2));
}

#[test]
fn a_held_request_is_applied_after_its_client_gave_up() {
    let mut client = DoubleClient::new(EtcdConfig::new(1));
    let connection = client.connection.number();
    client.inject(EtcdFault::Cut { connection, to_member: true, to_client: false });
    assert_eq!(client.request(put("a", "1", 0)), Err(EtcdError::Unknown));
    assert_eq!(client.held("a"), None);
    client.inject(EtcdFault::Cut { connection, to_member: false, to_client: false });
    client.wait(SECOND);
    assert_eq!(client.held("a").as_deref(), Some("1"));
}

#[test]
fn a_link_cut_towards_the_client_holds_responses_and_updates_only() {
    let mut client = DoubleClient::new(EtcdConfig::new(1));
    let watch = client.watch(watch_all(None));
    client.wait(SECOND);
    let connection = client.connection.number();
    client.inject(EtcdFault::Cut { connection, to_member: false, to_client: true });
    assert_eq!(client.request(put("a", "1", 0)), Err(EtcdError::Unknown));
    assert_eq!((client.held("a").as_deref(), client.revisions(watch)), (Some("1"), vec![]));
    client.inject(EtcdFault::Cut { connection, to_member: false, to_client: false });
    client.wait(SECOND);
    assert_eq!(client.revisions(watch), [2]);
}

#[test]
fn without_a_leader_requests_fail_or_are_applied_late() {
    let mut outcomes = BTreeMap::new();
    for seed in 0..40 {
        let mut client = DoubleClient::new(EtcdConfig::new(seed));
        client.inject(EtcdFault::Election { duration: Nanos::from_secs(5) });
        assert_eq!(client.cluster.borrow().leader(), None);
        let result = client.request(put("a", "1", 0)).unwrap_err();
        assert_eq!(value(client.request(get("a", true))), None, "a stale read needs no leader");
        client.wait(Nanos::from_secs(10));
        assert!(client.cluster.borrow().leader().is_some());
        *outcomes.entry((result.has_unknown_outcome(), client.held("a").is_some())).or_insert(0) += 1;
    }
    // A definite failure was not applied; an unknown outcome is in doubt.
    assert_eq!(outcomes.keys().collect::<Vec<_>>(), [&(false, false), &(true, true)], "{outcomes:?}");
}

#[test]
fn a_member_that_lags_serves_stale_serializable_reads_alone() {
    let mut client = DoubleClient::new(EtcdConfig::new(1));
    let mut other = EtcdConnection::new(&client.cluster, 1);
    client.inject(EtcdFault::Lag { member: 1, lag: SECOND });
    client.request(put("a", "1", 0)).unwrap();
    for (token, serializable) in [(1, true), (2, false)] {
        other.submit(client.now, token, get("a", serializable)).unwrap();
    }
    let mut responses = BTreeMap::new();
    while responses.len() < 2 {
        match other.poll(client.now) {
            Some(StoreDelivery::Response { token, result }) => {
                responses.insert(token, (value(result), client.now));
            }
            Some(update) => panic!("{update:?}"),
            None => client.now = client.now.max(other.next_deadline()),
        }
    }
    assert_eq!(responses[&1].0, None);
    assert_eq!(responses[&2].0.as_deref(), Some("1"));
    assert!(responses[&2].1 >= SECOND, "a linearizable read waits for the member: {responses:?}");
}

#[test]
fn an_isolated_member_has_stale_state_and_silent_watches_until_it_returns() {
    let mut client = DoubleClient::new(EtcdConfig::new(1));
    let watch = client.watch(watch_all(None));
    client.wait(SECOND);
    // Its member leads, so another one is elected.
    client.inject(EtcdFault::Isolate { member: 0, isolated: true });
    client.wait(Nanos::from_secs(2));
    let leader = client.cluster.borrow().leader();
    assert!(leader.is_some_and(|leader| leader != 0));
    let mut other = EtcdConnection::new(&client.cluster, 1);
    other.submit(client.now, 1, put("a", "1", 0)).unwrap();
    client.wait(SECOND);
    assert!(matches!(other.poll(client.now), Some(StoreDelivery::Response { result: Ok(_), .. })));
    assert_eq!((value(client.request(get("a", true))), client.revisions(watch)), (None, vec![]));
    assert!(client.request(get("a", false)).is_err());
    client.inject(EtcdFault::Isolate { member: 0, isolated: false });
    client.wait(SECOND);
    assert_eq!(client.revisions(watch), [2]);
    assert_eq!(value(client.request(get("a", true))).as_deref(), Some("1"));
}

/// The time from the grant of a lease of 10 s to the deletion of its key.
fn lease_time(fault: Option<EtcdFault>, seed: u64) -> Nanos {
    let mut client = DoubleClient::new(EtcdConfig::new(seed));
    client.request(EtcdRequest::LeaseGrant { lease: LeaseId(1), ttl_s: 10 }).unwrap();
    client.request(put("a", "1", 1)).unwrap();
    client.wait(Nanos::from_secs(5));
    if let Some(fault) = fault {
        client.inject(fault);
    }
    while client.held("a").is_some() {
        client.wait(Nanos::from_millis(10));
    }
    client.now
}

#[test]
fn a_lease_ends_by_the_leaders_clock_and_a_new_leader_extends_it() {
    let seconds = |from: u64, to: u64| Nanos::from_secs(from)..Nanos::from_secs(to);
    assert!(seconds(10, 11).contains(&lease_time(None, 1)));
    // Half as fast again: 10 s of the clock are 5 s and 5 s / 1.5. Leases are checked every half second of the clock.
    let fast = lease_time(Some(EtcdFault::ClockDrift { drift_ppm: 500_000 }), 1);
    assert!(seconds(8, 9).contains(&fast), "{fast:?}");
    let slow = lease_time(Some(EtcdFault::ClockDrift { drift_ppm: -500_000 }), 1);
    assert!(seconds(15, 17).contains(&slow), "{slow:?}");
    let elected = lease_time(Some(EtcdFault::Election { duration: SECOND }), 1);
    assert!(seconds(17, 18).contains(&elected), "{elected:?}");
}

#[test]
fn a_compaction_under_a_silent_watch_ends_it() {
    let mut client = DoubleClient::new(EtcdConfig::new(1));
    let watch = client.watch(watch_all(None));
    client.request(put("a", "1", 0)).unwrap();
    let connection = client.connection.number();
    client.inject(EtcdFault::StallWatches { connection, stalled: true });
    client.request(put("a", "2", 0)).unwrap();
    client.request(put("a", "3", 0)).unwrap();
    client.inject(EtcdFault::Compact);
    client.inject(EtcdFault::StallWatches { connection, stalled: false });
    client.wait(SECOND);
    assert_eq!(client.revisions(watch), [2]);
    let compacted = WatchUpdate::Compacted { compact_revision: Revision(4) };
    assert_eq!(client.updates[&watch].last(), Some(&compacted));
}

#[test]
fn a_broken_watch_resumes_after_its_last_revision_and_misses_nothing() {
    let mut client = DoubleClient::new(EtcdConfig::new(1));
    let watch = client.watch(watch_all(None));
    client.request(put("a", "1", 0)).unwrap();
    client.wait(SECOND);
    let connection = client.connection.number();
    client.inject(EtcdFault::BreakWatches { connection });
    client.request(put("a", "2", 0)).unwrap();
    client.wait(SECOND);
    assert_eq!(client.revisions(watch), [2]);
    assert_eq!(client.updates[&watch].last(), Some(&WatchUpdate::Disconnected));
    let resumed = client.watch(watch_all(Some(Revision(3))));
    client.wait(SECOND);
    assert_eq!(client.revisions(resumed), [3]);
}

#[test]
fn progress_is_sent_on_request_and_periodically() {
    let mut client = DoubleClient::new(EtcdConfig::new(1));
    let request = WatchRequest { progress_notify: true, range: KeyRange::key("z"), ..watch_all(None) };
    let watch = client.watch(request);
    client.request(put("a", "1", 0)).unwrap();
    client.connection.request_progress(client.now);
    client.wait(SECOND);
    let progress = WatchUpdate::Progress { revision: Revision(2) };
    let created = WatchUpdate::Created { revision: Revision(1) };
    assert_eq!(client.updates[&watch], [created.clone(), progress.clone()]);
    client.wait(Nanos::from_secs(601));
    assert_eq!(client.updates[&watch], [created, progress.clone(), progress]);
}

#[test]
fn a_sleeping_reactor_is_woken_by_what_another_hosts_request_changes() {
    let sim = SimEnv::new(SimEnvConfig::new(1));
    let etcd = SimEtcd::new(&sim, EtcdConfig::new(1));
    let [watching, writing] = [sim.add_host(), sim.add_host()];
    // Its clock has nothing to do with etcd's time.
    sim.set_clock(watching, SimClock::new(Nanos::from_secs(1_000), -300_000));
    let handle = handle_without_devices(&sim, watching);
    let mut connection = etcd.connect(0, handle.core_waker());
    connection.watch(Nanos::ZERO, 1, watch_all(None));
    let seen: Rc<RefCell<Vec<(Nanos, StoreDelivery)>>> = Rc::default();
    let (deliveries, own, env) = (Rc::clone(&seen), handle.clone(), sim.clone());
    sim.add_reactor(watching, handle, move |now| {
        own.begin_iteration(now);
        let delivery = connection.poll(now);
        let is_busy = delivery.is_some();
        deliveries.borrow_mut().extend(delivery.map(|delivery| (env.now(), delivery)));
        is_busy
    });
    let mut writer = etcd.connect(1, handle_without_devices(&sim, writing).core_waker());
    sim.schedule_at(Nanos::from_secs(2), move || writer.submit(Nanos::ZERO, 1, put("a", "1", 0)).unwrap());
    sim.run_until(Nanos::from_secs(3));
    let [(_, created), (at, events)] = &seen.borrow()[..] else { panic!("{:?}", seen.borrow()) };
    assert!(matches!(created, StoreDelivery::Watch { update: WatchUpdate::Created { .. }, .. }));
    assert!(matches!(events, StoreDelivery::Watch { update: WatchUpdate::Events { .. }, .. }));
    assert!((Nanos::from_secs(2)..Nanos::from_secs(2) + Nanos::from_millis(20)).contains(at), "{at:?}");
    sim.stop_host(watching, HostFailure::ProcessKilled);
}

/// A client that increments a number by compare-and-swap and mirrors the store by a watch, whatever fails.
struct Worker {
    connection: EtcdConnection,
    random: Prng,
    name: String,
    next_token: u64,
    /// The number and the revision last read.
    read: Option<(u64, Revision)>,
    in_flight: Option<u64>,
    is_increment: bool,
    succeeded: u64,
    unknown: u64,
    watch: Option<u64>,
    /// The keys as the watch has reported them up to `seen`; read anew after a compaction.
    mirror: BTreeMap<Vec<u8>, Vec<u8>>,
    seen: Option<Revision>,
    reloads: u64,
}

const NUMBER: &str = "number";
const SEEDS: u64 = 40;
const STEP: Nanos = Nanos::from_millis(10);

impl Worker {
    fn new(cluster: &Rc<RefCell<EtcdCluster>>, index: usize) -> Worker {
        Worker {
            connection: EtcdConnection::new(cluster, index % 3),
            random: Prng::new(index as u64),
            name: format!("worker {index}"),
            next_token: 0,
            read: None,
            in_flight: None,
            is_increment: false,
            succeeded: 0,
            unknown: 0,
            watch: None,
            mirror: BTreeMap::new(),
            seen: None,
            reloads: 0,
        }
    }

    fn token(&mut self) -> u64 {
        self.next_token += 1;
        self.next_token
    }

    /// Compares the number's revision with the one read, and stores the next number; stores or deletes the worker's own key.
    fn increment(&self, (number, revision): (u64, Revision)) -> EtcdRequest {
        let operation = |request| match request {
            EtcdRequest::Put(put) => TxnOperation::Put(put),
            EtcdRequest::Delete(delete) => TxnOperation::Delete(delete),
            other => panic!("{other:?}"),
        };
        EtcdRequest::Txn(TxnRequest {
            compare: vec![Compare {
                range: KeyRange::key(NUMBER),
                target: CompareTarget::ModRevision(revision),
                result: CompareResult::Equal,
            }],
            success: vec![
                operation(put(NUMBER, &(number + 1).to_string(), 0)),
                operation(match number % 3 {
                    0 => EtcdRequest::Delete(DeleteRequest {
                        range: KeyRange::key(self.name.as_str()),
                        with_previous: false,
                    }),
                    _ => put(&self.name, &number.to_string(), 0),
                }),
            ],
            failure: Vec::new(),
        })
    }

    /// Handles what has arrived and sends the next requests. With `last`, begins no increment.
    fn run(&mut self, now: Nanos, last: bool) {
        while let Some(delivery) = self.connection.poll(now) {
            match delivery {
                StoreDelivery::Response { token, result } if self.in_flight == Some(token) => {
                    self.in_flight = None;
                    self.respond(result);
                }
                StoreDelivery::Response { result, .. } => self.reload(result),
                StoreDelivery::Watch { token, update } => {
                    assert_eq!(self.watch, Some(token), "{update:?}");
                    self.update(update);
                }
            }
        }
        if self.in_flight.is_none() && !last {
            let token = self.token();
            self.is_increment = self.read.is_some();
            let request = match self.read.take() {
                Some(read) => self.increment(read),
                None => get(NUMBER, self.random.one_in(2)),
            };
            self.connection.submit(now, token, request).unwrap();
            self.in_flight = Some(token);
        }
        if self.watch.is_none() {
            let token = self.token();
            self.watch = Some(token);
            match self.seen {
                Some(seen) => self.connection.watch(now, token, watch_all(Some(seen.next()))),
                None => {
                    let request = EtcdRequest::Range(RangeRequest::new(KeyRange::all()));
                    self.connection.submit(now, token, request).unwrap();
                }
            }
        }
    }

    fn respond(&mut self, result: Result<EtcdResponse, EtcdError>) {
        match result.map(|response| response.body) {
            Ok(ResponseBody::Range { kvs, .. }) => {
                let number = |text: &[u8]| std::str::from_utf8(text).unwrap().parse().unwrap();
                let read = kvs.first().map_or((0, Revision(0)), |kv| (number(&kv.value), kv.mod_revision));
                self.read = Some(read);
            }
            Ok(ResponseBody::Txn { succeeded, .. }) => self.succeeded += u64::from(succeeded),
            Err(error) if error.has_unknown_outcome() => self.unknown += u64::from(self.is_increment),
            Err(EtcdError::NoLeader) => {}
            other => panic!("{other:?}"),
        }
    }

    fn reload(&mut self, result: Result<EtcdResponse, EtcdError>) {
        self.watch = None;
        if let Ok(EtcdResponse { revision, body: ResponseBody::Range { kvs, .. } }) = result {
            self.reloads += 1;
            self.mirror = kvs.into_iter().map(|kv| (kv.key, kv.value)).collect();
            self.seen = Some(revision);
        }
    }

    fn update(&mut self, update: WatchUpdate) {
        match update {
            WatchUpdate::Created { .. } => {}
            WatchUpdate::Events { events, .. } => {
                for event in events {
                    let revision = event.change.revision();
                    assert!(Some(revision) >= self.seen, "{revision:?} after {:?}", self.seen);
                    self.seen = Some(revision);
                    match event.change {
                        KeyChange::Put(kv) => drop(self.mirror.insert(kv.key, kv.value)),
                        KeyChange::Delete { key, .. } => drop(self.mirror.remove(&key)),
                    }
                }
            }
            WatchUpdate::Progress { revision } => assert!(Some(revision) >= self.seen),
            WatchUpdate::Disconnected => self.watch = None,
            WatchUpdate::Compacted { .. } | WatchUpdate::Canceled(_) => {
                (self.watch, self.seen) = (None, None)
            }
        }
    }
}

/// Runs workers under a plan of faults. Returns the statistics, and a hash of what the workers saw.
fn run_workers(seed: u64) -> (EtcdStats, u64, u64) {
    // A mirror is right only if no deletion is lost to compaction.
    let config = EtcdConfig { keeps_tombstones: true, ..EtcdConfig::new(seed) };
    let cluster = Rc::new(RefCell::new(EtcdCluster::new(config)));
    let mut workers: Vec<Worker> = (0..4).map(|index| Worker::new(&cluster, index)).collect();
    let end = Nanos::from_secs(30);
    let mut plan = EtcdFaultPlan::draw(&mut Prng::new(seed), 3, workers.len(), end);
    let (mut now, mut hash) = (Nanos::ZERO, seed);
    while now < end {
        while plan.next_at() <= now {
            plan.take_due(now).into_iter().for_each(|fault| cluster.borrow_mut().inject(now, fault));
        }
        for worker in &mut workers {
            worker.run(now, false);
            hash = mix64(hash ^ worker.seen.unwrap_or_default().0 ^ worker.succeeded << 32);
        }
        now = now + STEP;
    }
    cluster.borrow_mut().end_faults(now);
    for _ in 0..1_000 {
        workers.iter_mut().for_each(|worker| worker.run(now, true));
        now = now + STEP;
    }
    check_workers(&cluster.borrow(), &workers);
    let reloads = workers.iter().map(|worker| worker.reloads).sum();
    (cluster.borrow().stats(), reloads, hash)
}

fn check_workers(cluster: &EtcdCluster, workers: &[Worker]) {
    let store = cluster.state().store();
    let held: BTreeMap<Vec<u8>, Vec<u8>> = store
        .values(&KeyRange::all(), store.revision())
        .map(|kv| (kv.key.clone(), kv.value.clone()))
        .collect();
    let number = held
        .get(NUMBER.as_bytes())
        .map_or(0, |text| std::str::from_utf8(text).unwrap().parse::<u64>().unwrap());
    let succeeded: u64 = workers.iter().map(|worker| worker.succeeded).sum();
    let unknown: u64 = workers.iter().map(|worker| worker.unknown).sum();
    assert!(
        (succeeded..=succeeded + unknown).contains(&number),
        "{succeeded} increments succeeded, {unknown} are in doubt, the number is {number}"
    );
    for worker in workers {
        assert_eq!(worker.mirror, held, "the mirror of {}", worker.name);
    }
}

#[test]
fn increments_and_mirrors_come_out_right_under_every_fault() {
    let mut sum = EtcdStats::default();
    let mut reloads = 0;
    for seed in 0..SEEDS {
        let (stats, reloaded, hash) = run_workers(seed);
        if seed % 10 == 0 {
            assert_eq!(run_workers(seed), (stats, reloaded, hash), "a seed repeats");
        }
        sum.elections += stats.elections;
        sum.lost_messages += stats.lost_messages;
        sum.unknown_outcomes += stats.unknown_outcomes;
        reloads += reloaded;
    }
    // Four workers load the keys once; more loads follow compactions.
    let occurred = [sum.elections, sum.lost_messages, sum.unknown_outcomes, reloads - 4 * SEEDS];
    assert!(occurred.iter().all(|&count| count > 5), "{occurred:?}");
}
