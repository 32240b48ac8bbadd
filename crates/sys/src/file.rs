//! A regular file or a block device as storage: held by one process, direct, its size and block known.
//!
//! In: a path. Out: an [`DeviceFile`] that transfers whole blocks, or an [`DeviceOpenError`] that says what is
//! in the way. Blocking transfers for worker threads are here; [`crate::uring`] uses the descriptor.
//!
//! Invariants: an open file is locked (flock; O_EXCL besides for a block device) until it is dropped; a
//! file that we create has mode 0600, all of its blocks allocated, and its name synced, or does not
//! stay; nothing of an existing file is changed by opening it.

use std::fs::{File, OpenOptions};
use std::io::{self, Seek, SeekFrom};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The largest unit of transfer that we work with, in bytes.
pub const BLOCK_BYTES_MAX: u32 = 4096;
const BLOCK_BYTES_MIN: u32 = 512;

/// Why a device cannot be had.
#[derive(Debug)]
pub enum DeviceOpenError {
    /// There is nothing at this path, and we were not to create it.
    NotFound,
    /// Another process (or another part of this one) holds it, or it is mounted.
    InUse,
    /// Neither a regular file nor a block device.
    UnsupportedFileType,
    /// The file system has no direct transfers (O_DIRECT).
    NoDirectIo,
    /// Transfers must be in units larger than [`BLOCK_BYTES_MAX`].
    BlockTooLarge {
        /// The unit, in bytes.
        block_bytes: u32,
    },
    /// There is no room for a file of this size.
    NoSpace {
        /// The size that was asked for.
        size_bytes: u64,
    },
    /// The kernel refused for another reason.
    System(io::Error),
}

impl std::fmt::Display for DeviceOpenError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            DeviceOpenError::NotFound => f.write_str("it does not exist"),
            DeviceOpenError::InUse => f.write_str("it is in use by another process, or mounted"),
            DeviceOpenError::UnsupportedFileType => {
                f.write_str("it is neither a regular file nor a block device")
            }
            DeviceOpenError::NoDirectIo => {
                f.write_str("its file system does not support direct transfers (O_DIRECT)")
            }
            DeviceOpenError::BlockTooLarge { block_bytes } => {
                write!(f, "its block of {block_bytes} bytes is larger than {BLOCK_BYTES_MAX}")
            }
            DeviceOpenError::NoSpace { size_bytes } => {
                write!(f, "its file system has no room for {size_bytes} bytes")
            }
            DeviceOpenError::System(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for DeviceOpenError {}

impl From<io::Error> for DeviceOpenError {
    fn from(error: io::Error) -> DeviceOpenError {
        match error.raw_os_error() {
            Some(libc::ENOENT) => DeviceOpenError::NotFound,
            Some(libc::EBUSY | libc::EWOULDBLOCK | libc::ETXTBSY) => DeviceOpenError::InUse,
            _ => DeviceOpenError::System(error),
        }
    }
}

/// An open device.
#[derive(Debug)]
pub struct DeviceFile {
    file: File,
    path: PathBuf,
    size_bytes: u64,
    block_bytes: u32,
    is_block_device: bool,
    was_created: bool,
}

/// How long a device that is held is waited for. A process that was killed keeps it for a moment after its
/// end: until the kernel has ended the transfers that it left behind, and they may still reach the medium.
const IN_USE_TIMEOUT: Duration = Duration::from_secs(2);
const IN_USE_RETRY_INTERVAL: Duration = Duration::from_millis(1);

/// Opens a device for this process alone. A missing file is created with `create` bytes where that is
/// given. `direct` goes past the page cache.
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
                // It was never whole; nothing of anybody's is in it.
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
    // SAFETY: a system call on an open descriptor with plain arguments.
    let locked = unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) };
    if locked == 0 { Ok(()) } else { Err(io::Error::last_os_error().into()) }
}

/// Gives a new file its blocks and makes file and name survive a power cut.
fn preallocate(file: &File, path: &Path, size_bytes: u64) -> Result<(), DeviceOpenError> {
    let size = libc::off_t::try_from(size_bytes).map_err(|_| DeviceOpenError::NoSpace { size_bytes })?;
    // SAFETY: a system call on an open descriptor with plain arguments. Where the file system cannot
    // allocate, the C library writes to every block instead.
    let error = unsafe { libc::posix_fallocate(file.as_raw_fd(), 0, size) };
    match error {
        0 => {}
        libc::ENOSPC | libc::EDQUOT | libc::EFBIG => return Err(DeviceOpenError::NoSpace { size_bytes }),
        // A size of zero.
        _ => return Err(DeviceOpenError::System(io::Error::from_raw_os_error(error))),
    }
    file.sync_all()?;
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    File::open(parent.unwrap_or(Path::new(".")))?.sync_all()?;
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
    Ok(DeviceFile { file, path: path.into(), size_bytes, block_bytes, is_block_device, was_created })
}

/// The unit of direct transfers: what the kernel says (6.1 and later), else the disk's logical block,
/// else what the file system prefers, up to our limit.
fn query_block_bytes(file: &File, is_block_device: bool) -> io::Result<u32> {
    if let Some(aligned) = query_direct_io_alignment(file) {
        return Ok(aligned.max(BLOCK_BYTES_MIN));
    }
    if is_block_device {
        let mut logical: libc::c_int = 0;
        // SAFETY: BLKSSZGET writes one int, and `logical` is one that lives through the call.
        let done = unsafe { libc::ioctl(file.as_raw_fd(), libc::BLKSSZGET as _, &mut logical) };
        if done == 0 && logical > 0 {
            return Ok((logical as u32).max(BLOCK_BYTES_MIN));
        }
    }
    let preferred = file.metadata()?.blksize().min(u64::from(BLOCK_BYTES_MAX)) as u32;
    Ok(preferred.max(BLOCK_BYTES_MIN))
}

