//! Submission and completion queue entries and the values of their fields (NVMe Base 2.1, 3.3.3 and 4.1).
//!
//! ```text
//! SQE  0 opcode  1 flags  2 CID  4 NSID  8 CDW2  12 CDW3  16 MPTR  24 DPTR (one SGL)  40 CDW10 … 60 CDW15
//! CQE  0 DW0  4 DW1  8 SQHD  10 SQID  12 CID  14 status (bit 0 phase, unused in Fabrics)
//! ```
//! Every bit pattern is a valid entry; the module of each command checks its fields.

use crate::status::Status;
use octokv_base::NamespaceId;
use zerocopy::byteorder::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Length of a submission queue entry, in bytes.
pub const SQE_BYTES: usize = 64;
/// Length of a completion queue entry, in bytes.
pub const CQE_BYTES: usize = 16;

/// Opcodes of admin commands.
pub mod admin {
    /// Get Log Page.
    pub const GET_LOG_PAGE: u8 = 0x02;
    /// Identify.
    pub const IDENTIFY: u8 = 0x06;
    /// Abort.
    pub const ABORT: u8 = 0x08;
    /// Set Features.
    pub const SET_FEATURES: u8 = 0x09;
    /// Get Features.
    pub const GET_FEATURES: u8 = 0x0a;
    /// Asynchronous Event Request.
    pub const ASYNC_EVENT_REQUEST: u8 = 0x0c;
    /// Keep Alive.
    pub const KEEP_ALIVE: u8 = 0x18;
}

/// The opcode of every Fabrics command, on any queue.
pub const FABRICS_OPCODE: u8 = 0x7f;

/// Command set identifiers.
pub mod csi {
    /// The NVM command set.
    pub const NVM: u8 = 0;
    /// The Key Value command set.
    pub const KEY_VALUE: u8 = 1;
}

/// Feature identifiers of Set and Get Features.
pub mod feature {
    /// Arbitration.
    pub const ARBITRATION: u8 = 0x01;
    /// Power management.
    pub const POWER_MANAGEMENT: u8 = 0x02;
    /// Temperature threshold.
    pub const TEMPERATURE: u8 = 0x04;
    /// Error recovery.
    pub const ERROR_RECOVERY: u8 = 0x05;
    /// Volatile write cache.
    pub const WRITE_CACHE: u8 = 0x06;
    /// Number of queues: CDW11 bits 15:0 submission, bits 31:16 completion, 0's based; the same in DW0.
    pub const QUEUES: u8 = 0x07;
    /// Write atomicity.
    pub const WRITE_ATOMICITY: u8 = 0x0a;
    /// Asynchronous event configuration, bits of [`super::event`].
    pub const ASYNC_EVENTS: u8 = 0x0b;
    /// Keep alive timer, in milliseconds.
    pub const KEEP_ALIVE: u8 = 0x0f;
    /// Host behaviour support.
    pub const HOST_BEHAVIOR: u8 = 0x16;
    /// I/O command set profile.
    pub const COMMAND_SET_PROFILE: u8 = 0x19;
    /// KV configuration: CDW11 bit 0 makes Delete of a missing key fail.
    pub const KV_CONFIGURATION: u8 = 0x20;
    /// Host identifier.
    pub const HOST_IDENTIFIER: u8 = 0x81;
    /// Device tokens, vendor specific: CDW11 bit 0 asks for free tokens in DW1 of completions.
    pub const DEVICE_TOKENS: u8 = 0xc0;
}

