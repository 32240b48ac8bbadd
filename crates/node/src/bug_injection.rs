//! Injected bugs of the node: each switch breaks one guarantee, to prove that the simulator detects it.
//!
//! Only the feature `bug-injection`, which only tests enable, lets a test inject a bug, for the calling thread.
//! Without it [`is_injected`] is constant `false` and the checks compile to nothing.

/// One broken guarantee.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InjectedBug {
    /// Partial writes of one device block do not exclude each other.
    SkipRangeLock,
    /// A partial Write Zeroes does not take the range lock.
    ZeroWithoutLock,
    /// Deallocate does not wait for partial writes of the blocks that it trims.
    TrimWithoutLock,
    /// A durable write completes before its flush.
    CompleteDurableEarly,
    /// Flush completes without flushing the device.
    SkipFlush,
    /// Deallocate trims every device block it touches, not only those fully inside the range.
    TrimTooMuch,
    /// Deallocate completes before its trim.
    CompleteTrimEarly,
    /// A partial write releases its range lock before the device has the data.
    UnlockEarly,
    /// A request whose namespace is removed while it runs never completes.
    RemoveDropsRequests,
    /// A request whose namespace is removed while it runs fails although it was executed.
    RemoveFailsRequests,
    /// The completion of an offloaded request is dropped if the ring to its home core is full.
    LoseOffloadedCompletion,
    /// A change of policy drops the queued requests.
    DropQueued,
    /// A request on a key of another core is executed here if the ring to that core is full.
    ExecuteBesideOwner,
    /// A command that was executed at once takes the long way too.
    ExecuteTwice,
}

octokv_base::define_bug_injection!(InjectedBug);
