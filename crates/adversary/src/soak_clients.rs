//! The clients of a soak test: each connects, works, disconnects and reconnects on its own thread, until paused.
//!
//! In: a shared [`SoakControl`]. Out: counters, and the first error. An unreachable node is no error: clients retry.

use crate::attacks::{ATTACKS, AttackThread};
use crate::model_client::{ConnState, ModelClient};
use crate::node_process::NodeProcess;
use crate::raw_connection::{ATTACKER_NQN, TargetAddr};
use anyhow::{Context, Result, anyhow, bail, ensure};
use octokv_admin::DeviceNames;
use octokv_admin::api_types::{AddNamespace, ExistingDataMode, NamespaceSummary, NamespaceType};
use octokv_admin::http_client as admin_client;
use octokv_base::{NamespaceId, Prng};
use octokv_bench::ack_log::{AckLog, AckLogError, WriteControl};
use octokv_bench::kv_worker::{connect, disconnect};
use octokv_client::blocking::BlockingClient;
use octokv_client::{ClientConfig, Error, Reconnect, Session, Url};
use octokv_runtime::KernelSockets;
use octokv_sys::clock::now;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU8, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Keys and queue depth of the acknowledgement log.
const ACK_LOG_KEYS: usize = 1000;
const ACK_LOG_DEPTH: usize = 32;

/// Command to all client threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum SoakCommand {
    /// Disconnect and wait.
    Pause,
    /// Connect and work.
    Run,
    /// Verify once more and end.
    Stop,
}

/// State that all client threads share.
pub struct SoakControl {
    /// Address of the node.
    pub target_addr: TargetAddr,
    /// URL for clients.
    pub url: Url,
    /// Path of the node's admin socket.
    pub admin: PathBuf,
    /// Path of the octokv binary, which also contains the benchmark client.
    pub binary: PathBuf,
    /// Maximum value length, in bytes.
    pub value_bytes_max: usize,
    command: AtomicU8,
    paused: AtomicUsize,
    first_error: Mutex<Option<anyhow::Error>>,
    /// Counters, in the order of [`COUNTER_NAMES`].
    pub counts: [AtomicU64; COUNTER_NAMES.len()],
}

/// Names of the counters.
pub const COUNTER_NAMES: [&str; 9] = [
    "operations of model clients",
    "writes of the acknowledgement log",
    "responses \"capacity exceeded\"",
    "responses \"busy\"",
    "verifications of all keys",
    "attacks",
    "clients killed",
    "connections lost",
    "namespaces added and removed, hosts allowed and denied",
];
const MODEL_OPERATIONS: usize = 0;
const ACK_LOG_WRITES: usize = 1;
const CAPACITY_EXCEEDED: usize = 2;
const BUSY_RESPONSES: usize = 3;
const VERIFICATIONS: usize = 4;
const ATTACKS_RUN: usize = 5;
const CLIENTS_KILLED: usize = 6;
const CONNECTIONS_LOST: usize = 7;
const ADMIN_CHANGES: usize = 8;

impl SoakControl {
    /// The initial command is [`SoakCommand::Pause`].
    pub fn new(node: &NodeProcess, binary: PathBuf, value_bytes_max: usize) -> SoakControl {
        SoakControl {
            target_addr: node.target_addr().clone(),
            url: node.url().clone(),
            admin: node.admin().to_owned(),
            binary,
            value_bytes_max,
            command: AtomicU8::new(SoakCommand::Pause as u8),
            paused: AtomicUsize::new(0),
            first_error: Mutex::default(),
            counts: Default::default(),
        }
    }

    /// Sets the command of all threads.
    pub fn set_command(&self, command: SoakCommand) {
        self.command.store(command as u8, Ordering::Release);
    }

    fn command_is(&self, command: SoakCommand) -> bool {
        self.command.load(Ordering::Acquire) == command as u8
    }

    /// Whether clients may work.
    fn may_run(&self) -> bool {
        self.command_is(SoakCommand::Run)
    }

    /// Counts this thread as paused and waits until it may work. Returns false if it must end.
    fn wait_while_paused(&self) -> bool {
        self.paused.fetch_add(1, Ordering::AcqRel);
        while self.command_is(SoakCommand::Pause) {
            std::thread::sleep(Duration::from_millis(5));
        }
        self.paused.fetch_sub(1, Ordering::AcqRel);
        !self.command_is(SoakCommand::Stop)
    }

    /// Number of threads that have disconnected and wait.
    pub fn paused_count(&self) -> usize {
        self.paused.load(Ordering::Acquire)
    }

