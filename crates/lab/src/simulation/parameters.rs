//! The parameters of the papers' experiments, each with its source.
//!
//! A parameter is *the paper's* (OctoKV, IEEE text, by section or table, unless OctoFAS is named; OctoFAS has the same
//! machines, values and keys: its Table 1 and §5.1), *derived* (the derivation is beside it or, if it is arithmetic, done
//! here), *measured* (on this project's code) or an *estimate*. No parameter was fitted to the results of an experiment.
//!
//! # CPU costs of a request
//! [`CostModel::Paper`], derived. The paper has no cost per request; this is the lowest that its numbers allow:
//! ```text
//!   work     Table II, heavy, with the engine: 0.491 of six cores                        2.946 cores
//!   rate     10 GbE carries at most 71.5 K puts/s (below); balancing adds 15 % (Fig. 7)
//!            and must fit, so the rate without it is at most 71.5 / 1.15                 62.2 K puts/s
//!   a put    2.946 / 62.2 K                                                              47.4 µs
//!   target   80 % of it (§IV-E)                                                          37.9 µs
//!   kv       growth by the engine in Table II, heavy: (0.491 − 0.436) / 0.491 = 11.2 %   5.3 µs
//!   device   the rest of the 20 %                                                        4.2 µs
//! ```
//! If the paper's rate was lower, a put cost more, and every core was as busy at a lower rate. A get costs as much as a
//! put here, because the paper does not distinguish them.
//!
//! [`CostModel::Measured`], of our code: instructions of a request of 16 KiB, counted by callgrind as in
//! `scripts/instructions` (`hot_path store|retrieve 16384`, 120 batches less 20, 32 requests each, inclusive), at
//! 1.8 GHz and an *estimate* of 2 instructions per cycle; and the time in the kernel by docs/BENCHMARKS.md. "Iteration" is
//! the whole reactor iteration, "tasks" the requests that it executes, "device" their device operations.
//! ```text
//!                          put                             get
//!   target, our code       18,476 iteration − 12,639 tasks 12,333 iteration − 10,108 tasks
//!                          − 1,551 of the in-memory socket
//!                          = 4,286 instructions, 1.2 µs    = 2,225, 0.6 µs
//!   target, the kernel     sendmsg and recv are 33 % of 21 µs per put of 1 KiB ("Connections"): 6.9 µs; the copy of the
//!                          other 15 KiB as in a Retrieve of 4 KiB, 17 % of 2.5 µs per 4 KiB: 1.6 µs
//!   kv                     12,639 tasks − 2,650 device     10,108 tasks − 2,106 device
//!                          = 9,989 instructions, 2.8 µs    = 8,002, 2.2 µs
//!   device, the kernel     io_uring is 26 % of those 21 µs: 5.5 µs (the 2,650 above are the copy of the in-memory
//!                          device, which a drive does not have)
//! ```
//! The time in the kernel is not scaled to 1.8 GHz, because the clock rate of the machine that measured it is unknown.

use octokv_base::Nanos;
use octokv_device::ssd_model::DriveProfile;
use octokv_device::ssd_model::drive_profiles::EVO_970;
use octokv_node::SimulatedCosts;
use octokv_runtime::simulated::SimLinkConfig;

/// Number of storage cores. The paper's, Table III: 6 at 1.80 GHz.
pub const CORES: usize = 6;
/// Clock rate of a storage core. The paper's, Table III.
const CORE_HZ: f64 = 1.8e9;
/// Estimate: typical of server code.
const INSTRUCTIONS_PER_CYCLE: f64 = 2.0;

/// Key length. The paper's, §V-A.
pub const KEY_BYTES: usize = 4;
/// Value length. The paper's, §V-A.
pub const VALUE_BYTES: usize = 16 << 10;
/// Client threads of the light load, with one outstanding operation each. The paper's, §V-A.
pub const LIGHT_THREADS: usize = 7;
/// Client threads of the medium load. The paper's, §V-A.
pub const MEDIUM_THREADS: usize = 10;
/// Client threads of the heavy load. The paper's, §V-A.
pub const HEAVY_THREADS: usize = 12;

/// Payload rate of TCP over 10 GbE. Derived: of 1.25 GB/s, a frame of 1,538 B on the wire (MTU 1,500) carries 1,448 B.
pub const WIRE_BYTES_PER_S: u64 = 1_250_000_000 * 1_448 / 1_538;
/// Bytes of a put on the wire: a command capsule with 72 B of headers and the value as in-capsule data.
const PUT_BYTES: f64 = (VALUE_BYTES + 72) as f64;
/// One-way latency, with both kernels and the interrupt. Estimate: two hosts on 10 GbE exchange about 20,000 small
/// messages per second in a ping-pong, a round trip of 50 µs.
const WIRE_LATENCY: Nanos = Nanos::from_micros(25);
/// Maximum random addition to the latency. Estimate: a fifth of it. Without jitter, requests synchronise.
const WIRE_JITTER: Nanos = Nanos::from_micros(5);

