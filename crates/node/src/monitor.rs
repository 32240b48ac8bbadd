//! What is measured of a node, and what is chosen for its cores: the monitor, shared by all of them.
//!
//! ```text
//!   every W, the least busy core:   boards ─▶ counters ─▶ sched::measure ─▶ sched::choose ─▶ Window
//!   every core, at its next turn:   a new window? ─▶ takes its part (crate::dispatch), tells the network's round trips
//! ```
//! In: what cores write on their boards, settings of an operator. Out: the last [`Window`], its number. A core pays two
//! loads a turn for it; who measures changes with the load (OctoKV §IV-D). A core that sleeps does not wake for a
//! window but for the one that measures next.
//!
//! Invariants: one core measures at a time; a window's figures are differences of what cores had done at its begin and end,
//! so that sums over windows are kept; settings are checked before they are here.

use crate::core_metrics::{Board, FlowSeen, Seen};
use crate::tenants::{FLOWS_MAX, Flows};
use octokv_base::Nanos;
use octokv_sched::cross_core_weights::{CoreService, TenantService, core_weights};
use octokv_sched::metrics::{CoreCounters, FlowCounters, Stages};
use octokv_sched::{Chosen, Counters, Decision, Figures, FlowId, SettingError, Settings, choose, measure};
use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// What was measured in a window, and what was chosen by it.
#[derive(Clone, Debug)]
pub struct Window {
    /// Its number, from 1 on.
    pub number: u64,
    /// When it ended.
    pub ended: Nanos,
    /// How long it was.
    pub length: Nanos,
    /// What is done until the next one ends.
    pub decision: Decision,
    /// What it was chosen by.
    pub figures: Figures,
    /// As it was counted.
    pub counters: Counters,
    /// The hosts of the flows, by number.
    pub hosts: Vec<(FlowId, String)>,
    /// Under `fair` on several cores: by flow and core, the weights that bring what it gets from all of them near its own.
    pub weights: Vec<(FlowId, Vec<u32>)>,
    /// What the policy was told.
    pub settings: Settings,
    /// Which core measured, and how long that took it; nothing in virtual time.
    pub measured_by: usize,
    /// How long.
    pub took: Nanos,
}

struct Monitor {
    settings: Settings,
    /// What cores had done when the window began, and when that was; nothing before the first.
    begun: Option<(Nanos, Vec<Seen>)>,
    last: Option<Arc<Window>>,
}

/// The monitor, and what it reads.
pub struct Scheduling {
    boards: Arc<[Board]>,
    flows: Flows,
    monitor: Mutex<Monitor>,
    /// How many windows have ended.
    windows: AtomicU64,
    /// When the window that runs ends, in nanoseconds, and which core ends it.
    ends_ns: AtomicU64,
    measures: AtomicUsize,
    clock: Clock,
}

/// What a core has to do with the window that runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Watch {
    /// Nothing.
    Not,
    /// It must have a turn then, to end it.
    Until(Nanos),
    /// It has just ended one, and this core ends the next: wake it, so that it knows.
    Handed(usize),
}

/// Gives the time within a turn, to tell what measuring costs.
pub type Clock = fn() -> Nanos;

impl Scheduling {
    /// Of a node of so many cores.
    ///
    /// # Errors
    /// What the settings may not be.
    pub fn new(cores: usize, settings: Settings, clock: Clock) -> Result<Scheduling, SettingError> {
        settings.check()?;
        Ok(Scheduling {
            boards: (0..cores).map(|_| Board::new(cores, FLOWS_MAX)).collect(),
            flows: Flows::default(),
            monitor: Mutex::new(Monitor { settings, begun: None, last: None }),
            windows: AtomicU64::new(0),
            ends_ns: AtomicU64::new(0),
            measures: AtomicUsize::new(0),
            clock,
        })
    }

    /// The cores' figures.
    pub fn boards(&self) -> &Arc<[Board]> {
        &self.boards
    }

    /// Who is which flow.
    pub fn flows(&self) -> &Flows {
        &self.flows
    }

    /// How many windows have ended: a core looks whether it is another number than before.
    #[inline]
    pub fn windows(&self) -> u64 {
        self.windows.load(Ordering::Acquire)
    }

