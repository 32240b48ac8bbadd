//! Costs of commands in tokens: starting values by kind and bytes, and factors measured while the device is saturated.
//!
//! ```text
//!   cost = starting cost of the kind for its bytes × time of a token of the kind ÷ time of a token of a Get
//! ```
//! In: the starting tokens of each kind that completed in a saturated round, and the length of the round. Out: the cost
//! of a command. One token is a sixteenth of the device time of a Get of up to 4 KiB, so that costs of less than a Get
//! can be told apart.
//!
//! How long a saturated device needs for a round is the sum, over the commands of the round, of the time that each
//! keeps it busy. The latency of a command does not show that time: a Put into the write buffer of an SSD has a short
//! latency and a cost of several Gets (Gimbal, SIGCOMM 2021, §3.2). So the times are fitted to the lengths of rounds,
//! by normalized least mean squares: it changes only the kinds that occur in a round, each in proportion to its part.
//! As long as the mix of kinds is constant the times stay as near to their starting ratios as the sum allows. ReFlex
//! (ASPLOS 2017, §3.2.1) and LEED (SIGCOMM 2023, §3.4) measure the same times offline; starting values are constants here, or
//! those of such a measurement ([`StartingCosts::of_time_ratios`]).
//!
//! Invariants: the cost of a Get of up to 4 KiB is 16 tokens; that of another kind is within an eighth and eight times
//! its starting cost, and at least 1. Tested below and in `device_tokens`.

use octokv_base::Nanos;

/// The tokens of a Get of up to 4 KiB.
pub const GET_TOKENS: u32 = 16;
/// The greatest starting cost of a command of up to 4 KiB, and of each further 4 KiB: that of a command of 8 KiB then fits the 16 bits in
/// which hosts read it.
pub const STARTING_TOKENS_MAX: u32 = u16::MAX as u32 / 2;
/// The greatest factor by which measurement changes a starting cost, up or down.
const COST_FACTOR_MAX: f64 = 8.0;
/// Bytes for which a command is charged once more (ReFlex charges by 4 KiB).
const CHARGED_BYTES: usize = 4096;
/// The part of the difference between a round's length and its prediction that one round corrects. Half of it
/// converges in a few rounds of changing mixes and halves the noise of a single round.
const LEARN_RATE: f64 = 0.5;

/// The kinds of commands that have costs of their own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CostKind {
    /// Retrieve, and Exist.
    Get,
    /// Store.
    Put,
    /// Delete.
    Delete,
}

impl CostKind {
    /// The number of kinds.
    pub const COUNT: usize = 3;
    /// All kinds.
    pub const ALL: [CostKind; CostKind::COUNT] = [CostKind::Get, CostKind::Put, CostKind::Delete];
}

/// The starting cost of one kind, in tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KindCost {
    /// Of a command of up to 4 KiB.
    pub tokens: u32,
    /// Of each further 4 KiB.
    pub tokens_per_4k: u32,
}

impl KindCost {
    fn of_bytes(self, bytes: usize) -> u32 {
        let further = bytes.div_ceil(CHARGED_BYTES).saturating_sub(1).min(1 << 16) as u32;
        self.tokens.saturating_add(self.tokens_per_4k.saturating_mul(further)).clamp(1, u32::from(u16::MAX))
    }
}

/// Starting costs, by [`CostKind`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StartingCosts {
    /// Of a Get; `tokens` is [`GET_TOKENS`] by definition.
    pub get: KindCost,
    /// Of a Put.
    pub put: KindCost,
    /// Of a Delete.
    pub delete: KindCost,
}

impl Default for StartingCosts {
    /// A Put reads its bucket and writes bucket and value, a Delete its bucket alone (LEED, SIGCOMM 2023, §3.3): with
    /// writes of four Gets, between the 1 to 2 of a fresh SSD's buffer and the 9 of Gimbal's worst case, and group
    /// commit that shares them, a Put starts with four and a Delete with two.
    fn default() -> StartingCosts {
        let of_gets = |gets| KindCost { tokens: gets * GET_TOKENS, tokens_per_4k: gets * GET_TOKENS };
        StartingCosts { get: of_gets(1), put: of_gets(4), delete: of_gets(2) }
    }
}

