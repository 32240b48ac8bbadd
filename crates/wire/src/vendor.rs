//! octokv's vendor commands: keys of more than 16 bytes, and how a controller announces them.
//!
//! The low two bits of each opcode say which way its data goes, so that a kernel's passthrough carries it.
//! The whole specification is in `docs/PROTOCOL.md`.
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

/// Opcodes.
pub mod opcode {
    /// Store, long key.
    pub const STORE: u8 = 0x81;
    /// Retrieve, long key.
    pub const RETRIEVE: u8 = 0x83;
    /// List, long keys.
    pub const LIST: u8 = 0x87;
    /// Delete, long key.
    pub const DELETE: u8 = 0x91;
    /// Exist, long key.
    pub const EXIST: u8 = 0x95;
    /// Iterator create.
    pub const ITERATOR_CREATE: u8 = 0xa1;
    /// Iterator next.
    pub const ITERATOR_NEXT: u8 = 0xa2;
    /// Iterator seek.
    pub const ITERATOR_SEEK: u8 = 0xa5;
    /// Iterator destroy.
    pub const ITERATOR_DESTROY: u8 = 0xa8;
}

/// The version of the extension that this is.
pub const VERSION: u16 = 1;
/// Feature bit: commands with long keys (81h, 83h, 87h, 91h, 95h).
pub const FEATURE_LONG_KEYS: u32 = 1 << 0;
/// Feature bit: iterators (A1h, A2h, A5h, A8h).
pub const FEATURE_ITERATORS: u32 = 1 << 1;
/// Where the announcement is in the Identify Controller page.
pub const VENDOR_CAPABILITIES_OFFSET: usize = 3072;
/// Bytes of the announcement.
pub const VENDOR_CAPABILITIES_BYTES: usize = 16;
const MAGIC: [u8; 4] = *b"OKV1";

/// What a controller says of the extension.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VendorCapabilities {
    /// Version, now 1. A client uses what it knows of a higher one by the feature bits.
    pub version: u16,
    /// The longest key, in bytes.
    pub key_bytes_max: u16,
    /// Feature bits.
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
    /// The bytes for offset 3072 of Identify Controller.
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

    /// What these bytes announce, or `None` where they are another vendor's.
    pub fn decode(bytes: &[u8; VENDOR_CAPABILITIES_BYTES]) -> Option<VendorCapabilities> {
        let layout: VendorCapabilitiesLayout = zerocopy::transmute!(*bytes);
        (layout.magic == MAGIC && layout.version.get() >= 1).then(|| VendorCapabilities {
            version: layout.version.get(),
            key_bytes_max: layout.key_bytes_max.get(),
            features: layout.features.get(),
        })
    }
}

/// A command with a long key. The key itself is in the command's data: its first `key_bytes` bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VendorCommand {
    /// Store: the data is the key, then the value.
    Store {
        /// How.
        options: StoreOptions,
        /// Length of the key, in bytes.
        key_bytes: u16,
        /// Length of the value, in bytes.
        value_bytes: u32,
    },
    /// Retrieve: the key is in the capsule, the value goes back. DW0 is its full length.
    Retrieve {
        /// Length of the key, in bytes.
        key_bytes: u16,
        /// The most bytes that the host takes.
        limit_bytes: u32,
    },
    /// List from a key on: the key is in the capsule, the list goes back.
    List {
        /// Length of the start key, in bytes; 0 for the beginning.
        key_bytes: u16,
        /// The host's buffer, in bytes.
        limit_bytes: u32,
    },
    /// Delete.
    Delete {
        /// Length of the key, in bytes.
        key_bytes: u16,
    },
    /// Exist. DW0 is the value's length.
    Exist {
        /// Length of the key, in bytes.
        key_bytes: u16,
    },
}

impl VendorCommand {
    /// The command of an entry.
    ///
    /// # Errors
    /// [`Status::INVALID_OPCODE`], or [`Status::KV_INVALID_KEY_SIZE`] when the key is empty or longer
    /// than [`KEY_BYTES_MAX`] (a namespace may allow less), or [`Status::INVALID_FIELD`].
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

    /// Bytes that the host sends: the key, and a Store's value.
    pub fn host_data_bytes(&self) -> u64 {
        match *self {
            VendorCommand::Store { key_bytes, value_bytes, .. } => {
                u64::from(key_bytes) + u64::from(value_bytes)
            }
            other => u64::from(other.key_bytes()),
        }
    }

    /// The opcode.
    pub fn opcode(&self) -> u8 {
        match self {
            VendorCommand::Store { .. } => opcode::STORE,
            VendorCommand::Retrieve { .. } => opcode::RETRIEVE,
            VendorCommand::List { .. } => opcode::LIST,
            VendorCommand::Delete { .. } => opcode::DELETE,
            VendorCommand::Exist { .. } => opcode::EXIST,
        }
    }

    /// The entry for this command, its data pointer left empty.
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
    fn keys_out_of_range_get_their_status() {
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
