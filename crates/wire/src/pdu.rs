//! NVMe/TCP PDUs: how commands, data and replies are framed on a TCP stream (NVMe TCP Transport 1.1, 3.6).
//!
//! In: the bytes of a stream. Out: a [`PduLayout`] that says where a PDU's parts lie, then its typed header.
//! And back: `encode` appends a header (with its digest and padding) to a `Vec` that has room.
//!
//! ```text
//! 0     1      2      3     4..8    8..hlen          hlen     pdo        plen
//! kind  flags  hlen   pdo   plen  | rest of header | HDGST | pad | data | DDGST |
//! <------- Unchecked ------------> <--------- Frame says where ---------------->
//! ```
//! Invariants: a [`PduLayout`] exists only after [`UncheckedCommonHeader::check`]: its parts lie in order within
//! `pdu_bytes`, and the header's length is that of its kind. Digests are CRC-32C, header and data each.

pub use crate::ic_term::{IcRequest, IcResponse, TermReq, UncheckedIc};
use crate::pdu_error::PduError;
use crate::queue_entry::{Cqe, Sqe};
use octokv_base::crc32c;
use zerocopy::byteorder::little_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Bytes of the common header, the least that must be there to know a PDU's length.
pub const COMMON_HEADER_BYTES: usize = 8;
/// Bytes of ICReq and ICResp.
pub const IC_BYTES: usize = 128;
/// Bytes of a digest.
pub const DIGEST_BYTES: usize = 4;
/// Bytes that admin and Fabrics commands may carry in their capsule.
pub const ADMIN_CAPSULE_DATA_BYTES: u32 = 8192;
/// The longest termination request, in bytes.
pub const TERM_REQ_BYTES_MAX: usize = 152;

/// PDU types.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum PduType {
    /// Initialize connection request, host to controller.
    IcRequest = 0,
    /// Initialize connection response.
    IcResponse = 1,
    /// The host terminates.
    H2cTermReq = 2,
    /// The controller terminates.
    C2hTermReq = 3,
    /// A command, perhaps with data.
    CapsuleCommand = 4,
    /// A completion.
    CapsuleResponse = 5,
    /// Data to the controller, as an R2T asked for.
    H2cData = 6,
    /// Data to the host.
    C2hData = 7,
    /// Ready to transfer: the controller asks for data.
    ReadyToTransfer = 9,
}

impl PduType {
    /// The kind of a type byte.
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

    /// The header length that the kind must have, in bytes, without digest.
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

    /// Whether digests apply to it: not while a connection begins or ends.
    pub const fn has_digests(self) -> bool {
        !matches!(self, PduType::IcRequest | PduType::IcResponse | PduType::H2cTermReq | PduType::C2hTermReq)
    }

    const fn can_carry_data(self) -> bool {
        matches!(self, PduType::CapsuleCommand | PduType::H2cData | PduType::C2hData)
    }

    const fn is_received_by(self, role: Role) -> bool {
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
    /// The last data PDU of a transfer.
    pub const LAST: u8 = 4;
    /// The command succeeded and no completion follows. Only with LAST.
    pub const SUCCESS: u8 = 8;
}

/// One end of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// The target.
    Controller,
    /// The initiator.
    Host,
}

/// What both ends agreed on, as one end uses it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NegotiatedParams {
    /// Header digests are on.
    pub header_digest: bool,
    /// Data digests are on.
    pub data_digest: bool,
    /// Data that this end sends begins at a multiple of this in its PDU, in bytes (the other end's HPDA
    /// or CPDA): 4 to 128.
    pub send_alignment: u16,
    /// The most data that one received PDU may carry, in bytes.
    pub receive_data_bytes_max: u32,
}

impl NegotiatedParams {
    /// Before anything was agreed on: no digests.
    pub const fn initial() -> NegotiatedParams {
        NegotiatedParams {
            header_digest: false,
            data_digest: false,
            send_alignment: 4,
            receive_data_bytes_max: 1 << 24,
        }
    }

    /// The alignment in bytes of an HPDA or CPDA (0's based, in units of 4 B).
    ///
    /// # Errors
    /// When it is above 31.
    pub fn alignment_bytes(pda: u8) -> Result<u16, PduError> {
        if pda > 31 { Err(PduError::Alignment { alignment: pda }) } else { Ok((u16::from(pda) + 1) * 4) }
    }

    /// Bytes before the data of a PDU that this end sends with data.
    pub fn prefix_bytes(&self, kind: PduType) -> usize {
        let digest = if self.header_digest { DIGEST_BYTES } else { 0 };
        (kind.header_bytes() + digest).next_multiple_of(usize::from(self.send_alignment))
    }

    /// Bytes after the data: its digest, where there is data and digests are on.
    pub fn trailer_bytes(&self, data_bytes: usize) -> usize {
        if self.data_digest && data_bytes > 0 { DIGEST_BYTES } else { 0 }
    }
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone, Copy)]
#[repr(C)]
pub(crate) struct CommonHeader {
    pdu_type: u8,
    flags: u8,
    header_bytes: u8,
    data_offset: u8,
    pdu_bytes: U32,
}
const _: () = assert!(size_of::<CommonHeader>() == COMMON_HEADER_BYTES);

/// The first eight bytes of a PDU as they came.
#[derive(Clone, Copy)]
pub struct UncheckedCommonHeader([u8; COMMON_HEADER_BYTES]);

impl UncheckedCommonHeader {
    /// Of the start of `bytes`, or `None` when fewer than eight are there.
    pub fn new(bytes: &[u8]) -> Option<UncheckedCommonHeader> {
        bytes.first_chunk().map(|b| UncheckedCommonHeader(*b))
    }

