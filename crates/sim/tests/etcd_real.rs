//! The double of etcd against a real one: the same random scripts, with equal responses and watch updates.
//!
//! The real etcd is Debian's package `etcd-server`, reached through its JSON gateway. All scripts run on one server, one
//! after the other, so revisions and leases are relative to those at the start of a script.

#![allow(clippy::disallowed_types, clippy::disallowed_methods, reason = "starts a server and talks to it")]

use crate::etcd_json::{Codec, encode, error_of, number};
use crate::etcd_script::{DoubleClient, Step, steps};
use http_body_util::{BodyExt, Full};
use hyper::Request;
use hyper::body::{Bytes, Incoming};
use hyper_util::rt::TokioIo;
use octokv_base::Nanos;
use octokv_cluster::WatchUpdate;
use octokv_cluster::etcd::{
    DeleteRequest, EtcdError, EtcdRequest, EtcdResponse, KeyRange, LeaseId, PutRequest, RangeRequest,
    ResponseBody, Revision, TxnOperation, TxnRequest, WatchEvent, WatchRequest,
};
use octokv_sim::etcd::EtcdConfig;
use proptest::test_runner::{Config, RngSeed, TestRunner};
use serde_json::{Value, json};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fs::File;
use std::net::{SocketAddr, TcpListener};
use std::process::{Child, Command, Stdio};
use std::time::Duration;
use tempfile::TempDir;
use tokio::net::TcpStream;
use tokio::runtime::Runtime;

/// The time that the server has for anything.
const LIMIT: Duration = Duration::from_secs(60);

/// A running etcd. The drop kills it and removes its data.
struct RealEtcd {
    child: Child,
    address: SocketAddr,
    directory: TempDir,
    runtime: Runtime,
}

