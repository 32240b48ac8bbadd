//! Faults of the double, and a plan of them drawn from a seed.
//!
//! In: a seed, the number of members and connections. Out: a [`EtcdFaultPlan`], a pure function of these.

use crate::draw::{between, pick};
use octokv_base::{Nanos, Prng};
use octokv_runtime::simulated::CLOCK_DRIFT_MAX_PPM;

/// How often messages between clients and members are affected: on average one in each number; 0 for none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MessageFaults {
    /// A request is lost before it is applied.
    pub lose_request_one_in: u64,
    /// A response is lost after its request was applied.
    pub lose_response_one_in: u64,
    /// The watches of a connection break instead of sending an update.
    pub break_watch_one_in: u64,
    /// A message is delayed.
    pub delay_one_in: u64,
    /// The longest delay.
    pub delay_max: Nanos,
}

/// A fault. `connection` is the number of an [`super::EtcdConnection`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EtcdFault {
    /// Sets the fault profile of messages.
    Messages(MessageFaults),
    /// The leader steps down; for a time there is none.
    Election {
        /// The time without a leader.
        duration: Nanos,
    },
    /// Cuts a member off from the others, or reconnects it. It serves stale serializable reads and watches.
    Isolate {
        /// The member.
        member: usize,
        /// Whether it is cut off.
        isolated: bool,
    },
    /// Sets by how much a member applies the log later than usual.
    Lag {
        /// The member.
        member: usize,
        /// The time.
        lag: Nanos,
    },
    /// Sets the drift of the clock that ends leases: of a fast one, leases end early for their holders.
    ClockDrift {
        /// Microseconds gained per second.
        drift_ppm: i64,
    },
    /// Compacts everything before the newest revision, under every watch that lags.
    Compact,
    /// Breaks the watches of a connection.
    BreakWatches {
        /// The connection.
        connection: usize,
    },
    /// Keeps the watches of a connection silent, or lets them go on.
    StallWatches {
        /// The connection.
        connection: usize,
        /// Whether they are silent.
        stalled: bool,
    },
    /// Holds the messages of a connection in these directions, and delivers those of the others.
    Cut {
        /// The connection.
        connection: usize,
        /// Whether requests are held.
        to_member: bool,
        /// Whether responses and watch updates are held.
        to_client: bool,
    },
    /// Resets a connection, which then leads to another member.
    Reset {
        /// The connection.
        connection: usize,
        /// The member.
        member: usize,
    },
}

/// Faults with the times at which they are injected, ascending.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EtcdFaultPlan(pub Vec<(Nanos, EtcdFault)>);

impl EtcdFaultPlan {
    /// Draws faults for the time up to `end`. A fault that lasts ends by another entry.
    pub fn draw(random: &mut Prng, members: usize, connections: usize, end: Nanos) -> EtcdFaultPlan {
        let mut plan = Vec::new();
        for _ in 0..between(random, 2, 12) {
            let from = Nanos(random.below(end.0));
            let until = from + Nanos(random.below(end.0 / 4 + 1));
            let member = random.below(members as u64) as usize;
            let connection = random.below(connections as u64) as usize;
            let (fault, undo) = Self::draw_one(random, member, connection, until.since(from));
            plan.push((from, fault));
            plan.extend(undo.map(|undo| (until, undo)));
            if random.one_in(3) {
                // Under whatever the fault holds back.
                plan.push((until, EtcdFault::Compact));
            }
        }
        // Of equal times, compactions come first.
        plan.sort_by_key(|(at, fault)| (*at, *fault != EtcdFault::Compact));
        EtcdFaultPlan(plan)
    }

    fn draw_one(
        random: &mut Prng,
        member: usize,
        connection: usize,
        duration: Nanos,
    ) -> (EtcdFault, Option<EtcdFault>) {
        let cut = |to_member, to_client| EtcdFault::Cut { connection, to_member, to_client };
        match random.below(10) {
            0 => {
                let mut one_in = || pick(random, &[0, 3, 10, 40]);
                let faults = MessageFaults {
                    lose_request_one_in: one_in(),
                    lose_response_one_in: one_in(),
                    break_watch_one_in: one_in(),
                    delay_one_in: one_in(),
                    delay_max: Nanos::from_secs(3),
                };
                (EtcdFault::Messages(faults), Some(EtcdFault::Messages(MessageFaults::default())))
            }
            1 => (EtcdFault::Election { duration }, None),
            2 => (
                EtcdFault::Isolate { member, isolated: true },
                Some(EtcdFault::Isolate { member, isolated: false }),
            ),
            3 => (
                EtcdFault::Lag { member, lag: Nanos(random.below(duration.0 + 1)) },
                Some(EtcdFault::Lag { member, lag: Nanos::ZERO }),
            ),
            4 => {
                let most = CLOCK_DRIFT_MAX_PPM as u64;
                let drift_ppm = between(random, 0, 2 * most) as i64 - CLOCK_DRIFT_MAX_PPM;
                (EtcdFault::ClockDrift { drift_ppm }, Some(EtcdFault::ClockDrift { drift_ppm: 0 }))
            }
            5 => (EtcdFault::Compact, None),
            6 => (EtcdFault::BreakWatches { connection }, None),
            7 => (
                EtcdFault::StallWatches { connection, stalled: true },
                Some(EtcdFault::StallWatches { connection, stalled: false }),
            ),
            8 => {
                let directions = pick(random, &[(true, false), (false, true), (true, true)]);
                (cut(directions.0, directions.1), Some(cut(false, false)))
            }
            _ => (EtcdFault::Reset { connection, member }, None),
        }
    }

    /// Takes the faults that are due, in order. The caller injects them.
    pub fn take_due(&mut self, now: Nanos) -> Vec<EtcdFault> {
        let due = self.0.partition_point(|(at, _)| *at <= now);
        self.0.drain(..due).map(|(_, fault)| fault).collect()
    }

    /// The time of the next fault; [`Nanos::NEVER`] for none.
    pub fn next_at(&self) -> Nanos {
        self.0.first().map_or(Nanos::NEVER, |(at, _)| *at)
    }
}
