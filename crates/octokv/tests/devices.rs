//! Invalid devices: rejected by name and left as they are; the findings of `check`.

use crate::common::{self, Server, octokv, serve_expecting_failure, temp_directory};
use octokv_client::Error;
use octokv_client::blocking::BlockingClient;
use std::path::Path;

fn check(device: &Path) -> common::CommandOutput {
    octokv(["check", "--device", device.to_str().unwrap()])
}

#[test]
fn a_device_of_another_format_is_refused_and_left_as_it_is() {
    let directory = temp_directory();
    let device = directory.path().join("device");
    let foreign: Vec<u8> = (0..64u32 << 20).map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    std::fs::write(&device, &foreign).unwrap();
    let name = device.to_str().unwrap();
    serve_expecting_failure(&device, &["--size", "64MiB"]).assert_failed(1, &[name, "--format"]);
    check(&device).assert_failed(1, &[name]);
    assert!(std::fs::read(&device).unwrap() == foreign, "the device was written to");
    let arguments = ["--device", name, "--listen", "127.0.0.1:0", "--format"];
    let server = Server::start_with(directory.path(), &arguments);
    server.put("key", "value");
    server.assert_value("key", "value");
}

#[test]
fn a_volume_of_another_version_or_engine_is_refused_and_left_as_it_is() {
    let directory = temp_directory();
    let device = directory.path().join("device");
    Server::start(directory.path(), "64MiB").stop();
    let formatted = std::fs::read(&device).unwrap();
    // Byte 12 is the version, 14 the engine, 138 the number of devices, bytes 8 to 12 the checksum of 12 to 512
    // (docs/FORMATS.md).
    // `check` takes the engine of the device.
    let table = [
        (12, 77, ["version 77"; 2], "(--format"),
        (14, 77, ["number 77"; 2], "(--format"),
        (
            14,
            3,
            ["a volume of the log engine, not of the hash engine", "format version 2"],
            "(--engine log serves it, --format",
        ),
        (138, 4, ["device 0 of a volume of 4 devices"; 2], "(--format"),
    ];
    for (at, byte, [served, checked], hint) in table {
        let mut other = formatted.clone();
        for superblock in [0, 4096, 8192, 12288] {
            other[superblock + at] = byte;
            let crc = octokv_base::crc32c(&other[superblock + 12..superblock + 512]);
            other[superblock + 8..superblock + 12].copy_from_slice(&crc.to_le_bytes());
        }
        std::fs::write(&device, &other).unwrap();
        serve_expecting_failure(&device, &[]).assert_failed(1, &[device.to_str().unwrap(), served, hint]);
        check(&device).assert_failed(1, &[device.to_str().unwrap(), checked]);
        assert!(std::fs::read(&device).unwrap() == other, "the device was written to");
    }
}

/// The space of a value of 4 KiB on a new file, as `check` prints it.
fn space_of_4_kib(more: &[&str]) -> String {
    let directory = temp_directory();
    let device = directory.path().join("device");
    let fixed = ["--size", "64MiB", "--listen", "127.0.0.1:0", "--device", device.to_str().unwrap()];
    let arguments: Vec<&str> = fixed.iter().chain(more).copied().collect();
    let server = Server::start_with(directory.path(), &arguments);
    server.put("key", &"v".repeat(4096));
    server.stop();
    let checked = check(&device);
    let space = checked.stdout_ok().lines().find_map(|line| line.strip_prefix("space ")).unwrap();
    space.split(" of ").next().unwrap().trim().to_owned()
}

#[test]
fn the_unit_is_what_the_file_system_writes_without_a_read_unless_it_is_given() {
    let directory = temp_directory();
    let file = octokv_sys::file::open_device(&directory.path().join("file"), Some(1 << 20), true).unwrap();
    let of_block = match file.preferred_write_bytes() {
        512 => "4.5 KiB",
        1024 => "5.0 KiB",
        2048 => "6.0 KiB",
        _ => "8.0 KiB",
    };
    assert_eq!(space_of_4_kib(&[]), of_block);
    assert_eq!(space_of_4_kib(&["--unit", "auto"]), of_block);
    assert_eq!(space_of_4_kib(&["--unit", "4096"]), "8.0 KiB");
}

#[test]
fn format_discards_the_contents_of_the_device() {
    let directory = temp_directory();
    let server = Server::start(directory.path(), "64MiB");
    server.put("old", "value");
    server.stop();
    let device = directory.path().join("device");
    let arguments = ["--device", device.to_str().unwrap(), "--listen", "127.0.0.1:0", "--format"];
    let server = Server::start_with(directory.path(), &arguments);
    server.run(&["get", "old"]).assert_failed(3, &["old"]);
}

