//! How many requests of a core's fair queue run at a time: as few as keep the core at work, and at most the setting.
//!
//! ```text
//!   interval of work for requests, by how much of it the core had nothing to do while some waited for room
//!   more than a quarter  ─▶ twice as many          one at first, so that it finds the least that will do
//!   more than 2 %, twice ─▶ a quarter more
//!   less than 1/2 %      ─▶ patience passes, then a quarter fewer      fewer, then more again at once: twice the patience
//!   between              ─▶ as it is
//!   of one flow for long ─▶ the setting, as long as that is so
//! ```
//! In: whose requests begin, when turns begin, and how they ended. Out: the depth. Passive, one to a core.
//!
//! What runs cannot be ordered any more, so a queue that lets more run than wait orders nothing. How much has to run depends on
//! what is short. Where it is the device, a core waits for it, and the depth grows to the setting. Where it is the
//! core, the device is done before the core is, a few requests keep it busy, and with 32 of them no request would ever wait
//! for its turn: then the order of sockets would be that of tenants, whatever their weights. A flow that is alone has
//! the setting: there is nobody to be fair to, and a device that writes many requests at once does so for less.
//!
//! More is not always better, since what begins together ends together, and then the core waits for all of it at once. So where
//! it has come to many, it is looked for from one on again, once in `ANEW` intervals.
//!
//! Invariants: the depth is within 1 and the setting; time without work and without anybody who waits counts for nothing;
//! once the load stays the same, a depth that is too small is tried in one of `PATIENCE_MAX` intervals at most. Tests
//! below.

use crate::ids::FlowId;
use octokv_base::Nanos;

/// Of so much time is judged at a time: some hundred requests of a core that is short, and over before a window is.
const INTERVAL: Nanos = Nanos::from_millis(5);
/// Parts of it without work above which more have to run, and below which fewer may do.
const DOUBLE_ABOVE: u64 = 4;
const GROW_ABOVE: u64 = 50;
const SHRINK_BELOW: u64 = 200;
/// The most intervals between two trials with fewer.
const PATIENCE_MAX: u32 = 64;
/// More than so many are looked for anew after so many intervals, which costs a few of them.
const FEW: u32 = 8;
const ANEW: u32 = 400;

/// A flow is alone after so many intervals without another: who asks for little asks seldom.
const ALONE_AFTER: u32 = 40;

/// What was done last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Last {
    Grown,
    Shrunk,
}

/// See the module's text.
#[derive(Clone, Debug)]
pub struct Depth {
    /// What was found, and the setting; and whether nobody else is there.
    now: u32,
    most: u32,
    alone: bool,
    /// Intervals in a row in which requests of one flow only began, or none.
    unmixed: u32,
    /// When the last turn began, and whether the time since then counts, as time without work or not.
    turn: Nanos,
    counts: bool,
    idle: bool,
    /// Whose request began last, and whether those of this interval were of several flows.
    flow: Option<FlowId>,
    mixed: bool,
    /// Of the interval that runs: how long it is so far, and how much of it without work.
    length: Nanos,
    without: Nanos,
    /// Intervals with little of that in a row, and how many there have to be.
    calm: u32,
    patience: u32,
    last: Last,
    /// Whether the interval before had too much of it.
    short: bool,
    /// Since it was last looked for from one on.
    intervals: u32,
}

impl Depth {
    /// At most so many.
    ///
    /// # Panics
    /// Where nothing could run.
    pub fn new(most: u32) -> Depth {
        assert!(most > 0, "nothing could run");
        Depth {
            now: 1,
            most,
            alone: true,
            unmixed: ALONE_AFTER,
            turn: Nanos::ZERO,
            counts: false,
            idle: false,
            flow: None,
            mixed: false,
            length: Nanos::ZERO,
            without: Nanos::ZERO,
            calm: 0,
            patience: 1,
            last: Last::Grown,
            short: false,
            intervals: 0,
        }
    }

    /// So many may run now.
    #[inline]
    pub fn get(&self) -> u32 {
        if self.alone { self.most } else { self.now }
    }

    /// Another bound. One that is the same changes nothing.
    pub fn set_most(&mut self, most: u32) {
        if most != self.most {
            *self = Depth { turn: self.turn, ..Depth::new(most) };
        }
    }

