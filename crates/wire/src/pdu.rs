//! NVMe/TCP PDUs: framing of commands, data and completions on a TCP stream (NVMe TCP Transport 1.1, 3.6).
//!
//! Decoding: the bytes of a stream give a [`PduLayout`], which gives the typed header. Encoding: `encode` appends a
//! header with its digest and padding to a `Vec`; the caller appends the data.
//!
//! ```text
//! 0     1      2      3     4..8    8..hlen          hlen     pdo        plen
//! type  flags  hlen   pdo   plen  | rest of header | HDGST | pad | data | DDGST |
//! <- UncheckedCommonHeader ------> <------------ PduLayout ----------------------->
//! ```
//! Invariants: only [`UncheckedCommonHeader::check`] creates a [`PduLayout`], so its parts lie in order within
//! `pdu_bytes` and the header has the length of its type. Digests are CRC-32C over header and data separately.
//! Tested in `pdu_tests.rs` and by the fuzz target `pdu`.

pub use crate::ic_term::{IcRequest, IcResponse, TermReq, UncheckedIc};
use crate::pdu_error::PduError;
pub use crate::pdu_header::{
    ADMIN_CAPSULE_DATA_BYTES, COMMON_HEADER_BYTES, DIGEST_BYTES, IC_BYTES, NegotiatedParams, PduType, Role,
    TERM_REQ_BYTES_MAX, flags,
};
use crate::pdu_header::{CommonHeader, header_view};
use crate::queue_entry::{Cqe, Sqe};
use octokv_base::crc32c;
use zerocopy::byteorder::little_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// The first eight bytes of a PDU as received.
#[derive(Clone, Copy)]
pub struct UncheckedCommonHeader([u8; COMMON_HEADER_BYTES]);

impl UncheckedCommonHeader {
    /// Copies the common header from the start of `bytes`; `None` if there are fewer than eight bytes.
    pub fn new(bytes: &[u8]) -> Option<UncheckedCommonHeader> {
        bytes.first_chunk().map(|b| UncheckedCommonHeader(*b))
    }

    /// Locates the parts of the PDU, if they match its type, the receiver and the negotiated parameters.
    ///
    /// # Errors
    /// The protocol error that ends the connection.
    pub fn check(self, receiver: Role, params: &NegotiatedParams) -> Result<PduLayout, PduError> {
        let CommonHeader { pdu_type: kind, flags: bits, header_bytes, data_offset, pdu_bytes } =
            zerocopy::transmute!(self.0);
        let pdu_bytes = pdu_bytes.get();
        let known = PduType::from_u8(kind).ok_or(PduError::UnknownPduType { kind })?;
        if !known.is_received_by(receiver) {
            return Err(PduError::UnexpectedPduType { kind });
        }
        if usize::from(header_bytes) != known.header_bytes() {
            return Err(PduError::HeaderLength { header_bytes });
        }
        let digest = known.has_digests() && params.header_digest;
        if known.has_digests() && digest != (bits & flags::HEADER_DIGEST != 0) {
            return Err(PduError::Flags { flags: bits });
        }
        let header_end = u32::from(header_bytes) + if digest { DIGEST_BYTES as u32 } else { 0 };
        let mut layout = PduLayout {
            pdu_type: known,
            flags: bits,
            header_digest: digest,
            prefix_bytes: header_end,
            data_bytes: 0,
            trailer_bytes: 0,
        };
        match known {
            PduType::H2cTermReq | PduType::C2hTermReq => {
                // The data of a termination request is the start of the rejected PDU.
                if !(header_end..=TERM_REQ_BYTES_MAX as u32).contains(&pdu_bytes) {
                    return Err(PduError::PduLength { pdu_bytes });
                }
                layout.data_bytes = pdu_bytes - header_end;
            }
            _ if known.can_carry_data() && data_offset != 0 => {
                layout.locate_data(data_offset, pdu_bytes, params)?;
            }
            _ if pdu_bytes != header_end => return Err(PduError::PduLength { pdu_bytes }),
            _ => {}
        }
        Ok(layout)
    }
}

