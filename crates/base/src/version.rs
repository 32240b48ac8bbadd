//! Versions of records: which of two writes of a key is the newer one, on every node.
//!
//! ```text
//!   bit 63 ─────── 44  43 ──────────────────── 0
//!   epoch (20 bits)    sequence (44 bits)             compared as one number
//! ```
//! The head of a chain gives versions: the epoch of its membership, and a sequence that it counts up. 2^44 writes of one
//! epoch are 17.6 million writes a second for eleven days; 2^20 epochs are one change of membership every ten minutes
//! for 20 years. Tested below.

use std::fmt;

/// Bits of the sequence number.
const SEQUENCE_BITS: u32 = 44;
/// The highest epoch.
pub const EPOCH_MAX: u32 = (1 << 20) - 1;
/// The highest sequence number of an epoch.
pub const SEQUENCE_MAX: u64 = (1 << SEQUENCE_BITS) - 1;

/// The version of a write. A higher one is newer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Version(u64);

impl Version {
    /// The version of a key that no write with a version has reached: older than any other.
    pub const NONE: Version = Version(0);
    /// The highest version.
    pub const MAX: Version = Version(u64::MAX);

    /// The version of an epoch and a sequence number; `None` if either is out of range.
    pub const fn new(epoch: u32, sequence: u64) -> Option<Version> {
        if epoch > EPOCH_MAX || sequence > SEQUENCE_MAX {
            return None;
        }
        Some(Version((epoch as u64) << SEQUENCE_BITS | sequence))
    }

    /// The version with these 64 bits, as on media and on the wire.
    pub const fn from_bits(bits: u64) -> Version {
        Version(bits)
    }

    /// The 64 bits on media and on the wire.
    pub const fn to_bits(self) -> u64 {
        self.0
    }

    /// The epoch of the membership under which the write was accepted, at most [`EPOCH_MAX`].
    pub const fn epoch(self) -> u32 {
        (self.0 >> SEQUENCE_BITS) as u32
    }

    /// The number of the write within its epoch, at most [`SEQUENCE_MAX`].
    pub const fn sequence(self) -> u64 {
        self.0 & SEQUENCE_MAX
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.epoch(), self.sequence())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_have_their_bits_and_limits() {
        let version = Version::new(3, 5).expect("in range");
        assert_eq!((version.epoch(), version.sequence(), version.to_bits()), (3, 5, 3 << 44 | 5));
        assert_eq!(Version::from_bits(version.to_bits()), version);
        assert_eq!(Version::new(EPOCH_MAX, SEQUENCE_MAX), Some(Version::MAX));
        assert_eq!(Version::new(EPOCH_MAX + 1, 0), None);
        assert_eq!(Version::new(0, SEQUENCE_MAX + 1), None);
        assert_eq!(version.to_string(), "3.5");
    }

    #[test]
    fn a_later_epoch_is_newer_whatever_its_sequence() {
        let versions = [(0, 0), (0, 1), (0, SEQUENCE_MAX), (1, 0), (1, 1), (2, 0), (EPOCH_MAX, 0)];
        let versions = versions.map(|(epoch, sequence)| Version::new(epoch, sequence).expect("in range"));
        assert!(versions.is_sorted_by(|one, other| one < other));
        assert_eq!(versions[0], Version::NONE);
    }
}
