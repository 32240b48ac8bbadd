//! The log-store simulation: requests take the accesses and the time that the drive's data sheet says, and a wrong value is noticed.

#![allow(clippy::disallowed_methods, reason = "a test reads a report back")]

use octokv_base::Nanos;
use octokv_device::ssd_model::drive_profiles::DCT_983;
use octokv_engine::memory::{MemoryConfig, MemoryEngine};
use octokv_engine::{Durability, WallClock};
use octokv_lab::simulation::log_store::experiment::{
    LoadPhase, LogStoreConfig, LogStoreExperiment, LogStoreSettings,
};
use octokv_lab::simulation::log_store::load_client::{Arrivals, Load, LoadKind, StoredObjects, run_load};
use octokv_lab::simulation::log_store::load_stats::{LoadStats, Moment};
use octokv_lab::simulation::log_store::parameters::command_cost;
use octokv_lab::simulation::node::host_handle;
use octokv_lab::{Paper, ReproduceArgs};
use octokv_runtime::CoreWaker;
use octokv_runtime::simulated::{SimEnv, SimEnvConfig};
use std::cell::RefCell;
use std::rc::Rc;

const OBJECTS: StoredObjects = StoredObjects { count: 6_000, value_bytes: 256 };
const OWN: LogStoreSettings = LogStoreSettings {
    durability: Durability::Completed,
    sub_compactions: 8,
    compactions: 1,
    overlaps_rounds: true,
};

fn store(objects: StoredObjects, stores: u16) -> LogStoreExperiment {
    let drive = DCT_983.scaled_down(24, 64);
    LogStoreExperiment::new(LogStoreConfig {
        drive,
        volume_bytes: 64 << 20,
        unit_bytes: 512,
        stores,
        chunk_bytes: 64 << 10,
        objects,
        seed: 1,
    })
    .unwrap()
}

fn load(kind: LoadKind, depth: usize, measured: u32) -> LoadPhase {
    LoadPhase::Requests(Load {
        kind,
        depth,
        arrivals: Arrivals::WhenOthersEnd,
        warm_up: measured / 10,
        measured,
        seed: 3,
    })
}

#[test]
fn a_request_alone_makes_the_papers_accesses_in_the_drives_time() {
    let experiment = store(OBJECTS, 8);
    let phases = [
        load(LoadKind::Uniform(0), 1, 500),
        load(LoadKind::Uniform(100), 1, 500),
        load(LoadKind::Deletes, 1, 500),
        LoadPhase::DriveReads(1, 500),
    ];
    let all = experiment.run(OWN, &phases).unwrap();
    let accesses = |stats: &LoadStats| stats.commands() / stats.requests();
    for (stats, (kind, expected)) in all.iter().zip([(0, 2.0), (1, 3.0), (2, 2.0), (0, 1.0)]) {
        assert_eq!(stats.requests(), 500.0);
        // Besides: flushes every 20 ms, splits, markers.
        assert!(
            (expected..expected + 0.1).contains(&accesses(stats)),
            "{kind}: {} accesses",
            accesses(stats)
        );
    }
    // The data sheet's 85 µs a read.
    let read_us = all[3].mean_us(0);
    assert!((84.0..88.0).contains(&read_us), "{read_us}");
    let get_us = all[0].mean_us(0);
    // A few reads of the drive wait for a program of their die.
    let pair_us = 2.0 * read_us - 2.0..2.0 * read_us + 6.0;
    assert!(pair_us.contains(&get_us), "{get_us} us for two reads of {read_us}");
    // A read beside the write of the value, then a write of 50 µs.
    let put_us = all[1].mean_us(1);
    assert!((read_us + 50.0..read_us + 75.0).contains(&put_us), "{put_us}");
    // The core works for each command, and iterations have a least cost.
    let core_us = all[0].core_share() * get_us / 2.0;
    assert!((core_us * 1e3 / command_cost().0 as f64 - 1.0).abs() < 0.01, "{core_us}");
}