/// A command capsule as hosts send it where no digests were negotiated: no flag is set, and the data follows the entry.
#[derive(Clone, Copy, Debug)]
pub struct PlainCapsule<'a> {
    /// The submission queue entry.
    pub sqe: &'a Sqe,
    /// The data in the capsule.
    pub data: &'a [u8],
}

impl<'a> PlainCapsule<'a> {
    const HEADER_BYTES: usize = PduType::CapsuleCommand.header_bytes();
    /// Type, flags, header length and data offset.
    const FIRST_BYTES: [u8; 4] =
        [PduType::CapsuleCommand as u8, 0, Self::HEADER_BYTES as u8, Self::HEADER_BYTES as u8];
    const FIRST_BYTES_WITHOUT_DATA: [u8; 4] = [PduType::CapsuleCommand as u8, 0, Self::HEADER_BYTES as u8, 0];

    /// The capsule at the head of `bytes`, if that is one, whole, with at most `data_bytes_max` bytes of data. `None` is no
    /// error: [`UncheckedCommonHeader::check`] accepts every PDU that this does, and more. REQUIRES: the receiver is a
    /// controller, and no digests were negotiated.
    #[inline]
    pub fn recognize(bytes: &'a [u8], data_bytes_max: u32) -> Option<PlainCapsule<'a>> {
        let (header, rest) = bytes.split_first_chunk::<{ PlainCapsule::HEADER_BYTES }>()?;
        let [first @ .., _, _, _, _] = *header.first_chunk::<8>()?;
        let [_, _, _, _, pdu_bytes @ ..] = *header.first_chunk::<8>()?;
        let data_bytes = u32::from_le_bytes(pdu_bytes).checked_sub(Self::HEADER_BYTES as u32)?;
        // Type, flags, header length and data offset are compared at once.
        let is_plain =
            first == Self::FIRST_BYTES || first == Self::FIRST_BYTES_WITHOUT_DATA && data_bytes == 0;
        if !is_plain || data_bytes > data_bytes_max {
            return None;
        }
        let data = rest.get(..data_bytes as usize)?;
        Some(PlainCapsule { sqe: header_view(&header[COMMON_HEADER_BYTES..]), data })
    }

    /// Length of the whole PDU, in bytes.
    #[inline]
    pub fn pdu_bytes(&self) -> usize {
        Self::HEADER_BYTES + self.data.len()
    }
}

/// Layout of one PDU: `prefix_bytes` of header, digest and padding, then `data_bytes`, then `trailer_bytes`
/// of data digest. Only [`UncheckedCommonHeader::check`] creates one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PduLayout {
    /// PDU type.
    pub pdu_type: PduType,
    /// Flags byte, as in [`flags`].
    pub flags: u8,
    /// Whether a header digest follows the header.
    pub header_digest: bool,
    /// Length of header, digest and padding, in bytes.
    pub prefix_bytes: u32,
    /// Length of the data, in bytes.
    pub data_bytes: u32,
    /// Length of the data digest, in bytes: 0 or 4.
    pub trailer_bytes: u32,
}

impl PduLayout {
    fn locate_data(
        &mut self,
        data_offset: u8,
        pdu_bytes: u32,
        params: &NegotiatedParams,
    ) -> Result<(), PduError> {
        let offset = u32::from(data_offset);
        if offset < self.prefix_bytes || !offset.is_multiple_of(4) {
            return Err(PduError::DataOffset { data_offset });
        }
        let rest = pdu_bytes.checked_sub(offset).ok_or(PduError::PduLength { pdu_bytes })?;
        self.prefix_bytes = offset;
        if rest == 0 {
            return Ok(());
        }
        if params.data_digest != (self.flags & flags::DATA_DIGEST != 0) {
            return Err(PduError::Flags { flags: self.flags });
        }
        self.trailer_bytes = if params.data_digest { DIGEST_BYTES as u32 } else { 0 };
        self.data_bytes = rest.checked_sub(self.trailer_bytes).ok_or(PduError::PduLength { pdu_bytes })?;
        if self.data_bytes > params.receive_data_bytes_max {
            return Err(PduError::PduLength { pdu_bytes });
        }
        Ok(())
    }

