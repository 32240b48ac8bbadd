//! Values of settings and flags that are a choice among names.

use clap::ValueEnum;
use octokv_base::Nanos;
use serde::Deserialize;

macro_rules! choices {
    ($(#[$doc:meta])* $name:ident { $($(#[$of:meta])* $variant:ident),+ }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Deserialize)]
        #[serde(rename_all = "lowercase")]
        pub enum $name { $($(#[$of])* $variant),+ }
    };
}

choices! {
    /// Hash function of keys.
    HashChoice {
        /// XXH3-128: fast.
        Xxh3,
        /// SHA-1, as in the OctoKV paper.
        Sha1
    }
}
choices! {
    /// When a write is acknowledged.
    DurabilityChoice {
        /// When it survives power loss.
        Flush,
        /// When the device completed it.
        Device
    }
}
choices! {
    /// I/O interface to a device.
    DriverChoice {
        /// io_uring if the kernel allows it, else threads.
        Auto,
        /// io_uring or an error.
        Uring,
        /// Worker threads.
        Threads
    }
}
choices! {
    /// Behaviour of an idle core.
    PollingChoice {
        /// Spins briefly, then sleeps.
        Adaptive,
        /// Spins always: the lowest latency, a whole core.
        Busy,
        /// Sleeps at once: the least CPU time.
        Sleep
    }
}

impl PollingChoice {
    /// The runtime's polling mode; `spin` applies to `Adaptive`.
    pub fn to_runtime(self, spin: Nanos) -> octokv_runtime::Polling {
        match self {
            PollingChoice::Adaptive => octokv_runtime::Polling::Adaptive { spin },
            PollingChoice::Busy => octokv_runtime::Polling::Busy,
            PollingChoice::Sleep => octokv_runtime::Polling::Sleep,
        }
    }
}
