//! Tokens of a device: how much cost of commands may be in flight, adapted to the latency that it shows.
//!
//! ```text
//!   at the end of a round (commands of the whole capacity, of which none began before its last change)
//!   latency ≤ 2 × floor, capacity used up  ─▶ an eighth more
//!   latency > 2 × floor                    ─▶ capacity ÷ (latency ÷ floor), at most halved
//!     and not shorter than before it       ─▶ the device is slower: this is its floor
//!     and a quarter more throughput than with half of the capacity  ─▶ an eighth more
//!   every 64 rounds, capacity used up      ─▶ one round with a quarter of it, which renews the floor
//! ```
//! In: commands that begin and end, with their kinds, bytes and times. Out: whether the next one may begin, and free
//! tokens. Passive, without a clock; one for each device, whose owner has the queue of commands that wait.
//!
//! **Capacity.** A device that serves P commands at a time, each in S, ends n of them in S × max(1, n ÷ P): more than P
//! only wait. So the latency is twice the floor S at n = 2 P, and n ÷ (latency ÷ floor) is P, whatever P is (Little's
//! law). The capacity goes to and fro between P and 2 P, where the device is always busy and a command waits within it
//! for S at most. Bounds of latency in place of rates are those of Gimbal (SIGCOMM 2021, §3.3), whose SSDs have no
//! better sign of congestion, and the decrease in proportion to the excess, at most once for commands in flight, that
//! of Swift (SIGCOMM 2020, §3.1). Neither adds in a fixed step here: shares of one device are not found by competition,
//! but given by weights, so that the increase may be a part of the capacity, and a change is followed in
//! log(change) ÷ log(9/8) rounds.
//!
//! **Batches.** An engine that commits commands in groups does more of them at once the more there are: its latency grows with the
//! capacity, and its throughput too. So a latency above the bound does not count while the throughput is a quarter above that of
//! the next lower power of two of the capacity. On a device without such groups it is the same from P on.
//!
//! **Floor.** The lowest mean latency ÷ cost of [`FLOOR_COMMANDS`] commands, of each kind, in the last 64 to 128
//! rounds. A mean, since the lowest of single ones may be of commands that needed no device, and of each kind, since
//! costs are of throughput ([`crate::command_costs`]) and not in proportion to latencies. A quarter of the capacity is
//! below P even if the floor is twice S, so that a floor that is too high comes down. A device that became slower is
//! recognized by a decrease that does not shorten its latency by a tenth, one that became faster by its floor, which is
//! renewed at once.
//!
//! Invariants: the capacity is within [`CAPACITY_MIN`] and 2048 Gets; an idle device takes any command; active
//! cost is that of the commands that have begun and not ended. Tests below.

use crate::command_costs::{CostKind, GET_TOKENS, MeasuredCosts, StartingCosts};
use octokv_base::Nanos;

/// The least capacity: four Gets.
pub const CAPACITY_MIN: u32 = 4 * GET_TOKENS;
/// The greatest capacity, 2048 Gets; a number of tokens has 16 bits.
const CAPACITY_MAX: u32 = 2048 * GET_TOKENS;
/// The first capacity: at 32 in flight an NVMe device comes near its throughput, as [`crate::SchedConfig::in_flight`].
const CAPACITY_FIRST: u32 = 32 * GET_TOKENS;
/// The least number of commands of a round.
const ROUND_COMMANDS_MIN: u32 = 32;
/// The commands of one sample of a floor: with latencies that vary as much as their mean, the lowest of 64 samples is
/// 0.6 of it, and the bound of two floors still above it.
pub const FLOOR_COMMANDS: u32 = 32;
/// Rounds after which floors are measured anew.
const FLOOR_ROUNDS: u32 = 64;
/// The bound of the latency, in floors.
const SLOWDOWN_MAX: f64 = 2.0;
/// The greatest decrease at once (Swift's `max_mdf`).
const DECREASE_MAX: f64 = 0.5;
/// The part of the capacity with which floors are measured anew.
const RENEWAL_PART: f64 = 0.25;
/// A floor that falls below this part of the one before is of a faster device.
const FASTER_BELOW: f64 = 0.75;
/// The throughput of twice the capacity that is worth a latency above the bound.
const GAIN_MIN: f64 = 1.25;
/// The weight of a round in the throughput of a power of two of the capacity.
const RATE_WEIGHT: f64 = 0.25;
/// Powers of two up to the greatest capacity.
const OCTAVES: usize = CAPACITY_MAX.ilog2() as usize + 1;
/// A decrease shortened the latency if it is below this part of the one before.
const SHORTENED_BELOW: f64 = 0.9;

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

