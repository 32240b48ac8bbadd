//! Protocol errors that a peer can cause, and the termination request for each.
//!
//! Each of these ends the connection: the receiver sends H2CTermReq or C2HTermReq with
//! [`PduError::fatal_error_status`] and [`PduError::fatal_error_information`], then closes (NVMe TCP Transport 1.1,
//! 3.6.2.3).

/// Fatal error status (FES) of a termination request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub enum FatalErrorStatus {
    /// A header field has an invalid value.
    InvalidHeaderField = 1,
    /// A PDU that is not allowed in the current state.
    SequenceError = 2,
    /// The header digest does not match the header.
    HeaderDigestError = 3,
    /// Data outside the range of the transfer.
    DataOutOfRange = 4,
    /// More R2Ts or more data at once than the negotiated limit.
    LimitExceeded = 5,
    /// A parameter that the receiver does not support.
    UnsupportedParameter = 6,
}

/// One protocol error of the peer. The integers are the received values.
#[allow(missing_docs)] // Each field has the name of its field in the PDU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PduError {
    /// The PDU type is not defined.
    #[error("unknown PDU type {kind:#04x}")]
    UnknownPduType { kind: u8 },
    /// The PDU type is never valid for this receiver, or not in its current state.
    #[error("PDU type {kind:#04x} is not allowed in this state")]
    UnexpectedPduType { kind: u8 },
    /// The flags do not match the PDU type or the negotiated digests.
    #[error("PDU flags {flags:#04x} are invalid")]
    Flags { flags: u8 },
    /// The header length is not that of the PDU type.
    #[error("a PDU header of {header_bytes} B does not match its type")]
    HeaderLength { header_bytes: u8 },
    /// The data offset lies inside the header, beyond the PDU, or is not aligned.
    #[error("PDU data offset {data_offset} is invalid")]
    DataOffset { data_offset: u8 },
    /// The PDU length does not match its header and data, or exceeds the receiver's maximum.
    #[error("PDU length {pdu_bytes} B is invalid")]
    PduLength { pdu_bytes: u32 },
    /// The header digest does not match the header.
    #[error("header digest mismatch: received {received:#010x}, computed {computed:#010x}")]
    HeaderDigest { received: u32, computed: u32 },
    /// The PDU format version is not 0.
    #[error("PDU format version {version} is not supported")]
    FormatVersion { version: u16 },
    /// The data alignment (HPDA or CPDA) is out of range.
    #[error("PDU data alignment {alignment} is out of range")]
    Alignment { alignment: u8 },
    /// Reserved digest bits are set.
    #[error("digest bits {bits:#04x} are reserved")]
    DigestBits { bits: u8 },
    /// The maximum data length is below 4096 or not a multiple of 4.
    #[error("a maximum data length of {bytes} B is out of range")]
    DataLimit { bytes: u32 },
    /// The command identifier names no command that expects this PDU.
    #[error("no command {command_id} expects this PDU")]
    CommandId { command_id: u16 },
    /// The transfer tag names no open transfer.
    #[error("no open transfer has tag {tag}")]
    TransferTag { tag: u16 },
    /// The data does not continue the transfer, or extends beyond its range.
    #[error("{bytes} B of data at offset {offset} are outside the transfer")]
    DataRange { offset: u32, bytes: u32 },
    /// One data PDU carries more than the negotiated maximum.
    #[error("{bytes} B of data in one PDU exceed the limit")]
    DataLimitExceeded { bytes: u32 },
    /// The LAST flag is set before the end of the transfer or missing at its end.
    #[error("the LAST flag in {flags:#04x} is invalid")]
    LastFlag { flags: u8 },
    /// More R2Ts are open than MAXR2T allows.
    #[error("R2T {tag} exceeds the limit of open transfers")]
    TransferLimit { tag: u16 },
    /// More commands are in flight than the queue has entries.
    #[error("command {command_id} exceeds the queue depth")]
    QueueOverrun { command_id: u16 },
}

impl PduError {
    /// Fatal error status (FES) of the termination request.
    pub fn fatal_error_status(&self) -> FatalErrorStatus {
        use PduError::*;
        match self {
            UnknownPduType { .. }
            | Flags { .. }
            | HeaderLength { .. }
            | DataOffset { .. }
            | PduLength { .. }
            | Alignment { .. }
            | DigestBits { .. }
            | DataLimit { .. }
            | CommandId { .. }
            | TransferTag { .. }
            | LastFlag { .. }
            | QueueOverrun { .. } => FatalErrorStatus::InvalidHeaderField,
            UnexpectedPduType { .. } => FatalErrorStatus::SequenceError,
            HeaderDigest { .. } => FatalErrorStatus::HeaderDigestError,
            DataRange { .. } => FatalErrorStatus::DataOutOfRange,
            DataLimitExceeded { .. } | TransferLimit { .. } => FatalErrorStatus::LimitExceeded,
            FormatVersion { .. } => FatalErrorStatus::UnsupportedParameter,
        }
    }

    /// Fatal error information (FEI): the offset of the invalid field in the header, in bytes, or the
    /// received header digest.
    pub fn fatal_error_information(&self) -> u32 {
        use PduError::*;
        match *self {
            UnknownPduType { .. } | UnexpectedPduType { .. } => 0,
            Flags { .. } | LastFlag { .. } => 1,
            HeaderLength { .. } => 2,
            DataOffset { .. } => 3,
            PduLength { .. } => 4,
            HeaderDigest { received, .. } => received,
            FormatVersion { .. } | CommandId { .. } => 8,
            QueueOverrun { .. } | Alignment { .. } | TransferTag { .. } | TransferLimit { .. } => 10,
            DigestBits { .. } => 11,
            DataRange { .. } | DataLimit { .. } => 12,
            DataLimitExceeded { .. } => 16,
        }
    }
}
