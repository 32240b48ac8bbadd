//! Flow control of host data: grants buffers to transfers and detects transfers that take too long.

use super::state::Connection;
use octokv_base::{BufferPool, Nanos};

/// A transfer that receives nothing for this long ends the connection, since it holds buffers.
const TRANSFER_IDLE_TIMEOUT: Nanos = Nanos::from_secs(30);
/// The lowest average rate of a transfer beyond the idle timeout, in bytes per second.
const TRANSFER_BYTES_PER_SECOND_MIN: u64 = 256 << 10;

impl Connection {
    /// Assigns buffers to waiting transfers in arrival order and sends an R2T for each.
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

    /// Keeps a handle of the pool while a transfer waits for a buffer.
    pub(super) fn update_buffer_wait_pool(&mut self, pool: &BufferPool) {
        let is_waiting = self.slots.first_waiting().is_some();
        if is_waiting != self.buffer_wait_pool.is_some() {
            self.buffer_wait_pool = is_waiting.then(|| pool.clone());
        }
    }

    /// Retries waiting transfers with the pool that they wait for.
    #[inline]
    pub(super) fn grant_waiting_transfers(&mut self) {
        if let Some(pool) = self.buffer_wait_pool.take() {
            self.grant_transfers(&pool);
            self.update_buffer_wait_pool(&pool);
        }
    }

    /// Whether requested data is overdue: nothing came for [`TRANSFER_IDLE_TIMEOUT`], or a transfer takes
    /// longer than that plus its bytes at [`TRANSFER_BYTES_PER_SECOND_MIN`].
    ///
    /// A host that sends a byte now and then, or other commands, thus holds buffers no longer than a silent
    /// one. A transfer's time includes the bytes that were requested before it (`open_bytes`), since they
    /// arrive first.
    pub(super) fn has_late_transfer(&self, now: Nanos) -> bool {
        let (is_silent, bytes) =
            (now.since(self.last_activity_at) >= TRANSFER_IDLE_TIMEOUT, self.slots.receiving_bytes());
        self.slots.open_transfers().any(|transfer| {
            let bytes = transfer.open_bytes.max(bytes) as u64;
            let time_limit =
                TRANSFER_IDLE_TIMEOUT + Nanos::from_millis(bytes * 1000 / TRANSFER_BYTES_PER_SECOND_MIN);
            is_silent || now.since(transfer.requested_at) >= time_limit
        })
    }
}

/// The part of a pool's budget that transfers may use.
///
/// The rest is reserved for commands that wait only for the engine: these always finish, so no connection
/// waits for a buffer with its own data queued behind that command.
pub(super) const fn transfer_budget(budget_bytes: usize, is_first: bool) -> usize {
    budget_bytes - budget_bytes / if is_first { 8 } else { 4 }
}

/// Whether a connection that has `open` bytes of transfers under way, of its limit `share`, may start
/// another one of `bytes` while `out` bytes of the pool's `budget` are in use. An unused pool grants any.
fn can_grant(bytes: usize, open: usize, share: usize, out: usize, budget: usize) -> bool {
    let is_first = open == 0;
    let within_share = is_first || open + bytes <= share;
    within_share && (out == 0 || out + bytes <= transfer_budget(budget, is_first))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transfers_are_granted_within_the_share_and_leave_part_of_the_pool_free() {
        let table = [
            // want, bytes, open, share, out, budget
            (true, 10, 0, 5, 0, 80), // The first may exceed the share.
            (true, 10, 20, 30, 20, 80),
            (false, 11, 20, 30, 20, 80),
            (true, 10, 10, 99, 50, 80),
            (false, 11, 10, 99, 50, 80), // A quarter of the pool stays reserved.
            (true, 10, 0, 99, 60, 80),
            (false, 11, 0, 99, 60, 80), // An eighth, if it is the connection's first.
            (true, 90, 0, 99, 0, 80),   // The pool itself refuses this one.
        ];
        for (want, bytes, open, share, out, budget) in table {
            assert_eq!(can_grant(bytes, open, share, out, budget), want, "{bytes} {open} {share} {out}");
        }
    }
}
