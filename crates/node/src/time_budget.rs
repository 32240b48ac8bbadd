//! What one connection may have of a turn: so many bytes as are dealt with in about its share of the turn's time.
//!
//! ```text
//!   turn of a core:  a's share │ b's share │ c's share      share = turn ÷ connections that talk
//!   quantum of a connection:  longer than its share ─▶ smaller in proportion     full and shorter than half ─▶ twice
//!   turn:  somebody asks for little while somebody asks for much ─▶ short     otherwise ─▶ long
//! ```
//! In: how many bytes were dealt with, and how long that took. Out: how many to take the next time. What a byte costs
//! depends on what a host asks for (a Retrieve of 1 MiB in 72 of them, or a part of a value), so it is learned, for
//! each connection. Long turns spare system calls, and those who fill them wait for themselves; short ones spare
//! those who ask for little a wait for others. Where time is virtual and work takes none, a quantum grows to its
//! most, and turns are long.

use octokv_base::Nanos;

/// How long all connections of a core may be dealt with before replies go out, where nobody asks for little beside
/// somebody who asks for much. Measured: the throughput of one connection falls below it.
const TURN: Nanos = Nanos::from_micros(100);
/// How long where somebody does. What is begun when it is over is not cut, and somebody who asks for much has a part in
/// any case, so a request waits for others a little longer than this on the way in, and once more on the way out.
const TURN_SHORT: Nanos = Nanos::from_micros(40);
/// A share is not shorter than this: the system calls for one connection take about a third of it.
const SHARE_MIN: Nanos = Nanos::from_micros(16);
/// A connection asks for little that within a window never took more than this of a turn to receive, or to send: less
/// than a quantum comes to that is cut to a share.
const LITTLE: Nanos = Nanos(SHARE_MIN.0 / 2);
/// Over so long it is seen who asks for how much.
const WINDOW: Nanos = Nanos::from_millis(10);
/// What a connection begins with.
const BYTES_FIRST: usize = 4096;
/// How much smaller a quantum gets at once.
const FALL_MAX: usize = 64;

/// What a turn of a core has dealt with, and how long it may be.
#[derive(Debug)]
pub struct Turn {
    /// How long this turn has dealt with what hosts sent.
    pub receiving: Nanos,
    /// And with sending.
    pub sending: Nanos,
    /// The number of the window of time that this turn is in.
    window: u64,
    /// Connections that talked in this window, and those of them that asked for much.
    talked: usize,
    much: usize,
    /// Whether some of both did in the window before.
    mixed_before: bool,
}

/// What a turn remembers of a connection.
#[derive(Clone, Copy, Debug, Default)]
pub struct Talk {
    /// One more than the window it last talked in.
    window: u64,
    /// Whether it asked for much then, and in the window before that.
    much: bool,
    much_before: bool,
}

impl Turn {
    /// Before the first one.
    pub fn new() -> Turn {
        Turn {
            receiving: Nanos::ZERO,
            sending: Nanos::ZERO,
            window: 0,
            talked: 0,
            much: 0,
            mixed_before: false,
        }
    }

    /// The next turn begins.
    pub fn begin(&mut self, now: Nanos) {
        self.receiving = Nanos::ZERO;
        self.sending = Nanos::ZERO;
        let window = now.0 / WINDOW.0;
        if window != self.window {
            self.mixed_before = window == self.window + 1 && self.is_mixed();
            self.window = window;
            self.talked = 0;
            self.much = 0;
        }
    }

    fn is_mixed(&self) -> bool {
        self.much > 0 && self.talked > self.much
    }

    /// Whether a connection asks for much, by what it took in this window and the one before.
    pub fn asks_much(&self, talk: Talk) -> bool {
        match talk.window.checked_sub(self.window) {
            Some(0) => talk.much,
            Some(1) => talk.much || talk.much_before,
            _ => false,
        }
    }

