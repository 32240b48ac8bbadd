//! The bytes that a queue has yet to send, in order: headers and small values copied, others referenced.
//!
//! ```text
//! parts:   [copied 96][slot 3, 0..4096][copied 80][slot 9, 0..4096]
//! staging: |-- sent --|96|80|
//!                     ^ head
//! ```
//! A referenced part names a slot of the queue, which keeps the value until [`SendBuffer::advance`] has
//! said that no part of it waits. Invariants: bytes leave in the order they were put in; `bytes` is the
//! sum over all parts. Bounded by the queue's depth: each command puts in its data once.

use std::collections::VecDeque;
use std::io::IoSlice;

/// Data up to this many bytes is copied, larger is referenced: at this size a copy costs what a slice
/// more costs the kernel.
pub const COPY_BYTES_MAX: usize = 1024;
/// The most slices of one gathered send (Linux's UIO_MAXIOV).
pub const SLICES_MAX: usize = 1024;
const STAGING_KEEP_BYTES: usize = 1 << 20;

#[derive(Debug)]
enum SendPart {
    Copied { bytes: usize },
    Referenced { slot: u16, from: usize, to: usize },
}

/// The unsent bytes of one queue.
#[derive(Debug, Default)]
pub struct SendBuffer {
    parts: VecDeque<SendPart>,
    staging: Vec<u8>,
    staging_sent_bytes: usize,
    /// Bytes ever put in.
    appended_bytes: u64,
    /// Bytes ever sent.
    sent_bytes: u64,
}

impl SendBuffer {
    /// Whether nothing waits.
    pub fn is_empty(&self) -> bool {
        self.appended_bytes == self.sent_bytes
    }

    /// How many bytes were ever put in: where the next part begins in the stream.
    pub fn appended_bytes(&self) -> u64 {
        self.appended_bytes
    }

    /// How many bytes were ever sent.
    pub fn sent_bytes(&self) -> u64 {
        self.sent_bytes
    }

    /// Puts in what `write` appends to the staging area.
    #[inline]
    pub fn append(&mut self, write: impl FnOnce(&mut Vec<u8>)) {
        self.compact(COPY_BYTES_MAX);
        let before = self.staging.len();
        write(&mut self.staging);
        let count = self.staging.len() - before;
        self.appended_bytes += count as u64;
        match self.parts.back_mut() {
            Some(SendPart::Copied { bytes }) => *bytes += count,
            Some(SendPart::Referenced { .. }) | None if count > 0 => {
                self.parts.push_back(SendPart::Copied { bytes: count });
            }
            Some(SendPart::Referenced { .. }) | None => {}
        }
    }

    /// Puts in the bytes `from..to` of the value that `slot` keeps.
    #[inline]
    pub fn append_reference(&mut self, slot: u16, from: usize, to: usize) {
        assert!(from < to, "an empty part would never be sent");
        self.appended_bytes += (to - from) as u64;
        self.parts.push_back(SendPart::Referenced { slot, from, to });
    }

    /// Appends what waits, at most [`SLICES_MAX`] slices; `value` gives the value that a slot keeps.
    pub fn slices<'a>(&'a self, value: impl Fn(u16) -> &'a [u8], into: &mut Vec<IoSlice<'a>>) {
        let mut staged = self.staging_sent_bytes;
        for part in self.parts.iter().take(SLICES_MAX) {
            into.push(IoSlice::new(match part {
                SendPart::Copied { bytes } => {
                    staged += bytes;
                    &self.staging[staged - bytes..staged]
                }
                SendPart::Referenced { slot, from, to } => &value(*slot)[*from..*to],
            }));
        }
    }

    /// Forgets the first `count` bytes, which were sent; calls `freed` for each part of a slot that is
    /// sent to its end.
    ///
    /// # Panics
    /// When fewer bytes wait.
    pub fn advance(&mut self, count: usize, mut freed: impl FnMut(u16)) {
        self.sent_bytes += count as u64;
        assert!(self.sent_bytes <= self.appended_bytes, "more bytes sent than there were");
        let mut left = count;
        while left > 0 {
            let part = self.parts.front_mut().expect("the parts add up to what waits");
            let (taken, rest) = match part {
                SendPart::Copied { bytes } => {
                    let taken = left.min(*bytes);
                    self.staging_sent_bytes += taken;
                    *bytes -= taken;
                    (taken, *bytes)
                }
                SendPart::Referenced { from, to, .. } => {
                    let taken = left.min(*to - *from);
                    *from += taken;
                    (taken, *to - *from)
                }
            };
            left -= taken;
            if rest == 0
                && let Some(SendPart::Referenced { slot, .. }) = self.parts.pop_front()
            {
                freed(slot);
            }
        }
        if self.is_empty() {
            self.staging.clear();
            self.staging_sent_bytes = 0;
            self.staging.shrink_to(STAGING_KEEP_BYTES);
        }
    }

    /// Moves what is unsent to the front rather than growing for what is sent already.
    fn compact(&mut self, count: usize) {
        let full = self.staging.len() + count > self.staging.capacity();
        if full && self.staging_sent_bytes > 0 && self.staging_sent_bytes >= self.staging.len() / 2 {
            self.staging.drain(..self.staging_sent_bytes);
            self.staging_sent_bytes = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use octokv_base::Prng;

    #[test]
    fn any_mix_of_appends_and_sends_keeps_the_stream() {
        let values: Vec<Vec<u8>> = (0..4).map(|i| vec![i; 3000]).collect();
        let mut random = Prng::new(1);
        let (mut send_buffer, mut want, mut referenced) = (SendBuffer::default(), VecDeque::new(), 0);
        for round in 0..5_000u32 {
            match random.below(3) {
                0 => {
                    let bytes = vec![round as u8; random.below(90) as usize];
                    send_buffer.append(|staging| staging.extend_from_slice(&bytes));
                    want.extend(bytes);
                }
                1 => {
                    let (slot, from) = (random.below(4) as u16, random.below(2999) as usize);
                    send_buffer.append_reference(slot, from, 3000);
                    want.extend(&values[usize::from(slot)][from..]);
                    referenced += 1;
                }
                _ => {
                    let mut slices = Vec::new();
                    send_buffer.slices(|slot| &values[usize::from(slot)], &mut slices);
                    let got: Vec<u8> = slices.iter().flat_map(|s| s.to_vec()).collect();
                    assert!(want.iter().take(got.len()).eq(got.iter()));
                    let count = random.below(got.len() as u64 + 1) as usize;
                    send_buffer.advance(count, |_| referenced -= 1);
                    want.drain(..count);
                }
            }
            assert_eq!((send_buffer.appended_bytes() - send_buffer.sent_bytes()) as usize, want.len());
        }
        while !want.is_empty() {
            let count = want.len().min(1000);
            send_buffer.advance(count, |_| referenced -= 1);
            want.drain(..count);
        }
        assert!(send_buffer.is_empty() && referenced == 0);
    }
}
