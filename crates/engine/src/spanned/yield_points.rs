//! The yield points of a caller's sink, for the sinks of pages: a stretch of tombstones on a device does not hold up other commands.
//!
//! In: the sink of a call. Out: its yield points, without its type, which would contain itself where volumes on several devices are volumes of any kind. Each is
//! allocated; engines have one in some hundred entries.

use crate::{KeySink, PairSink};
use futures_util::future::LocalBoxFuture;

/// A caller that lets other commands run.
pub(super) trait YieldingCaller {
    /// Its yield point.
    fn yield_point(&mut self) -> LocalBoxFuture<'_, ()>;
}

/// The caller of a listing.
pub(super) struct ListCaller<'a, S>(pub &'a mut S);

impl<S: KeySink> YieldingCaller for ListCaller<'_, S> {
    fn yield_point(&mut self) -> LocalBoxFuture<'_, ()> {
        Box::pin(self.0.yield_point())
    }
}

/// The caller of an iterator.
pub(super) struct PairCaller<'a, S>(pub &'a mut S);

impl<S: PairSink> YieldingCaller for PairCaller<'_, S> {
    fn yield_point(&mut self) -> LocalBoxFuture<'_, ()> {
        Box::pin(self.0.yield_point())
    }
}