    /// A turn begins.
    #[inline]
    pub fn turn(&mut self, now: Nanos) {
        let span = now.since(std::mem::replace(&mut self.turn, now));
        if self.counts {
            self.length = self.length + span;
            if self.idle {
                self.without = self.without + span;
            }
            if self.length >= INTERVAL {
                self.judge();
            }
        }
    }

    /// A request of a flow begins.
    #[inline]
    pub fn began(&mut self, flow: FlowId) {
        self.mixed |= self.flow.is_some_and(|last| last != flow);
        self.flow = Some(flow);
    }

    /// The turn has ended: whether anything was done, whether requests run, and whether others wait for room.
    #[inline]
    pub fn ended(&mut self, worked: bool, runs: bool, waits: bool) {
        (self.idle, self.counts) = (!worked, if worked { runs } else { waits });
    }

    /// When this interval is over, if time counts until then.
    pub fn interval_ends(&self) -> Nanos {
        self.turn + INTERVAL.since(self.length)
    }

    /// The queue is not used for a while.
    pub fn rest(&mut self) {
        self.counts = false;
    }

    fn judge(&mut self) {
        let (length, without) = (std::mem::take(&mut self.length).0, std::mem::take(&mut self.without).0);
        let mixed = std::mem::take(&mut self.mixed);
        self.unmixed = if mixed { 0 } else { (self.unmixed + 1).min(ALONE_AFTER) };
        // What was so with the setting says nothing of what was found.
        if std::mem::replace(&mut self.alone, self.unmixed == ALONE_AFTER) || self.alone {
            return;
        }
        self.intervals = if self.now > FEW { self.intervals + 1 } else { 0 };
        let (is_above, quarter) = (|part: u64| without.saturating_mul(part) > length, (self.now / 4).max(1));
        let was_short = std::mem::replace(&mut self.short, is_above(GROW_ABOVE));
        if self.now > FEW && self.intervals >= ANEW {
            (self.now, self.calm, self.patience, self.last, self.intervals) = (1, 0, 1, Last::Grown, 0);
        } else if is_above(DOUBLE_ABOVE) || (was_short && self.short) {
            self.short = false;
            // One trial with fewer too many, or what is left of that, or another load.
            self.patience = match self.last {
                Last::Shrunk => (self.patience * 2).min(PATIENCE_MAX),
                Last::Grown if is_above(DOUBLE_ABOVE) => 1,
                Last::Grown => self.patience,
            };
            let step = if is_above(DOUBLE_ABOVE) { self.now } else { quarter };
            self.now = self.now.saturating_add(step).min(self.most);
            (self.calm, self.last) = (0, Last::Grown);
        } else if is_above(SHRINK_BELOW) {
            self.calm = 0;
        } else {
            self.calm = self.calm.saturating_add(1);
            if self.calm >= self.patience && self.now > 1 {
                self.now -= quarter;
                (self.calm, self.last) = (0, Last::Shrunk);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A core with requests of two flows, which is without work for this part of the time at each depth: the depth after
    /// each of so many intervals.
    fn course(depth: &mut Depth, intervals: usize, without: impl Fn(u32) -> f64) -> Vec<u32> {
        let mut course = Vec::new();
        for _ in 0..intervals {
            let idle = Nanos((INTERVAL.0 as f64 * without(depth.get())) as u64);
            let begun = depth.turn;
            [1, 2].into_iter().for_each(|flow| depth.began(FlowId(flow)));
            depth.ended(false, true, true);
            depth.turn(begun + idle);
            depth.ended(true, true, true);
            depth.turn(begun + INTERVAL);
            course.push(depth.get());
        }
        course
    }

    /// Where less than so many leave the core a part without work, as many as are missing.
    fn needs(needed: u32) -> impl Fn(u32) -> f64 {
        move |depth| f64::from(needed.saturating_sub(depth)) / f64::from(needed)
    }

    #[test]
    fn as_few_run_as_keep_the_core_at_work() {
        let depth = &mut Depth::new(32);
        assert_eq!(depth.get(), 32, "nobody else is there");
        assert_eq!(course(depth, 6, needs(3))[..], [1, 2, 4, 3, 2, 4]);
        let later = course(depth, 1000, needs(3));
        let few = later.iter().filter(|&&depth| depth < 3).count();
        assert!(later.iter().all(|depth| (2..=4).contains(depth)), "{later:?}");
        assert!(few <= 1000 / PATIENCE_MAX as usize + 7, "{few} trials with fewer");
        assert_eq!(course(depth, 40, needs(40)).last(), Some(&32), "and where the device is short, all");
        assert_eq!(course(&mut Depth::new(2), 4, needs(40))[..], [1, 2, 2, 2]);
        assert_eq!(course(&mut Depth::new(8), 4, |_| 0.005)[..], [1, 1, 1, 1], "little, and not none");
    }

    #[test]
    fn another_load_is_followed_however_patient_it_was() {
        let depth = &mut Depth::new(32);
        course(depth, 600, needs(3));
        let grows = course(depth, 25, needs(30));
        assert!(grows.iter().any(|&depth| depth >= 30), "{grows:?}");
        let shrinks = course(depth, 150, needs(3));
        assert!(shrinks.iter().any(|&depth| depth <= 4), "{shrinks:?}");
    }

    #[test]
    fn many_are_looked_for_anew() {
        let depth = &mut Depth::new(32);
        // From ten on as bad as it can be, and below well.
        let crooked = |depth: u32| if depth >= 10 { 0.05 } else { needs(3)(depth) };
        course(depth, 25, needs(30));
        let stuck = course(depth, 350, crooked);
        assert!(stuck.iter().all(|&depth| depth > 10), "{stuck:?}");
        let found = course(depth, 200, crooked);
        assert!(found.iter().skip(100).all(|&depth| depth <= 4), "{found:?}");
    }

    #[test]
    fn a_flow_that_is_alone_has_the_setting_and_what_was_found_is_kept_for_later() {
        let depth = &mut Depth::new(32);
        let found = *course(depth, 100, needs(3)).last().unwrap_or(&0);
        for interval in 1..ALONE_AFTER + 3 {
            let begun = depth.turn;
            depth.began(FlowId(2));
            depth.ended(true, true, true);
            depth.turn(begun + INTERVAL);
            assert_eq!(depth.get() == 32, interval >= ALONE_AFTER, "{interval}");
        }
        let again = course(depth, 2, needs(3));
        assert!(again[0] <= found, "{again:?}, {found} before");
    }

    #[test]
    fn beside_a_flow_that_asks_seldom_a_device_that_is_short_has_what_it_needs() {
        let depth = &mut Depth::new(32);
        let mut seen = Vec::new();
        for interval in 0..600 {
            let (begun, idle) = (depth.turn, Nanos((INTERVAL.0 as f64 * needs(30)(depth.get())) as u64));
            depth.began(FlowId(1));
            if interval % 5 == 0 {
                depth.began(FlowId(2));
                depth.began(FlowId(1));
            }
            depth.ended(false, true, true);
            depth.turn(begun + idle);
            depth.ended(true, true, true);
            depth.turn(begun + INTERVAL);
            seen.push(depth.get());
        }
        let enough = seen.iter().skip(100).filter(|&&depth| depth >= 24).count();
        assert!(enough >= 450, "{enough} of 500: {seen:?}");
    }

    #[test]
    fn where_nothing_ends_more_begin_and_time_does_not_stand_still() {
        let depth = &mut Depth::new(32);
        course(depth, 100, needs(2));
        let few = depth.get();
        for _ in 0..5 {
            depth.ended(false, true, true);
            assert_eq!(depth.interval_ends(), depth.turn + INTERVAL);
            depth.turn(depth.turn + INTERVAL);
        }
        assert!(few <= 3 && depth.get() == 32, "{few}, then {}", depth.get());
        let before = depth.get();
        depth.ended(false, true, true);
        depth.rest();
        depth.turn(depth.turn + INTERVAL.times(100));
        assert_eq!(depth.get(), before, "while the queue is not used nothing counts");
    }

    #[test]
    fn time_without_work_and_without_anybody_who_waits_says_nothing() {
        let depth = &mut Depth::new(32);
        for turn in 1..100 {
            [1, 2].into_iter().for_each(|flow| depth.began(FlowId(flow)));
            depth.turn(INTERVAL.times(turn));
            depth.ended(turn % 2 == 0, false, false);
        }
        assert_eq!(depth.get(), 32);
    }

    #[test]
    fn a_bound_that_stays_changes_nothing_and_another_begins_anew() {
        let depth = &mut Depth::new(32);
        let found = *course(depth, 4, needs(9)).last().unwrap_or(&0);
        depth.set_most(32);
        assert_eq!(depth.get(), found);
        depth.set_most(16);
        assert_eq!(depth.get(), 16);
    }
}
