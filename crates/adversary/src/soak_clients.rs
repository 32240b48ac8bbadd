//! The hosts of a soak: each on a thread of its own, coming, working, leaving and coming back, until told to rest.
//!
//! In: a [`Stage`] that all of them look at. Out: counts, and the first thing that was not right. A node that is not
//! there is nothing wrong: hosts come back.

use crate::attacks::{ATTACKS, Attacker};
use crate::model_client::{Keeper, Link};
use crate::node_process::Node;
use crate::raw_connection::{HOST, Victim};
use anyhow::{Context, Result, anyhow, bail, ensure};
use octokv_admin::api_types::{AddNamespace, Existing, Kind, Namespace};
use octokv_admin::http_client as door;
use octokv_base::{NamespaceId, Random};
use octokv_bench::ack_log::{Failure, Flow, Ledger};
use octokv_bench::kv_worker::{connect, disconnect};
use octokv_client::blocking::Client;
use octokv_client::{Error, Reconnect, Session, Settings, Url};
use octokv_runtime::RealSockets;
use octokv_sys::clock::now;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU8, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Keys and depth of the ledger.
const LEDGER_KEYS: usize = 1000;
const LEDGER_DEPTH: usize = 32;

/// What hosts are to do now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Order {
    /// Leave, and wait.
    Rest,
    /// Work.
    Work,
    /// End.
    End,
}

/// What all hosts of a soak share.
pub struct Stage {
    /// The node.
    pub victim: Victim,
    /// Where clients find it.
    pub url: Url,
    /// Its administration socket.
    pub admin: PathBuf,
    /// Its binary, which has a client's commands too.
    pub binary: PathBuf,
    /// The longest value.
    pub value_bytes_max: usize,
    order: AtomicU8,
    resting: AtomicUsize,
    trouble: Mutex<Option<anyhow::Error>>,
    /// What was done, by [`COUNTS`].
    pub counts: [AtomicU64; COUNTS.len()],
}

/// What is counted.
pub const COUNTS: [&str; 9] = [
    "operations of the keepers",
    "writes of the ledger",
    "answers \"capacity exceeded\"",
    "answers \"busy\"",
    "verifications of all keys",
    "attacks",
    "clients killed",
    "connections lost",
    "namespaces added and removed, hosts allowed and denied",
];
const KEPT: usize = 0;
const WRITTEN: usize = 1;
const FULL: usize = 2;
const BUSY: usize = 3;
const VERIFIED: usize = 4;
const ATTACKED: usize = 5;
const KILLED: usize = 6;
const LOST: usize = 7;
const CHANGED: usize = 8;

impl Stage {
    /// Everybody rests at first.
    pub fn new(node: &Node, binary: PathBuf, value_bytes_max: usize) -> Stage {
        Stage {
            victim: node.victim().clone(),
            url: node.url().clone(),
            admin: node.admin().to_owned(),
            binary,
            value_bytes_max,
            order: AtomicU8::new(Order::Rest as u8),
            resting: AtomicUsize::new(0),
            trouble: Mutex::default(),
            counts: Default::default(),
        }
    }

    /// Tells everybody.
    pub fn order(&self, order: Order) {
        self.order.store(order as u8, Ordering::Release);
    }

    fn is(&self, order: Order) -> bool {
        self.order.load(Ordering::Acquire) == order as u8
    }

    /// Whether hosts may work.
    fn works(&self) -> bool {
        self.is(Order::Work)
    }

    /// Waits while everybody rests; false at the end.
    fn wait(&self) -> bool {
        self.resting.fetch_add(1, Ordering::AcqRel);
        while self.is(Order::Rest) {
            std::thread::sleep(Duration::from_millis(5));
        }
        self.resting.fetch_sub(1, Ordering::AcqRel);
        !self.is(Order::End)
    }

    /// How many hosts have left the node and rest.
    pub fn resting(&self) -> usize {
        self.resting.load(Ordering::Acquire)
    }

    /// The first thing that was not right, where something was.
    pub fn trouble(&self) -> Option<anyhow::Error> {
        self.trouble.lock().ok()?.take()
    }

