//! `octokv bench` through the binary: every workload, sizes, rates, the report, the plots, usage errors.

use crate::common::{CommandOutput, Server, octokv, temp_directory};
use serde_json::Value;

const SMALL: [&str; 9] =
    ["bench", "--threads", "3", "--depth", "2", "--num", "300", "--value-size", "100..3000"];

fn bench(server: &Server, more: &[&str]) -> CommandOutput {
    server.run(&[&SMALL, more].concat())
}

fn document(output: &CommandOutput) -> Value {
    serde_json::from_str(output.stdout_ok()).unwrap()
}

fn results(server: &Server, more: &[&str]) -> Vec<Value> {
    let document = document(&bench(server, &[&["--json", "-"], more].concat()));
    document["results"].as_array().unwrap().clone()
}

fn number(result: &Value, name: &str) -> f64 {
    result[name].as_f64().unwrap_or_else(|| panic!("{name}: {result}"))
}

#[test]
fn every_workload_runs_all_operations_and_finds_its_keys() {
    let directory = temp_directory();
    let server = Server::start(directory.path(), "64MiB");
    // Keys of both kinds: in the command, and longer than its field.
    let sizes = ["--key-size", "12..20"];
    let run = |list: &str, more: &[&str]| results(&server, &[&sizes, &["--workload", list], more].concat());
    run("fillseq", &[]);
    let all = "readseq,readrandom,readmissing,seekrandom,ycsb-a,ycsb-b,ycsb-c,ycsb-d,ycsb-e,ycsb-f,ycsb-w";
    let found = run(all, &[]);
    for (result, name) in found.iter().zip(all.split(',')) {
        assert_eq!((&result["workload"], number(result, "operations")), (&name.into(), 300.0));
        let not_found = if name == "readmissing" { 300.0 } else { 0.0 };
        assert_eq!(number(result, "not_found"), not_found, "{result}");
        let verified = !["seekrandom", "ycsb-e", "ycsb-w"].contains(&name);
        assert_eq!(result["verified"], verified, "{name}");
        let listed = number(result, "keys_listed");
        match name {
            // Fewer at the end of the keys.
            "seekrandom" => assert!(listed >= 300.0 * 70.0, "{listed}"),
            // 50 keys on average.
            "ycsb-e" => assert!((270.0 * 30.0..300.0 * 80.0).contains(&listed), "{listed}"),
            _ => assert_eq!(listed, 0.0),
        }
    }
    // The inserted keys are there, with their values.
    let inserted = server.run(&["list", "--limit", "1000"]);
    assert!(inserted.stdout_ok().lines().count() > 300);
    let wrong = bench(&server, &[&sizes[..], &["--workload", "ycsb-f", "--seed", "2"]].concat());
    assert!(wrong.code == 1 && wrong.stderr.contains("never stored"), "{}", wrong.stderr);
}

#[test]
fn scans_read_every_pair_where_the_engine_is_ordered() {
    let directory = temp_directory();
    let device = directory.path().join("device");
    let fixed = ["--size", "128MiB", "--listen", "127.0.0.1:0", "--engine", "lsm", "--device"];
    let server = Server::start_with(directory.path(), &[&fixed[..], &[device.to_str().unwrap()]].concat());
    let sizes = ["--key-size", "12..20"];
    let run = |list: &str, more: &[&str]| results(&server, &[&sizes, &["--workload", list], more].concat());
    run("fillseq", &[]);
    // More than one command of a scan: 150 pairs of the longest take 450 KiB.
    for (length, least) in [("1", 300.0), ("7", 300.0 * 7.0 - 40.0), ("150", 300.0 * 75.0)] {
        let scan = run("scanrandom", &["--scan-length", length]).remove(0);
        assert_eq!((number(&scan, "operations"), number(&scan, "not_found")), (300.0, 0.0), "{scan}");
        let most = 300.0 * length.parse::<f64>().unwrap();
        assert!((least..=most).contains(&number(&scan, "pairs_read")), "{scan}");
        assert_eq!((&scan["verified"], &scan["keys_listed"]), (&true.into(), &0.into()));
    }
    let ycsb = run("ycsb-e", &[]).remove(0);
    assert_eq!((number(&ycsb, "not_found"), number(&ycsb, "keys_listed")), (0.0, 0.0), "{ycsb}");
    assert!(number(&ycsb, "pairs_read") > 300.0 * 20.0 && ycsb["verified"] == true, "{ycsb}");
    let wrong = bench(&server, &[&sizes[..], &["--workload", "scanrandom", "--seed", "2"]].concat());
    assert!(wrong.code == 1 && wrong.stderr.contains("never stored"), "{}", wrong.stderr);
}

