//! The common header of a PDU, and the common parts of all headers: types, flags, negotiated parameters.
//!
//! ```text
//! 0     1      2      3     4..8
//! type  flags  hlen   pdo   plen
//! ```
//! [`crate::pdu`] re-exports the public items and tests them.

use crate::pdu_error::PduError;
use octokv_base::crc32c;
use zerocopy::byteorder::little_endian::U32;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Length of the common header, in bytes. It gives the length of the PDU.
pub const COMMON_HEADER_BYTES: usize = 8;
/// Length of ICReq and ICResp, in bytes.
pub const IC_BYTES: usize = 128;
/// Length of a digest, in bytes.
pub const DIGEST_BYTES: usize = 4;
/// Maximum in-capsule data of admin and Fabrics commands, in bytes.
pub const ADMIN_CAPSULE_DATA_BYTES: u32 = 8192;
/// Maximum length of a termination request, in bytes.
pub const TERM_REQ_BYTES_MAX: usize = 152;

/// PDU type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum PduType {
    /// ICReq: initialize connection request, host to controller.
    IcRequest = 0,
    /// ICResp: initialize connection response, controller to host.
    IcResponse = 1,
    /// H2CTermReq: termination request of the host.
    H2cTermReq = 2,
    /// C2HTermReq: termination request of the controller.
    C2hTermReq = 3,
    /// Command capsule: an entry, with or without data.
    CapsuleCommand = 4,
    /// Response capsule: a completion.
    CapsuleResponse = 5,
    /// H2CData: data to the controller, requested by an R2T.
    H2cData = 6,
    /// C2HData: data to the host.
    C2hData = 7,
    /// R2T: the controller requests data.
    ReadyToTransfer = 9,
}

impl PduType {
    /// The type of a type byte; `None` if it is not defined.
    pub fn from_u8(kind: u8) -> Option<PduType> {
        use PduType::*;
        let all = [
            IcRequest,
            IcResponse,
            H2cTermReq,
            C2hTermReq,
            CapsuleCommand,
            CapsuleResponse,
            H2cData,
            C2hData,
            ReadyToTransfer,
        ];
        all.into_iter().find(|&k| k as u8 == kind)
    }

    /// Header length of the type, in bytes, without digest.
    pub const fn header_bytes(self) -> usize {
        match self {
            PduType::IcRequest | PduType::IcResponse => IC_BYTES,
            PduType::CapsuleCommand => 72,
            PduType::H2cTermReq
            | PduType::C2hTermReq
            | PduType::CapsuleResponse
            | PduType::H2cData
            | PduType::C2hData
            | PduType::ReadyToTransfer => 24,
        }
    }

    /// Whether digests apply to the type: not to ICReq, ICResp and termination requests.
    pub const fn has_digests(self) -> bool {
        !matches!(self, PduType::IcRequest | PduType::IcResponse | PduType::H2cTermReq | PduType::C2hTermReq)
    }

    pub(crate) const fn can_carry_data(self) -> bool {
        matches!(self, PduType::CapsuleCommand | PduType::H2cData | PduType::C2hData)
    }

    pub(crate) const fn is_received_by(self, role: Role) -> bool {
        match role {
            Role::Controller => {
                matches!(
                    self,
                    PduType::IcRequest | PduType::H2cTermReq | PduType::CapsuleCommand | PduType::H2cData
                )
            }
            Role::Host => matches!(
                self,
                PduType::IcResponse
                    | PduType::C2hTermReq
                    | PduType::CapsuleResponse
                    | PduType::C2hData
                    | PduType::ReadyToTransfer
            ),
        }
    }
}

/// Bits of the flags byte.
pub mod flags {
    /// A header digest follows the header.
    pub const HEADER_DIGEST: u8 = 1;
    /// A data digest follows the data.
    pub const DATA_DIGEST: u8 = 2;
    /// Last data PDU of a transfer.
    pub const LAST: u8 = 4;
    /// The command succeeded and no completion follows. Only with LAST.
    pub const SUCCESS: u8 = 8;
}

/// One end of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// The controller (target).
    Controller,
    /// The host (initiator).
    Host,
}

/// Parameters negotiated by ICReq and ICResp, from the view of one end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NegotiatedParams {
    /// Whether header digests are enabled.
    pub header_digest: bool,
    /// Whether data digests are enabled.
    pub data_digest: bool,
    /// Alignment of the data in a sent PDU, in bytes (the receiver's HPDA or CPDA): 4 to 128.
    pub send_alignment: u16,
    /// Maximum data of one received PDU, in bytes.
    pub receive_data_bytes_max: u32,
}