    /// Keeps what a host ended with.
    pub fn note(&self, who: &str, result: Result<()>) {
        if let (Err(error), Ok(mut trouble)) = (result, self.trouble.lock()) {
            trouble.get_or_insert(error.context(who.to_owned()));
        }
    }

    fn count(&self, what: usize, more: u64) {
        self.counts[what].fetch_add(more, Ordering::Relaxed);
    }

    fn client(&self, host: &str) -> Result<Client, Error> {
        self.client_of(host, 1)
    }

    fn client_of(&self, host: &str, nsid: u32) -> Result<Client, Error> {
        let settings = Settings { host: host.to_owned(), reconnect: Reconnect::Never, ..Settings::default() };
        let url = Url { namespace: NamespaceId(nsid), ..self.url.clone() };
        Client::connect_with(&url.to_string(), settings)
    }
}

/// How long writes of a lost connection may still land.
const LATE_WRITES: Duration = Duration::from_secs(3);

/// A host that could not connect tries again in a moment.
fn in_a_moment() {
    std::thread::sleep(Duration::from_millis(20));
}

/// Puts, gets, deletes, lists, by a [`Keeper`]; each visit begins with a look at every key.
///
/// # Errors
/// When the node broke a promise.
pub fn keep(stage: &Stage, name: u8) -> Result<()> {
    let host = format!("nqn.2026-11.io.octokv:keeper-{}", char::from(name));
    let mut keeper = Keeper::new(name, stage.value_bytes_max);
    let mut random = Random::new(u64::from(name));
    while stage.wait() {
        let Ok(client) = stage.client(&host) else {
            in_a_moment();
            continue;
        };
        let before = keeper.counts;
        let mut link = match keeper.verify(&client)? {
            Some(_) => Link::Up,
            None => Link::Lost,
        };
        stage.count(VERIFIED, u64::from(link == Link::Up));
        let steps = 50 + random.below(2000);
        for _ in 0..steps {
            if link == Link::Lost || !stage.works() {
                break;
            }
            link = keeper.step(&client)?;
        }
        stage.count(LOST, u64::from(link == Link::Lost));
        for (what, index) in [(KEPT, 0), (FULL, 1), (BUSY, 2)] {
            stage.count(what, keeper.counts[index] - before[index]);
        }
    }
    let client = stage.client(&host).map_err(|error| anyhow!("{error}"))?;
    keeper.verify(&client)?.context("the node was lost at the end")?;
    Ok(())
}

fn session(stage: &Stage) -> Result<Session<RealSockets>, Error> {
    let settings = Settings {
        subsystem: stage.victim.nqn.clone(),
        host: "nqn.2026-11.io.octokv:ledger".to_owned(),
        depth: LEDGER_DEPTH as u16,
        header_digest: true,
        data_digest: true,
        reconnect: Reconnect::Never,
        ..Settings::default()
    };
    connect(stage.victim.address, settings, now)
}

/// Writes many at a time, by a [`Ledger`], with digests; leaves in order or in the midst of writes.
///
/// # Errors
/// When the node broke a promise.
pub fn write(stage: &Stage) -> Result<()> {
    let (mut ledger, mut random) = (Ledger::new(LEDGER_KEYS, 99), Random::new(99));
    while stage.wait() {
        let Ok(mut session) = session(stage) else {
            in_a_moment();
            continue;
        };
        match ledger.verify(&mut session, now, LEDGER_DEPTH) {
            Ok(_) => stage.count(VERIFIED, 1),
            Err(Failure::Broken(broken)) => bail!("{broken}"),
            Err(_) => {
                stage.count(LOST, 1);
                in_a_moment();
                continue;
            }
        }
        let goal = ledger.acknowledged() + 100 + random.below(5000);
        let before = ledger.acknowledged();
        let written = ledger.write(&mut session, now, LEDGER_DEPTH, |acknowledged| {
            if acknowledged >= goal || !stage.works() { Flow::Enough } else { Flow::GoOn }
        });
        stage.count(WRITTEN, ledger.acknowledged() - before);
        match written {
            Ok(()) => {}
            // Others fill the device at times, and take buffers: the write was refused, others are in doubt.
            Err(Failure::Command(_, Error::CapacityExceeded)) => stage.count(FULL, 1),
            Err(Failure::Command(_, Error::Busy)) => stage.count(BUSY, 1),
            Err(failure) => bail!("{failure}"),
        }
        if session.ended().is_some() {
            stage.count(LOST, 1);
            if ledger.in_doubt() > 0 {
                // A node that still runs may carry out what it had received: a look before that would settle nothing.
                std::thread::sleep(LATE_WRITES);
            }
        } else if random.one_in(2) {
            disconnect(session, now);
        }
    }
    let mut session = session(stage).map_err(|error| anyhow!("{error}"))?;
    ledger.verify(&mut session, now, LEDGER_DEPTH).map_err(|failure| anyhow!("{failure}"))?;
    Ok(())
}

