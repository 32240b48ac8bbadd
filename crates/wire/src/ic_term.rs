//! The PDUs that open and terminate a connection: ICReq, ICResp and the termination requests.
//!
//! ```text
//! IC    8 version u16 = 0   10 HPDA or CPDA u8   11 digests u8   12 MAXR2T or MAXH2CDATA u32   128 B
//! Term  8 FES u16   10 FEI u32   24 the start of the rejected PDU                              24-152 B
//! ```
//! They carry no digests. Tested with [`crate::pdu`].

use crate::pdu_error::PduError;
use crate::pdu_header::{
    COMMON_HEADER_BYTES, CommonHeader, IC_BYTES, NegotiatedParams, PduType, Role, TERM_REQ_BYTES_MAX,
    common_header, header_view,
};
use zerocopy::byteorder::little_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

const TERM_REQ_HEADER_BYTES: usize = 24;

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone, Copy)]
#[repr(C)]
struct IcLayout {
    common: CommonHeader,
    version: U16,
    alignment: u8,
    digests: u8,
    limit: U32,
    reserved: [u8; 112],
}
const _: () = assert!(size_of::<IcLayout>() == IC_BYTES);

/// The fields of an ICReq or ICResp as received.
#[derive(Clone, Copy, Debug)]
pub struct UncheckedIc {
    version: u16,
    alignment: u8,
    digests: u8,
    limit: u32,
}

/// ICReq: the parameters that the host requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IcRequest {
    /// Alignment of the data that the controller sends, in bytes (HPDA): 4 to 128, a multiple of 4.
    pub host_alignment: u16,
    /// Whether the host requests header digests.
    pub header_digest: bool,
    /// Whether the host requests data digests.
    pub data_digest: bool,
    /// Maximum number of open R2Ts per command (MAXR2T): at least 1.
    pub open_transfers_max: u32,
}

/// ICResp: the parameters that the controller grants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IcResponse {
    /// Alignment of the data that the host sends, in bytes (CPDA): 4 to 128, a multiple of 4.
    pub controller_alignment: u16,
    /// Whether header digests are enabled.
    pub header_digest: bool,
    /// Whether data digests are enabled.
    pub data_digest: bool,
    /// Maximum data of one H2CData, in bytes (MAXH2CDATA): at least 4096, a multiple of 4.
    pub h2c_data_bytes_max: u32,
}

impl UncheckedIc {
    pub(crate) fn from_header(header: &[u8]) -> UncheckedIc {
        let ic: &IcLayout = header_view(header);
        UncheckedIc {
            version: ic.version.get(),
            alignment: ic.alignment,
            digests: ic.digests,
            limit: ic.limit.get(),
        }
    }

    fn check(self) -> Result<u16, PduError> {
        if self.version != 0 {
            return Err(PduError::FormatVersion { version: self.version });
        }
        if self.digests & !3 != 0 {
            return Err(PduError::DigestBits { bits: self.digests });
        }
        NegotiatedParams::alignment_bytes(self.alignment)
    }

    /// Checks the fields of an ICReq.
    ///
    /// # Errors
    /// The protocol error that ends the connection: version, digest bits or alignment.
    pub fn check_request(self) -> Result<IcRequest, PduError> {
        Ok(IcRequest {
            host_alignment: self.check()?,
            header_digest: self.digests & 1 != 0,
            data_digest: self.digests & 2 != 0,
            open_transfers_max: self.limit.saturating_add(1),
        })
    }

    /// Checks the fields of an ICResp.
    ///
    /// # Errors
    /// The protocol error that ends the connection: version, digest bits, alignment or maximum data length.
    pub fn check_response(self) -> Result<IcResponse, PduError> {
        let controller_alignment = self.check()?;
        if self.limit < 4096 || !self.limit.is_multiple_of(4) {
            return Err(PduError::DataLimit { bytes: self.limit });
        }
        Ok(IcResponse {
            controller_alignment,
            header_digest: self.digests & 1 != 0,
            data_digest: self.digests & 2 != 0,
            h2c_data_bytes_max: self.limit,
        })
    }
}

fn encode_ic(
    kind: PduType,
    alignment: u16,
    header_digest: bool,
    data_digest: bool,
    limit: u32,
) -> [u8; IC_BYTES] {
    let ic = IcLayout {
        common: common_header(kind, 0, 0, IC_BYTES),
        version: U16::new(0),
        alignment: (alignment / 4).saturating_sub(1) as u8,
        digests: u8::from(header_digest) | u8::from(data_digest) << 1,
        limit: U32::new(limit),
        reserved: [0; 112],
    };
    zerocopy::transmute!(ic)
}

impl IcRequest {
    /// Encodes the PDU.
    pub fn encode(&self) -> [u8; IC_BYTES] {
        let transfers = self.open_transfers_max.saturating_sub(1);
        encode_ic(PduType::IcRequest, self.host_alignment, self.header_digest, self.data_digest, transfers)
    }
}

impl IcResponse {
    /// Encodes the PDU.
    pub fn encode(&self) -> [u8; IC_BYTES] {
        let (kind, limit) = (PduType::IcResponse, self.h2c_data_bytes_max);
        encode_ic(kind, self.controller_alignment, self.header_digest, self.data_digest, limit)
    }
}

/// H2CTermReq or C2HTermReq. The quoted start of the rejected PDU is the data of its
/// [`crate::pdu::PduLayout`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TermReq {
    /// Fatal error status (FES), a value of [`crate::pdu_error::FatalErrorStatus`].
    pub fatal_status: u16,
    /// Fatal error information (FEI).
    pub information: u32,
}

impl TermReq {
    pub(crate) fn from_header(header: &[u8]) -> TermReq {
        let word = |at: usize| u16::from_le_bytes([header[at], header[at + 1]]);
        TermReq { fatal_status: word(8), information: u32::from(word(10)) | u32::from(word(12)) << 16 }
    }

    /// The termination request that reports `error`.
    pub fn for_error(error: &PduError) -> TermReq {
        TermReq {
            fatal_status: error.fatal_error_status() as u16,
            information: error.fatal_error_information(),
        }
    }

    /// Appends the PDU of `sender` with `quoted`, the start of the rejected PDU, cut at 128 bytes.
    pub fn encode(&self, sender: Role, quoted: &[u8], out: &mut Vec<u8>) {
        let kind = match sender {
            Role::Host => PduType::H2cTermReq,
            Role::Controller => PduType::C2hTermReq,
        };
        let quoted = &quoted[..quoted.len().min(TERM_REQ_BYTES_MAX - TERM_REQ_HEADER_BYTES)];
        let mut header = [0; TERM_REQ_HEADER_BYTES];
        let head = common_header(kind, 0, 0, TERM_REQ_HEADER_BYTES + quoted.len());
        header[..COMMON_HEADER_BYTES].copy_from_slice(head.as_bytes());
        header[8..10].copy_from_slice(&self.fatal_status.to_le_bytes());
        header[10..14].copy_from_slice(&self.information.to_le_bytes());
        out.extend_from_slice(&header);
        out.extend_from_slice(quoted);
    }
}
