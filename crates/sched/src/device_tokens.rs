//! Tokens of a device: how much cost of commands may be in flight, adapted to the throughput that it shows.
//!
//! ```text
//!   a trial, of three rounds: throughput with the capacity, with half of it, and with the capacity again
//!   gain = √(first × third) ÷ second
//!   gain above 2^(1/8)  ─▶ a greater capacity    both by (gain ÷ 2^(1/8))², at most doubled or halved
//!   gain below          ─▶ a smaller one
//!   near it             ─▶ as it is, and eight rounds until the next trial
//!   another mix of kinds, or another throughput in the third round than in the first  ─▶ tried again
//! ```
//! In: commands that begin and end, with their kinds, bytes and times. Out: whether the next one may begin, and free
//! tokens. Passive, without a clock; one for each device, whose owner has the queue of commands that wait.
//!
//! **Power.** T^7 ÷ D, of the throughput T and the latency D, is the power of a queue (Kleinrock, ICC 1979) with a weight
//! of 7 for throughput. By Little's law the capacity is n = T × D, so that the power is T^8 ÷ n. Beyond its maximum,
//! doubling n adds less than 2^(1/8) of throughput (9 %). A trial compares n with n ÷ 2, and so n ends within a factor of
//! two above the maximum: at about 1.8 P on a device that serves P commands at a time. An engine with group commit has a
//! higher throughput the more commands are in flight, and gets more, as long as each doubling adds 9 %.
//!
//! **Trials.** Both throughputs are at most a few rounds old (PCC, NSDI 2015, §3.1, likewise tries two rates in turn). A
//! round with half of the capacity lies between two with all of it, so that a load that changes steadily does not look
//! like a gain. It costs half of the throughput of one round in three at most while the capacity grows, and 9 % of one
//! in eleven later. A trial is discarded if its rounds have different mixes or loads; each discarded trial in a row doubles
//! the pause before the next.
//!
//! **Costs** ([`crate::command_costs`]) are fitted only to rounds that a trial showed to saturate the device. In other
//! rounds the fit would take latency for device time: costs would rise, fewer commands would begin, and latency would be
//! an even greater part.
//!
//! Invariants:
//! - The capacity is at most 2048 Gets, and at least [`COMMANDS_MIN`] times the largest command of the last round.
//! - The capacity shrinks only if the load used half of it on average.
//! - An idle device takes any command.
//! - The active cost is that of the commands that have begun and not ended.
//!
//! Tested in `device_tokens/tests.rs`.

use crate::command_costs::{GET_TOKENS, MeasuredCosts, StartingCosts};
use crate::throughput_round::{EndedCommand, EndedCost, RoundResult, ThroughputRound};

/// The minimum capacity, in largest commands. Half of it then admits two, so that a trial can show whether more are a gain; this does not
/// hold for commands above an eighth of the maximum capacity.
pub const COMMANDS_MIN: u32 = 4;
/// The maximum capacity, 2048 Gets: windows have 16 bits.
const CAPACITY_MAX: u32 = 2048 * GET_TOKENS;
/// The initial capacity: with 32 in flight an NVMe device comes near its throughput, as [`crate::SchedConfig::in_flight`].
const CAPACITY_FIRST: u32 = 32 * GET_TOKENS;
/// The gain in throughput from half of the capacity to all of it for which the capacity stays: 2^(1/8).
const GAIN_MIN: f64 = 1.0905;
/// A trial changes the capacity by at most this factor, up or down.
const STEP_MAX: f64 = 2.0;
/// A change by less than this factor may be noise: the next trial follows after [`HOLD_ROUNDS`].
const HOLD_STEP: f64 = 1.1;
/// Rounds without a trial after one that changed little.
const HOLD_ROUNDS: u32 = 8;
/// The device was saturated if the gain was less than this, and
const SATURATED_GAIN: f64 = 1.2;
/// all of the capacity had at least this many times the tokens in flight that half of it had.
const SATURATED_ACTIVE_RATIO: f64 = 1.5;
/// The pause after discarded trials grows up to two to the power of this, in rounds.
const PAUSE_LOG2_MAX: u32 = 3;

/// What the present round is for.
#[derive(Clone, Copy, Debug)]
enum TrialRound {
    /// Wait `rounds` for the next trial, unless the load differs from `after`, the last round of the trial before. If that was saturated,
    /// costs are fitted to these rounds.
    Hold { rounds: u32, after: RoundResult, is_saturated: bool },
    /// Wait `rounds` for the next trial, because the last one was discarded.
    Pause { rounds: u32 },
    /// The first of a trial, with all of the capacity.
    Before,
    /// The second, with half of the capacity.
    Half { before: RoundResult },
    /// The third, with all of the capacity.
    After { before: RoundResult, half: RoundResult },
}

/// See the module header.
#[derive(Clone, Debug)]
pub struct DeviceTokens {
    capacity: u32,
    active: u32,
    costs: MeasuredCosts,
    trial: TrialRound,
    round: ThroughputRound,
    /// Trials in a row that were discarded.
    discarded: u32,
}

impl DeviceTokens {
    /// The tokens of an idle device.
    pub fn new(costs: StartingCosts) -> DeviceTokens {
        DeviceTokens {
            capacity: CAPACITY_FIRST,
            active: 0,
            costs: MeasuredCosts::new(costs),
            trial: TrialRound::Before,
            round: ThroughputRound::default(),
            discarded: 0,
        }
    }

    /// N: the tokens that may be in flight, except in the second round of a trial.
    pub fn capacity(&self) -> u32 {
        self.capacity
    }

    /// The tokens of the commands in flight; a command on an idle device may exceed the capacity.
    pub fn active(&self) -> u32 {
        self.active
    }