/// Fills the device until there is no room, then deletes all of it.
///
/// # Errors
/// When a full device answers anything else than that it is full.
pub fn fill(stage: &Stage) -> Result<()> {
    let value = vec![0xf1; stage.value_bytes_max];
    while stage.wait() {
        let Ok(client) = stage.client("nqn.2026-11.io.octokv:filler") else {
            in_a_moment();
            continue;
        };
        let (mut count, mut lost) = (0_u32, false);
        while stage.works() {
            match client.put(format!("filler{count}").as_bytes(), &value) {
                Ok(()) => count += 1,
                Err(Error::CapacityExceeded) => {
                    stage.count(FULL, 1);
                    break;
                }
                Err(Error::Busy) => stage.count(BUSY, 1),
                Err(_) => {
                    lost = true;
                    break;
                }
            }
        }
        // Those of a visit that was cut short too.
        for number in 0..count.max(600) {
            if lost || client.delete(format!("filler{number}").as_bytes()).is_err() {
                break;
            }
        }
        let until = Instant::now() + Duration::from_secs(3);
        drop(client);
        while stage.works() && Instant::now() < until {
            in_a_moment();
        }
    }
    Ok(())
}

/// One attack after the other, each for a second or so.
///
/// # Errors
/// When the system makes no thread.
pub fn attack(stage: &Stage, seed: u64) -> Result<()> {
    let mut random = Random::new(seed);
    while stage.wait() {
        let attack = &ATTACKS[1 + random.below(ATTACKS.len() as u64 - 1) as usize];
        let attacker = Attacker::start(attack, &stage.victim, true)?;
        attacker.go();
        let until = Instant::now() + Duration::from_millis(300 + random.below(1500));
        while stage.works() && Instant::now() < until {
            in_a_moment();
        }
        attacker.end();
        stage.count(ATTACKED, 1);
    }
    Ok(())
}

/// Client processes under load, killed with SIGKILL.
///
/// # Errors
/// When the system makes no process.
pub fn kill_clients(stage: &Stage) -> Result<()> {
    let mut random = Random::new(13);
    while stage.wait() {
        let mut child = Command::new(&stage.binary)
            .args(["bench", "--threads", "4", "--depth", "8", "--seconds", "60", "--num", "500"])
            .args([
                "--key-size",
                "12",
                "--value-size",
                "20000",
                "--workload",
                "fillrandom,readrandom",
                "--url",
            ])
            .arg(stage.url.to_string())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()?;
        let until = Instant::now() + Duration::from_millis(200 + random.below(1500));
        while stage.works() && Instant::now() < until {
            in_a_moment();
        }
        child.kill()?;
        child.wait()?;
        stage.count(KILLED, 1);
    }
    Ok(())
}

/// Namespaces that come and go.
const ADDED: [(u32, Kind); 2] = [(7, Kind::Kv), (8, Kind::Block)];
/// A host that is let in and sent away.
const VISITOR: &str = "nqn.2026-11.io.octokv:visitor";
/// Everybody else in a soak.
const REGULARS: [&str; 6] = [
    HOST,
    "nqn.2026-11.io.octokv:keeper-a",
    "nqn.2026-11.io.octokv:keeper-b",
    "nqn.2026-11.io.octokv:ledger",
    "nqn.2026-11.io.octokv:filler",
    "nqn.2026-11.io.octokv:client",
];

