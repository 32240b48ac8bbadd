//! Commands between the nodes of a cluster: their opcodes and the header at the front of their data.
//!
//! Reserved: no controller accepts these commands yet, and none reports [`super::vendor::FEATURE_CLUSTER`]. The room is
//! settled here, so that later commands need no other place: the key of a command lies in its data, since the dwords of
//! an entry have no room for key, version and epoch together. The low two bits of an opcode give the direction of the data.
//!
//! ```text
//!  data  0 version u64   8 epoch u64   16 request id u64   24 hop u8   25 zero (7 bytes)   32 key | value, or a range
//! ```
//! `docs/PROTOCOL.md` has the whole specification. Tested below.

use crate::status::Status;
use octokv_base::Version;
use zerocopy::byteorder::little_endian::U64;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Opcodes of the commands between nodes.
pub mod opcode {
    /// Passes a write on to the next node of its chain: data out = header, key, value.
    pub const CHAIN_STORE: u8 = 0xc1;
    /// Passes a deletion on: data out = header, key.
    pub const CHAIN_DELETE: u8 = 0xc5;
    /// Transfers entries of a partition to a node that joins its chain: data out = header, entries.
    pub const COPY: u8 = 0xc9;
    /// Reads entries of a ring range: in the capsule header and range, data in = entries.
    pub const SCAN: u8 = 0xc3;
}

/// Length of the header, in bytes.
pub const CLUSTER_HEADER_BYTES: usize = 32;
/// The longest chain. A command with a higher hop went around a ring of nodes that disagree on their chain.
pub const HOPS_MAX: u8 = 15;

/// The header at the front of a command's data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClusterHeader {
    /// The version of the write, given by the head of the chain; [`Version::NONE`] if the command writes nothing.
    pub version: Version,
    /// The revision of the membership under which the command was sent. A node with another one refuses it.
    pub epoch: u64,
    /// Identifies the request at the node that sent it first: a repetition has the same one.
    pub request_id: u64,
    /// Nodes of the chain that the command has passed, at most [`HOPS_MAX`].
    pub hop: u8,
}

/// A header as received.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone, Copy)]
#[repr(C)]
pub struct UncheckedClusterHeader {
    version: U64,
    epoch: U64,
    request_id: U64,
    hop: u8,
    reserved: [u8; 7],
}
const _: () = assert!(size_of::<UncheckedClusterHeader>() == CLUSTER_HEADER_BYTES);

impl ClusterHeader {
    /// Encodes the header.
    pub fn encode(&self) -> [u8; CLUSTER_HEADER_BYTES] {
        zerocopy::transmute!(UncheckedClusterHeader {
            version: U64::new(self.version.to_bits()),
            epoch: U64::new(self.epoch),
            request_id: U64::new(self.request_id),
            hop: self.hop,
            reserved: [0; 7],
        })
    }
}

impl UncheckedClusterHeader {
    /// The header in the first 32 bytes of a command's data.
    ///
    /// # Errors
    /// [`Status::INVALID_SGL_LENGTH`] if there are fewer bytes; [`Status::INVALID_FIELD`] for a hop above
    /// [`HOPS_MAX`] or reserved bytes that are not zero.
    pub fn check(data: &[u8]) -> Result<ClusterHeader, Status> {
        let (header, _) = UncheckedClusterHeader::read_from_prefix(data)
            .map_err(|_| Status::INVALID_SGL_LENGTH.do_not_retry())?;
        if header.hop > HOPS_MAX || header.reserved != [0; 7] {
            return Err(Status::INVALID_FIELD.do_not_retry());
        }
        Ok(ClusterHeader {
            version: Version::from_bits(header.version.get()),
            epoch: header.epoch.get(),
            request_id: header.request_id.get(),
            hop: header.hop,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::queue_entry::DataDirection;
    use octokv_base::Prng;

    #[test]
    fn a_header_has_the_specified_bytes() {
        let version = Version::new(1, 2).expect("in range");
        let header = ClusterHeader { version, epoch: 3, request_id: 0x0405, hop: 6 };
        let bytes = header.encode();
        assert_eq!(bytes[..8], [2, 0, 0, 0, 0, 0x10, 0, 0]);
        assert_eq!((bytes[8], bytes[16], bytes[17], bytes[24]), (3, 5, 4, 6));
        assert_eq!(bytes[25..], [0; 7]);
        assert_eq!(UncheckedClusterHeader::check(&bytes), Ok(header));
    }

    #[test]
    fn invalid_headers_fail_with_their_status_and_none_panics() {
        let mut random = Prng::new(1);
        for length in 0..80 {
            let mut data = vec![0; length];
            random.fill(&mut data);
            let checked = UncheckedClusterHeader::check(&data);
            assert_eq!(
                length < CLUSTER_HEADER_BYTES,
                checked == Err(Status::INVALID_SGL_LENGTH.do_not_retry())
            );
        }
        let good = ClusterHeader { version: Version::NONE, epoch: 0, request_id: 0, hop: HOPS_MAX };
        assert_eq!(UncheckedClusterHeader::check(&good.encode()), Ok(good));
        for (at, value) in [(24, HOPS_MAX + 1), (25, 1), (31, 1)] {
            let mut bytes = good.encode();
            bytes[at] = value;
            let refused = UncheckedClusterHeader::check(&bytes);
            assert_eq!(refused, Err(Status::INVALID_FIELD.do_not_retry()), "byte {at}");
        }
    }

    #[test]
    fn opcodes_have_the_direction_of_their_data() {
        for opcode in [opcode::CHAIN_STORE, opcode::CHAIN_DELETE, opcode::COPY] {
            assert_eq!(DataDirection::from_opcode(opcode), DataDirection::ToController);
        }
        assert_eq!(DataDirection::from_opcode(opcode::SCAN), DataDirection::Both);
    }
}
