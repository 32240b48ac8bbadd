//! Bugs to be found: switches that break one promise of the remote device each, so that its tests can be seen
//! red.
//!
//! Only with the feature `bug-injection`, which only tests turn on, can a bug be planted (for the calling
//! thread); without it [`is_injected`] is constant and the client has no trace of them.

/// One promise broken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InjectedBug {
    /// A flush of the remote device is answered before the node's flush has completed.
    CompleteFlushEarly,
    /// Writes that a lost connection may have taken along are forgotten, and the next flush succeeds.
    ForgetLostWrites,
}

octokv_base::define_bug_injection!(InjectedBug);
