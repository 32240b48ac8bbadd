//! Encoding of Key Value commands as queue entries.
//!
//! Keys of up to 16 bytes use the standard commands. Longer keys, and operations without a standard command (the length of a
//! value without the value, long keys in a listing), use octokv's vendor commands if the controller supports them.

use crate::command::{Command, CommandKind, EncodedCommand, Value};
use crate::controller_info::ControllerInfo;
use crate::error::Error;
use octokv_base::{Key, NamespaceId, ShortKey};
use octokv_wire::iterator::{IteratorBounds, IteratorCommand};
use octokv_wire::kv::{self, StoreMode, StoreOptions};
use octokv_wire::vendor;

/// Encodes a command for a Key Value namespace.
pub(crate) fn encode<'a>(
    command: Command<'a>,
    namespace: NamespaceId,
    info: &ControllerInfo,
) -> Result<EncodedCommand<'a>, Error> {
    match command {
        Command::Store { key, value, mode } => encode_store(key, value, mode, namespace, info),
        Command::Retrieve { key, limit_bytes } => {
            let limit_bytes = limit_bytes.min(info.value_bytes_max());
            let kind = CommandKind::Retrieve { limit_bytes };
            let Some(key) = standard_key(&key, info)? else {
                let command = vendor::VendorCommand::Retrieve { key_bytes: key.len() as u16, limit_bytes };
                return Ok(encode_long_key(command, key, kind, limit_bytes, namespace));
            };
            let command = kv::KvCommand::Retrieve { key, limit_bytes };
            Ok(encode_standard(&command, kind, limit_bytes, namespace))
        }
        Command::Delete { key } => {
            let Some(key) = standard_key(&key, info)? else {
                let command = vendor::VendorCommand::Delete { key_bytes: key.len() as u16 };
                return Ok(encode_long_key(command, key, CommandKind::Delete, 0, namespace));
            };
            Ok(encode_standard(&kv::KvCommand::Delete { key }, CommandKind::Delete, 0, namespace))
        }
        Command::Exist { key } => match standard_key(&key, info)? {
            Some(key) if !info.supports_long_keys() => {
                let kind = CommandKind::Exist { returns_length: false };
                Ok(encode_standard(&kv::KvCommand::Exist { key }, kind, 0, namespace))
            }
            _ => {
                let kind = CommandKind::Exist { returns_length: true };
                let command = vendor::VendorCommand::Exist { key_bytes: key.len() as u16 };
                Ok(encode_long_key(command, key, kind, 0, namespace))
            }
        },
        Command::List { start, limit_bytes } => {
            let limit_bytes = limit_bytes.min(info.value_bytes_max());
            if info.supports_long_keys() {
                let key_bytes = start.len() as u16;
                let command = vendor::VendorCommand::List { key_bytes, limit_bytes };
                return Ok(encode_long_key(command, start, CommandKind::List, limit_bytes, namespace));
            }
            let Some(start) = start.as_short() else {
                return Err(Error::KeyLength { have: start.len(), max: kv::KEY_BYTES_MAX });
            };
            let command = kv::KvCommand::List { start, limit_bytes };
            Ok(encode_standard(&command, CommandKind::List, limit_bytes, namespace))
        }
        Command::CreateIterator { lower, upper, reverse, keys_only } => {
            check_iterators(info)?;
            check_bound(&lower, info)?;
            check_bound(&upper, info)?;
            let bounds = IteratorBounds { lower: lower.as_bytes(), upper: upper.as_bytes() }.encode();
            let bounds_bytes = bounds.len() as u16;
            let command = IteratorCommand::Create { bounds_bytes, reverse, keys_only };
            let encoded = encode_iterator(&command, CommandKind::CreateIterator, 0, namespace);
            Ok(EncodedCommand { value: Some(Value::Shared(bounds.into())), ..encoded })
        }
        Command::NextPairs { iterator, limit_bytes, pairs_max } => {
            check_iterators(info)?;
            let limit_bytes = limit_bytes.min(info.pairs_bytes_max());
            let command = IteratorCommand::Next { iterator: iterator.id, limit_bytes, pairs_max };
            Ok(encode_iterator(&command, CommandKind::NextPairs, limit_bytes, namespace))
        }
        Command::SeekIterator { iterator, key } => {
            check_iterators(info)?;
            if key.is_empty() {
                return Err(Error::KeyLength { have: 0, max: info.key_bytes_max() });
            }
            check_bound(&key, info)?;
            let command = IteratorCommand::Seek { iterator: iterator.id, key_bytes: key.len() as u16 };
            let encoded = encode_iterator(&command, CommandKind::ChangeIterator, 0, namespace);
            Ok(EncodedCommand { key: Some(key), ..encoded })
        }
        Command::DestroyIterator { iterator } => {
            let command = IteratorCommand::Destroy { iterator: iterator.id };
            Ok(encode_iterator(&command, CommandKind::ChangeIterator, 0, namespace))
        }
        Command::Flush => Ok(encode_standard(&kv::KvCommand::Flush, CommandKind::Flush, 0, namespace)),
        Command::Read { .. }
        | Command::Write { .. }
        | Command::Compare { .. }
        | Command::WriteZeroes { .. }
        | Command::Deallocate { .. }
        | Command::Verify { .. } => Err(Error::NotBlockNamespace),
    }
}

