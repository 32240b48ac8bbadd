//! octokv's vendor commands: keys of more than 16 bytes, and how a controller reports that it supports them.
//!
//! The low two bits of each opcode give its data direction, so that the Linux passthrough interface supports it.
//! `docs/PROTOCOL.md` has the whole specification.
//!
//! ```text
//! Identify Controller 3072  "OKV1"  3076 version u16  3078 key_bytes_max u16  3080 features u32  3084 0
//! 81h data out = key | value   CDW10 value bytes   CDW11 [15:0] key bytes, [23:16] Store options
//! 83h in capsule = key, data in = value            CDW10 buffer bytes   CDW11 [15:0] key bytes
//! 91h, 95h data out = key                          CDW11 [15:0] key bytes
//! 87h in capsule = key, data in = list             CDW10 buffer bytes   CDW11 [15:0] key bytes
//! ```

use crate::kv::{StoreMode, StoreOptions};
use crate::queue_entry::Sqe;
use crate::status::Status;
use octokv_base::{KEY_BYTES_MAX, NamespaceId};
use zerocopy::byteorder::little_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Opcodes of the vendor commands.
pub mod opcode {
    /// Store with a long key.
    pub const STORE: u8 = 0x81;
    /// Retrieve with a long key.
    pub const RETRIEVE: u8 = 0x83;
    /// List with long keys.
    pub const LIST: u8 = 0x87;
    /// Delete with a long key.
    pub const DELETE: u8 = 0x91;
    /// Exist with a long key.
    pub const EXIST: u8 = 0x95;
    /// Creates an iterator.
    pub const ITERATOR_CREATE: u8 = 0xa1;
    /// Reads the next entries of an iterator.
    pub const ITERATOR_NEXT: u8 = 0xa2;
    /// Moves an iterator.
    pub const ITERATOR_SEEK: u8 = 0xa5;
    /// Destroys an iterator.
    pub const ITERATOR_DESTROY: u8 = 0xa8;
}

/// Version of the extension.
pub const VERSION: u16 = 1;
/// Feature bit: commands with long keys (81h, 83h, 87h, 91h, 95h).
pub const FEATURE_LONG_KEYS: u32 = 1 << 0;
/// Feature bit: iterators (A1h, A2h, A5h, A8h).
pub const FEATURE_ITERATORS: u32 = 1 << 1;
/// Feature bit: commands between nodes ([`super::cluster`]) and the partition log.
pub const FEATURE_CLUSTER: u32 = 1 << 2;
/// Feature bit: device tokens (feature C0h) and the device log (C1h).
pub const FEATURE_DEVICE_TOKENS: u32 = 1 << 3;
/// Offset of the capabilities in the Identify Controller page, in bytes.
pub const VENDOR_CAPABILITIES_OFFSET: usize = 3072;
/// Length of the capabilities, in bytes.
pub const VENDOR_CAPABILITIES_BYTES: usize = 16;
const MAGIC: [u8; 4] = *b"OKV1";

/// The vendor capabilities that a controller reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VendorCapabilities {
    /// Version, currently 1. Of a higher version a client uses the features whose bits it knows.
    pub version: u16,
    /// Maximum key length, in bytes.
    pub key_bytes_max: u16,
    /// Feature bits: [`FEATURE_LONG_KEYS`], [`FEATURE_ITERATORS`], [`FEATURE_CLUSTER`], [`FEATURE_DEVICE_TOKENS`].
    pub features: u32,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone, Copy)]
#[repr(C)]
struct VendorCapabilitiesLayout {
    magic: [u8; 4],
    version: U16,
    key_bytes_max: U16,
    features: U32,
    reserved: U32,
}
const _: () = assert!(size_of::<VendorCapabilitiesLayout>() == VENDOR_CAPABILITIES_BYTES);

impl VendorCapabilities {
    /// Encodes the bytes at offset 3072 of Identify Controller.
    pub fn encode(&self) -> [u8; VENDOR_CAPABILITIES_BYTES] {
        let layout = VendorCapabilitiesLayout {
            magic: MAGIC,
            version: U16::new(self.version),
            key_bytes_max: U16::new(self.key_bytes_max),
            features: U32::new(self.features),
            reserved: U32::new(0),
        };
        zerocopy::transmute!(layout)
    }

