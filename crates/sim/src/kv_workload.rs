//! Workload of key-value clients: random commands, and the checks of their responses.
//!
//! In: commands to draw, responses. Out: calls and their results in the history, and the first violation.

use crate::clients::Workload;
use crate::draw::{draw_value_bytes, draw_weighted};
use crate::faulty_disk::DiskFaults;
use crate::history::{CallId, History};
use crate::operator::{TrackNamespaces, is_rejection};
use crate::progress::{LoadProgress, TrackProgress};
use crate::scans::{ScanStep, Scans};
use crate::scenario::KvLoad;
use octokv_base::{Key, NamespaceId, Prng};
use octokv_client::{Command, ConnectionError, Error, Response, StoreMode, SubmitError, Value};
use octokv_engine::PutMode;
use octokv_engine::conformance::value_of;
use octokv_engine::linearizability::{Call, CallResult, Observed};
use octokv_wire::kv::UncheckedKeyList;

/// Commands of all clients of a simulation, and the history to check.
pub struct KvWorkload {
    /// Calls and results of all clients, by node.
    pub histories: Vec<History>,
    /// Distribution of commands.
    pub load: KvLoad,
    /// Counters and limits of the load.
    pub progress: LoadProgress,
    /// Active faults of each node's disk.
    pub faults: Vec<DiskFaults>,
    /// Whether no connection may be lost.
    pub keeps_connections: bool,
    /// Current namespace of each node; `None` while it has none.
    pub served_as: Vec<Option<NamespaceId>>,
    /// Whether an operator changes the node during the simulation.
    pub has_operator: bool,
    /// Commands rejected because of a change by the operator.
    pub rejected_commands: u64,
    /// Commands that failed since the device of their key was not available.
    pub unavailable_commands: u64,
    /// The scans of all sessions.
    pub scans: Scans,
    /// Whether bits of each node's disk were flipped after which more than a record may be unreadable: of the ordered engine.
    pub has_lost_blocks: Vec<bool>,
    /// Whether an iterator ends with its session alone.
    pub keeps_iterators: bool,
}

/// Buffer lengths of lists, in bytes: one that holds every key of the simulation, and one that truncates.
const LIST_BYTES: [u32; 2] = [64 << 10, 300];

/// A command without a response yet.
pub struct OutstandingKvCommand {
    node: usize,
    kind: KvCommandKind,
    id: CallId,
    reads_failed: u64,
}

enum KvCommandKind {
    Put,
    Delete,
    Get { key: usize },
    Exist,
    List { whole: bool },
    Flush,
    Scan { number: u64, step: ScanStep },
}

impl TrackProgress for KvWorkload {
    fn progress(&self) -> &LoadProgress {
        &self.progress
    }

    fn progress_mut(&mut self) -> &mut LoadProgress {
        &mut self.progress
    }
}

impl TrackNamespaces for KvWorkload {
    fn served_as(&mut self) -> &mut [Option<NamespaceId>] {
        &mut self.served_as
    }
}

impl Workload for KvWorkload {
    type Outstanding = OutstandingKvCommand;

    /// The disk has the number of its node.
    fn select_namespace(&self, random: &mut Prng) -> Option<(usize, NamespaceId)> {
        let node =
            if self.histories.len() == 1 { 0 } else { random.below(self.histories.len() as u64) as usize };
        self.served_as[node].map(|id| (node, id))
    }

    fn node_of(&self, disk: usize) -> usize {
        disk
    }

    fn must_keep_connections(&self) -> bool {
        self.keeps_connections
    }

    fn is_served(&self, disk: usize, namespace: NamespaceId) -> bool {
        self.served_as[disk] == Some(namespace)
    }

