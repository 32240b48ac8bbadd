//! Measures the throughput of a device in rounds, while a limit bounds the tokens in flight.
//!
//! ```text
//!   the limit changes    one generation later             enough generations, commands and tokens have ended
//!        │   not measured         │         measured                           │
//!        └────────────────────────┴─generation─┴─generation─┴─ … ─┴─generation─┴─▶ throughput = tokens ÷ busy time
//! ```
//! In: commands that end, with their times. Out: a result at the end of each round.
//!
//! **Generations.** A generation ends when a command ends that began in it. An engine with group commit ends the commands
//! of a group together, and their successors begin then. So a round of whole generations has whole groups, each with the
//! time that it took. A round that begins in the middle of a group would count the rest of the group without its time, and
//! the error would grow with the group. Kinds of commands have different groups: only the kind with most of the tokens
//! delimits generations. The first generation after a change of the limit is not measured, because it has commands that
//! were admitted under the former limit; few of them are left after it.
//!
//! **Busy time.** Time without commands in flight does not count: a load with pauses has the throughput of the device, not
//! its own.
//!
//! Invariant: a command counts in at most one round. Passive, without a clock. Tested below, and in `device_tokens`.

use crate::command_costs::CostKind;
use octokv_base::Nanos;

/// A round has at least this many generations.
const GENERATIONS_MIN: u32 = 4;
/// A round has at least this many commands: the mean of 64 service times varies by an eighth of what a single one does.
const COMMANDS_MIN: u32 = 64;
/// A round has at least this many times the limit in tokens.
const LIMITS_MIN: u64 = 4;
/// After this many times the limit a round ends without its generations: the kind that delimits them has become rare.
const LIMITS_MAX: u64 = 4 * LIMITS_MIN;
/// After this many commands without times in a round, the load does not need the device, and the round may never end.
const UNTIMED_MAX: u32 = 1024;
/// Two rounds have the same mix if no kind's share of the tokens differs by more. The share of 5 % Puts in 64 commands varies by a tenth.
const MIX_DIFFERENCE_MAX: f64 = 0.15;
/// Two rounds with the same limit have the same load if their throughputs differ by at most this factor.
const THROUGHPUT_RATIO_MAX: f64 = 1.5;

/// A command that ended on the device.
#[derive(Clone, Copy, Debug)]
pub struct EndedCommand {
    /// Its kind.
    pub kind: CostKind,
    /// The bytes of its value, which a Get knows only now.
    pub bytes: usize,
    /// When it was admitted, after any wait for tokens.
    pub began_at: Nanos,
    /// When it ended.
    pub ended_at: Nanos,
}

/// The cost of an ended command in tokens.
#[derive(Clone, Copy, Debug)]
pub(crate) struct EndedCost {
    /// As it is measured now.
    pub tokens: u32,
    /// Before measurement.
    pub starting: u32,
}

/// What ended in a round.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RoundResult {
    /// Starting tokens by kind.
    pub starting_tokens: [u64; CostKind::COUNT],
    /// The length of the round.
    pub length: Nanos,
    /// Starting tokens per ns of busy time.
    pub throughput: f64,
    /// The cost of the largest command, in tokens.
    pub largest: u32,
    /// The mean tokens in flight in the busy time, by Little's law.
    pub mean_active: f64,
    /// Whether a command had to wait, or half of the limit was in flight at some time. Hosts that know their windows do not send commands
    /// that would wait; RFC 7661, 4.3, likewise takes a congestion window as used when half of it is.
    pub was_used_up: bool,
    /// Whether less than half of the limit was in flight at some time.
    pub was_slack: bool,
}

impl RoundResult {
    /// Whether both rounds have about the same mix of kinds. Throughputs of different mixes are not comparable: starting tokens are only
    /// estimates of device time.
    pub fn is_of_same_mix(&self, other: &RoundResult) -> bool {
        let share = |round: &RoundResult, kind: usize| {
            round.starting_tokens[kind] as f64 / round.starting_tokens.iter().sum::<u64>().max(1) as f64
        };
        (0..CostKind::COUNT).all(|kind| (share(self, kind) - share(other, kind)).abs() < MIX_DIFFERENCE_MAX)
    }

    /// Whether both rounds, with the same limit, have about the same mix and throughput.
    pub fn is_of_same_load(&self, other: &RoundResult) -> bool {
        let is_near = |a: f64, b: f64| a < b * THROUGHPUT_RATIO_MAX;
        is_near(self.throughput, other.throughput)
            && is_near(other.throughput, self.throughput)
            && self.is_of_same_mix(other)
    }
}