#[test]
fn many_gets_keep_the_dies_busy_and_runs_repeat() {
    let run = || {
        let phases = [load(LoadKind::Uniform(0), 256, 6_000), load(LoadKind::Zipf(50), 256, 6_000)];
        let all = store(OBJECTS, 8).run(OWN, &phases).unwrap();
        let [gets, mixed] = &all[..] else { panic!("{}", all.len()) };
        let puts = mixed.latency_ns[1].len();
        assert!((2_800..3_200).contains(&puts), "{puts} of 6000 are puts");
        assert!(gets.die_share() > 0.5 && gets.per_second() > 90_000.0, "{}", gets.per_second());
        all.into_iter().map(|stats| (stats.before.at, stats.after.at, stats.latency_ns)).collect::<Vec<_>>()
    };
    assert!(run() == run());
}

#[test]
fn more_at_once_compacts_faster() {
    // Two thirds of 64 MiB.
    let objects = StoredObjects { count: 40_000, value_bytes: 1024 };
    let experiment = store(objects, 4);
    // Each setting has a copy of one drive on which all objects were overwritten.
    experiment.run(OWN, &[load(LoadKind::Uniform(100), 32, objects.count)]).unwrap();
    let puts = |settings: LogStoreSettings| {
        let all = experiment.copied().unwrap().run(settings, &[load(LoadKind::Uniform(100), 32, 40_000)]);
        let all = all.unwrap();
        assert!(all[0].counted(|logs| logs.moved_values) > 30_000.0, "{:?}", all[0].after_logs());
        all[0].per_second()
    };
    let one = puts(LogStoreSettings { sub_compactions: 1, ..OWN });
    let eight = puts(OWN);
    let alone = puts(LogStoreSettings { overlaps_rounds: false, ..OWN });
    let four_times = puts(LogStoreSettings { compactions: 4, ..OWN });
    println!("puts/s: {one:.0}, {eight:.0}, {alone:.0} without overlapping rounds, {four_times:.0}");
    assert!(eight > 2.0 * one, "{one}, {eight}");
    assert!(eight > 1.05 * alone, "{eight}, {alone} if rounds do not overlap");
    assert!(four_times > 1.3 * eight, "{eight}, {four_times}");
}

#[test]
fn space_is_where_it_saves_most_writes() {
    // Three quarters of 336 chunks.
    let objects = StoredObjects { count: 50_000, value_bytes: 256 };
    let drive = DCT_983.scaled_down(24, 64);
    let (unit_bytes, chunk_bytes) = (512, 64 << 10);
    let volume_bytes = 336 * u64::from(chunk_bytes);
    let config = LogStoreConfig { drive, volume_bytes, unit_bytes, chunk_bytes, stores: 4, objects, seed: 1 };
    let settings = LogStoreSettings { compactions: 4, ..OWN };
    let overwrite = load(LoadKind::Uniform(100), 32, objects.count);
    let all = LogStoreExperiment::new(config).unwrap().run(settings, &[overwrite; 2]).unwrap();
    let written_kb = all[1].written_bytes() / all[1].requests() / 1e3;
    println!("{written_kb:.1} KB written for a put");
    // 10.4; 19 if the cheapest freed byte is chosen.
    assert!(written_kb < 14.0, "{written_kb}");
}

#[test]
fn live_heads_of_value_logs_are_compacted_for_the_garbage_behind_them() {
    // Two thirds of 64 MiB. Objects that are hardly ever overwritten fill whole chunks, and each time that these reach the head all in them is moved.
    let objects = StoredObjects { count: 40_000, value_bytes: 1024 };
    let settings = LogStoreSettings { compactions: 4, ..OWN };
    let overwrites = load(LoadKind::Zipf(100), 32, 2 * objects.count);
    let all = store(objects, 4).run(settings, &[overwrites; 2]).unwrap();
    let written_kb = all[1].written_bytes() / all[1].requests() / 1e3;
    println!("{:.0} puts/s, {written_kb:.1} KB written for each", all[1].per_second());
    // 7.9; 8.8 if the head alone says what compaction costs, since key logs are compacted instead.
    assert!(written_kb < 8.4, "{written_kb}");
}

