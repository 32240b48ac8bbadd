//! The events of the simulation, as plain data.

/// A scheduled event.
pub(crate) enum SimEvent {
    Net(NetworkEvent),
    Disk(DiskEvent),
    /// A callback of the experiment, see [`super::SimEnv::schedule_at`].
    Call(Box<dyn FnOnce()>),
}

/// An event of the network, for one end of a stream.
#[derive(Clone, Copy, Debug)]
pub(crate) enum NetworkEvent {
    /// A connection request reaches the remote host.
    ConnectRequest { end: StreamEnd, attempt: u32 },
    /// The response reaches the connecting host: established or refused.
    ConnectResponse { end: StreamEnd, established: bool },
    /// The oldest segments in flight to an end may have arrived.
    SegmentArrival { end: StreamEnd },
    /// A reset reaches an end.
    Reset { end: StreamEnd },
}

/// One end of a stream: its index and generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StreamEnd {
    pub(crate) index: u32,
    pub(crate) generation: u32,
}

/// The completion of a disk operation. Ignored if the slot is free or has an operation of another sequence number.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DiskEvent {
    pub(crate) disk: u32,
    pub(crate) slot: usize,
    pub(crate) sequence: u64,
}
