//! Control messages to the cores of a node, and the order in which a change of namespaces reaches them.
//!
//! ```text
//!   attach: core 0 ─▶ core 1 ─▶ … (a failure: detached from all)      detach: … ─▶ core 1 ─▶ core 0
//!   replaced device: core 0 ─▶ core 1 ─▶ …
//! ```
//! In: a change, from the thread of an operator; `exchange`, the driver's way to send it to one core and to wait for the
//! response. Out: messages that a core takes between two iterations ([`NodeCore`](crate::NodeCore)). `D` opens the
//! devices ([`OpenDevice`](crate::OpenDevice)). Invariants: at most one change and one other message are queued for a
//! core; the next core is sent a change when the one before has responded; the first core, which runs volume
//! maintenance, detaches last.
//! Tested by `node.rs`, and by the scenario `namespaces` of the simulator.

use crate::core_namespaces::CoreNamespace;
use crate::core_roles::CoreRole;
use crate::error::CompactionStartError;
use octokv_base::{NamespaceId, Nanos};
use octokv_client::PollGroup;
use octokv_engine::EngineError;
use octokv_runtime::{CoreWaker, ReactorHandle};
use std::collections::VecDeque;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, PoisonError};

/// Control messages queued for one core: a namespace change, and a status request, a compaction or a function; each under a lock of the
/// node that its sender holds until the response. A core that no longer responds is sent nothing more.
const CONTROL_MESSAGES_MAX: usize = 2;

/// A command that a core executes between two iterations.
pub enum ControlMessage<D> {
    /// Change the namespaces that it serves.
    ChangeNamespaces(NamespaceChange<D>, Sender<io::Result<()>>),
    /// Report the core's status.
    ReportStatus(Sender<CoreStatus>),
    /// Compact a namespace fully; the response says whether that began. Sent to the first core.
    Compact(NamespaceId, OnCompacted, Sender<Result<(), CompactionStartError>>),
    /// Run a function on the core.
    Run(CoreFunction, Sender<()>),
}

/// A function that a core runs between two iterations: it may connect peers and spawn tasks that use them.
pub type CoreFunction = Box<dyn FnOnce(&ReactorHandle, &PollGroup) + Send>;

/// Receives the result of a compaction, on its core. It is dropped instead if the namespace is removed, or the node stops, first.
pub type OnCompacted = Box<dyn FnOnce(Result<(), EngineError>) + Send>;

/// A change of the namespaces that a core serves.
pub enum NamespaceChange<D> {
    /// Serve a namespace.
    Attach(CoreNamespace<D>),
    /// Serve a namespace with another device in the place of one that its volume has replaced.
    ReplaceDevice {
        /// The namespace.
        id: NamespaceId,
        /// The place of the device in the list of the namespace's.
        at: usize,
        /// The new device.
        device: D,
    },
    /// Serve a namespace with another device behind its others, which its volume has.
    AddDevice {
        /// The namespace.
        id: NamespaceId,
        /// The new device.
        device: D,
    },
    /// Stop serving a namespace; the response is sent when none of its requests is left.
    Detach(NamespaceId),
}

/// Status of one core.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CoreStatus {
    /// Whether it has connections, executes requests for drives, or both.
    pub role: CoreRole,
    /// Open connections.
    pub connections: usize,
    /// Outgoing sessions.
    pub peers: usize,
    /// Requests started or queued.
    pub requests: usize,
    /// Bytes of buffers in use.
    pub buffer_bytes_in_use: usize,
    /// Bytes of memory that the buffer pool occupies, free buffers included.
    pub buffer_bytes_resident: usize,
    /// Device operations in flight.
    pub device_operations: usize,
    /// Background tasks: one per Key Value namespace, on the first core.
    pub background_tasks: usize,
    /// Detached namespaces with requests in progress.
    pub draining_namespaces: usize,
    /// CPU time of useful work since the start, without empty polls and sleep.
    pub busy_time: Nanos,
}

/// Control messages to one core.
pub struct ControlQueue<D> {
    core_waker: Arc<CoreWaker>,
    messages: Mutex<VecDeque<ControlMessage<D>>>,
    /// Whether there are any: the core reads this flag each iteration instead of taking the lock.
    has_messages: AtomicBool,
}

impl<D> ControlQueue<D> {
    /// An empty queue of the core that `core_waker` wakes.
    pub fn new(core_waker: &Arc<CoreWaker>) -> Arc<ControlQueue<D>> {
        Arc::new(ControlQueue {
            core_waker: Arc::clone(core_waker),
            messages: Mutex::default(),
            has_messages: AtomicBool::new(false),
        })
    }