impl StartingCosts {
    /// The costs of a device on which the times of commands have these ratios to that of a Get, all with values of `value_bytes` (LEED, SIGCOMM 2023,
    /// §3.4, measures them offline). A Get and a Put are charged by 4 KiB of their values, a Delete by none. Each cost is rounded to whole
    /// tokens, within 1 and [`STARTING_TOKENS_MAX`].
    pub fn of_time_ratios(value_bytes: usize, put: f64, delete: f64) -> StartingCosts {
        let tokens = |ratio: f64| {
            let tokens = (f64::from(GET_TOKENS) * ratio).round() as u32;
            let tokens = tokens.clamp(1, STARTING_TOKENS_MAX);
            KindCost { tokens, tokens_per_4k: tokens }
        };
        let charged = value_bytes.div_ceil(CHARGED_BYTES).max(1) as f64;
        StartingCosts { get: tokens(1.0), put: tokens(put), delete: tokens(delete * charged) }
    }

    fn of_kind(&self, kind: CostKind) -> KindCost {
        match kind {
            CostKind::Get => self.get,
            CostKind::Put => self.put,
            CostKind::Delete => self.delete,
        }
    }

    /// The starting cost of a command, without measurement.
    pub fn of(&self, kind: CostKind, bytes: usize) -> u32 {
        self.of_kind(kind).of_bytes(bytes)
    }
}

/// See the module header.
#[derive(Clone, Debug)]
pub struct MeasuredCosts {
    starting: StartingCosts,
    /// Fitted device time of a starting token of each kind, in ns; `None` before the first saturated round.
    token_ns: Option<[f64; CostKind::COUNT]>,
}

impl MeasuredCosts {
    /// Costs that are `starting` until they are measured.
    pub fn new(starting: StartingCosts) -> MeasuredCosts {
        MeasuredCosts { starting, token_ns: None }
    }

    /// The starting costs.
    pub fn starting(&self) -> &StartingCosts {
        &self.starting
    }

    /// The measured factor of the starting cost of a kind; 1 for [`CostKind::Get`].
    pub fn factor(&self, kind: CostKind) -> f64 {
        self.token_ns.map_or(1.0, |token_ns| token_ns[kind as usize] / token_ns[CostKind::Get as usize])
    }

    /// The cost of a command with a value of `bytes`, at least 1.
    #[inline]
    pub fn of(&self, kind: CostKind, bytes: usize) -> u32 {
        let starting = self.starting.of(kind, bytes);
        if kind == CostKind::Get {
            return starting;
        }
        ((f64::from(starting) * self.factor(kind)).round() as u32).clamp(1, u32::from(u16::MAX))
    }

