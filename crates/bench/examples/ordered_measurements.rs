//! Measurements of the ordered engine that take more than one workload ([`octokv_bench::ordered_measurements`]):
//! `cargo run --release -p octokv-bench --example ordered_measurements -- NAME --directory DIRECTORY [--OPTION NUMBER]…`.
//!
//! ```text
//!   NAME           options with their defaults, besides seed 1, cores 2, streams 16, cache-mib 64
//!   seek           deleted 1000000, others 100000, value-bytes 100, file-mib 2048, wait-s 10, seeks 11
//!   scan           data-mib 512, value-bytes 16384, file-mib 2048, scan-length 10, write-rate 1000, seconds 20
//!   amplification  data-mib 256, value-bytes 128, file-mib 1024, passes 3
//!   open           keys 10000000, value-bytes 64, file-mib 4096
//! ```
//! Prints a table and a line of JSON. The files stay in the directory, which must not have any of them before.

use octokv_base::Nanos;
use octokv_bench::GeneratorPlatform;
use octokv_bench::machine_info::MachineInfo;
use octokv_bench::ordered_measurements::amplification::AmplificationConfig;
use octokv_bench::ordered_measurements::open_after_kill::{OpenAfterKillConfig, READY_LINE};
use octokv_bench::ordered_measurements::scan_during_collection::ScanConfig;
use octokv_bench::ordered_measurements::seek_after_deletes::SeekConfig;
use octokv_bench::ordered_measurements::{
    MeasurementError, MeasurementSetup, amplification, open_after_kill, scan_during_collection,
    seek_after_deletes,
};
use octokv_runtime::Polling;
use octokv_sys::{clock, thread};
use serde::Serialize;
use std::fmt::Display;
use std::path::PathBuf;
use std::process::{Command, ExitCode};

/// The child of `open`, which this program starts.
const FILL: &str = "open-fill";

/// The options of the command line, each a name and its value.
struct Options(Vec<(String, String)>);

impl Options {
    fn parse(mut arguments: impl Iterator<Item = String>) -> Result<Options, String> {
        let mut options = Vec::new();
        while let Some(argument) = arguments.next() {
            let Some(name) = argument.strip_prefix("--") else {
                return Err(format!("{argument} is no option"));
            };
            let value = arguments.next().ok_or_else(|| format!("--{name} needs a value"))?;
            options.push((name.to_owned(), value));
        }
        Ok(Options(options))
    }

    /// Takes an option, so that those that are left at the end are unknown.
    fn take(&mut self, name: &str) -> Option<String> {
        let at = self.0.iter().position(|(have, _)| have == name)?;
        Some(self.0.swap_remove(at).1)
    }

    fn number(&mut self, name: &str, default: u64) -> Result<u64, String> {
        let Some(text) = self.take(name) else { return Ok(default) };
        text.parse()
            .ok()
            .filter(|number| *number > 0)
            .ok_or_else(|| format!("--{name} {text}: a number above 0"))
    }

    fn bytes(&mut self, name: &str, default_mib: u64) -> Result<u64, String> {
        let mib = self.number(name, default_mib)?;
        mib.checked_mul(1 << 20).ok_or_else(|| format!("--{name} {mib} is too large"))
    }

    fn end(self) -> Result<(), String> {
        self.0
            .first()
            .map_or(Ok(()), |(name, _)| Err(format!("--{name}: no such option of this measurement")))
    }
}

fn setup_of(options: &mut Options) -> Result<MeasurementSetup, String> {
    let directory = options.take("directory").ok_or("--directory is missing")?;
    Ok(MeasurementSetup {
        directory: PathBuf::from(directory),
        seed: options.number("seed", 1)?,
        cores: options.number("cores", 2)? as usize,
        streams: options.number("streams", 16)? as usize,
        cache_bytes: options.bytes("cache-mib", 64)?,
        polling: Polling::Adaptive { spin: Nanos::from_micros(100) },
        platform: GeneratorPlatform {
            now: clock::now,
            spawn: |_, body| thread::spawn("octokv-load", body).map(drop),
        },
    })
}

fn print<T: Serialize + Display>(name: &str, result: Result<T, MeasurementError>) -> Result<(), String> {
    let result = result.map_err(|error| error.to_string())?;
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let document = serde_json::json!({
        "measurement": name,
        "arguments": arguments,
        "machine": MachineInfo::of_this_machine(),
        "result": result,
    });
    println!("{result}\n{document}");
    Ok(())
}

fn run() -> Result<(), String> {
    let mut arguments = std::env::args().skip(1);
    let name = arguments.next().ok_or("seek, scan, amplification or open?")?;
    let mut options = Options::parse(arguments)?;
    let setup = setup_of(&mut options)?;
    match name.as_str() {
        "seek" => {
            let config = SeekConfig {
                deleted_keys: options.number("deleted", 1_000_000)?,
                other_keys: options.number("others", 100_000)?,
                value_bytes: options.number("value-bytes", 100)? as usize,
                file_bytes: options.bytes("file-mib", 2048)?,
                wait: Nanos::from_secs(options.number("wait-s", 10)?),
                seeks: options.number("seeks", 11)? as usize,
            };
            options.end()?;
            print(&name, seek_after_deletes::measure(&setup, &config))
        }
        "scan" => {
            let config = ScanConfig {
                data_bytes: options.bytes("data-mib", 512)?,
                value_bytes: options.number("value-bytes", 16_384)? as usize,
                file_bytes: options.bytes("file-mib", 2048)?,
                scan_length: options.number("scan-length", 10)? as u32,
                write_rate: options.number("write-rate", 1000)? as f64,
                phase: Nanos::from_secs(options.number("seconds", 20)?),
            };
            options.end()?;
            print(&name, scan_during_collection::measure(&setup, &config))
        }
        "amplification" => {
            let config = AmplificationConfig {
                data_bytes: options.bytes("data-mib", 256)?,
                value_bytes: options.number("value-bytes", 128)? as usize,
                file_bytes: options.bytes("file-mib", 1024)?,
                passes: options.number("passes", 3)?,
            };
            options.end()?;
            print(&name, amplification::measure(&setup, &config))
        }
        "open" | FILL => {
            let config = OpenAfterKillConfig {
                keys: options.number("keys", 10_000_000)?,
                value_bytes: options.number("value-bytes", 64)? as usize,
                file_bytes: options.bytes("file-mib", 4096)?,
            };
            options.end()?;
            if name == FILL {
                let rate = open_after_kill::fill(&setup, &config).map_err(|error| error.to_string())?;
                eprintln!("{rate:.0} puts/s");
                println!("{READY_LINE}");
                loop {
                    std::thread::park();
                }
            }
            let program = std::env::current_exe().map_err(|error| error.to_string())?;
            let mut child = Command::new(program);
            child.arg(FILL).args(std::env::args().skip(2));
            print(&name, open_after_kill::measure(&setup, &config, &mut child))
        }
        other => Err(format!("{other}: seek, scan, amplification or open?")),
    }
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("ordered_measurements: {error}");
            ExitCode::FAILURE
        }
    }
}
