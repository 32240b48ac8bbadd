//! A temporary directory for device files: on a file system that supports direct I/O.

use std::io;
use std::path::PathBuf;
use tempfile::TempDir;

/// Makes a directory whose name starts with `prefix`, in the system's directory for temporary files or, if that does
/// not support `O_DIRECT`, in the current directory. Dropping the result removes it.
///
/// # Errors
/// If neither of the two supports `O_DIRECT`, with their names.
pub fn temporary_directory(prefix: &str) -> io::Result<TempDir> {
    let mut locations = vec![std::env::temp_dir()];
    locations.extend(std::env::current_dir());
    let usable = |location: &PathBuf| {
        let directory = TempDir::with_prefix_in(prefix, location).ok()?;
        let probe = TempDir::new_in(directory.path()).ok()?;
        octokv_sys::file::open_device(&probe.path().join("probe"), Some(1 << 20), true).ok()?;
        Some(directory)
    };
    let found = locations.iter().find_map(usable);
    found.ok_or_else(|| {
        let names: Vec<String> = locations.iter().map(|location| location.display().to_string()).collect();
        let text = format!("no directory supports O_DIRECT for a temporary device: {}", names.join(", "));
        io::Error::new(io::ErrorKind::Unsupported, text)
    })
}
