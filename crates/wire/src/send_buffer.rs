//! The unsent bytes of one connection, in order: small parts copied, large values referenced.
//!
//! In: headers and small data ([`SendBuffer::append`], [`SendBuffer::push_copy`]), large values by reference
//! ([`SendBuffer::push_buffer`], [`SendBuffer::push_reference`]). Out: slices for one gathered send
//! ([`SendBuffer::slices_with`]), then the number of bytes that the socket accepted ([`SendBuffer::advance_with`]).
//!
//! ```text
//! parts:   [copied 24, referenced a, 0..4096][copied 48, referenced b, 0..130000], tail: copied 24
//! staging: |---- sent ----|24|48|24|          (copied bytes are contiguous)
//!                         ^ staging_head
//! ```
//! A reference is a value of type `R`: the target keeps the buffer itself or the number of a loan ([`ResponseData`]), the
//! initiator the slot that owns the value.
//! Invariants: bytes leave in the order of their insertion; a referenced value is immutable until its part is released,
//! after its last byte was sent; `unsent_bytes` is the sum over all parts and the tail. REQUIRES: the owner bounds the unsent bytes (a
//! connection accepts no command above its limit, and each slot adds at most one response or one value). Tested below.

use octokv_base::{BufferReservation, DataBuffer};
use std::collections::VecDeque;
use std::io::IoSlice;

/// Maximum size of a copied value, in bytes. At this size a copy costs as much as one more slice costs the kernel.
pub const COPY_BYTES_MAX: usize = 1024;
/// Maximum number of slices of one gathered send (UIO_MAXIOV of Linux).
pub const SLICES_MAX: usize = 1024;
/// Default capacity that the staging area keeps when all is sent, in bytes.
const STAGING_RETAIN_BYTES: usize = 256 * 1024;
/// Maximum size of a PDU without data, with digest and padding, in bytes.
const HEADER_PDU_BYTES_MAX: usize = 256;

/// Data of a response, until it is sent.
#[derive(Debug)]
pub enum ResponseData {
    /// This buffer has it.
    Kept(DataBuffer),
    /// The target's device has it, and the sender of the connection holds it: the loan of this number, counted from 0 for each
    /// connection. Loans are sent in their order. The reservation is for a copy, if the loan has to end before it is sent.
    Lent(u64, BufferReservation),
}

impl ResponseData {
    /// The bytes of a response whose sender has no loans.
    ///
    /// # Panics
    /// If they are lent.
    fn kept(&self) -> &[u8] {
        match self {
            ResponseData::Kept(buffer) => buffer,
            ResponseData::Lent(loan, _) => panic!("this sender holds no loan {loan}"),
        }
    }
}

/// Copied bytes, then those of a referenced value. One part, since headers precede every value.
#[derive(Debug)]
struct SendPart<R> {
    /// Bytes of the staging area before the value; may be 0.
    copied_bytes: usize,
    source: R,
    /// The unsent range of the value; never empty.
    from: usize,
    to: usize,
}

/// The unsent bytes of one connection. See the module documentation.
#[derive(Debug)]
pub struct SendBuffer<R = ResponseData> {
    parts: VecDeque<SendPart<R>>,
    /// Copied bytes behind the last part.
    tail_bytes: usize,
    staging: Vec<u8>,
    /// Length of the sent bytes at the start of `staging`.
    staging_head: usize,
    staging_retain_bytes: usize,
    unsent_bytes: usize,
    sent_bytes: u64,
}

impl<R> Default for SendBuffer<R> {
    fn default() -> SendBuffer<R> {
        SendBuffer::new(STAGING_RETAIN_BYTES)
    }
}

impl<R> SendBuffer<R> {
    /// An empty buffer whose staging area keeps up to `staging_retain_bytes` of capacity when all is sent.
    pub fn new(staging_retain_bytes: usize) -> SendBuffer<R> {
        SendBuffer {
            parts: VecDeque::new(),
            tail_bytes: 0,
            staging: Vec::new(),
            staging_head: 0,
            staging_retain_bytes,
            unsent_bytes: 0,
            sent_bytes: 0,
        }
    }

