//! A node with simulated drives: `--nand`, in the configuration file and in its tables.

use crate::common::{Server, octokv, serve_expecting_failure, temp_directory};
use octokv_client::blocking::BlockingClient;
use std::time::{Duration, Instant};

/// Least time of a durable write on a 970 EVO: the drive's flush, which writes its mapping.
const FLUSH: Duration = Duration::from_micros(500);
const PUTS: u32 = 200;

#[test]
fn a_put_on_a_memory_node_takes_the_modelled_flush_time() {
    let directory = temp_directory();
    let arguments = ["--device", "memory", "--size", "64MiB", "--listen", "127.0.0.1:0", "--nand", "970-evo"];
    let server = Server::start_with(directory.path(), &arguments);
    let client = BlockingClient::connect(&server.url).unwrap();
    let begun = Instant::now();
    for index in 0..PUTS {
        client.put(&index.to_be_bytes(), &[7; 1000]).unwrap();
    }
    assert!(begun.elapsed() >= FLUSH * PUTS, "{:?} for {PUTS} puts", begun.elapsed());
    for index in 0..PUTS {
        assert_eq!(client.get(&index.to_be_bytes()).unwrap(), Some(vec![7; 1000]));
    }
    drop(client);
    server.stop();
}

#[test]
fn a_file_is_the_same_volume_with_and_without_the_ssd_model() {
    let directory = temp_directory();
    let device = directory.path().join("device");
    let fixed = ["--device", device.to_str().unwrap(), "--size", "64MiB", "--listen", "127.0.0.1:0"];
    for (at, nand) in ["none", "leed", "970-evo", "none"].into_iter().enumerate() {
        let arguments: Vec<&str> = fixed.into_iter().chain(["--nand", nand, "--log", "info"]).collect();
        let server = Server::start_with(directory.path(), &arguments);
        for before in 0..at {
            server.assert_value(&format!("key-{before}"), "value");
        }
        server.put(&format!("key-{at}"), "value");
        assert_eq!(
            server.stderr_text().contains("drive's latency"),
            nand != "none",
            "{}",
            server.stderr_text()
        );
        server.stop();
    }
    assert!(octokv(["check", "--device", device.to_str().unwrap()]).stdout_ok().contains('4'));
}

#[test]
fn the_file_names_drives_for_the_first_namespace_and_for_others() {
    let directory = temp_directory();
    let file = directory.path().join("octokv.toml");
    let text = "device = \"memory\"\nsize = \"64MiB\"\nlisten = [\"127.0.0.1:0\"]\nnand = \"leed\"\n\
                [[namespace]]\nnsid = 2\nkind = \"kv\"\ndevice = \"memory\"\nsize = \"64MiB\"\nnand = \"970-evo\"\n";
    std::fs::write(&file, text).unwrap();
    let arguments = ["--config", file.to_str().unwrap(), "--log", "info"];
    let server = Server::start_with(directory.path(), &arguments);
    let output = server.stderr_text();
    assert!(output.contains("983 DCT") && output.contains("970 EVO"), "{output}");
    let second = server.url.replace("nsid=1", "nsid=2");
    octokv(["put", "key", "value", "--url", &second]).stdout_ok();
    assert_eq!(octokv(["get", "key", "--url", &second]).stdout_ok(), "value");
    server.stop();
}

#[test]
fn an_unknown_or_too_small_drive_is_rejected_and_nothing_is_touched() {
    let directory = temp_directory();
    let device = directory.path().join("device");
    let names = ["970evo", "none, 970-evo, leed, cosmos-plus", "similar", "970-evo"];
    serve_expecting_failure(&device, &["--nand", "970evo"]).assert_failed(2, &names);
    let file = directory.path().join("octokv.toml");
    for text in
        ["nand = \"evo\"\n", "[[namespace]]\nnsid = 2\nkind = \"kv\"\ndevice = \"x\"\nnand = \"evo\"\n"]
    {
        std::fs::write(&file, text).unwrap();
        let parts = [
            "octokv.toml:",
            "nand: unknown drive \"evo\"",
            "\"none\", \"970-evo\", \"leed\", \"cosmos-plus\"",
        ];
        serve_expecting_failure(&device, &["--config", file.to_str().unwrap()]).assert_failed(2, &parts);
    }
    assert!(!device.exists());
    // A sparse file.
    std::fs::File::create(&device).unwrap().set_len(600_000_000_000).unwrap();
    let large = serve_expecting_failure(&device, &["--nand", "970-evo", "--format"]);
    large.assert_failed(2, &["size", "600000000000 bytes are more than a Samsung 970 EVO 500 GB has"]);
    assert_eq!(std::os::unix::fs::MetadataExt::blocks(&device.metadata().unwrap()), 0, "it was written to");
}
