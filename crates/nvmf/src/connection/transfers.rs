//! Buffers for the data of commands: which transfer gets one, and which takes too long.

use super::state::Connection;
use octokv_base::{BufferPool, Nanos};

/// How long the data of a transfer may stop coming before the connection is given up: its buffers are wanted.
const TRANSFER_IDLE_TIMEOUT: Nanos = Nanos::from_secs(30);
/// And how slowly it may come in all, beyond that, in bytes a second.
const TRANSFER_BYTES_PER_SECOND_MIN: u64 = 256 << 10;

impl Connection {
    /// Gives buffers to the transfers that wait for them, in turn, and asks for their data.
    pub(super) fn grant_transfers(&mut self, pool: &BufferPool) {
        let share = self.target.config().receive_bytes_max;
        while let Some((slot, bytes)) = self.slots.first_waiting() {
            if !can_grant(
                bytes,
                self.slots.receiving_bytes(),
                share,
                pool.in_use_bytes(),
                pool.budget_bytes(),
            ) {
                return;
            }
            let Some(buffer) = pool.take(bytes) else { return };
            let (command_id, expected) = self.slots.start_receiving(slot, buffer, self.last_tick_at);
            self.pdu_writer.write_r2t(command_id, slot, expected);
        }
    }

    /// Keeps the pool at hand while a transfer waits for a buffer of it.
    pub(super) fn update_buffer_wait_pool(&mut self, pool: &BufferPool) {
        let is_waiting = self.slots.first_waiting().is_some();
        if is_waiting != self.buffer_wait_pool.is_some() {
            self.buffer_wait_pool = is_waiting.then(|| pool.clone());
        }
    }

    /// Asks for data that waited for buffers, where there are some now.
    #[inline]
    pub(super) fn grant_waiting_transfers(&mut self) {
        if let Some(pool) = self.buffer_wait_pool.take() {
            self.grant_transfers(&pool);
            self.update_buffer_wait_pool(&pool);
        }
    }

    /// Whether data that was asked for does not come, or so slowly that its buffers are held for nothing: a host that
    /// sends a byte now and then, or other commands, holds them no longer than one that sends nothing. What was asked for
    /// before has its time, too: it is over when the last data comes, and was in its way.
    pub(super) fn has_late_transfer(&self, now: Nanos) -> bool {
        let (is_silent, bytes) =
            (now.since(self.last_activity_at) >= TRANSFER_IDLE_TIMEOUT, self.slots.receiving_bytes());
        self.slots.open_transfers().any(|transfer| {
            let bytes = transfer.open_bytes.max(bytes) as u64;
            let whole =
                TRANSFER_IDLE_TIMEOUT + Nanos::from_millis(bytes * 1000 / TRANSFER_BYTES_PER_SECOND_MIN);
            is_silent || now.since(transfer.requested_at) >= whole
        })
    }
}

/// What transfers may take of a pool of this budget: the rest is for commands that wait for nothing but
/// the engine, so that these always end, and no connection waits with its own data behind such a command.
pub(super) const fn transfer_budget(budget_bytes: usize, is_first: bool) -> usize {
    budget_bytes - budget_bytes / if is_first { 8 } else { 4 }
}

/// Whether a connection with `open` bytes of transfers under way, of its `share`, may begin one more when
/// `out` bytes of the pool's budget are in use. An unused pool grants any.
fn can_grant(bytes: usize, open: usize, share: usize, out: usize, budget: usize) -> bool {
    let is_first = open == 0;
    let within_share = is_first || open + bytes <= share;
    within_share && (out == 0 || out + bytes <= transfer_budget(budget, is_first))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transfers_are_granted_within_the_share_and_leave_a_rest_of_the_pool() {
        let table = [
            // want, bytes, open, share, out, budget
            (true, 10, 0, 5, 0, 80), // The first may exceed the share.
            (true, 10, 20, 30, 20, 80),
            (false, 11, 20, 30, 20, 80),
            (true, 10, 10, 99, 50, 80),
            (false, 11, 10, 99, 50, 80), // A quarter of the pool is left.
            (true, 10, 0, 99, 60, 80),
            (false, 11, 0, 99, 60, 80), // An eighth, when it is the connection's first.
            (true, 90, 0, 99, 0, 80),   // The pool itself refuses this one.
        ];
        for (want, bytes, open, share, out, budget) in table {
            assert_eq!(can_grant(bytes, open, share, out, budget), want, "{bytes} {open} {share} {out}");
        }
    }
}
