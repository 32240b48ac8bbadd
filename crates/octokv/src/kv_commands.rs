//! The client commands `put`, `get`, `delete`, `exist` and `list`; what `scan` shares with them.
//!
//! Keys and values on the command line are bytes, or hexadecimal with `--hex`. A value is written unmodified; a listed
//! key is a line in an unambiguous format, see [`display_key`].

use crate::cli::{DeleteArgs, ExistArgs, GetArgs, KeyFormatArgs, ListArgs, PutArgs, UrlArgs};
use crate::exit_status::{CliError, CliResult};
use anyhow::{Context, anyhow};
use octokv_base::Key;
use octokv_client::StoreMode;
use octokv_client::blocking::BlockingClient;
use std::ffi::OsStr;
use std::io::{BufWriter, Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// Begins a key in hexadecimal.
pub(crate) const HEX_PREFIX: &str = "0x";
/// Keys per request of `list`.
const LIST_PAGE_KEYS: usize = 4096;

/// Runs `octokv put`.
///
/// # Errors
/// An unreachable node, a failed operation, or the key's (non-)existence with `--add-only` and `--update-only`.
pub fn put(put: &PutArgs) -> CliResult {
    let key = parse_bytes(&put.key, put.key_format, "key")?;
    let value = match (&put.value, &put.file) {
        (Some(value), _) => parse_bytes(value, put.key_format, "value")?,
        (None, Some(file)) => read_value_file(file)?,
        (None, None) => return Err(CliError::Usage("a value or --file is required".to_owned())),
    };
    let mode = match (put.add_only, put.update_only) {
        (true, _) => StoreMode::AddOnly,
        (false, true) => StoreMode::UpdateOnly,
        (false, false) => StoreMode::Upsert,
    };
    let client = connect(&put.url_args)?;
    if client.put_with(&key, &value, mode).map_err(|error| operation_error("put", &key, error))? {
        return Ok(());
    }
    match mode {
        StoreMode::UpdateOnly => Err(not_found(&key)),
        StoreMode::AddOnly | StoreMode::Upsert => {
            Err(anyhow!("key {} exists already; its value is unchanged", display_key(&key)).into())
        }
    }
}

/// Runs `octokv get`.
///
/// # Errors
/// A missing key, an unreachable node, or a failed operation.
pub fn get(get: &GetArgs) -> CliResult {
    let key = parse_bytes(&get.key, get.key_format, "key")?;
    let value = connect(&get.url_args)?.get(&key).map_err(|error| operation_error("get", &key, error))?;
    let value = value.ok_or_else(|| not_found(&key))?;
    let mut out = std::io::stdout().lock();
    out.write_all(&value)?;
    Ok(out.flush()?)
}

/// Runs `octokv delete`.
///
/// # Errors
/// A missing key, an unreachable node, or a failed operation.
pub fn delete(delete: &DeleteArgs) -> CliResult {
    let key = parse_bytes(&delete.key, delete.key_format, "key")?;
    let client = connect(&delete.url_args)?;
    // By default a Delete command does not report whether the key existed.
    let known = client.exist(&key).map_err(|error| operation_error("delete", &key, error))?.is_some();
    let deleted = known && client.delete(&key).map_err(|error| operation_error("delete", &key, error))?;
    if deleted { Ok(()) } else { Err(not_found(&key)) }
}

/// Runs `octokv exist`.
///
/// # Errors
/// A missing key, an unreachable node, or a failed operation.
pub fn exist(exist: &ExistArgs) -> CliResult {
    let key = parse_bytes(&exist.key, exist.key_format, "key")?;
    let length =
        connect(&exist.url_args)?.exist(&key).map_err(|error| operation_error("exist", &key, error))?;
    let length = length.ok_or_else(|| not_found(&key))?;
    Ok(writeln!(std::io::stdout(), "{length}")?)
}

/// Runs `octokv list`.
///
/// # Errors
/// An unreachable node, or a failed operation.
pub fn list(list: &ListArgs) -> CliResult {
    let start =
        list.start.as_deref().map_or(Ok(Vec::new()), |key| parse_bytes(key, list.key_format, "key"))?;
    let client = connect(&list.url_args)?;
    let mut out = BufWriter::new(std::io::stdout().lock());
    let (mut left, mut from, mut first) = (list.limit.unwrap_or(usize::MAX), start, true);
    while left > 0 {
        // A page after the first begins with the last key of the previous one.
        let page = left.saturating_add(usize::from(!first)).min(LIST_PAGE_KEYS);
        let keys = client.list(&from, page).map_err(|error| operation_error("list", &from, error))?;
        let whole = keys.len() == page;
        let known = usize::from(!first && keys.first() == Some(&from));
        let fresh = &keys[known..];
        for key in fresh.iter().take(left) {
            print_key(&mut out, key, list.key_format)?;
        }
        left = left.saturating_sub(fresh.len());
        match fresh.last() {
            Some(last) if whole => from.clone_from(last),
            _ => break,
        }
        first = false;
    }
    Ok(out.flush()?)
}

/// Prints the line of a key.
///
/// # Errors
/// A failed write.
pub(crate) fn print_key(out: &mut impl Write, key: &[u8], format: KeyFormatArgs) -> std::io::Result<()> {
    if format.hex {
        return writeln!(out, "{}", hex(key));
    }
    writeln!(out, "{}", display_key(key))
}

/// Two hexadecimal digits per byte.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A key as unambiguous text: itself if all characters are printable and it does not begin with `0x`, else `0x` and two
/// hexadecimal digits per byte.
pub fn display_key(key: &[u8]) -> String {
    match Key::new(key) {
        // As text it would read like the hexadecimal form of another key.
        Some(_) if key.starts_with(HEX_PREFIX.as_bytes()) => format!("{HEX_PREFIX}{}", hex(key)),
        Some(key) => key.to_string(),
        None => format!("of {} bytes", key.len()),
    }
}

/// Connects to a node.
///
/// # Errors
/// An unreachable node, or one without the subsystem or the namespace.
pub(crate) fn connect(at: &UrlArgs) -> Result<BlockingClient, CliError> {
    let client = BlockingClient::connect(&at.url.to_string());
    Ok(client.map_err(|error| anyhow!("{error} (--url {})", at.url))?)
}

fn operation_error(what: &str, key: &[u8], error: octokv_client::Error) -> CliError {
    CliError::Failed(anyhow!("{what} {}: {error}", display_key(key)))
}

fn not_found(key: &[u8]) -> CliError {
    CliError::KeyNotFound(format!("key {} does not exist", display_key(key)))
}

fn read_value_file(file: &Path) -> Result<Vec<u8>, CliError> {
    if file == Path::new("-") {
        let mut value = Vec::new();
        std::io::stdin().lock().read_to_end(&mut value).context("standard input")?;
        return Ok(value);
    }
    Ok(std::fs::read(file).with_context(|| format!("value file {}", file.display()))?)
}

/// The bytes of an argument; `what` names it.
///
/// # Errors
/// With `--hex`, text that is not hexadecimal.
pub(crate) fn parse_bytes(argument: &OsStr, format: KeyFormatArgs, what: &str) -> Result<Vec<u8>, CliError> {
    let bytes = argument.as_bytes();
    if !format.hex {
        return Ok(bytes.to_vec());
    }
    let digits = bytes.strip_prefix(HEX_PREFIX.as_bytes()).unwrap_or(bytes);
    let bad = || {
        CliError::Usage(format!("the {what} {} is not hexadecimal (two digits a byte)", argument.display()))
    };
    let pairs = digits.chunks_exact(2);
    if !pairs.remainder().is_empty() {
        return Err(bad());
    }
    let digit = |byte: u8| char::from(byte).to_digit(16);
    let byte = |pair: &[u8]| Some((digit(pair[0])? << 4 | digit(pair[1])?) as u8);
    pairs.map(byte).collect::<Option<Vec<u8>>>().ok_or_else(bad)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_are_bytes_or_hexadecimal() {
        let (plain, hex) = (KeyFormatArgs { hex: false }, KeyFormatArgs { hex: true });
        let table = [
            ("k\u{e9}", plain, Some("k\u{e9}".as_bytes().to_vec())),
            ("00fF", hex, Some(vec![0, 255])),
            ("0x10", hex, Some(vec![16])),
            ("", hex, Some(vec![])),
            ("123", hex, None),
            ("zz", hex, None),
        ];
        for (text, form, want) in table {
            assert_eq!(parse_bytes(OsStr::new(text), form, "key").ok(), want, "{text}");
        }
    }

    #[test]
    fn keys_are_shown_as_text_only_if_that_is_unambiguous() {
        assert_eq!(display_key(b"hello"), "hello");
        assert_eq!(display_key(b"two words"), "0x74776f20776f726473");
        assert_eq!(display_key(&[7]), "0x07");
        assert_eq!(display_key(b"0x07"), "0x30783037");
        assert_eq!(display_key(b"0x"), "0x3078");
        assert_eq!(display_key(b"x0x07"), "x0x07");
        assert_eq!(display_key(b"0X07"), "0X07");
    }
}