/// What an operator's request came to: done, or the node was not there.
fn done(answer: Result<(), door::Error>) -> Result<bool> {
    match answer {
        Ok(()) => Ok(true),
        // It is gone already, or it was there: a node that was killed in between has kept what was asked before.
        Err(door::Error::Refused(404 | 409, _)) => Ok(true),
        Err(door::Error::Unreachable(..) | door::Error::Garbled(_)) => Ok(false),
        Err(error) => bail!("{error}"),
    }
}

/// Changes the node as an operator would: adds namespaces, uses them, removes them; allows hosts and denies them.
///
/// # Errors
/// When a change has not the effect that it must have.
pub fn change(stage: &Stage) -> Result<()> {
    let mut tidy = true;
    loop {
        // Whoever rests leaves the node as it was found.
        while !tidy && !stage.works() && !stage.is(Order::End) {
            tidy = restore(stage)?;
            in_a_moment();
        }
        if !stage.wait() {
            return Ok(());
        }
        tidy = false;
        if !namespaces_come_and_go(stage)? || !visitors_come_and_go(stage)? {
            stage.count(LOST, 1);
        }
        stage.count(CHANGED, 1);
        in_a_moment();
    }
}

fn restore(stage: &Stage) -> Result<bool> {
    for (nsid, _) in ADDED {
        if !done(door::delete(&stage.admin, &format!("/v1/namespaces/{nsid}")))? {
            return Ok(false);
        }
    }
    done(door::put(&stage.admin, "/v1/hosts/any", None::<&()>))
}

/// False when the node was lost on the way.
fn namespaces_come_and_go(stage: &Stage) -> Result<bool> {
    for (nsid, kind) in ADDED {
        let asked = AddNamespace {
            nsid: Some(nsid),
            kind,
            device: "memory".to_owned(),
            size_bytes: Some(16 << 20),
            block_bytes: None,
            ana_group: None,
            existing: Existing::Check,
        };
        let added = door::post::<Namespace>(&stage.admin, "/v1/namespaces", &asked).map(drop);
        if !done(added)? {
            return Ok(false);
        }
    }
    if let Ok(client) = stage.client_of("nqn.2026-11.io.octokv:visitor", ADDED[0].0) {
        for number in 0..100_u8 {
            if client.put(&[number], &[number; 9000]).is_err() {
                break;
            }
            let found = client.get(&[number]);
            ensure!(
                !matches!(&found, Ok(value) if value.as_deref() != Some(&[number; 9000][..])),
                "{found:?}"
            );
        }
        // Removed under its feet.
        if !done(door::delete(&stage.admin, &format!("/v1/namespaces/{}", ADDED[0].0)))? {
            return Ok(false);
        }
        ensure!(client.put(b"gone", b"gone").is_err(), "a namespace that was removed took a value");
    }
    done(door::delete(&stage.admin, &format!("/v1/namespaces/{}", ADDED[1].0)))
}

/// False when the node was lost on the way.
fn visitors_come_and_go(stage: &Stage) -> Result<bool> {
    let host = |name: &str| format!("/v1/hosts/{}", door::segment(name));
    for name in REGULARS.iter().chain([&VISITOR]) {
        if !done(door::put(&stage.admin, &host(name), None::<&()>))? {
            return Ok(false);
        }
    }
    if !done(door::delete(&stage.admin, &host("any")))? {
        return Ok(false);
    }
    let visitor = stage.client(VISITOR);
    if !done(door::delete(&stage.admin, &host(VISITOR)))? {
        return Ok(false);
    }
    if let Ok(visitor) = visitor {
        let sent_away =
            crate::node_process::eventually(Duration::from_secs(10), || visitor.get(b"x").is_err());
        ensure!(sent_away, "a host that was denied is still served");
    }
    if stage.works() && done(door::get::<Vec<String>>(&stage.admin, "/v1/hosts").map(drop))? {
        ensure!(stage.client(VISITOR).is_err(), "a host that was denied was let in");
    }
    done(door::put(&stage.admin, "/v1/hosts/any", None::<&()>))
}