/// The latency floor of one kind, in ns for each token.
#[derive(Clone, Copy, Debug)]
struct LatencyFloor {
    /// Lowest samples of the previous and of the current `FLOOR_ROUNDS`.
    previous: f64,
    current: f64,
    /// The sample being taken.
    latency_ns: u64,
    tokens: u64,
    commands: u32,
}

impl LatencyFloor {
    const NONE: LatencyFloor = LatencyFloor {
        previous: f64::INFINITY,
        current: f64::INFINITY,
        latency_ns: 0,
        tokens: 0,
        commands: 0,
    };

    fn get(&self) -> f64 {
        self.previous.min(self.current)
    }

    /// Notes a command. Whether the floor fell so far that the device became faster.
    fn note(&mut self, latency: Nanos, tokens: u32) -> bool {
        self.latency_ns += latency.0;
        self.tokens += u64::from(tokens);
        self.commands += 1;
        if self.commands < FLOOR_COMMANDS {
            return false;
        }
        let (before, sample) = (self.get(), self.latency_ns as f64 / self.tokens as f64);
        self.current = self.current.min(sample);
        (self.latency_ns, self.tokens, self.commands) = (0, 0, 0);
        sample < before * FASTER_BELOW
    }

    fn rotate(&mut self) {
        // A kind that did not occur keeps what is known of it.
        if self.current.is_finite() {
            (self.previous, self.current) = (self.current, f64::INFINITY);
        }
    }

    fn raise(&mut self, factor: f64) {
        self.previous *= factor;
        self.current *= factor;
    }
}

/// The commands of a round.
#[derive(Clone, Copy, Debug, Default)]
struct TokenRound {
    began_at: Nanos,
    commands: u32,
    /// Cost of the commands that ended, by kind: in tokens, and in starting tokens.
    tokens: [u64; CostKind::COUNT],
    starting_tokens: [u64; CostKind::COUNT],
    latency_ns: [u64; CostKind::COUNT],
    /// Whether a command had to wait for tokens, or half of them were in flight: hosts that know their windows do not send what would wait
    /// (a congestion window counts as used from its half on, RFC 7661, 4.3).
    was_used_up: bool,
    /// Whether less than half of the capacity was in flight at some time.
    was_slack: bool,
}

/// See the module header.
#[derive(Clone, Debug)]
pub struct DeviceTokens {
    capacity: u32,
    active: u32,
    costs: MeasuredCosts,
    floors: [LatencyFloor; CostKind::COUNT],
    round: TokenRound,
    /// When the capacity last decreased: the latency of commands that began before tells nothing of it.
    changed_at: Nanos,
    /// The slowdown before the last decrease, until the round after it.
    slowdown_before: Option<f64>,
    /// The capacity after a round with a part of it.
    resume_with: Option<u32>,
    /// Rounds since the last renewal of the floors.
    rounds: u32,
    /// Starting tokens per ns of rounds that used up the capacity, by the power of two of the capacity; 0 if there was none.
    rates: [f64; OCTAVES],
}

impl DeviceTokens {
    /// The tokens of an idle device.
    pub fn new(costs: StartingCosts) -> DeviceTokens {
        DeviceTokens {
            capacity: CAPACITY_FIRST,
            active: 0,
            costs: MeasuredCosts::new(costs),
            floors: [LatencyFloor::NONE; CostKind::COUNT],
            round: TokenRound::default(),
            changed_at: Nanos::ZERO,
            slowdown_before: None,
            resume_with: None,
            rounds: 0,
            rates: [0.0; OCTAVES],
        }
    }

    /// N: the tokens that may be in flight.
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

