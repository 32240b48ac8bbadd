//! Clock, threads and polling of the load generator.

use octokv_base::Nanos;
use octokv_bench::GeneratorPlatform;
use octokv_sys::{clock, thread};

/// Time for which an idle load thread spins before it sleeps.
pub const SPIN_BEFORE_SLEEP: Nanos = Nanos::from_micros(100);

/// Clock and threads of the load generator.
pub const PLATFORM: GeneratorPlatform = GeneratorPlatform {
    now: clock::now,
    spawn: |core, body| match core {
        Some(core) => thread::spawn_pinned(core, "octokv-load", body).map(drop),
        None => thread::spawn("octokv-load", body).map(drop),
    },
};
