//! What a write does to a key, by its version, its condition and its expiry. Pure functions over what is known of the key.
//!
//! In: the state of a key, and the options of a write. Out: what its record says then, or the outcome of a write that changes
//! nothing. The order of the decisions is the contract's ([`crate::Engine`], decision 0014): first whether the write is
//! newer, then its condition.

use super::record::{EXPIRY_END, RecordFlags, RecordFormat, RecordMeta};
use crate::{Capability, DeleteOutcome, EngineError, PutMode, PutOptions, PutOutcome};
use octokv_base::{UnixTime, Version};

/// What is known of a key before a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct KnownKey {
    /// Its version.
    pub version: Version,
    /// Whether it has a value that has not expired.
    pub exists: bool,
}

impl KnownKey {
    /// A key without a record.
    pub const ABSENT: KnownKey = KnownKey { version: Version::NONE, exists: false };

    /// The key of a record.
    pub fn of(meta: &RecordMeta, now: impl FnOnce() -> UnixTime) -> KnownKey {
        KnownKey { version: meta.version, exists: is_live(meta, now) }
    }
}

/// Whether a record has a value that has not expired.
#[inline]
pub(crate) fn is_live(meta: &RecordMeta, now: impl FnOnce() -> UnixTime) -> bool {
    if !meta.flags.contains(RecordFlags::VERSIONED) {
        return true;
    }
    !meta.flags.contains(RecordFlags::TOMBSTONE)
        && (meta.expires_at == UnixTime::NEVER || now() < meta.expires_at)
}

/// What a format lacks for a put.
///
/// # Errors
/// [`EngineError::Unsupported`].
pub(crate) fn check_options(format: RecordFormat, options: &PutOptions) -> Result<(), EngineError> {
    let lacks_versions = options.version > Version::NONE || matches!(options.mode, PutMode::IfVersion(_));
    let lacks_expiry = options.expires_at < UnixTime::NEVER;
    match format {
        RecordFormat::V1 if lacks_versions => Err(EngineError::Unsupported(Capability::Versions)),
        RecordFormat::V1 if lacks_expiry => Err(EngineError::Unsupported(Capability::Expiry)),
        RecordFormat::V2 if lacks_expiry && options.expires_at >= EXPIRY_END => {
            Err(EngineError::Unsupported(Capability::Expiry))
        }
        RecordFormat::V1 | RecordFormat::V2 => Ok(()),
    }
}

/// What the record of a put says of its key.
///
/// # Errors
/// The outcome of a put that stores nothing.
pub(crate) fn decide_put(key: KnownKey, options: &PutOptions) -> Result<RecordMeta, PutOutcome> {
    if options.version > Version::NONE && options.version <= key.version {
        return Err(PutOutcome::NotNewer(key.version));
    }
    match options.mode {
        PutMode::AddOnly if key.exists => return Err(PutOutcome::Exists),
        PutMode::UpdateOnly if !key.exists => return Err(PutOutcome::NotFound),
        PutMode::IfVersion(expected) if expected != key.version => {
            return Err(PutOutcome::OtherVersion(key.version));
        }
        PutMode::Upsert | PutMode::AddOnly | PutMode::UpdateOnly | PutMode::IfVersion(_) => {}
    }
    let version = options.version.max(key.version);
    let is_plain = version == Version::NONE && options.expires_at == UnixTime::NEVER;
    let flags = if is_plain { RecordFlags::NONE } else { RecordFlags::VERSIONED };
    Ok(RecordMeta { version, expires_at: options.expires_at, flags })
}

/// What a delete leaves of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Remains {
    /// What there is: nothing, or the tombstone that it has.
    Unchanged,
    /// Nothing.
    Nothing,
    /// A tombstone.
    Tombstone(RecordMeta),
}

