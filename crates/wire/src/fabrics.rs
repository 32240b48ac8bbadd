//! Fabrics commands: Connect, properties, Disconnect (NVMe Base 2.1, 6; opcode 7Fh).
//!
//! ```text
//! SQE          0 7Fh  4 type  24 SGL  then by type
//! Connect      40 format u16  42 queue u16  44 entries-1 u16  46 attributes u8  48 KATO ms u32
//! Connect data 0 host id [16]  16 controller id u16  256 subsystem NQN [256]  512 host NQN [256]   1024 B
//! Property     40 size (0: 4 B, 1: 8 B)  44 offset u32  48 value u64 (Set)
//! ```

use crate::nqn;
use crate::queue_entry::{FABRICS_OPCODE, Sgl, Sqe};
use crate::status::Status;
use zerocopy::byteorder::little_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Fabrics command types.
pub mod fctype {
    /// Property Set.
    pub const PROPERTY_SET: u8 = 0x00;
    /// Connect.
    pub const CONNECT: u8 = 0x01;
    /// Property Get.
    pub const PROPERTY_GET: u8 = 0x04;
    /// Authentication Send.
    pub const AUTHENTICATION_SEND: u8 = 0x05;
    /// Authentication Receive.
    pub const AUTHENTICATION_RECEIVE: u8 = 0x06;
    /// Disconnect.
    pub const DISCONNECT: u8 = 0x08;
}

/// Offsets of controller properties.
pub mod property {
    /// Controller capabilities, 8 B.
    pub const CAP: u32 = 0x00;
    /// Version, 4 B.
    pub const VS: u32 = 0x08;
    /// Controller configuration, 4 B.
    pub const CC: u32 = 0x14;
    /// Controller status, 4 B.
    pub const CSTS: u32 = 0x1c;
    /// NVM subsystem reset, 4 B.
    pub const NSSR: u32 = 0x20;
    /// Controller ready timeouts, 4 B.
    pub const CRTO: u32 = 0x68;
}

/// Length of the data of Connect, in bytes.
pub const CONNECT_DATA_BYTES: usize = 1024;
/// Controller id of a Connect that requests a new controller.
pub const NEW_CONTROLLER: u16 = 0xffff;

/// The fields of Controller Capabilities (CAP) that octokv uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ControllerCapabilities {
    /// Maximum number of entries of a queue (MQES), 2 to 65536.
    pub queue_entries_max: u32,
    /// Maximum time until CSTS.RDY, in units of 500 ms.
    pub ready_timeout_half_seconds: u8,
    /// Whether the NVM command set is supported.
    pub nvm: bool,
    /// Whether CC.CSS = 110b selects all supported I/O command sets.
    pub command_sets: bool,
}

impl ControllerCapabilities {
    /// Encodes the property's value.
    pub fn encode(&self) -> u64 {
        let entries = u64::from(self.queue_entries_max.clamp(2, 65536) - 1);
        let contiguous = 1 << 16;
        let timeout = u64::from(self.ready_timeout_half_seconds) << 24;
        let nvm = if self.nvm { 1 << 37 } else { 0 };
        let sets = if self.command_sets { 1 << 43 } else { 0 };
        entries | contiguous | timeout | nvm | sets
    }

    /// Decodes the property's value.
    pub fn decode(cap: u64) -> ControllerCapabilities {
        ControllerCapabilities {
            queue_entries_max: (cap & 0xffff) as u32 + 1,
            ready_timeout_half_seconds: (cap >> 24) as u8,
            nvm: cap & (1 << 37) != 0,
            command_sets: cap & (1 << 43) != 0,
        }
    }
}

/// Controller configuration (CC). Every value is valid.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ControllerConfiguration(pub u32);

impl ControllerConfiguration {
    /// Enabled, all supported I/O command sets, 4 KiB pages, entry sizes 64 and 16 B.
    pub const ENABLED: ControllerConfiguration = ControllerConfiguration(1 | 0b110 << 4 | 6 << 16 | 4 << 20);
    /// Enabled, NVM command set only, as hosts set it on a discovery controller.
    pub const ENABLED_NVM: ControllerConfiguration = ControllerConfiguration(1 | 6 << 16 | 4 << 20);

    /// Enable bit (EN).
    pub fn is_enabled(self) -> bool {
        self.0 & 1 != 0
    }
    /// I/O command set selected (CSS): 000b NVM, 110b all supported I/O command sets, 111b admin only.
    pub fn command_set(self) -> u8 {
        (self.0 >> 4) as u8 & 7
    }
    /// Memory page size (MPS): 2^(12 + this) bytes.
    pub fn mps(self) -> u8 {
        (self.0 >> 7) as u8 & 15
    }
    /// Shutdown notification (SHN): 0 none, 1 normal, 2 abrupt shutdown.
    pub fn shn(self) -> u8 {
        (self.0 >> 14) as u8 & 3
    }
    /// The same configuration with a normal shutdown notification.
    pub fn with_shutdown(self) -> ControllerConfiguration {
        ControllerConfiguration(self.0 & !(3 << 14) | 1 << 14)
    }
}

