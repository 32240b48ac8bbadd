//! The next operation of a workload: what it does, to which key; and the keys that inserts add.
//! In: how many operations were given out, a worker's random numbers. Out: operations.
//! Invariant: a key is drawn only when it was there from the beginning, or its insert and all before it were answered.

use crate::config::Plan;
use crate::key_distribution::Drawer;
use crate::shard::Share;
use crate::workload::{Action, SCAN_KEYS_MAX, Workload};
use octokv_base::Random;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

/// One operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Operation {
    pub action: Action,
    /// Whose key.
    pub index: u64,
    /// How many keys a List asks for.
    pub list_keys: u32,
}

/// Chooses the operations of one worker.
pub(crate) struct Chooser {
    workload: Workload,
    random: Random,
    /// None where keys are taken in order.
    drawer: Option<Drawer>,
}

impl Chooser {
    pub fn new(plan: &Plan, workload: Workload, random: Random) -> Chooser {
        let distribution = plan.distribution_of(workload);
        let drawer = distribution.map(|kind| Drawer::new(kind, plan.theta, plan.keys, plan.seed));
        Chooser { workload, random, drawer }
    }

    /// Operation `number` of the workload.
    #[inline]
    pub fn operation(&mut self, number: u64, plan: &Plan, keys: &Keys) -> Operation {
        let action = match self.workload.mix() {
            [(action, _)] => *action,
            mix => drawn(mix, self.random.below(100)),
        };
        let index = match (action, &mut self.drawer) {
            (Action::Insert, _) => keys.add(),
            (_, None) => keys.share.index(number % plan.keys),
            (_, Some(drawer)) => keys.share.index(drawer.draw(keys.present(), &mut self.random)),
        };
        let list_keys = match self.workload {
            Workload::SeekRandom => SCAN_KEYS_MAX,
            Workload::YcsbE if action == Action::List => {
                1 + self.random.below(u64::from(SCAN_KEYS_MAX)) as u32
            }
            _ => 0,
        };
        Operation { action, index, list_keys }
    }
}

fn drawn(mix: &[(Action, u64)], mut at: u64) -> Action {
    for &(action, share) in mix {
        match at.checked_sub(share) {
            None => return action,
            Some(rest) => at = rest,
        }
    }
    unreachable!("the shares of a mix are a hundred")
}

/// The keys of a target that are there: the first `present` of its share.
pub(crate) struct Keys {
    share: Share,
    present: AtomicU64,
    inserts: Mutex<Inserts>,
}

struct Inserts {
    /// The next one's place in the share.
    next: u64,
    /// Places of those on their way; never more than streams.
    open: Vec<u64>,
}

impl Keys {
    /// So many of a share, and inserts of so many streams.
    pub fn new(share: Share, count: u64, streams: usize) -> Keys {
        let inserts = Mutex::new(Inserts { next: count, open: Vec::with_capacity(streams) });
        Keys { share, present: AtomicU64::new(count), inserts }
    }

    fn present(&self) -> u64 {
        self.present.load(Ordering::Relaxed)
    }

    /// The index of a new key.
    fn add(&self) -> u64 {
        let mut inserts = self.inserts.lock().unwrap_or_else(PoisonError::into_inner);
        let nth = inserts.next;
        inserts.next += 1;
        inserts.open.push(nth);
        self.share.index(nth)
    }

    /// A new key was stored.
    pub fn added(&self, index: u64) {
        let nth = self.share.nth(index);
        let mut inserts = self.inserts.lock().unwrap_or_else(PoisonError::into_inner);
        let at = inserts.open.iter().position(|&open| open == nth).expect("it was on its way");
        inserts.open.swap_remove(at);
        let present = inserts.open.iter().copied().min().unwrap_or(inserts.next);
        self.present.store(present, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::key_distribution::Distribution;

    #[test]
    fn keys_are_there_when_all_before_them_are() {
        let keys = Keys::new(Share::WHOLE, 10, 4);
        assert_eq!([keys.add(), keys.add(), keys.add()], [10, 11, 12]);
        keys.added(11);
        assert_eq!(keys.present(), 10);
        keys.added(10);
        assert_eq!(keys.present(), 12);
        keys.added(12);
        assert_eq!((keys.present(), keys.add()), (13, 13));
    }

    #[test]
    fn a_target_draws_and_adds_the_keys_of_its_share_alone() {
        for share in Share::all(3) {
            let plan = Plan { keys: share.count(100), ..Plan::default() };
            for workload in Workload::ALL {
                let keys = Keys::new(share, plan.keys, 1);
                let mut chooser = Chooser::new(&plan, workload, Random::new(1));
                for number in 0..1000 {
                    let Operation { action, index, .. } = chooser.operation(number, &plan, &keys);
                    assert_eq!(index % 3, share.number, "{workload:?}");
                    match action {
                        Action::Insert => keys.added(index),
                        _ => assert!(share.nth(index) < keys.present()),
                    }
                }
            }
            let keys = Keys::new(share, plan.keys, 1);
            assert_eq!(keys.add(), share.index(plan.keys));
        }
    }

    #[test]
    fn every_workload_does_its_share_of_everything_to_keys_that_are_there() {
        for workload in Workload::ALL {
            let plan = Plan { keys: 1000, ..Plan::default() };
            let keys = Keys::new(Share::WHOLE, plan.keys, 1);
            let mut chooser = Chooser::new(&plan, workload, Random::new(1));
            let mut done = vec![0; workload.mix().len()];
            for number in 0..100_000 {
                let operation = chooser.operation(number, &plan, &keys);
                let at = workload.mix().iter().position(|(action, _)| *action == operation.action).unwrap();
                done[at] += 1;
                match operation.action {
                    Action::Insert => keys.added(operation.index),
                    Action::List => assert!((1..=SCAN_KEYS_MAX).contains(&operation.list_keys)),
                    _ => assert!(operation.index < keys.present()),
                }
            }
            for (count, (action, share)) in done.iter().zip(workload.mix()) {
                // 1000 to a percent, with a deviation of 158 at most.
                assert!(u64::abs_diff(*count, share * 1000) < 800, "{workload:?} {action:?}: {count}");
            }
        }
    }

    #[test]
    fn a_distribution_that_is_given_replaces_the_workloads_own() {
        let plan = Plan { keys: 1000, distribution: Some(Distribution::Latest), ..Plan::default() };
        let keys = Keys::new(Share::WHOLE, plan.keys, 1);
        let newest = |workload| {
            let mut chooser = Chooser::new(&plan, workload, Random::new(1));
            (0..1000).filter(|&number| chooser.operation(number, &plan, &keys).index >= 990).count()
        };
        // 39 % by Zipf's law; 1 % where it has no say.
        assert!(newest(Workload::YcsbA) > 300 && newest(Workload::ReadRandom) > 300);
        assert_eq!(newest(Workload::ReadSequential), 10);
    }
}