    /// Takes the first error of a client, if any.
    pub fn take_error(&self) -> Option<anyhow::Error> {
        self.first_error.lock().ok()?.take()
    }

    /// Records the result of a thread; keeps the first error.
    pub fn record_result(&self, thread: &str, result: Result<()>) {
        if let (Err(error), Ok(mut first_error)) = (result, self.first_error.lock()) {
            first_error.get_or_insert(error.context(thread.to_owned()));
        }
    }

    fn add_count(&self, counter: usize, more: u64) {
        self.counts[counter].fetch_add(more, Ordering::Relaxed);
    }

    fn connect(&self, host: &str) -> Result<BlockingClient, Error> {
        self.connect_namespace(host, 1)
    }

    fn connect_namespace(&self, host: &str, nsid: u32) -> Result<BlockingClient, Error> {
        let config = ClientConfig {
            host_nqn: host.to_owned(),
            reconnect: Reconnect::Never,
            ..ClientConfig::default()
        };
        let url = Url { namespace: NamespaceId(nsid), ..self.url.clone() };
        BlockingClient::connect_with(&url.to_string(), config)
    }
}

/// Time within which the node completes or drops writes received on a lost connection.
const LATE_WRITE_DELAY: Duration = Duration::from_secs(3);

/// Pause before the next attempt to connect.
fn sleep_before_retry() {
    std::thread::sleep(Duration::from_millis(20));
}

/// Runs a [`ModelClient`]; each connection begins with a verification of every key.
///
/// # Errors
/// If a result contradicts the model.
pub fn run_model_client(control: &SoakControl, name: u8) -> Result<()> {
    let host = format!("nqn.2026-11.io.octokv:model-{}", char::from(name));
    let mut model_client = ModelClient::new(name, control.value_bytes_max);
    let mut random = Prng::new(u64::from(name));
    while control.wait_while_paused() {
        let Ok(client) = control.connect(&host) else {
            sleep_before_retry();
            continue;
        };
        let before = model_client.outcome_counts;
        let mut state = match model_client.verify_all(&client)? {
            Some(_) => ConnState::Up,
            None => ConnState::Lost,
        };
        control.add_count(VERIFICATIONS, u64::from(state == ConnState::Up));
        let steps = 50 + random.below(2000);
        for _ in 0..steps {
            if state == ConnState::Lost || !control.may_run() {
                break;
            }
            state = model_client.step(&client)?;
        }
        control.add_count(CONNECTIONS_LOST, u64::from(state == ConnState::Lost));
        for (counter, index) in [(MODEL_OPERATIONS, 0), (CAPACITY_EXCEEDED, 1), (BUSY_RESPONSES, 2)] {
            control.add_count(counter, model_client.outcome_counts[index] - before[index]);
        }
    }
    let client = control.connect(&host).map_err(|error| anyhow!("{error}"))?;
    model_client.verify_all(&client)?.context("the connection was lost at the end")?;
    Ok(())
}

fn connect_ack_log(control: &SoakControl) -> Result<Session<KernelSockets>, Error> {
    let config = ClientConfig {
        subsystem_nqn: control.target_addr.nqn.clone(),
        host_nqn: "nqn.2026-11.io.octokv:ack-log".to_owned(),
        queue_depth: ACK_LOG_DEPTH as u16,
        header_digest: true,
        data_digest: true,
        reconnect: Reconnect::Never,
        ..ClientConfig::default()
    };
    connect(control.target_addr.address, config, now)
}