/// What a delete of a key leaves, and its outcome.
///
/// # Errors
/// The outcome of a delete that changes nothing since it is not newer.
pub(crate) fn decide_delete(
    key: KnownKey,
    found: Option<&RecordMeta>,
    version: Version,
) -> Result<(Remains, DeleteOutcome), DeleteOutcome> {
    if version > Version::NONE && version <= key.version {
        return Err(DeleteOutcome::NotNewer(key.version));
    }
    let outcome = if key.exists { DeleteOutcome::Deleted } else { DeleteOutcome::NotFound };
    let is_tombstone = found.is_some_and(|meta| meta.flags.contains(RecordFlags::TOMBSTONE));
    let left = version.max(key.version);
    let remains = match found {
        Some(_) if is_tombstone && left == key.version => Remains::Unchanged,
        None if left == Version::NONE => Remains::Unchanged,
        Some(_) if left == Version::NONE => Remains::Nothing,
        Some(_) | None => Remains::Tombstone(RecordMeta {
            version: left,
            expires_at: UnixTime::NEVER,
            flags: RecordFlags::VERSIONED.with(RecordFlags::TOMBSTONE),
        }),
    };
    Ok((remains, outcome))
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn version(bits: u64) -> Version {
        Version::from_bits(bits)
    }

    #[test]
    fn that_a_put_is_not_newer_is_decided_before_its_condition() {
        let key = KnownKey { version: version(5), exists: true };
        let options = |version, mode| PutOptions { version, mode, ..PutOptions::default() };
        let table = [
            (options(version(5), PutMode::AddOnly), Err(PutOutcome::NotNewer(version(5)))),
            (options(version(4), PutMode::IfVersion(version(5))), Err(PutOutcome::NotNewer(version(5)))),
            (options(version(6), PutMode::AddOnly), Err(PutOutcome::Exists)),
            (options(version(6), PutMode::IfVersion(version(4))), Err(PutOutcome::OtherVersion(version(5)))),
            (options(version(6), PutMode::IfVersion(version(5))), Ok(version(6))),
            (options(Version::NONE, PutMode::UpdateOnly), Ok(version(5))),
        ];
        for (options, want) in table {
            assert_eq!(decide_put(key, &options).map(|meta| meta.version), want, "{options:?}");
        }
        let absent = decide_put(KnownKey::ABSENT, &options(Version::NONE, PutMode::UpdateOnly));
        assert_eq!(absent, Err(PutOutcome::NotFound));
        assert_eq!(decide_put(KnownKey::ABSENT, &PutOptions::default()), Ok(RecordMeta::PLAIN));
    }

    #[test]
    fn a_delete_leaves_a_tombstone_if_it_or_the_key_has_a_version() {
        let value = |version, expires_at| RecordMeta { version, expires_at, flags: RecordFlags::VERSIONED };
        let tombstone = |version| RecordMeta {
            flags: RecordFlags::VERSIONED.with(RecordFlags::TOMBSTONE),
            ..value(version, UnixTime::NEVER)
        };
        let delete = |found: Option<RecordMeta>, version| {
            let key = found.map_or(KnownKey::ABSENT, |meta| KnownKey::of(&meta, || UnixTime(10)));
            decide_delete(key, found.as_ref(), version)
        };
        use {DeleteOutcome::*, Remains::*};
        let table = [
            (None, 0, Ok((Unchanged, NotFound))),
            (None, 3, Ok((Tombstone(tombstone(version(3))), NotFound))),
            (Some(RecordMeta::PLAIN), 0, Ok((Nothing, Deleted))),
            (Some(RecordMeta::PLAIN), 3, Ok((Tombstone(tombstone(version(3))), Deleted))),
            (Some(value(version(2), UnixTime::NEVER)), 0, Ok((Tombstone(tombstone(version(2))), Deleted))),
            (Some(value(version(2), UnixTime(10))), 0, Ok((Tombstone(tombstone(version(2))), NotFound))),
            (Some(value(Version::NONE, UnixTime(10))), 0, Ok((Nothing, NotFound))),
            (Some(value(Version::NONE, UnixTime(11))), 0, Ok((Nothing, Deleted))),
            (Some(tombstone(version(2))), 0, Ok((Unchanged, NotFound))),
            (Some(tombstone(version(2))), 2, Err(NotNewer(version(2)))),
            (Some(tombstone(version(2))), 3, Ok((Tombstone(tombstone(version(3))), NotFound))),
        ];
        for (found, at, want) in table {
            assert_eq!(delete(found, version(at)), want, "{found:?} {at}");
        }
    }

    #[test]
    fn a_format_refuses_what_its_records_cannot_say() {
        let versioned = PutOptions { version: version(1), ..PutOptions::default() };
        let until = |at| PutOptions { expires_at: UnixTime(at), ..PutOptions::default() };
        let lacking = |capability| Err(EngineError::Unsupported(capability));
        assert_eq!(check_options(RecordFormat::V1, &versioned), lacking(Capability::Versions));
        assert_eq!(check_options(RecordFormat::V1, &until(1)), lacking(Capability::Expiry));
        assert_eq!(check_options(RecordFormat::V2, &versioned), Ok(()));
        assert_eq!(check_options(RecordFormat::V2, &until(EXPIRY_END.0 - 1)), Ok(()));
        assert_eq!(check_options(RecordFormat::V2, &until(EXPIRY_END.0)), lacking(Capability::Expiry));
        assert_eq!(check_options(RecordFormat::V2, &PutOptions::default()), Ok(()));
    }
}
