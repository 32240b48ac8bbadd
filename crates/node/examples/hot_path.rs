//! Executes commands on one core of a node, without the kernel, under an instruction counter. The difference between two
//! runs of different length is the commands' alone.
//!
//! Usage: `hot_path OPERATION BYTES POLICY DEPTH BATCHES`; a batch is DEPTH commands at once. Operations: `store` and `retrieve`
//! of values in memory, `read` of blocks in memory, and `file-store` and `file-retrieve` on a device that answers later, with
//! a journal.

#[path = "../tests/support/rig.rs"]
mod rig;

use octokv_base::Nanos;
use rig::{BLOCK_NAMESPACE, ReactorRig, RigConfig, keys};

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let number = |at: usize| arguments.get(at).and_then(|text| text.parse::<usize>().ok());
    let policy = arguments.get(2).and_then(|text| text.parse().ok());
    let (Some(what), Some(bytes), Some(policy), Some(depth), Some(batches)) =
        (arguments.first(), number(1), policy, number(3), number(4))
    else {
        eprintln!("usage: hot_path OPERATION BYTES POLICY DEPTH BATCHES");
        std::process::exit(2);
    };
    let mut config = RigConfig { block_bytes: 512, ..RigConfig::new(64 << 20, depth as u16) };
    config.is_deferred = what.starts_with("file-");
    if what == "read" {
        config.namespace = BLOCK_NAMESPACE;
    }
    let mut rig = ReactorRig::with_config(config);
    let batch = match what.strip_prefix("file-").unwrap_or(what) {
        "read" => rig.record_reads(depth, bytes),
        operation => {
            let keys = keys(0, depth);
            let stores = rig.record_batch(&keys, Some(&vec![7; bytes]));
            if operation == "store" { stores } else { rig.record_batch(&keys, None) }
        }
    };
    rig.apply_policy(policy);
    // Under the fair queue a tenant that has been alone for a while is served otherwise.
    rig.replay(&batch, 1);
    rig.pass_time(Nanos::from_millis(20));
    let response_bytes = rig.replay(&batch, batches);
    println!("{} operations, {response_bytes} response bytes", batches * depth);
}