#[test]
fn a_scan_of_a_namespace_without_order_fails() {
    let directory = temp_directory();
    let server = Server::start(directory.path(), "64MiB");
    let scan = bench(&server, &["--workload", "scanrandom"]);
    assert!(scan.code == 1 && scan.stderr.contains("no iterators"), "{}", scan.stderr);
}

#[test]
fn reads_go_on_beside_a_writer() {
    let directory = temp_directory();
    let server = Server::start(directory.path(), "64MiB");
    results(&server, &["--workload", "fillseq"]);
    let beside = ["--workload", "readwhilewriting"];
    let free = results(&server, &beside).remove(0);
    assert_eq!((number(&free, "operations"), number(&free, "not_found")), (300.0, 0.0), "{free}");
    assert_eq!(free["verified"], true);
    let rated = ["--write-rate", "50", "--seconds", "0.4", "--client-cores", "0,0"];
    let rated = results(&server, &[&beside[..], &rated].concat()).remove(0);
    let due = number(&rated, "elapsed_s") * 50.0;
    assert!((1.0..=due + 5.0).contains(&number(&rated, "writes_beside")), "{rated}");
}

#[test]
fn the_report_has_the_config_and_the_time_series() {
    let directory = temp_directory();
    let server = Server::start(directory.path(), "64MiB");
    let flags = ["--workload", "fillseq,ycsb-a,ycsb-d", "--value-size", "700:3,90:1", "--zipf", "0.8"];
    let document = document(
        &server
            .run(&[&["bench", "--num", "300", "--key-size", "12..20", "--json", "-"], &flags[..]].concat()),
    );
    assert_eq!(document["schema"], "octokv-bench/3");
    assert_eq!(document["octokv_version"], env!("CARGO_PKG_VERSION"));
    assert!(document["machine"]["kernel"].as_str().unwrap().contains('.'));
    let settings = &document["settings"];
    assert_eq!((&settings["distribution"], &settings["zipf_theta"]), (&Value::Null, &0.8.into()));
    assert_eq!(settings["rates_ops_s"], Value::Array(vec![]));
    let drawn = [(Value::Null, Value::Null), ("zipf".into(), 0.8.into()), ("latest".into(), 0.8.into())];
    for (result, (distribution, theta)) in document["results"].as_array().unwrap().iter().zip(drawn) {
        assert_eq!((&result["distribution"], &result["zipf_theta"]), (&distribution, &theta));
        assert_eq!((&result["key_sizes"], &result["key_bytes"]), (&"12..20".into(), &Value::Null));
        assert_eq!(result["value_sizes"], "700:3,90:1");
        assert_eq!((&result["rate_ops_s"], &result["behind_s"]), (&Value::Null, &Value::Null));
        let series = result["series"].as_array().unwrap();
        let sum: f64 = series.iter().map(|point| number(point, "operations")).sum();
        assert_eq!(sum, number(result, "operations"));
        for (index, point) in series.iter().enumerate() {
            assert_eq!(number(point, "start_s"), index as f64 * number(result, "series_interval_s"));
            assert!(number(point, "latency_us_p50") <= number(point, "latency_us_p99"));
            assert!(number(point, "throughput_ops_s") >= 0.0);
        }
    }
}

#[test]
fn a_rate_is_kept_and_an_impossible_one_is_reported() {
    let directory = temp_directory();
    let server = Server::start(directory.path(), "64MiB");
    let load = |rate: &str, seconds: &str| {
        let flags = ["--workload", "readrandom", "--rate", rate, "--seconds", seconds];
        results(&server, &flags).remove(0)
    };
    results(&server, &["--workload", "fillseq"]);
    let held = load("400", "2");
    assert_eq!(number(&held, "rate_ops_s"), 400.0);
    // 800 operations are scheduled, and no more start; those that a suspended machine missed are reported.
    let operations = number(&held, "operations");
    assert!((50.0..=800.0).contains(&operations), "{held}");
    assert_eq!(operations + number(&held, "backlog_operations"), 800.0, "{held}");
    let all = ["--workload", "readrandom", "--rate", "400", "--ops", "400"];
    let all = results(&server, &all).remove(0);
    assert_eq!((number(&all, "operations"), number(&all, "backlog_operations")), (400.0, 0.0));
    assert!((0.98..30.0).contains(&number(&all, "elapsed_s")), "{all}");

    let beyond = load("100000000", "0.3");
    assert!(number(&beyond, "backlog_operations") > 1e6 && number(&beyond, "behind_s") > 0.2, "{beyond}");
    // They waited for a stream, and latency includes that.
    assert!(number(&beyond, "latency_us_p50") > 50_000.0, "{beyond}");
}

