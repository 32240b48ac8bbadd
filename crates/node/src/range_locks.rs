//! One writer at a time per range of blocks: the others wait in the order in which they came, on any core.
//!
//! For devices whose block is larger than the namespace's: a write of a part of a device's block reads, patches
//! and writes all of it, so that writes of its other parts must not come between.
//! Invariants: of two ranges that meet, the one that came first is held first; a place in line is given up when
//! its guard is dropped, whether its turn had come or not.

use parking_lot::Mutex;
use std::future::poll_fn;
use std::ops::Range;
use std::task::{Poll, Waker};

/// The ranges that are held or waited for.
#[derive(Default)]
pub struct RangeLocks(Mutex<Line>);

#[derive(Default)]
struct Line {
    next: u64,
    /// In the order in which they came.
    places: Vec<Place>,
}

struct Place {
    turn: u64,
    range: Range<u64>,
    waker: Option<Waker>,
}

impl Line {
    /// Whether no range in front of `turn` meets its own.
    fn is_first(&self, turn: u64) -> bool {
        let at =
            self.places.iter().position(|place| place.turn == turn).expect("a place lasts with its guard");
        let own = &self.places[at].range;
        !self.places[..at].iter().any(|place| meet(&place.range, own))
    }
}

fn meet(one: &Range<u64>, other: &Range<u64>) -> bool {
    one.start < other.end && other.start < one.end
}

/// A place in line, later the range itself; dropped, it is free again.
pub struct Held<'a> {
    locks: &'a RangeLocks,
    turn: u64,
}

impl RangeLocks {
    /// Waits until no earlier caller holds or waits for any of these blocks.
    pub async fn lock(&self, range: Range<u64>) -> Held<'_> {
        let turn = {
            let mut line = self.0.lock();
            let turn = line.next;
            line.next += 1;
            line.places.push(Place { turn, range, waker: None });
            turn
        };
        let held = Held { locks: self, turn };
        poll_fn(|context| {
            let mut line = self.0.lock();
            if line.is_first(turn) {
                return Poll::Ready(());
            }
            let place = line.places.iter_mut().find(|place| place.turn == turn);
            place.expect("a place lasts with its guard").waker = Some(context.waker().clone());
            Poll::Pending
        })
        .await;
        held
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        let mut line = self.locks.0.lock();
        let Some(at) = line.places.iter().position(|place| place.turn == self.turn) else { return };
        let gone = line.places.remove(at);
        let next = line.places[at..].iter_mut().filter(|place| meet(&place.range, &gone.range));
        next.filter_map(|place| place.waker.take()).for_each(Waker::wake);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::future::Future;
    use std::pin::pin;
    use std::task::Context;

    fn poll<T>(future: &mut std::pin::Pin<&mut impl Future<Output = T>>) -> Option<T> {
        match future.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(value) => Some(value),
            Poll::Pending => None,
        }
    }

    #[test]
    fn ranges_that_meet_are_held_in_the_order_in_which_they_came() {
        let locks = RangeLocks::default();
        let (mut first, mut second) = (pin!(locks.lock(0..4)), pin!(locks.lock(3..6)));
        let (mut third, mut apart) = (pin!(locks.lock(5..9)), pin!(locks.lock(9..10)));
        let held = poll(&mut first).expect("nobody is in front");
        assert!(poll(&mut second).is_none());
        assert!(poll(&mut third).is_none(), "it meets the second, which came before");
        let _apart = poll(&mut apart).expect("meets none");
        drop(held);
        let held = poll(&mut second).expect("its turn");
        assert!(poll(&mut third).is_none());
        drop(held);
        assert!(poll(&mut third).is_some());
    }

    #[test]
    fn one_who_gives_up_its_place_lets_the_next_in() {
        let locks = RangeLocks::default();
        let mut last = pin!(locks.lock(0..2));
        {
            let mut waiting = Box::pin(locks.lock(0..1));
            assert!(poll(&mut waiting.as_mut()).is_some());
        }
        let mut first = Box::pin(locks.lock(0..1));
        let held = poll(&mut first.as_mut()).expect("free");
        assert!(poll(&mut last).is_none());
        drop((held, first));
        assert!(poll(&mut last).is_some());
        assert!(locks.0.lock().places.is_empty(), "the guards are gone");
    }
}
