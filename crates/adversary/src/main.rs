//! The program of the room: `measure` what attacks cost an honest host, or `soak` a node in everything at once.
//!
//! It attacks an `octokv serve` that it starts itself. `scripts/hostile` and `scripts/soak` build and run it.

#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "a program: files, processes and threads begin here"
)]

use anyhow::{Context, Result};
use clap::{Parser, Subcommand};
use octokv_adversary::attacks::{self, ATTACKS};
use octokv_adversary::{attack_latency, soak};
use std::path::PathBuf;
use std::time::Duration;

/// Attacks a node of octokv, and looks at what becomes of everybody else.
#[derive(Debug, Parser)]
#[command(name = "octokv-adversary", version, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: CliCommand,
}

#[derive(Debug, Subcommand)]
enum CliCommand {
    /// The latency of an honest host, quiet and under each attack.
    Measure {
        /// The node's binary.
        #[arg(long, value_name = "PATH")]
        octokv: PathBuf,
        /// "memory", or a file that is made.
        #[arg(long, default_value = "memory")]
        device: String,
        /// Slices of each kind, for each attack.
        #[arg(long, default_value_t = 20)]
        rounds: u32,
        /// Milliseconds of a slice.
        #[arg(long, default_value_t = 250)]
        slice_ms: u64,
        /// Operations of the honest host, a second.
        #[arg(long, default_value_t = 2000)]
        rate: u64,
        /// Keys that the node holds.
        #[arg(long, default_value_t = 50_000)]
        keys: u32,
        /// Only these attacks; the control is always there.
        #[arg(long, value_delimiter = ',')]
        only: Vec<String>,
    },
    /// A node in everything at once: clients, errors, kills, attacks; then it must hold what it held before.
    Soak {
        /// The node's binary.
        #[arg(long, value_name = "PATH")]
        octokv: PathBuf,
        /// How long, in all.
        #[arg(long, default_value_t = 30.0)]
        minutes: f64,
        /// Where the device goes: a file system with direct transfers.
        #[arg(long, default_value = ".")]
        directory: PathBuf,
        /// Draws the moments of the kills.
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
                    .map(|name| attacks::by_name(name).with_context(|| format!("there is no attack {name}")))
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
