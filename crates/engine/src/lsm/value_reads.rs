//! The reads of values ahead of an iterator: records that lie side by side, as puts in the order of keys and collection leave them, are one read.
//!
//! ```text
//!   pairs ahead     being read │ not yet read
//!                    a  b  c   │ d  e  f  g     records of d to g side by side: one read, up to GATHERED_BYTES_MAX
//! ```
//! A device serves one read of 128 KiB in much less time than eight of 16 KiB that lie anywhere. If each pair that comes into the reach of prefetch were read at once,
//! each read would have one record. So records that go on where the last read ends wait until half of the pairs in reach are consumed; others do not.
//!
//! In: pairs ahead. Out: which are read together, and of each the outcome. A gathered read that fails says nothing of a single record: it is read again by itself.

use super::entry::ValueAddress;
use super::prefetch_degree::PrefetchGrant;
use octokv_base::{Buffer, Nanos, SharedBuffer};
use octokv_device::{DeviceError, DeviceFuture, IoResult};
use std::cell::RefCell;
use std::collections::VecDeque;
use std::ops::Range;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};

/// What one read gathers at most, in bytes, if that is more than one record: from here on a device gains little by longer reads, and a short
/// scan loses much by values that it does not want.
pub(super) const GATHERED_BYTES_MAX: u64 = 128 << 10;

/// The value of a pair that was read ahead.
pub(super) enum AheadValue {
    /// These bytes, or none if only keys are wanted.
    Inline(Box<[u8]>),
    /// That of a record in these units, which is not being read yet.
    InSegment(ValueAddress, Range<u64>),
    /// That of a record which is being read.
    Reading(ValueAddress, Range<u64>, ValueRead),
    /// Those bytes of a buffer.
    Read(Rc<Buffer>, Range<usize>),
    /// That of a record in these units, which the cache had: those bytes of it. It has a grant if it was not wanted yet.
    Cached { units: Range<u64>, record: SharedBuffer, bytes: Range<usize>, _grant: Option<PrefetchGrant> },
}

/// A pair that the view has passed and the iterator has not.
pub(super) struct AheadPair {
    pub(super) key: Vec<u8>,
    pub(super) value_bytes: usize,
    pub(super) value: AheadValue,
}

impl AheadValue {
    /// The units of its record, if that is read ahead or was in the cache.
    pub(super) fn units(&self) -> Option<&Range<u64>> {
        match self {
            AheadValue::InSegment(_, units)
            | AheadValue::Reading(_, units, _)
            | AheadValue::Cached { units, .. } => Some(units),
            AheadValue::Inline(_) | AheadValue::Read(..) => None,
        }
    }
}

/// A read of one record or several.
struct GatheredRead {
    read: DeviceFuture,
    units: Range<u64>,
    began: Option<Nanos>,
    /// How long it took, up to the moment in which its end was seen.
    latency: Option<Nanos>,
    outcome: Option<Result<Rc<Buffer>, DeviceError>>,
    /// Of the records that are read before they are wanted: the buffer has all of them until the last is taken.
    _grants: Vec<PrefetchGrant>,
}

/// A buffer, and the place of a record in it, in units.
pub(super) type RecordPlace = (Rc<Buffer>, Range<u64>);

/// One record's part of a read.
#[derive(Clone)]
pub(super) struct ValueRead(Rc<RefCell<GatheredRead>>);

impl ValueRead {
    /// A read of these units, which began now, with the grants of those records that are not wanted yet.
    pub(super) fn begin(
        read: DeviceFuture,
        units: Range<u64>,
        began: Option<Nanos>,
        grants: Vec<PrefetchGrant>,
    ) -> ValueRead {
        let gathered = GatheredRead { read, units, began, latency: None, outcome: None, _grants: grants };
        ValueRead(Rc::new(RefCell::new(gathered)))
    }

    /// Notes the end of the read, if it has come.
    pub(super) fn poll(&self, context: &mut Context<'_>, now: Option<Nanos>) -> Poll<()> {
        let mut gathered = self.0.borrow_mut();
        if gathered.outcome.is_none() {
            let Poll::Ready(result) = Pin::new(&mut gathered.read).poll(context) else {
                return Poll::Pending;
            };
            gathered.latency = now.zip(gathered.began).map(|(now, began)| now.since(began));
            gathered.outcome = Some(IoResult::into_read(result).map(Rc::new));
        }
        Poll::Ready(())
    }

    /// How long the read took, once it has ended; `None` without a clock.
    pub(super) fn latency(&self) -> Option<Nanos> {
        self.0.borrow().latency
    }

