//! The cores of one node on threads: each serves the connections that the first core hands over to it, on one volume.

#![allow(clippy::disallowed_methods, reason = "cores are threads")]

use crate::rig::{ReactorRig, RigConfig, RigNode, keys};
use std::sync::mpsc::channel;

const CORES: usize = 3;
const DEPTH: usize = 32;

#[test]
fn each_core_serves_its_own_host_on_the_volume_of_all() {
    let node = RigNode::new(RigConfig::new(256 << 20, DEPTH as u16), CORES);
    let keys_of = |core: usize| keys((core * 2 * DEPTH) as u64, 2 * DEPTH);
    let (mut stored_txs, stored_rxs): (Vec<_>, Vec<_>) = (0..CORES).map(|_| channel()).unzip();
    // A core waits for the keys of the next one.
    stored_txs.rotate_right(1);
    std::thread::scope(|scope| {
        for (core, (stored_tx, next_stored)) in stored_txs.into_iter().zip(stored_rxs).enumerate() {
            let (node, keys_of) = (&node, &keys_of);
            scope.spawn(move || {
                // Fails if the I/O queue of its host is on another core.
                let mut rig = ReactorRig::on_core(node, core);
                let stores = rig.record_batches(&keys_of(core), Some(&[core as u8; 100]));
                stored_tx.send(()).expect("the core before waits");
                next_stored.recv().expect("the next core stored its keys");
                // Fails if a key is not there.
                let retrieves = rig.record_batches(&keys_of((core + 1) % CORES), None);
                assert_eq!((stores.len(), retrieves.len()), (2, 2));
                for recorded in [&stores, &retrieves] {
                    rig.begin_replay(recorded);
                    (0..40).for_each(|round| rig.replay_next(recorded, round % 2));
                }
            });
        }
    });
}
