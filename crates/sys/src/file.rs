//! A regular file or block device as a storage device: exclusively locked, with direct I/O, of known size and block size.
//!
//! In: a path. Out: a [`DeviceFile`] that transfers whole blocks, or a [`DeviceOpenError`] with the cause. The blocking
//! transfers for worker threads are here; [`crate::uring`] uses the descriptor.
//!
//! Invariants: an open file is locked (flock, and O_EXCL for a block device) until it is dropped; a created file has
//! mode 0600, all blocks allocated and its directory entry synced, or it is removed; opening does not change an existing
//! file.
//!
//! Unsafe code: `ioctl(BLKDISCARD)` and `ioctl(BLKGETSIZE64)`, for which rustix has no functions. Tested in `tests/file.rs`.

use octokv_base::Buffer;
use rustix::fs::{AtFlags, FallocateFlags, FlockOperation, StatxFlags};
use rustix::io::Errno;
use std::fs::{File, OpenOptions};
use std::io::{self, Seek, SeekFrom};
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The file systems whose files keep never-written blocks apart and are written in place, by `f_type` of statfs(2).
const EXT4_MAGIC: u64 = 0xef53;
const XFS_MAGIC: u64 = 0x5846_5342;

/// The largest supported block size, in bytes.
pub const BLOCK_BYTES_MAX: u32 = 4096;
const BLOCK_BYTES_MIN: u32 = 512;

/// Why a device cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum DeviceOpenError {
    /// The path does not exist, and creation was not requested.
    #[error("it does not exist")]
    NotFound,
    /// Another process (or another open of this one) has locked it, or it is mounted.
    #[error("it is in use by another process, or mounted")]
    InUse,
    /// It is neither a regular file nor a block device.
    #[error("it is neither a regular file nor a block device")]
    UnsupportedFileType,
    /// The file system does not support direct I/O (O_DIRECT).
    #[error("its file system does not support direct I/O (O_DIRECT)")]
    NoDirectIo,
    /// Its block size exceeds [`BLOCK_BYTES_MAX`].
    #[error("its block of {block_bytes} bytes is larger than {BLOCK_BYTES_MAX}")]
    BlockTooLarge {
        /// The block size, in bytes.
        block_bytes: u32,
    },
    /// The file system has no space for a file of this size.
    #[error("its file system has no space for {size_bytes} bytes")]
    NoSpace {
        /// The requested size, in bytes.
        size_bytes: u64,
    },
    /// Another error of the kernel.
    #[error(transparent)]
    System(io::Error),
}

impl From<io::Error> for DeviceOpenError {
    fn from(error: io::Error) -> DeviceOpenError {
        match Errno::from_io_error(&error) {
            Some(Errno::NOENT) => DeviceOpenError::NotFound,
            Some(Errno::BUSY | Errno::WOULDBLOCK | Errno::TXTBSY) => DeviceOpenError::InUse,
            _ => DeviceOpenError::System(error),
        }
    }
}

impl From<Errno> for DeviceOpenError {
    fn from(errno: Errno) -> DeviceOpenError {
        io::Error::from(errno).into()
    }
}

/// An open storage device, locked by this process.
#[derive(Debug)]
pub struct DeviceFile {
    file: File,
    path: PathBuf,
    size_bytes: u64,
    block_bytes: u32,
    preferred_write_bytes: u32,
    is_block_device: bool,
    was_created: bool,
}

/// How long the open of a locked device is retried. A killed process keeps the lock until the kernel has completed its
/// transfers in flight, which may still reach the medium.
const IN_USE_TIMEOUT: Duration = Duration::from_secs(2);
const IN_USE_RETRY_INTERVAL: Duration = Duration::from_millis(1);

/// Opens a device exclusively. A missing file is created with `create` bytes if that is given. `direct` bypasses the page
/// cache. Blocks for up to two seconds while another process has the device locked.
///
/// # Errors
/// See the variants of [`DeviceOpenError`]. A file that could not be created whole is removed.
pub fn open_device(path: &Path, create: Option<u64>, direct: bool) -> Result<DeviceFile, DeviceOpenError> {
    let deadline = Instant::now() + IN_USE_TIMEOUT;
    loop {
        match try_open(path, create, direct) {
            Err(DeviceOpenError::InUse) if Instant::now() < deadline => {
                std::thread::sleep(IN_USE_RETRY_INTERVAL)
            }
            opened => return opened,
        }
    }
}

