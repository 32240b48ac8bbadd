//! What a client may be told. [`ClientConfig::default`] fits a client on the same network as its node.

use octokv_base::{NamespaceId, Nanos};

/// Bounds, names and times of one session.
#[derive(Clone, Debug)]
pub struct ClientConfig {
    /// The subsystem to connect to.
    pub subsystem_nqn: String,
    /// The namespace to use.
    pub namespace: NamespaceId,
    /// Our own name; fairness and limits of a node go by it.
    pub host_nqn: String,
    /// Our host identifier; the same name must always come with the same identifier.
    pub host_id: [u8; 16],
    /// I/O queues, each on a TCP connection of its own. The controller may grant fewer.
    pub io_queues: u16,
    /// Commands in flight on each queue. The controller may allow fewer.
    pub queue_depth: u16,
    /// Ask for CRC-32C digests of headers.
    pub header_digest: bool,
    /// Ask for CRC-32C digests of data.
    pub data_digest: bool,
    /// How long a command may take before its connection counts as dead.
    pub command_timeout: Nanos,
    /// How long connecting and setting up may take in all.
    pub connect_timeout: Nanos,
    /// The keep alive time announced to the controller; half of it passes between two signs of life.
    pub keep_alive: Nanos,
    /// What to do when the connection is lost after it was up.
    pub reconnect: Reconnect,
    /// Receive buffer of each I/O queue, in bytes.
    pub receive_buffer_bytes: usize,
    /// Bytes of values received, or to be sent, that the session keeps for reuse.
    pub pool_bytes: usize,
    /// How long the I/O thread of a [`crate::BlockingClient`] spins after the last work before it sleeps.
    pub spin_time: Nanos,
}

/// When to connect again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reconnect {
    /// Never: the session ends with its connection.
    Never,
    /// Again and again, with doubling pauses.
    BackOff {
        /// The first pause.
        first_delay: Nanos,
        /// The longest pause.
        delay_max: Nanos,
        /// Give up when this much time has passed since the loss; [`Nanos::NEVER`] to never do so.
        give_up_after: Nanos,
    },
}

impl Default for ClientConfig {
    fn default() -> ClientConfig {
        ClientConfig {
            subsystem_nqn: "nqn.2026-11.io.octokv:node".to_string(),
            namespace: NamespaceId(1),
            host_nqn: "nqn.2026-11.io.octokv:client".to_string(),
            host_id: *b"octokv client id",
            io_queues: 1,
            queue_depth: 128,
            header_digest: false,
            data_digest: false,
            command_timeout: Nanos::from_secs(30),
            connect_timeout: Nanos::from_secs(10),
            keep_alive: Nanos::from_secs(30),
            reconnect: Reconnect::BackOff {
                first_delay: Nanos::from_millis(20),
                delay_max: Nanos::from_secs(2),
                give_up_after: Nanos::NEVER,
            },
            receive_buffer_bytes: 1 << 20,
            pool_bytes: 256 << 20,
            spin_time: Nanos::from_micros(50),
        }
    }
}

/// The pause before attempt number `attempt` (0 first) after a loss.
pub fn backoff_delay(reconnect: Reconnect, attempt: u32, since_loss: Nanos) -> Option<Nanos> {
    match reconnect {
        Reconnect::Never => None,
        Reconnect::BackOff { give_up_after: give_up, .. } if since_loss >= give_up => None,
        Reconnect::BackOff { first_delay: first, delay_max: longest, .. } => {
            let doubled = first.0.saturating_mul(1u64.checked_shl(attempt).unwrap_or(u64::MAX));
            Some(Nanos(doubled.min(longest.0)))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delays_double_up_to_the_maximum_until_it_gives_up() {
        let (ms, secs) = (Nanos::from_millis, Nanos::from_secs);
        let back_off = Reconnect::BackOff { first_delay: ms(10), delay_max: ms(35), give_up_after: secs(1) };
        let table = [
            (back_off, 0, ms(0), Some(ms(10))),
            (back_off, 1, ms(0), Some(ms(20))),
            (back_off, 2, ms(999), Some(ms(35))),
            (back_off, 99, ms(999), Some(ms(35))),
            (back_off, 0, secs(1), None),
            (Reconnect::Never, 0, ms(0), None),
        ];
        for (reconnect, attempt, since, want) in table {
            assert_eq!(backoff_delay(reconnect, attempt, since), want);
        }
    }
}