/// Writes at depth 32 by an [`AckLog`], with digests; disconnects cleanly or drops writes in flight.
///
/// # Errors
/// If an acknowledged write is lost, or for an unexpected error.
pub fn run_ack_log(control: &SoakControl) -> Result<()> {
    let (mut ack_log, mut random) = (AckLog::new(ACK_LOG_KEYS, 99), Prng::new(99));
    while control.wait_while_paused() {
        let Ok(mut session) = connect_ack_log(control) else {
            sleep_before_retry();
            continue;
        };
        match ack_log.verify(&mut session, now, ACK_LOG_DEPTH) {
            Ok(_) => control.add_count(VERIFICATIONS, 1),
            Err(AckLogError::LostWrite(broken)) => bail!("{broken}"),
            Err(_) => {
                control.add_count(CONNECTIONS_LOST, 1);
                sleep_before_retry();
                continue;
            }
        }
        let goal = ack_log.acknowledged_count() + 100 + random.below(5000);
        let before = ack_log.acknowledged_count();
        let written = ack_log.write(&mut session, now, ACK_LOG_DEPTH, |acknowledged| {
            if acknowledged >= goal || !control.may_run() {
                WriteControl::Stop
            } else {
                WriteControl::Continue
            }
        });
        control.add_count(ACK_LOG_WRITES, ack_log.acknowledged_count() - before);
        match written {
            Ok(()) => {}
            // Other clients fill the device and its buffers at times: this write was rejected, others are in doubt.
            Err(AckLogError::Command(_, Error::CapacityExceeded)) => control.add_count(CAPACITY_EXCEEDED, 1),
            Err(AckLogError::Command(_, Error::Busy)) => control.add_count(BUSY_RESPONSES, 1),
            Err(failure) => bail!("{failure}"),
        }
        if session.ended().is_some() {
            control.add_count(CONNECTIONS_LOST, 1);
            if ack_log.in_doubt_count() > 0 {
                // The node may still execute writes it has received: verify only after they have completed.
                std::thread::sleep(LATE_WRITE_DELAY);
            }
        } else if random.one_in(2) {
            disconnect(session, now);
        }
    }
    let mut session = connect_ack_log(control).map_err(|error| anyhow!("{error}"))?;
    ack_log.verify(&mut session, now, ACK_LOG_DEPTH).map_err(|failure| anyhow!("{failure}"))?;
    Ok(())
}

/// Fills the device until its capacity is exceeded, then deletes all of its keys.
///
/// # Errors
/// None at present: errors of the node end only the connection.
pub fn run_filler(control: &SoakControl) -> Result<()> {
    let value = vec![0xf1; control.value_bytes_max];
    while control.wait_while_paused() {
        let Ok(client) = control.connect("nqn.2026-11.io.octokv:filler") else {
            sleep_before_retry();
            continue;
        };
        let (mut count, mut lost) = (0_u32, false);
        while control.may_run() {
            match client.put(format!("filler{count}").as_bytes(), &value) {
                Ok(()) => count += 1,
                Err(Error::CapacityExceeded) => {
                    control.add_count(CAPACITY_EXCEEDED, 1);
                    break;
                }
                Err(Error::Busy) => control.add_count(BUSY_RESPONSES, 1),
                Err(_) => {
                    lost = true;
                    break;
                }
            }
        }
        // Includes keys of an earlier, interrupted pass.
        for number in 0..count.max(600) {
            if lost || client.delete(format!("filler{number}").as_bytes()).is_err() {
                break;
            }
        }
        let until = Instant::now() + Duration::from_secs(3);
        drop(client);
        while control.may_run() && Instant::now() < until {
            sleep_before_retry();
        }
    }
    Ok(())
}

/// Runs random attacks, each for 0.3 to 1.8 seconds.
///
/// # Errors
/// If the system cannot create a thread.
pub fn run_attacker(control: &SoakControl, seed: u64) -> Result<()> {
    let mut random = Prng::new(seed);
    while control.wait_while_paused() {
        let attack = &ATTACKS[1 + random.below(ATTACKS.len() as u64 - 1) as usize];
        let attacker = AttackThread::start(attack, &control.target_addr, true)?;
        attacker.resume();
        let until = Instant::now() + Duration::from_millis(300 + random.below(1500));
        while control.may_run() && Instant::now() < until {
            sleep_before_retry();
        }
        attacker.stop();
        control.add_count(ATTACKS_RUN, 1);
    }
    Ok(())
}

/// Runs benchmark client processes and kills them under load with SIGKILL.
///
/// # Errors
/// If the system cannot create a process.
pub fn run_client_killer(control: &SoakControl) -> Result<()> {
    let mut random = Prng::new(13);
    while control.wait_while_paused() {
        let mut child = Command::new(&control.binary)
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
            .arg(control.url.to_string())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()?;
        let until = Instant::now() + Duration::from_millis(200 + random.below(1500));
        while control.may_run() && Instant::now() < until {
            sleep_before_retry();
        }
        child.kill()?;
        child.wait()?;
        control.add_count(CLIENTS_KILLED, 1);
    }
    Ok(())
}

/// Namespaces that the operator adds and removes.
const ADDED_NAMESPACES: [(u32, NamespaceType); 2] = [(7, NamespaceType::Kv), (8, NamespaceType::Block)];
/// A host that the operator allows and denies.
const VISITOR_NQN: &str = "nqn.2026-11.io.octokv:visitor";
/// All other hosts of a soak test.
const ALLOWED_NQNS: [&str; 6] = [
    ATTACKER_NQN,
    "nqn.2026-11.io.octokv:model-a",
    "nqn.2026-11.io.octokv:model-b",
    "nqn.2026-11.io.octokv:ack-log",
    "nqn.2026-11.io.octokv:filler",
    "nqn.2026-11.io.octokv:client",
];