fn try_open(path: &Path, create: Option<u64>, direct: bool) -> Result<DeviceFile, DeviceOpenError> {
    let direct = if direct { libc::O_DIRECT } else { 0 };
    match (std::fs::metadata(path), create) {
        (Ok(metadata), _) => {
            let is_block_device = metadata.file_type().is_block_device();
            if !is_block_device && !metadata.is_file() {
                return Err(DeviceOpenError::UnsupportedFileType);
            }
            let exclusive = if is_block_device { libc::O_EXCL } else { 0 };
            let opened =
                OpenOptions::new().read(true).write(true).custom_flags(direct | exclusive).open(path);
            let file = opened.map_err(|e| map_open_error(e, direct))?;
            try_lock_exclusive(&file)?;
            from_open_file(file, path, is_block_device, false)
        }
        (Err(e), Some(size_bytes)) if e.kind() == io::ErrorKind::NotFound => {
            let mut options = OpenOptions::new();
            options.read(true).write(true).create_new(true).mode(0o600).custom_flags(direct);
            let file = options.open(path).map_err(|e| map_open_error(e, direct))?;
            let allocated = try_lock_exclusive(&file).and_then(|()| preallocate(&file, path, size_bytes));
            if let Err(error) = allocated {
                // The file is new and incomplete; it contains no data.
                let _ = std::fs::remove_file(path);
                return Err(error);
            }
            from_open_file(file, path, false, true)
        }
        (Err(e), _) => Err(e.into()),
    }
}

fn map_open_error(error: io::Error, direct: i32) -> DeviceOpenError {
    if direct != 0 && error.raw_os_error() == Some(libc::EINVAL) {
        DeviceOpenError::NoDirectIo
    } else {
        error.into()
    }
}

fn try_lock_exclusive(file: &File) -> Result<(), DeviceOpenError> {
    Ok(rustix::fs::flock(file, FlockOperation::NonBlockingLockExclusive)?)
}

/// Allocates the blocks of a new file and makes the file and its directory entry survive a power loss.
fn preallocate(file: &File, path: &Path, size_bytes: u64) -> Result<(), DeviceOpenError> {
    let allocated = match rustix::fs::fallocate(file, FallocateFlags::empty(), 0, size_bytes) {
        // The file system cannot allocate: write every block instead.
        Err(Errno::OPNOTSUPP) => write_zeroes(file, size_bytes),
        allocated => allocated.map_err(io::Error::from),
    };
    // A size of zero fails with EINVAL.
    allocated.map_err(|error| match Errno::from_io_error(&error) {
        Some(Errno::NOSPC | Errno::DQUOT | Errno::FBIG) => DeviceOpenError::NoSpace { size_bytes },
        _ => DeviceOpenError::System(error),
    })?;
    file.sync_all()?;
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    File::open(parent.unwrap_or(Path::new(".")))?.sync_all()?;
    Ok(())
}

/// Writes `size_bytes` zeroes, from an aligned buffer as direct I/O requires.
fn write_zeroes(file: &File, size_bytes: u64) -> io::Result<()> {
    let zeroes = Buffer::zeroed(1 << 20);
    let mut offset = 0;
    while offset < size_bytes {
        let bytes = (size_bytes - offset).min(zeroes.len() as u64);
        file.write_all_at(&zeroes[..bytes as usize], offset)?;
        offset += bytes;
    }
    Ok(())
}

fn from_open_file(
    mut file: File,
    path: &Path,
    is_block_device: bool,
    was_created: bool,
) -> Result<DeviceFile, DeviceOpenError> {
    let size_bytes = file.seek(SeekFrom::End(0))?;
    let block_bytes = query_block_bytes(&file, is_block_device)?;
    if !block_bytes.is_power_of_two() || block_bytes > BLOCK_BYTES_MAX {
        return Err(DeviceOpenError::BlockTooLarge { block_bytes });
    }
    let preferred_write_bytes = query_preferred_write(&file, is_block_device)?.max(block_bytes);
    let path = path.into();
    Ok(DeviceFile {
        file,
        path,
        size_bytes,
        block_bytes,
        preferred_write_bytes,
        is_block_device,
        was_created,
    })
}

/// The smallest write, in bytes, that needs no read-modify-write in the layer below: the physical block of a disk, or the
/// file system's block of a regular file. At most [`BLOCK_BYTES_MAX`].
fn query_preferred_write(file: &File, is_block_device: bool) -> io::Result<u32> {
    if is_block_device && let Ok(physical @ 1..) = rustix::fs::ioctl_blkpbszget(file) {
        return Ok(physical.min(BLOCK_BYTES_MAX));
    }
    Ok(file.metadata()?.blksize().min(u64::from(BLOCK_BYTES_MAX)) as u32)
}

