//! What a peer can do wrong with a PDU: facts, and the words of a termination request for them.
//!
//! Any of these ends the connection: the receiver sends H2CTermReq or C2HTermReq with [`PduError::fatal`]
//! and [`PduError::information`], then closes (NVMe TCP Transport 1.1, 3.6.2.3).

/// Fatal error status (FES) of a termination request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub enum FatalErrorStatus {
    /// A header field holds what it must not.
    InvalidHeaderField = 1,
    /// A PDU that may not come now.
    SequenceError = 2,
    /// The header digest is wrong.
    HeaderDigestError = 3,
    /// Data outside what was asked for.
    DataOutOfRange = 4,
    /// More R2Ts, or more data, at once than the limit that was agreed on.
    LimitExceeded = 5,
    /// A parameter that this end does not support.
    UnsupportedParameter = 6,
}

/// One thing that a peer did wrong. Integers are the values that came.
#[allow(missing_docs)] // The fields are named for what they are in the PDU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PduError {
    /// No such PDU type.
    UnknownPduType { kind: u8 },
    /// A PDU type that this end never receives, or not in this state.
    UnexpectedPduType { kind: u8 },
    /// Flags that do not fit the type or the digests agreed on.
    Flags { flags: u8 },
    /// The header length does not fit the type.
    HeaderLength { header_bytes: u8 },
    /// The data offset points into the header, beyond the PDU, or is not aligned.
    DataOffset { data_offset: u8 },
    /// The PDU length does not fit its header and data, or exceeds what this end takes.
    PduLength { pdu_bytes: u32 },
    /// The header digest is not that of the header.
    HeaderDigest { received: u32, computed: u32 },
    /// A PDU format version other than 0.
    FormatVersion { version: u16 },
    /// A data alignment that is out of range.
    Alignment { alignment: u8 },
    /// Digest bits that are reserved.
    DigestBits { bits: u8 },
    /// A maximum data length below 4096 or not a multiple of 4.
    DataLimit { bytes: u32 },
    /// A command identifier that names no command that waits for this.
    CommandId { command_id: u16 },
    /// A transfer tag that names no transfer (or data that nobody asked for).
    TransferTag { tag: u16 },
    /// Data that begins elsewhere than where the last ended, or ends beyond what was asked for.
    DataRange { offset: u32, bytes: u32 },
    /// More data in one PDU than agreed on.
    DataLimitExceeded { bytes: u32 },
    /// The LAST flag where data is missing, or no LAST flag at its end.
    LastFlag { flags: u8 },
    /// More R2Ts at once than this end allows.
    TransferLimit { tag: u16 },
    /// More commands at once than the queue holds.
    QueueOverrun { command_id: u16 },
}

impl PduError {
    /// The status that a termination request gives.
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

    /// The fatal error information (FEI): the offset of the bad field in the header, in bytes, or the
    /// digest that came.
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
