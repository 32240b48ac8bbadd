//! RESP2, the protocol of Redis and Valkey: encodes requests, decodes replies.
//!
//! ```text
//!   request  *3 CRLF $3 CRLF SET CRLF $16 CRLF key CRLF $4096 CRLF value CRLF
//!   reply    +OK CRLF    -ERR why CRLF    :1 CRLF    $4096 CRLF value CRLF    $-1 CRLF
//! ```
//! In: bytes in pieces of any size. Out: replies, in order, each borrowed until the next is taken. Invariants: no input
//! panics; a value is not copied after its receive; a reply is taken whole or not at all.
//! Source: "RESP protocol spec", redis.io/docs/latest/develop/reference/protocol-spec. Arrays are not needed here.

use std::io::Write;
use std::ops::Range;

/// Longest value of a server, in bytes (`proto-max-bulk-len`).
pub const VALUE_BYTES_MAX: usize = 512 << 20;
/// Longest line of a reply to our requests, in bytes.
const LINE_BYTES_MAX: usize = 64 << 10;
/// Smallest receive buffer, in bytes.
const RECEIVE_BYTES_MIN: usize = 64 << 10;

/// A reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RespReply<'a> {
    /// `+`: a simple string such as `OK`.
    Simple(&'a [u8]),
    /// `-`: an error with its message.
    Error(&'a [u8]),
    /// `:`: an integer.
    Integer(i64),
    /// `$`: a value.
    Bulk(&'a [u8]),
    /// `$-1`: no such key.
    Nil,
}

/// Why a reply is malformed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProtocolError {
    /// The first byte is not a known type.
    Type(u8),
    /// A line is empty or too long.
    Line,
    /// A number or length is invalid.
    Number,
    /// A value has no terminator at its length.
    End,
}

/// Why an exchange with a server failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ServerError {
    /// The connection was closed or refused.
    #[error("the connection was closed")]
    Closed,
    /// A reply is malformed.
    #[error("malformed reply ({0:?})")]
    Protocol(ProtocolError),
    /// An error reply with its message.
    #[error("error reply \"{0}\"")]
    ErrorReply(String),
    /// The reply does not match the request.
    #[error("the reply does not match the request")]
    UnexpectedReply,
}

/// Appends `GET key`.
pub fn encode_get(out: &mut Vec<u8>, key: &[u8]) {
    encode_command(out, 2, b"GET", key);
}

/// Appends `DEL key`.
pub fn encode_delete(out: &mut Vec<u8>, key: &[u8]) {
    encode_command(out, 2, b"DEL", key);
}

/// Appends `SET key value`; `fill` writes the value in place.
pub fn encode_set(out: &mut Vec<u8>, key: &[u8], value_bytes: usize, fill: impl FnOnce(&mut [u8])) {
    encode_command(out, 3, b"SET", key);
    encode_length(out, b'$', value_bytes);
    let from = out.len();
    out.resize(from + value_bytes, 0);
    fill(&mut out[from..]);
    out.extend_from_slice(b"\r\n");
}

fn encode_command(out: &mut Vec<u8>, count: usize, name: &[u8], key: &[u8]) {
    encode_length(out, b'*', count);
    for word in [name, key] {
        encode_length(out, b'$', word.len());
        out.extend_from_slice(word);
        out.extend_from_slice(b"\r\n");
    }
}

fn encode_length(out: &mut Vec<u8>, kind: u8, length: usize) {
    out.push(kind);
    // Writing to memory cannot fail.
    let _ = write!(out, "{length}\r\n");
}

/// Decodes replies from received bytes.
#[derive(Default)]
pub struct RespDecoder {
    buffer: Vec<u8>,
    /// Received bytes that are not yet decoded.
    pending: Range<usize>,
    /// Length of the first reply, in bytes; 0 until its first line is received.
    wanted_bytes: usize,
}

