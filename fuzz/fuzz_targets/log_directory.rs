//! Directories of value chunks of the log engine with any bytes, as they are and under valid checksums: a directory that is encoded to the same
//! again, or an error, never a panic.
#![no_main]

use libfuzzer_sys::fuzz_target;
use octokv_base::crc32c;
use octokv_engine::log::chunk_directory::{
    DirectoryError, DirectoryPlace, UncheckedDirectory, directory_bytes, encode_directory,
};
use octokv_engine::log::log_place::{ChecksumKind, ChunkIndex, checksum_seed};

const PLACE: DirectoryPlace = DirectoryPlace {
    volume_id: 7,
    partition: 1,
    index: ChunkIndex(2),
    chunk_bytes: 16 << 10,
    granule_log2: 3,
};

fuzz_target!(|input: &[u8]| {
    check(input);
    if input.len() < 32 {
        return;
    }
    let mut bytes = input.to_vec();
    let (ids, trailer) = bytes.split_at_mut(input.len() - 32);
    trailer[..4].copy_from_slice(b"OKVD");
    trailer[8..12].copy_from_slice(&PLACE.partition.to_le_bytes());
    trailer[12..16].copy_from_slice(&PLACE.index.0.to_le_bytes());
    let count = usize::from(trailer[16]).min(ids.len() / 4);
    trailer[16..20].copy_from_slice(&(count as u32).to_le_bytes());
    let seed = checksum_seed(7, 1, ChecksumKind::Directory, ChunkIndex(2), 0);
    let crc = crc32c(&[&ids[ids.len() - 4 * count..], &trailer[8..]].concat()) ^ seed;
    trailer[4..8].copy_from_slice(&crc.to_le_bytes());
    check(&bytes);
});

fn check(bytes: &[u8]) {
    match (UncheckedDirectory { bytes, place: PLACE }).check() {
        Ok(directory) => {
            let mut again = vec![0; directory_bytes(directory.ids.len())];
            encode_directory(&mut again, &directory, PLACE);
            assert_eq!(UncheckedDirectory { bytes: &again, place: PLACE }.check(), Ok(directory));
        }
        Err(DirectoryError::Longer { need_bytes }) => {
            assert!(need_bytes > bytes.len() && need_bytes <= PLACE.chunk_bytes as usize);
        }
        Err(DirectoryError::Malformed | DirectoryError::Checksum) => {}
    }
}
