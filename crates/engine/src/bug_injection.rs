//! Bug injection: switches that each break one guarantee, so that tests can show that the simulator detects it.
//!
//! Only the feature `bug-injection`, which only tests enable, and unit tests allow to inject a bug (for the calling thread).
//! Otherwise [`is_injected`] is constant and the compiler removes every injected bug.

/// A guarantee that is broken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InjectedBug {
    /// Writes are acknowledged without the flush that makes them durable.
    SkipFlush,
    /// A batch is flushed before the records that it names are written.
    SkipRecordWait,
    /// Of the records of a batch that lie side by side, the first and the last change places.
    MisplaceRecords,
    /// A batch marks its predecessor as durable while that is still in flight.
    MarkDurableEarly,
    /// Tags collide, and recovery does not verify which record a put replaces.
    SkipPredecessorCheck,
    /// A record's space is released before its replacement is durable.
    ReuseSpaceEarly,
    /// With [`Completed`](crate::Durability::Completed) durability, freed space is reused before a flush.
    ReuseSpaceUnflushed,
    /// Freed space is reused at once, while readers may still read it.
    IgnoreEpochs,
    /// Readers see a change before it is durable.
    PublishBeforeDurable,
    /// Not a bug: makes nearly all tags collide.
    NarrowTags,
    /// Tags collide, and records are not compared with the full key.
    SkipKeyCompare,
    /// Values are returned without verifying their checksum.
    SkipValueChecksum,
    /// Recovery applies journal entries whose records a crash has torn.
    SkipRecordVerification,
    /// A checkpoint claims to include changes made while it was written.
    CheckpointClaimsTooMuch,
    /// An operation whose future is dropped half done is not continued, and keeps what it holds.
    LoseAbandoned,
    /// A value that was read before or during a change of its key is put into the cache after it.
    FillWithoutLease,
    /// Writers of one key are not serialized.
    SkipKeyLock,
    /// A writer that does not wait changes an entry that is not the one it verified.
    ApplyUncompared,
    /// A writer that does not wait changes the entry of a key that another writer has locked.
    ApplyDespiteKeyLock,
    /// A reader that does not wait takes whatever record is in the place that the index named.
    SkipIdentityInPlace,
    /// A reader that does not wait takes the end of a record whose header it has identified.
    TrustEndInPlace,
    /// Not a bug: values are stored in pieces of two units, whatever space there is.
    ScatterValues,
    /// A piece of a value is not written.
    ForgetPiece,
    /// Recovery takes records whose pieces a crash has torn.
    SkipPieceVerification,
    /// The space of pieces is given up before the record that replaces them is durable.
    FreePiecesEarly,
    /// Compaction gives up the space of the pieces that it joins before the joined record is durable.
    CompactionFreesEarly,
    /// A writer that does not wait frees the space of the record that it replaces, while readers may still read it.
    FreeUnderReaders,
    /// Space is prepared although records, or writes of records, are in it.
    PrepareAllocated,
    /// Space that is prepared is allocated before the zeros are written.
    ReleaseBeforePrepared,
    /// A flush keeps the newest entries alone, whatever snapshots see.
    FlushForgetsSnapshots,
    /// A compaction drops tombstones although a lower level has older entries of their keys.
    DropTombstonesEarly,
    /// An edit is written to the journal before its tables are durable.
    EditBeforeFlush,
    /// The space of a table or segment is freed by the edit that removes it, though older versions refer to it.
    FreeUnderVersions,
    /// An iterator's snapshot is taken when the iterator is first advanced, not when it is created.
    LateSnapshot,
    /// A memtable is released before the version has its tables.
    ReleaseMemtableEarly,
    /// The journal lacks the last table of an edit.
    LoseTableOfEdit,
    /// A segment is sealed while a record of it is being written.
    SealBeforeLastWrite,
    /// A flush reports one change too many as flushed.
    FlushClaimsTooMuch,
    /// Recovery puts into memtables what tables have.
    ReplayFlushed,
    /// A view with pairs that it has read ahead is used after a seek.
    KeepViewOverSeek,
    /// A view is used that is at another place than its iterator.
    UseViewOfOtherPlace,
    /// Units of the journal are prepared that batches may be in.
    PrepareJournalInUse,
    /// Preparation writes zeros over the images of the last checkpoint.
    PrepareImagesInUse,
    /// A read of a table that the device fails counts as one whose blocks the medium has lost.
    DeviceErrorIsDamage,
    /// Puts that were delayed are not woken when the limit ends.
    ForgetDelayedWrites,
    /// The lock bit of a segment is lost when its new image is published.
    LogForgetLockBit,
    /// The checksums of values in a value log are not compared.
    LogSkipValueChecksum,
    /// A split forgets the entries of a segment behind its first bucket.
    LogSplitForgetsChain,
    /// A reader does not notice that a chunk was opened again while it read.
    LogSkipReuseCheck,
    /// Compaction gives an entry its new place although the entry was replaced meanwhile.
    LogStaleMove,
    /// Recovery takes images whose values a crash has torn.
    LogTrustTail,
    /// Recovery takes images of an earlier opening behind those of a later one.
    LogOldIncarnation,
    /// The last unit of a value log is written again without its earlier records.
    LogTailForgetsPrefix,
    /// A segment is released while a batch with its changes is in flight.
    LogDropBusy,
    /// Value compaction takes the prefetched visits of a chunk for all that it needs.
    LogTrustPrefetch,
    /// A segment image in memory is used although the segment has a newer one.
    LogServeOldImage,
    /// The chunks that the head of a log has passed are free before an image with that head is flushed.
    LogFreeBeforeFlush,
    /// A volume on several devices takes their order in the list for that of their indices.
    SpanIgnoreIndex,
    /// A flush of several devices flushes one.
    SpanFlushOne,
    /// A volume on several devices goes on with one that has failed.
    SpanIgnoreFailure,
    /// The replacement of a device is not counted on the others.
    SpanForgetReplacement,
    /// A listing of several devices ends with the first that has no more keys.
    SpanListEndsEarly,
    /// A device that was replaced is served again.
    SpanTakeReplaced,
    /// A put of a key that moves is not stored at the destination.
    MoveSkipDualPut,
    /// A delete of a key that moves is not applied at the destination.
    MoveSkipDualDelete,
    /// The destination of a move does not note that it may have keys of the partitions.
    MoveForgetNote,
    /// A change of the partition map waits for the operations with the map before it alone.
    MoveForgetFormer,
    /// Listings and iterators do not leave out the keys that a move has left on another device.
    MoveListLeftOver,
    /// The source of a move deletes its keys before the map that names the destination is written.
    MoveDeleteEarly,
    /// A key is copied without its lock, so that it may replace one that was written meanwhile.
    MoveCopyUnlocked,
    /// Keys of partitions that move are swapped, and those that are already stay so.
    MoveWhileSwapping,
    /// A swapped key is removed from the swap region before its value is stored at home.
    SwapRemoveFirst,
    /// A swapped key is read at its home.
    SwapReadHome,
    /// The record of a key that is merged stays in the swap region.
    SwapLeaveRecord,
    /// Opening does not look for keys in swap regions.
    SwapForgetRegion,
    /// An operation that the device did not serve, since it failed, was dropped or needed no device, keeps its tokens.
    TokensKeepUnserved,
    /// An operation that is granted its tokens is not woken.
    TokensForgetWaker,
}

octokv_base::define_bug_injection!(InjectedBug);

/// The bits of a tag that are significant.
#[inline(always)]
pub(crate) fn tag_mask() -> u64 {
    let narrow = is_injected(InjectedBug::NarrowTags)
        || is_injected(InjectedBug::SkipKeyCompare)
        || is_injected(InjectedBug::SkipPredecessorCheck);
    if narrow { 3 } else { u64::MAX }
}

/// Whether every value is stored in pieces: for bugs that need some.
#[inline(always)]
pub(crate) fn scatters_values() -> bool {
    is_injected(InjectedBug::ScatterValues)
        || is_injected(InjectedBug::ForgetPiece)
        || is_injected(InjectedBug::SkipPieceVerification)
        || is_injected(InjectedBug::FreePiecesEarly)
        || is_injected(InjectedBug::CompactionFreesEarly)
}
