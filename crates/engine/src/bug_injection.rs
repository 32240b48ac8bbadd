//! Bugs to be found: switches that break one promise each, so that tests can see the simulator go red.
//!
//! Only with the feature `bug-injection`, which only tests turn on, can a bug be planted (for the calling
//! thread); without it [`is_injected`] is constant and the engine has no trace of them.

/// One promise broken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InjectedBug {
    /// Writes are acknowledged without the flush that makes them durable.
    SkipFlush,
    /// A batch is flushed before the records that it names were written.
    SkipRecordWait,
    /// A batch says that the one before is durable while that is still under way.
    MarkDurableEarly,
    /// Tags collide, and recovery takes a put's word for which record it replaces.
    SkipPredecessorCheck,
    /// A record's space is free before its replacement is durable.
    ReuseSpaceEarly,
    /// With acknowledgement by the device, freed space is used again before a flush.
    ReuseSpaceUnflushed,
    /// Freed space is used again while readers are on it, and at once.
    IgnoreEpochs,
    /// Readers see a change before it is durable.
    PublishBeforeDurable,
    /// Not a bug, but a stage for one: nearly all tags collide.
    NarrowTags,
    /// Tags collide, and what is read is not compared with the key.
    SkipKeyCompare,
    /// Values are answered without their checksum being compared.
    SkipValueChecksum,
    /// Recovery takes journal entries whose records a crash has torn.
    SkipRecordVerification,
    /// A checkpoint says that it covers what happened while it was written.
    CheckpointClaimsTooMuch,
    /// Writers of one key do not wait for each other.
    SkipKeyLock,
}

octokv_base::define_bug_injection!(InjectedBug);

/// The bits of a tag that count.
#[inline(always)]
pub(crate) fn tag_mask() -> u64 {
    let narrow = is_injected(InjectedBug::NarrowTags)
        || is_injected(InjectedBug::SkipKeyCompare)
        || is_injected(InjectedBug::SkipPredecessorCheck);
    if narrow { 3 } else { u64::MAX }
}