/// Threshold of the client's connection policy: a command goes to the first connection with fewer outstanding commands than
/// this (OctoFAS §3.3, which does not state the number). Derived from Table I, light Put: the busiest connections have 2.00
/// and 2.21 outstanding commands, so two.
pub const CONNECTION_THRESHOLD: usize = 2;
/// The same for OctoFAS's clients. Derived from its Fig. 4a: 2 threads use two of the six cores, so one command each.
pub const OCTOFAS_CONNECTION_THRESHOLD: usize = 1;
/// Client threads of the first and the second tenant. OctoFAS's, §5.1; §3.2 varies the second, [`TENANT_2_THREADS`].
pub const TENANT_THREADS: [usize; 2] = [2, 8];
/// Client threads of the second tenant in Fig. 3: "a minimum of 2 to a maximum of 14, in increments of 2" (OctoFAS §3.2).
pub const TENANT_2_THREADS: [usize; 7] = [2, 4, 6, 8, 10, 12, 14];

/// Requests received by each core, that is over each connection, in Table IV (heavy, Put). As weights of the connections
/// they reproduce the paper's distribution without knowledge of its client's policy.
pub const TABLE_IV: [u64; CORES] = [26_511, 30_412, 10_441, 11_844, 11_035, 9_757];

/// Sampling interval W. The paper's is 1 s. It and all durations that are multiples of it are a tenth here, so that a
/// reproduction takes minutes; an interval still has at least 4,000 requests.
pub const SAMPLING_INTERVAL: Nanos = Nanos::from_millis(100);
/// The paper's sampling interval divided by [`SAMPLING_INTERVAL`].
pub const SAMPLING_INTERVAL_SCALE: f64 = 10.0;

/// Number of keys that gets read, stored before them. Our choice: gets use no cache, so the number has no effect.
pub const KEYS_STORED: u32 = 2_048;

/// The link between client and node; `jitter` adds random latency.
pub fn wire_link(jitter: bool) -> SimLinkConfig {
    SimLinkConfig {
        latency: WIRE_LATENCY,
        jitter: if jitter { WIRE_JITTER } else { Nanos::ZERO },
        bytes_per_second: WIRE_BYTES_PER_S,
        // More than the outstanding bytes of all threads.
        window_bytes: 4 << 20,
        fragments: false,
    }
}

/// Round trip time that TCP measures on an idle link: twice the latency and twice the mean jitter.
pub fn wire_round_trip() -> Nanos {
    WIRE_LATENCY.times(2) + WIRE_JITTER
}

/// The paper's drive (Table III) with a tenth of its blocks: no experiment fills it, and its mapping table uses memory.
pub fn drive_profile() -> DriveProfile {
    EVO_970.scaled_down(EVO_970.pages_per_block, 128)
}

/// Source of the CPU costs of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CostModel {
    /// Derived from the paper's numbers.
    Paper,
    /// Derived from instruction counts of our code.
    Measured,
}

/// The operation of a load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// Stores new keys: the paper's "Fill Random".
    Put,
    /// Reads stored keys: the paper's "Read Random".
    Get,
}

/// Maximum puts per second over the link: its payload rate divided by the bytes of a put.
pub fn wire_puts_per_s() -> f64 {
    WIRE_BYTES_PER_S as f64 / PUT_BYTES
}

/// CPU costs of a request, by stage. `engine` is false in runs without the engine (Table I, the baseline of Table II), whose
/// kv stage costs nothing.
pub fn request_costs(costs: CostModel, operation: Operation, engine: bool) -> SimulatedCosts {
    let us = |us: f64| Nanos((us * 1000.0).round() as u64);
    let counted = |instructions: f64| instructions / (CORE_HZ * INSTRUCTIONS_PER_CYCLE) * 1e6;
    let (target, kv, device) = match (costs, operation) {
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
    fn costs_equal_the_derivation_in_the_module_documentation() {
        let of = |costs, operation, engine| {
            let SimulatedCosts { target, kv, device } = request_costs(costs, operation, engine);
            [target, kv, device].map(|span| (span.0 + 50) / 100)
        };
        assert_eq!((wire_puts_per_s() / 100.0).round(), 715.0);
        assert_eq!(of(CostModel::Paper, Operation::Put, true), [379, 53, 42]);
        assert_eq!(of(CostModel::Paper, Operation::Get, false), [379, 0, 42]);
        assert_eq!(of(CostModel::Measured, Operation::Put, true), [97, 28, 55]);
        assert_eq!(of(CostModel::Measured, Operation::Get, true), [91, 22, 55]);
    }
}