/// See the module header.
#[derive(Clone, Debug, Default)]
pub(crate) struct ThroughputRound {
    /// The time: that of the latest end. Ends of different cores arrive in another order than they have.
    now: Nanos,
    /// When the limit last changed.
    changed_at: Nanos,
    /// When the measurement began; `None` in the generation after a change of the limit.
    began_at: Option<Nanos>,
    /// The kind that delimits generations.
    delimiting_kind: Option<CostKind>,
    /// The generations that have ended, and the begin of the present one.
    generations: u32,
    generation_began_at: Nanos,
    commands: u32,
    tokens: [u64; CostKind::COUNT],
    starting_tokens: [u64; CostKind::COUNT],
    largest: u32,
    was_used_up: bool,
    was_slack: bool,
    /// Tokens × ns of the commands that ended.
    token_ns: f64,
    /// Commands that ended without times.
    untimed: u32,
    /// When the last command in flight ended; `None` since a later one has ended.
    idle_since: Option<Nanos>,
    /// The last interval without commands in flight.
    idle: (Nanos, Nanos),
    /// The length of all such intervals.
    idle_ns: u64,
}

impl ThroughputRound {
    /// Begins a round with another limit: the measurement begins a generation later.
    pub fn settle(&mut self) {
        let (now, delimiting_kind) = (self.now, self.delimiting_kind);
        *self = ThroughputRound { now, changed_at: now, delimiting_kind, ..ThroughputRound::default() };
    }

    /// Begins the measurement of the next round, with the same limit.
    fn begin(&mut self) {
        let (now, changed_at, delimiting_kind) = (self.now, self.changed_at, self.delimiting_kind);
        *self = ThroughputRound {
            now,
            changed_at,
            delimiting_kind,
            began_at: Some(now),
            generation_began_at: now,
            ..ThroughputRound::default()
        };
    }

    /// Notes that a command has to wait, or that half of the limit is in flight.
    pub fn note_used_up(&mut self) {
        self.was_used_up = true;
    }

    /// Notes that less than half of the limit is in flight after a command ended; and whether it was the last one.
    pub fn note_slack(&mut self, is_idle: bool) {
        self.was_slack = true;
        if is_idle {
            self.idle_since = Some(self.now);
        }
    }

    /// Notes a command that ended without times. Returns whether the round has had so many of them that it may never end.
    pub fn note_untimed(&mut self) -> bool {
        self.untimed += 1;
        self.untimed > UNTIMED_MAX
    }

    /// Ends the interval without commands in flight when a command began. Ends arrive first from short commands, so that one that began
    /// earlier may shorten the interval later.
    fn note_busy_from(&mut self, began_at: Nanos) {
        if let Some(since) = self.idle_since.take() {
            self.idle = (since, began_at.max(since));
            self.idle_ns += self.idle.1.since(since).0;
        } else if self.idle.0 <= began_at && began_at < self.idle.1 {
            self.idle_ns -= self.idle.1.since(began_at).0;
            self.idle.1 = began_at;
        }
    }

    /// Notes a command that ended. Returns the result of the round if the round ends with it.
    pub fn note_end(&mut self, ended: EndedCommand, cost: EndedCost, limit: u32) -> Option<RoundResult> {
        self.now = self.now.max(ended.ended_at);
        let kind = ended.kind as usize;
        let delimits = ended.kind == *self.delimiting_kind.get_or_insert(ended.kind);
        self.tokens[kind] += u64::from(cost.tokens);
        let limits = self.tokens.iter().sum::<u64>() / u64::from(limit.max(1));
        let Some(began_at) = self.began_at else {
            if delimits && ended.began_at >= self.changed_at || limits >= LIMITS_MIN {
                self.begin();
            }
            return None;
        };
        self.note_busy_from(ended.began_at);
        self.token_ns += f64::from(cost.tokens) * ended.ended_at.since(ended.began_at).0 as f64;
        self.commands += 1;
        self.starting_tokens[kind] += u64::from(cost.starting);
        self.largest = self.largest.max(cost.tokens);
        let ends_generation = delimits && ended.began_at >= self.generation_began_at;
        if ends_generation {
            self.generations += 1;
            self.generation_began_at = self.now;
        }
        let has_generations = ends_generation && self.generations >= GENERATIONS_MIN && limits >= LIMITS_MIN;
        let is_over = self.commands >= COMMANDS_MIN && (has_generations || limits >= LIMITS_MAX);
        is_over.then(|| self.end(began_at))
    }

