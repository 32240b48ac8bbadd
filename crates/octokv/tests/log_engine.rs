//! The log engine through the binary: a node that is killed under load, what `octokv stats`, `compact` and `check` say of it, and the settings
//! that it has.

use crate::common::{Server, octokv, serve_expecting_failure, temp_directory};
use octokv_base::{Nanos, Prng};
use octokv_bench::ack_log::{AckLog, WriteControl};
use octokv_bench::kv_worker::{connect, disconnect};
use octokv_client::blocking::BlockingClient;
use octokv_client::{ClientConfig, Reconnect, Session, Url};
use octokv_runtime::KernelSockets;
use octokv_sys::clock::now;
use serde_json::Value;
use std::path::Path;

const KILLS: u64 = 15;
const DEPTH: usize = 32;
const KEYS: usize = 400;

/// Starts a node with a log engine on a file in a directory.
fn start(directory: &Path, flags: &[&str]) -> Server {
    let (device, socket) = (directory.join("device"), directory.join("admin.sock"));
    let device = ["--device", device.to_str().unwrap(), "--size", "64MiB", "--engine", "log"];
    let admin = ["--listen", "127.0.0.1:0", "--admin", socket.to_str().unwrap()];
    Server::start_with(directory, &[&device[..], &admin, flags].concat())
}

fn run(directory: &Path, command: &[&str]) -> String {
    let socket = directory.join("admin.sock");
    let arguments = [command, &["--admin", socket.to_str().unwrap()]].concat();
    octokv(arguments).stdout_ok().to_owned()
}

/// The logs of namespace 1.
fn log(directory: &Path) -> Value {
    let interval: Value = serde_json::from_str(&run(directory, &["stats", "--json"])).unwrap();
    let [log] = &interval["logs"].as_array().unwrap()[..] else { panic!("one log engine in {interval}") };
    let others = ["trees", "compacted"].map(|name| interval[name].as_array().unwrap().len());
    assert_eq!((&log["nsid"], others), (&1.into(), [0, 0]), "{interval}");
    log.clone()
}

fn number(log: &Value, name: &str) -> u64 {
    log[name].as_u64().unwrap_or_else(|| panic!("{name} in {log}"))
}

fn check(directory: &Path) -> String {
    octokv(["check", "--device", directory.join("device").to_str().unwrap()]).stdout_ok().to_owned()
}

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
fn every_acknowledged_write_survives_kills_under_load() {
    let directory = temp_directory();
    let directory = directory.path();
    let mut random = Prng::new(15);
    let mut acknowledged = AckLog::new(KEYS, 7);
    for kill in 0..KILLS {
        let mut server = start(directory, &["--cores", "0,1", "--partitions", "4"]);
        let mut session = session(&server);
        acknowledged.verify(&mut session, now, DEPTH).unwrap_or_else(|error| panic!("kill {kill}: {error}"));
        let kill_at = now() + Nanos::from_millis(5 + random.below(56));
        let mut killed = false;
        let written = acknowledged.write(&mut session, now, DEPTH, |_| {
            if !killed && now() >= kill_at {
                server.kill();
                killed = true;
            }
            WriteControl::Continue
        });
        written.unwrap_or_else(|failure| panic!("kill {kill}: {failure}"));
        assert!(killed, "the server was lost before it was killed: {}", server.unexpected_stderr());
    }
    assert!(check(directory).contains("shutdown  not cleanly"));
    let server = start(directory, &["--cores", "0,1"]);
    let mut session = session(&server);
    let keys = acknowledged.verify(&mut session, now, DEPTH).unwrap_or_else(|error| panic!("{error}"));
    disconnect(session, now);
    assert!(acknowledged.acknowledged_count() > KILLS * 10, "{} writes", acknowledged.acknowledged_count());
    assert!(keys > KEYS / 4, "{keys} keys");
    let log = log(directory);
    assert_eq!([number(&log, "stores"), number(&log, "lost_stores")], [4, 0], "the volume's own number");
    server.stop();
    let checked = check(directory);
    for line in [&format!("keys      {keys}\n"), "shutdown  cleanly\n", "problems  0\n"] {
        assert!(checked.contains(line), "no \"{line}\" in {checked}");
    }
}