    /// Number of unsent bytes.
    pub fn unsent_bytes(&self) -> usize {
        self.unsent_bytes
    }

    /// Whether all bytes are sent.
    pub fn is_empty(&self) -> bool {
        self.unsent_bytes == 0
    }

    /// Number of bytes sent since creation.
    pub fn sent_bytes(&self) -> u64 {
        self.sent_bytes
    }

    /// Offset of the next appended byte in the stream since creation, in bytes.
    pub fn appended_bytes(&self) -> u64 {
        self.sent_bytes + self.unsent_bytes as u64
    }

    /// Appends the unsent bytes as slices, at most [`SLICES_MAX`] slices and `bytes_max` bytes. `resolve` returns the value
    /// of a reference. Gives the number of bytes.
    #[inline]
    pub fn slices_with<'a>(
        &'a self,
        resolve: impl Fn(&'a R) -> &'a [u8],
        into: &mut Vec<IoSlice<'a>>,
        bytes_max: usize,
    ) -> usize {
        let (mut staged, mut left) = (self.staging_head, bytes_max);
        // A part is at most two slices; the tail is sent with the last parts.
        for part in self.parts.iter().take(SLICES_MAX / 2) {
            let copied = &self.staging[staged..staged + part.copied_bytes];
            let referenced = &resolve(&part.source)[part.from..part.to];
            if copied.len() + referenced.len() > left {
                // The last one of this send is cut.
                let copied = &copied[..copied.len().min(left)];
                let referenced = &referenced[..left - copied.len()];
                let cut = [copied, referenced].into_iter().filter(|bytes| !bytes.is_empty());
                into.extend(cut.map(IoSlice::new));
                return bytes_max;
            }
            if !copied.is_empty() {
                into.push(IoSlice::new(copied));
            }
            into.push(IoSlice::new(referenced));
            staged += copied.len();
            left -= copied.len() + referenced.len();
        }
        let tail = &self.staging[staged..];
        let tail = &tail[..tail.len().min(left)];
        if self.parts.len() < SLICES_MAX / 2 && !tail.is_empty() {
            into.push(IoSlice::new(tail));
            left -= tail.len();
        }
        bytes_max - left
    }

    /// Removes the first `count` unsent bytes, which the socket accepted. Calls `release` for each reference whose part is
    /// sent completely.
    ///
    /// # Panics
    /// If fewer bytes are unsent.
    #[inline]
    pub fn advance_with(&mut self, mut count: usize, mut release: impl FnMut(R)) {
        assert!(count <= self.unsent_bytes, "{count} bytes sent of {}", self.unsent_bytes);
        self.unsent_bytes -= count;
        self.sent_bytes += count as u64;
        if self.unsent_bytes == 0 {
            for part in self.parts.drain(..) {
                release(part.source);
            }
            return self.reset_staging();
        }
        while let Some(part) = self.parts.front_mut() {
            let copied = count.min(part.copied_bytes);
            part.copied_bytes -= copied;
            self.staging_head += copied;
            count -= copied;
            let referenced = count.min(part.to - part.from);
            part.from += referenced;
            count -= referenced;
            if part.from < part.to {
                return;
            }
            if let Some(part) = self.parts.pop_front() {
                release(part.source);
            }
        }
        self.tail_bytes -= count;
        self.staging_head += count;
    }

    /// Removes all unsent bytes, which the socket accepted, and drops the references to values: cheaper than one by one.
    #[inline]
    pub fn advance_to_end(&mut self) {
        self.sent_bytes += self.unsent_bytes as u64;
        self.clear();
    }

    /// Appends a copy of `bytes`.
    #[inline]
    pub fn push_copy(&mut self, bytes: &[u8]) {
        if bytes.is_empty() {
            return;
        }
        self.reclaim_staging(bytes.len());
        self.staging.extend_from_slice(bytes);
        self.record_copied(bytes.len());
    }

