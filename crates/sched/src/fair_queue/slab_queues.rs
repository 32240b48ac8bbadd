//! Where requests wait: one list for each flow, all in one piece of memory that does not grow.
//!
//! In: requests with their costs. Out: each flow's, first come first. Who is let in is decided here too: a flow with nothing
//! waiting always is, one that has some only while it has less than is left for everybody (dynamic thresholds, Choudhury and
//! Hahne 1998).
//!
//! Invariants: as many places are free as there are flows with nothing waiting; every place is in one flow's list or in the
//! list of free ones. Tested in `tests`.

use super::Cost;

const NIL: u32 = u32::MAX;

#[derive(Debug)]
struct QueueSlot<T> {
    waiting: Option<(T, Cost)>,
    next: u32,
}

/// One flow's part.
#[derive(Clone, Copy, Debug)]
pub(super) struct TenantQueue {
    first: u32,
    last: u32,
    len: u32,
}

impl TenantQueue {
    pub(super) const EMPTY: TenantQueue = TenantQueue { first: NIL, last: NIL, len: 0 };

    pub(super) fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub(super) fn len(&self) -> usize {
        self.len as usize
    }
}

#[derive(Debug)]
pub(super) struct SlabQueues<T> {
    slots: Vec<QueueSlot<T>>,
    free: TenantQueue,
    /// Lists that are not empty, and the most that there can be.
    queues_in_use: u32,
    queues_max: u32,
}

impl<T> SlabQueues<T> {
    /// For so many flows and requests; at least one request for each flow.
    pub(super) fn new(flows_max: u32, requests_max: u32) -> SlabQueues<T> {
        assert!(
            flows_max <= requests_max && requests_max < NIL,
            "{flows_max} flows, {requests_max} requests"
        );
        let slot = |next| QueueSlot { waiting: None, next };
        let places = (1..requests_max).chain([NIL]).map(slot).collect();
        let free = TenantQueue { first: 0, last: requests_max - 1, len: requests_max };
        SlabQueues { slots: places, free, queues_in_use: 0, queues_max: flows_max }
    }

    /// How many requests wait.
    pub(super) fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Adds a request, or gives it back where the flow has its part.
    pub(super) fn push(&mut self, list: &mut TenantQueue, request: T, cost: Cost) -> Result<(), T> {
        let kept_for_others = self.queues_max - self.queues_in_use;
        if !list.is_empty() && list.len >= self.free.len - kept_for_others {
            return Err(request);
        }
        let slot = self.free.first;
        assert!(slot != NIL, "there is a place for each flow with nothing waiting");
        let entry = &mut self.slots[slot as usize];
        self.free.first = entry.next;
        self.free.len -= 1;
        *entry = QueueSlot { waiting: Some((request, cost)), next: NIL };
        if list.is_empty() {
            list.first = slot;
            self.queues_in_use += 1;
        } else {
            self.slots[list.last as usize].next = slot;
        }
        list.last = slot;
        list.len += 1;
        Ok(())
    }

    /// Takes the first of a list.
    pub(super) fn pop(&mut self, list: &mut TenantQueue) -> Option<(T, Cost)> {
        if list.is_empty() {
            return None;
        }
        let slot = list.first;
        let entry = &mut self.slots[slot as usize];
        list.first = std::mem::replace(&mut entry.next, self.free.first);
        list.len -= 1;
        self.free.first = slot;
        self.free.len += 1;
        self.queues_in_use -= u32::from(list.is_empty());
        entry.waiting.take()
    }
}