    /// Decodes the bytes at offset 3072 of Identify Controller; `None` if another vendor uses them.
    pub fn decode(bytes: &[u8; VENDOR_CAPABILITIES_BYTES]) -> Option<VendorCapabilities> {
        let layout: VendorCapabilitiesLayout = zerocopy::transmute!(*bytes);
        (layout.magic == MAGIC && layout.version.get() >= 1).then(|| VendorCapabilities {
            version: layout.version.get(),
            key_bytes_max: layout.key_bytes_max.get(),
            features: layout.features.get(),
        })
    }
}

/// A command with a long key. The first `key_bytes` bytes of the command's data are the key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VendorCommand {
    /// Stores a value. The data is the key, then the value.
    Store {
        /// Condition on the key, and whether the value may be compressed.
        options: StoreOptions,
        /// Length of the key, in bytes.
        key_bytes: u16,
        /// Length of the value, in bytes.
        value_bytes: u32,
    },
    /// Reads a value into the host's buffer; the key is in the capsule. DW0 is the value's full length.
    Retrieve {
        /// Length of the key, in bytes.
        key_bytes: u16,
        /// Size of the host's buffer, in bytes.
        limit_bytes: u32,
    },
    /// Lists keys into the host's buffer; the start key is in the capsule.
    List {
        /// Length of the start key, in bytes; 0 for the beginning.
        key_bytes: u16,
        /// Size of the host's buffer, in bytes.
        limit_bytes: u32,
    },
    /// Deletes a key.
    Delete {
        /// Length of the key, in bytes.
        key_bytes: u16,
    },
    /// Tests whether a key exists. DW0 is the value's length.
    Exist {
        /// Length of the key, in bytes.
        key_bytes: u16,
    },
}

impl VendorCommand {
    /// Decodes an entry.
    ///
    /// # Errors
    /// [`Status::INVALID_OPCODE`]; [`Status::KV_INVALID_KEY_SIZE`] if the key is empty or longer than
    /// [`KEY_BYTES_MAX`] (a namespace may allow less); or [`Status::INVALID_FIELD`].
    pub fn check(sqe: &Sqe) -> Result<VendorCommand, Status> {
        let (bytes, cdw11) = (sqe.cdw10.get(), sqe.cdw11.get());
        let key_bytes = cdw11 as u16;
        let command = match sqe.opcode {
            opcode::STORE => VendorCommand::Store {
                options: StoreOptions::check((cdw11 >> 16) as u8)?,
                key_bytes,
                value_bytes: bytes,
            },
            opcode::RETRIEVE => VendorCommand::Retrieve { key_bytes, limit_bytes: bytes },
            opcode::LIST => VendorCommand::List { key_bytes, limit_bytes: bytes },
            opcode::DELETE => VendorCommand::Delete { key_bytes },
            opcode::EXIST => VendorCommand::Exist { key_bytes },
            _ => return Err(Status::INVALID_OPCODE.do_not_retry()),
        };
        let may_be_empty = matches!(command, VendorCommand::List { .. });
        if usize::from(key_bytes) > KEY_BYTES_MAX || (key_bytes == 0 && !may_be_empty) {
            return Err(Status::KV_INVALID_KEY_SIZE.do_not_retry());
        }
        Ok(command)
    }

    /// Length of the key, in bytes.
    pub fn key_bytes(&self) -> u16 {
        match *self {
            VendorCommand::Store { key_bytes, .. }
            | VendorCommand::Retrieve { key_bytes, .. }
            | VendorCommand::List { key_bytes, .. }
            | VendorCommand::Delete { key_bytes }
            | VendorCommand::Exist { key_bytes } => key_bytes,
        }
    }

    /// Length of the data that the host sends, in bytes: the key, and a Store's value.
    pub fn host_data_bytes(&self) -> u64 {
        match *self {
            VendorCommand::Store { key_bytes, value_bytes, .. } => {
                u64::from(key_bytes) + u64::from(value_bytes)
            }
            other => u64::from(other.key_bytes()),
        }
    }

