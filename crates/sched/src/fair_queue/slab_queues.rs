//! Where requests wait: one list for each flow, all in one piece of memory that does not grow.
//!
//! In: requests with their costs. Out: each flow's, first come first. Who is let in is decided here too: a flow with nothing
//! waiting always is, one that has some only while it has less than is left for everybody (dynamic thresholds, Choudhury and
//! Hahne 1998).
//!
//! Invariants: as many places are free as there are flows with nothing waiting; every place is in one flow's list or in the
//! list of free ones. Tested in `tests`.

use super::Cost;

const NONE: u32 = u32::MAX;

#[derive(Debug)]
struct Place<T> {
    waiting: Option<(T, Cost)>,
    next: u32,
}

/// One flow's part.
#[derive(Clone, Copy, Debug)]
pub(super) struct List {
    first: u32,
    last: u32,
    len: u32,
}

impl List {
    pub(super) const EMPTY: List = List { first: NONE, last: NONE, len: 0 };

    pub(super) fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub(super) fn len(&self) -> usize {
        self.len as usize
    }
}

#[derive(Debug)]
pub(super) struct Shelf<T> {
    places: Vec<Place<T>>,
    free: List,
    /// Lists that are not empty, and the most that there can be.
    lists: u32,
    lists_max: u32,
}

impl<T> Shelf<T> {
    /// For so many flows and requests; at least one request for each flow.
    pub(super) fn new(flows_max: u32, requests_max: u32) -> Shelf<T> {
        assert!(
            flows_max <= requests_max && requests_max < NONE,
            "{flows_max} flows, {requests_max} requests"
        );
        let place = |next| Place { waiting: None, next };
        let places = (1..requests_max).chain([NONE]).map(place).collect();
        let free = List { first: 0, last: requests_max - 1, len: requests_max };
        Shelf { places, free, lists: 0, lists_max: flows_max }
    }

    /// How many requests wait.
    pub(super) fn len(&self) -> usize {
        self.places.len() - self.free.len()
    }

    /// Adds a request, or gives it back where the flow has its part.
    pub(super) fn push(&mut self, list: &mut List, request: T, cost: Cost) -> Result<(), T> {
        let kept_for_others = self.lists_max - self.lists;
        if !list.is_empty() && list.len >= self.free.len - kept_for_others {
            return Err(request);
        }
        let place = self.free.first;
        assert!(place != NONE, "there is a place for each flow with nothing waiting");
        let entry = &mut self.places[place as usize];
        self.free.first = entry.next;
        self.free.len -= 1;
        *entry = Place { waiting: Some((request, cost)), next: NONE };
        if list.is_empty() {
            list.first = place;
            self.lists += 1;
        } else {
            self.places[list.last as usize].next = place;
        }
        list.last = place;
        list.len += 1;
        Ok(())
    }

    /// Takes the first of a list.
    pub(super) fn pop(&mut self, list: &mut List) -> Option<(T, Cost)> {
        if list.is_empty() {
            return None;
        }
        let place = list.first;
        let entry = &mut self.places[place as usize];
        list.first = std::mem::replace(&mut entry.next, self.free.first);
        list.len -= 1;
        self.free.first = place;
        self.free.len += 1;
        self.lists -= u32::from(list.is_empty());
        entry.waiting.take()
    }
}
