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
#[allow(missing_docs)] // The fields are named for what they are in the PDU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PduError {
    /// The PDU type is not defined.
    UnknownPduType { kind: u8 },
    /// The PDU type is never valid for this receiver, or not in its current state.
    UnexpectedPduType { kind: u8 },
    /// The flags do not match the PDU type or the negotiated digests.
    Flags { flags: u8 },
    /// The header length is not that of the PDU type.
    HeaderLength { header_bytes: u8 },
    /// The data offset lies inside the header, beyond the PDU, or is not aligned.
    DataOffset { data_offset: u8 },
    /// The PDU length does not match its header and data, or exceeds the receiver's maximum.
    PduLength { pdu_bytes: u32 },
    /// The header digest does not match the header.
    HeaderDigest { received: u32, computed: u32 },
    /// The PDU format version is not 0.
    FormatVersion { version: u16 },
    /// The data alignment (HPDA or CPDA) is out of range.
    Alignment { alignment: u8 },
    /// Reserved digest bits are set.
    DigestBits { bits: u8 },
    /// The maximum data length is below 4096 or not a multiple of 4.
    DataLimit { bytes: u32 },
    /// The command identifier names no command that expects this PDU.
    CommandId { command_id: u16 },
    /// The transfer tag names no open transfer.
    TransferTag { tag: u16 },
    /// The data does not continue the transfer, or extends beyond its range.
    DataRange { offset: u32, bytes: u32 },
    /// One data PDU carries more than the negotiated maximum.
    DataLimitExceeded { bytes: u32 },
    /// The LAST flag is set before the end of the transfer or missing at its end.
    LastFlag { flags: u8 },
    /// More R2Ts are open than MAXR2T allows.
    TransferLimit { tag: u16 },
    /// More commands are in flight than the queue has entries.
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

impl std::fmt::Display for PduError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        use PduError::*;
        match self {
            UnknownPduType { kind } => write!(f, "PDU type {kind:#04x} is not known"),
            UnexpectedPduType { kind } => write!(f, "PDU type {kind:#04x} may not come now"),
            Flags { flags } => write!(f, "PDU flags {flags:#04x} do not fit"),
            HeaderLength { header_bytes } => {
                write!(f, "a PDU header of {header_bytes} B does not fit its type")
            }
            DataOffset { data_offset } => write!(f, "PDU data offset {data_offset} is out of place"),
            PduLength { pdu_bytes } => write!(f, "a PDU of {pdu_bytes} B does not fit"),
            HeaderDigest { received, computed } => {
                write!(f, "header digest {received:#010x}, but the header has {computed:#010x}")
            }
            FormatVersion { version } => write!(f, "PDU format version {version} is not supported"),
            Alignment { alignment } => write!(f, "PDU data alignment {alignment} is out of range"),
            DigestBits { bits } => write!(f, "digest bits {bits:#04x} are reserved"),
            DataLimit { bytes } => write!(f, "a maximum data length of {bytes} B is out of range"),
            CommandId { command_id } => write!(f, "no command {command_id} waits for this"),
            TransferTag { tag } => write!(f, "no transfer {tag} waits for this"),
            DataRange { offset, bytes } => write!(f, "{bytes} B of data at {offset} were not asked for"),
            DataLimitExceeded { bytes } => write!(f, "{bytes} B in one data PDU exceed the limit"),
            LastFlag { flags } => write!(f, "the LAST flag of {flags:#04x} is out of place"),
            TransferLimit { tag } => write!(f, "R2T {tag} exceeds the limit of open transfers"),
            QueueOverrun { command_id } => write!(f, "command {command_id} exceeds the queue's depth"),
        }
    }
}

impl std::error::Error for PduError {}
