//! Writes the fixture of the current format version: `cargo run -p octokv-engine --example make_fixture FILE`.
//!
//! Run once per version; the file is then kept, and `tests/hash_fixtures.rs` opens it for ever after.

#![allow(clippy::disallowed_methods, reason = "a tool that writes one file")]

use octokv_base::{Pool, Random};
use octokv_device::Device;
use octokv_device::power_loss::PowerDisk;
use octokv_engine::conformance::{key_of, record_of, value_of};
use octokv_engine::hash::{FormatSettings, HashEngine, OpenSettings, format, open};
use octokv_engine::{Durability, Engine, PutMode};
use octokv_runtime::block_on;
use std::rc::Rc;

fn main() {
    let path = std::env::args().nth(1).expect("a file to write");
    let disk = PowerDisk::new(vec![0; 640 << 10], 512);
    let device: Rc<dyn Device> = Rc::new(disk.clone());
    let mut random = Random::new(1);
    let mut settle = || {
        disk.complete(&mut random);
    };
    let settings =
        FormatSettings { unit_bytes: 512, value_bytes_max: 64 << 10, seed: 1, ..FormatSettings::default() };
    block_on(format(&*device, &settings), &mut settle).expect("formats");
    let pool = Pool::new(1 << 20);
    let open_settings = OpenSettings { durability: Durability::Flush, cores: 1 };
    let volume = block_on(open(&device, &pool, open_settings, &settings), &mut settle).expect("opens");
    let engine = HashEngine::new(volume, 0, device, pool);
    for index in 0..20 {
        if index == 10 {
            block_on(engine.checkpoint(false), &mut settle).expect("writes a checkpoint");
        }
        let key = key_of(index);
        let value = value_of(&key, index, 100 + index as usize);
        let put = engine.put(&key, PutMode::Upsert, record_of(&key, &value), value.len());
        block_on(put, &mut settle).expect("stores");
    }
    block_on(engine.delete(&key_of(3)), &mut settle).expect("deletes");
    block_on(engine.mark(), &mut settle).expect("marks");
    std::fs::write(&path, disk.contents()).expect("writes the file");
}
