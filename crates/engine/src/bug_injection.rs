//! Bugs to be found: switches that break one promise each, so that tests can see the simulator go red.
//!
//! Only with the feature `planted-bugs`, which only tests turn on, can a bug be planted (for the calling
//! thread); without it [`is`] is constant and the engine has no trace of them.

/// One promise broken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bug {
    /// Writes are acknowledged without the flush that makes them durable.
    SkipFlush,
    /// A batch is flushed before the records that it names were written.
    ForgetRecords,
    /// A batch says that the one before is durable while that is still under way.
    VouchTooEarly,
    /// Tags collide, and recovery takes a put's word for which record it replaces.
    ReplaceUnread,
    /// A record's space is free before its replacement is durable.
    ReuseSpaceEarly,
    /// With acknowledgement by the device, freed space is used again before a flush.
    FreeUnflushed,
    /// Freed space is used again while readers are on it, and at once.
    IgnoreReaders,
    /// Readers see a change before it is durable.
    PublishBeforeDurable,
    /// Not a bug, but a stage for one: nearly all tags collide.
    NarrowTags,
    /// Tags collide, and what is read is not compared with the key.
    SkipKeyCompare,
    /// Values are answered without their checksum being compared.
    SkipValueChecksum,
    /// Recovery takes journal entries whose records a crash has torn.
    TrustTornRecords,
    /// A checkpoint says that it covers what happened while it was written.
    CheckpointTooNew,
    /// Writers of one key do not wait for each other.
    SkipKeyLock,
}

octokv_base::planted_bugs!(Bug);

/// The bits of a tag that count.
#[inline(always)]
pub(crate) fn tag_mask() -> u64 {
    let narrow = is(Bug::NarrowTags) || is(Bug::SkipKeyCompare) || is(Bug::ReplaceUnread);
    if narrow { 3 } else { u64::MAX }
}