#[test]
fn stats_show_logs_and_a_compaction_on_request_frees_what_was_overwritten() {
    let directory = temp_directory();
    let directory = directory.path();
    let flags =
        ["--unit", "512", "--partitions", "2", "--chunk-bytes", "32KiB", "--compact-bytes-per-second", "0"];
    let server = start(directory, &flags);
    let client = BlockingClient::connect(&server.url).unwrap();
    for byte in 1..=20 {
        for index in 0..200 {
            client.put(format!("key{index:03}").as_bytes(), &[byte; 2_000]).unwrap();
        }
    }
    let written = log(directory);
    assert_eq!(
        ["stores", "chunk_bytes", "compaction_rounds"].map(|name| number(&written, name)),
        [2, 32 << 10, 0]
    );
    assert!(number(&written, "free_chunks") < number(&written, "chunks") - 20 * 200 * 2_000 / (32 << 10));
    let live = number(&written, "value_live_bytes");
    assert!((200 * 2_000..200 * 2_100).contains(&live), "{written}");
    assert!(number(&written, "images") >= 20 * 200 / 2 && number(&written, "batches") > 0, "{written}");
    let listed: Value = serde_json::from_str(&run(directory, &["ns", "list", "--json"])).unwrap();
    assert_eq!((&listed[0]["engine"], &listed[0]["keys"]), (&"log".into(), &200.into()));

    run(directory, &["compact"]);
    let compacted = log(directory);
    assert!(number(&compacted, "compaction_rounds") > 100, "{compacted}");
    let used = |log: &Value| number(log, "key_chunks") + number(log, "value_chunks");
    assert!(used(&compacted) * 3 < used(&written), "{compacted} after {written}");
    let table = run(directory, &["stats"]);
    for part in
        ["logs of namespace 1: 2 stores, ", " chunks of 32.0 KiB: ", "  value logs: ", "  compaction: "]
    {
        assert!(table.contains(part), "no \"{part}\" in {table}");
    }
    assert!(!table.contains("damage"), "{table}");
    for index in 0..200 {
        assert_eq!(client.get(format!("key{index:03}").as_bytes()).unwrap(), Some(vec![20; 2_000]));
    }
    server.run(&["scan"]).assert_failed(1, &["scan: the namespace has no iterators", "octokv list"]);
    assert_eq!(server.run(&["list"]).stdout_ok().lines().count(), 200);
    server.stop();
    let checked = check(directory);
    assert!(checked.contains("keys      200\n") && checked.contains("problems  0\n"), "{checked}");
}

#[test]
fn a_scrub_counts_and_logs_a_damaged_value_before_it_is_read() {
    let directory = temp_directory();
    let directory = directory.path();
    let value = "a value that is easily found, and long enough to be nothing else".repeat(40);
    let server = start(directory, &["--scrub-bytes-per-second", "0"]);
    server.put("sound", &value.to_uppercase());
    server.put("rotten", &value);
    assert_eq!(["scrub_passes", "scrub_read_bytes"].map(|name| number(&log(directory), name)), [0, 0]);
    server.stop();
    let device = directory.join("device");
    let mut bytes = std::fs::read(&device).unwrap();
    let at = bytes.windows(value.len()).position(|window| window == value.as_bytes()).unwrap();
    bytes[at + 1000] ^= 0x10;
    std::fs::write(&device, &bytes).unwrap();

    // Of the default rate the pass takes a few milliseconds.
    let server = start(directory, &[]);
    let scrubbed = (0..1_000).map(|_| log(directory)).find(|log| number(log, "scrub_passes") > 0);
    let scrubbed = scrubbed.expect("a pass ends");
    let found = ["scrub_damaged_buckets", "scrub_damaged_values", "scrub_skipped_segments"];
    assert_eq!(found.map(|name| number(&scrubbed, name)), [0, 1, 0], "{scrubbed}");
    assert!(number(&scrubbed, "scrub_read_bytes") >= value.len() as u64, "{scrubbed}");
    let table = run(directory, &["stats"]);
    for part in ["  scrub: 1 passes, ", "  damage found by the scrub: 0 buckets of keys, 1 values"] {
        assert!(table.contains(part), "no \"{part}\" in {table}");
    }
    let output = server.unexpected_stderr();
    let logged: Vec<&str> =
        output.lines().filter(|line| line.contains("volume maintenance failed")).collect();
    assert!(matches!(logged[..], [line] if line.contains(device.to_str().unwrap())), "{output}");
    server.assert_value("sound", &value.to_uppercase());
    server.stop();
}