    /// The last window.
    pub fn window(&self) -> Option<Arc<Window>> {
        self.monitor.lock().last.clone()
    }

    /// Since the start: requests that ran on another core than that of their connection, and those that waited for
    /// their turn among tenants.
    pub fn moved_and_held(&self) -> (u64, u64) {
        let seen = self.boards.iter().map(Board::seen);
        seen.fold((0, 0), |(moved, held), seen| {
            let held_here: u64 = seen.flows.iter().map(|flow| flow.held).sum();
            (moved + seen.moved_to.iter().sum::<u64>(), held + held_here)
        })
    }

    /// What the policy is told.
    pub fn settings(&self) -> Settings {
        self.monitor.lock().settings.clone()
    }

    /// Tells it something else, which holds from the next window's end on. Wake the cores: the one that measures may
    /// sleep for as long as the window was before.
    ///
    /// # Errors
    /// What it may not be; then nothing has changed.
    pub fn set(&self, settings: Settings) -> Result<(), SettingError> {
        settings.check()?;
        let mut monitor = self.monitor.lock();
        // A shorter window does not wait for the end of a longer one.
        if let Some((begun, _)) = monitor.begun {
            let ends = (begun + settings.window).0;
            self.ends_ns.store(ends.min(self.ends_ns.load(Ordering::Relaxed)), Ordering::Release);
        }
        monitor.settings = settings;
        Ok(())
    }

    /// Called by every core in every turn. Ends the window when it is due and this core is the one to do it.
    #[inline]
    pub fn watch(&self, core: usize, now: Nanos) -> Watch {
        if self.measures.load(Ordering::Acquire) != core {
            return Watch::Not;
        }
        let ends = Nanos(self.ends_ns.load(Ordering::Acquire));
        if now < ends { Watch::Until(ends) } else { self.end_window(core, now) }
    }

    #[cold]
    fn end_window(&self, core: usize, now: Nanos) -> Watch {
        let mut monitor = self.monitor.lock();
        // Another core may have ended it a moment ago.
        let ends = Nanos(self.ends_ns.load(Ordering::Acquire));
        if now < ends {
            return Watch::Until(ends);
        }
        let began = (self.clock)();
        let seen: Vec<Seen> = self.boards.iter().map(Board::seen).collect();
        let length = monitor.settings.window;
        if let Some((begun, before)) = monitor.begun.take() {
            let hosts = self.flows.names();
            let counters = counters(now.since(begun), &before, &seen);
            let figures = measure(&counters);
            let decision = choose(&figures, &monitor.settings);
            let number = self.windows.load(Ordering::Relaxed) + 1;
            let next = figures.least_busy().index();
            let last = monitor.last.as_deref();
            let weights = match decision.chosen {
                Chosen::Fair if seen.len() > 1 => {
                    let there = counters.flows.iter().map(|flow| flow.flow);
                    weights(there, (&before, &seen), last, &hosts, &monitor.settings)
                }
                _ => Vec::new(),
            };
            let window = Window {
                number,
                ended: now,
                length: now.since(begun),
                decision,
                figures,
                counters,
                hosts,
                weights,
                settings: monitor.settings.clone(),
                measured_by: core,
                took: (self.clock)().since(began),
            };
            monitor.last = Some(Arc::new(window));
            self.windows.store(number, Ordering::Release);
            self.ends_ns.store((now + length).0, Ordering::Release);
            self.measures.store(next, Ordering::Release);
        } else {
            self.ends_ns.store((now + length).0, Ordering::Release);
        }
        monitor.begun = Some((now, seen));
        match self.measures.load(Ordering::Relaxed) {
            next if next == core => Watch::Until(now + length),
            next => Watch::Handed(next),
        }
    }
}

