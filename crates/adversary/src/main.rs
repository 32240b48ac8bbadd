//! The program of this crate: `measure` the effect of attacks on latency, or `soak` a node under load and attacks.
//!
//! Attacks an `octokv serve` process that it starts itself. `scripts/adversary` and `scripts/soak` build and run it.

#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "the program creates files, processes and threads"
)]

use anyhow::{Context, Result};
use clap::{Parser, Subcommand};
use octokv_adversary::attacks::{self, ATTACKS};
use octokv_adversary::{attack_latency, soak};
use std::path::PathBuf;
use std::time::Duration;

/// Attacks a node of octokv and checks that other hosts are not affected.
#[derive(Debug, Parser)]
#[command(name = "octokv-adversary", version, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: CliCommand,
}

#[derive(Debug, Subcommand)]
enum CliCommand {
    /// Measures the latency of a well-behaved client, without and under each attack.
    Measure {
        /// Path of the octokv binary.
        #[arg(long, value_name = "PATH")]
        octokv: PathBuf,
        /// "memory", or the path of a device file to create.
        #[arg(long, default_value = "memory")]
        device: String,
        /// Slices without and under attack, for each attack.
        #[arg(long, default_value_t = 20)]
        rounds: u32,
        /// Duration of a slice, in milliseconds.
        #[arg(long, default_value_t = 250)]
        slice_ms: u64,
        /// Operations per second of the well-behaved client.
        #[arg(long, default_value_t = 2000)]
        rate: u64,
        /// Number of other keys on the node.
        #[arg(long, default_value_t = 50_000)]
        keys: u32,
        /// Only these attacks; "control" always runs first.
        #[arg(long, value_delimiter = ',')]
        only: Vec<String>,
    },
    /// Runs a node under clients, full devices, kills and attacks; afterwards no write and no resource may be lost.
    Soak {
        /// Path of the octokv binary.
        #[arg(long, value_name = "PATH")]
        octokv: PathBuf,
        /// Total duration, in minutes.
        #[arg(long, default_value_t = 30.0)]
        minutes: f64,
        /// Directory of the device file, on a file system with direct I/O.
        #[arg(long, default_value = ".")]
        directory: PathBuf,
        /// Seed of the kill times.
        #[arg(long, default_value_t = 1)]
        seed: u64,
    },
}

fn main() -> Result<()> {
    match Cli::parse().command {
        CliCommand::Measure { octokv, device, rounds, slice_ms, rate, keys, only } => {
            let slice = Duration::from_millis(slice_ms);
            let settings =
                attack_latency::AttackLatencyConfig { binary: octokv, device, rounds, slice, rate, keys };
            let chosen: Result<Vec<_>> = match only.is_empty() {
                true => Ok(ATTACKS.iter().collect()),
                false => std::iter::once("control")
                    .chain(only.iter().map(String::as_str).filter(|&name| name != "control"))
                    .map(|name| attacks::by_name(name).with_context(|| format!("unknown attack {name}")))
                    .collect(),
            };
            attack_latency::run(&settings, &chosen?)
        }
        CliCommand::Soak { octokv, minutes, directory, seed } => {
            let span = Duration::from_secs_f64(minutes * 60.0);
            soak::run(&soak::SoakConfig { binary: octokv, span, directory, seed })
        }
    }
}
