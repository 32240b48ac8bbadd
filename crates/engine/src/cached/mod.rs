//! A cache of values in front of any volume, for the keys that are read most.
//!
//! ```text
//!   get ──▶ ValueCache ──hit──▶ shared buffer, sent as it is
//!               │ miss: a lease for the fill
//!               ▼
//!            engine.get ──▶ copy into the cache, if no change of the key began since
//!
//!   put, delete ──▶ entry removed, fills of the key blocked ──▶ engine ──▶ ended: fills allowed
//! ```
//! - [`value_cache`]: the cache that the cores of a volume share: entries, leases, changes, bounds.
//! - [`volume`]: a volume with a cache. [`engine`]: one core's handle on it.
//!
//! Linearizability: a hit is a read at the moment of the hit. The entry then is the value that the engine has, since every
//! change removes it before the engine begins the change, and nothing puts it back before the change has ended:
//! a fill that began before fails, and none begins meanwhile. A change whose caller drops its future goes on
//! ([`Engine::run_abandoned`](crate::Engine::run_abandoned)) and blocks fills until it has ended; if its core's handle is
//! dropped before that, which is a crash of the core to the volume, fills of the key stay blocked.

pub mod engine;
pub mod value_cache;
pub mod volume;

pub use engine::CachedEngine;
pub use value_cache::{CacheStatistics, ValueCache};
pub use volume::CachedVolume;