    /// The buffer and the place in it of the record in these units, in units; `None` before the end of the read.
    pub(super) fn record(&self, units: &Range<u64>) -> Option<Result<RecordPlace, DeviceError>> {
        let gathered = self.0.borrow();
        let at = units.start - gathered.units.start..units.end - gathered.units.start;
        Some(gathered.outcome.as_ref()?.clone().map(|buffer| (buffer, at)))
    }

    /// Whether the read has other records than that in these units.
    pub(super) fn is_gathered(&self, units: &Range<u64>) -> bool {
        self.0.borrow().units != *units
    }
}

/// The first pairs of those in reach that are to be read at once, and their units; `None` if there are none, or more are to be gathered first. `can_gather` is whether records share
/// reads, `goes_on` whether more pairs may follow.
pub(super) fn next_run(
    ahead: &VecDeque<AheadPair>,
    reach: usize,
    unit_bytes: u64,
    can_gather: bool,
    goes_on: bool,
) -> Option<(Range<usize>, Range<u64>)> {
    let reach = reach.min(ahead.len());
    let to_read = |pair: &AheadPair| matches!(pair.value, AheadValue::InSegment(..));
    let first = ahead.iter().take(reach).position(to_read)?;
    let mut units = ahead[first].value.units()?.clone();
    let mut end = first + 1;
    while can_gather && end < reach && to_read(&ahead[end]) {
        let next = ahead[end].value.units()?;
        if next.start != units.end || (next.end - units.start) * unit_bytes > GATHERED_BYTES_MAX {
            break;
        }
        (units.end, end) = (next.end, end + 1);
    }
    let is_cut = end == reach && goes_on && (units.end - units.start) * unit_bytes < GATHERED_BYTES_MAX;
    let continues =
        first > 0 && ahead[first - 1].value.units().is_some_and(|before| before.end == units.start);
    let may_wait = can_gather && is_cut && continues && first >= reach.div_ceil(2);
    (!may_wait).then_some((first..end, units))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Pairs whose records lie in these units; those before `reading` are being read.
    fn pairs(units: &[Range<u64>], reading: usize) -> VecDeque<AheadPair> {
        let address = ValueAddress { segment: 1, unit: 0, value_bytes: 1 };
        let pair = |(index, units): (usize, &Range<u64>)| {
            let failed = || DeviceFuture::ready(IoResult { buffer: None, result: Err(DeviceError::Io(5)) });
            let read = || ValueRead::begin(failed(), units.clone(), None, Vec::new());
            let value = match index < reading {
                true => AheadValue::Reading(address, units.clone(), read()),
                false => AheadValue::InSegment(address, units.clone()),
            };
            AheadPair { key: Vec::new(), value_bytes: 1, value }
        };
        units.iter().enumerate().map(pair).collect()
    }

    #[test]
    fn records_side_by_side_are_one_read_up_to_a_bound_and_others_are_not() {
        let side_by_side: Vec<Range<u64>> = (0..10).map(|index| index * 4..index * 4 + 4).collect();
        let run = |units: &[Range<u64>], reach, unit_bytes, can_gather| {
            next_run(&pairs(units, 0), reach, unit_bytes, can_gather, true)
        };
        assert_eq!(run(&side_by_side, 10, 4096, true), Some((0..8, 0..32)), "128 KiB");
        assert_eq!(run(&side_by_side, 5, 4096, true), Some((0..5, 0..20)));
        assert_eq!(run(&side_by_side, 5, 4096, false), Some((0..1, 0..4)));
        assert_eq!(
            run(&side_by_side, 5, 1 << 20, true),
            Some((0..1, 0..4)),
            "one that is longer than the bound"
        );
        assert_eq!(run(&side_by_side, 0, 4096, true), None);
        assert_eq!(run(&[8..9, 9..10, 11..12, 4..5], 4, 512, true), Some((0..2, 8..10)));
        assert_eq!(run(&[8..9, 4..5, 5..6], 3, 512, true), Some((0..1, 8..9)));
    }

    #[test]
    fn records_behind_the_last_read_wait_until_half_of_the_reach_is_consumed() {
        let side_by_side: Vec<Range<u64>> = (0..12).map(|index| index * 4..index * 4 + 4).collect();
        let run = |reading, goes_on| next_run(&pairs(&side_by_side, reading), 8, 512, true, goes_on);
        assert_eq!(run(7, true), None);
        assert_eq!(run(4, true), None);
        assert_eq!(run(3, true), Some((3..8, 12..32)));
        // Nothing follows that could be gathered.
        assert_eq!(run(7, false), Some((7..8, 28..32)));
        // It lies elsewhere.
        let mut elsewhere = side_by_side.clone();
        elsewhere[7] = 100..104;
        assert_eq!(next_run(&pairs(&elsewhere, 7), 8, 512, true, true), Some((7..8, 100..104)));
    }
}