    /// Queues a message for the core and wakes it. REQUIRES: the core has responded to the last message of the kind.
    pub fn send(&self, message: ControlMessage<D>) {
        let mut messages = self.messages.lock().unwrap_or_else(PoisonError::into_inner);
        assert!(messages.len() < CONTROL_MESSAGES_MAX, "more than {CONTROL_MESSAGES_MAX} control messages");
        messages.push_back(message);
        drop(messages);
        self.has_messages.store(true, Ordering::Release);
        self.core_waker.notify();
    }

    /// Whether there are any messages.
    #[inline]
    pub(crate) fn has_messages(&self) -> bool {
        self.has_messages.load(Ordering::Acquire)
    }

    /// Takes all messages, on the core.
    pub(crate) fn take(&self) -> VecDeque<ControlMessage<D>> {
        self.has_messages.store(false, Ordering::Relaxed);
        std::mem::take(&mut *self.messages.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Why a change of namespaces did not reach every core.
#[derive(Debug)]
pub enum CoreChangeError {
    /// A core ended before it responded.
    NoResponse,
    /// A core's queue cannot open the device.
    Device {
        /// Index of the core.
        core: usize,
        /// The cause.
        error: io::Error,
    },
}

/// Attaches a namespace to every core in order. `exchange` sends a change to a core and returns the response, or `None`
/// if the core ends first. REQUIRES: no other change of namespaces is in progress.
///
/// # Errors
/// The first core that failed; the namespace is then detached from all.
pub fn attach_to_cores<D: Clone>(
    cores: usize,
    namespace: &CoreNamespace<D>,
    mut exchange: impl FnMut(usize, NamespaceChange<D>) -> Option<io::Result<()>>,
) -> Result<(), CoreChangeError> {
    for core in 0..cores {
        let response = exchange(core, NamespaceChange::Attach(namespace.clone()));
        if let Err(error) = check_response(core, response) {
            detach_from_cores(cores, namespace.id, exchange)?;
            return Err(error);
        }
    }
    Ok(())
}

/// Gives every core the device `at` of a namespace, which has replaced another. `exchange` as in [`attach_to_cores`].
/// REQUIRES: no other change of namespaces is in progress.
///
/// # Errors
/// The first core that failed; the others have the device nevertheless.
pub fn replace_on_cores<D: Clone>(
    cores: usize,
    namespace: &CoreNamespace<D>,
    at: usize,
    mut exchange: impl FnMut(usize, NamespaceChange<D>) -> Option<io::Result<()>>,
) -> Result<(), CoreChangeError> {
    let mut replace = |core| {
        let change =
            NamespaceChange::ReplaceDevice { id: namespace.id, at, device: namespace.devices[at].clone() };
        check_response(core, exchange(core, change))
    };
    (0..cores).map(&mut replace).fold(Ok(()), Result::and)
}

/// Gives every core the last device of a namespace, which was added. `exchange` as in [`attach_to_cores`].
/// REQUIRES: no other change of namespaces is in progress.
///
/// # Errors
/// The first core that failed; the others have the device nevertheless.
///
/// # Panics
/// If the namespace has no device.
pub fn extend_on_cores<D: Clone>(
    cores: usize,
    namespace: &CoreNamespace<D>,
    mut exchange: impl FnMut(usize, NamespaceChange<D>) -> Option<io::Result<()>>,
) -> Result<(), CoreChangeError> {
    let mut extend = |core| {
        let device = namespace.devices.last().expect("the new one").clone();
        check_response(core, exchange(core, NamespaceChange::AddDevice { id: namespace.id, device }))
    };
    (0..cores).map(&mut extend).fold(Ok(()), Result::and)
}

/// Detaches a namespace from every core: from the first one last, since it runs the volume's maintenance. `exchange` as
/// in [`attach_to_cores`]. REQUIRES: no other change of namespaces is in progress.
///
/// # Errors
/// The first core that ended before it responded.
pub fn detach_from_cores<D>(
    cores: usize,
    id: NamespaceId,
    mut exchange: impl FnMut(usize, NamespaceChange<D>) -> Option<io::Result<()>>,
) -> Result<(), CoreChangeError> {
    (0..cores).rev().try_for_each(|core| check_response(core, exchange(core, NamespaceChange::Detach(id))))
}

fn check_response(core: usize, response: Option<io::Result<()>>) -> Result<(), CoreChangeError> {
    response.ok_or(CoreChangeError::NoResponse)?.map_err(|error| CoreChangeError::Device { core, error })
}
