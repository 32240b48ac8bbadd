//! Injected bugs: each breaks one guarantee of the remote device, to prove that its tests detect it.
//!
//! Only the feature `bug-injection`, which only tests enable, can inject a bug (for the calling thread); without it
//! [`is_injected`] is constant and no code of a bug is compiled.

/// One broken guarantee.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InjectedBug {
    /// A flush of the remote device completes before the node's flush.
    CompleteFlushEarly,
    /// Writes possibly lost with a connection do not fence the device: the next flush succeeds.
    ForgetLostWrites,
}

octokv_base::define_bug_injection!(InjectedBug);
