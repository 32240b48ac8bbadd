//! `octokv scan`: the pairs of a range of keys, in order.
//!
//! In: bounds and a direction. Out: on standard output a line for each pair; on standard error what a reader of the lines has to
//! know besides: that pairs from some key on are of a later moment, that a pair could not be read. Lines are written before
//! either.

use crate::cli::{KeyFormatArgs, ScanArgs};
use crate::exit_status::{CliError, CliResult};
use crate::kv_commands::{HEX_PREFIX, connect, display_key, hex, parse_bytes, print_key};
use anyhow::anyhow;
use octokv_client::{BlockingScan, Error, Pair, ScanOptions};
use std::ffi::OsString;
use std::io::{BufWriter, Write};

/// Pairs that cannot be read, one after another, after which a scan ends.
const UNREADABLE_IN_A_ROW_MAX: u64 = 1000;

/// Runs `octokv scan`.
///
/// # Errors
/// Reversed bounds, a namespace whose engine has no order of keys, an unreachable node, a failed operation, or pairs that could
/// not be read, behind which the scan went on.
pub fn scan(scan: &ScanArgs) -> CliResult {
    let bound = |argument: &Option<OsString>| match argument {
        Some(key) => parse_bytes(key, scan.key_format, "key"),
        None => Ok(Vec::new()),
    };
    let (lower, upper) = (bound(&scan.from)?, bound(&scan.to)?);
    if !upper.is_empty() && upper < lower {
        let (from, to) = (display_key(&lower), display_key(&upper));
        return Err(CliError::Usage(format!("--to {to} is below --from {from}")));
    }
    let (reverse, keys_only, batch) = (scan.reverse, scan.keys_only, u64::from(scan.batch));
    let pairs_per_command = scan.limit.map_or(batch, |limit| batch.min(limit)).max(1) as u32;
    let client = connect(&scan.url_args)?;
    let started = client.scan(ScanOptions { lower, upper, reverse, keys_only, pairs_per_command });
    let pairs = started.map_err(|error| scan_error(&error))?;
    print_pairs(pairs, scan, &mut BufWriter::new(std::io::stdout().lock()), &mut std::io::stderr())
}

/// What [`print_pairs`] reads: a [`BlockingScan`], or a double of it.
trait Pairs: Iterator<Item = Result<Pair, Error>> {
    /// The number of snapshots from which pairs came or will come.
    fn snapshots(&self) -> u32;
}

impl Pairs for BlockingScan {
    fn snapshots(&self) -> u32 {
        BlockingScan::snapshots(self)
    }
}

fn print_pairs(
    mut pairs: impl Pairs,
    scan: &ScanArgs,
    out: &mut impl Write,
    messages: &mut impl Write,
) -> CliResult {
    let (mut left, mut snapshots) = (scan.limit.unwrap_or(u64::MAX), pairs.snapshots());
    let (mut unreadable, mut unreadable_in_a_row, mut last_key) = (0, 0, None::<Vec<u8>>);
    while left > 0 {
        let next = pairs.next();
        if pairs.snapshots() != snapshots {
            snapshots = pairs.snapshots();
            out.flush()?;
            let which = match &last_key {
                Some(key) => format!("pairs behind {}", display_key(key)),
                None => "all pairs".to_owned(),
            };
            writeln!(messages, "octokv: scan: the node's iterator was lost; {which} are of a later moment")?;
        }
        match next {
            None => break,
            Some(Ok(pair)) => {
                print_pair(out, &pair, scan)?;
                last_key = Some(pair.key);
                left -= 1;
                unreadable_in_a_row = 0;
            }
            Some(Err(Error::UnrecoveredRead)) if unreadable_in_a_row < UNREADABLE_IN_A_ROW_MAX => {
                (unreadable, unreadable_in_a_row) = (unreadable + 1, unreadable_in_a_row + 1);
            }
            Some(Err(error)) => {
                out.flush()?;
                return Err(scan_error(&error));
            }
        }
    }
    out.flush()?;
    match unreadable {
        0 => Ok(()),
        1 => Err(anyhow!("scan: one pair could not be read back from its device, and is left out").into()),
        _ => Err(anyhow!(
            "scan: {unreadable} pairs could not be read back from their device, and are left out"
        )
        .into()),
    }
}

fn scan_error(error: &Error) -> CliError {
    CliError::Failed(match error {
        Error::NoIterators => anyhow!("scan: {error}; octokv list lists them by hash"),
        _ => anyhow!("scan: {error}"),
    })
}

fn print_pair(out: &mut impl Write, pair: &Pair, scan: &ScanArgs) -> std::io::Result<()> {
    if scan.keys_only {
        return print_key(out, &pair.key, scan.key_format);
    }
    let KeyFormatArgs { hex: is_hex } = scan.key_format;
    match is_hex {
        true => writeln!(out, "{}\t{}", hex(&pair.key), hex(&pair.value)),
        false => {
            write!(out, "{}\t", display_key(&pair.key))?;
            print_value(out, &pair.value)
        }
    }
}

