//! Stores or retrieves values through one core of a node, in memory, under an instruction counter. The difference
//! between two runs of different length is the operations' alone.
//!
//! Usage: `hot_path store|retrieve VALUE_BYTES POLICY BATCHES`; a batch is 32 commands.

#[path = "../tests/support/rig.rs"]
mod rig;

use rig::{ReactorRig, keys};

const DEPTH: usize = 32;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let number = |at: usize| arguments.get(at).and_then(|text| text.parse::<usize>().ok());
    let policy = arguments.get(2).and_then(|text| text.parse().ok());
    let (Some(what), Some(bytes), Some(policy), Some(batches)) =
        (arguments.first(), number(1), policy, number(3))
    else {
        eprintln!("usage: hot_path store|retrieve VALUE_BYTES POLICY BATCHES");
        std::process::exit(2);
    };
    let mut rig = ReactorRig::new(64 << 20, DEPTH as u16);
    let mut batch = rig.record_batch(&keys(0, DEPTH), Some(&vec![7; bytes]));
    if what == "retrieve" {
        batch = rig.record_batch(&keys(0, DEPTH), None);
    }
    rig.apply_policy(policy);
    let response_bytes = rig.replay(&batch, batches);
    println!("{} operations, {response_bytes} response bytes", batches * DEPTH);
}