impl RespDecoder {
    /// The buffer for the next receive: large enough for the rest of a value whose length is known.
    pub fn receive_buffer(&mut self) -> &mut [u8] {
        if self.pending.is_empty() {
            self.pending = 0..0;
        }
        let wanted = self.wanted_bytes.saturating_sub(self.pending.len()).max(RECEIVE_BYTES_MIN);
        if self.buffer.len() - self.pending.end < wanted && self.pending.start > 0 {
            self.buffer.copy_within(self.pending.clone(), 0);
            self.pending = 0..self.pending.len();
        }
        if self.buffer.len() - self.pending.end < wanted {
            self.buffer.resize(self.pending.end + wanted, 0);
        }
        &mut self.buffer[self.pending.end..]
    }

    /// Adds `bytes` received bytes at the start of [`RespDecoder::receive_buffer`].
    ///
    /// # Panics
    /// If that buffer is shorter.
    pub fn advance(&mut self, bytes: usize) {
        self.pending.end += bytes;
        assert!(self.pending.end <= self.buffer.len(), "the receive exceeds its buffer");
    }

    /// Takes the next reply; `None` if it is incomplete.
    ///
    /// # Errors
    /// If the reply is malformed; the bytes after it cannot be decoded either.
    pub fn take(&mut self) -> Result<Option<RespReply<'_>>, ProtocolError> {
        let pending = &self.buffer[self.pending.clone()];
        if pending.is_empty() || pending.len() < self.wanted_bytes {
            return Ok(None);
        }
        let Some(line) = first_line(pending)? else { return Ok(None) };
        let after_line = line.len() + 2;
        let (kind, rest) = (line[0], 1..line.len());
        let (value, bytes) = match kind {
            b'+' | b'-' | b':' => (rest, after_line),
            b'$' if &line[1..] == b"-1" => (rest, after_line),
            b'$' => {
                let length = usize::try_from(parse_number(&line[1..])?).map_err(|_| ProtocolError::Number)?;
                if length > VALUE_BYTES_MAX {
                    return Err(ProtocolError::Number);
                }
                (after_line..after_line + length, after_line + length + 2)
            }
            other => return Err(ProtocolError::Type(other)),
        };
        if pending.len() < bytes {
            self.wanted_bytes = bytes;
            return Ok(None);
        }
        if &pending[bytes - 2..bytes] != b"\r\n" {
            return Err(ProtocolError::End);
        }
        let value = self.pending.start + value.start..self.pending.start + value.end;
        self.pending.start += bytes;
        self.wanted_bytes = 0;
        let value = &self.buffer[value];
        Ok(Some(match kind {
            b'+' => RespReply::Simple(value),
            b'-' => RespReply::Error(value),
            b':' => RespReply::Integer(parse_number(value)?),
            _ if bytes == after_line => RespReply::Nil,
            _ => RespReply::Bulk(value),
        }))
    }
}

/// The first line without its end; `None` if it is incomplete.
fn first_line(pending: &[u8]) -> Result<Option<&[u8]>, ProtocolError> {
    let scanned = &pending[..pending.len().min(LINE_BYTES_MAX)];
    match scanned.windows(2).position(|pair| pair == b"\r\n") {
        Some(0) => Err(ProtocolError::Line),
        Some(end) => Ok(Some(&pending[..end])),
        None if pending.len() >= LINE_BYTES_MAX => Err(ProtocolError::Line),
        None => Ok(None),
    }
}

fn parse_number(digits: &[u8]) -> Result<i64, ProtocolError> {
    std::str::from_utf8(digits).ok().and_then(|text| text.parse().ok()).ok_or(ProtocolError::Number)
}

#[cfg(test)]
mod tests {
    use super::*;
    use octokv_base::Prng;

    fn feed(decoder: &mut RespDecoder, bytes: &[u8]) {
        decoder.receive_buffer()[..bytes.len()].copy_from_slice(bytes);
        decoder.advance(bytes.len());
    }

