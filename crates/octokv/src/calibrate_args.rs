//! The flags of `octokv calibrate`.

use crate::arg_parsers::parse_finite;
use crate::choices::DurabilityChoice;
use crate::drive_arg::DriveArg;
use crate::engine_arg::EngineArg;
use crate::size::Size;
use clap::Args;
use std::path::PathBuf;

/// Arguments of `calibrate`.
#[derive(Debug, Args)]
pub struct CalibrateArgs {
    /// File or block device to measure on. A missing file is created, and removed afterwards.
    #[arg(long, value_name = "PATH")]
    pub path: PathBuf,
    /// Size of a missing file; an existing device keeps its size.
    #[arg(long, value_name = "SIZE", default_value = "1GiB")]
    pub size: Size,
    /// Discard the data on a file or device that exists; it holds no volume afterwards.
    #[arg(long)]
    pub format: bool,
    /// The storage engine [default: hash].
    #[arg(long)]
    pub engine: Option<EngineArg>,
    /// Simulate the service times of this drive, as `octokv serve --nand` does.
    #[arg(long, value_name = "DRIVE")]
    pub nand: Option<DriveArg>,
    /// When the engine acknowledges a write [default: flush].
    #[arg(long)]
    pub durability: Option<DurabilityChoice>,
    /// Size of the values: that of the load to come, since costs follow from it.
    #[arg(long, value_name = "SIZE", default_value = "1024")]
    pub value_size: Size,
    /// Number of keys. A round deletes each once at most [default: those that half of the device has space for, at most 200000].
    #[arg(long, value_name = "COUNT")]
    pub num: Option<u64>,
    /// Operations in flight. A last round has twice as many, to tell whether the device was saturated.
    #[arg(long, value_name = "COUNT", default_value_t = 256)]
    pub depth: usize,
    /// Seconds of gets and of puts in each round, after a fifth more that does not count.
    #[arg(long, value_name = "SECONDS", default_value_t = 2.0, value_parser = parse_finite)]
    pub seconds: f64,
    /// Number of rounds; in each, gets, puts and deletes are measured in turn.
    #[arg(long, value_name = "COUNT", default_value_t = 5)]
    pub rounds: usize,
    /// CPUs of the engine's reactors [default: one, not pinned].
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub cores: Vec<usize>,
    /// Write the costs, with machine and measurements, to a file for `octokv serve --token-costs`; "-" is standard output.
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}