/// Prints a value, as unambiguous text, and ends the line: itself if all of it is printable ASCII or spaces and it does not begin with
/// `0x`, else `0x` and two hexadecimal digits per byte.
fn print_value(out: &mut impl Write, value: &[u8]) -> std::io::Result<()> {
    let is_text = value.iter().all(|&byte| byte == b' ' || byte.is_ascii_graphic());
    if is_text && !value.starts_with(HEX_PREFIX.as_bytes()) {
        out.write_all(value)?;
        return writeln!(out);
    }
    writeln!(out, "{HEX_PREFIX}{}", hex(value))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::{Cli, CliCommand};
    use clap::Parser;

    /// Yields these, each with the number of snapshots from then on.
    struct Script(std::vec::IntoIter<(u32, Result<Pair, Error>)>, u32);

    impl Iterator for Script {
        type Item = Result<Pair, Error>;

        fn next(&mut self) -> Option<Result<Pair, Error>> {
            let (snapshots, item) = self.0.next()?;
            self.1 = snapshots;
            Some(item)
        }
    }

    impl Pairs for Script {
        fn snapshots(&self) -> u32 {
            self.1
        }
    }

    fn pair(key: &[u8], value: &[u8]) -> Result<Pair, Error> {
        Ok(Pair { key: key.to_vec(), value: value.to_vec() })
    }

    /// What a scan with these flags prints, its messages in brackets where they come, and its error.
    fn printed(flags: &[&str], script: Vec<(u32, Result<Pair, Error>)>) -> (String, Option<String>) {
        let parsed = Cli::parse_from(["octokv", "scan"].iter().chain(flags));
        let CliCommand::Scan(scan) = parsed.command else { panic!("not a scan") };
        let (mut out, mut messages) = (Vec::new(), Vec::new());
        let result = print_pairs(Script(script.into_iter(), 1), &scan, &mut out, &mut messages);
        let error = result.err().map(|error| match error {
            CliError::Failed(error) => error.to_string(),
            other => panic!("{other:?}"),
        });
        let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).expect("text");
        (format!("{}{}", text(&out), text(&messages)), error)
    }

    #[test]
    fn a_pair_is_a_line_from_which_its_bytes_can_be_read() {
        let table: [(&[u8], &[u8], &str); 8] = [
            (b"key", b"value", "key\tvalue\n"),
            (b"key", b"", "key\t\n"),
            (b"key", b"two words", "key\ttwo words\n"),
            (b"two words", b"x", "0x74776f20776f726473\tx\n"),
            (b"key", b"a\tb", "key\t0x610962\n"),
            (b"key", b"a\n", "key\t0x610a\n"),
            (b"key", "\u{e9}".as_bytes(), "key\t0xc3a9\n"),
            (b"0x07", b"0x07", "0x30783037\t0x30783037\n"),
        ];
        for (key, value, want) in table {
            assert_eq!(printed(&[], vec![(1, pair(key, value))]), (want.to_owned(), None));
        }
        let script = || vec![(1, pair(b"k", b"v"))];
        assert_eq!(printed(&["--hex"], script()).0, "6b\t76\n");
        assert_eq!(printed(&["--keys-only"], script()).0, "k\n");
        assert_eq!(printed(&["--keys-only", "--hex"], script()).0, "6b\n");
    }

    #[test]
    fn a_scan_ends_at_its_limit_and_says_that_another_snapshot_follows() {
        let script = || vec![(1, pair(b"a", b"1")), (2, pair(b"b", b"2")), (2, pair(b"c", b"3"))];
        let (text, error) = printed(&[], script());
        let message = "octokv: scan: the node's iterator was lost; pairs behind a are of a later moment\n";
        assert_eq!((text, error), (format!("a\t1\nb\t2\nc\t3\n{message}"), None));
        assert_eq!(printed(&["--limit", "1"], script()), ("a\t1\n".to_owned(), None));
        assert_eq!(printed(&["--limit", "0"], script()), (String::new(), None));
    }

    #[test]
    fn a_pair_that_cannot_be_read_fails_the_scan_at_its_end_and_any_other_error_at_once() {
        let unreadable = || (1, Err(Error::UnrecoveredRead));
        let script = vec![(1, pair(b"a", b"1")), unreadable(), (1, pair(b"c", b"3"))];
        let (text, error) = printed(&[], script);
        assert_eq!(text, "a\t1\nc\t3\n");
        assert!(error.expect("it fails").contains("one pair could not be read"));
        let (text, error) =
            printed(&[], vec![(1, pair(b"a", b"1")), (1, Err(Error::Busy)), (1, pair(b"b", b"2"))]);
        assert_eq!((text, error), ("a\t1\n".to_owned(), Some(format!("scan: {}", Error::Busy))));
        // A node that can read nothing ends it.
        let endless = (0..=UNREADABLE_IN_A_ROW_MAX).map(|_| unreadable()).chain([(1, pair(b"z", b""))]);
        let (text, error) = printed(&[], endless.collect());
        assert_eq!((text.as_str(), error), ("", Some(format!("scan: {}", Error::UnrecoveredRead))));
    }
}
