//! Waits for a buffer of a core's pool, for at most [`BUFFER_WAIT_MAX`].

use octokv_base::{Buffer, BufferPool, Nanos};
use octokv_runtime::ReactorHandle;

/// Longest wait for a buffer; after it the command fails with a retryable status.
pub(crate) const BUFFER_WAIT_MAX: Nanos = Nanos::from_millis(500);
pub(crate) const BUFFER_RETRY_INTERVAL: Nanos = Nanos::from_micros(200);

/// Takes a buffer from the pool, and waits if the pool is exhausted; `None` after [`BUFFER_WAIT_MAX`].
pub(crate) async fn wait_for_buffer(
    pool: &BufferPool,
    handle: &ReactorHandle,
    bytes: usize,
) -> Option<Buffer> {
    let deadline = handle.now() + BUFFER_WAIT_MAX;
    loop {
        match pool.take(bytes) {
            None if handle.now() < deadline => handle.sleep(BUFFER_RETRY_INTERVAL).await,
            taken => return taken,
        }
    }
}