    /// Admits a command of this cost if the capacity allows it, or if none is in flight.
    #[inline]
    pub fn try_begin(&mut self, cost: u32) -> bool {
        let fits = self.active == 0 || self.active.saturating_add(cost) <= self.capacity;
        if fits {
            self.active = self.active.saturating_add(cost);
            self.round.was_used_up |= u64::from(self.active) * 2 >= u64::from(self.capacity);
        } else {
            self.round.was_used_up = true;
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
        if self.active < self.capacity / 2 {
            self.round.was_slack = true;
        }
        if let Some(ended) = ended {
            self.measure(ended);
        }
    }

    fn measure(&mut self, ended: EndedCommand) {
        let kind = ended.kind as usize;
        let (tokens, starting) =
            (self.costs.of(ended.kind, ended.bytes), self.costs.starting().of(ended.kind, ended.bytes));
        self.round.starting_tokens[kind] += u64::from(starting);
        if ended.began_at < self.changed_at {
            return;
        }
        let latency = ended.ended_at.since(ended.began_at);
        self.round.commands += 1;
        self.round.tokens[kind] += u64::from(tokens);
        self.round.latency_ns[kind] += latency.0;
        if self.floors[kind].note(latency, tokens) && self.resume_with.is_none() {
            self.rounds = FLOOR_ROUNDS;
        }
        let round_tokens: u64 = self.round.tokens.iter().sum();
        if self.round.commands >= ROUND_COMMANDS_MIN && round_tokens >= u64::from(self.capacity) {
            self.end_round(ended.ended_at);
        }
    }

    /// Latency ÷ floor of the kinds that have floors; `None` without one.
    fn slowdown(&self, round: &TokenRound) -> Option<f64> {
        let (mut latency, mut expected) = (0.0, 0.0);
        for (kind, floor) in self.floors.iter().enumerate().filter(|(_, floor)| floor.get().is_finite()) {
            latency += round.latency_ns[kind] as f64;
            expected += round.tokens[kind] as f64 * floor.get();
        }
        (expected > 0.0).then_some(latency / expected)
    }

    fn end_round(&mut self, now: Nanos) {
        let next = TokenRound { began_at: now, ..TokenRound::default() };
        let round = std::mem::replace(&mut self.round, next);
        if !round.was_slack && self.resume_with.is_none() && round.began_at > Nanos::ZERO {
            self.costs.note_saturated_round(round.starting_tokens, now.since(round.began_at));
        }
        self.rounds += 1;
        let gains = round.was_used_up && round.began_at > Nanos::ZERO && self.note_rate(&round, now);
        if let Some(capacity) = self.resume_with.take() {
            // The floors have the latency of a quarter of the capacity.
            self.set_capacity(capacity, now);
            return;
        }
        let Some(slowdown) = self.slowdown(&round) else { return };
        let before = self.slowdown_before.take();
        if slowdown > SLOWDOWN_MAX {
            if before.is_some_and(|before| slowdown > before * SHORTENED_BELOW) {
                self.floors.iter_mut().for_each(|floor| floor.raise(slowdown));
                return;
            }
            if gains {
                return self.grow();
            }
            self.slowdown_before = Some(slowdown);
            self.set_capacity(self.part_of_capacity((1.0 / slowdown).max(DECREASE_MAX)), now);
        } else if round.was_used_up && self.rounds >= FLOOR_ROUNDS {
            self.rounds = 0;
            self.floors.iter_mut().for_each(LatencyFloor::rotate);
            self.resume_with = Some(self.capacity);
            self.set_capacity(self.part_of_capacity(RENEWAL_PART), now);
        } else if round.was_used_up {
            self.grow();
        }
    }

    /// Commands in flight have room at once, so that their latencies count.
    fn grow(&mut self) {
        self.capacity = (self.capacity + (self.capacity / 8).max(GET_TOKENS)).min(CAPACITY_MAX);
    }

    /// Notes the throughput of a round. Whether it is so much above that of half of the capacity that a greater one is worth its latency.
    fn note_rate(&mut self, round: &TokenRound, now: Nanos) -> bool {
        let tokens: u64 = round.starting_tokens.iter().sum();
        let rate = tokens as f64 / now.since(round.began_at).0.max(1) as f64;
        let octave = self.capacity.ilog2() as usize;
        let known = &mut self.rates[octave];
        *known = if *known == 0.0 { rate } else { *known + (rate - *known) * RATE_WEIGHT };
        let (known, below) = (*known, self.rates[octave - 1]);
        below > 0.0 && known > below * GAIN_MIN
    }

    fn part_of_capacity(&self, part: f64) -> u32 {
        ((f64::from(self.capacity) * part) as u32).max(CAPACITY_MIN)
    }

    fn set_capacity(&mut self, capacity: u32, now: Nanos) {
        if capacity < self.capacity {
            self.changed_at = now;
        }
        self.capacity = capacity;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use octokv_base::Prng;
    use std::cmp::Reverse;
    use std::collections::BinaryHeap;

    /// A device that serves a number of commands at a time, first come first served.
    struct ModelDevice {
        free_at: Vec<Nanos>,
        get: Nanos,
        put: Nanos,
        random: Prng,
    }

    impl ModelDevice {
        fn new(parallel: usize, get_us: u64, put_us: u64) -> ModelDevice {
            let [get, put] = [get_us, put_us].map(Nanos::from_micros);
            ModelDevice { free_at: vec![Nanos::ZERO; parallel], get, put, random: Prng::new(7) }
        }

        /// When a command that begins now ends: its service time varies by a fourth.
        fn end_of(&mut self, kind: CostKind, now: Nanos) -> Nanos {
            let mean = if kind == CostKind::Put { self.put } else { self.get };
            let service = Nanos(mean.0 * 3 / 4 + self.random.next_u64() % (mean.0 / 2));
            let server = self.free_at.iter_mut().min().expect("one at least");
            *server = (*server).max(now) + service;
            *server
        }
    }

    /// A device with commands that always wait, and the tokens by which they begin.
    struct Saturated {
        tokens: DeviceTokens,
        device: ModelDevice,
        now: Nanos,
        /// By their ends: when they began, whether they are Puts, costs.
        running: BinaryHeap<Reverse<(Nanos, Nanos, bool, u32)>>,
        puts: Prng,
        put_percent: u64,
        /// The commands that may be in flight beside the tokens.
        most: usize,
    }

    impl Saturated {
        fn new(device: ModelDevice) -> Saturated {
            Saturated {
                tokens: DeviceTokens::new(StartingCosts::default()),
                device,
                now: Nanos::from_millis(1),
                running: BinaryHeap::new(),
                puts: Prng::new(3),
                put_percent: 0,
                most: usize::MAX,
            }
        }

        /// Ends one command after another. The capacity after each, in Gets; in a renewal that behind it.
        fn run(&mut self, commands: usize) -> Vec<u32> {
            let mut capacities = Vec::with_capacity(commands);
            for _ in 0..commands {
                while self.running.len() < self.most {
                    let is_put = self.puts.next_u64() % 100 < self.put_percent;
                    let kind = if is_put { CostKind::Put } else { CostKind::Get };
                    let cost = self.tokens.costs().of(kind, 1000);
                    if !self.tokens.try_begin(cost) {
                        break;
                    }
                    let end = self.device.end_of(kind, self.now);
                    self.running.push(Reverse((end, self.now, is_put, cost)));
                }
                let Reverse((ended_at, began_at, is_put, cost)) = self.running.pop().expect("one runs");
                self.now = ended_at;
                let kind = if is_put { CostKind::Put } else { CostKind::Get };
                self.tokens.end(cost, Some(EndedCommand { kind, bytes: 1000, began_at, ended_at }));
                let capacity = self.tokens.resume_with.unwrap_or(self.tokens.capacity());
                capacities.push(capacity / GET_TOKENS);
            }
            capacities
        }

        /// How many commands until the capacity is within `range` and stays.
        fn until_within(&mut self, range: std::ops::RangeInclusive<u32>, most: usize) -> usize {
            let capacities = self.run(most);
            let outside = capacities.iter().rposition(|capacity| !range.contains(capacity));
            outside.map_or(0, |last| last + 1)
        }
    }

    #[test]
    fn the_capacity_goes_between_what_a_device_serves_at_a_time_and_twice_that() {
        for parallel in [8, 32, 128, 512] {
            let mut run = Saturated::new(ModelDevice::new(parallel, 80, 80));
            run.run(40 * parallel + 4000);
            let later = run.run(200 * parallel);
            let most = later.iter().max().unwrap();
            let mut settled = later.clone();
            settled.sort_unstable();
            let least = &settled[settled.len() / 20];
            let mean = later.iter().map(|&capacity| capacity as usize).sum::<usize>() / later.len();
            assert!(*least as usize >= parallel / 2, "{parallel}: {least}");
            assert!(*most as usize <= 3 * parallel, "{parallel}: {most}");
            assert!((parallel..=parallel * 2).contains(&mean), "{parallel}: {mean}");
        }
    }

    #[test]
    fn a_device_that_changes_its_speed_mid_run_is_followed() {
        let mut run = Saturated::new(ModelDevice::new(32, 80, 80));
        run.run(20_000);
        for (get_us, what) in [(320, "four times slower"), (80, "as before"), (20, "four times faster")] {
            run.device.get = Nanos::from_micros(get_us);
            let commands = run.until_within(14..=96, 20_000);
            assert!(commands <= 1_500, "{what}: {commands} commands");
        }
    }

    #[test]
    fn a_device_that_changes_how_much_it_serves_at_a_time_is_followed() {
        let mut run = Saturated::new(ModelDevice::new(64, 80, 80));
        run.run(20_000);
        let grown = run.tokens.capacity();
        run.device.free_at.truncate(16);
        let commands = run.until_within(7..=48, 20_000);
        assert!(commands <= 4_000, "fewer: {commands} commands");
        run.device.free_at.resize(128, run.now);
        let commands = run.until_within(60..=384, 20_000);
        assert!(commands <= 6_000, "more: {commands} commands");
        assert!(run.tokens.capacity() > grown);
    }

    #[test]
    fn the_throughput_is_that_of_the_device() {
        let mut run = Saturated::new(ModelDevice::new(32, 80, 80));
        run.run(20_000);
        let begun = run.now;
        run.run(100_000);
        // 32 at a time, each 80 us: 400,000 in a second.
        let part = 100_000.0 / run.now.since(begun).as_secs_f64() / 400_000.0;
        assert!(part > 0.97, "{part} of the device's throughput");
    }

    #[test]
    fn a_put_that_costs_more_than_its_starting_value_is_measured() {
        for (put_us, tokens) in [(640, 128), (80, 16)] {
            let mut run = Saturated::new(ModelDevice::new(32, 80, put_us));
            for round in 0..200 {
                run.put_percent = [0, 50, 90, 20][round % 4];
                run.run(500);
            }
            let put = run.tokens.costs().of(CostKind::Put, 1000);
            assert!(put.abs_diff(tokens) * 4 <= tokens, "{put} tokens, and the device needs {tokens}");
        }
    }

    #[test]
    fn a_load_that_leaves_tokens_changes_no_capacity() {
        let mut run = Saturated::new(ModelDevice::new(64, 80, 80));
        run.most = 8;
        let capacities = run.run(50_000);
        assert!(capacities.iter().all(|&capacity| capacity == 32), "no command waited");
        assert_eq!(run.tokens.costs().factor(CostKind::Put), 1.0, "nor was it saturated");
    }

    #[test]
    fn an_idle_device_takes_any_command_and_then_none() {
        let mut tokens = DeviceTokens::new(StartingCosts::default());
        assert!(tokens.try_begin(60_000));
        assert!(!tokens.try_begin(1));
        tokens.end(60_000, None);
        assert!(tokens.try_begin(500) && tokens.try_begin(12) && !tokens.try_begin(1));
        assert_eq!((tokens.active(), tokens.capacity()), (512, 512));
    }

    #[test]
    fn a_device_that_commits_in_groups_gets_large_ones() {
        // A group takes 100 us and 1 us for each command, one group at a time: the greater it is the more in a second.
        let (mut tokens, mut now, mut rate) = (DeviceTokens::new(StartingCosts::default()), Nanos(1), 0);
        for _ in 0..2000 {
            let began_at = now;
            let group = (0..).take_while(|_| tokens.try_begin(64)).count();
            let length = Nanos::from_micros(100 + group as u64);
            now = now + length;
            rate = group as u64 * 1_000_000_000 / length.0;
            for _ in 0..group {
                tokens.end(64, Some(EndedCommand { kind: CostKind::Put, bytes: 0, began_at, ended_at: now }));
            }
        }
        assert!(rate > 500_000, "{rate} in a second of a million, with {} tokens", tokens.capacity());
    }

    #[test]
    fn a_stall_of_a_single_command_changes_little() {
        let mut run = Saturated::new(ModelDevice::new(32, 80, 80));
        run.run(20_000);
        for _ in 0..10 {
            // One of the servers collects garbage for a millisecond.
            let until = run.now + Nanos::from_millis(1);
            run.device.free_at[0] = run.device.free_at[0].max(until);
            let capacities = run.run(2_000);
            assert!(capacities.iter().all(|&capacity| capacity >= 14), "{:?}", capacities.iter().min());
        }
    }
}
