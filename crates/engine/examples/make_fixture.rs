//! Writes the fixture of the current format version: `cargo run -p octokv-engine --example make_fixture FILE`.
//!
//! Run once per version; `tests/hash_fixtures.rs` opens the committed file from then on.

#![allow(clippy::disallowed_methods, reason = "a tool that writes one file")]

use octokv_base::{BufferPool, Prng};
use octokv_device::Device;
use octokv_device::power_loss::PowerLossDisk;
use octokv_engine::conformance::{key_of, record_of, value_of};
use octokv_engine::hash::{HashEngine, format, open};
use octokv_engine::{Durability, Engine, PutMode};
use octokv_engine::{FormatConfig, OpenConfig, WallClock};
use octokv_runtime::block_on;
use std::rc::Rc;

fn main() {
    let path = std::env::args().nth(1).expect("a file to write");
    let disk = PowerLossDisk::new(vec![0; 640 << 10], 512);
    let device: Rc<dyn Device> = Rc::new(disk.clone());
    let mut random = Prng::new(1);
    let mut complete_io = || {
        disk.complete_one(&mut random);
    };
    let format_config =
        FormatConfig { unit_bytes: Some(512), value_bytes_max: 64 << 10, seed: 1, ..FormatConfig::default() };
    block_on(format(&*device, &format_config), &mut complete_io).expect("formats");
    let pool = BufferPool::new(1 << 20);
    let open_config = OpenConfig {
        durability: Durability::PowerSafe,
        cores: 1,
        cache_bytes: 0,
        prepare_bytes: 0,
        clock: WallClock::default(),
    };
    let volume =
        block_on(open(&device, &pool, open_config, &format_config), &mut complete_io).expect("opens");
    let engine = HashEngine::new(volume, 0, device, pool);
    for index in 0..20 {
        if index == 10 {
            block_on(engine.checkpoint(false), &mut complete_io).expect("writes a checkpoint");
        }
        let key = key_of(index);
        let value = value_of(&key, index, 100 + index as usize);
        let put =
            engine.put(&key, PutMode::Upsert, record_of(engine.record_layout(), &key, &value), value.len());
        block_on(put, &mut complete_io).expect("stores");
    }
    block_on(engine.delete(&key_of(3)), &mut complete_io).expect("deletes");
    block_on(engine.mark_durable(), &mut complete_io).expect("marks");
    std::fs::write(&path, disk.contents()).expect("writes the file");
}