    /// Appends the PDU without data that `write` encodes. REQUIRES: `write` only appends.
    #[inline]
    pub fn append(&mut self, write: impl FnOnce(&mut Vec<u8>)) {
        self.append_up_to(HEADER_PDU_BYTES_MAX, write);
    }

    /// Appends the bytes that `write` encodes, about `bytes_max` at most. REQUIRES: `write` only appends.
    #[inline]
    pub fn append_up_to(&mut self, bytes_max: usize, write: impl FnOnce(&mut Vec<u8>)) {
        self.reclaim_staging(bytes_max);
        let before = self.staging.len();
        write(&mut self.staging);
        self.record_copied(self.staging.len() - before);
    }

    /// Appends the bytes `from..to` of a referenced value.
    ///
    /// # Panics
    /// If the range is empty: its part would never be released.
    #[inline]
    pub fn push_reference(&mut self, source: R, from: usize, to: usize) {
        assert!(from < to, "an empty part is never released");
        self.unsent_bytes += to - from;
        let copied_bytes = std::mem::take(&mut self.tail_bytes);
        self.parts.push_back(SendPart { copied_bytes, source, from, to });
    }

    /// Appends the header that `write` encodes before the referenced value that was appended last. So the value is in its place first:
    /// each step that could panic while it is not would move it once more. REQUIRES: `write` only appends.
    ///
    /// # Panics
    /// If no value was appended, or anything behind it.
    #[inline]
    pub fn append_before_value(&mut self, write: impl FnOnce(&mut Vec<u8>)) {
        assert!(self.tail_bytes == 0, "bytes behind the value");
        self.append(write);
        let header_bytes = std::mem::take(&mut self.tail_bytes);
        self.parts.back_mut().expect("a value was appended").copied_bytes += header_bytes;
    }

    /// Drops the unsent bytes from this offset in the stream since creation on. Calls `release` for each reference whose part is
    /// dropped completely.
    pub fn truncate_with(&mut self, stream_offset: u64, mut release: impl FnMut(R)) {
        let mut excess_bytes = self.appended_bytes().saturating_sub(stream_offset) as usize;
        excess_bytes = excess_bytes.min(self.unsent_bytes);
        self.unsent_bytes -= excess_bytes;
        while excess_bytes > 0 {
            let copied = excess_bytes.min(self.tail_bytes);
            self.tail_bytes -= copied;
            self.staging.truncate(self.staging.len() - copied);
            excess_bytes -= copied;
            if excess_bytes == 0 {
                return;
            }
            let part = self.parts.back_mut().expect("unsent bytes before the tail are in a part");
            let referenced = excess_bytes.min(part.to - part.from);
            part.to -= referenced;
            excess_bytes -= referenced;
            if part.from == part.to
                && let Some(part) = self.parts.pop_back()
            {
                self.tail_bytes = part.copied_bytes;
                release(part.source);
            }
        }
    }

    /// Drops all unsent bytes: the connection is lost.
    pub fn clear(&mut self) {
        self.parts.clear();
        self.unsent_bytes = 0;
        self.reset_staging();
    }

    #[inline]
    fn record_copied(&mut self, count: usize) {
        self.unsent_bytes += count;
        self.tail_bytes += count;
    }

    /// Makes room for about `count` bytes.
    #[inline]
    fn reclaim_staging(&mut self, count: usize) {
        if self.staging.len() + count > self.staging.capacity() {
            self.grow_staging(count);
        }
    }

    /// Moves the unsent bytes to the front instead of growing the staging area for sent ones.
    #[cold]
    fn grow_staging(&mut self, count: usize) {
        if self.staging_head > 0 && self.staging_head >= self.staging.len() / 2 {
            self.staging.drain(..self.staging_head);
            self.staging_head = 0;
        }
        self.staging.reserve(count);
    }