    /// Length of the whole PDU, in bytes.
    pub fn pdu_bytes(&self) -> usize {
        self.prefix_bytes as usize + self.data_bytes as usize + self.trailer_bytes as usize
    }

    /// Whether this is the last data PDU of its transfer.
    pub fn is_last(&self) -> bool {
        self.flags & flags::LAST != 0
    }

    /// Whether this data PDU also completes its command with success.
    pub fn is_success(&self) -> bool {
        self.flags & flags::SUCCESS != 0
    }

    /// Decodes the header in `prefix` after verifying its digest.
    ///
    /// # Errors
    /// [`PduError::HeaderDigest`] if the digest does not match.
    ///
    /// # Panics
    /// If `prefix` has fewer than `prefix_bytes` bytes.
    #[inline]
    pub fn decode_header<'a>(&self, prefix: &'a [u8]) -> Result<PduHeader<'a>, PduError> {
        let end = self.pdu_type.header_bytes();
        assert!(
            prefix.len() >= self.prefix_bytes as usize,
            "the header is decoded before all of it was received"
        );
        let header = &prefix[..end];
        if self.header_digest {
            let received =
                u32::from_le_bytes([prefix[end], prefix[end + 1], prefix[end + 2], prefix[end + 3]]);
            let computed = crc32c(header);
            if received != computed {
                return Err(PduError::HeaderDigest { received, computed });
            }
        }
        Ok(match self.pdu_type {
            PduType::IcRequest => PduHeader::IcRequest(UncheckedIc::from_header(header)),
            PduType::IcResponse => PduHeader::IcResponse(UncheckedIc::from_header(header)),
            PduType::H2cTermReq | PduType::C2hTermReq => PduHeader::TermReq(TermReq::from_header(header)),
            PduType::CapsuleCommand => PduHeader::Command(header_view(&header[COMMON_HEADER_BYTES..])),
            PduType::CapsuleResponse => PduHeader::Response(header_view(&header[COMMON_HEADER_BYTES..])),
            PduType::H2cData | PduType::C2hData => PduHeader::Data(DataHeader::from_header(header)),
            PduType::ReadyToTransfer => PduHeader::ReadyToTransfer(DataHeader::from_header(header)),
        })
    }
}

/// The typed header of a PDU.
#[derive(Clone, Copy)]
pub enum PduHeader<'a> {
    /// ICReq, fields not yet checked.
    IcRequest(UncheckedIc),
    /// ICResp, fields not yet checked.
    IcResponse(UncheckedIc),
    /// H2CTermReq or C2HTermReq.
    TermReq(TermReq),
    /// Capsule with a submission queue entry.
    Command(&'a Sqe),
    /// Capsule with a completion queue entry.
    Response(&'a Cqe),
    /// H2CData or C2HData.
    Data(DataHeader),
    /// R2T: the controller asks for the data of a command.
    ReadyToTransfer(DataHeader),
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone, Copy)]
#[repr(C)]
struct DataHeaderLayout {
    common: CommonHeader,
    command_id: U16,
    tag: U16,
    offset: U32,
    bytes: U32,
    reserved: U32,
}
const _: () = assert!(size_of::<DataHeaderLayout>() == PduType::H2cData.header_bytes());
const _: () = assert!(COMMON_HEADER_BYTES + size_of::<Sqe>() == PduType::CapsuleCommand.header_bytes());
const _: () = assert!(COMMON_HEADER_BYTES + size_of::<Cqe>() == PduType::CapsuleResponse.header_bytes());

/// The fields of H2CData, C2HData and R2T: a range of a command's data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DataHeader {
    /// Command identifier (CCCID).
    pub command_id: u16,
    /// Transfer tag (TTAG) of R2T and H2CData; 0 in C2HData.
    pub tag: u16,
    /// Offset of the range in the command's data, in bytes.
    pub offset: u32,
    /// Length of the range, in bytes.
    pub bytes: u32,
}

impl DataHeader {
    #[inline]
    fn from_header(header: &[u8]) -> DataHeader {
        let data: &DataHeaderLayout = header_view(header);
        DataHeader {
            command_id: data.command_id.get(),
            tag: data.tag.get(),
            offset: data.offset.get(),
            bytes: data.bytes.get(),
        }
    }

