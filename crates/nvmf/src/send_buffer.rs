//! What a connection has yet to send, in order: small parts copied, large values referenced.
//!
//! In: headers and small data ([`Outbox::copy`]), values in their buffers ([`Outbox::keep`]).
//! Out: slices for one gathered send ([`Outbox::slices`]), then how much of them the socket took
//! ([`Outbox::advance`]).
//!
//! ```text
//! parts:   [copied 24][kept: buffer a, 4096][copied 48][kept: buffer b, 130000][copied 24]
//! staging: |---- sent ----|24|48|24|          (copied parts lie one after the other)
//!                         ^ staging_head
//! ```
//! Invariants: the bytes leave in the order they were put in; a kept buffer is immutable and is dropped
//! when its last byte was sent; `bytes` is the sum over all parts. Bounded by who puts in: a connection
//! takes no command while [`Outbox::bytes`] exceeds its bound, and each slot adds at most one reply.

use octokv_base::Buffer;
use std::collections::VecDeque;
use std::io::IoSlice;

/// Values up to this many bytes are copied; larger ones are sent from their buffer.
pub const COPY_BYTES_MAX: usize = 1024;
/// A staging area that grew beyond this gives its memory back once all is sent.
const STAGING_KEEP_BYTES: usize = 256 * 1024;
/// Room that one header PDU with its digest and padding takes at most, in bytes.
const PDU_BYTES: usize = 256;
/// The most slices of one gathered send: Linux takes no more (UIO_MAXIOV).
pub const SLICES_MAX: usize = 1024;

#[derive(Debug)]
enum Part {
    Copied { bytes: usize },
    Kept { buffer: Buffer, from: usize, to: usize },
}

/// The unsent bytes of one connection.
#[derive(Debug, Default)]
pub struct Outbox {
    parts: VecDeque<Part>,
    staging: Vec<u8>,
    staging_head: usize,
    bytes: usize,
}

impl Outbox {
    /// How many bytes wait.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Whether nothing waits.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// Appends the waiting bytes as slices, from the first, at most [`SLICES_MAX`] of them and `bytes_max` bytes.
    pub fn slices<'a>(&'a self, into: &mut Vec<IoSlice<'a>>, bytes_max: usize) {
        let (mut staged, mut left) = (self.staging_head, bytes_max);
        for part in self.parts.iter().take(SLICES_MAX) {
            if left == 0 {
                break;
            }
            let slice = match part {
                Part::Copied { bytes } => {
                    staged += bytes;
                    &self.staging[staged - bytes..staged]
                }
                Part::Kept { buffer, from, to } => &buffer[*from..*to],
            };
            let slice = &slice[..slice.len().min(left)];
            left -= slice.len();
            into.push(IoSlice::new(slice));
        }
    }

    /// Forgets the first `count` bytes: they were sent.
    ///
    /// # Panics
    /// When fewer bytes wait.
    pub fn advance(&mut self, mut count: usize) {
        assert!(count <= self.bytes, "{count} bytes sent of {}", self.bytes);
        self.bytes -= count;
        while count > 0 {
            let part = self.parts.front_mut().expect("the parts add up to `bytes`");
            let taken = match part {
                Part::Copied { bytes } => {
                    let taken = count.min(*bytes);
                    *bytes -= taken;
                    self.staging_head += taken;
                    taken
                }
                Part::Kept { from, to, .. } => {
                    let taken = count.min(*to - *from);
                    *from += taken;
                    taken
                }
            };
            count -= taken;
            if part.is_empty() {
                self.parts.pop_front();
            }
        }
        if self.bytes == 0 {
            self.recycle();
        }
    }

    /// Puts in a copy of `bytes`.
    pub fn copy(&mut self, bytes: &[u8]) {
        if bytes.is_empty() {
            return;
        }
        self.make_room(bytes.len());
        self.staging.extend_from_slice(bytes);
        self.note_copied(bytes.len());
    }

    /// Puts in what `write` appends; it must not touch what is there already.
    #[inline]
    pub fn append(&mut self, write: impl FnOnce(&mut Vec<u8>)) {
        self.make_room(PDU_BYTES);
        let before = self.staging.len();
        write(&mut self.staging);
        let count = self.staging.len() - before;
        if count > 0 {
            self.note_copied(count);
        }
    }

    /// Puts in the bytes `from..to` of `buffer`: copied where few, else kept until sent.
    pub fn keep(&mut self, buffer: Buffer, from: usize, to: usize) {
        assert!(from <= to && to <= buffer.len(), "{from}..{to} of {buffer:?}");
        if to - from <= COPY_BYTES_MAX {
            return self.copy(&buffer[from..to]);
        }
        self.bytes += to - from;
        self.parts.push_back(Part::Kept { buffer, from, to });
    }

    /// Forgets everything, sent or not: the connection is gone.
    pub fn clear(&mut self) {
        self.parts.clear();
        self.bytes = 0;
        self.recycle();
    }

    fn note_copied(&mut self, count: usize) {
        self.bytes += count;
        match self.parts.back_mut() {
            Some(Part::Copied { bytes }) => *bytes += count,
            Some(Part::Kept { .. }) | None => self.parts.push_back(Part::Copied { bytes: count }),
        }
    }

    /// Moves what is unsent to the front rather than growing for what is sent already.
    fn make_room(&mut self, count: usize) {
        let full = self.staging.len() + count > self.staging.capacity();
        if full && self.staging_head >= self.staging.len() / 2 {
            self.staging.drain(..self.staging_head);
            self.staging_head = 0;
        }
    }

    fn recycle(&mut self) {
        self.staging.clear();
        self.staging_head = 0;
        if self.staging.capacity() > STAGING_KEEP_BYTES {
            self.staging.shrink_to(STAGING_KEEP_BYTES);
        }
    }
}

