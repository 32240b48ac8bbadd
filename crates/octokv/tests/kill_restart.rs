//! A server killed with SIGKILL under load, 50 times: every acknowledged write is there after each restart.

use crate::common::{Server, octokv, temp_directory};
use octokv_base::{Nanos, Prng};
use octokv_bench::ack_log::{AckLog, WriteControl};
use octokv_bench::kv_worker::{connect, disconnect};
use octokv_client::{ClientConfig, Reconnect, Session, Url};
use octokv_runtime::KernelSockets;
use octokv_sys::clock::now;

const KILLS: u64 = 50;
const DEPTH: usize = 32;
const KEYS: usize = 400;

fn session(server: &Server) -> Session<KernelSockets> {
    let url: Url = server.url.parse().unwrap();
    let settings = ClientConfig {
        subsystem_nqn: url.subsystem.clone(),
        queue_depth: DEPTH as u16,
        reconnect: Reconnect::Never,
        ..ClientConfig::default()
    };
    connect(server.authority().parse().unwrap(), settings, now).unwrap()
}

#[test]
fn every_acknowledged_write_survives_fifty_kills_under_load() {
    let directory = temp_directory();
    let mut random = Prng::new(50);
    let mut log = AckLog::new(KEYS, 7);
    let mut in_doubt = 0;
    for kill in 0..KILLS {
        let mut server = Server::start(directory.path(), "64MiB");
        let mut session = session(&server);
        log.verify(&mut session, now, DEPTH).unwrap_or_else(|error| panic!("kill {kill}: {error}"));
        let kill_at = now() + Nanos::from_millis(5 + random.below(56));
        let mut killed = false;
        let written = log.write(&mut session, now, DEPTH, |_| {
            if !killed && now() >= kill_at {
                server.kill();
                killed = true;
            }
            WriteControl::Continue
        });
        written.unwrap_or_else(|failure| panic!("kill {kill}: {failure}"));
        assert!(killed, "the server was lost before it was killed: {}", server.unexpected_stderr());
        in_doubt += log.in_doubt_count();
    }
    let server = Server::start(directory.path(), "64MiB");
    let mut session = session(&server);
    let keys = log.verify(&mut session, now, DEPTH).unwrap_or_else(|error| panic!("{error}"));
    disconnect(session, now);
    // The test is meaningful only if the kills interrupted writes and keys survived.
    assert!(log.acknowledged_count() > KILLS * 10, "{} writes", log.acknowledged_count());
    assert!(in_doubt as u64 > KILLS * DEPTH as u64 / 2, "{in_doubt} writes in doubt");
    assert!(keys > KEYS / 4, "{keys} keys");
    server.stop();
    let device = directory.path().join("device");
    let checked = octokv(["check", "--device", device.to_str().unwrap()]);
    assert!(checked.stdout_ok().contains(&format!("keys      {keys}\n")), "{}", checked.text());
}

#[test]
fn the_ack_log_detects_a_node_that_lost_writes() {
    let directory = temp_directory();
    let mut log = AckLog::new(KEYS, 8);
    let server = Server::start(directory.path(), "64MiB");
    let mut writing = session(&server);
    let control =
        |acknowledged| if acknowledged >= 100 { WriteControl::Stop } else { WriteControl::Continue };
    log.write(&mut writing, now, DEPTH, control).unwrap();
    assert_eq!(log.in_doubt_count(), 0);
    disconnect(writing, now);
    server.stop();
    let device = directory.path().join("device");
    let arguments = ["--device", device.to_str().unwrap(), "--listen", "127.0.0.1:0", "--format"];
    let emptied = Server::start_with(directory.path(), &arguments);
    let error = log.verify(&mut session(&emptied), now, DEPTH).unwrap_err();
    assert!(error.to_string().contains("the key does not exist"), "{error}");
}
