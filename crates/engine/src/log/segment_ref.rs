//! An entry of a segment table: where the newest image of a segment lies, in 6 bytes.
//!
//! ```text
//!   bit  0         36              42       47
//!        unit, 36  buckets, 6      device, 5  lock, 1        little-endian; all zeros: a segment without an image
//! ```
//! Invariant: 48 bits. Any 6 bytes are an entry; [`SegmentRef::is_valid`] says whether this version of the format writes it.
//! Tested below.

/// The bytes of an entry, in memory and in a checkpoint.
pub const SEGMENT_REF_BYTES: usize = 6;
/// The most buckets of an image.
pub const CHAIN_MAX: u8 = 63;

const UNIT_BITS: u32 = 36;
const CHAIN_BITS: u32 = 6;
const DEVICE_BITS: u32 = 5;
const CHAIN_AT: u32 = UNIT_BITS;
const DEVICE_AT: u32 = CHAIN_AT + CHAIN_BITS;
const LOCK_AT: u32 = DEVICE_AT + DEVICE_BITS;
const _: () = assert!(LOCK_AT + 1 == 8 * SEGMENT_REF_BYTES as u32);
const _: () = assert!(CHAIN_MAX as u32 == (1 << CHAIN_BITS) - 1);
const _: () = assert!(crate::common::volume_layout::VOLUME_UNITS_MAX < 1 << UNIT_BITS);

/// Where a segment's newest image lies, and whether an operation holds the segment in memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SegmentRef(u64);

impl SegmentRef {
    /// A segment that has no image, and so no keys.
    pub const EMPTY: SegmentRef = SegmentRef(0);

    /// An image of `chain` buckets from a unit of the device on, of an unlocked segment.
    ///
    /// # Panics
    /// If the unit has more than 36 bits, or there are not 1 to [`CHAIN_MAX`] buckets.
    pub fn new(unit: u64, chain: u8) -> SegmentRef {
        assert!(unit < 1 << UNIT_BITS, "unit {unit}");
        assert!((1..=CHAIN_MAX).contains(&chain), "an image of {chain} buckets");
        SegmentRef(unit | u64::from(chain) << CHAIN_AT)
    }

    /// The first unit of the image on its device.
    pub fn unit(self) -> u64 {
        self.0 & ((1 << UNIT_BITS) - 1)
    }

    /// The buckets of the image; 0 without one.
    pub fn chain(self) -> u8 {
        (self.0 >> CHAIN_AT) as u8 & CHAIN_MAX
    }

    /// The device of the image: 0 in this version of the format.
    pub fn device(self) -> u8 {
        (self.0 >> DEVICE_AT) as u8 & ((1 << DEVICE_BITS) - 1)
    }

    /// Whether the segment has no image.
    pub fn is_empty(self) -> bool {
        self.chain() == 0
    }

    /// Whether an operation holds the segment.
    pub fn is_locked(self) -> bool {
        self.0 >> LOCK_AT & 1 == 1
    }

    /// The same place, locked or not.
    pub fn with_lock(self, locked: bool) -> SegmentRef {
        SegmentRef(self.0 & !(1 << LOCK_AT) | u64::from(locked) << LOCK_AT)
    }

    /// Whether a checkpoint of this version has such an entry: unlocked, on the first device, and empty as a whole or not at all.
    pub fn is_valid(self) -> bool {
        !self.is_locked() && self.device() == 0 && (self.chain() > 0 || self == SegmentRef::EMPTY)
    }

    /// The bytes of the entry.
    pub fn to_bytes(self) -> [u8; SEGMENT_REF_BYTES] {
        let [bytes @ .., _, _] = self.0.to_le_bytes();
        bytes
    }

    /// The entry of these bytes, whatever they are.
    pub fn from_bytes([a, b, c, d, e, f]: [u8; SEGMENT_REF_BYTES]) -> SegmentRef {
        SegmentRef(u64::from_le_bytes([a, b, c, d, e, f, 0, 0]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_place_gives_back_what_it_was_made_of(unit in 0u64..1 << 36, chain in 1..=CHAIN_MAX) {
            let place = SegmentRef::new(unit, chain);
            prop_assert_eq!((place.unit(), place.chain(), place.device()), (unit, chain, 0));
            prop_assert!(place.is_valid() && !place.is_empty() && !place.is_locked());
            let locked = place.with_lock(true);
            prop_assert!(locked.is_locked() && !locked.is_valid());
            prop_assert_eq!((locked.unit(), locked.chain(), locked.device()), (unit, chain, 0));
            prop_assert_eq!(locked.with_lock(false), place);
            for place in [place, locked] {
                prop_assert_eq!(SegmentRef::from_bytes(place.to_bytes()), place);
            }
        }

        #[test]
        fn any_bytes_are_an_entry(bytes: [u8; SEGMENT_REF_BYTES]) {
            prop_assert_eq!(SegmentRef::from_bytes(bytes).to_bytes(), bytes);
        }
    }

    #[test]
    fn only_all_zeros_are_an_empty_segment() {
        assert_eq!(SegmentRef::from_bytes([0; 6]), SegmentRef::EMPTY);
        assert!(SegmentRef::EMPTY.is_empty() && SegmentRef::EMPTY.is_valid());
        // A unit without buckets, and another device.
        for bytes in [[1, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0x10, 4]] {
            assert!(!SegmentRef::from_bytes(bytes).is_valid(), "{bytes:?}");
        }
    }

    #[test]
    fn the_bits_of_an_entry_are_fixed() {
        assert_eq!(SegmentRef::new(0x8_7654_3210, 5).to_bytes(), [0x10, 0x32, 0x54, 0x76, 0x58, 0]);
        assert_eq!(SegmentRef::new(0, 63).with_lock(true).to_bytes(), [0, 0, 0, 0, 0xf0, 0x83]);
    }

    #[test]
    #[should_panic(expected = "an image of 64 buckets")]
    fn a_longer_image_is_a_bug() {
        SegmentRef::new(1, 64);
    }
}