impl NegotiatedParams {
    /// Parameters before ICResp: no digests.
    pub const fn initial() -> NegotiatedParams {
        NegotiatedParams {
            header_digest: false,
            data_digest: false,
            send_alignment: 4,
            receive_data_bytes_max: 1 << 24,
        }
    }

    /// These parameters as constants, if they are those of most hosts, with neither digests nor padding: the compiler makes a
    /// version of the encoding in which they decide nothing.
    #[inline(always)]
    pub(crate) fn as_plain(&self) -> Option<NegotiatedParams> {
        let deviation = u16::from(self.header_digest | self.data_digest) | (self.send_alignment ^ 4);
        (deviation == 0).then_some(Self::initial())
    }

    /// The alignment of an HPDA or CPDA (0's based, in units of 4 B), in bytes.
    ///
    /// # Errors
    /// [`PduError::Alignment`] if it is above 31.
    pub fn alignment_bytes(pda: u8) -> Result<u16, PduError> {
        if pda > 31 { Err(PduError::Alignment { alignment: pda }) } else { Ok((u16::from(pda) + 1) * 4) }
    }

    /// Offset of the data in a sent PDU, in bytes.
    #[inline(always)]
    pub fn prefix_bytes(&self, kind: PduType) -> usize {
        let digest = if self.header_digest { DIGEST_BYTES } else { 0 };
        match self.send_alignment {
            // What most hosts ask for, and every header has: no division.
            4 => kind.header_bytes() + digest,
            alignment => (kind.header_bytes() + digest).next_multiple_of(usize::from(alignment)),
        }
    }

    /// Length of the data digest of a PDU with `data_bytes` of data, in bytes: 0 without data or digests.
    #[inline(always)]
    pub fn trailer_bytes(&self, data_bytes: usize) -> usize {
        if self.data_digest && data_bytes > 0 { DIGEST_BYTES } else { 0 }
    }
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone, Copy)]
#[repr(C)]
pub(crate) struct CommonHeader {
    pub(crate) pdu_type: u8,
    pub(crate) flags: u8,
    pub(crate) header_bytes: u8,
    pub(crate) data_offset: u8,
    pub(crate) pdu_bytes: U32,
}
const _: () = assert!(size_of::<CommonHeader>() == COMMON_HEADER_BYTES);

/// Casts a header to its layout. REQUIRES: `PduLayout` verified the header length of the type.
pub(crate) fn header_view<T: FromBytes + Immutable + KnownLayout + Unaligned>(bytes: &[u8]) -> &T {
    // The header length of a type is the length of its layout.
    T::ref_from_prefix(bytes).expect("a header of its type's length").0
}

#[inline(always)]
pub(crate) fn common_header(kind: PduType, flags: u8, data_offset: usize, pdu_bytes: usize) -> CommonHeader {
    CommonHeader {
        pdu_type: kind as u8,
        flags,
        header_bytes: kind.header_bytes() as u8,
        data_offset: data_offset as u8,
        pdu_bytes: U32::new(pdu_bytes as u32),
    }
}

impl NegotiatedParams {
    #[inline(always)]
    pub(crate) fn common_header_without_data(&self, kind: PduType) -> CommonHeader {
        let (bits, digest) = if self.header_digest { (flags::HEADER_DIGEST, DIGEST_BYTES) } else { (0, 0) };
        common_header(kind, bits, 0, kind.header_bytes() + digest)
    }

    #[inline(always)]
    pub(crate) fn common_header_with_data(&self, kind: PduType, bits: u8, data_bytes: usize) -> CommonHeader {
        let prefix = self.prefix_bytes(kind);
        let trailer = self.trailer_bytes(data_bytes);
        let header_bit = if self.header_digest { flags::HEADER_DIGEST } else { 0 };
        let data_bit = if trailer > 0 { flags::DATA_DIGEST } else { 0 };
        common_header(kind, bits | header_bit | data_bit, prefix, prefix + data_bytes + trailer)
    }

    /// Appends the header, its digest and, if data follows, the padding.
    #[inline(always)]
    pub(crate) fn append_header(&self, kind: PduType, header: &[u8], data_follows: bool, out: &mut Vec<u8>) {
        out.extend_from_slice(header);
        let mut written = header.len();
        if self.header_digest {
            out.extend_from_slice(&crc32c(header).to_le_bytes());
            written += DIGEST_BYTES;
        }
        if data_follows && self.send_alignment != 4 {
            const ZEROS: [u8; 128] = [0; 128];
            out.extend_from_slice(&ZEROS[..self.prefix_bytes(kind) - written]);
        }
    }
}