    fn end(&mut self, began_at: Nanos) -> RoundResult {
        let length = self.now.since(began_at);
        let starting: u64 = self.starting_tokens.iter().sum();
        let busy_ns = length.0.saturating_sub(self.idle_ns).max(1);
        let result = RoundResult {
            starting_tokens: self.starting_tokens,
            length,
            throughput: starting as f64 / busy_ns as f64,
            largest: self.largest,
            mean_active: self.token_ns / busy_ns as f64,
            was_used_up: self.was_used_up,
            was_slack: self.was_slack,
        };
        self.delimiting_kind = CostKind::ALL.into_iter().max_by_key(|&kind| self.tokens[kind as usize]);
        self.begin();
        result
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn note(round: &mut ThroughputRound, began_us: u64, ended_us: u64, limit: u32) -> Option<RoundResult> {
        let [began_at, ended_at] = [began_us, ended_us].map(Nanos::from_micros);
        let ended = EndedCommand { kind: CostKind::Get, bytes: 0, began_at, ended_at };
        round.note_end(ended, EndedCost { tokens: 16, starting: 16 }, limit)
    }

    /// The throughput of a round, in commands per ms: groups of this many commands end 1 ms after they began, with a pause after each.
    fn of_groups(group: u32, pause_us: u64) -> f64 {
        let (mut round, mut now) = (ThroughputRound::default(), 0);
        loop {
            for of_group in 1..=group {
                if let Some(result) = note(&mut round, now, now + 1000, 16 * group) {
                    return result.throughput * 1e6 / 16.0;
                }
                if of_group == group {
                    round.note_slack(true);
                }
            }
            now += 1000 + pause_us;
        }
    }

    #[test]
    fn a_round_of_whole_groups_has_their_throughput() {
        for group in [4, 7, 24, 40, 100] {
            let part = of_groups(group, 0) / f64::from(group);
            assert!((0.99..1.01).contains(&part), "{part} with groups of {group}");
        }
    }

    #[test]
    fn pauses_do_not_count() {
        let part = of_groups(4, 9000) / of_groups(4, 0);
        assert!((0.95..1.05).contains(&part), "{part}");
    }

    #[test]
    fn an_idle_interval_ends_with_the_first_begin_whichever_command_ends_first() {
        let mut round = ThroughputRound::default();
        assert!(note(&mut round, 0, 10, 64).is_none());
        round.note_slack(true);
        // Idle from 10 to 20; the command that began first ends last.
        note(&mut round, 90, 95, 64);
        assert_eq!(round.idle_ns, 80_000);
        note(&mut round, 20, 100, 64);
        assert_eq!(round.idle_ns, 10_000);
        // A command without times that ends meanwhile hides no pause.
        round.note_slack(true);
        round.note_slack(false);
        note(&mut round, 150, 160, 64);
        assert_eq!(round.idle_ns, 60_000);
    }

    #[test]
    fn a_command_that_arrives_late_is_no_step_back_in_time() {
        let of_load = |late: bool| {
            let mut round = ThroughputRound::default();
            (0..).find_map(|at| {
                // A core was preempted for 5 ms between its clock and the queue.
                let late_us = if late && at % 3 > 0 { 5000 } else { 0 };
                note(&mut round, 10_000 + at * 10, 10_100 + at * 10 - late_us, 16)
            })
        };
        let [in_order, late] = [false, true].map(|late| of_load(late).expect("it ends"));
        let ratio = late.throughput / in_order.throughput;
        assert!((0.95..1.05).contains(&ratio), "{ratio}");
    }

    #[test]
    fn rounds_of_different_mixes_are_not_comparable() {
        let of = |puts: u64| RoundResult {
            starting_tokens: [100 - puts, puts, 0],
            length: Nanos::from_millis(1),
            throughput: 1.0,
            largest: 64,
            mean_active: 1.0,
            was_used_up: true,
            was_slack: false,
        };
        for (puts, is_same) in [(5, true), (19, true), (21, false), (60, false)] {
            assert_eq!(of(5).is_of_same_mix(&of(puts)), is_same, "{puts} % after 5 %");
            assert_eq!(of(puts).is_of_same_load(&of(5)), is_same, "{puts} % after 5 %");
        }
        let faster = |ratio| RoundResult { throughput: ratio, ..of(5) };
        for (ratio, is_same) in [(1.4, true), (1.6, false), (0.6, false)] {
            assert_eq!(of(5).is_of_same_load(&faster(ratio)), is_same, "{ratio}");
        }
    }
}