    /// The measured costs.
    pub fn costs(&self) -> &MeasuredCosts {
        &self.costs
    }

    /// The tokens that may be in flight now: the capacity, or half of it in a trial.
    pub fn limit(&self) -> u32 {
        if matches!(self.trial, TrialRound::Half { .. }) { self.capacity / 2 } else { self.capacity }
    }

    /// Admits a command of this cost if the capacity allows it, or if none is in flight.
    #[inline]
    pub fn try_begin(&mut self, cost: u32) -> bool {
        let limit = self.limit();
        let fits = self.active == 0 || self.active.saturating_add(cost) <= limit;
        if fits {
            self.active = self.active.saturating_add(cost);
        }
        if !fits || self.active >= limit / 2 {
            self.round.note_used_up();
        }
        fits
    }

    /// A command of this cost ended. `ended` is `None` if its latency says nothing of the device: it needed none, was
    /// dropped, or failed.
    ///
    /// # Panics
    /// If more ends than has begun.
    pub fn end(&mut self, cost: u32, ended: Option<EndedCommand>) {
        self.active = self.active.checked_sub(cost).expect("a command ends once");
        match ended {
            Some(ended) => self.end_timed(ended),
            // The round may never end, and it may be one with half of the capacity.
            None if self.round.note_untimed() => self.change_to(TrialRound::Before),
            None => {}
        }
        if self.active < self.limit() / 2 {
            self.round.note_slack(self.active == 0 && ended.is_some());
        }
    }

    fn end_timed(&mut self, ended: EndedCommand) {
        let of = |costs: &MeasuredCosts| costs.of(ended.kind, ended.bytes);
        let (tokens, starting) = (of(&self.costs), self.costs.starting().of(ended.kind, ended.bytes));
        if let Some(round) = self.round.note_end(ended, EndedCost { tokens, starting }, self.limit()) {
            let minimum = minimum_capacity(round.largest);
            if self.capacity < minimum {
                self.capacity = minimum;
                return self.change_to(TrialRound::Before);
            }
            self.end_round(round);
        }
    }

    /// Begins a round of a trial, with another limit.
    fn change_to(&mut self, trial: TrialRound) {
        self.trial = trial;
        self.round.settle();
    }

    fn end_round(&mut self, round: RoundResult) {
        match self.trial {
            TrialRound::Hold { rounds, after, is_saturated }
                if rounds > 0 && round.is_of_same_load(&after) =>
            {
                if is_saturated {
                    self.measure_costs(&round);
                }
                self.trial = TrialRound::Hold { rounds: rounds - 1, after, is_saturated };
            }
            TrialRound::Pause { rounds } if rounds > 0 => {
                self.trial = TrialRound::Pause { rounds: rounds - 1 }
            }
            _ if !round.was_used_up => self.change_to(TrialRound::Before),
            TrialRound::Hold { .. } | TrialRound::Pause { .. } | TrialRound::Before => {
                self.change_to(TrialRound::Half { before: round });
            }
            TrialRound::Half { before } if !round.is_of_same_mix(&before) => self.discard(),
            TrialRound::Half { before } => self.change_to(TrialRound::After { before, half: round }),
            TrialRound::After { before, .. } if !round.is_of_same_load(&before) => self.discard(),
            TrialRound::After { before, half } => self.end_trial(before, half, round),
        }
    }

    /// Discards the trial. The pause limits what rounds with half of the capacity cost under a load that changes all the time.
    fn discard(&mut self) {
        self.change_to(TrialRound::Pause { rounds: (1 << self.discarded.min(PAUSE_LOG2_MAX)) - 1 });
        self.discarded += 1;
    }

    fn end_trial(&mut self, before: RoundResult, half: RoundResult, after: RoundResult) {
        self.discarded = 0;
        let gain = (before.throughput * after.throughput).sqrt() / half.throughput;
        let uses_more = after.mean_active > half.mean_active * SATURATED_ACTIVE_RATIO;
        let is_saturated = gain < SATURATED_GAIN && uses_more;
        if is_saturated {
            self.measure_costs(&after);
        }
        let largest = before.largest.max(half.largest).max(after.largest);
        // The throughput of a load that leaves most of the capacity is its own, and says nothing of the device.
        let may_shrink = after.mean_active * 2.0 >= f64::from(self.capacity);
        match self.step(if may_shrink { gain } else { gain.max(GAIN_MIN) }, largest) {
            true => self.change_to(TrialRound::Before),
            false => self.change_to(TrialRound::Hold { rounds: HOLD_ROUNDS, after, is_saturated }),
        }
    }

    /// Fits the costs to a round. REQUIRES: a trial showed that this load saturates the device.
    fn measure_costs(&mut self, round: &RoundResult) {
        if !round.was_slack {
            self.costs.note_saturated_round(round.starting_tokens, round.length);
        }
    }

    /// Changes the capacity by the gain. Returns whether the change was more than noise.
    fn step(&mut self, gain: f64, largest: u32) -> bool {
        let step = (gain / GAIN_MIN).powi(2).clamp(1.0 / STEP_MAX, STEP_MAX);
        let capacity = (f64::from(self.capacity) * step) as u32;
        let capacity = capacity.clamp(minimum_capacity(largest), CAPACITY_MAX);
        let is_noise = (1.0 / HOLD_STEP..HOLD_STEP).contains(&step) || capacity == self.capacity;
        self.capacity = capacity;
        !is_noise
    }
}

/// The minimum capacity with commands of up to this cost.
fn minimum_capacity(largest: u32) -> u32 {
    largest.saturating_mul(COMMANDS_MIN).min(CAPACITY_MAX)
}

#[cfg(test)]
mod tests;