/// Whether tags are balanced with one root; our plots have no comments.
fn is_well_formed(text: &str) -> bool {
    let (mut open, mut roots) = (Vec::new(), 0);
    let mut rest = text.trim();
    while let Some(at) = rest.find('<') {
        let Some(end) = rest[at..].find('>') else { return false };
        let tag = &rest[at + 1..at + end];
        rest = &rest[at + end + 1..];
        let name = tag.trim_start_matches('/').split([' ', '/', '\n']).next();
        roots += u32::from(open.is_empty());
        if tag.starts_with('/') {
            if open.pop() != name {
                return false;
            }
        } else if !tag.ends_with('/') {
            open.extend(name);
        }
        if tag.matches('"').count() % 2 == 1 {
            return false;
        }
    }
    open.is_empty() && roots == 1 && rest.is_empty()
}

#[test]
fn plots_are_drawn_for_every_workload() {
    assert!(is_well_formed("<a b=\"1\"><c/>d</a>"));
    assert!(!is_well_formed("<a><b></a></b>") && !is_well_formed("<a>") && !is_well_formed("<a/><a/>"));
    let directory = temp_directory();
    let server = Server::start(directory.path(), "64MiB");
    let pictures = |name: &str, more: &[&str]| {
        // Missing directories are created.
        let place = directory.path().join("plots").join(name);
        let output = bench(&server, &[&["--svg", place.to_str().unwrap()], more].concat());
        let entries = std::fs::read_dir(&place).unwrap().map(|entry| entry.unwrap());
        let mut files: Vec<String> = entries.map(|entry| entry.file_name().into_string().unwrap()).collect();
        files.sort();
        for file in &files {
            let text = std::fs::read_to_string(place.join(file)).unwrap();
            let workload = &file[2..file.rfind('-').unwrap()];
            assert!(text.contains(&format!("<title>{workload}: ")), "{file}");
            assert!(is_well_formed(&text), "{text}");
        }
        (output, files)
    };
    let (output, files) = pictures("closed", &["--workload", "fillseq,ycsb-e"]);
    output.stdout_ok();
    let kinds = ["1-fillseq-latency", "1-fillseq-throughput", "2-ycsb-e-latency", "2-ycsb-e-throughput"];
    assert_eq!(files, kinds.map(|kind| format!("{kind}.svg")));
    let sweep = ["--workload", "ycsb-c", "--rates", "300,900", "--ops", "300"];
    let (output, files) = pictures("rates", &sweep);
    let lines: Vec<&str> = output.stdout_ok().lines().skip(1).collect();
    assert!(
        lines.len() == 2 && lines[0].contains("rate 300,") && lines[1].contains("rate 900,"),
        "{lines:?}"
    );
    assert_eq!(files, ["latency", "rates", "throughput"].map(|kind| format!("1-ycsb-c-{kind}.svg")));
}

#[test]
fn mistakes_are_usage_errors_before_anything_runs() {
    // Nothing listens there: usage errors precede the connection.
    let nowhere = ["bench", "--url", "nvme+tcp://127.0.0.1:1/nqn.2026-11.io.octokv:none?nsid=1"];
    let table: [(&[&str], &str); 23] = [
        (&["--workload", "ycsb-z"], "unknown workload"),
        (&["--distribution", "normal"], "uniform, zipf, latest"),
        (&["--distribution", "zipf", "--workload", "fillseq,readseq"], "draws keys"),
        (&["--zipf", "0", "--workload", "ycsb-a"], "from 0.01 to 10"),
        (&["--zipf", "NaN", "--workload", "ycsb-a"], "from 0.01 to 10"),
        (&["--zipf", "0.5", "--workload", "readrandom"], "by zipf or latest"),
        (&["--rate", "0"], "from 0.1 to 100000000"),
        (&["--scan-length", "0"], "pairs of a scan"),
        (&["--write-rate", "5"], "readwhilewriting"),
        (&["--write-rate", "0", "--workload", "readwhilewriting"], "from 0.1 to"),
        (&["--rate=-5"], "from 0.1 to 100000000"),
        (&["--rates", "100,0"], "from 0.1 to 100000000"),
        (&["--rates", "100", "--rate", "5"], "cannot be used with"),
        (&["--value-size", "5..4"], "a range must not be empty"),
        (&["--value-size", "5:0"], "at least one must be above zero"),
        (&["--value-size", "5,6"], "needs a weight"),
        (&["--value-size", "1..2GiB"], "at most 1073741824"),
        (&["--key-size", "16:1"], "must be N or A..B"),
        (&["--key-size", "2..16"], "5 to 1024 bytes"),
        (&["--key-size", "5", "--workload", "ycsb-d", "--ops", "90000"], "6 to 1024 bytes"),
        (&["--svg", "/dev/null/at/all"], "--svg /dev/null/at/all: files cannot be created"),
        (&["--json", "/dev/null/at/all"], "--json /dev/null/at/all: cannot be written"),
        (&["--json", "/"], "--json /: cannot be written"),
    ];
    for (flags, part) in table {
        octokv(nowhere.iter().chain(flags)).assert_failed(2, &[part]);
    }
}
