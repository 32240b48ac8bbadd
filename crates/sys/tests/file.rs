//! Opening devices: creation, refusals, and that an existing file is unchanged.

#![allow(clippy::disallowed_methods, reason = "these tests are about files")]

use octokv_sys::file::{DeviceFile, DeviceOpenError, open_device};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// A test's own directory on a disk (not tmpfs), removed at the end.
struct Directory(PathBuf);

impl Directory {
    fn new(name: &str) -> Directory {
        let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Directory(path)
    }
    fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn error(opened: Result<DeviceFile, DeviceOpenError>) -> DeviceOpenError {
    opened.expect_err("the open must fail")
}

#[test]
fn a_missing_file_is_created_preallocated_and_private() {
    let directory = Directory::new("created");
    let path = directory.path("disk");
    assert!(matches!(error(open_device(&path, None, true)), DeviceOpenError::NotFound));
    let file = open_device(&path, Some(8 << 20), true).unwrap();
    assert!(file.was_created() && !file.is_block_device());
    assert_eq!(file.size_bytes(), 8 << 20);
    assert!(file.block_bytes().is_power_of_two() && (512..=4096).contains(&file.block_bytes()));
    let metadata = std::fs::metadata(&path).unwrap();
    assert_eq!(metadata.permissions().mode() & 0o777, 0o600);
    assert!(metadata.blocks() * 512 >= 8 << 20, "all blocks are allocated");
}

#[test]
fn opening_does_not_change_an_existing_file() {
    let directory = Directory::new("existing");
    let path = directory.path("disk");
    std::fs::write(&path, vec![7; 12_288]).unwrap();
    let file = open_device(&path, Some(1 << 20), false).unwrap();
    assert!(!file.was_created());
    assert_eq!(file.size_bytes(), 12_288);
    let mut bytes = [0; 4096];
    file.read_at(8192, &mut bytes).unwrap();
    assert_eq!(bytes, [7; 4096]);
    assert!(file.read_at(8193, &mut bytes).is_err(), "beyond the end");
}

#[test]
fn a_file_in_use_is_refused_until_it_is_closed() {
    let directory = Directory::new("locked");
    let path = directory.path("disk");
    let first = open_device(&path, Some(1 << 20), true).unwrap();
    assert!(matches!(error(open_device(&path, None, true)), DeviceOpenError::InUse));
    assert!(matches!(error(open_device(&path, Some(1 << 20), false)), DeviceOpenError::InUse));
    drop(first);
    assert!(open_device(&path, None, true).is_ok());
}

#[test]
fn unsupported_file_types_are_refused() {
    let directory = Directory::new("other");
    assert!(matches!(error(open_device(&directory.0, None, false)), DeviceOpenError::UnsupportedFileType));
    assert!(matches!(
        error(open_device(Path::new("/dev/null"), None, false)),
        DeviceOpenError::UnsupportedFileType
    ));
    let below_a_file = directory.path("file");
    std::fs::write(&below_a_file, b"x").unwrap();
    let refused = error(open_device(&below_a_file.join("disk"), Some(4096), false));
    assert!(matches!(refused, DeviceOpenError::System(_)), "{refused:?}");
}

#[test]
fn a_file_that_does_not_fit_is_removed() {
    let directory = Directory::new("space");
    let path = directory.path("disk");
    let refused = error(open_device(&path, Some(1 << 50), true));
    assert!(
        matches!(refused, DeviceOpenError::NoSpace { size_bytes } if size_bytes == 1 << 50),
        "{refused:?}"
    );
    assert!(!path.exists());
}

#[test]
fn a_trimmed_range_reads_as_zeroes_and_keeps_the_size() {
    let directory = Directory::new("trim");
    let path = directory.path("disk");
    let file = open_device(&path, Some(1 << 20), false).unwrap();
    file.write_at(0, &vec![1; 65_536]).unwrap();
    file.trim(4096, 8192).unwrap();
    file.sync_data().unwrap();
    let mut bytes = vec![9; 16_384];
    file.read_at(0, &mut bytes).unwrap();
    assert!(bytes[..4096].iter().all(|&b| b == 1) && bytes[12_288..].iter().all(|&b| b == 1));
    assert!(bytes[4096..12_288].iter().all(|&b| b == 0));
    assert_eq!(std::fs::metadata(&path).unwrap().len(), 1 << 20);
}

#[test]
fn bytes_that_were_never_written_are_reported_where_a_first_write_costs_more() {
    let directory = Directory::new("unwritten");
    let path = directory.path("disk");
    let file = open_device(&path, Some(8 << 20), true).unwrap();
    let kind = std::process::Command::new("stat").args(["-f", "-c", "%T"]).arg(&path).output().unwrap();
    let kind = String::from_utf8(kind.stdout).unwrap();
    if !["ext2/ext3", "xfs"].contains(&kind.trim()) {
        return assert_eq!(file.next_unwritten(0), None, "on {kind}");
    }
    let mib = 1 << 20;
    assert_eq!(file.next_unwritten(0), Some(0..8 * mib));
    assert_eq!(file.next_unwritten(5 * mib + 4096), Some(5 * mib + 4096..8 * mib));
    file.write_at(2 * mib, &octokv_base::Buffer::zeroed(mib as usize)).unwrap();
    assert_eq!(file.next_unwritten(0), Some(0..2 * mib), "zeros count");
    assert_eq!(file.next_unwritten(2 * mib), Some(3 * mib..8 * mib));
    file.write_at(3 * mib, &octokv_base::Buffer::zeroed(5 * mib as usize)).unwrap();
    assert_eq!(file.next_unwritten(2 * mib), None, "the end of the file is no hole");
    assert_eq!(file.next_unwritten(8 * mib), None);
    assert_eq!(file.next_unwritten(u64::MAX), None);
    file.trim(4 * mib, mib).unwrap();
    assert_eq!(file.next_unwritten(2 * mib), Some(4 * mib..5 * mib), "a hole again");
}
