//! The arguments of `octokv reproduce`.

use clap::{Args, ValueEnum};
use std::path::PathBuf;

/// Arguments of `reproduce`.
#[derive(Debug, Args)]
pub struct ReproduceArgs {
    /// The paper.
    pub paper: Paper,
    /// One table or figure of the paper with its real runs, as "table-1" or "figure-7"; those alone are "figure-7-cores"
    /// [default: all].
    #[arg(long, value_name = "NAME")]
    pub figure: Option<String>,
    /// One round of a few operations: a smoke test whose results are not significant.
    #[arg(long)]
    pub quick: bool,
    /// Real runs (netkvs; figures 4, 5 and 6-host of octokv): directory for files that are removed afterwards [default:
    /// the system's directory for temporary files].
    #[arg(long, value_name = "DIR")]
    pub directory: Option<PathBuf>,
    /// Write the results as JSON to a file; "-" is standard output.
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// octokv, octofas, iterkvssd, leed: draw the figures as SVG files into an existing directory: PAPER-NAME-N.svg. Crosses are the paper's numbers.
    #[arg(long, value_name = "DIR")]
    pub svg: Option<PathBuf>,
}

/// The papers whose experiments can be run.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum Paper {
    /// The poster on key-value storage over the network: RocksDB on a remote disk, our engine on either side.
    Netkvs,
    /// The paper on moving requests between the cores of a node, its machines and time modelled; and on a store of files on
    /// the host, as real runs.
    Octokv,
    /// The paper on fairness between the tenants of a node, on the same machines, and the same of our own policy.
    Octofas,
    /// The paper on iterators in a key-value drive, the drive and time modelled.
    Iterkvssd,
    /// The paper on a key-value store for drives at SmartNICs: its tables and figures of one drive, the drive and time modelled.
    Leed,
}

impl Paper {
    /// The paper's name as the command line takes it.
    pub fn name(self) -> &'static str {
        match self {
            Paper::Netkvs => "netkvs",
            Paper::Octokv => "octokv",
            Paper::Octofas => "octofas",
            Paper::Iterkvssd => "iterkvssd",
            Paper::Leed => "leed",
        }
    }
}