/// Asynchronous events: DW0 of a completed event request, and the bits that enable notices.
pub mod event {
    /// Notice bit (OAES, feature 0Bh): namespace attribute changed.
    pub const NAMESPACE_CHANGED_BIT: u32 = 1 << 8;
    /// Notice bit: asymmetric namespace access changed.
    pub const ANA_CHANGED_BIT: u32 = 1 << 11;
    /// Notice bit: discovery log changed.
    pub const DISCOVERY_CHANGED_BIT: u32 = 1 << 31;
    /// DW0: namespace attribute changed, read log 04h.
    pub const NAMESPACE_CHANGED: u32 = completion_dw0(2, 0x00, 0x04);
    /// DW0: asymmetric namespace access changed, read log 0Ch.
    pub const ANA_CHANGED: u32 = completion_dw0(2, 0x03, 0x0c);
    /// DW0: discovery log changed, read log 70h.
    pub const DISCOVERY_CHANGED: u32 = completion_dw0(2, 0xf0, 0x70);
    /// DW0: reliability degraded, or the media read only; read log 02h.
    pub const RELIABILITY: u32 = completion_dw0(1, 0x00, 0x02);
    /// DW0: spare capacity below its threshold, read log 02h.
    pub const SPARE_LOW: u32 = completion_dw0(1, 0x02, 0x02);
    /// DW0: keep alive timeout or another error, read log 01h.
    pub const ERROR: u32 = completion_dw0(0, 0x03, 0x01);

    /// DW0 of an event of this type (0 error, 1 health, 2 notice, 7 vendor), information and log page.
    pub const fn completion_dw0(kind: u8, information: u8, log: u8) -> u32 {
        kind as u32 | (information as u32) << 8 | (log as u32) << 16
    }
}

/// Data transfer direction, encoded in bits 1:0 of every opcode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DataDirection {
    /// No data.
    None,
    /// From host to controller.
    ToController,
    /// From controller to host.
    ToHost,
    /// In both directions.
    Both,
}

impl DataDirection {
    /// The direction of an opcode. For Fabrics commands pass the Fabrics command type.
    pub const fn from_opcode(opcode: u8) -> DataDirection {
        match opcode & 3 {
            0 => DataDirection::None,
            1 => DataDirection::ToController,
            2 => DataDirection::ToHost,
            _ => DataDirection::Both,
        }
    }
}

/// Submission queue entry.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct Sqe {
    /// Opcode (OPC); bits 1:0 are the [`DataDirection`].
    pub opcode: u8,
    /// Fused operation bits 1:0, PRP or SGL bits 7:6 (01b for Fabrics).
    pub flags: u8,
    /// Command identifier (CID).
    pub command_id: U16,
    /// Namespace identifier; 0 none, FFFFFFFFh all. Byte 4 of a Fabrics command is its type.
    pub nsid: U32,
    /// Command dword 2.
    pub cdw2: U32,
    /// Command dword 3.
    pub cdw3: U32,
    /// Metadata pointer; octokv ignores it.
    pub metadata: U64,
    /// Data pointer: one SGL descriptor.
    pub sgl: Sgl,
    /// Command dword 10.
    pub cdw10: U32,
    /// Command dword 11.
    pub cdw11: U32,
    /// Command dword 12.
    pub cdw12: U32,
    /// Command dword 13.
    pub cdw13: U32,
    /// Command dword 14.
    pub cdw14: U32,
    /// Command dword 15.
    pub cdw15: U32,
}
const _: () = assert!(size_of::<Sqe>() == SQE_BYTES);

/// SQE flags of a command that uses an SGL, as every command over Fabrics does.
pub const SGL_FLAGS: u8 = 0x40;

impl Sqe {
    /// An entry with this opcode, an SGL without data and all other fields zero.
    pub fn new(opcode: u8, command_id: u16) -> Sqe {
        let mut sqe: Sqe = zerocopy::FromZeros::new_zeroed();
        sqe.opcode = opcode;
        sqe.flags = SGL_FLAGS;
        sqe.command_id = U16::new(command_id);
        sqe.sgl = Sgl::transport(0);
        sqe
    }

    /// Decodes 64 bytes.
    pub fn from_bytes(bytes: &[u8; SQE_BYTES]) -> Sqe {
        zerocopy::transmute!(*bytes)
    }

    /// Command identifier.
    pub fn command_id(&self) -> u16 {
        self.command_id.get()
    }

    /// Namespace identifier, 0 and FFFFFFFFh included.
    pub fn namespace(&self) -> NamespaceId {
        NamespaceId(self.nsid.get())
    }
}

