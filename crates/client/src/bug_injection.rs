//! Injected bugs: each breaks one guarantee of a session or of the remote device, to prove that their tests detect it.
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
    /// The receive buffer keeps the bytes of a lost connection, which are then taken for bytes of the next one.
    KeepReceivedBytes,
    /// A command in flight when its connection is lost does not complete.
    ForgetAbortedCommands,
    /// A dropped command future frees its token at once: the response completes a later command with that token.
    ReuseAbandonedTokens,
    /// Writes that were sent before the connection was lost are reported as not executed.
    ForgetSentWrites,
    /// A command that waits for its socket when its connection is lost is reported as not executed, and sent afterwards.
    SendAbortedCommands,
    /// A Keep Alive is sent shortly before the end of the timeout, which the node measures by its own clock.
    KeepAliveLate,
}

octokv_base::define_bug_injection!(InjectedBug);