    fn submit_random(
        &mut self,
        random: &mut Prng,
        node: usize,
        session: u64,
        mut submit: impl FnMut(Command<'_>) -> Result<(), SubmitError>,
    ) -> Result<OutstandingKvCommand, String> {
        let scans = self.load.scans.filter(|scans| random.one_in(scans.one_in));
        let history = &mut self.histories[node];
        if let Some(scans) = scans
            && let Some((number, step, command)) = self.scans.draw(random, scans, session, history)
        {
            let (id, reads_failed) = (history.begin_keyless(), self.faults[node].reads_failed());
            match submit(command) {
                Ok(()) => {
                    let kind = KvCommandKind::Scan { number, step };
                    return Ok(OutstandingKvCommand { node, kind, id, reads_failed });
                }
                // The session has another connection: its iterators have ended.
                Err(SubmitError::Invalid(Error::UnknownIterator)) if !self.keeps_iterators => {
                    self.scans.end(number);
                }
                Err(why) => return Err(format!("the client rejected a command: {why:?}")),
            }
        }
        let command_index = draw_weighted(random, &self.load.mix);
        let index = random.below(self.load.keys) as usize;
        let key = history.keys()[index].clone();
        let reads_failed = self.faults[node].reads_failed();
        let pending = |kind, id| OutstandingKvCommand { node, kind, id, reads_failed };
        let (pending, submitted) = match command_index {
            0..3 => {
                let modes = [
                    (StoreMode::Upsert, PutMode::Upsert),
                    (StoreMode::AddOnly, PutMode::AddOnly),
                    (StoreMode::UpdateOnly, PutMode::UpdateOnly),
                ];
                let (store_mode, mode) = modes[command_index];
                let bytes = draw_value_bytes(random, self.load.value_bytes_max);
                let operation = history.next_operation(bytes as u32);
                let value = value_of(&key, operation, bytes);
                // A key whose entries cannot be read counts as one that is there.
                let mode = if self.has_lost_blocks[node] { PutMode::Upsert } else { mode };
                let id = history.begin(index, Call::Put { operation, bytes: bytes as u32, mode });
                let command = Command::Store { key, value: Value::Slice(&value), mode: store_mode };
                (pending(KvCommandKind::Put, id), submit(command))
            }
            3 | 4 => {
                let limit_bytes = if command_index == 3 { u32::MAX } else { 8 + random.below(3_000) as u32 };
                let id = history.begin(index, Call::Get);
                (
                    pending(KvCommandKind::Get { key: index }, id),
                    submit(Command::Retrieve { key, limit_bytes }),
                )
            }
            5 => {
                let id = history.begin(index, Call::Clear);
                (pending(KvCommandKind::Delete, id), submit(Command::Delete { key }))
            }
            6 => {
                let id = history.begin(index, Call::Exist);
                (pending(KvCommandKind::Exist, id), submit(Command::Exist { key }))
            }
            7 => {
                let whole = random.one_in(2);
                let id = history.begin_keyless();
                let start = if whole { Key::new(&[]).ok_or("no empty key")? } else { key };
                let limit_bytes = LIST_BYTES[usize::from(!whole)];
                (pending(KvCommandKind::List { whole }, id), submit(Command::List { start, limit_bytes }))
            }
            _ => {
                let id = history.begin_keyless();
                (pending(KvCommandKind::Flush, id), submit(Command::Flush))
            }
        };
        submitted.map_err(|why| format!("the client rejected a command: {why:?}"))?;
        Ok(pending)
    }

    fn end_session(&mut self, session: u64) {
        self.scans.end_session(session);
    }

    fn check(
        &mut self,
        command: &OutstandingKvCommand,
        response: Result<Response, Error>,
    ) -> Result<(), String> {
        match response {
            Ok(response) => match command.kind {
                KvCommandKind::Scan { number, step } => self.check_scan(command.node, number, step, response),
                _ => self.check_response(command, response),
            },
            Err(error) => self.check_error(command, &error),
        }
    }

    fn is_protocol_violation(&self, error: &ConnectionError) -> bool {
        is_protocol_violation(error, self.has_operator)
    }

    fn must_not_time_out(&self) -> bool {
        false
    }
}

/// Whether this error violates the protocol: no fault of hosts, links or disks may cause it.
fn is_protocol_violation(lost: &ConnectionError, has_operator: bool) -> bool {
    match lost {
        ConnectionError::Closed
        | ConnectionError::TimedOut
        | ConnectionError::ControllerFatal
        | ConnectionError::ConnectRejected(_)
        | ConnectionError::InitFailed(_) => false,
        ConnectionError::NamespaceNotFound => !has_operator,
        ConnectionError::Protocol(_)
        | ConnectionError::Terminated { .. }
        | ConnectionError::AuthenticationRequired
        | ConnectionError::UnsupportedCommandSet
        | ConnectionError::UnsupportedBlockFormat
        | ConnectionError::NamespaceChanged => true,
    }
}

impl KvWorkload {
    /// The load of the clients of nodes with these histories and disks, without an operator.
    pub fn new(histories: Vec<History>, load: KvLoad, faults: Vec<DiskFaults>) -> KvWorkload {
        let keys = histories.first().map_or(&[][..], |history| history.keys());
        KvWorkload {
            scans: Scans::new(keys),
            has_lost_blocks: vec![false; histories.len()],
            keeps_iterators: false,
            served_as: vec![Some(NamespaceId(1)); histories.len()],
            histories,
            load,
            progress: LoadProgress::default(),
            faults,
            keeps_connections: false,
            has_operator: false,
            rejected_commands: 0,
            unavailable_commands: 0,
        }
    }