    /// Where the PDU's parts lie, if they fit its kind, the receiver and what was agreed on.
    ///
    /// # Errors
    /// The fault that ends the connection.
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
                // What follows the header is the start of the PDU that was wrong.
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

/// Where the parts of one PDU lie: `prefix_bytes` of header, digest and padding, then `data_bytes`, then
/// `trailer_bytes` of data digest. Only [`UncheckedCommonHeader::check`] makes one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PduLayout {
    /// The kind.
    pub pdu_type: PduType,
    /// The flags byte.
    pub flags: u8,
    /// Whether a header digest follows the header.
    pub header_digest: bool,
    /// Bytes before the data.
    pub prefix_bytes: u32,
    /// Bytes of data.
    pub data_bytes: u32,
    /// Bytes of data digest: 0 or 4.
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

    /// All bytes of the PDU.
    pub fn pdu_bytes(&self) -> usize {
        self.prefix_bytes as usize + self.data_bytes as usize + self.trailer_bytes as usize
    }

    /// Whether this is the last data PDU of its transfer.
    pub fn is_last(&self) -> bool {
        self.flags & flags::LAST != 0
    }

    /// Whether this stands for a completion too.
    pub fn is_success(&self) -> bool {
        self.flags & flags::SUCCESS != 0
    }

    /// The header in `prefix`, its digest found right.
    ///
    /// # Errors
    /// When the digest is wrong.
    ///
    /// # Panics
    /// When `prefix` has fewer than `prefix_bytes` bytes: the caller waits for them.
    #[inline]
    pub fn decode_header<'a>(&self, prefix: &'a [u8]) -> Result<PduHeader<'a>, PduError> {
        let end = self.pdu_type.header_bytes();
        assert!(prefix.len() >= self.prefix_bytes as usize, "a header is read when all of it is there");
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

/// A view of a header whose length was checked.
pub(crate) fn header_view<T: FromBytes + Immutable + KnownLayout + Unaligned>(bytes: &[u8]) -> &T {
    // `PduLayout` exists only with the header length of its kind, which is that of the layout.
    T::ref_from_prefix(bytes).expect("a header of its kind's length").0
}

/// A PDU's header, by kind.
#[derive(Clone, Copy)]
pub enum PduHeader<'a> {
    /// ICReq, its fields not yet checked.
    IcRequest(UncheckedIc),
    /// ICResp, its fields not yet checked.
    IcResponse(UncheckedIc),
    /// Either end's termination request.
    TermReq(TermReq),
    /// A command.
    Command(&'a Sqe),
    /// A completion.
    Response(&'a Cqe),
    /// H2CData or C2HData.
    Data(DataHeader),
    /// R2T.
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
    /// The command (CCCID).
    pub command_id: u16,
    /// The transfer tag (TTAG) of R2T and H2CData; 0 in C2HData.
    pub tag: u16,
    /// Where in the command's data the range begins, in bytes.
    pub offset: u32,
    /// The range's length, in bytes.
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

    #[inline]
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

    /// Appends what precedes `self.bytes` bytes of data in an H2CData (from the host) or C2HData (from
    /// the controller). The caller sends the data, then, where [`NegotiatedParams::trailer_bytes`] says so, its digest.
    /// `bits` is LAST, SUCCESS or both.
    #[inline]
    pub fn encode(&self, sender: Role, bits: u8, params: &NegotiatedParams, out: &mut Vec<u8>) {
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

/// Appends what precedes `data_bytes` bytes of in-capsule data of a command; with 0 the whole PDU. The
/// caller sends the data and its digest, as with [`DataHeader::encode`].
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
    let kind = PduType::CapsuleResponse;
    let mut header = [0; PduType::CapsuleResponse.header_bytes()];
    header[..COMMON_HEADER_BYTES].copy_from_slice(params.common_header_without_data(kind).as_bytes());
    header[COMMON_HEADER_BYTES..].copy_from_slice(cqe.as_bytes());
    params.append_header(kind, &header, false, out);
}

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
    #[inline]
    fn common_header_without_data(&self, kind: PduType) -> CommonHeader {
        let (bits, digest) = if self.header_digest { (flags::HEADER_DIGEST, DIGEST_BYTES) } else { (0, 0) };
        common_header(kind, bits, 0, kind.header_bytes() + digest)
    }

    #[inline]
    fn common_header_with_data(&self, kind: PduType, bits: u8, data_bytes: usize) -> CommonHeader {
        let prefix = self.prefix_bytes(kind);
        let trailer = self.trailer_bytes(data_bytes);
        let header_bit = if self.header_digest { flags::HEADER_DIGEST } else { 0 };
        let data_bit = if trailer > 0 { flags::DATA_DIGEST } else { 0 };
        common_header(kind, bits | header_bit | data_bit, prefix, prefix + data_bytes + trailer)
    }

    /// Appends the header, its digest and, where data follows, the padding.
    #[inline]
    fn append_header(&self, kind: PduType, header: &[u8], data_follows: bool, out: &mut Vec<u8>) {
        out.extend_from_slice(header);
        let mut written = header.len();
        if self.header_digest {
            out.extend_from_slice(&crc32c(header).to_le_bytes());
            written += DIGEST_BYTES;
        }
        if data_follows {
            const ZEROS: [u8; 128] = [0; 128];
            out.extend_from_slice(&ZEROS[..self.prefix_bytes(kind) - written]);
        }
    }
}

#[cfg(test)]
#[path = "pdu_tests.rs"]
mod tests;
