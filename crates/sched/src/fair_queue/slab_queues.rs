//! FIFO queues of all tenants in one slab of fixed size.
//!
//! In: items. Out: the items of each tenant in FIFO order. This type also decides admission: an empty queue always
//! accepts an item, another one only while its items are fewer than the unreserved free slots (dynamic thresholds,
//! Choudhury and Hahne 1998).
//!
//! Invariants: at least as many slots are free as there are empty queues; every slot is in one queue or in the free
//! list. Tested in `tests`.

const NIL: u32 = u32::MAX;

#[derive(Debug)]
struct QueueSlot<T> {
    item: Option<T>,
    next: u32,
}

/// The queue of one tenant: indexes into the slab.
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
    /// Queues that are not empty, and their maximum number.
    queues_in_use: u32,
    queues_max: u32,
}

impl<T> SlabQueues<T> {
    /// Creates queues for this many tenants and items; at least one item for each tenant.
    pub(super) fn new(tenants_max: u32, requests_max: u32) -> SlabQueues<T> {
        assert!(
            tenants_max <= requests_max && requests_max < NIL,
            "{tenants_max} tenants, {requests_max} requests"
        );
        let slot = |next| QueueSlot { item: None, next };
        let slots = (1..requests_max).chain([NIL]).map(slot).collect();
        let free = TenantQueue { first: 0, last: requests_max - 1, len: requests_max };
        SlabQueues { slots, free, queues_in_use: 0, queues_max: tenants_max }
    }

    /// The number of items in all queues.
    pub(super) fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Appends an item, or returns it if the queue has used its share.
    pub(super) fn push(&mut self, list: &mut TenantQueue, item: T) -> Result<(), T> {
        let kept_for_others = self.queues_max - self.queues_in_use;
        if !list.is_empty() && list.len >= self.free.len - kept_for_others {
            return Err(item);
        }
        let slot = self.free.first;
        assert!(slot != NIL, "an empty queue has a slot");
        let entry = &mut self.slots[slot as usize];
        self.free.first = entry.next;
        self.free.len -= 1;
        *entry = QueueSlot { item: Some(item), next: NIL };
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

    /// Removes the first item of a queue.
    pub(super) fn pop(&mut self, list: &mut TenantQueue) -> Option<T> {
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
        entry.item.take()
    }
}
