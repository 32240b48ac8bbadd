//! Bugs to be found: switches that break one promise of the node each, so that tests can see the simulator go red.
//!
//! Only with the feature `bug-injection`, which only tests turn on, can a bug be planted (for the calling
//! thread); without it [`is_injected`] is constant and the node has no trace of them.

/// One promise broken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InjectedBug {
    /// Writes of parts of one block of the device do not wait for each other.
    SkipRangeLock,
    /// Write zeroes of a part of a block of the device does not wait for writes of its other parts.
    ZeroWithoutLock,
    /// Deallocate does not wait for writes of parts of the blocks that it gives back.
    TrimWithoutLock,
    /// A write that is to be durable is answered before the flush.
    CompleteDurableEarly,
    /// Flush is answered without one.
    SkipFlush,
    /// Deallocate gives back the blocks of the device that it touches, rather than those that lie within.
    TrimTooMuch,
    /// Deallocate is answered before it is done.
    CompleteTrimEarly,
    /// A write of a part of a block of the device does not wait for that of another part to be on the device.
    UnlockEarly,
    /// A request whose namespace was removed meanwhile is not answered.
    RemoveDropsRequests,
    /// A request whose namespace was removed meanwhile is refused, although it is carried out.
    RemoveFailsRequests,
    /// The answer to a request that another core carried out is dropped where there is no room for it on its way.
    LoseOffloadedCompletion,
    /// Requests that are held back when another policy is chosen are forgotten.
    DropQueued,
}

octokv_base::define_bug_injection!(InjectedBug);
