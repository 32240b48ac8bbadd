//! What a connection has yet to send, in order: small parts copied, large values referenced.
//!
//! In: headers and small data ([`SendBuffer::copy`]), values in their buffers ([`SendBuffer::keep`]).
//! Out: slices for one gathered send ([`SendBuffer::slices`]), then how much of them the socket took
//! ([`SendBuffer::advance`]).
//!
//! ```text
//! parts:   [copied 24][kept: buffer a, 4096][copied 48][kept: buffer b, 130000][copied 24]
//! staging: |---- sent ----|24|48|24|          (copied parts lie one after the other)
//!                         ^ staging_head
//! ```
//! Invariants: the bytes leave in the order they were put in; a kept buffer is immutable and is dropped
//! when its last byte was sent; `bytes` is the sum over all parts. Bounded by who puts in: a connection
//! takes no command while [`SendBuffer::bytes`] exceeds its bound, and each slot adds at most one reply.

use octokv_base::Buffer;
use std::collections::VecDeque;
use std::io::IoSlice;

/// Values up to this many bytes are copied; larger ones are sent from their buffer.
pub const COPY_BYTES_MAX: usize = 1024;
/// A staging area that grew beyond this gives its memory back once all is sent.
const STAGING_RETAIN_BYTES_MAX: usize = 256 * 1024;
/// Room that one header PDU with its digest and padding takes at most, in bytes.
const HEADER_PDU_BYTES_MAX: usize = 256;
/// The most slices of one gathered send: Linux takes no more (UIO_MAXIOV).
pub const SLICES_MAX: usize = 1024;

#[derive(Debug)]
enum SendChunk {
    Copied { bytes: usize },
    Referenced { buffer: Buffer, from: usize, to: usize },
}

/// The unsent bytes of one connection.
#[derive(Debug, Default)]
pub struct SendBuffer {
    chunks: VecDeque<SendChunk>,
    staging: Vec<u8>,
    staging_head: usize,
    unsent_bytes: usize,
}

impl SendBuffer {
    /// How many bytes wait.
    pub fn unsent_bytes(&self) -> usize {
        self.unsent_bytes
    }

    /// Whether nothing waits.
    pub fn is_empty(&self) -> bool {
        self.unsent_bytes == 0
    }

