//! Common parts of all Identify pages: their size, the cast from received bytes, ASCII fields.

use zerocopy::{FromBytes, Immutable, KnownLayout, Unaligned};

/// Length of every page, in bytes.
pub const PAGE_BYTES: usize = 4096;

/// Casts the start of `bytes` to a page; `None` if they are fewer than the page.
pub fn decode_page<T: FromBytes + Immutable + KnownLayout + Unaligned>(bytes: &[u8]) -> Option<&T> {
    T::ref_from_prefix(bytes).ok().map(|(page, _)| page)
}

/// Encodes an ASCII field: the text, cut at the length of the field, space padded; other characters become `?`.
pub fn encode_text(field: &mut [u8], text: &str) {
    field.fill(b' ');
    let bytes = &text.as_bytes()[..text.len().min(field.len())];
    for (to, &from) in field.iter_mut().zip(bytes) {
        *to = if (0x20..0x7f).contains(&from) { from } else { b'?' };
    }
}

/// Decodes an ASCII field without its padding of spaces or zeros.
pub fn decode_text(field: &[u8]) -> String {
    String::from_utf8_lossy(field).trim_end_matches([' ', '\0']).to_string()
}