fn query_direct_io_alignment(file: &File) -> Option<u32> {
    // SAFETY: all-zero is a valid statx.
    let mut found: libc::statx = unsafe { std::mem::zeroed() };
    let (fd, flags, want) = (file.as_raw_fd(), libc::AT_EMPTY_PATH, libc::STATX_DIOALIGN);
    // SAFETY: the path is an empty C string, `found` a live statx.
    let done = unsafe { libc::statx(fd, c"".as_ptr(), flags, want, &mut found) };
    let known = done == 0 && found.stx_mask & libc::STATX_DIOALIGN != 0 && found.stx_dio_offset_align > 0;
    known.then_some(found.stx_dio_offset_align)
}

impl DeviceFile {
    /// Where it was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// How large it was when it was opened.
    pub fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    /// The unit of transfers: a power of two from 512 to [`BLOCK_BYTES_MAX`].
    pub fn block_bytes(&self) -> u32 {
        self.block_bytes
    }

    /// Whether it is a block device rather than a regular file.
    pub fn is_block_device(&self) -> bool {
        self.is_block_device
    }

    /// Whether opening created it.
    pub fn was_created(&self) -> bool {
        self.was_created
    }

    /// Whether anything was ever written from byte `offset` on, as far as the file system can tell: what is
    /// allocated and never written does not count. True where it cannot tell.
    pub fn has_data_from(&self, offset: u64) -> bool {
        // SAFETY: lseek on a descriptor that we own touches no memory; nothing here uses its position.
        let found = unsafe { libc::lseek(self.file.as_raw_fd(), offset as libc::off_t, libc::SEEK_DATA) };
        found >= 0 || io::Error::last_os_error().raw_os_error() != Some(libc::ENXIO)
    }

    /// Fills `into` from `offset`, blocking. Fails with EIO at the end of the device.
    pub fn read_at(&self, offset: u64, into: &mut [u8]) -> Result<(), i32> {
        self.file.read_exact_at(into, offset).map_err(errno)
    }

    /// Writes all of `from` at `offset`, blocking.
    pub fn write_at(&self, offset: u64, from: &[u8]) -> Result<(), i32> {
        self.file.write_all_at(from, offset).map_err(errno)
    }

    /// Makes every finished write survive a power cut, blocking.
    pub fn sync_data(&self) -> Result<(), i32> {
        self.file.sync_data().map_err(errno)
    }

    /// As [`DeviceFile::sync_data`], and the file's times and everything else that is known of it (fsync).
    pub fn sync_all(&self) -> Result<(), i32> {
        self.file.sync_all().map_err(errno)
    }

    /// The same file past the page cache, whatever this descriptor does. The lock stays with this one.
    ///
    /// # Errors
    /// [`DeviceOpenError::NoDirectIo`], or what else the kernel refuses.
    pub fn reopen_direct(&self) -> Result<DeviceFile, DeviceOpenError> {
        let descriptor_path = format!("/proc/self/fd/{}", self.file.as_raw_fd());
        let mut options = OpenOptions::new();
        let opened = options.read(true).write(true).custom_flags(libc::O_DIRECT).open(descriptor_path);
        let file = opened.map_err(|error| map_open_error(error, libc::O_DIRECT))?;
        from_open_file(file, &self.path, self.is_block_device, self.was_created)
    }

    /// Gives a range back to the file system or disk, blocking. Where neither knows how, nothing is done.
    pub fn trim(&self, offset: u64, bytes: u64) -> Result<(), i32> {
        let done =
            if self.is_block_device { self.discard(offset, bytes) } else { self.punch_hole(offset, bytes) };
        ignore_unsupported_trim(done)
    }

    fn discard(&self, offset: u64, bytes: u64) -> Result<(), i32> {
        let range = [offset, bytes];
        // SAFETY: BLKDISCARD reads two u64, and `range` is two that live through the call.
        let done = unsafe { libc::ioctl(self.file.as_raw_fd(), BLKDISCARD as _, range.as_ptr()) };
        if done == 0 { Ok(()) } else { Err(errno(io::Error::last_os_error())) }
    }

    fn punch_hole(&self, offset: u64, bytes: u64) -> Result<(), i32> {
        let (Ok(at), Ok(len)) = (libc::off_t::try_from(offset), libc::off_t::try_from(bytes)) else {
            return Err(libc::EINVAL);
        };
        // SAFETY: a system call on an open descriptor with plain arguments.
        let done = unsafe { libc::fallocate(self.file.as_raw_fd(), PUNCH_HOLE_MODE, at, len) };
        if done == 0 { Ok(()) } else { Err(errno(io::Error::last_os_error())) }
    }
}

/// The mode of `fallocate` that gives blocks back.
pub(crate) const PUNCH_HOLE_MODE: i32 = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
/// `_IO(0x12, 119)` of linux/fs.h.
const BLKDISCARD: u32 = 0x1277;

/// A trim that the device does not know is a trim that it need not do.
pub(crate) fn ignore_unsupported_trim(done: Result<(), i32>) -> Result<(), i32> {
    match done {
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