impl std::fmt::Debug for Sqe {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Sqe(opcode {:02x}h, id {}, nsid {:x}h)", self.opcode, self.command_id, self.nsid)
    }
}

/// Completion queue entry.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct Cqe {
    /// Dword 0: the command's result.
    pub dw0: U32,
    /// Dword 1: upper half of a 64-bit result.
    pub dw1: U32,
    /// Submission queue head pointer (SQHD).
    pub sq_head: U16,
    /// Submission queue identifier; 0 in Fabrics.
    pub sq_id: U16,
    /// Identifier of the completed command.
    pub command_id: U16,
    /// Status field, the phase tag included.
    pub status: U16,
}
const _: () = assert!(size_of::<Cqe>() == CQE_BYTES);

impl Cqe {
    /// A completion of `command_id`.
    pub fn new(command_id: u16, sq_head: u16, status: Status, dw0: u32, dw1: u32) -> Cqe {
        Cqe {
            dw0: U32::new(dw0),
            dw1: U32::new(dw1),
            sq_head: U16::new(sq_head),
            sq_id: U16::new(0),
            command_id: U16::new(command_id),
            status: U16::new(status.to_field()),
        }
    }

    /// Decodes 16 bytes.
    pub fn from_bytes(bytes: &[u8; CQE_BYTES]) -> Cqe {
        zerocopy::transmute!(*bytes)
    }

    /// Status without the phase tag.
    pub fn status(&self) -> Status {
        Status::from_field(self.status.get())
    }
}

/// Dword 1 of the completion of an I/O command: room for admission tokens, and flags of the command. A C2HData PDU whose
/// flag SUCCESS stands for the response has no dword 1, so a target that uses either never sets that flag.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CompletionDw1 {
    /// Bits 31:16: tokens granted to the host; 0 until a target grants any.
    pub tokens: u16,
    /// Bits 15:0: flags whose meaning the command defines; 0 for commands that define none.
    pub flags: u16,
}

impl CompletionDw1 {
    /// Decodes the dword.
    pub fn from_bits(bits: u32) -> CompletionDw1 {
        CompletionDw1 { tokens: (bits >> 16) as u16, flags: bits as u16 }
    }

    /// Encodes the dword.
    pub fn to_bits(self) -> u32 {
        u32::from(self.tokens) << 16 | u32::from(self.flags)
    }
}

impl std::fmt::Debug for Cqe {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Cqe(id {}, {:?}, {:x}h {:x}h)", self.command_id, self.status(), self.dw0, self.dw1)
    }
}

/// An unchecked SGL descriptor; [`Sgl::check`] returns its kind.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Sgl {
    address: U64,
    bytes: U32,
    reserved: [u8; 3],
    kind: u8,
}
const _: () = assert!(size_of::<Sgl>() == 16);

/// Location of a command's data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SglKind {
    /// No data.
    None,
    /// In the capsule, after the entry.
    InCapsule {
        /// Length of the data, in bytes.
        bytes: u32,
    },
    /// In data PDUs.
    Transport {
        /// Length of the data, in bytes.
        bytes: u32,
    },
}

impl SglKind {
    /// Length of the data, in bytes.
    pub fn bytes(self) -> u32 {
        match self {
            SglKind::None => 0,
            SglKind::InCapsule { bytes } | SglKind::Transport { bytes } => bytes,
        }
    }
}

const SGL_IN_CAPSULE: u8 = 0x01;
const SGL_TRANSPORT: u8 = 0x5a;
// SPDK's host and others send a keyless data block descriptor with no address and no length for "no data".
const SGL_DATA_BLOCK: u8 = 0x00;

impl Sgl {
    /// A descriptor of data in the capsule.
    pub fn in_capsule(bytes: u32) -> Sgl {
        Sgl { address: U64::new(0), bytes: U32::new(bytes), reserved: [0; 3], kind: SGL_IN_CAPSULE }
    }

    /// A descriptor of data in data PDUs.
    pub fn transport(bytes: u32) -> Sgl {
        Sgl { address: U64::new(0), bytes: U32::new(bytes), reserved: [0; 3], kind: SGL_TRANSPORT }
    }

