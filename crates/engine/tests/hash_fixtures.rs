//! Volumes of every released format version remain readable.

use crate::common::HashFixture;
use octokv_base::Prng;
use octokv_device::power_loss::PowerLossDisk;
use octokv_engine::Engine;
use octokv_engine::conformance::{EngineFixture, key_of, operation_of};
use octokv_runtime::block_on;
use std::rc::Rc;

/// Twenty keys, ten before and ten after a checkpoint, the fourth deleted; without a clean shutdown.
#[test]
fn version_1_of_the_hash_engine() {
    let disk = PowerLossDisk::new(include_bytes!("fixtures/hash-v1.img").to_vec(), 512);
    let mut random = Prng::new(1);
    let mut complete_io = || {
        disk.complete_one(&mut random);
    };
    let engine =
        block_on(HashFixture::default().open(Rc::new(disk.clone())), &mut complete_io).expect("opens");
    assert_eq!(engine.statistics().keys, 19);
    for index in 0..20 {
        let key = key_of(index);
        let found = block_on(engine.get(&key), &mut complete_io).expect("no fault");
        let want = (index != 3).then_some((index, 100 + index as usize));
        assert_eq!(found.map(|value| (operation_of(&key, value.as_bytes()), value.bytes as usize)), want);
    }
}
