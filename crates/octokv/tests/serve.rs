//! `octokv serve` through the binary: the ready line, addresses, log, the configuration file, clean shutdown.

use crate::common::{Server, octokv, serve_expecting_failure, temp_directory};
use std::os::unix::fs::PermissionsExt;

#[test]
fn the_ready_line_is_the_url_and_the_created_device_is_its_owners_alone() {
    let directory = temp_directory();
    let server = Server::start(directory.path(), "64MiB");
    assert!(server.url.starts_with("nvme+tcp://127.0.0.1:"), "{}", server.url);
    assert!(server.url.ends_with("/nqn.2026-11.io.octokv:node?nsid=1"), "{}", server.url);
    let device = std::fs::metadata(directory.path().join("device")).unwrap();
    assert_eq!(device.permissions().mode() & 0o777, 0o600);
    assert_eq!(device.len(), 64 << 20);
    server.stop();
}

#[test]
fn a_signal_shuts_down_cleanly_and_the_data_is_back_after_a_restart() {
    let directory = temp_directory();
    for (signal, value) in [("TERM", "first"), ("INT", "second"), ("TERM", "third")] {
        let mut server = Server::start(directory.path(), "64MiB");
        server.put(signal, value);
        server.put("last", value);
        assert_eq!(server.signal(signal).code(), Some(0));
        assert_eq!(server.unexpected_stderr(), "");
    }
    let device = directory.path().join("device");
    let checked = octokv(["check", "--device", device.to_str().unwrap()]);
    assert!(checked.stdout_ok().contains("shutdown  cleanly"), "{}", checked.text());
    let server = Server::start(directory.path(), "64MiB");
    server.assert_value("TERM", "third");
    server.assert_value("INT", "second");
    server.assert_value("last", "third");
}

#[test]
fn the_memory_device_needs_no_file() {
    let directory = temp_directory();
    let arguments = ["--device", "memory", "--size", "64MiB", "--listen", "127.0.0.1:0"];
    let server = Server::start_with(directory.path(), &arguments);
    server.put("key", "value");
    server.assert_value("key", "value");
    server.stop();
}

#[test]
fn every_choice_of_hash_unit_driver_polling_and_durability_serves() {
    let choices: [&[&str]; 6] = [
        &["--hash", "sha1", "--unit", "4096", "--format"],
        &["--driver", "threads", "--polling", "sleep"],
        &["--durability", "device"],
        &["--polling", "busy"],
        &["--nqn", "nqn.2026-11.org.example:other"],
        &["--engine", "hash"],
    ];
    let directory = temp_directory();
    let device = directory.path().join("device");
    let common = ["--device", device.to_str().unwrap(), "--size", "64MiB", "--listen", "127.0.0.1:0"];
    for choice in choices {
        let arguments: Vec<&str> = common.iter().chain(choice).copied().collect();
        let server = Server::start_with(directory.path(), &arguments);
        server.put("key", choice[1]);
        server.assert_value("key", choice[1]);
        server.stop();
    }
}

#[test]
fn ipv4_and_ipv6_at_once() {
    let directory = temp_directory();
    let device = directory.path().join("device");
    let arguments = [
        "--device",
        device.to_str().unwrap(),
        "--size",
        "64MiB",
        "--listen",
        "[::1]:0",
        "--listen",
        "127.0.0.1:0",
        "--log",
        "info",
    ];
    let server = Server::start_with(directory.path(), &arguments);
    assert!(server.url.starts_with("nvme+tcp://[::1]:"), "{}", server.url);
    server.put("over", "six");
    let output = server.unexpected_stderr();
    let four = output.split_whitespace().find_map(|word| word.strip_prefix("address=127.0.0.1:"));
    let url = format!("nvme+tcp://127.0.0.1:{}/nqn.2026-11.io.octokv:node", four.expect(&output));
    assert_eq!(octokv(["get", "over", "--url", &url]).stdout_ok(), "six");
    server.stop();
}

#[test]
fn log_lines_are_structured_on_standard_error() {
    let directory = temp_directory();
    let device = directory.path().join("device");
    let device = device.to_str().unwrap();
    let arguments = ["--device", device, "--size", "64MiB", "--listen", "127.0.0.1:0", "--log", "info"];
    let mut server = Server::start_with(directory.path(), &arguments);
    assert!(server.signal("TERM").success());
    let output = server.unexpected_stderr();
    assert!(
        output.contains("listening address=127.0.0.1:") && output.contains("stopped cleanly"),
        "{output}"
    );
    for line in output.lines() {
        let mut words = line.split_whitespace();
        assert!(words.next().unwrap().ends_with('Z'), "no time: {line}");
        assert!(["INFO", "WARN"].contains(&words.next().unwrap()), "no level: {line}");
        assert!(words.next().unwrap().starts_with("octokv"), "no origin: {line}");
    }
}