fn check_iterators(info: &ControllerInfo) -> Result<(), Error> {
    if info.supports_iterators() { Ok(()) } else { Err(Error::NoIterators) }
}

fn check_bound(key: &Key, info: &ControllerInfo) -> Result<(), Error> {
    let (have, max) = (key.len(), info.key_bytes_max());
    if have > max { Err(Error::KeyLength { have, max }) } else { Ok(()) }
}

fn encode_iterator<'a>(
    command: &IteratorCommand,
    kind: CommandKind,
    response_bytes_max: u32,
    namespace: NamespaceId,
) -> EncodedCommand<'a> {
    EncodedCommand::without_data(command.encode(0, namespace), kind, response_bytes_max)
}

/// The key as the standard commands carry it; `None` if it is too long for them.
fn standard_key(key: &Key, info: &ControllerInfo) -> Result<Option<ShortKey>, Error> {
    let (have, max) = (key.len(), info.key_bytes_max());
    if have == 0 || have > max {
        return Err(Error::KeyLength { have, max });
    }
    Ok(key.as_short().filter(|_| have <= info.standard_key_bytes_max()))
}

fn encode_store<'a>(
    key: Key,
    value: Value<'a>,
    mode: StoreMode,
    namespace: NamespaceId,
    info: &ControllerInfo,
) -> Result<EncodedCommand<'a>, Error> {
    let (have, max) = (value.bytes().len() as u64, u64::from(info.value_bytes_max()));
    if have > max {
        return Err(Error::ValueLength { have, max });
    }
    let (value_bytes, options) = (have as u32, StoreOptions { mode, do_not_compress: false });
    let mut encoded = match standard_key(&key, info)? {
        None => {
            let command = vendor::VendorCommand::Store { options, key_bytes: key.len() as u16, value_bytes };
            encode_long_key(command, key, CommandKind::Store, 0, namespace)
        }
        Some(key) => {
            let command = kv::KvCommand::Store { key, options, value_bytes };
            encode_standard(&command, CommandKind::Store, 0, namespace)
        }
    };
    encoded.value = Some(value);
    Ok(encoded)
}

fn encode_standard<'a>(
    command: &kv::KvCommand,
    kind: CommandKind,
    response_bytes_max: u32,
    namespace: NamespaceId,
) -> EncodedCommand<'a> {
    EncodedCommand::without_data(command.encode(0, namespace), kind, response_bytes_max)
}

fn encode_long_key<'a>(
    command: vendor::VendorCommand,
    key: Key,
    kind: CommandKind,
    response_bytes_max: u32,
    namespace: NamespaceId,
) -> EncodedCommand<'a> {
    let key = (!key.is_empty()).then_some(key);
    EncodedCommand {
        key,
        ..EncodedCommand::without_data(command.encode(0, namespace), kind, response_bytes_max)
    }
}
