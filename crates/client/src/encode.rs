//! Encoding of a command for the command set of its namespace.

use crate::block_commands;
use crate::command::{Command, CommandKind, EncodedCommand};
use crate::controller_info::ControllerInfo;
use crate::error::Error;
use crate::kv_commands;
use octokv_base::NamespaceId;
use octokv_wire::nvm;

impl<'a> EncodedCommand<'a> {
    /// Encodes a command for a namespace with these limits.
    ///
    /// # Errors
    /// The violated limit, [`Error::NotKvNamespace`] or [`Error::NotBlockNamespace`].
    pub fn new(
        command: Command<'a>,
        namespace: NamespaceId,
        info: &ControllerInfo,
    ) -> Result<EncodedCommand<'a>, Error> {
        if let Command::Flush = command {
            let sqe = nvm::NvmCommand::Flush.encode(0, namespace);
            return Ok(EncodedCommand::without_data(sqe, CommandKind::Flush, 0));
        }
        match &info.blocks {
            Some(blocks) => block_commands::encode(command, namespace, info, blocks),
            None => kv_commands::encode(command, namespace, info),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command::Value;
    use octokv_base::Key;
    use octokv_wire::kv::{self, StoreMode};
    use octokv_wire::vendor::{self, VendorCapabilities};

    fn key(bytes: usize) -> Key {
        Key::new(&vec![b'k'; bytes]).unwrap()
    }

    fn info(long: Option<u16>) -> ControllerInfo {
        let features = vendor::FEATURE_LONG_KEYS;
        let vendor_capabilities =
            long.map(|key_bytes_max| VendorCapabilities { version: 1, key_bytes_max, features });
        ControllerInfo { vendor_capabilities, ..ControllerInfo::for_tests() }
    }

    #[test]
    fn the_key_length_selects_the_command() {
        let opcode = |command, long| {
            EncodedCommand::new(command, NamespaceId(1), &info(long)).map(|encoded| encoded.sqe.opcode)
        };
        let store = |key| Command::Store { key, value: Value::Slice(b"v"), mode: StoreMode::Upsert };
        assert_eq!(opcode(store(key(16)), Some(1024)), Ok(kv::opcode::STORE));
        assert_eq!(opcode(store(key(17)), Some(1024)), Ok(vendor::opcode::STORE));
        assert_eq!(opcode(store(key(17)), None), Err(Error::KeyLength { have: 17, max: 16 }));
        assert_eq!(opcode(store(key(65)), Some(64)), Err(Error::KeyLength { have: 65, max: 64 }));
        assert_eq!(opcode(store(key(0)), Some(64)), Err(Error::KeyLength { have: 0, max: 64 }));
        assert_eq!(opcode(Command::Exist { key: key(4) }, None), Ok(kv::opcode::EXIST));
        assert_eq!(opcode(Command::Exist { key: key(4) }, Some(64)), Ok(vendor::opcode::EXIST));
        let list = |start| Command::List { start, limit_bytes: 64 };
        assert_eq!(opcode(list(key(0)), None), Ok(kv::opcode::LIST));
        assert_eq!(opcode(list(key(0)), Some(64)), Ok(vendor::opcode::LIST));
    }

    #[test]
    fn a_value_beyond_the_limit_fails_before_it_is_sent() {
        let value = vec![0; info(None).value_bytes_max() as usize + 1];
        let command = Command::Store { key: key(1), value: Value::Slice(&value), mode: StoreMode::Upsert };
        let error = EncodedCommand::new(command, NamespaceId(1), &info(None)).unwrap_err();
        assert!(matches!(error, Error::ValueLength { .. }));
    }
}
