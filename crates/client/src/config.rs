//! Configuration of a client. [`ClientConfig::default`] suits a client on the same network as its node.

use crate::bug_injection::{self, InjectedBug};
use octokv_base::{NamespaceId, Nanos, Prng};

/// Limits, names and timeouts of one session.
#[derive(Clone, Debug)]
pub struct ClientConfig {
    /// NQN of the subsystem.
    pub subsystem_nqn: String,
    /// Namespace identifier (NSID) of all commands.
    pub namespace: NamespaceId,
    /// NQN of this host; access control, fairness and limits of the node apply to it.
    pub host_nqn: String,
    /// Host identifier. NVMe requires one identifier per host NQN.
    pub host_id: [u8; 16],
    /// Number of I/O queues, each on its own TCP connection. The controller may grant fewer.
    pub io_queues: u16,
    /// Maximum commands in flight on each I/O queue. The controller may allow fewer.
    pub queue_depth: u16,
    /// Whether to request CRC-32C digests of headers.
    pub header_digest: bool,
    /// Whether to request CRC-32C digests of data.
    pub data_digest: bool,
    /// Maximum time of a command; a command that exceeds it ends its connection.
    pub command_timeout: Nanos,
    /// Maximum time of connecting and initialization together.
    pub connect_timeout: Nanos,
    /// Keep alive timeout sent to the controller (KATO); the client sends a Keep Alive twice as often.
    pub keep_alive: Nanos,
    /// Reconnection after the loss of an established connection.
    pub reconnect: Reconnect,
    /// Whether a first connection that fails is retried like a lost one; otherwise it ends the session.
    pub retry_first_connection: bool,
    /// Seed of the jitter of reconnect delays: each is drawn between half of it and all of it, so that hosts that lost
    /// one node do not return to it in step. `None` for delays without jitter.
    pub jitter_seed: Option<u64>,
    /// Receive buffer of each I/O queue, in bytes.
    pub receive_buffer_bytes: usize,
    /// Maximum size of the session's buffer pool, in bytes.
    pub pool_bytes: usize,
    /// Whether to ask for windows of tokens of devices, for a scheduler as [`crate::FlowControl`]. No effect on namespaces without tokens.
    pub flow_control: bool,
    /// Time that the I/O thread of a [`crate::Client`] spins after the last work before it sleeps.
    pub spin_time: Nanos,
}

/// Reconnection policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reconnect {
    /// The session ends with its connection.
    Never,
    /// Reconnects with exponential backoff.
    BackOff {
        /// Delay before the first attempt.
        first_delay: Nanos,
        /// Maximum delay between attempts.
        delay_max: Nanos,
        /// Time since the loss after which the session ends; [`Nanos::NEVER`] for no limit.
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
            retry_first_connection: false,
            jitter_seed: None,
            receive_buffer_bytes: 1 << 20,
            pool_bytes: 256 << 20,
            flow_control: false,
            spin_time: Nanos::from_micros(50),
        }
    }
}

impl ClientConfig {
    /// Time between two searches for commands that exceed their time.
    pub(crate) fn timeout_check_interval(&self) -> Nanos {
        Nanos((self.command_timeout.0 / 8).clamp(1_000_000, 100_000_000))
    }

    /// Time between two Keep Alives: half of the timeout, since the node measures that by another clock.
    pub(crate) fn keep_alive_interval(&self) -> Nanos {
        match bug_injection::is_injected(InjectedBug::KeepAliveLate) {
            true => Nanos(self.keep_alive.0 / 20 * 19),
            false => Nanos(self.keep_alive.0 / 2),
        }
    }
}

/// Delay before reconnect attempt `attempt` (from 0); `None` if the session ends instead.
pub fn backoff_delay(reconnect: Reconnect, attempt: u32, since_loss: Nanos) -> Option<Nanos> {
    match reconnect {
        Reconnect::Never => None,
        Reconnect::BackOff { give_up_after, .. } if since_loss >= give_up_after => None,
        Reconnect::BackOff { first_delay, delay_max, .. } => {
            let doubled = first_delay.0.saturating_mul(1u64.checked_shl(attempt).unwrap_or(u64::MAX));
            Some(Nanos(doubled.min(delay_max.0)))
        }
    }
}

/// A duration drawn uniformly between half of `delay` and `delay` ("equal jitter", Brooker, 2015).
pub(crate) fn with_jitter(delay: Nanos, random: &mut Prng) -> Nanos {
    Nanos(delay.0 - random.below(delay.0 / 2 + 1))
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

    #[test]
    fn jitter_spreads_a_delay_over_its_upper_half() {
        let mut random = Prng::new(3);
        let drawn: Vec<u64> = (0..1_000).map(|_| with_jitter(Nanos(100), &mut random).0).collect();
        assert!(drawn.iter().all(|delay| (50..=100).contains(delay)), "{drawn:?}");
        assert!((50..=100).all(|delay| drawn.contains(&delay)), "every delay of the range occurs");
    }
}
