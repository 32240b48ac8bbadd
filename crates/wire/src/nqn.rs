//! NVMe qualified names (NQN) of hosts and subsystems (NVMe Base 2.1, 4.7).
//!
//! An NQN has at most 223 bytes of UTF-8 and begins with `nqn.`. Its field has 256 bytes, zero padded.

/// Maximum length of an NQN, in bytes.
pub const NQN_BYTES_MAX: usize = 223;
/// Length of an NQN field, in bytes.
pub const NQN_FIELD_BYTES: usize = 256;
/// The well-known NQN of every discovery subsystem.
pub const DISCOVERY: &str = "nqn.2014-08.org.nvmexpress.discovery";

/// Reason for the rejection of an NQN.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidNqn {
    /// The name is empty.
    #[error("the name is empty")]
    Empty,
    /// The name is longer than [`NQN_BYTES_MAX`].
    #[error("the name has {bytes} B, the maximum is {NQN_BYTES_MAX}")]
    TooLong {
        /// Length of the name, in bytes.
        bytes: usize,
    },
    /// The name is not UTF-8, or has a control character or white space.
    #[error("the name has characters that are not printable UTF-8")]
    Characters,
    /// The name does not have the form `nqn.YYYY-MM.NAME`.
    #[error("the name does not have the form nqn.YYYY-MM.DOMAIN:NAME")]
    Format,
}

/// Checks the format of an NQN.
///
/// # Errors
/// [`InvalidNqn`]: the first violated rule.
pub fn check(name: &str) -> Result<&str, InvalidNqn> {
    if name.is_empty() {
        return Err(InvalidNqn::Empty);
    }
    if name.len() > NQN_BYTES_MAX {
        return Err(InvalidNqn::TooLong { bytes: name.len() });
    }
    if name.chars().any(|c| c.is_control() || c.is_whitespace()) {
        return Err(InvalidNqn::Characters);
    }
    let rest = name.strip_prefix("nqn.").ok_or(InvalidNqn::Format)?.as_bytes();
    let dated = rest.len() > 8
        && rest[..8].iter().enumerate().all(|(index, byte)| match index {
            4 => *byte == b'-',
            7 => *byte == b'.',
            _ => byte.is_ascii_digit(),
        });
    if dated { Ok(name) } else { Err(InvalidNqn::Format) }
}

/// Decodes a zero-terminated NQN field. Bytes after the first zero are ignored.
///
/// # Errors
/// [`InvalidNqn`]: the first violated rule.
pub fn decode(field: &[u8; NQN_FIELD_BYTES]) -> Result<&str, InvalidNqn> {
    let end = field.iter().position(|&b| b == 0).unwrap_or(field.len());
    check(std::str::from_utf8(&field[..end]).map_err(|_| InvalidNqn::Characters)?)
}

/// Encodes an NQN field, the name cut at [`NQN_BYTES_MAX`] bytes.
pub fn encode(name: &str) -> [u8; NQN_FIELD_BYTES] {
    let mut field = [0; NQN_FIELD_BYTES];
    let bytes = &name.as_bytes()[..name.len().min(NQN_BYTES_MAX)];
    field[..bytes.len()].copy_from_slice(bytes);
    field
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_accepted_or_rejected_with_the_reason() {
        let long = format!("nqn.2014-08.org.example:{}", "x".repeat(200));
        let table: &[(&str, Result<(), InvalidNqn>)] = &[
            (DISCOVERY, Ok(())),
            ("nqn.2014-08.org.nvmexpress:uuid:36ebf5a9-1df9-47b3-a6d0-e9ba32e428a2", Ok(())),
            ("nqn.2026-11.io.octokv:node", Ok(())),
            ("", Err(InvalidNqn::Empty)),
            ("iqn.2026-11.io.octokv:node", Err(InvalidNqn::Format)),
            ("nqn.2026-11.", Err(InvalidNqn::Format)),
            ("nqn.octokv", Err(InvalidNqn::Format)),
            ("nqn.2026-11.io octokv", Err(InvalidNqn::Characters)),
            (&long, Err(InvalidNqn::TooLong { bytes: 224 })),
        ];
        for (name, want) in table {
            assert_eq!(check(name).map(|_| ()), *want, "{name}");
            if want.is_ok() {
                assert_eq!(decode(&encode(name)), Ok(*name));
            }
        }
        assert_eq!(decode(&[0xff; 256]), Err(InvalidNqn::Characters));
    }
}