/// Whether an admin request took effect; false if the node was unreachable.
fn admin_change_done(response: Result<(), admin_client::AdminClientError>) -> Result<bool> {
    match response {
        Ok(()) => Ok(true),
        // Not found or already present: an earlier request took effect although the node was killed.
        Err(admin_client::AdminClientError::Status(404 | 409, _)) => Ok(true),
        Err(
            admin_client::AdminClientError::Unreachable(..)
            | admin_client::AdminClientError::InvalidResponse(_),
        ) => Ok(false),
        Err(error) => bail!("{error}"),
    }
}

/// Reconfigures the node: adds, uses and removes namespaces; allows and denies hosts.
///
/// # Errors
/// If a change does not have its effect, or for an unexpected error.
pub fn run_admin(control: &SoakControl) -> Result<()> {
    let mut is_restored = true;
    loop {
        // Before a pause, restore the initial configuration.
        while !is_restored && !control.may_run() && !control.command_is(SoakCommand::Stop) {
            is_restored = restore_defaults(control)?;
            sleep_before_retry();
        }
        if !control.wait_while_paused() {
            return Ok(());
        }
        is_restored = false;
        if !add_and_remove_namespaces(control)? || !allow_and_deny_hosts(control)? {
            control.add_count(CONNECTIONS_LOST, 1);
        }
        control.add_count(ADMIN_CHANGES, 1);
        sleep_before_retry();
    }
}

fn restore_defaults(control: &SoakControl) -> Result<bool> {
    for (nsid, _) in ADDED_NAMESPACES {
        if !admin_change_done(admin_client::delete(&control.admin, &format!("/v1/namespaces/{nsid}")))? {
            return Ok(false);
        }
    }
    admin_change_done(admin_client::put(&control.admin, "/v1/hosts/any", None::<&()>))
}

/// Returns false if the node became unreachable.
fn add_and_remove_namespaces(control: &SoakControl) -> Result<bool> {
    for (nsid, kind) in ADDED_NAMESPACES {
        let request = AddNamespace {
            nsid: Some(nsid),
            kind,
            device: DeviceNames::new(vec!["memory".to_owned()]),
            size_bytes: Some(16 << 20),
            engine: None,
            cache_bytes: None,
            prepare_bytes: None,
            swap_bytes: None,
            block_bytes: None,
            ana_group: None,
            existing: ExistingDataMode::Check,
        };
        let added =
            admin_client::post::<NamespaceSummary>(&control.admin, "/v1/namespaces", &request).map(drop);
        if !admin_change_done(added)? {
            return Ok(false);
        }
    }
    if let Ok(client) = control.connect_namespace(VISITOR_NQN, ADDED_NAMESPACES[0].0) {
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
        // Removes the namespace while a client is connected to it.
        if !admin_change_done(admin_client::delete(
            &control.admin,
            &format!("/v1/namespaces/{}", ADDED_NAMESPACES[0].0),
        ))? {
            return Ok(false);
        }
        ensure!(client.put(b"gone", b"gone").is_err(), "a removed namespace accepted a write");
    }
    admin_change_done(admin_client::delete(
        &control.admin,
        &format!("/v1/namespaces/{}", ADDED_NAMESPACES[1].0),
    ))
}

/// Returns false if the node became unreachable.
fn allow_and_deny_hosts(control: &SoakControl) -> Result<bool> {
    let host = |name: &str| format!("/v1/hosts/{}", admin_client::encode_path_segment(name));
    for name in ALLOWED_NQNS.iter().chain([&VISITOR_NQN]) {
        if !admin_change_done(admin_client::put(&control.admin, &host(name), None::<&()>))? {
            return Ok(false);
        }
    }
    if !admin_change_done(admin_client::delete(&control.admin, &host("any")))? {
        return Ok(false);
    }
    let visitor = control.connect(VISITOR_NQN);
    if !admin_change_done(admin_client::delete(&control.admin, &host(VISITOR_NQN)))? {
        return Ok(false);
    }
    if let Ok(visitor) = visitor {
        let is_denied =
            crate::node_process::eventually(Duration::from_secs(10), || visitor.get(b"x").is_err());
        ensure!(is_denied, "a denied host is still served");
    }
    if control.may_run()
        && admin_change_done(admin_client::get::<Vec<String>>(&control.admin, "/v1/hosts").map(drop))?
    {
        ensure!(control.connect(VISITOR_NQN).is_err(), "a denied host could connect");
    }
    admin_change_done(admin_client::put(&control.admin, "/v1/hosts/any", None::<&()>))
}