#[test]
fn requests_arrive_at_their_rate_and_a_copy_does_what_its_original_does() {
    let experiment = store(OBJECTS, 8);
    let copy = experiment.copied().unwrap();
    let arrivals = Arrivals::OneIn(Nanos::from_micros(100));
    let load =
        Load { kind: LoadKind::Uniform(50), depth: 64, arrivals, warm_up: 0, measured: 4_000, seed: 3 };
    let run = |of: &LogStoreExperiment| of.run(OWN, &[LoadPhase::Requests(load)]).unwrap().remove(0);
    let [own, other] = [&experiment, &copy].map(run);
    assert!((own.per_second() / 10_000.0 - 1.0).abs() < 0.1, "{}", own.per_second());
    // Alone a get takes 170 µs, and few wait for one another at a twentieth of the drive's rate.
    assert!((150.0..220.0).contains(&own.mean_us(0)), "{}", own.mean_us(0));
    assert!(own.latency_ns == other.latency_ns);
    // What a copy writes is not in the original.
    let after =
        [&experiment, &copy].map(|of| of.run(OWN, &[LoadPhase::Compaction]).unwrap()[0].before.commands);
    assert_eq!(after[0], after[1]);
}

#[test]
fn a_missing_or_wrong_value_is_noticed() {
    // The contract's model without objects: the first get finds nothing.
    let sim = SimEnv::new(SimEnvConfig { iteration_cost_min: Nanos(100), ..SimEnvConfig::new(1) });
    let host = sim.add_host();
    let handle = host_handle(&sim, host, CoreWaker::without_eventfd());
    let memory =
        MemoryConfig { ring_seed: 1, devices: 1, partition_bytes: 1 << 30, value_bytes_max: 1 << 20 };
    let engine = MemoryEngine::new(memory, WallClock::default());
    let result = Rc::new(RefCell::new(Vec::new()));
    let (ended, own) = (Rc::clone(&result), handle.clone());
    handle.spawn(async move {
        let load = |kind, measured| Load {
            kind,
            depth: 4,
            arrivals: Arrivals::WhenOthersEnd,
            warm_up: 0,
            measured,
            seed: 1,
        };
        let few = StoredObjects { count: 10, value_bytes: 64 };
        let longer = StoredObjects { value_bytes: 65, ..few };
        for (objects, load) in [
            (few, load(LoadKind::Uniform(0), 5)),
            (few, load(LoadKind::Fill, 10)),
            (longer, load(LoadKind::Uniform(0), 5)),
        ] {
            let outcome = run_load(&engine, &own, objects, load, Moment::default).await;
            ended.borrow_mut().push(outcome.err().unwrap_or_default());
        }
    });
    sim.add_reactor(host, handle.clone(), move |now| {
        handle.begin_iteration(now) + handle.poll_background() > 0
    });
    assert!(sim.run_until_true(Nanos::from_secs(60), || result.borrow().len() == 3), "the loads do not end");
    let messages = result.borrow();
    assert!(messages[0].contains("missing") && messages[1].is_empty(), "{messages:?}");
    assert!(messages[2].contains("another value"), "{messages:?}");
}

#[test]
fn a_quick_reproduction_writes_numbers_and_plots() {
    let directory = tempfile::tempdir().unwrap();
    let json = directory.path().join("leed.json");
    let (figure, svg) = (Some("figure-1".to_owned()), Some(directory.path().to_owned()));
    let arguments = ReproduceArgs {
        paper: Paper::Leed,
        figure,
        quick: true,
        directory: None,
        json: Some(json.clone()),
        svg,
    };
    octokv_lab::run(&arguments, &mut |_| ()).unwrap();
    let document: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(json).unwrap()).unwrap();
    assert_eq!(document["settings"]["published"].as_array().unwrap().len(), 6);
    let results = document["results"].as_array().unwrap();
    assert_eq!(results.iter().filter(|point| point["paper"].is_number()).count(), 4);
    assert!(results.iter().all(|point| point["measured"].as_f64().is_some_and(|value| value > 0.0)));
    assert!(directory.path().join("leed-figure-1-1.svg").exists());
}