#[test]
fn a_namespace_of_the_log_engine_is_added_beside_another_and_may_have_a_cache() {
    let directory = temp_directory();
    let directory = directory.path();
    let (device, socket) = (directory.join("device"), directory.join("admin.sock"));
    let (logs, socket) = (directory.join("logs"), socket.to_str().unwrap());
    let fixed = ["--device", device.to_str().unwrap(), "--size", "64MiB", "--listen", "127.0.0.1:0"];
    let server = Server::start_with(directory, &[&fixed[..], &["--admin", socket]].concat());
    let add = ["ns", "add", "--kind", "kv", "--device", logs.to_str().unwrap(), "--size", "64MiB"];
    let with = |more: &[&str]| octokv([&add[..], &["--admin", socket], more].concat());
    with(&["--engine", "log", "--cache-bytes", "4MiB"]).stdout_ok();
    let url = server.url.replace("nsid=1", "nsid=2");
    octokv(["put", "key", "of logs", "--url", &url]).stdout_ok();
    for _ in 0..3 {
        assert_eq!(octokv(["get", "key", "--url", &url]).stdout_ok(), "of logs");
    }
    let stats = octokv(["stats", "--json", "--admin", socket]);
    let stats: serde_json::Value = serde_json::from_str(stats.stdout_ok()).unwrap();
    let cache = &stats["caches"][0];
    assert_eq!(
        (&cache["nsid"], &cache["entries"], &cache["hits"]),
        (&2.into(), &1.into(), &2.into()),
        "{cache}"
    );
    server.put("key", "of hashes");
    server.assert_value("key", "of hashes");
    octokv(["ns", "remove", "2", "--admin", socket]).stdout_ok();
    // Another engine does not take the volume.
    with(&["--engine", "lsm"]).assert_failed(2, &["the log engine", "lsm"]);
    with(&["--engine", "log"]).stdout_ok();
    assert_eq!(octokv(["get", "key", "--url", &url]).stdout_ok(), "of logs");
    server.stop();
}

#[test]
fn settings_of_another_engine_or_out_of_range_are_refused() {
    let directory = temp_directory();
    let device = directory.path().join("device");
    let table: [(&[&str], &str); 8] = [
        (&["--partitions", "4"], "--partitions is for engine = \"log\", which no namespace has"),
        (&["--chunk-bytes", "1MiB", "--engine", "lsm"], "--chunk-bytes is for engine = \"log\""),
        (&["--engine", "log", "--partitions", "0"], "partitions must be 1 to 65535"),
        (&["--engine", "log", "--partitions", "65536"], "65536"),
        (&["--engine", "log", "--chunk-bytes", "48KiB"], "chunk_bytes must be a power of two up to 16MiB"),
        (&["--engine", "log", "--chunk-bytes", "32MiB"], "chunk_bytes must be a power of two up to 16MiB"),
        (&["--engine", "log", "--chunk-bytes", "0"], "chunk_bytes must be a power of two up to 16MiB"),
        (&["--engine", "log", "--chunk-bytes", "few"], "\"few\" is not auto or a size"),
    ];
    for (flags, why) in table {
        let failed = serve_expecting_failure(&device, flags);
        assert!(failed.code != 0 && failed.stderr.contains(why), "{}", failed.stderr);
    }
    assert!(!device.exists());
    let failed = serve_expecting_failure(&device, &["--engine", "log", "--size", "2MiB"]);
    assert!(failed.code != 0 && failed.stderr.contains("it has 2097152 bytes, and"), "{}", failed.stderr);
}