/// The block size of direct I/O: as the kernel reports it (6.1 and later), else the disk's logical block size, else the
/// file system's preferred size, at most [`BLOCK_BYTES_MAX`].
fn query_block_bytes(file: &File, is_block_device: bool) -> io::Result<u32> {
    if let Some(aligned) = query_direct_io_alignment(file) {
        return Ok(aligned.max(BLOCK_BYTES_MIN));
    }
    if is_block_device && let Ok(logical @ 1..) = rustix::fs::ioctl_blksszget(file) {
        return Ok(logical.max(BLOCK_BYTES_MIN));
    }
    let preferred = file.metadata()?.blksize().min(u64::from(BLOCK_BYTES_MAX)) as u32;
    Ok(preferred.max(BLOCK_BYTES_MIN))
}

fn query_direct_io_alignment(file: &File) -> Option<u32> {
    let found = rustix::fs::statx(file, c"", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN).ok()?;
    let known = found.stx_mask & StatxFlags::DIOALIGN.bits() != 0 && found.stx_dio_offset_align > 0;
    known.then_some(found.stx_dio_offset_align)
}

impl DeviceFile {
    /// The path that it was opened by.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The size in bytes when it was opened.
    pub fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    /// The block size in bytes, the unit of transfers: a power of two from 512 to [`BLOCK_BYTES_MAX`].
    pub fn block_bytes(&self) -> u32 {
        self.block_bytes
    }

    /// The size in bytes from which a write replaces whole blocks of the disk, or of the file system of a regular file: from
    /// the block size to [`BLOCK_BYTES_MAX`]. A smaller write may cost a read.
    pub fn preferred_write_bytes(&self) -> u32 {
        self.preferred_write_bytes
    }

    /// Whether it is a block device, not a regular file.
    pub fn is_block_device(&self) -> bool {
        self.is_block_device
    }

    /// Whether [`open_device`] created it.
    pub fn was_created(&self) -> bool {
        self.was_created
    }

    /// Whether any byte from `offset` on was ever written, as the file system reports it (SEEK_DATA): preallocated blocks
    /// do not count. True if the file system does not report it.
    pub fn has_data_from(&self, offset: u64) -> bool {
        // This moves the file position, which no other operation uses.
        rustix::fs::seek(&self.file, rustix::fs::SeekFrom::Data(offset)) != Err(Errno::NXIO)
    }

    /// The first bytes from `offset` on that were never written: blocks that are only allocated, or a hole (SEEK_HOLE). `None`
    /// if there are none, or if the first write of a block costs no more than later ones: of a block device, and on a file
    /// system other than ext4 and XFS, which alone are known to write in place and to keep such blocks apart.
    pub fn next_unwritten(&self, offset: u64) -> Option<Range<u64>> {
        if self.is_block_device || offset >= self.size_bytes || !self.keeps_unwritten_blocks() {
            return None;
        }
        // These move the file position, which no other operation uses.
        let start = rustix::fs::seek(&self.file, rustix::fs::SeekFrom::Hole(offset)).ok()?;
        if start >= self.size_bytes {
            return None; // The end of a file counts as a hole.
        }
        match rustix::fs::seek(&self.file, rustix::fs::SeekFrom::Data(start)) {
            Ok(end) => Some(start..end.min(self.size_bytes)),
            Err(Errno::NXIO) => Some(start..self.size_bytes),
            Err(_) => None,
        }
    }

    fn keeps_unwritten_blocks(&self) -> bool {
        let kind = rustix::fs::fstatfs(&self.file).map(|found| found.f_type as u64);
        matches!(kind, Ok(EXT4_MAGIC | XFS_MAGIC))
    }

    /// Reads into all of `into` from byte `offset`, blocking.
    ///
    /// # Errors
    /// Returns the kernel's error number; EIO for a read beyond the end of the device; ENXIO if a block device was removed.
    pub fn read_at(&self, offset: u64, into: &mut [u8]) -> Result<(), i32> {
        self.file.read_exact_at(into, offset).map_err(|error| self.error_of(errno(error)))
    }

    /// Writes all of `from` at byte `offset`, blocking.
    ///
    /// # Errors
    /// Returns the kernel's error number; ENXIO if a block device was removed.
    pub fn write_at(&self, offset: u64, from: &[u8]) -> Result<(), i32> {
        self.file.write_all_at(from, offset).map_err(|error| self.error_of(errno(error)))
    }

