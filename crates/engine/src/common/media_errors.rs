//! Which errors of a read say that its blocks are lost, and which say nothing of them.
//!
//! In: an error of a device. Out: whether what lay there is damaged. Invariant: only errors of the medium count; after any other error the
//! blocks may be intact. Tested with the damage of each engine.

use octokv_device::DeviceError;

/// Error codes of a read whose blocks are lost, while the device works: ENODATA, which Linux gives for a critical medium error (`BLK_STS_MEDIUM`), and EILSEQ, for
/// protection information that does not match the data (`BLK_STS_PROTECTION`). The source is the table `blk_errors` in its `block/blk-core.c`. All other codes say nothing
/// of the medium: EIO (`BLK_STS_IOERR`) is whatever has no code of its own, such as a controller that was reset, a path that failed or a short transfer; ETIMEDOUT,
/// ENOLINK, EREMOTEIO, ENODEV, EBUSY, EAGAIN and ENOMEM are those of timeouts, transports, targets, devices that went away and resources.
const MEDIA_ERRORS: [i32; 2] = [61, 84];

/// Whether a read failed because its blocks are lost: the same read fails again. After any other error the blocks may be intact, and be read later.
pub fn is_media_error(error: DeviceError) -> bool {
    matches!(error, DeviceError::Io(code) if MEDIA_ERRORS.contains(&code))
}