    /// How long it may be.
    pub fn length(&self) -> Nanos {
        if self.mixed_before || self.is_mixed() { TURN_SHORT } else { TURN }
    }

    /// The share of each of so many connections.
    pub fn share(&self, talkers: usize) -> Nanos {
        Nanos(self.length().0 / talkers.max(1) as u64).max(SHARE_MIN)
    }

    /// Whether it has had its time for what hosts sent.
    pub fn is_over(&self) -> bool {
        self.receiving >= self.length()
    }

    /// Whether it has had its time for sending.
    pub fn is_over_for_sending(&self) -> bool {
        self.sending >= self.length()
    }

    /// A connection took so much of it.
    pub fn took(&mut self, talk: &mut Talk, spent: Nanos) {
        let first = talk.window != self.window + 1;
        if first {
            let much_before = talk.much && talk.window == self.window;
            *talk = Talk { window: self.window + 1, much: false, much_before };
            self.talked += 1;
        }
        if !talk.much && spent > LITTLE {
            talk.much = true;
            self.much += 1;
        }
    }
}

/// How many bytes of a connection are taken at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quantum {
    bytes: usize,
    least: usize,
    most: usize,
}

impl Quantum {
    /// One of a fresh connection, that stays within `least` and `most` bytes.
    pub fn new(least: usize, most: usize) -> Quantum {
        Quantum { bytes: BYTES_FIRST.clamp(least, most), least, most }
    }

    /// Bytes.
    pub fn bytes(self) -> usize {
        self.bytes
    }