/// The weights of flows on each core for the next window, from what they were served in the last one and what they weighed.
fn weights(
    flows: impl Iterator<Item = FlowId>,
    (before, now): (&[Seen], &[Seen]),
    last: Option<&Window>,
    hosts: &[(FlowId, String)],
    settings: &Settings,
) -> Vec<(FlowId, Vec<u32>)> {
    let flows: Vec<FlowId> = flows.collect();
    let tenant = |flow: &FlowId| {
        let host = hosts.iter().find(|(of, _)| of == flow).map_or("", |(_, host)| host);
        let weight = settings.of_tenant(host).weight;
        // Of the same host, and beside what is set now: another setting holds at once.
        let weighed = last.filter(|last| last.hosts.iter().any(|(of, name)| of == flow && name == host));
        let weighed = weighed.and_then(|last| {
            let (_, weights) = last.weights.iter().find(|(of, _)| of == flow)?;
            Some((weights, u64::from(last.settings.of_tenant(host).weight.max(1))))
        });
        let weight_on = |core: usize| {
            let (weights, set) = weighed?;
            let scaled = u64::from(*weights.get(core)?) * u64::from(weight) / set;
            Some(u32::try_from(scaled).unwrap_or(u32::MAX).max(1))
        };
        let core = |(at, (before, now)): (usize, (&Seen, &Seen))| {
            let (before, now) = (before.flows[flow.0 as usize], now.flows[flow.0 as usize]);
            CoreService {
                served_ns: now.served.since(before.served).0,
                waited: now.outdone.saturating_sub(before.outdone) * 2
                    > now.begun.saturating_sub(before.begun),
                weight: weight_on(at).unwrap_or(0),
            }
        };
        let cores = before.iter().zip(now).enumerate().map(core).collect();
        TenantService { weight, cores }
    };
    let services: Vec<TenantService> = flows.iter().map(tenant).collect();
    flows.into_iter().zip(core_weights(&services)).collect()
}

/// What was done between two looks at every core.
fn counters(window: Nanos, before: &[Seen], now: &[Seen]) -> Counters {
    let less = |now: &[u64], before: &[u64]| -> Vec<u64> {
        now.iter().zip(before).map(|(now, before)| now.saturating_sub(*before)).collect()
    };
    let core = |(now, before): (&Seen, &Seen)| CoreCounters {
        busy: Stages {
            target: now.busy.target.since(before.busy.target),
            kv: now.busy.kv.since(before.busy.kv),
            device: now.busy.device.since(before.busy.device),
        },
        queue_depth: depth(window, now, before),
        own_here: now.own_here.saturating_sub(before.own_here),
        moved_to: less(&now.moved_to, &before.moved_to),
        ran_for: less(&now.ran_for, &before.ran_for),
    };
    let flow = |number: u32| {
        let at = number as usize;
        let of_cores = || now.iter().zip(before).map(|(now, before)| (now.flows[at], before.flows[at]));
        let sum = |figure: fn(&FlowSeen) -> u64| -> u64 {
            of_cores().map(|(now, before)| figure(&now).saturating_sub(figure(&before))).sum()
        };
        let requests_by_core: Vec<u64> =
            of_cores().map(|(now, before)| now.answered.saturating_sub(before.answered)).collect();
        let waiting = of_cores().map(|(now, _)| now.begun.saturating_sub(now.answered)).sum();
        // The mean over the cores that have one, by what came over them.
        let trips = || of_cores().filter(|(now, _)| now.round_trip > Nanos::ZERO);
        let weight = |now: &FlowSeen, before: &FlowSeen| now.answered.saturating_sub(before.answered).max(1);
        let weights: u64 = trips().map(|(now, before)| weight(&now, &before)).sum();
        let weighed: u128 = trips()
            .map(|(now, before)| u128::from(now.round_trip.0) * u128::from(weight(&now, &before)))
            .sum();
        FlowCounters {
            flow: FlowId(number),
            requests_by_core,
            bytes: sum(|seen| seen.bytes),
            latency: Nanos(sum(|seen| seen.latency.0)),
            waited: Nanos(sum(|seen| seen.waited.0)),
            round_trip: Nanos((weighed / u128::from(weights.max(1))) as u64),
            waiting,
        }
    };
    let is_there = |flow: &FlowCounters| {
        flow.waiting > 0 || flow.bytes > 0 || flow.requests_by_core.iter().any(|&n| n > 0)
    };
    Counters {
        window,
        cores: now.iter().zip(before).map(core).collect(),
        flows: (0..FLOWS_MAX).map(flow).filter(is_there).collect(),
    }
}