    /// Fits the times to a round in which the device was saturated throughout: the starting tokens of the commands of
    /// each kind that completed in it, and its length.
    pub fn note_saturated_round(&mut self, starting_tokens: [u64; CostKind::COUNT], length: Nanos) {
        let (tokens, length) = (starting_tokens.map(|tokens| tokens as f64), length.0 as f64);
        let sum: f64 = tokens.iter().sum();
        if sum == 0.0 || length == 0.0 {
            return;
        }
        let token_ns = self.token_ns.get_or_insert([length / sum; CostKind::COUNT]);
        let predicted: f64 = tokens.iter().zip(&*token_ns).map(|(tokens, ns)| tokens * ns).sum();
        let squares: f64 = tokens.iter().map(|tokens| tokens * tokens).sum();
        let step = LEARN_RATE * (length - predicted) / squares;
        for (ns, tokens) in token_ns.iter_mut().zip(tokens) {
            // Positive whatever the noise of a round.
            *ns = (*ns + step * tokens).max(*ns / 2.0);
        }
        let get_ns = token_ns[CostKind::Get as usize];
        for ns in &mut token_ns[1..] {
            *ns = ns.clamp(get_ns / COST_FACTOR_MAX, get_ns * COST_FACTOR_MAX);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn starting_costs_grow_by_4_kib() {
        let costs = MeasuredCosts::new(StartingCosts::default());
        for (kind, bytes, tokens) in [
            (CostKind::Get, 0, 16),
            (CostKind::Get, 4096, 16),
            (CostKind::Get, 4097, 32),
            (CostKind::Put, 100, 64),
            (CostKind::Put, 8192, 128),
            (CostKind::Delete, 0, 32),
            (CostKind::Put, usize::MAX, 65535),
        ] {
            assert_eq!(costs.of(kind, bytes), tokens, "{kind:?} {bytes}");
        }
    }

    #[test]
    fn time_ratios_are_the_ratios_of_costs_at_their_value_length() {
        for (value_bytes, put, delete, tokens) in [
            (1024, 2.5, 1.25, (16, 40, 20)),
            (4096, 0.5, 0.01, (16, 8, 1)),
            (10_000, 3.0, 1.0, (48, 144, 48)),
            (0, 1e9, 0.0, (16, 32_767, 1)),
        ] {
            let costs = StartingCosts::of_time_ratios(value_bytes, put, delete);
            let of = |kind, bytes| costs.of(kind, bytes);
            let have =
                (of(CostKind::Get, value_bytes), of(CostKind::Put, value_bytes), of(CostKind::Delete, 0));
            assert_eq!(have, tokens, "{value_bytes} {put} {delete}");
            assert!(of(CostKind::Put, 8192) < u32::from(u16::MAX), "it fits the log page");
        }
    }

    /// The costs after `rounds` with a device of these times, each of a Get of 4 KiB in ns, with parts of Puts in turn.
    fn fitted(rounds: usize, (get_ns, put_ns): (u64, u64), put_percents: &[u64]) -> MeasuredCosts {
        let mut costs = MeasuredCosts::new(StartingCosts::default());
        for round in 0..rounds {
            let puts = put_percents[round % put_percents.len()];
            let length = (100 - puts) * get_ns + puts * put_ns;
            costs.note_saturated_round([(100 - puts) * 16, puts * 64, 0], Nanos(length));
        }
        costs
    }

    #[test]
    fn a_cost_that_differs_from_its_starting_value_is_found() {
        for (put_ns, tokens) in [(16_000, 128), (8_000, 64), (2_000, 16)] {
            let costs = fitted(60, (2_000, put_ns), &[0, 100, 30]);
            let put = costs.of(CostKind::Put, 100);
            assert!(put.abs_diff(tokens) <= 1, "{put} tokens, not {tokens}");
            assert_eq!(costs.of(CostKind::Get, 100), 16, "a Get is the unit");
        }
    }

    #[test]
    fn a_constant_mix_keeps_the_starting_ratios_if_they_explain_it() {
        let costs = fitted(100, (2_000, 8_000), &[50]);
        assert_eq!(costs.of(CostKind::Put, 100), 64);
        assert_eq!(costs.of(CostKind::Delete, 0), 32, "of a kind that did not occur");
    }

    #[test]
    fn factors_are_bounded() {
        assert_eq!(fitted(200, (1_000, 1_000_000), &[0, 100]).of(CostKind::Put, 1), 512);
        assert_eq!(fitted(200, (100_000, 10), &[0, 100]).of(CostKind::Put, 1), 8);
        let mut costs = MeasuredCosts::new(StartingCosts::default());
        costs.note_saturated_round([0; 3], Nanos(5));
        costs.note_saturated_round([16, 0, 0], Nanos(0));
        assert_eq!(costs.factor(CostKind::Put), 1.0, "nothing was measured");
    }
}