    /// Makes every completed write survive a power loss (fdatasync), blocking.
    ///
    /// # Errors
    /// Returns the kernel's error number; ENXIO if a block device was removed.
    pub fn sync_data(&self) -> Result<(), i32> {
        self.file.sync_data().map_err(|error| self.error_of(errno(error)))
    }

    /// As [`DeviceFile::sync_data`], and all metadata of the file, its times included (fsync).
    ///
    /// # Errors
    /// Returns the kernel's error number.
    pub fn sync_all(&self) -> Result<(), i32> {
        self.file.sync_all().map_err(errno)
    }

    /// Opens the same file again with direct I/O. The lock stays with this descriptor.
    ///
    /// # Errors
    /// [`DeviceOpenError::NoDirectIo`], or another error of the kernel.
    pub fn reopen_direct(&self) -> Result<DeviceFile, DeviceOpenError> {
        let descriptor_path = format!("/proc/self/fd/{}", self.file.as_raw_fd());
        let mut options = OpenOptions::new();
        let opened = options.read(true).write(true).custom_flags(libc::O_DIRECT).open(descriptor_path);
        let file = opened.map_err(|error| map_open_error(error, libc::O_DIRECT))?;
        from_open_file(file, &self.path, self.is_block_device, self.was_created)
    }

    /// The error of a failed operation: ENXIO if this is a block device that has become smaller since it was opened. Linux makes a disk that is pulled one
    /// of 0 bytes, of which reads end early and writes have no space (ENOSPC), as in a full file system.
    pub(crate) fn error_of(&self, error: i32) -> i32 {
        let is_smaller = || self.block_device_bytes().is_some_and(|bytes| bytes < self.size_bytes);
        if self.is_block_device && is_smaller() { libc::ENXIO } else { error }
    }

    /// The present size of a block device. By ioctl, which takes no lock: a seek takes that of the device, which a discard holds, and an event loop that
    /// asks would wait for a discard that hangs.
    fn block_device_bytes(&self) -> Option<u64> {
        let mut bytes = 0_u64;
        // SAFETY: BLKGETSIZE64 writes one u64 to `bytes`, which lives through the call.
        let result = unsafe { libc::ioctl(self.file.as_raw_fd(), BLKGETSIZE64 as _, &raw mut bytes) };
        (result == 0).then_some(bytes)
    }

    /// Deallocates a byte range of the file or block device, blocking. No effect if it does not support that.
    ///
    /// # Errors
    /// Returns the kernel's error number; ENXIO if a block device was removed.
    pub fn trim(&self, offset: u64, bytes: u64) -> Result<(), i32> {
        let result =
            if self.is_block_device { self.discard(offset, bytes) } else { self.punch_hole(offset, bytes) };
        ignore_unsupported_trim(result).map_err(|error| self.error_of(error))
    }

    fn discard(&self, offset: u64, bytes: u64) -> Result<(), i32> {
        let range = [offset, bytes];
        // SAFETY: BLKDISCARD reads two u64 from `range`, which lives through the call.
        let result = unsafe { libc::ioctl(self.file.as_raw_fd(), BLKDISCARD as _, range.as_ptr()) };
        if result == 0 { Ok(()) } else { Err(errno(io::Error::last_os_error())) }
    }

    fn punch_hole(&self, offset: u64, bytes: u64) -> Result<(), i32> {
        rustix::fs::fallocate(&self.file, PUNCH_HOLE_MODE, offset, bytes).map_err(Errno::raw_os_error)
    }
}

/// The mode of `fallocate` that deallocates blocks and keeps the file size.
pub(crate) const PUNCH_HOLE_MODE: FallocateFlags =
    FallocateFlags::PUNCH_HOLE.union(FallocateFlags::KEEP_SIZE);
/// `_IO(0x12, 119)` of linux/fs.h.
const BLKDISCARD: u32 = 0x1277;
/// `_IOR(0x12, 114, size_t)` of linux/fs.h; a `size_t` has 8 bytes.
const BLKGETSIZE64: u32 = 0x8008_1272;
const _: () = assert!(size_of::<usize>() == 8);

/// Turns the errors of an unsupported trim into success: a trim is advisory.
pub(crate) fn ignore_unsupported_trim(result: Result<(), i32>) -> Result<(), i32> {
    match result {
        Err(libc::EOPNOTSUPP | libc::ENOTTY | libc::ENOSYS) => Ok(()),
        other => other,
    }
}

fn errno(error: io::Error) -> i32 {
    error.raw_os_error().unwrap_or(libc::EIO)
}

impl AsFd for DeviceFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}