/// Controller status (CSTS).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ControllerStatus {
    /// Ready (RDY).
    pub ready: bool,
    /// Controller fatal status (CFS).
    pub fatal: bool,
    /// Shutdown status (SHST): 0 none, 1 in progress, 2 complete.
    pub shutdown: u8,
}

impl ControllerStatus {
    /// Encodes the property's value.
    pub fn encode(self) -> u32 {
        u32::from(self.ready) | u32::from(self.fatal) << 1 | u32::from(self.shutdown & 3) << 2
    }
    /// Decodes the property's value.
    pub fn decode(csts: u32) -> ControllerStatus {
        ControllerStatus { ready: csts & 1 != 0, fatal: csts & 2 != 0, shutdown: (csts >> 2) as u8 & 3 }
    }
}

/// One Fabrics command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FabricsCommand {
    /// Connects a queue.
    Connect(Connect),
    /// Reads a property.
    PropertyGet {
        /// Offset of the property, in bytes.
        offset: u32,
        /// Whether the property has eight bytes instead of four.
        is_64_bit: bool,
    },
    /// Writes a property.
    PropertySet {
        /// Offset of the property, in bytes.
        offset: u32,
        /// Whether the property has eight bytes instead of four.
        is_64_bit: bool,
        /// New value of the property.
        value: u64,
    },
    /// Disconnects an I/O queue.
    Disconnect,
    /// Authentication Send; not supported by octokv.
    AuthenticationSend,
    /// Authentication Receive; not supported by octokv.
    AuthenticationReceive,
}

/// The fields of Connect; its data is a [`ConnectData`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Connect {
    /// Record format: 0.
    pub format: u16,
    /// Queue identifier: 0 for the admin queue.
    pub queue_id: u16,
    /// Entries of the submission queue: at least 1 as encoded (a queue has at least 2).
    pub entries: u32,
    /// Attributes: bit 2 disables submission queue flow control.
    pub attributes: u8,
    /// Keep alive timeout (KATO), in milliseconds; admin queue only.
    pub keep_alive_ms: u32,
}

/// Attribute bit of Connect that disables submission queue flow control.
pub const ATTRIBUTE_NO_FLOW_CONTROL: u8 = 1 << 2;

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone, Copy)]
#[repr(C)]
struct ConnectLayout {
    format: U16,
    queue_id: U16,
    entries: U16,
    attributes: u8,
    reserved: u8,
    keep_alive_ms: U32,
    rest: [u8; 12],
}
const _: () = assert!(size_of::<ConnectLayout>() == 24);

impl FabricsCommand {
    /// Decodes an entry whose opcode is [`FABRICS_OPCODE`].
    ///
    /// # Errors
    /// [`Status::INVALID_OPCODE`] for an unknown type, [`Status::INVALID_FIELD`] for an invalid property
    /// size.
    pub fn check(sqe: &Sqe) -> Result<FabricsCommand, Status> {
        let wide = || match sqe.cdw10.get() & 7 {
            0 => Ok(false),
            1 => Ok(true),
            _ => Err(Status::INVALID_FIELD.do_not_retry()),
        };
        let offset = sqe.cdw11.get();
        Ok(match sqe.nsid.get() as u8 {
            fctype::CONNECT => FabricsCommand::Connect(Connect::from_sqe(sqe)),
            fctype::PROPERTY_GET => FabricsCommand::PropertyGet { offset, is_64_bit: wide()? },
            fctype::PROPERTY_SET => {
                let value = u64::from(sqe.cdw12.get()) | u64::from(sqe.cdw13.get()) << 32;
                FabricsCommand::PropertySet { offset, is_64_bit: wide()?, value }
            }
            fctype::DISCONNECT => FabricsCommand::Disconnect,
            fctype::AUTHENTICATION_SEND => FabricsCommand::AuthenticationSend,
            fctype::AUTHENTICATION_RECEIVE => FabricsCommand::AuthenticationReceive,
            _ => return Err(Status::INVALID_OPCODE.do_not_retry()),
        })
    }