impl Part {
    fn is_empty(&self) -> bool {
        match self {
            Part::Copied { bytes } => *bytes == 0,
            Part::Kept { from, to, .. } => from == to,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use octokv_base::Random;

    fn all(outbox: &Outbox) -> Vec<u8> {
        let mut slices = Vec::new();
        outbox.slices(&mut slices, usize::MAX);
        slices.iter().flat_map(|slice| slice.iter().copied()).collect()
    }

    #[test]
    fn bytes_leave_in_the_order_they_were_put_in() {
        let mut outbox = Outbox::default();
        let mut value = Buffer::zeroed(5000);
        value.fill(7);
        outbox.copy(b"head");
        outbox.keep(value, 0, 5000);
        outbox.copy(b"tail");
        outbox.append(|staging| staging.extend([0; 2]));
        assert_eq!(outbox.bytes(), 5010);
        let want = [b"head".as_slice(), &[7; 5000], b"tail\0\0"].concat();
        assert_eq!(all(&outbox), want);
        outbox.advance(2);
        outbox.advance(3000);
        assert_eq!(all(&outbox), want[3002..]);
        outbox.advance(2008);
        assert!(outbox.is_empty() && all(&outbox).is_empty());
    }

    #[test]
    fn any_mix_of_puts_and_sends_keeps_the_stream() {
        let mut random = Random::new(3);
        let (mut outbox, mut want) = (Outbox::default(), VecDeque::new());
        for round in 0..20_000u32 {
            match random.below(3) {
                0 => {
                    let bytes = vec![round as u8; random.below(60) as usize];
                    outbox.copy(&bytes);
                    want.extend(bytes);
                }
                1 => {
                    let mut buffer = Buffer::zeroed(random.below(4000) as usize);
                    buffer.fill(round as u8);
                    let from = random.below(buffer.len() as u64 + 1) as usize;
                    want.extend(&buffer[from..]);
                    let to = buffer.len();
                    outbox.keep(buffer, from, to);
                }
                _ => {
                    let count = random.below(outbox.bytes() as u64 + 1) as usize;
                    outbox.advance(count);
                    want.drain(..count);
                }
            }
            assert_eq!(outbox.bytes(), want.len());
            if round % 64 == 0 {
                outbox.advance(outbox.bytes() - want.len().min(100_000));
                want.drain(..want.len() - outbox.bytes());
                let mut slices = Vec::new();
                outbox.slices(&mut slices, usize::MAX);
                let got: Vec<u8> = slices.iter().flat_map(|slice| slice.to_vec()).collect();
                assert_eq!(got, want.iter().copied().take(got.len()).collect::<Vec<_>>());
            }
        }
    }

    #[test]
    fn sent_bytes_do_not_make_the_staging_grow() {
        let mut outbox = Outbox::default();
        outbox.copy(&[1; 100]);
        for _ in 0..10_000 {
            outbox.copy(&[2; 24]);
            outbox.advance(24);
        }
        assert!(outbox.staging.capacity() <= 1024, "{}", outbox.staging.capacity());
    }
}