#[test]
fn a_device_held_by_another_process_is_refused() {
    let directory = temp_directory();
    let server = Server::start(directory.path(), "64MiB");
    let device = directory.path().join("device");
    let name = device.to_str().unwrap();
    serve_expecting_failure(&device, &[]).assert_failed(1, &[name, "in use"]);
    check(&device).assert_failed(1, &[name, "in use"]);
    server.put("still", "served");
}

#[test]
fn a_truncated_device_is_refused_and_left_as_it_is() {
    let directory = temp_directory();
    let server = Server::start(directory.path(), "64MiB");
    server.put("key", "value");
    server.stop();
    let device = directory.path().join("device");
    let whole = std::fs::read(&device).unwrap();
    std::fs::write(&device, &whole[..32 << 20]).unwrap();
    serve_expecting_failure(&device, &[]).assert_failed(1, &[device.to_str().unwrap(), "33554432"]);
    assert!(std::fs::read(&device).unwrap() == whole[..32 << 20], "the device was written to");
    std::fs::write(&device, &whole).unwrap();
    Server::start(directory.path(), "64MiB").assert_value("key", "value");
}

#[test]
fn a_size_that_is_too_small_is_rejected_with_the_minimum_and_leaves_no_file() {
    let directory = temp_directory();
    let device = directory.path().join("device");
    serve_expecting_failure(&device, &["--size", "64KiB"])
        .assert_failed(1, &[device.to_str().unwrap(), "65536"]);
    assert!(!device.exists(), "a file that is no device was left behind");
}

#[test]
fn paths_that_are_no_devices_are_rejected() {
    let directory = temp_directory();
    serve_expecting_failure(directory.path(), &[])
        .assert_failed(1, &["neither a regular file nor a block device"]);
    let nowhere = directory.path().join("no/such/directory/device");
    serve_expecting_failure(&nowhere, &[]).assert_failed(1, &[nowhere.to_str().unwrap()]);
    check(&directory.path().join("missing")).assert_failed(1, &["missing", "does not exist"]);
}

#[test]
fn a_full_device_says_so_and_keeps_serving_reads_and_deletes() {
    let directory = temp_directory();
    let server = Server::start(directory.path(), "32MiB");
    let client = BlockingClient::connect(&server.url).unwrap();
    let value = |i: usize| vec![i as u8; 60_000];
    let full = (0..10_000).find_map(|i| match client.put(format!("key-{i}").as_bytes(), &value(i)) {
        Ok(()) => None,
        Err(error) => Some((i, error)),
    });
    let (count, error) = full.expect("32 MiB do not hold 600 MB");
    assert_eq!(error, Error::CapacityExceeded);
    assert!(count > 100, "{count} values of 60 kB fit into 32 MiB");
    server
        .run(&["put", "one-more", &"x".repeat(60_000)])
        .assert_failed(1, &["one-more", "capacity exceeded"]);
    for i in 0..count {
        assert_eq!(client.get(format!("key-{i}").as_bytes()), Ok(Some(value(i))));
    }
    server.run(&["delete", "key-0"]).stdout_ok();
    server.run(&["delete", "key-1"]).stdout_ok();
    server.put("one-more", &"x".repeat(60_000));
    drop(client);
    server.stop();
    let checked = check(&directory.path().join("device"));
    assert!(checked.stdout_ok().contains(&format!("keys      {}\n", count - 1)), "{}", checked.text());
}

#[test]
fn check_passes_on_an_intact_device_and_changes_nothing() {
    let directory = temp_directory();
    let mut server = Server::start(directory.path(), "64MiB");
    for i in 0..20 {
        server.put(&format!("key-{i}"), "value");
    }
    server.kill();
    let device = directory.path().join("device");
    let before = std::fs::read(&device).unwrap();
    let checked = check(&device);
    assert_eq!(checked.code, 0, "{}", checked.stderr);
    for part in ["shutdown  not cleanly", "keys      20\n", "problems  0\n"] {
        assert!(checked.text().contains(part), "{}", checked.text());
    }
    assert!(std::fs::read(&device).unwrap() == before, "the device was written to");
}

