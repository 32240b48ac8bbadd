//! The client's commands: one key each, and the list of all.
//!
//! Keys and values are bytes as they come from the command line, or hexadecimal with `--hex`. A value is
//! written as it is; a key that is printed stands on a line of its own.

use crate::cli::{At, Delete, Exist, Form, Get, List, Put};
use crate::exit_status::{Failure, Outcome};
use anyhow::{Context, anyhow};
use octokv_base::Key;
use octokv_client::StoreMode;
use octokv_client::blocking::Client;
use std::ffi::OsStr;
use std::io::{BufWriter, Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// Keys asked for at a time by `list`.
const PAGE_KEYS: usize = 4096;

/// Runs `octokv put`.
pub fn put(put: &Put) -> Outcome {
    let key = bytes(&put.key, put.form, "key")?;
    let value = match (&put.value, &put.file) {
        (Some(value), _) => bytes(value, put.form, "value")?,
        (None, Some(file)) => read(file)?,
        (None, None) => return Err(Failure::Usage("a value, or --file, is needed".to_owned())),
    };
    let mode = match (put.add_only, put.update_only) {
        (true, _) => StoreMode::AddOnly,
        (false, true) => StoreMode::UpdateOnly,
        (false, false) => StoreMode::Upsert,
    };
    let client = connect(&put.at)?;
    if client.put_with(&key, &value, mode).map_err(|error| failed("put", &key, error))? {
        return Ok(());
    }
    match mode {
        StoreMode::UpdateOnly => Err(missing(&key)),
        StoreMode::AddOnly | StoreMode::Upsert => {
            Err(anyhow!("key {} exists already; its value was left as it is", shown(&key)).into())
        }
    }
}

/// Runs `octokv get`.
pub fn get(get: &Get) -> Outcome {
    let key = bytes(&get.key, get.form, "key")?;
    let value = connect(&get.at)?.get(&key).map_err(|error| failed("get", &key, error))?;
    let value = value.ok_or_else(|| missing(&key))?;
    let mut out = std::io::stdout().lock();
    out.write_all(&value)?;
    Ok(out.flush()?)
}

/// Runs `octokv delete`.
pub fn delete(delete: &Delete) -> Outcome {
    let key = bytes(&delete.key, delete.form, "key")?;
    let client = connect(&delete.at)?;
    // By default a node does not say whether there was anything to delete.
    let known = client.exist(&key).map_err(|error| failed("delete", &key, error))?.is_some();
    let deleted = known && client.delete(&key).map_err(|error| failed("delete", &key, error))?;
    if deleted { Ok(()) } else { Err(missing(&key)) }
}

/// Runs `octokv exist`.
pub fn exist(exist: &Exist) -> Outcome {
    let key = bytes(&exist.key, exist.form, "key")?;
    let length = connect(&exist.at)?.exist(&key).map_err(|error| failed("exist", &key, error))?;
    let length = length.ok_or_else(|| missing(&key))?;
    Ok(writeln!(std::io::stdout(), "{length}")?)
}

/// Runs `octokv list`.
pub fn list(list: &List) -> Outcome {
    let start = list.start.as_deref().map_or(Ok(Vec::new()), |key| bytes(key, list.form, "key"))?;
    let client = connect(&list.at)?;
    let mut out = BufWriter::new(std::io::stdout().lock());
    let (mut left, mut from, mut first) = (list.limit.unwrap_or(usize::MAX), start, true);
    while left > 0 {
        // A page after the first begins with the key that the last one ended with.
        let page = left.saturating_add(usize::from(!first)).min(PAGE_KEYS);
        let keys = client.list(&from, page).map_err(|error| failed("list", &from, error))?;
        let whole = keys.len() == page;
        let known = usize::from(!first && keys.first() == Some(&from));
        let fresh = &keys[known..];
        for key in fresh.iter().take(left) {
            print_key(&mut out, key, list.form)?;
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

fn print_key(out: &mut impl Write, key: &[u8], form: Form) -> std::io::Result<()> {
    if form.hex {
        key.iter().try_for_each(|byte| write!(out, "{byte:02x}"))?;
        return writeln!(out);
    }
    writeln!(out, "{}", shown(key))
}

/// A key for people: text where it is printable, else `0x…`.
pub fn shown(key: &[u8]) -> String {
    match Key::new(key) {
        Some(key) => key.to_string(),
        None => format!("of {} bytes", key.len()),
    }
}

fn connect(at: &At) -> Result<Client, Failure> {
    let client = Client::connect(&at.url.to_string());
    Ok(client.map_err(|error| anyhow!("{error} (--url {})", at.url))?)
}

fn failed(what: &str, key: &[u8], error: octokv_client::Error) -> Failure {
    Failure::Failed(anyhow!("{what} {}: {error}", shown(key)))
}

fn missing(key: &[u8]) -> Failure {
    Failure::Missing(format!("key {} does not exist", shown(key)))
}

fn read(file: &Path) -> Result<Vec<u8>, Failure> {
    if file == Path::new("-") {
        let mut value = Vec::new();
        std::io::stdin().lock().read_to_end(&mut value).context("standard input")?;
        return Ok(value);
    }
    Ok(std::fs::read(file).with_context(|| format!("value file {}", file.display()))?)
}

/// The bytes of an argument.
fn bytes(argument: &OsStr, form: Form, what: &str) -> Result<Vec<u8>, Failure> {
    let bytes = argument.as_bytes();
    if !form.hex {
        return Ok(bytes.to_vec());
    }
    let digits = bytes.strip_prefix(b"0x").unwrap_or(bytes);
    let bad = || {
        Failure::Usage(format!("the {what} {} is not hexadecimal (two digits a byte)", argument.display()))
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
        let (plain, hex) = (Form { hex: false }, Form { hex: true });
        let table = [
            ("k\u{e9}", plain, Some("k\u{e9}".as_bytes().to_vec())),
            ("00fF", hex, Some(vec![0, 255])),
            ("0x10", hex, Some(vec![16])),
            ("", hex, Some(vec![])),
            ("123", hex, None),
            ("zz", hex, None),
        ];
        for (text, form, want) in table {
            assert_eq!(bytes(OsStr::new(text), form, "key").ok(), want, "{text}");
        }
    }

    #[test]
    fn keys_are_shown_as_text_only_where_that_is_readable() {
        assert_eq!(shown(b"hello"), "hello");
        assert_eq!(shown(b"two words"), "0x74776f20776f726473");
        assert_eq!(shown(&[7]), "0x07");
    }
}