    fn check_response(&mut self, pending: &OutstandingKvCommand, response: Response) -> Result<(), String> {
        if let (KvCommandKind::Put, Response::NotFound | Response::AlreadyExists) = (&pending.kind, &response)
            && self.has_lost_blocks[pending.node]
        {
            self.histories[pending.node].mark_not_executed(pending.id);
            return Ok(());
        }
        let outcome = match (&pending.kind, response) {
            (KvCommandKind::Put, Response::Stored) | (KvCommandKind::Delete, Response::Deleted) => {
                CallResult::Acknowledged
            }
            (KvCommandKind::Put, Response::NotFound | Response::AlreadyExists) => CallResult::ConditionFailed,
            (KvCommandKind::Delete, Response::NotFound) => CallResult::ConditionFailed,
            (KvCommandKind::Get { .. } | KvCommandKind::Exist, Response::NotFound) => {
                CallResult::Observed(Observed::Absent)
            }
            (KvCommandKind::Get { key }, Response::Value { data, full_bytes }) => {
                CallResult::Observed(self.histories[pending.node].identify_value(*key, &data, full_bytes)?)
            }
            (KvCommandKind::Exist, Response::Exists { value_bytes }) => {
                CallResult::Observed(value_bytes.map_or(Observed::Present, Observed::Length))
            }
            (KvCommandKind::List { whole }, Response::Keys { list }) => {
                return self.check_list(pending.node, pending.id, *whole, &list);
            }
            (KvCommandKind::Flush, Response::Flushed) => {
                self.histories[pending.node].record_flush(pending.id);
                return Ok(());
            }
            (_, response) => return Err(format!("unexpected response: {response:?}")),
        };
        self.histories[pending.node].end(pending.id, outcome)
    }

    fn check_error(&mut self, pending: &OutstandingKvCommand, error: &Error) -> Result<(), String> {
        if let KvCommandKind::Scan { number, step } = pending.kind {
            return self.check_scan_error(pending, number, step, error);
        }
        let on_key = !matches!(pending.kind, KvCommandKind::List { .. } | KvCommandKind::Flush);
        match error {
            Error::Disconnected(lost) if is_protocol_violation(lost, self.has_operator) => {
                return Err(format!("{error}"));
            }
            Error::Busy
            | Error::CapacityExceeded
            | Error::Disconnected(_)
            | Error::TimedOut
            | Error::Closed => {
                if on_key {
                    self.histories[pending.node].mark_not_executed(pending.id);
                }
            }
            Error::Status(status) if self.has_operator && is_rejection(*status) => {
                self.rejected_commands += 1;
                if on_key {
                    self.histories[pending.node].mark_not_executed(pending.id);
                }
            }
            Error::OutcomeUnknown => {}
            Error::UnrecoveredRead => return self.check_unrecovered(pending),
            // A write may have been executed.
            Error::DeviceUnavailable if self.faults[pending.node].has_failed() => {
                self.unavailable_commands += 1;
                if matches!(pending.kind, KvCommandKind::Get { .. } | KvCommandKind::Exist) {
                    self.histories[pending.node].mark_not_executed(pending.id);
                }
            }
            other => return Err(format!("unexpected error: {other}")),
        }
        Ok(())
    }

