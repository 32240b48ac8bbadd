//! Bytes of devices from which the responses of one connection are sent, in the order of the responses.
//!
//! In: bytes that a device holds, one for each loan of the connection
//! ([`ResponseData`](octokv_wire::send_buffer::ResponseData)). Out: the bytes, until the loan ends. Invariant: when the socket takes no
//! more, all loans of its connection end, by a copy to buffers that were reserved for it, so that a host that does not read
//! delays no write.

use octokv_device::HeldBytes;
use octokv_nvmf::Connection;
use octokv_wire::send_buffer::ResponseData;
use std::collections::VecDeque;

/// See the module header.
#[derive(Debug, Default)]
pub struct Loans {
    held: VecDeque<HeldBytes>,
    /// The number of the first.
    first: u64,
}

impl Loans {
    /// Adds the bytes of the next loan.
    #[inline]
    pub fn push(&mut self, bytes: HeldBytes) {
        self.held.push_back(bytes);
    }

    /// Whether nothing is lent.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.held.is_empty()
    }

    /// The bytes of a response.
    #[inline]
    pub fn resolve<'a>(&'a self, data: &'a ResponseData) -> &'a [u8] {
        match data {
            ResponseData::Kept(buffer) => buffer,
            ResponseData::Lent(loan, _) => &self.held[(loan - self.first) as usize],
        }
    }

    /// The response was sent: ends its loan.
    #[inline]
    pub fn release(&mut self, data: ResponseData) {
        if let ResponseData::Lent(loan, _) = data {
            debug_assert_eq!(loan, self.first, "responses are sent in their order");
            self.held.pop_front();
            self.first += 1;
        }
    }

    /// Ends the loans of a connection whose responses are all sent or dropped.
    pub fn end_all(&mut self) {
        self.first += self.held.len() as u64;
        self.held.clear();
    }

    /// Ends all loans, whose bytes the socket does not take now: copies them.
    #[cold]
    pub fn copy_unsent(&mut self, connection: &mut Connection) {
        connection.send_buffer().copy_loans(|loan| &self.held[(loan - self.first) as usize]);
        self.end_all();
    }
}
