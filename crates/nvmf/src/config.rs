//! The configuration of a target: names and limits, fixed when the target starts.

use octokv_base::Nanos;

/// The names and limits of a target. [`SubsystemConfig::new`] gives the defaults.
#[derive(Clone, Debug)]
pub struct SubsystemConfig {
    /// The subsystem's NQN: 1 to 223 bytes.
    pub nqn: String,
    /// Serial number (SN): up to 20 printable ASCII characters; longer ones are truncated.
    pub serial: String,
    /// Model number (MN): up to 40 printable ASCII characters; longer ones are truncated.
    pub model: String,
    /// Firmware revision (FR): up to 8 printable ASCII characters; longer ones are truncated.
    pub firmware: String,
    /// The most controllers at a time, discovery controllers included; each host association has one.
    pub controllers_max: usize,
    /// The most controllers at a time of one host NQN.
    pub controllers_per_host_max: usize,
    /// The most TCP connections at a time, over all hosts; the node closes further ones after accept.
    pub connections_max: usize,
    /// The most I/O queues of one controller.
    pub io_queues_max: u16,
    /// The most entries of a queue, at least 2: CAP.MQES is one less. Admin queues may always have 128.
    pub queue_depth: u16,
    /// The most in-capsule data of an I/O command in bytes: a multiple of 16, at most 64 KiB.
    pub in_capsule_bytes: u32,
    /// The most data of one H2CData PDU in bytes (MAXH2CDATA): at least 4096 and a multiple of 4.
    pub h2c_data_bytes_max: u32,
    /// The longest value in bytes, over all namespaces, at least 4096; determines MDTS.
    pub value_bytes_max: u32,
    /// The longest key of the vendor commands in bytes, at least 16.
    pub key_bytes_max: u16,
    /// The most bytes of buffers that one connection holds for data that an R2T requested.
    pub receive_bytes_max: usize,
    /// A connection accepts no command while more bytes than this are unsent or expected from requests in
    /// flight.
    pub send_buffer_bytes_max: usize,
    /// The longest keep-alive timeout; Connect and Set Features fail with longer ones.
    pub keep_alive_max: Nanos,
    /// The time from accept to a completed Connect, after which the connection is closed.
    pub handshake_limit: Nanos,
    /// The time without a command after which a discovery controller without keep alive ends.
    pub discovery_idle_limit: Nanos,
    /// The most outstanding event requests of a controller, at least 1.
    pub event_requests_max: u8,
    /// The most iterators of one controller.
    pub iterators_max: usize,
    /// The time without a command after which an iterator ends.
    pub iterator_idle_limit: Nanos,
    /// The lowest controller identifier: targets of one subsystem use separate ranges.
    pub first_controller_id: u16,
}

impl SubsystemConfig {
    /// The default configuration of a subsystem with this NQN.
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
            send_buffer_bytes_max: 32 * 1024 * 1024,
            keep_alive_max: Nanos::from_secs(3600),
            handshake_limit: Nanos::from_secs(10),
            discovery_idle_limit: Nanos::from_secs(120),
            event_requests_max: 4,
            iterators_max: 1024,
            iterator_idle_limit: Nanos::from_secs(300),
            first_controller_id: 1,
        }
    }

    /// MDTS: the most data of a command is 4 KiB times 2 to the power of this.
    pub(crate) fn transfer_pages_log2(&self) -> u8 {
        self.value_bytes_max.div_ceil(4096).next_power_of_two().ilog2().max(1) as u8
    }

    /// MDTS in bytes.
    pub(crate) fn transfer_bytes_max(&self) -> u64 {
        4096 << self.transfer_pages_log2()
    }

    /// Checks the limits.
    ///
    /// # Panics
    /// If a value is outside of the range that its field documents.
    pub(crate) fn assert_valid(&self) {
        assert!(!self.nqn.is_empty() && self.nqn.len() <= 223, "a subsystem NQN has 1 to 223 bytes");
        assert!(self.queue_depth >= 2, "a queue has at least two entries");
        assert!((1..0xfff0).contains(&self.first_controller_id), "first_controller_id is 1 to FFEFh");
        assert!(self.event_requests_max >= 1, "event_requests_max is at least 1");
        assert!(self.io_queues_max >= 1, "a controller has at least one I/O queue");
        assert!(self.in_capsule_bytes.is_multiple_of(16), "in_capsule_bytes is a multiple of 16");
        assert!(self.in_capsule_bytes <= 64 * 1024, "in_capsule_bytes is at most 64 KiB");
        assert!(
            self.h2c_data_bytes_max >= 4096 && self.h2c_data_bytes_max.is_multiple_of(4),
            "MAXH2CDATA is at least 4096 and a multiple of 4"
        );
        assert!(self.value_bytes_max >= 4096, "value_bytes_max is at least 4096");
        assert!(usize::from(self.key_bytes_max) <= octokv_base::KEY_BYTES_MAX, "key_bytes_max");
        assert!(self.key_bytes_max >= 16, "key_bytes_max is at least 16");
    }
}