    #[inline(always)]
    fn wire_layout(&self, common: CommonHeader) -> DataHeaderLayout {
        DataHeaderLayout {
            common,
            command_id: U16::new(self.command_id),
            tag: U16::new(self.tag),
            offset: U32::new(self.offset),
            bytes: U32::new(self.bytes),
            reserved: U32::new(0),
        }
    }

    /// Appends the header, digest and padding of an H2CData (host) or C2HData (controller) with `self.bytes`
    /// bytes of data. `bits` is LAST, SUCCESS or both. REQUIRES: the caller appends the data and then, if
    /// [`NegotiatedParams::trailer_bytes`] is not 0, its digest.
    #[inline]
    pub fn encode(&self, sender: Role, bits: u8, params: &NegotiatedParams, out: &mut Vec<u8>) {
        match params.as_plain() {
            Some(plain) => self.encode_with(sender, bits, &plain, out),
            None => self.encode_negotiated(sender, bits, params, out),
        }
    }

    /// By value: what is passed by reference is in memory, also when this is not called.
    #[inline(never)]
    fn encode_negotiated(self, sender: Role, bits: u8, params: &NegotiatedParams, out: &mut Vec<u8>) {
        self.encode_with(sender, bits, params, out);
    }

    #[inline(always)]
    fn encode_with(&self, sender: Role, bits: u8, params: &NegotiatedParams, out: &mut Vec<u8>) {
        let kind = match sender {
            Role::Host => PduType::H2cData,
            Role::Controller => PduType::C2hData,
        };
        let common = params.common_header_with_data(kind, bits, self.bytes as usize);
        params.append_header(kind, self.wire_layout(common).as_bytes(), true, out);
    }

    /// Appends an R2T for this range.
    #[inline]
    pub fn encode_ready_to_transfer(&self, params: &NegotiatedParams, out: &mut Vec<u8>) {
        let kind = PduType::ReadyToTransfer;
        let common = params.common_header_without_data(kind);
        params.append_header(kind, self.wire_layout(common).as_bytes(), false, out);
    }
}

/// Appends the header, digest and padding of a command capsule with `data_bytes` bytes of in-capsule data;
/// with 0 the whole PDU. REQUIRES: the caller appends the data and its digest, as for [`DataHeader::encode`].
#[inline]
pub fn encode_command(sqe: &Sqe, data_bytes: usize, params: &NegotiatedParams, out: &mut Vec<u8>) {
    let kind = PduType::CapsuleCommand;
    let common = match data_bytes {
        0 => params.common_header_without_data(kind),
        _ => params.common_header_with_data(kind, 0, data_bytes),
    };
    let mut header = [0; PduType::CapsuleCommand.header_bytes()];
    header[..COMMON_HEADER_BYTES].copy_from_slice(common.as_bytes());
    header[COMMON_HEADER_BYTES..].copy_from_slice(sqe.as_bytes());
    params.append_header(kind, &header, data_bytes > 0, out);
}

/// Appends a completion.
#[inline]
pub fn encode_response(cqe: &Cqe, params: &NegotiatedParams, out: &mut Vec<u8>) {
    match params.as_plain() {
        Some(plain) => encode_response_with(cqe, &plain, out),
        None => encode_response_negotiated(*cqe, params, out),
    }
}

/// By value, as [`DataHeader::encode_negotiated`].
#[inline(never)]
fn encode_response_negotiated(cqe: Cqe, params: &NegotiatedParams, out: &mut Vec<u8>) {
    encode_response_with(&cqe, params, out);
}

#[inline(always)]
fn encode_response_with(cqe: &Cqe, params: &NegotiatedParams, out: &mut Vec<u8>) {
    let kind = PduType::CapsuleResponse;
    let mut header = [0; PduType::CapsuleResponse.header_bytes()];
    header[..COMMON_HEADER_BYTES].copy_from_slice(params.common_header_without_data(kind).as_bytes());
    header[COMMON_HEADER_BYTES..].copy_from_slice(cqe.as_bytes());
    params.append_header(kind, &header, false, out);
}

#[cfg(test)]
#[path = "pdu_tests.rs"]
mod tests;