impl Drop for RealEtcd {
    fn drop(&mut self) {
        // It may have ended already; in either case none is left.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A watch of the real server.
struct RealWatch {
    body: Incoming,
    received: Vec<u8>,
    /// Messages that were received and not returned yet.
    messages: Vec<Value>,
}

impl RealEtcd {
    fn start() -> RealEtcd {
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_io().enable_time().build().unwrap();
        // Another process can take a free port in between.
        let mut last = String::new();
        for _ in 0..3 {
            match RealEtcd::try_start(&runtime) {
                Ok((child, address, directory)) => return RealEtcd { child, address, directory, runtime },
                Err(log) => last = log,
            }
        }
        panic!("etcd does not start: {last}");
    }

    fn try_start(runtime: &Runtime) -> Result<(Child, SocketAddr, TempDir), String> {
        let directory = TempDir::new().unwrap();
        let ports = [0, 1].map(|_| TcpListener::bind("127.0.0.1:0").unwrap());
        let [address, peer] = ports.map(|listener| listener.local_addr().unwrap());
        let (client_url, peer_url) = (format!("http://{address}"), format!("http://{peer}"));
        let log = File::create(directory.path().join("log")).unwrap();
        let mut command = Command::new("etcd");
        command.args(["--data-dir", directory.path().join("data").to_str().unwrap()]);
        command.args(["--listen-client-urls", &client_url, "--advertise-client-urls", &client_url]);
        command.args(["--listen-peer-urls", &peer_url, "--initial-advertise-peer-urls", &peer_url]);
        command.args(["--initial-cluster", &format!("default={peer_url}"), "--unsafe-no-fsync"]);
        command.stdin(Stdio::null()).stdout(log.try_clone().unwrap()).stderr(log);
        let child = command.spawn();
        let mut child = child.expect("Debian's etcd-server is installed (scripts/install-test-packages)");
        let is_ready = runtime.block_on(async {
            let deadline = tokio::time::Instant::now() + LIMIT;
            while tokio::time::Instant::now() < deadline && child.try_wait().unwrap().is_none() {
                let probe = json!({ "key": encode(b"probe") });
                if matches!(call(address, "kv/range", &probe).await, Ok(Ok(_))) {
                    return true;
                }
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
            false
        });
        match is_ready {
            true => Ok((child, address, directory)),
            false => {
                let _ = child.kill();
                let _ = child.wait();
                Err(std::fs::read_to_string(directory.path().join("log")).unwrap_or_default())
            }
        }
    }

    /// Calls a method: its response, or its error message.
    fn call(&self, path: &str, body: &Value) -> Result<Value, String> {
        let response = self
            .runtime
            .block_on(async { tokio::time::timeout(LIMIT, call(self.address, path, body)).await });
        match response {
            Ok(Ok(result)) => result,
            other => {
                let log = std::fs::read_to_string(self.directory.path().join("log"));
                panic!("{path}: {other:?}\n{}", log.unwrap_or_default());
            }
        }
    }

    /// Begins a watch, and waits until it has begun.
    fn watch(&self, request: &Value) -> RealWatch {
        let body = json!({ "create_request": request });
        let response = self.runtime.block_on(send(self.address, "watch", &body)).unwrap();
        let mut watch = RealWatch { body: response, received: Vec::new(), messages: Vec::new() };
        let created = self.next_message(&mut watch);
        assert_eq!(created["result"]["created"], true, "{created}");
        watch
    }

    fn next_message(&self, watch: &mut RealWatch) -> Value {
        while watch.messages.is_empty() {
            let frame =
                self.runtime.block_on(async { tokio::time::timeout(LIMIT, watch.body.frame()).await });
            let frame = frame.expect("the watch sends within the limit").expect("the watch is open").unwrap();
            watch.received.extend_from_slice(frame.data_ref().expect("a frame of data"));
            while let Some(end) = watch.received.iter().position(|&byte| byte == b'\n') {
                let line: Vec<u8> = watch.received.drain(..=end).collect();
                if line.len() > 1 {
                    watch.messages.push(serde_json::from_slice(&line).unwrap());
                }
            }
        }
        watch.messages.remove(0)
    }
}

async fn send(address: SocketAddr, path: &str, body: &Value) -> Result<Incoming, String> {
    let text = |error: hyper::Error| error.to_string();
    let stream = TcpStream::connect(address).await.map_err(|error| error.to_string())?;
    let (mut sender, connection) =
        hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.map_err(text)?;
    tokio::spawn(connection);
    let request = Request::post(format!("/v3/{path}")).header("host", "etcd");
    let request = request.body(Full::new(Bytes::from(body.to_string()))).unwrap();
    Ok(sender.send_request(request).await.map_err(text)?.into_body())
}

/// The outer error is the connection's, the inner one etcd's.
async fn call(address: SocketAddr, path: &str, body: &Value) -> Result<Result<Value, String>, String> {
    let body = send(address, path, body).await?;
    let bytes = body.collect().await.map_err(|error| error.to_string())?.to_bytes();
    let value: Value = serde_json::from_slice(&bytes).map_err(|error| error.to_string())?;
    match value["error"].as_str() {
        Some(message) => Ok(Err(message.to_owned())),
        None => Ok(Ok(value)),
    }
}

/// A script's run on both.
struct Comparison<'a> {
    real: &'a RealEtcd,
    codec: Codec,
    double: DoubleClient,
    /// The real watches by the tokens of the double's.
    watches: BTreeMap<u64, RealWatch>,
}

impl Comparison<'_> {
    /// Empties the real store and begins.
    fn new(real: &RealEtcd, lease_base: i64) -> Comparison<'_> {
        let everything = Codec { revision_base: 0, lease_base: 0 }.encode_range(&KeyRange::all());
        real.call("kv/put", &json!({ "key": encode(b"a") })).unwrap();
        let emptied = real.call("kv/deleterange", &everything).unwrap();
        let revision_base = number(&emptied["header"]["revision"]) as u64 - 1;
        let codec = Codec { revision_base, lease_base };
        let double = DoubleClient::new(EtcdConfig::immediate());
        Comparison { real, codec, double, watches: BTreeMap::new() }
    }

