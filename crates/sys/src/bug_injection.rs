//! Injected bugs of this crate: a switch that breaks a guarantee, to prove that tests and the simulator detect it.
//!
//! Only the feature `bug-injection`, which only tests enable, lets a test inject a bug, for the calling thread.

/// A broken guarantee.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InjectedBug {
    /// A writer takes a page that readers hold.
    WriteUnderReaders,
}

octokv_base::define_bug_injection!(InjectedBug);