/// How many requests of its connections a core had on average, by Little's law: the time that those which were answered
/// had been there, over the window's.
fn depth(window: Nanos, now: &Seen, before: &Seen) -> f64 {
    let flows = now.flows.iter().zip(&before.flows);
    let latency: u64 = flows.map(|(now, before)| now.latency.since(before.latency).0).sum();
    latency as f64 / window.0.max(1) as f64
}

#[cfg(test)]
mod tests {
    use super::*;
    use octokv_sched::FlowSettings;
    use octokv_sched::fair_queue::WEIGHT_UNIT;

    /// What a core had served so many flows, from the second on, each of them waiting.
    fn seen(served_ms: &[u64]) -> Seen {
        let of = |served: &u64| {
            let served = Nanos::from_millis(*served);
            FlowSeen { begun: served.0 / 1_000, outdone: served.0 / 1_000, served, ..FlowSeen::default() }
        };
        let mut flows = vec![FlowSeen::default(); FLOWS_MAX as usize];
        flows.iter_mut().skip(1).zip(served_ms).for_each(|(flow, served)| *flow = of(served));
        Seen { flows, ..Seen::default() }
    }

    fn window(hosts: &[(FlowId, String)], weights: Vec<(FlowId, Vec<u32>)>, settings: Settings) -> Window {
        let counters = Counters::default();
        Window {
            number: 1,
            ended: Nanos(1),
            length: Nanos(1),
            decision: Decision::at_start(2),
            figures: measure(&counters),
            counters,
            hosts: hosts.to_vec(),
            weights,
            settings,
            measured_by: 0,
            took: Nanos::ZERO,
        }
    }

    #[test]
    fn who_is_served_elsewhere_weighs_less_where_another_is_not() {
        let (both, one) = (FlowId(1), FlowId(2));
        let hosts = [(both, "both".to_owned()), (one, "one".to_owned())];
        let before = [seen(&[0, 0]), seen(&[0, 0])];
        let after = [seen(&[500, 500]), seen(&[1_000, 0])];
        let next = |last: Option<&Window>, settings: &Settings| {
            weights([both, one].into_iter(), (&before, &after), last, &hosts, settings)
        };
        let settings = Settings::default();
        let first = next(None, &settings);
        assert_eq!((first[0].0, first[1].0), (both, one));
        assert!(first[0].1[0] < WEIGHT_UNIT && first[1].1[0] > WEIGHT_UNIT, "{first:?}");
        assert_eq!(first[0].1[1], WEIGHT_UNIT, "it is alone there");
        let last = window(&hosts, first.clone(), settings.clone());
        let second = next(Some(&last), &settings);
        assert!(second[0].1[0] < first[0].1[0], "what it weighed is known: {first:?}, {second:?}");
        // Another host that has the number now does not have the weight.
        let others = window(&[(both, "another".to_owned()), hosts[1].clone()], first.clone(), settings);
        assert!(next(Some(&others), &Settings::default())[0].1[0] > second[0].1[0]);
    }

    #[test]
    fn a_weight_that_is_set_holds_at_once_and_a_limit_is_no_reason_for_one() {
        let (a, b) = (FlowId(1), FlowId(2));
        let hosts = [(a, "a".to_owned()), (b, "b".to_owned())];
        let before = [seen(&[0, 0]), seen(&[0, 0])];
        let after = [seen(&[500, 500]), seen(&[500, 500])];
        let last =
            window(&hosts, vec![(a, vec![WEIGHT_UNIT; 2]), (b, vec![WEIGHT_UNIT; 2])], Settings::default());
        let mut settings = Settings::default();
        settings.tenants.insert("a".to_owned(), FlowSettings { weight: 100, ..FlowSettings::default() });
        let of = |settings: &Settings, after: &[Seen]| {
            let next = weights([a, b].into_iter(), (&before, after), Some(&last), &hosts, settings);
            f64::from(next[0].1[0]) / f64::from(next[1].1[0])
        };
        // What was served by other weights may change it by a factor of two either way.
        assert!(of(&settings, &after) >= 100.0, "{}", of(&settings, &after));
        // Who waits for its limit only does not want more than it has.
        let mut limited = [seen(&[10, 990]), seen(&[10, 990])];
        limited.iter_mut().for_each(|core| core.flows[1].outdone = 0);
        assert!((of(&Settings::default(), &limited) - 1.0).abs() < 0.01);
    }
}
