//! Every number that the papers' experiments are made from, and where it comes from.
//!
//! A number is *the paper's* (OctoKV, IEEE text, by section or table, where OctoFAS is not named; OctoFAS has the same
//! machines, values and keys, its Table 1 and §5.1), *derived* (the arithmetic is beside it and, where
//! it can be, done here), *measured* (on this project's own code) or an *estimate*. None was chosen by looking at what
//! an experiment gives.
//!
//! # What a request costs a core
//! [`CostModel::Paper`], derived. The paper has no cost per request, so the least that its figures allow:
//! ```text
//!   work     Table II, heavy, with the engine: 0.491 of six cores                        2.946 cores
//!   rate     10 GbE brings at most 71.5 K puts/s (below); Fig. 7 has 15 % more with
//!            balancing, which must fit: without it at most 71.5 / 1.15                   62.2 K puts/s
//!   a put    2.946 / 62.2 K                                                              47.4 µs
//!   target   80 % of it (§IV-E)                                                          37.9 µs
//!   kv       what the engine adds in Table II, heavy: (0.491 − 0.436) / 0.491 = 11.2 %   5.3 µs
//!   device   the rest of the 20 %                                                        4.2 µs
//! ```
//! Were the paper's rate lower, a put would cost more, and every core would be as busy at a lower rate. A get is taken to
//! cost as much: nothing in the paper tells them apart.
//!
//! [`CostModel::Measured`], of our code: instructions of a request of 16 KiB, counted by callgrind as in
//! `scripts/instructions` (`hot_path store|retrieve 16384`, 120 batches less 20, 32 requests each, inclusive), at
//! 1.8 GHz and an *estimate* of 2 instructions a cycle; and the kernel's part of docs/BENCHMARKS.md.
//! ```text
//!                          put                            get
//!   target, ours           18,476 turn − 12,639 jobs      12,333 turn − 10,108 jobs
//!                          − 1,551 the socket's stand-in
//!                          = 4,286 instructions, 1.2 µs   = 2,225, 0.6 µs
//!   target, the kernel     sendmsg and recv are 33 % of 21 µs a put of 1 KiB ("Connections"): 6.9 µs; the copy of the
//!                          other 15 KiB as in a Retrieve of 4 KiB, 17 % of 2.5 µs each 4 KiB: 1.6 µs
//!   kv                     12,639 jobs − 2,650 device     10,108 jobs − 2,106 device
//!                          = 9,989 instructions, 2.8 µs   = 8,002, 2.2 µs
//!   device, the kernel     io_uring is 26 % of those 21 µs: 5.5 µs (memory's copy, the 2,650 above, is no drive's)
//! ```
//! The kernel's part is as it was on that machine, whose clock is not known, and so is not scaled.

use octokv_base::Nanos;
use octokv_device::ssd_model::DriveProfile;
use octokv_device::ssd_model::drive_profiles::EVO_970;
use octokv_node::SimulatedCosts;
use octokv_runtime::simulated::SimLinkConfig;

/// Storage cores. The paper's, Table III: 6 at 1.80 GHz.
pub const CORES: usize = 6;
/// Their clock. The paper's, Table III.
const CORE_HZ: f64 = 1.8e9;
/// Estimate: what servers do with code like this.
const INSTRUCTIONS_PER_CYCLE: f64 = 2.0;

/// The paper's, §V-A.
pub const KEY_BYTES: usize = 4;
/// The paper's, §V-A.
pub const VALUE_BYTES: usize = 16 << 10;
/// Threads of the light, medium and heavy load, one operation each at a time. The paper's, §V-A.
pub const LIGHT_THREADS: usize = 7;
/// See [`LIGHT`].
pub const MEDIUM_THREADS: usize = 10;
/// See [`LIGHT`].
pub const HEAVY_THREADS: usize = 12;

/// What TCP carries over 10 GbE: 1.25 GB/s, of which a frame of 1,500 B has 1,448 B of a stream in 1,538 B on the wire.
pub const WIRE_BYTES_PER_S: u64 = 1_250_000_000 * 1_448 / 1_538;
/// A put on the wire: its value in its capsule, 72 B before it.
const PUT_BYTES: f64 = (VALUE_BYTES + 72) as f64;
/// One way, both kernels and the interrupt in it. Estimate: two hosts on 10 GbE exchange some 20,000 small messages a
/// second one after another, which is 50 µs there and back.
const WIRE_LATENCY: Nanos = Nanos::from_micros(25);
/// Estimate: a fifth of that, by chance. Without any, requests fall into step.
const WIRE_JITTER: Nanos = Nanos::from_micros(5);