    /// The location of the data.
    ///
    /// # Errors
    /// The status that fails the command: [`Status::INVALID_SGL_TYPE`], or [`Status::INVALID_SGL_OFFSET`] for
    /// an offset into the capsule other than 0.
    #[inline]
    pub fn check(&self) -> Result<SglKind, Status> {
        let bytes = self.bytes.get();
        match self.kind {
            SGL_TRANSPORT | SGL_IN_CAPSULE | SGL_DATA_BLOCK if bytes == 0 => Ok(SglKind::None),
            SGL_TRANSPORT => Ok(SglKind::Transport { bytes }),
            SGL_IN_CAPSULE if self.address.get() == 0 => Ok(SglKind::InCapsule { bytes }),
            SGL_IN_CAPSULE => Err(Status::INVALID_SGL_OFFSET.do_not_retry()),
            _ => Err(Status::INVALID_SGL_TYPE.do_not_retry()),
        }
    }

    /// Descriptor type byte and length, unchecked.
    pub fn raw(&self) -> (u8, u32) {
        (self.kind, self.bytes.get())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use octokv_base::Prng;

    #[test]
    fn an_sqe_has_its_fields_where_the_specification_puts_them() {
        let mut sqe = Sqe::new(0x02, 0x1234);
        sqe.nsid = U32::new(0x0a0b_0c0d);
        sqe.cdw2 = U32::new(2);
        sqe.sgl = Sgl::in_capsule(0x55);
        sqe.cdw10 = U32::new(10);
        sqe.cdw15 = U32::new(15);
        let bytes = sqe.as_bytes();
        assert_eq!(bytes[..8], [0x02, 0x40, 0x34, 0x12, 0x0d, 0x0c, 0x0b, 0x0a]);
        assert_eq!((bytes[8], bytes[32], bytes[39], bytes[40], bytes[60]), (2, 0x55, 0x01, 10, 15));
        assert_eq!(Sqe::from_bytes(bytes.try_into().unwrap()), sqe);
    }

    #[test]
    fn a_cqe_has_its_fields_where_the_specification_puts_them() {
        let cqe = Cqe::new(7, 9, Status::KV_KEY_EXISTS, 1, 2);
        assert_eq!(cqe.as_bytes(), [1, 0, 0, 0, 2, 0, 0, 0, 9, 0, 0, 0, 7, 0, 0x12, 1]);
        assert_eq!(Cqe::from_bytes(cqe.as_bytes().try_into().unwrap()).status(), Status::KV_KEY_EXISTS);
    }

    #[test]
    fn sgl_descriptors_say_where_the_data_is() {
        assert_eq!(Sgl::in_capsule(5).check(), Ok(SglKind::InCapsule { bytes: 5 }));
        assert_eq!(Sgl::transport(6).check(), Ok(SglKind::Transport { bytes: 6 }));
        assert_eq!(Sgl::transport(0).check(), Ok(SglKind::None));
        assert_eq!(Sgl::new_zeroed().check(), Ok(SglKind::None));
        let mut keyed = Sgl::transport(6);
        keyed.kind = 0x40;
        assert!(keyed.check().unwrap_err().is(Status::INVALID_SGL_TYPE));
        let mut offset = Sgl::in_capsule(6);
        offset.address = U64::new(8);
        assert!(offset.check().unwrap_err().is(Status::INVALID_SGL_OFFSET));
    }

    #[test]
    fn any_bytes_decode_to_an_entry_that_prints() {
        let mut random = Prng::new(1);
        for _ in 0..10_000 {
            let mut bytes = [0; SQE_BYTES];
            random.fill(&mut bytes);
            let sqe = Sqe::from_bytes(&bytes);
            let _ = (sqe.sgl.check(), format!("{sqe:?}"), sqe.namespace());
            let cqe = Cqe::from_bytes(bytes.first_chunk().unwrap());
            let _ = format!("{cqe:?}");
        }
    }

    use zerocopy::FromZeros;
}