#[test]
fn upgrade_of_a_volume_of_the_newest_format_changes_nothing_and_a_served_or_foreign_device_is_refused() {
    let directory = temp_directory();
    let device = directory.path().join("device");
    let upgrade = || octokv(["upgrade", "--device", device.to_str().unwrap()]);
    let server = Server::start(directory.path(), "64MiB");
    server.put("key", "value");
    upgrade().assert_failed(1, &["in use"]);
    server.stop();
    let before = std::fs::read(&device).unwrap();
    assert!(upgrade().stdout_ok().contains("format 2 is the newest"), "{}", upgrade().text());
    assert!(std::fs::read(&device).unwrap() == before, "the device was written to");
    std::fs::write(&device, vec![7; 1 << 20]).unwrap();
    upgrade().assert_failed(1, &["holds something else"]);
}

/// The fixture of the engine's tests: twenty keys, of which one was deleted.
#[test]
fn a_volume_of_format_1_is_served_as_it_is_and_upgraded_when_asked() {
    let directory = temp_directory();
    let device = directory.path().join("device");
    std::fs::write(&device, include_bytes!("../../engine/tests/fixtures/hash-v1.img")).unwrap();
    let (name, listen) = (device.to_str().unwrap(), ["--listen", "127.0.0.1:0"]);
    for (version, upgraded) in [(1, "from format 1 to 2"), (2, "format 2 is the newest")] {
        let server = Server::start_with(directory.path(), &["--device", name, listen[0], listen[1]]);
        server.put("key", "value");
        server.assert_value("key", "value");
        server.stop();
        assert_eq!(std::fs::read(&device).unwrap()[12], version, "the version in the superblock");
        let output = octokv(["upgrade", "--device", name]);
        assert!(output.stdout_ok().contains(upgraded), "{}", output.text());
        assert!(check(&device).stdout_ok().contains("keys      20\n"), "{}", check(&device).text());
    }
}

#[test]
fn check_lists_what_is_left_of_a_volume_that_cannot_be_recovered() {
    let directory = temp_directory();
    let server = Server::start(directory.path(), "64MiB");
    server.put("left", "a value");
    server.stop();
    let device = directory.path().join("device");
    let mut image = std::fs::read(&device).unwrap();
    let (front, _) = image.split_at_mut(16384);
    for (is_zeroed, reason) in [(false, "no copy of its superblock is intact"), (true, "not formatted")] {
        match is_zeroed {
            false => front.chunks_mut(4096).for_each(|superblock| superblock[100] ^= 1),
            true => front.fill(0),
        }
        std::fs::write(&device, [&*front, &std::fs::read(&device).unwrap()[16384..]].concat()).unwrap();
        let before = std::fs::read(&device).unwrap();
        let checked = check(&device);
        assert_eq!(checked.code, 1);
        assert!(checked.stderr.contains("1 intact record is left"), "{}", checked.stderr);
        for part in [reason, "record of key left, 7 bytes, sequence", "records            1 intact"] {
            assert!(checked.text().contains(part), "no {part:?} in {}", checked.text());
        }
        assert!(std::fs::read(&device).unwrap() == before, "the device was written to");
    }
}

#[test]
fn a_flipped_byte_is_found_by_check_and_never_leaves_the_node() {
    let directory = temp_directory();
    let server = Server::start(directory.path(), "64MiB");
    let value = "a value that is easily found, and long enough to be nothing else".repeat(40);
    server.put("sound", &value.to_uppercase());
    server.put("rotten", &value);
    server.stop();
    let device = directory.path().join("device");
    let mut bytes = std::fs::read(&device).unwrap();
    let at = bytes.windows(value.len()).position(|window| window == value.as_bytes()).unwrap();
    bytes[at + 1000] ^= 0x10;
    std::fs::write(&device, &bytes).unwrap();

    let checked = check(&device);
    assert_eq!(checked.code, 1);
    assert!(checked.text().contains("key rotten: value damaged"), "{}", checked.text());
    assert!(checked.text().contains("problem: block "), "{}", checked.text());
    assert!(checked.stderr.contains("1 problem"), "{}", checked.stderr);

    let server = Server::start(directory.path(), "64MiB");
    server.run(&["get", "rotten"]).assert_failed(1, &["rotten", "cannot be read back"]);
    server.assert_value("sound", &value.to_uppercase());
    let output = server.unexpected_stderr();
    let logged = output.lines().find(|line| line.contains("rotten")).expect("the node logs it");
    assert!(logged.contains(device.to_str().unwrap()), "{logged}");
    server.put("rotten", "repaired");
    server.assert_value("rotten", "repaired");
}
