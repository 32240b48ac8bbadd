//! The platform of the load generator: the clock and the threads that the caller provides.

use octokv_base::Nanos;

/// A clock: nanoseconds since an arbitrary fixed point.
pub type Clock = fn() -> Nanos;

/// The body of a generator thread.
pub type ThreadBody = Box<dyn FnOnce() + Send>;

/// Clock and threads of the generator. Both are arguments, so that the library reads no clock and starts no thread by
/// itself.
#[derive(Clone, Copy)]
pub struct GeneratorPlatform {
    /// The monotonic clock that latencies are measured with.
    pub now: Clock,
    /// Starts a thread, pinned to `core` if one is given.
    pub spawn: fn(core: Option<usize>, body: ThreadBody) -> std::io::Result<()>,
}