    /// Encodes the entry of this command. The SGL of a Connect describes its data in the capsule.
    pub fn encode(&self, command_id: u16) -> Sqe {
        let mut sqe = Sqe::new(FABRICS_OPCODE, command_id);
        let kind = match *self {
            FabricsCommand::Connect(connect) => {
                connect.write_to(&mut sqe);
                sqe.sgl = Sgl::in_capsule(CONNECT_DATA_BYTES as u32);
                fctype::CONNECT
            }
            FabricsCommand::PropertyGet { offset, is_64_bit: wide } => {
                sqe.cdw10 = U32::new(u32::from(wide));
                sqe.cdw11 = U32::new(offset);
                fctype::PROPERTY_GET
            }
            FabricsCommand::PropertySet { offset, is_64_bit: wide, value } => {
                sqe.cdw10 = U32::new(u32::from(wide));
                sqe.cdw11 = U32::new(offset);
                sqe.cdw12 = U32::new(value as u32);
                sqe.cdw13 = U32::new((value >> 32) as u32);
                fctype::PROPERTY_SET
            }
            FabricsCommand::Disconnect => fctype::DISCONNECT,
            FabricsCommand::AuthenticationSend => fctype::AUTHENTICATION_SEND,
            FabricsCommand::AuthenticationReceive => fctype::AUTHENTICATION_RECEIVE,
        };
        sqe.nsid = U32::new(u32::from(kind));
        sqe
    }
}

impl Connect {
    fn from_sqe(sqe: &Sqe) -> Connect {
        let bytes: &[u8; 64] = zerocopy::transmute_ref!(sqe);
        let mut tail = [0; 24];
        tail.copy_from_slice(&bytes[40..]);
        let layout: ConnectLayout = zerocopy::transmute!(tail);
        Connect {
            format: layout.format.get(),
            queue_id: layout.queue_id.get(),
            entries: u32::from(layout.entries.get()) + 1,
            attributes: layout.attributes,
            keep_alive_ms: layout.keep_alive_ms.get(),
        }
    }

    fn write_to(&self, sqe: &mut Sqe) {
        let entries = (self.entries.clamp(1, 65536) - 1) as u16;
        sqe.cdw10 = U32::new(u32::from(self.format) | u32::from(self.queue_id) << 16);
        sqe.cdw11 = U32::new(u32::from(entries) | u32::from(self.attributes) << 16);
        sqe.cdw12 = U32::new(self.keep_alive_ms);
    }
}

/// DW0 of a successful Connect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConnectResponse {
    /// Identifier of the controller (CNTLID), for the Connects of its I/O queues.
    pub controller_id: u16,
    /// Whether the host must authenticate before any other command.
    pub authentication_required: bool,
}

impl ConnectResponse {
    /// Encodes DW0.
    pub fn encode(self) -> u32 {
        u32::from(self.controller_id) | if self.authentication_required { 1 << 17 } else { 0 }
    }
    /// Decodes DW0.
    pub fn decode(dw0: u32) -> ConnectResponse {
        ConnectResponse { controller_id: dw0 as u16, authentication_required: dw0 & (3 << 17) != 0 }
    }
}

/// DW0 of a Connect that fails with [`Status::CONNECT_INVALID_PARAMETERS`]: the offset of the invalid field
/// in the entry or in the data, in bytes.
pub fn invalid_parameter_dw0(offset: u16, in_data: bool) -> u32 {
    u32::from(offset) | u32::from(in_data) << 16
}

/// The data of Connect as received.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone, Copy)]
#[repr(C)]
pub struct UncheckedConnectData {
    host_id: [u8; 16],
    controller_id: U16,
    reserved: [u8; 238],
    subsystem: [u8; 256],
    host: [u8; 256],
    rest: [u8; 256],
}
const _: () = assert!(size_of::<UncheckedConnectData>() == CONNECT_DATA_BYTES);

/// The data of Connect: the NQNs of host and subsystem.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConnectData<'a> {
    /// Host identifier (HOSTID), 128 bits.
    pub host_id: [u8; 16],
    /// Controller identifier, or [`NEW_CONTROLLER`].
    pub controller_id: u16,
    /// NQN of the subsystem.
    pub subsystem: &'a str,
    /// NQN of the host; empty if the host sends none, as SPDK's tools do by default. Only a subsystem that
    /// allows any host may accept an empty one.
    pub host: &'a str,
}

/// An invalid NQN in the data of Connect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InvalidConnectNqn {
    /// Offset of the field in the data, in bytes: 256 subsystem, 512 host.
    pub offset: u16,
    /// Reason for the rejection.
    pub reason: nqn::InvalidNqn,
}

impl UncheckedConnectData {
    /// Casts `bytes`; `None` unless they are exactly 1024.
    pub fn new(bytes: &[u8]) -> Option<&UncheckedConnectData> {
        UncheckedConnectData::ref_from_bytes(bytes).ok()
    }