    /// Opcode of this command.
    pub fn opcode(&self) -> u8 {
        match self {
            VendorCommand::Store { .. } => opcode::STORE,
            VendorCommand::Retrieve { .. } => opcode::RETRIEVE,
            VendorCommand::List { .. } => opcode::LIST,
            VendorCommand::Delete { .. } => opcode::DELETE,
            VendorCommand::Exist { .. } => opcode::EXIST,
        }
    }

    /// Encodes the entry of this command, its data pointer left empty.
    pub fn encode(&self, command_id: u16, namespace: NamespaceId) -> Sqe {
        let mut sqe = Sqe::new(self.opcode(), command_id);
        sqe.nsid = U32::new(namespace.0);
        let (bytes, options) = match *self {
            VendorCommand::Store { options, value_bytes, .. } => (value_bytes, options.to_bits()),
            VendorCommand::Retrieve { limit_bytes, .. } | VendorCommand::List { limit_bytes, .. } => {
                (limit_bytes, 0)
            }
            VendorCommand::Delete { .. } | VendorCommand::Exist { .. } => (0, 0),
        };
        sqe.cdw10 = U32::new(bytes);
        sqe.cdw11 = U32::new(u32::from(self.key_bytes()) | u32::from(options) << 16);
        sqe
    }
}

/// A Store of this mode with no other options.
pub fn store_options(mode: StoreMode) -> StoreOptions {
    StoreOptions { mode, do_not_compress: false }
}

#[cfg(test)]
mod tests {
    use super::*;
    use octokv_base::Prng;

    #[test]
    fn vendor_capabilities_have_the_specified_bytes() {
        let capabilities =
            VendorCapabilities { version: VERSION, key_bytes_max: 1024, features: FEATURE_LONG_KEYS };
        let bytes = capabilities.encode();
        assert_eq!(bytes, *b"OKV1\x01\0\0\x04\x01\0\0\0\0\0\0\0");
        assert_eq!(VendorCapabilities::decode(&bytes), Some(capabilities));
        assert_eq!(VendorCapabilities::decode(&[0; 16]), None);
    }

    #[test]
    fn commands_round_trip() {
        let commands = [
            VendorCommand::Store {
                options: store_options(StoreMode::AddOnly),
                key_bytes: 1024,
                value_bytes: 1 << 21,
            },
            VendorCommand::Retrieve { key_bytes: 17, limit_bytes: 5 },
            VendorCommand::List { key_bytes: 0, limit_bytes: 5 },
            VendorCommand::Delete { key_bytes: 1 },
            VendorCommand::Exist { key_bytes: 100 },
        ];
        for command in commands {
            assert_eq!(VendorCommand::check(&command.encode(1, NamespaceId(1))), Ok(command));
        }
        assert_eq!(commands[0].encode(1, NamespaceId(1)).cdw11.get(), 0x0002_0400);
        assert_eq!(commands[0].host_data_bytes(), 1024 + (1 << 21));
    }

    #[test]
    fn key_lengths_out_of_range_fail_with_their_status() {
        for key_bytes in [0, 1025, u16::MAX] {
            let sqe = VendorCommand::Exist { key_bytes }.encode(1, NamespaceId(1));
            assert!(VendorCommand::check(&sqe).unwrap_err().is(Status::KV_INVALID_KEY_SIZE));
        }
        let iterator = Sqe::new(opcode::ITERATOR_CREATE, 1);
        assert!(VendorCommand::check(&iterator).unwrap_err().is(Status::INVALID_OPCODE));
    }

    #[test]
    fn random_entries_never_panic() {
        let mut random = Prng::new(3);
        for _ in 0..20_000 {
            let mut bytes = [0; 64];
            random.fill(&mut bytes);
            bytes[0] = bytes[0] & 0x17 | 0x81;
            if let Ok(command) = VendorCommand::check(&Sqe::from_bytes(&bytes)) {
                let _ = command.host_data_bytes();
            }
        }
    }
}