    /// All replies in bytes that arrive in pieces of a size, as text.
    fn replies(bytes: &[u8], piece_bytes: usize) -> (Vec<String>, Result<(), ProtocolError>) {
        let (mut decoder, mut found) = (RespDecoder::default(), Vec::new());
        for piece in bytes.chunks(piece_bytes) {
            feed(&mut decoder, piece);
            loop {
                match decoder.take() {
                    Ok(Some(reply)) => found.push(format!("{reply:?}")),
                    Ok(None) => break,
                    Err(error) => return (found, Err(error)),
                }
            }
        }
        (found, Ok(()))
    }

    #[test]
    fn requests_are_encoded_as_the_protocol_specifies() {
        let mut out = Vec::new();
        encode_get(&mut out, b"k1");
        encode_delete(&mut out, b"k2");
        encode_set(&mut out, b"k", 3, |value| value.copy_from_slice(b"abc"));
        let want = "*2\r\n$3\r\nGET\r\n$2\r\nk1\r\n*2\r\n$3\r\nDEL\r\n$2\r\nk2\r\n\
                    *3\r\n$3\r\nSET\r\n$1\r\nk\r\n$3\r\nabc\r\n";
        assert_eq!(String::from_utf8(out).unwrap(), want);
    }

    #[test]
    fn replies_decode_however_their_bytes_are_split() {
        let long = vec![b'\n'; 200_000];
        let mut bytes = b"+OK\r\n$-1\r\n:1\r\n-ERR no\r\n$0\r\n\r\n$4\r\na\r\nb\r\n$200000\r\n".to_vec();
        bytes.extend_from_slice(&long);
        bytes.extend_from_slice(b"\r\n:-7\r\n");
        let value = |bytes: &[u8]| format!("{:?}", RespReply::Bulk(bytes));
        let want = vec![
            format!("{:?}", RespReply::Simple(b"OK")),
            "Nil".to_owned(),
            "Integer(1)".to_owned(),
            format!("{:?}", RespReply::Error(b"ERR no")),
            value(b""),
            value(b"a\r\nb"),
            value(&long),
            "Integer(-7)".to_owned(),
        ];
        for piece_bytes in [1, 2, 3, 7, 4096, 65_536] {
            assert_eq!(replies(&bytes, piece_bytes), (want.clone(), Ok(())), "{piece_bytes}");
        }
    }

    #[test]
    fn malformed_replies_are_errors_and_never_panic() {
        let table: [(&[u8], ProtocolError); 9] = [
            (b"\r\n", ProtocolError::Line),
            (b"*1\r\n", ProtocolError::Type(b'*')),
            (b"\0\xff\r\n", ProtocolError::Type(0)),
            (b":x\r\n", ProtocolError::Number),
            (b"$\r\n", ProtocolError::Number),
            (b"$-2\r\n", ProtocolError::Number),
            (b"$99999999999999999999\r\n", ProtocolError::Number),
            (b"$536870913\r\n", ProtocolError::Number),
            (b"$1\r\nabc", ProtocolError::End),
        ];
        for (bytes, error) in table {
            assert_eq!(replies(bytes, 1).1, Err(error), "{bytes:?}");
            assert_eq!(replies(bytes, 100).1, Err(error), "{bytes:?}");
        }
        assert_eq!(replies(&[b'+'; 70_000], 4096).1, Err(ProtocolError::Line));
        // Random bytes of the protocol's alphabet.
        let mut random = Prng::new(1);
        let alphabet = b"+-:$*0123456789\r\n\r\nab\0\xff";
        for _ in 0..50_000 {
            let mut bytes = vec![0; 1 + random.below(40) as usize];
            bytes.iter_mut().for_each(|byte| *byte = alphabet[random.below(alphabet.len() as u64) as usize]);
            let _ = replies(&bytes, 1 + random.below(40) as usize);
        }
    }

    #[test]
    fn a_declared_length_takes_no_memory_before_the_next_receive() {
        let mut decoder = RespDecoder::default();
        feed(&mut decoder, b"$1000000\r\n");
        assert_eq!(decoder.take(), Ok(None));
        assert!(decoder.buffer.len() < 100_000);
        assert!(decoder.receive_buffer().len() >= 1_000_002 && decoder.buffer.len() < 1_100_000);
    }
}