#[test]
fn an_address_in_use_is_named() {
    let directory = temp_directory();
    let server = Server::start(directory.path(), "64MiB");
    let other = directory.path().join("other");
    let arguments =
        ["serve", "--device", other.to_str().unwrap(), "--size", "64MiB", "--listen", server.authority()];
    octokv(arguments).assert_failed(1, &["cannot listen on", server.authority(), "in use"]);
    server.put("still", "served");
}

#[test]
fn an_unknown_core_is_named() {
    let directory = temp_directory();
    let output =
        serve_expecting_failure(&directory.path().join("device"), &["--size", "64MiB", "--cores", "5000"]);
    output.assert_failed(1, &["core 5000"]);
}

#[test]
fn the_configuration_file_sets_and_flags_override_it() {
    let directory = temp_directory();
    let (device, file) = (directory.path().join("device"), directory.path().join("octokv.toml"));
    let text = format!(
        "device = \"{}\"\nsize = \"64MiB\"\nlisten = [\"127.0.0.1:0\"]\nnqn = \"nqn.2026-11.org.example:a\"\n",
        device.display()
    );
    std::fs::write(&file, text).unwrap();
    let file = file.to_str().unwrap();
    let server = Server::start_with(directory.path(), &["--config", file]);
    assert!(server.url.ends_with("/nqn.2026-11.org.example:a?nsid=1"), "{}", server.url);
    server.put("key", "value");
    server.stop();
    let name = "nqn.2026-11.org.example:b";
    let server = Server::start_with(directory.path(), &["--config", file, "--nqn", name]);
    assert!(server.url.ends_with("example:b?nsid=1"), "{}", server.url);
    server.assert_value("key", "value");
}

#[test]
fn a_wrong_configuration_is_refused_by_file_line_and_key_and_touches_nothing() {
    let directory = temp_directory();
    let (device, file) = (directory.path().join("device"), directory.path().join("octokv.toml"));
    let table: &[(&str, &[&str])] = &[
        ("durabilty = \"flush\"", &["octokv.toml:2:", "durabilty", "did you mean \"durability\""]),
        ("polling = \"fast\"", &["octokv.toml:2:", "polling", "fast", "adaptive"]),
        ("size = \"some\"", &["octokv.toml:2:", "size", "some"]),
        ("queue_depth = 1", &["octokv.toml:2:", "queue_depth must be 2 to 65535"]),
        ("cores = []", &["cores", "at least one"]),
        ("buffer_bytes = \"1MiB\"", &["buffer_bytes"]),
        ("unit = ", &["octokv.toml:2:", "unit"]),
    ];
    for (line, parts) in table {
        std::fs::write(&file, format!("device = \"{}\"\n{line}\n", device.display())).unwrap();
        octokv(["serve", "--listen", "127.0.0.1:0", "--config", file.to_str().unwrap()])
            .assert_failed(2, parts);
        assert!(!device.exists(), "{line}");
    }
    octokv(["serve", "--config", "nowhere.toml"]).assert_failed(2, &["nowhere.toml"]);
}

#[test]
fn an_idle_node_with_a_connected_host_uses_less_than_a_hundredth_of_a_core() {
    let directory = temp_directory();
    let server = Server::start(directory.path(), "64MiB");
    let client = octokv_client::blocking::BlockingClient::connect(&server.url).unwrap();
    client.put(b"key", b"value").unwrap();
    // CPU time over this interval is measured; nothing is waited for.
    let ticks_in = |seconds| {
        let before = server.cpu_ticks();
        std::thread::sleep(std::time::Duration::from_secs(seconds));
        server.cpu_ticks() - before
    };
    // At first the node prepares its new file.
    for _ in 0..30 {
        if ticks_in(1) == 0 {
            break;
        }
    }
    let used = ticks_in(4);
    assert!(used < 4, "{used} hundredths of a second in 4 s");
    assert_eq!(client.get(b"key").unwrap().as_deref(), Some(&b"value"[..]));
    server.stop();
}