/// Of the connections to a node of six cores, the first that has fewer than so many commands outstanding takes the next
/// (OctoFAS §3.3, which does not give the number). Derived from Table I, light Put: its busiest connections have 2.00 and
/// 2.21 outstanding, so two.
pub const CONNECTION_THRESHOLD: usize = 2;
/// The same of OctoFAS's clients. Derived from its Fig. 4a: 2 threads keep two of the six cores busy, so one command each.
pub const OCTOFAS_CONNECTION_THRESHOLD: usize = 1;
/// Threads of OctoFAS's first and second flow, §5.1; of the second in §3.2, [`FLOW_2_THREADS`].
pub const TENANT_THREADS: [usize; 2] = [2, 8];
/// "A minimum of 2 to a maximum of 14, in increments of 2" (OctoFAS §3.2).
pub const TENANT_2_THREADS: [usize; 7] = [2, 4, 6, 8, 10, 12, 14];

/// The requests of each core in Table IV (heavy, Put): what came over each connection, whatever the client did.
pub const TABLE_IV: [u64; CORES] = [26_511, 30_412, 10_441, 11_844, 11_035, 9_757];

/// W. The paper's is 1 s; a tenth of it here, and of every time that is a multiple of it, to be done in minutes. A window
/// still has 4,000 requests or more.
pub const SAMPLING_INTERVAL: Nanos = Nanos::from_millis(100);
/// How many times shorter than the paper's it is.
pub const SAMPLING_INTERVAL_SCALE: f64 = 10.0;

/// Gets find so many keys. Our own choice: no cache stands between them and the drive, so any number will do.
pub const KEYS_STORED: u32 = 2_048;

/// The network between the client and the node.
pub fn wire_link(jitter: bool) -> SimLinkConfig {
    SimLinkConfig {
        latency: WIRE_LATENCY,
        jitter: if jitter { WIRE_JITTER } else { Nanos::ZERO },
        bytes_per_second: WIRE_BYTES_PER_S,
        // More than all threads have outstanding.
        window_bytes: 4 << 20,
        fragments: false,
    }
}

/// What TCP measures of it while it is not full: there and back, and twice half of the jitter.
pub fn wire_round_trip() -> Nanos {
    WIRE_LATENCY.times(2) + WIRE_JITTER
}

/// The paper's drive (Table III) with a tenth of its blocks: nothing here fills it, and its map takes memory.
pub fn drive_profile() -> DriveProfile {
    EVO_970.scaled_down(EVO_970.pages_per_block, 128)
}

/// Where the cost of a request comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CostModel {
    /// From the paper's figures.
    Paper,
    /// From counts of our own code.
    Measured,
}

/// Put or get.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// "Fill Random".
    Put,
    /// "Read Random".
    Get,
}

/// The most puts a second that the wire brings.
pub fn wire_puts_per_s() -> f64 {
    WIRE_BYTES_PER_S as f64 / PUT_BYTES
}

/// What a request costs. Without the engine (Table I, the baseline of Table II) its part is left out.
pub fn request_costs(setting: CostModel, operation: Operation, engine: bool) -> SimulatedCosts {
    let us = |us: f64| Nanos((us * 1000.0).round() as u64);
    let counted = |instructions: f64| instructions / (CORE_HZ * INSTRUCTIONS_PER_CYCLE) * 1e6;
    let (target, kv, device) = match (setting, operation) {
        (CostModel::Paper, _) => {
            let (with, without) = (0.491, 0.436);
            let put_us = with * CORES as f64 / (wire_puts_per_s() / 1.15) * 1e6;
            let kv_part = (with - without) / with;
            (put_us * 0.8, put_us * kv_part, put_us * (0.2 - kv_part))
        }
        (CostModel::Measured, operation) => {
            let kernel_us = 21.0 * 0.33 + 15.0 / 4.0 * 2.5 * 0.17;
            let (target, kv) = match operation {
                Operation::Put => (18_476.0 - 12_639.0 - 1_551.0, 12_639.0 - 2_650.0),
                Operation::Get => (12_333.0 - 10_108.0, 10_108.0 - 2_106.0),
            };
            (counted(target) + kernel_us, counted(kv), 21.0 * 0.26)
        }
    };
    SimulatedCosts { target: us(target), kv: if engine { us(kv) } else { Nanos::ZERO }, device: us(device) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_costs_are_those_of_the_text_above() {
        let of = |setting, operation, engine| {
            let SimulatedCosts { target, kv, device } = request_costs(setting, operation, engine);
            [target, kv, device].map(|span| (span.0 + 50) / 100)
        };
        assert_eq!((wire_puts_per_s() / 100.0).round(), 715.0);
        assert_eq!(of(CostModel::Paper, Operation::Put, true), [379, 53, 42]);
        assert_eq!(of(CostModel::Paper, Operation::Get, false), [379, 0, 42]);
        assert_eq!(of(CostModel::Measured, Operation::Put, true), [97, 28, 55]);
        assert_eq!(of(CostModel::Measured, Operation::Get, true), [91, 22, 55]);
    }
}
