//! The space of a record on a volatile volume between its allocation and its index entry.

use super::volume::HashVolume;
use crate::common::abandoned::AbandonedOperations;
use crate::common::allocator::Extent;
use octokv_device::{DeviceError, DeviceFuture};
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

/// Space with a record that is not in the index. Dropping it releases the space, once the device has written the record.
pub(super) struct UnindexedRecord<'a> {
    volume: &'a Arc<HashVolume>,
    abandoned: &'a AbandonedOperations,
    extent: Extent,
    /// The record's write, until it has completed.
    write: Option<DeviceFuture>,
}

impl<'a> UnindexedRecord<'a> {
    /// A record whose write has begun in this space.
    pub fn new(
        volume: &'a Arc<HashVolume>,
        abandoned: &'a AbandonedOperations,
        extent: Extent,
        write: DeviceFuture,
    ) -> UnindexedRecord<'a> {
        UnindexedRecord { volume, abandoned, extent, write: Some(write) }
    }

    /// The record is in the index.
    pub fn keep(self) {
        std::mem::forget(self);
    }
}

impl Future for UnindexedRecord<'_> {
    type Output = Result<(), DeviceError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<(), DeviceError>> {
        let write = self.write.as_mut().expect("not polled after the write");
        let written = ready!(Pin::new(write).poll(context));
        self.write = None;
        Poll::Ready(written.result)
    }
}

impl Drop for UnindexedRecord<'_> {
    fn drop(&mut self) {
        let UnindexedRecord { volume, abandoned, extent, .. } = *self;
        match self.write.take() {
            None => volume.space.release(extent),
            // Only a device that is slow although it is volatile has not completed it.
            Some(write) => {
                let owned = Arc::clone(volume);
                abandoned.push(async move {
                    write.await;
                    owned.space.release(extent);
                });
            }
        }
    }
}