    fn real_request(&self, request: &EtcdRequest) -> Result<EtcdResponse, EtcdError> {
        let (path, body) = self.codec.encode_request(request);
        match self.real.call(path, &body) {
            Ok(value) => self.codec.response(request, &value),
            Err(message) => Err(error_of(&message)),
        }
    }

    /// Runs a request on both and compares the responses, and the watches that began without a start revision.
    fn request(&mut self, request: &EtcdRequest) {
        let mut found = self.double.request(request.clone());
        let real = self.real_request(request);
        if let (
            Ok(EtcdResponse { body: ResponseBody::TimeToLive(Some(found)), .. }),
            Ok(EtcdResponse { body: ResponseBody::TimeToLive(Some(real)), .. }),
        ) = (&mut found, &real)
        {
            // The real one's time passes.
            assert!((0..=60).contains(&(found.remaining_s - real.remaining_s)), "{found:?} {real:?}");
            found.remaining_s = real.remaining_s;
        }
        assert_eq!(found, real, "{request:?}");
        self.compare_watches();
    }

    fn watch(&mut self, request: &WatchRequest) -> u64 {
        let token = self.double.watch(request.clone());
        self.double.wait(Nanos::ZERO);
        self.watches.insert(token, self.real.watch(&self.codec.encode_watch(request)));
        token
    }

    /// Receives from each real watch what the double's has received since the last call.
    fn compare_watches(&mut self) {
        self.double.wait(Nanos::ZERO);
        let Comparison { real, codec, double, watches } = self;
        for (token, watch) in watches {
            let updates = std::mem::take(double.updates.get_mut(token).unwrap());
            let mut wanted = Vec::new();
            for update in updates {
                match update {
                    WatchUpdate::Events { events, .. } => wanted.extend(events),
                    WatchUpdate::Created { .. } => {}
                    WatchUpdate::Compacted { compact_revision } => {
                        let message = real.next_message(watch);
                        assert_eq!(message["result"]["canceled"], true, "{message}");
                        assert_eq!(codec.revision(&message["result"]["compact_revision"]), compact_revision);
                    }
                    other => panic!("{other:?}"),
                }
            }
            let mut found: Vec<WatchEvent> = Vec::new();
            while found.len() < wanted.len() {
                let message = real.next_message(watch);
                let events = message["result"]["events"].as_array().unwrap_or_else(|| panic!("{message}"));
                let events: Vec<WatchEvent> = events.iter().map(|event| codec.event(event)).collect();
                let last = found.last().map_or(Revision(0), |event| event.change.revision());
                assert!(last < events[0].change.revision(), "a revision in two updates");
                found.extend(events);
            }
            assert_eq!(wanted, found);
        }
    }

    /// Changes the first key of a watch, which then must have received this as its last event. More than once if the watch
    /// begins later.
    fn end_watch(&mut self, request: &WatchRequest) {
        let start = request.start_revision.unwrap_or_default();
        loop {
            let (key, value) = (request.range.start.clone(), b"end".to_vec());
            let put = PutRequest { key, value, lease: LeaseId::NONE, with_previous: false };
            self.request(&EtcdRequest::Put(put));
            if self.double.revision() >= start {
                return;
            }
        }
    }
}

fn run(real: &RealEtcd, lease_base: i64, steps: &[Step]) {
    let mut comparison = Comparison::new(real, lease_base);
    let (mut from_now, mut from_the_past) = (Vec::new(), Vec::new());
    for step in steps {
        match step.resolve(comparison.double.revision(), Revision(2)) {
            Step::Request(request) => comparison.request(&request),
            Step::Watch(watch) if watch.range.start.is_empty() => {}
            // A real watch of the past may be overtaken by a compaction: these begin when the script has ended.
            Step::Watch(watch) if watch.start_revision.is_some() => from_the_past.push(step.clone()),
            Step::Watch(watch) => {
                comparison.watch(&watch);
                from_now.push(watch);
            }
            Step::Wait(_) => unreachable!("no waits with a real etcd"),
        }
    }
    for watch in from_now {
        comparison.end_watch(&watch);
    }
    for step in from_the_past {
        let Step::Watch(watch) = step.resolve(comparison.double.revision(), Revision(2)) else {
            unreachable!("a watch");
        };
        comparison.watch(&watch);
        comparison.compare_watches();
        comparison.end_watch(&watch);
    }
    for lease in 1..=3 {
        comparison.request(&EtcdRequest::LeaseRevoke { lease: LeaseId(lease) });
    }
}