    /// Appends the waiting bytes as slices, from the first, at most [`SLICES_MAX`] of them and `bytes_max` bytes.
    pub fn slices<'a>(&'a self, into: &mut Vec<IoSlice<'a>>, bytes_max: usize) {
        let (mut staged, mut left) = (self.staging_head, bytes_max);
        for part in self.chunks.iter().take(SLICES_MAX) {
            if left == 0 {
                break;
            }
            let slice = match part {
                SendChunk::Copied { bytes } => {
                    staged += bytes;
                    &self.staging[staged - bytes..staged]
                }
                SendChunk::Referenced { buffer, from, to } => &buffer[*from..*to],
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
        assert!(count <= self.unsent_bytes, "{count} bytes sent of {}", self.unsent_bytes);
        self.unsent_bytes -= count;
        while count > 0 {
            let part = self.chunks.front_mut().expect("the parts add up to `bytes`");
            let taken = match part {
                SendChunk::Copied { bytes } => {
                    let taken = count.min(*bytes);
                    *bytes -= taken;
                    self.staging_head += taken;
                    taken
                }
                SendChunk::Referenced { from, to, .. } => {
                    let taken = count.min(*to - *from);
                    *from += taken;
                    taken
                }
            };
            count -= taken;
            if part.is_empty() {
                self.chunks.pop_front();
            }
        }
        if self.unsent_bytes == 0 {
            self.reset_staging();
        }
    }

    /// Puts in a copy of `bytes`.
    pub fn push_copy(&mut self, bytes: &[u8]) {
        if bytes.is_empty() {
            return;
        }
        self.reclaim_staging(bytes.len());
        self.staging.extend_from_slice(bytes);
        self.record_copied(bytes.len());
    }

    /// Puts in what `write` appends; it must not touch what is there already.
    #[inline]
    pub fn append(&mut self, write: impl FnOnce(&mut Vec<u8>)) {
        self.reclaim_staging(HEADER_PDU_BYTES_MAX);
        let before = self.staging.len();
        write(&mut self.staging);
        let count = self.staging.len() - before;
        if count > 0 {
            self.record_copied(count);
        }
    }

    /// Puts in the bytes `from..to` of `buffer`: copied where few, else kept until sent.
    pub fn push_buffer(&mut self, buffer: Buffer, from: usize, to: usize) {
        assert!(from <= to && to <= buffer.len(), "{from}..{to} of {buffer:?}");
        if to - from <= COPY_BYTES_MAX {
            return self.push_copy(&buffer[from..to]);
        }
        self.unsent_bytes += to - from;
        self.chunks.push_back(SendChunk::Referenced { buffer, from, to });
    }

    /// Forgets everything, sent or not: the connection is gone.
    pub fn clear(&mut self) {
        self.chunks.clear();
        self.unsent_bytes = 0;
        self.reset_staging();
    }

    fn record_copied(&mut self, count: usize) {
        self.unsent_bytes += count;
        match self.chunks.back_mut() {
            Some(SendChunk::Copied { bytes }) => *bytes += count,
            Some(SendChunk::Referenced { .. }) | None => {
                self.chunks.push_back(SendChunk::Copied { bytes: count })
            }
        }
    }

    /// Moves what is unsent to the front rather than growing for what is sent already.
    fn reclaim_staging(&mut self, count: usize) {
        let full = self.staging.len() + count > self.staging.capacity();
        if full && self.staging_head >= self.staging.len() / 2 {
            self.staging.drain(..self.staging_head);
            self.staging_head = 0;
        }
    }

    fn reset_staging(&mut self) {
        self.staging.clear();
        self.staging_head = 0;
        if self.staging.capacity() > STAGING_RETAIN_BYTES_MAX {
            self.staging.shrink_to(STAGING_RETAIN_BYTES_MAX);
        }
    }
}

impl SendChunk {
    fn is_empty(&self) -> bool {
        match self {
            SendChunk::Copied { bytes } => *bytes == 0,
            SendChunk::Referenced { from, to, .. } => from == to,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use octokv_base::Prng;

    fn all(outbox: &SendBuffer) -> Vec<u8> {
        let mut slices = Vec::new();
        outbox.slices(&mut slices, usize::MAX);
        slices.iter().flat_map(|slice| slice.iter().copied()).collect()
    }

    #[test]
    fn bytes_leave_in_the_order_they_were_put_in() {
        let mut outbox = SendBuffer::default();
        let mut value = Buffer::zeroed(5000);
        value.fill(7);
        outbox.push_copy(b"head");
        outbox.push_buffer(value, 0, 5000);
        outbox.push_copy(b"tail");
        outbox.append(|staging| staging.extend([0; 2]));
        assert_eq!(outbox.unsent_bytes(), 5010);
        let want = [b"head".as_slice(), &[7; 5000], b"tail\0\0"].concat();
        assert_eq!(all(&outbox), want);
        outbox.advance(2);
        outbox.advance(3000);
        assert_eq!(all(&outbox), want[3002..]);
        outbox.advance(2008);
        assert!(outbox.is_empty() && all(&outbox).is_empty());
    }

    #[test]
    fn random_pushes_and_sends_preserve_the_byte_stream() {
        let mut random = Prng::new(3);
        let (mut outbox, mut want) = (SendBuffer::default(), VecDeque::new());
        for round in 0..20_000u32 {
            match random.below(3) {
                0 => {
                    let bytes = vec![round as u8; random.below(60) as usize];
                    outbox.push_copy(&bytes);
                    want.extend(bytes);
                }
                1 => {
                    let mut buffer = Buffer::zeroed(random.below(4000) as usize);
                    buffer.fill(round as u8);
                    let from = random.below(buffer.len() as u64 + 1) as usize;
                    want.extend(&buffer[from..]);
                    let to = buffer.len();
                    outbox.push_buffer(buffer, from, to);
                }
                _ => {
                    let count = random.below(outbox.unsent_bytes() as u64 + 1) as usize;
                    outbox.advance(count);
                    want.drain(..count);
                }
            }
            assert_eq!(outbox.unsent_bytes(), want.len());
            if round % 64 == 0 {
                outbox.advance(outbox.unsent_bytes() - want.len().min(100_000));
                want.drain(..want.len() - outbox.unsent_bytes());
                let mut slices = Vec::new();
                outbox.slices(&mut slices, usize::MAX);
                let got: Vec<u8> = slices.iter().flat_map(|slice| slice.to_vec()).collect();
                assert_eq!(got, want.iter().copied().take(got.len()).collect::<Vec<_>>());
            }
        }
    }

    #[test]
    fn sent_bytes_do_not_make_the_staging_grow() {
        let mut outbox = SendBuffer::default();
        outbox.push_copy(&[1; 100]);
        for _ in 0..10_000 {
            outbox.push_copy(&[2; 24]);
            outbox.advance(24);
        }
        assert!(outbox.staging.capacity() <= 1024, "{}", outbox.staging.capacity());
    }
}
