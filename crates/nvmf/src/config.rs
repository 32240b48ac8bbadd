//! What a target is told once, when it starts: its name and every bound; and what a namespace is.
//!
//! Nothing here changes while a target runs, except a namespace's use, which its engine counts.
//! Namespaces may come and go.

use octokv_base::Nanos;

/// The name and the bounds of a target. [`SubsystemConfig::new`] gives the defaults.
#[derive(Clone, Debug)]
pub struct SubsystemConfig {
    /// The subsystem's NQN.
    pub nqn: String,
    /// Its serial number: up to 20 printable ASCII characters; more are cut off.
    pub serial: String,
    /// Its model: up to 40 printable ASCII characters; more are cut off.
    pub model: String,
    /// Its version as hosts see it: up to 8 printable ASCII characters; more are cut off.
    pub firmware: String,
    /// The most controllers at a time (one per host connection set), discovery controllers included.
    pub controllers_max: usize,
    /// The most controllers at a time that one host NQN may have.
    pub controllers_per_host_max: usize,
    /// The most TCP connections at a time, over all hosts; the node refuses more at accept.
    pub connections_max: usize,
    /// The most I/O queues of one controller.
    pub io_queues_max: u16,
    /// The most entries of a queue: CAP.MQES is one less. Admin queues may always have 128.
    pub queue_depth: u16,
    /// The most bytes of a value that may come inside the command's capsule; a multiple of 16.
    pub in_capsule_bytes: u32,
    /// The most bytes of one H2CData PDU; at least 4096 and a multiple of 4.
    pub h2c_data_bytes_max: u32,
    /// The most bytes of a value, over all namespaces; rules MDTS and every transfer.
    pub value_bytes_max: u32,
    /// The most bytes of a key of the extension's commands.
    pub key_bytes_max: u16,
    /// The most bytes of values that one connection may have announced and not yet sent in full.
    pub receive_bytes_max: usize,
    /// While so many bytes are unsent, or may come of the requests at the engine, a connection takes no further
    /// command.
    pub outbox_bytes_max: usize,
    /// The longest keep-alive time a host may ask for; longer ones are refused.
    pub keep_alive_max: Nanos,
    /// How long a connection may take from its first byte to a finished Connect.
    pub handshake_limit: Nanos,
    /// How long a discovery controller without keep alive lives without a command.
    pub discovery_idle_limit: Nanos,
    /// The most event requests that a host may leave pending.
    pub event_requests_max: u8,
    /// Identifiers of controllers start here: several targets of one subsystem take separate ranges.
    pub first_controller_id: u16,
}

impl SubsystemConfig {
    /// The defaults, for a subsystem of this name.
    pub fn new(nqn: &str) -> SubsystemConfig {
        SubsystemConfig {
            nqn: nqn.to_owned(),
            serial: "OCTOKV".to_owned(),
            model: "octokv NVMe Key-Value target".to_owned(),
            firmware: env!("CARGO_PKG_VERSION").to_owned(),
            controllers_max: 256,
            controllers_per_host_max: 64,
            connections_max: 1024,
            io_queues_max: 64,
            queue_depth: 1024,
            in_capsule_bytes: 16 * 1024,
            h2c_data_bytes_max: 512 * 1024,
            value_bytes_max: 2 * 1024 * 1024,
            key_bytes_max: octokv_base::KEY_BYTES_MAX as u16,
            receive_bytes_max: 32 * 1024 * 1024,
            outbox_bytes_max: 32 * 1024 * 1024,
            keep_alive_max: Nanos::from_secs(3600),
            handshake_limit: Nanos::from_secs(10),
            discovery_idle_limit: Nanos::from_secs(120),
            event_requests_max: 4,
            first_controller_id: 1,
        }
    }

    /// MDTS: the most bytes of a command is 4 KiB times 2 to the power of this.
    pub(crate) fn transfer_pages_log2(&self) -> u8 {
        self.value_bytes_max.div_ceil(4096).next_power_of_two().ilog2().max(1) as u8
    }

    /// MDTS in bytes.
    pub(crate) fn transfer_bytes_max(&self) -> u64 {
        4096 << self.transfer_pages_log2()
    }

    /// Panics where a bound could not be kept or announced: a mistake of whoever made the settings.
    pub(crate) fn assert_valid(&self) {
        assert!(!self.nqn.is_empty() && self.nqn.len() <= 223, "a subsystem NQN has 1 to 223 bytes");
        assert!(self.queue_depth >= 2, "a queue has at least two entries");
        assert!((1..0xfff0).contains(&self.first_controller_id), "controller identifiers");
        assert!(self.event_requests_max >= 1, "hosts leave an event request pending");
        assert!(self.io_queues_max >= 1, "a controller has at least one I/O queue");
        assert!(self.in_capsule_bytes.is_multiple_of(16), "capsules are counted in 16 bytes");
        assert!(self.in_capsule_bytes <= 64 * 1024, "a capsule must fit a receive buffer with ease");
        assert!(self.h2c_data_bytes_max >= 4096 && self.h2c_data_bytes_max.is_multiple_of(4), "MAXH2CDATA");
        assert!(self.value_bytes_max >= 4096, "MDTS counts whole pages");
        assert!(usize::from(self.key_bytes_max) <= octokv_base::KEY_BYTES_MAX);
        assert!(self.key_bytes_max >= 16, "every key of the standard commands fits");
    }
}
