//! The system `rocksdb` from the flags of `octokv bench`: its directory, and the options that follow from its memory.

use crate::cli::BenchArgs;
use crate::exit_status::CliError;
use crate::size::Size;
use anyhow::{Context, anyhow};
use octokv_bench::BenchConfig;
use octokv_bench::rocksdb_store::{self, RocksDbStore};
use std::io::ErrorKind;
use std::path::Path;

/// Memory without `--memory`, as a core of a node has for buffers.
const MEMORY_BYTES_DEFAULT: u64 = 256 << 20;
/// Least memory: a few tables of one block each.
const MEMORY_BYTES_MIN: u64 = 1 << 20;
/// A file that every database has.
const DATABASE_FILE: &str = "CURRENT";

/// Opens the database in the directory of `--path`.
///
/// # Errors
/// A usage error with the flag; a directory that holds other files, or cannot be opened; RocksDB's library is missing.
pub fn open(bench: &BenchArgs, config: &BenchConfig) -> Result<RocksDbStore, CliError> {
    let usage = |what: &str| Err(CliError::Usage(what.to_owned()));
    let Some(directory) = &bench.path else { return usage("--system rocksdb needs --path DIR") };
    let memory_bytes = bench.memory.map_or(MEMORY_BYTES_DEFAULT, |Size(bytes)| bytes);
    if memory_bytes < MEMORY_BYTES_MIN {
        return usage("--memory: must be at least 1MiB");
    }
    if config.key_sizes.max_bytes() + config.value_sizes.max_bytes() > u32::MAX as usize / 2 {
        return usage("--value-size: too long for RocksDB");
    }
    prepare_directory(directory, bench.format)
        .with_context(|| format!("directory {}", directory.display()))?;
    let mut options = rocksdb_store::options_for_memory(memory_bytes);
    if let Some(more) = &bench.rocksdb_options {
        options = format!("{options};{more}");
    }
    let opened = RocksDbStore::open(directory, options, !bench.no_sync);
    Ok(opened.map_err(|error| anyhow!("--path {}: {error}", directory.display()))?)
}

/// Creates the directory; with `discard` removes the database in it before. Other files are never removed.
fn prepare_directory(directory: &Path, discard: bool) -> anyhow::Result<()> {
    let is_empty = match directory.read_dir() {
        Ok(mut entries) => entries.next().is_none(),
        Err(error) if error.kind() == ErrorKind::NotFound => {
            std::fs::create_dir_all(directory)?;
            true
        }
        Err(error) => return Err(error.into()),
    };
    if !is_empty && !directory.join(DATABASE_FILE).is_file() {
        return Err(anyhow!("it holds other files than a RocksDB database"));
    }
    if discard && !is_empty {
        std::fs::remove_dir_all(directory)?;
        std::fs::create_dir(directory)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_database_is_discarded() {
        let parent = tempfile::tempdir().unwrap();
        let directory = parent.path().join("new/database");
        prepare_directory(&directory, true).unwrap();
        std::fs::write(directory.join("notes"), "mine").unwrap();
        let error = prepare_directory(&directory, true).unwrap_err().to_string();
        assert!(error.contains("other files"), "{error}");
        assert!(directory.join("notes").is_file());
        std::fs::write(directory.join(DATABASE_FILE), "").unwrap();
        prepare_directory(&directory, false).unwrap();
        assert!(directory.join("notes").is_file());
        prepare_directory(&directory, true).unwrap();
        assert_eq!(directory.read_dir().unwrap().count(), 0);
    }
}