    fn reset_staging(&mut self) {
        self.staging.clear();
        (self.staging_head, self.tail_bytes) = (0, 0);
        if self.staging.capacity() > self.staging_retain_bytes {
            self.staging.shrink_to(self.staging_retain_bytes);
        }
    }
}

impl SendBuffer<ResponseData> {
    /// [`SendBuffer::slices_with`] for a sender without loans.
    ///
    /// # Panics
    /// If data is lent.
    pub fn slices<'a>(&'a self, into: &mut Vec<IoSlice<'a>>, bytes_max: usize) {
        self.slices_with(ResponseData::kept, into, bytes_max);
    }

    /// [`SendBuffer::advance_with`] for a sender without loans; buffers are dropped when sent.
    ///
    /// # Panics
    /// If fewer bytes are unsent.
    pub fn advance(&mut self, count: usize) {
        self.advance_with(count, drop);
    }

    /// Ends all loans: each is replaced by a buffer with the bytes that `bytes_of` has for it.
    pub fn copy_loans<'a>(&mut self, bytes_of: impl Fn(u64) -> &'a [u8]) {
        for part in std::mem::take(&mut self.parts) {
            let source = match part.source {
                ResponseData::Lent(loan, reservation) => {
                    let mut buffer = reservation.into_buffer();
                    let unsent = part.from..part.to;
                    buffer[unsent.clone()].copy_from_slice(&bytes_of(loan)[unsent]);
                    ResponseData::Kept(buffer.into())
                }
                kept => kept,
            };
            self.parts.push_back(SendPart { source, ..part });
        }
    }

    /// Appends the bytes `from..to` of `buffer`: copied up to [`COPY_BYTES_MAX`], else kept until sent.
    ///
    /// # Panics
    /// If the range is not within the buffer.
    pub fn push_buffer(&mut self, buffer: DataBuffer, from: usize, to: usize) {
        assert!(from <= to && to <= buffer.len(), "{from}..{to} of {buffer:?}");
        if to - from <= COPY_BYTES_MAX {
            return self.push_copy(&buffer[from..to]);
        }
        self.push_reference(ResponseData::Kept(buffer), from, to);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use octokv_base::{Buffer, BufferPool, ByteBudget, Prng, SharedBuffer};

    fn all(send_buffer: &SendBuffer) -> Vec<u8> {
        let mut slices = Vec::new();
        send_buffer.slices(&mut slices, usize::MAX);
        slices.iter().flat_map(|slice| slice.iter().copied()).collect()
    }

    #[test]
    fn bytes_leave_in_the_order_of_insertion() {
        let mut send_buffer = SendBuffer::default();
        let mut value = Buffer::zeroed(5000);
        value.fill(7);
        send_buffer.push_copy(b"head");
        send_buffer.push_buffer(value.into(), 0, 5000);
        send_buffer.push_copy(b"tail");
        send_buffer.append(|staging| staging.extend([0; 2]));
        assert_eq!(send_buffer.unsent_bytes(), 5010);
        let want = [b"head".as_slice(), &[7; 5000], b"tail\0\0"].concat();
        assert_eq!(all(&send_buffer), want);
        send_buffer.advance(2);
        send_buffer.advance(3000);
        assert_eq!(all(&send_buffer), want[3002..]);
        send_buffer.advance(2008);
        assert!(send_buffer.is_empty() && all(&send_buffer).is_empty());
        send_buffer.push_copy(b"next");
        send_buffer.push_buffer(Buffer::zeroed(2000).into(), 0, 2000);
        send_buffer.append_before_value(|staging| staging.extend(b"head"));
        send_buffer.append(|staging| staging.extend(b"tail"));
        assert_eq!(all(&send_buffer), [b"nexthead".as_slice(), &[0; 2000], b"tail"].concat());
        send_buffer.advance_to_end();
        assert!(send_buffer.is_empty() && send_buffer.sent_bytes() == 7022);
    }

    #[test]
    fn a_shared_value_is_sent_in_place_and_released_with_its_last_byte() {
        let budget = ByteBudget::new(1 << 20);
        let shared = SharedBuffer::copy_of(&[3; 5000], &budget).expect("within the budget");
        let start = shared.as_ptr();
        let mut send_buffer = SendBuffer::default();
        send_buffer.push_buffer(shared.clone().into(), 1000, 5000);
        send_buffer.push_buffer(shared.into(), 0, COPY_BYTES_MAX);
        let mut slices = Vec::new();
        send_buffer.slices(&mut slices, usize::MAX);
        assert_eq!(slices[0].as_ptr(), start.wrapping_add(1000), "not a copy");
        assert_eq!(all(&send_buffer), [3; 4000 + COPY_BYTES_MAX]);
        send_buffer.advance(3999);
        assert!(budget.in_use_bytes() > 5000);
        send_buffer.advance(1);
        assert_eq!(budget.in_use_bytes(), 0, "the short part is a copy");
    }

    #[test]
    fn loans_that_end_before_they_are_sent_leave_their_bytes() {
        let lent = [vec![1; 2000], vec![2; 3000], vec![3; 2000]];
        let pool = BufferPool::new(1 << 20);
        let bytes_of = |data: &ResponseData| match data {
            ResponseData::Kept(buffer) => buffer.to_vec(),
            ResponseData::Lent(loan, _) => lent[*loan as usize].clone(),
        };
        let mut send_buffer = SendBuffer::default();
        let mut kept = Buffer::zeroed(1500);
        kept.fill(9);
        for (loan, value) in lent.iter().enumerate() {
            let reservation = pool.reserve(value.len()).expect("a free pool");
            send_buffer.push_copy(b"head");
            send_buffer.push_reference(ResponseData::Lent(loan as u64, reservation), 0, value.len());
        }
        send_buffer.push_buffer(kept.into(), 0, 1500);
        let in_use_bytes = pool.in_use_bytes();
        let mut released = Vec::new();
        send_buffer.advance_with(4 + 2000 + 4 + 1000, |data| released.push(bytes_of(&data)));
        assert_eq!(released, [lent[0].clone()]);
        assert!(pool.in_use_bytes() < in_use_bytes, "a loan that was sent needs no copy");
        send_buffer.copy_loans(|loan| &lent[loan as usize]);
        let want = [&[2; 2000][..], b"head", &[3; 2000], &[9; 1500]].concat();
        assert_eq!(all(&send_buffer), want);
        send_buffer.advance(want.len());
        assert_eq!(pool.in_use_bytes(), 0);
    }

    #[test]
    fn random_pushes_and_sends_preserve_the_byte_stream() {
        let mut random = Prng::new(3);
        let (mut send_buffer, mut want) = (SendBuffer::default(), VecDeque::new());
        for round in 0..20_000u32 {
            match random.below(3) {
                0 => {
                    let bytes = vec![round as u8; random.below(60) as usize];
                    send_buffer.push_copy(&bytes);
                    want.extend(bytes);
                }
                1 => {
                    let mut buffer = Buffer::zeroed(random.below(4000) as usize);
                    buffer.fill(round as u8);
                    let from = random.below(buffer.len() as u64 + 1) as usize;
                    want.extend(&buffer[from..]);
                    let to = buffer.len();
                    send_buffer.push_buffer(buffer.into(), from, to);
                }
                _ => {
                    let count = random.below(send_buffer.unsent_bytes() as u64 + 1) as usize;
                    send_buffer.advance(count);
                    want.drain(..count);
                }
            }
            assert_eq!(send_buffer.unsent_bytes(), want.len());
            if round % 64 == 0 {
                send_buffer.advance(send_buffer.unsent_bytes() - want.len().min(100_000));
                want.drain(..want.len() - send_buffer.unsent_bytes());
                let mut slices = Vec::new();
                send_buffer.slices(&mut slices, usize::MAX);
                let got: Vec<u8> = slices.iter().flat_map(|slice| slice.to_vec()).collect();
                assert_eq!(got, want.iter().copied().take(got.len()).collect::<Vec<_>>());
            }
        }
    }

    #[test]
    fn any_mix_of_appends_and_sends_releases_every_reference_once() {
        let values: Vec<Vec<u8>> = (0..4).map(|i| vec![i; 3000]).collect();
        let mut random = Prng::new(1);
        let (mut send_buffer, mut want, mut referenced) =
            (SendBuffer::<u16>::new(1 << 20), VecDeque::new(), 0);
        for round in 0..5_000u32 {
            match random.below(7) {
                0 | 1 => {
                    let bytes = vec![round as u8; random.below(90) as usize];
                    send_buffer.append(|staging| staging.extend_from_slice(&bytes));
                    want.extend(bytes);
                }
                2 | 3 => {
                    let (slot, from) = (random.below(4) as u16, random.below(2999) as usize);
                    send_buffer.push_reference(slot, from, 3000);
                    want.extend(&values[usize::from(slot)][from..]);
                    referenced += 1;
                }
                4 => {
                    let kept_bytes = random.below(want.len() as u64 + 1);
                    send_buffer.truncate_with(send_buffer.sent_bytes() + kept_bytes, |_| referenced -= 1);
                    want.truncate(kept_bytes as usize);
                }
                _ => {
                    let mut slices = Vec::new();
                    send_buffer.slices_with(|&slot| &values[usize::from(slot)], &mut slices, usize::MAX);
                    let got: Vec<u8> = slices.iter().flat_map(|s| s.to_vec()).collect();
                    assert!(want.iter().take(got.len()).eq(got.iter()));
                    let count = random.below(got.len() as u64 + 1) as usize;
                    send_buffer.advance_with(count, |_| referenced -= 1);
                    want.drain(..count);
                }
            }
            assert_eq!((send_buffer.appended_bytes() - send_buffer.sent_bytes()) as usize, want.len());
            assert_eq!(send_buffer.unsent_bytes(), want.len());
        }
        while !want.is_empty() {
            let count = want.len().min(1000);
            send_buffer.advance_with(count, |_| referenced -= 1);
            want.drain(..count);
        }
        assert!(send_buffer.is_empty() && referenced == 0);
    }

    #[test]
    fn sent_bytes_do_not_grow_the_staging_area() {
        let mut send_buffer = SendBuffer::<ResponseData>::default();
        send_buffer.push_copy(&[1; 100]);
        for _ in 0..10_000 {
            send_buffer.push_copy(&[2; 24]);
            send_buffer.advance(24);
        }
        assert!(send_buffer.staging.capacity() <= 1024, "{}", send_buffer.staging.capacity());
    }

    #[test]
    fn one_send_has_at_most_the_requested_bytes_and_slices() {
        let mut send_buffer = SendBuffer::<u16>::default();
        let value = vec![5; 2000];
        for _ in 0..SLICES_MAX {
            send_buffer.push_copy(&[4; 10]);
            send_buffer.push_reference(0, 0, 2000);
        }
        let mut slices = Vec::new();
        send_buffer.slices_with(|_| &value, &mut slices, 2500);
        assert_eq!(slices.iter().map(|slice| slice.len()).collect::<Vec<_>>(), [10, 2000, 10, 480]);
        slices.clear();
        send_buffer.slices_with(|_| &value, &mut slices, usize::MAX);
        assert_eq!(slices.len(), SLICES_MAX);
    }

    #[test]
    fn the_staging_area_releases_excess_capacity_once_all_is_sent() {
        let mut send_buffer = SendBuffer::<ResponseData>::new(4096);
        send_buffer.push_copy(&[0; 10_000]);
        send_buffer.advance(9_999);
        assert!(send_buffer.staging.capacity() >= 10_000);
        send_buffer.advance(1);
        assert!(send_buffer.staging.capacity() <= 4096, "{}", send_buffer.staging.capacity());
    }
}
