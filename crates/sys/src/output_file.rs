//! Files and directories for the results of a run, created and checked before the run.
//!
//! In: the path that a user gave, `-` for standard output. Out: an error before the run instead of after it.
//! A check leaves an existing file as it is and removes the file that it made; directories that it made stay.

use std::fs::OpenOptions;
use std::io::{self, Write};
use std::path::Path;

/// The path that stands for standard output.
pub const STDOUT: &str = "-";

/// Creates the missing parent directories of a file and checks that the file can be written.
///
/// Sockets, pipes and devices are not opened: they may be written only once.
///
/// # Errors
/// The error of creating a directory or of opening the file.
pub fn prepare_file(path: &Path) -> io::Result<()> {
    if path == Path::new(STDOUT) {
        return Ok(());
    }
    create_parents(path)?;
    let existing = std::fs::symlink_metadata(path);
    let is_special = |metadata: &std::fs::Metadata| {
        !metadata.is_file() && !metadata.is_dir() && !metadata.file_type().is_symlink()
    };
    if existing.as_ref().is_ok_and(is_special) {
        return Ok(());
    }
    OpenOptions::new().append(true).create(true).open(path)?;
    if existing.is_err() {
        std::fs::remove_file(path)?;
    }
    Ok(())
}

/// Creates a directory with its parents and checks that files can be created in it.
///
/// # Errors
/// The error of creating the directory or a file in it.
pub fn prepare_directory(path: &Path) -> io::Result<()> {
    std::fs::create_dir_all(path)?;
    let probe = path.join(format!(".octokv-probe-{}", std::process::id()));
    OpenOptions::new().write(true).create_new(true).open(&probe)?;
    std::fs::remove_file(probe)
}

/// Replaces the contents of a file, or writes to standard output for `-`.
///
/// # Errors
/// The error of the write.
pub fn write(path: &Path, contents: &[u8]) -> io::Result<()> {
    if path == Path::new(STDOUT) {
        return io::stdout().write_all(contents);
    }
    std::fs::write(path, contents)
}

fn create_parents(path: &Path) -> io::Result<()> {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => std::fs::create_dir_all(parent),
        Some(_) | None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::PathBuf;

    /// A new directory below the target directory, removed at the end.
    struct TestDirectory(PathBuf);

    impl TestDirectory {
        fn new(name: &str) -> TestDirectory {
            let path = std::env::temp_dir().join(format!("octokv-output-{name}-{}", std::process::id()));
            std::fs::create_dir_all(&path).unwrap();
            TestDirectory(path)
        }
    }

    impl Drop for TestDirectory {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn a_file_in_a_missing_directory_can_be_written_after_the_check() {
        let directory = TestDirectory::new("file");
        let path = directory.0.join("a/b/report.json");
        prepare_file(&path).unwrap();
        assert!(!path.exists() && path.parent().unwrap().is_dir());
        write(&path, b"{}").unwrap();
        prepare_file(&path).unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"{}", "the check leaves an existing file as it is");
        prepare_file(Path::new(STDOUT)).unwrap();
        prepare_file(Path::new("/dev/null")).unwrap();
        assert!(Path::new("/dev/null").exists());
    }

    #[test]
    fn a_missing_directory_is_created_and_left_empty() {
        let directory = TestDirectory::new("directory");
        let path = directory.0.join("a/b");
        prepare_directory(&path).unwrap();
        prepare_directory(&path).unwrap();
        assert_eq!(std::fs::read_dir(&path).unwrap().count(), 0);
    }

    #[test]
    fn a_path_that_cannot_be_written_fails() {
        let directory = TestDirectory::new("invalid");
        let file = directory.0.join("file");
        std::fs::write(&file, "precious").unwrap();
        assert!(prepare_file(&directory.0).is_err(), "a directory");
        assert!(prepare_file(&file.join("below")).is_err(), "below a file");
        assert!(prepare_directory(&file).is_err());
        assert_eq!(std::fs::read(&file).unwrap(), b"precious");
    }
}
