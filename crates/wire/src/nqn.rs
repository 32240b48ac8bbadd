//! NVMe qualified names: of hosts and subsystems (NVMe Base 2.1, 4.7).
//!
//! At most 223 bytes of UTF-8, `nqn.` first, in a 256-byte field that zeros fill up.

/// The longest name, in bytes.
pub const NQN_BYTES_MAX: usize = 223;
/// Bytes of the field that carries a name.
pub const NQN_FIELD_BYTES: usize = 256;
/// The well-known name of every discovery subsystem.
pub const DISCOVERY: &str = "nqn.2014-08.org.nvmexpress.discovery";

/// Why a name is none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InvalidNqn {
    /// Empty.
    Empty,
    /// Longer than [`NQN_BYTES_MAX`].
    TooLong {
        /// How long, in bytes.
        bytes: usize,
    },
    /// Not UTF-8, or a control character or white space in it.
    Characters,
    /// It does not begin as `nqn.YYYY-MM.` and go on.
    Format,
}

impl std::fmt::Display for InvalidNqn {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            InvalidNqn::Empty => f.write_str("the name is empty"),
            InvalidNqn::TooLong { bytes } => {
                write!(f, "the name has {bytes} B, at most {NQN_BYTES_MAX} are possible")
            }
            InvalidNqn::Characters => f.write_str("the name has characters that are not printable UTF-8"),
            InvalidNqn::Format => f.write_str("the name does not have the form nqn.YYYY-MM.DOMAIN:NAME"),
        }
    }
}

impl std::error::Error for InvalidNqn {}

/// `name`, if it has the form of an NQN.
///
/// # Errors
/// Why not.
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

/// The name in a zero-terminated field. What follows the first zero is not looked at.
///
/// # Errors
/// Why there is none.
pub fn decode(field: &[u8; NQN_FIELD_BYTES]) -> Result<&str, InvalidNqn> {
    let end = field.iter().position(|&b| b == 0).unwrap_or(field.len());
    check(std::str::from_utf8(&field[..end]).map_err(|_| InvalidNqn::Characters)?)
}

/// The field of a name, cut at [`NQN_BYTES_MAX`] bytes.
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
    fn names_are_accepted_or_refused_for_a_reason() {
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