    fn check_scan(
        &mut self,
        node: usize,
        number: u64,
        step: ScanStep,
        response: Response,
    ) -> Result<(), String> {
        let history = &mut self.histories[node];
        match (step, response) {
            (ScanStep::Create, Response::IteratorCreated(iterator)) => {
                self.scans.created(number, iterator, history);
            }
            (ScanStep::Next { .. }, Response::Pairs { pairs }) => {
                return self.scans.receive(number, step, &pairs, self.has_lost_blocks[node], history);
            }
            (ScanStep::Seek { .. } | ScanStep::Destroy, Response::IteratorChanged) => {
                self.scans.changed(number, step);
            }
            (step, response) => return Err(format!("unexpected response to {step:?}: {response:?}")),
        }
        Ok(())
    }

    fn check_scan_error(
        &mut self,
        pending: &OutstandingKvCommand,
        number: u64,
        step: ScanStep,
        error: &Error,
    ) -> Result<(), String> {
        match error {
            Error::Busy | Error::CapacityExceeded => self.scans.not_executed(number, step),
            Error::PairTooLarge { buffer_bytes } => return self.scans.pair_too_large(number, *buffer_bytes),
            Error::UnrecoveredRead => {
                let read_failed = self.faults[pending.node].reads_failed() > pending.reads_failed;
                if !read_failed && !self.has_lost_blocks[pending.node] {
                    return Err(format!("a scan failed at {step:?} without a device error"));
                }
                self.scans.unrecovered(number);
            }
            Error::UnknownIterator if self.keeps_iterators => {
                return Err(format!("the iterator of {step:?} does not exist"));
            }
            Error::Disconnected(lost) if is_protocol_violation(lost, self.has_operator) => {
                return Err(format!("{error}"));
            }
            Error::UnknownIterator
            | Error::TooManyIterators
            | Error::Disconnected(_)
            | Error::TimedOut
            | Error::Closed => self.scans.end(number),
            Error::Status(status) if self.has_operator && is_rejection(*status) => {
                self.rejected_commands += 1;
                self.scans.end(number);
            }
            Error::DeviceUnavailable if self.faults[pending.node].has_failed() => {
                self.scans.end(number);
            }
            other => return Err(format!("unexpected error of {step:?}: {other}")),
        }
        Ok(())
    }

    /// An unrecovered write may have been executed; an unrecovered read requires a corrupted record or a device error.
    fn check_unrecovered(&mut self, pending: &OutstandingKvCommand) -> Result<(), String> {
        let read_failed = self.faults[pending.node].reads_failed() > pending.reads_failed;
        match pending.kind {
            KvCommandKind::Put | KvCommandKind::Delete | KvCommandKind::Flush
                if self.faults[pending.node].operations_failed() > 0 =>
            {
                Ok(())
            }
            KvCommandKind::Put | KvCommandKind::Delete | KvCommandKind::Flush => {
                Err("a write failed without a device error".to_owned())
            }
            KvCommandKind::List { .. } | KvCommandKind::Scan { .. } if read_failed => Ok(()),
            KvCommandKind::List { .. } | KvCommandKind::Scan { .. } => {
                Err("a list failed without a device error".to_owned())
            }
            KvCommandKind::Get { .. } | KvCommandKind::Exist
                if read_failed || self.has_lost_blocks[pending.node] =>
            {
                self.histories[pending.node].mark_not_executed(pending.id);
                Ok(())
            }
            KvCommandKind::Get { .. } | KvCommandKind::Exist => {
                self.histories[pending.node].end(pending.id, CallResult::Observed(Observed::Corrupt))
            }
        }
    }

    fn check_list(&mut self, node: usize, id: CallId, whole: bool, list: &[u8]) -> Result<(), String> {
        let history = &mut self.histories[node];
        let list = UncheckedKeyList(list).check().map_err(|short| format!("malformed list: {short:?}"))?;
        let mut listed = vec![false; history.keys().len()];
        for key in list.keys() {
            let Some(index) = history.key_index(key) else {
                return Err(format!("a list contains {key:?}, which no client stored"));
            };
            if std::mem::replace(&mut listed[index], true) {
                return Err(format!("a list contains {key:?} twice"));
            }
        }
        for (index, &is_listed) in listed.iter().enumerate() {
            // Keys in blocks that cannot be read are left out.
            if is_listed || (whole && !self.has_lost_blocks[node]) {
                let seen = if is_listed { Observed::Present } else { Observed::Absent };
                history.record_listing(id, index, seen);
            }
        }
        Ok(())
    }
}