    /// Checks both NQNs.
    ///
    /// # Errors
    /// The invalid NQN. The controller fails the Connect with [`Status::CONNECT_INVALID_PARAMETERS`] and
    /// [`invalid_parameter_dw0`].
    pub fn check(&self) -> Result<ConnectData<'_>, InvalidConnectNqn> {
        Ok(ConnectData {
            host_id: self.host_id,
            controller_id: self.controller_id.get(),
            subsystem: nqn::decode(&self.subsystem)
                .map_err(|why| InvalidConnectNqn { offset: 256, reason: why })?,
            host: match nqn::decode(&self.host) {
                Err(nqn::InvalidNqn::Empty) => "",
                name => name.map_err(|why| InvalidConnectNqn { offset: 512, reason: why })?,
            },
        })
    }
}

impl ConnectData<'_> {
    /// Encodes the 1024 bytes.
    pub fn encode(&self) -> [u8; CONNECT_DATA_BYTES] {
        let data = UncheckedConnectData {
            host_id: self.host_id,
            controller_id: U16::new(self.controller_id),
            reserved: [0; 238],
            subsystem: nqn::encode(self.subsystem),
            host: nqn::encode(self.host),
            rest: [0; 256],
        };
        zerocopy::transmute!(data)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use octokv_base::Prng;

    #[test]
    fn commands_round_trip() {
        let connect = Connect { format: 0, queue_id: 3, entries: 128, attributes: 4, keep_alive_ms: 120_000 };
        let commands = [
            FabricsCommand::Connect(connect),
            FabricsCommand::PropertyGet { offset: property::CAP, is_64_bit: true },
            FabricsCommand::PropertySet { offset: property::CC, is_64_bit: false, value: 0x1_0000_0001 },
            FabricsCommand::Disconnect,
            FabricsCommand::AuthenticationSend,
            FabricsCommand::AuthenticationReceive,
        ];
        for command in commands {
            assert_eq!(FabricsCommand::check(&command.encode(9)), Ok(command));
        }
        let bytes: [u8; 64] = zerocopy::transmute!(commands[0].encode(9));
        assert_eq!(bytes[..5], [0x7f, 0x40, 9, 0, 1]);
        assert_eq!(bytes[40..52], [0, 0, 3, 0, 127, 0, 4, 0, 0xc0, 0xd4, 1, 0]);
    }

    #[test]
    fn connect_data_has_the_specified_offsets() {
        let data = ConnectData {
            host_id: [7; 16],
            controller_id: NEW_CONTROLLER,
            subsystem: "nqn.2026-11.io.octokv:node",
            host: "nqn.2026-11.io.octokv:host",
        };
        let bytes = data.encode();
        assert_eq!(bytes[15..19], [7, 0xff, 0xff, 0]);
        assert!(bytes[256..].starts_with(b"nqn.2026") && bytes[512..].ends_with(&[0; 256]));
        assert_eq!(UncheckedConnectData::new(&bytes).unwrap().check(), Ok(data));
        assert!(UncheckedConnectData::new(&bytes[1..]).is_none());
        let mut bad = bytes;
        bad[256] = b'x';
        let error = UncheckedConnectData::new(&bad).unwrap().check().unwrap_err();
        assert_eq!(error, InvalidConnectNqn { offset: 256, reason: nqn::InvalidNqn::Format });
    }

    #[test]
    fn properties_have_the_specified_bits() {
        let cap = ControllerCapabilities {
            queue_entries_max: 1024,
            ready_timeout_half_seconds: 15,
            nvm: true,
            command_sets: true,
        };
        assert_eq!(cap.encode(), 1023 | 1 << 16 | 15 << 24 | 1 << 37 | 1 << 43);
        assert_eq!(ControllerCapabilities::decode(cap.encode()), cap);
        assert_eq!(ControllerConfiguration::ENABLED.0, 0x0046_0061);
        assert_eq!(ControllerConfiguration::ENABLED.with_shutdown().shn(), 1);
        let status = ControllerStatus { ready: true, fatal: false, shutdown: 2 };
        assert_eq!((status.encode(), ControllerStatus::decode(9)), (9, status));
        let connected = ConnectResponse { controller_id: 5, authentication_required: true };
        assert_eq!(ConnectResponse::decode(connected.encode()), connected);
    }

    #[test]
    fn random_commands_and_data_never_panic() {
        let mut random = Prng::new(4);
        for _ in 0..5_000 {
            let mut bytes = [0; CONNECT_DATA_BYTES];
            random.fill(&mut bytes);
            bytes[4] &= 0xf;
            let _ = FabricsCommand::check(&Sqe::from_bytes(bytes.first_chunk().unwrap()));
            let cut = random.below(1026) as usize;
            let _ = UncheckedConnectData::new(bytes.get(..cut).unwrap_or(&bytes)).map(|d| d.check().is_ok());
        }
    }
}