    /// `bytes` were dealt with in `spent`, where `share` was right.
    pub fn learn(&mut self, bytes: usize, spent: Nanos, share: Nanos) {
        if spent > share {
            let fits = (bytes as u64).saturating_mul(share.0) / spent.0;
            self.bytes = (fits as usize).max(self.bytes / FALL_MAX).clamp(self.least, self.bytes);
        } else if bytes >= self.bytes && spent.0 < share.0 / 2 {
            self.bytes = (self.bytes * 2).min(self.most);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHARE: Nanos = Nanos::from_micros(100);
    const FRESH: Quantum = Quantum { bytes: BYTES_FIRST, least: 72, most: 1 << 20 };

    /// The quantum after `turns` full ones at so many nanoseconds a byte.
    fn settled(mut quantum: Quantum, ns_per_byte: u64, turns: usize) -> Quantum {
        for _ in 0..turns {
            let bytes = quantum.bytes();
            quantum.learn(bytes, Nanos(bytes as u64 * ns_per_byte), SHARE);
        }
        quantum
    }

    #[test]
    fn a_quantum_comes_to_what_fits_into_a_share() {
        for ns_per_byte in [1, 3, 14, 100] {
            let bytes = settled(FRESH, ns_per_byte, 20).bytes() as u64;
            let spent = bytes * ns_per_byte;
            assert!((SHARE.0 / 2..=SHARE.0).contains(&spent), "{ns_per_byte} ns a byte: {spent} ns");
        }
    }

    #[test]
    fn costly_commands_come_one_at_a_time_and_cheap_ones_many() {
        let costly = settled(FRESH, 10_000, 3);
        assert_eq!(costly.bytes(), 72);
        assert_eq!(settled(Quantum::new(32768, 1 << 20), 10_000, 3).bytes(), 32768);
        assert_eq!(settled(costly, 0, 14).bytes(), 1 << 20, "work that takes no time is not held back");
        assert_eq!(settled(costly, 0, 13).bytes(), 72 << 13);
    }

    #[test]
    fn little_that_took_little_says_nothing_and_one_slow_turn_not_much() {
        let mut quantum = FRESH;
        quantum.learn(100, Nanos(10), SHARE);
        assert_eq!(quantum.bytes(), BYTES_FIRST);
        let mut quantum = settled(FRESH, 0, 20);
        quantum.learn(1 << 20, Nanos::from_secs(1), SHARE);
        assert_eq!(quantum.bytes(), (1 << 20) / FALL_MAX, "the core may have been taken away for a while");
    }

    /// A turn in which connections took so much, in the window before and in this one.
    fn after(before: &[u64], within: &[u64]) -> Turn {
        let mut turn = Turn::new();
        let mut talks = [Talk::default(); 8];
        for (window, spans) in [before, within].into_iter().enumerate() {
            turn.begin(Nanos(WINDOW.0 * (window as u64 + 5)));
            for (talk, &micros) in talks.iter_mut().zip(spans) {
                turn.took(talk, Nanos::from_micros(micros));
                turn.took(talk, Nanos::from_micros(1));
            }
        }
        turn
    }

    #[test]
    fn a_turn_is_short_while_somebody_asks_for_little_beside_somebody_who_asks_for_much() {
        for (before, within, length) in [
            (&[][..], &[][..], TURN),
            (&[], &[90], TURN),
            (&[], &[3], TURN),
            (&[], &[3, 4, 8], TURN),
            (&[], &[90, 30, 9], TURN),
            (&[], &[90, 3], TURN_SHORT),
            (&[], &[3, 90], TURN_SHORT),
            (&[90, 3], &[90], TURN_SHORT),
            (&[90, 3], &[], TURN_SHORT),
            (&[90], &[3], TURN),
        ] {
            assert_eq!(after(before, within).length(), length, "{before:?} and then {within:?}");
        }
    }

    #[test]
    fn a_connection_that_asked_for_much_long_ago_is_as_good_as_any() {
        let (mut turn, mut talk) = (Turn::new(), Talk::default());
        let window = |number: u64| Nanos(WINDOW.0 * number);
        turn.begin(window(5));
        assert!(!turn.asks_much(talk));
        turn.took(&mut talk, Nanos::from_micros(50));
        assert!(turn.asks_much(talk));
        turn.begin(window(6));
        assert!(turn.asks_much(talk), "in the window before");
        turn.took(&mut talk, Nanos::from_micros(1));
        assert!(turn.asks_much(talk), "in the window before, though little since");
        turn.begin(window(7));
        turn.took(&mut talk, Nanos::from_micros(1));
        assert!(!turn.asks_much(talk), "two windows of little");
        turn.took(&mut talk, Nanos::from_micros(50));
        turn.begin(window(900));
        assert!(!turn.asks_much(talk), "silent for long");
        turn.took(&mut talk, Nanos::from_micros(1));
        assert!(!turn.asks_much(talk), "and back");
    }

    #[test]
    fn what_was_seen_two_windows_ago_is_forgotten() {
        let mut turn = after(&[], &[90, 3]);
        turn.begin(Nanos(WINDOW.0 * 7));
        assert_eq!(turn.length(), TURN_SHORT);
        turn.begin(Nanos(WINDOW.0 * 8));
        assert_eq!(turn.length(), TURN);
        let mut turn = after(&[], &[90, 3]);
        turn.begin(Nanos(WINDOW.0 * 9));
        assert_eq!(turn.length(), TURN, "a window in which nobody talked lies between");
    }

    #[test]
    fn shares_add_up_to_a_turn_while_they_are_worth_their_system_calls() {
        let mut turn = after(&[], &[90]);
        assert_eq!(turn.share(0), TURN);
        assert_eq!(turn.share(1), TURN);
        assert_eq!(turn.share(4).0 * 4, TURN.0);
        assert_eq!(turn.share(1000), SHARE_MIN);
        assert_eq!(after(&[], &[90, 3]).share(2).0 * 2, TURN_SHORT.0);
        turn.receiving = Nanos(TURN.0 - 1);
        assert!(!turn.is_over() && !turn.is_over_for_sending());
        turn.receiving = TURN;
        assert!(turn.is_over() && !turn.is_over_for_sending());
        turn.begin(Nanos(WINDOW.0 * 6 + 1));
        assert!(!turn.is_over(), "the next turn has its own time");
    }
}
