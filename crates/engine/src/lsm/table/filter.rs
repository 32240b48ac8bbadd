//! The filter of a table: whether it may have a key (a blocked Bloom filter: Putze, Sanders and Singler, 2007).
//!
//! ```text
//!   64 bytes │ 64 bytes │ …      one cache line for each 51 keys: 10 bits a key
//!   XXH3-64 of the key: the upper half chooses the line, the lower half six of its 512 bits
//! ```
//! The line is `upper half · lines / 2^32`. The bits are the top nine bits of the lower half after each of six multiplications by
//! 0x9e3779b9, modulo 2^32; bit b of a line is bit b mod 8 of its byte b / 8.
//! Invariant: a key that was added is never excluded. About one in a hundred others is not excluded either. Tested below.

use xxhash_rust::xxh3::xxh3_64;
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout};

const BITS_PER_KEY: u64 = 10;
const PROBES: usize = 6;
/// The bytes of a line.
const LINE_BYTES: usize = 64;
const LINE_BITS: u64 = 8 * LINE_BYTES as u64;
const MULTIPLIER: u32 = 0x9e37_79b9;

#[derive(Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C, align(64))]
struct FilterLine([u8; LINE_BYTES]);

/// The hash of a key in all filters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FilterHash(u64);

impl FilterHash {
    /// The hash of a key.
    pub fn of(key: &[u8]) -> FilterHash {
        FilterHash(xxh3_64(key))
    }

    fn line(self, lines: usize) -> usize {
        // A table has fewer than 2^32 lines, so the product has no more than 64 bits.
        (((self.0 >> 32) * lines as u64) >> 32) as usize
    }

    fn bits(self) -> [usize; PROBES] {
        let mut hash = self.0 as u32;
        [(); PROBES].map(|()| {
            hash = hash.wrapping_mul(MULTIPLIER);
            (hash >> (u32::BITS - LINE_BITS.trailing_zeros())) as usize
        })
    }
}

/// The filter of one table.
#[derive(Debug)]
pub struct TableFilter(Box<[FilterLine]>);

impl TableFilter {
    /// The length of a filter of `keys` keys, in bytes.
    pub fn bytes_for(keys: u64) -> u64 {
        (keys * BITS_PER_KEY).div_ceil(LINE_BITS).max(1) * LINE_BYTES as u64
    }

    /// The filter of these keys.
    pub fn new(hashes: &[FilterHash]) -> TableFilter {
        let bytes = TableFilter::bytes_for(hashes.len() as u64) as usize;
        let mut lines = zeroed_lines(bytes / LINE_BYTES);
        for hash in hashes {
            let line = hash.line(lines.len());
            hash.bits().iter().for_each(|bit| lines[line].0[bit / 8] |= 1 << (bit % 8));
        }
        TableFilter(lines)
    }

    /// The filter of these bytes; `None` if they are none.
    pub fn decode(bytes: &[u8]) -> Option<TableFilter> {
        if bytes.is_empty() || !bytes.len().is_multiple_of(LINE_BYTES) {
            return None;
        }
        let mut lines = zeroed_lines(bytes.len() / LINE_BYTES);
        lines.as_mut_bytes().copy_from_slice(bytes);
        Some(TableFilter(lines))
    }

    /// Its bytes.
    pub fn bytes(&self) -> &[u8] {
        self.0.as_bytes()
    }

    /// False: the table has no entry of the key.
    pub fn may_have(&self, hash: FilterHash) -> bool {
        let line = &self.0[hash.line(self.0.len())];
        hash.bits().iter().all(|bit| line.0[bit / 8] & 1 << (bit % 8) > 0)
    }
}

fn zeroed_lines(count: usize) -> Box<[FilterLine]> {
    // Fails only if the process is out of memory: the count is that of bytes in memory, or of keys that were added.
    <[FilterLine]>::new_box_zeroed_with_elems(count).expect("memory for a filter")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hash(index: u64) -> FilterHash {
        FilterHash::of(&index.to_be_bytes())
    }

    #[test]
    fn keys_are_never_excluded_and_one_in_a_hundred_others_is_not() {
        for keys in [0, 1, 50, 51, 52, 1000, 100_000] {
            let hashes: Vec<FilterHash> = (0..keys).map(hash).collect();
            let filter = TableFilter::new(&hashes);
            assert_eq!(filter.bytes().len() as u64, TableFilter::bytes_for(keys));
            let filter = TableFilter::decode(filter.bytes()).expect("its own bytes");
            assert!((0..keys).all(|index| filter.may_have(hash(index))), "{keys} keys");
            let wrong = (0..100_000).filter(|index| filter.may_have(hash(1 << 40 | index))).count();
            assert!(wrong <= 1300, "{wrong} of 100,000 with {keys} keys");
        }
    }

    #[test]
    fn the_bits_of_a_key_never_change() {
        let filter = TableFilter::new(&[FilterHash::of(b"a key")]);
        let set: Vec<usize> = (0..512).filter(|bit| filter.bytes()[bit / 8] & 1 << (bit % 8) > 0).collect();
        assert_eq!(set, [15, 67, 190, 288, 392, 402]);
        let lines: Vec<usize> =
            [&b""[..], b"a key", b"another"].map(|key| FilterHash::of(key).line(1000)).into();
        assert_eq!(lines, [175, 874, 777]);
    }

    #[test]
    fn bytes_that_are_no_lines_are_no_filter() {
        for bytes in [0, 1, 63, 65, 127] {
            assert!(TableFilter::decode(&vec![0; bytes]).is_none(), "{bytes}");
        }
    }
}