#[test]
fn random_scripts_have_the_responses_of_a_real_etcd() {
    let real = RealEtcd::start();
    let case = RefCell::new(0);
    let config = Config {
        cases: 40,
        rng_seed: RngSeed::Fixed(22),
        failure_persistence: None,
        max_shrink_iters: 400,
        ..Config::default()
    };
    let run_one = |steps: Vec<Step>| {
        *case.borrow_mut() += 10;
        run(&real, *case.borrow(), &steps);
        Ok(())
    };
    TestRunner::new(config).run(&steps(false), run_one).unwrap_or_else(|failure| panic!("{failure}"));
}

fn put(key: &str, lease: i64) -> EtcdRequest {
    let (key, value) = (key.as_bytes().to_vec(), b"x".to_vec());
    EtcdRequest::Put(PutRequest { key, value, lease: LeaseId(lease), with_previous: false })
}

fn watch_from(start_revision: Option<Revision>) -> WatchRequest {
    WatchRequest { range: KeyRange::all(), start_revision, with_previous: true, progress_notify: false }
}

#[test]
fn a_lease_that_is_not_kept_alive_ends_as_in_a_real_etcd() {
    let real = RealEtcd::start();
    let mut comparison = Comparison::new(&real, 0);
    // Granted at the least time to live.
    comparison.request(&EtcdRequest::LeaseGrant { lease: LeaseId(1), ttl_s: 0 });
    comparison.request(&EtcdRequest::LeaseGrant { lease: LeaseId(2), ttl_s: 1_000 });
    for key in ["b", "a", "c"] {
        comparison.request(&put(key, 1));
    }
    comparison.request(&put("d", 2));
    comparison.request(&put("c", 2));
    comparison.watch(&watch_from(None));
    // On the double its time passes here, on the real one while the events are awaited.
    comparison.double.wait(Nanos::from_secs(3));
    comparison.compare_watches();
    let [one, two] = [1, 2].map(LeaseId);
    comparison.request(&EtcdRequest::LeaseKeepAlive { lease: one });
    comparison.request(&EtcdRequest::LeaseTimeToLive { lease: one });
    comparison.request(&EtcdRequest::LeaseTimeToLive { lease: two });
    comparison.request(&EtcdRequest::Range(RangeRequest::new(KeyRange::all())));
}

#[test]
fn a_watch_from_the_compaction_misses_its_deletions_as_in_a_real_etcd() {
    let real = RealEtcd::start();
    let mut comparison = Comparison::new(&real, 0);
    comparison.request(&put("a", 0));
    comparison.request(&put("b", 0));
    let delete = DeleteRequest { range: KeyRange::key("a"), with_previous: true };
    comparison.request(&EtcdRequest::Delete(delete));
    let deleted_at = comparison.double.revision();
    comparison.request(&put("b", 0));
    comparison.request(&EtcdRequest::Compact { revision: deleted_at });
    for start in [deleted_at, deleted_at.next(), deleted_at.previous()] {
        comparison.watch(&watch_from(Some(start)));
        comparison.compare_watches();
    }
    comparison.request(&put("c", 0));
}

#[test]
fn a_transaction_of_too_many_operations_is_refused_as_by_a_real_etcd() {
    let real = RealEtcd::start();
    let mut comparison = Comparison::new(&real, 0);
    for count in [128, 129] {
        let txn = EtcdRequest::Txn(TxnRequest {
            failure: (0..count).map(|_| TxnOperation::Range(RangeRequest::new(KeyRange::key("a")))).collect(),
            ..Default::default()
        });
        comparison.request(&txn);
    }
}
