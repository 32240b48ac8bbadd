//! Workload of clients of block namespaces: random commands, and the checks of their responses.
//!
//! In: commands to draw, responses. Out: calls and their results in the history of the disk, by block, and the first
//! violation. A command on several blocks is one call on each: it is not atomic across blocks.

use super::scenario::{BlockLoad, DiskPlan};
use crate::clients::Workload;
use crate::draw::draw_weighted;
use crate::faulty_disk::DiskFaults;
use crate::history::{CallId, History};
use crate::operator::{TrackNamespaces, is_rejection};
use crate::progress::{LoadProgress, TrackProgress};
use octokv_base::{Lba, NamespaceId, Prng};
use octokv_client::{Command, ConnectionError, Error, Response, SubmitError, Value};
use octokv_engine::PutMode;
use octokv_engine::conformance::value_of;
use octokv_engine::linearizability::{Call, CallResult, Observed};
use octokv_wire::Status;
use octokv_wire::nvm::LbaRange;

/// Commands of all clients of a simulation, and the histories to check.
pub struct BlockWorkload {
    /// Calls and results of all clients, by disk; the keys are blocks.
    pub histories: Vec<History>,
    /// Configuration of the disks.
    pub disks: Vec<DiskPlan>,
    /// Current namespace of each disk; `None` while it has none.
    pub served_as: Vec<Option<NamespaceId>>,
    /// Distribution of commands.
    pub load: BlockLoad,
    /// Maximum transfer size of a command, in bytes.
    pub bytes_max: u64,
    /// Counters and limits of the load.
    pub progress: LoadProgress,
    /// Commands rejected because of a change by the operator.
    pub rejected_commands: u64,
    /// Active faults of the node's disks.
    pub faults: DiskFaults,
    /// Whether an operator changes the node during the simulation.
    pub has_operator: bool,
    /// Whether a command timeout is a violation.
    pub must_not_time_out: bool,
}

/// A command without a response yet: one call per block.
pub struct OutstandingBlockCommand {
    disk: usize,
    kind: BlockCommandKind,
    ids: Vec<CallId>,
    reads_failed: u64,
}

enum BlockCommandKind {
    Read {
        cell: usize,
    },
    /// A Write or Write Zeroes.
    Write {
        durable: bool,
    },
    Deallocate,
    Compare {
        operations: Vec<u64>,
    },
    Verify,
    Flush,
}

impl TrackProgress for BlockWorkload {
    fn progress(&self) -> &LoadProgress {
        &self.progress
    }

    fn progress_mut(&mut self) -> &mut LoadProgress {
        &mut self.progress
    }
}

impl TrackNamespaces for BlockWorkload {
    fn served_as(&mut self) -> &mut [Option<NamespaceId>] {
        &mut self.served_as
    }
}

impl Workload for BlockWorkload {
    type Outstanding = OutstandingBlockCommand;

    fn select_namespace(&self, random: &mut Prng) -> Option<(usize, NamespaceId)> {
        let served = self.served_as.iter().enumerate();
        let served: Vec<(usize, NamespaceId)> =
            served.filter_map(|(disk, id)| id.map(|id| (disk, id))).collect();
        (!served.is_empty()).then(|| served[random.below(served.len() as u64) as usize])
    }

    fn is_served(&self, disk: usize, namespace: NamespaceId) -> bool {
        self.served_as[disk] == Some(namespace)
    }

    fn submit_random(
        &mut self,
        random: &mut Prng,
        disk: usize,
        _session: u64,
        mut submit: impl FnMut(Command<'_>) -> Result<(), SubmitError>,
    ) -> Result<OutstandingBlockCommand, String> {
        let DiskPlan { block_bytes, first, count, .. } = self.disks[disk];
        let BlockLoad { blocks_max, mix, durable_one_in } = self.load;
        let most = blocks_max.min(count).min(self.bytes_max / u64::from(block_bytes)).max(1);
        let blocks = 1 + random.below(most);
        let cell = random.below(count - blocks + 1);
        let (lba, cells) = (Lba(first + cell), cell as usize..(cell + blocks) as usize);
        let range = LbaRange { lba, blocks: blocks as u32 };
        let force_unit_access = random.one_in(durable_one_in);
        let history = &mut self.histories[disk];
        let mut begin = |call: Call| cells.clone().map(|cell| history.begin(cell, call)).collect();
        let (kind, ids, submitted) = match draw_weighted(random, &mix) {
            0 => {
                let (kind, ids) = (BlockCommandKind::Read { cell: cells.start }, begin(Call::Get));
                (kind, ids, submit(Command::Read { range, buffer: None }))
            }
            1 => {
                let (data, ids) = begin_write(history, cells, block_bytes);
                let data = Value::Slice(&data);
                let kind = BlockCommandKind::Write { durable: force_unit_access };
                (kind, ids, submit(Command::Write { lba, data, force_unit_access }))
            }
            2 => {
                let (kind, ids) =
                    (BlockCommandKind::Write { durable: force_unit_access }, begin(Call::Clear));
                let deallocate = random.one_in(2);
                (kind, ids, submit(Command::WriteZeroes { range, force_unit_access, deallocate }))
            }
            3 => (
                BlockCommandKind::Deallocate,
                begin(Call::Deallocate),
                submit(Command::Deallocate { ranges: &[range] }),
            ),
            4 => {
                let ids = begin(Call::Get);
                let operations: Vec<u64> = cells.clone().map(|cell| history.last_write(cell)).collect();
                let data = expected_contents(history, cells, &operations, block_bytes);
                let data = Value::Slice(&data);
                (BlockCommandKind::Compare { operations }, ids, submit(Command::Compare { lba, data }))
            }
            5 => (BlockCommandKind::Verify, Vec::new(), submit(Command::Verify { range })),
            _ => (BlockCommandKind::Flush, vec![history.begin_keyless()], submit(Command::Flush)),
        };
        submitted.map_err(|why| format!("the client rejected a command: {why:?}"))?;
        Ok(OutstandingBlockCommand { disk, kind, ids, reads_failed: self.faults.reads_failed() })
    }

    fn check(
        &mut self,
        command: &OutstandingBlockCommand,
        response: Result<Response, Error>,
    ) -> Result<(), String> {
        match response {
            Ok(response) => self.check_response(command, response),
            Err(error) => self.check_error(command, &error),
        }
    }

    fn is_protocol_violation(&self, lost: &ConnectionError) -> bool {
        match lost {
            ConnectionError::Closed
            | ConnectionError::TimedOut
            | ConnectionError::ControllerFatal
            | ConnectionError::ConnectRejected(_)
            | ConnectionError::InitFailed(_) => false,
            ConnectionError::NamespaceNotFound => !self.has_operator,
            ConnectionError::Protocol(_)
            | ConnectionError::Terminated { .. }
            | ConnectionError::AuthenticationRequired => true,
            ConnectionError::UnsupportedCommandSet
            | ConnectionError::UnsupportedBlockFormat
            | ConnectionError::NamespaceChanged => true,
        }
    }

    fn must_not_time_out(&self) -> bool {
        self.must_not_time_out
    }
}

impl BlockWorkload {
    fn check_response(
        &mut self,
        pending: &OutstandingBlockCommand,
        response: Response,
    ) -> Result<(), String> {
        let history = &mut self.histories[pending.disk];
        let ids = pending.ids.iter();
        match (&pending.kind, response) {
            (BlockCommandKind::Read { cell }, Response::Blocks { data }) => {
                let block_bytes = self.disks[pending.disk].block_bytes as usize;
                if data.len() != pending.ids.len() * block_bytes {
                    return Err(format!("a read of {} blocks returned {} B", pending.ids.len(), data.len()));
                }
                for (at, (&id, block)) in ids.zip(data.chunks(block_bytes)).enumerate() {
                    let seen = observe_block(history, cell + at, block)?;
                    history.end(id, CallResult::Observed(seen))?;
                }
                Ok(())
            }
            (BlockCommandKind::Write { durable: true }, Response::Written { .. }) => {
                ids.copied().try_for_each(|id| history.end_durable(id))
            }
            (BlockCommandKind::Write { .. } | BlockCommandKind::Deallocate, Response::Written { .. }) => {
                ids.copied().try_for_each(|id| history.end(id, CallResult::Acknowledged))
            }
            (BlockCommandKind::Compare { operations }, Response::Verified) => {
                ids.zip(operations).try_for_each(|(&id, &operation)| {
                    let is_zero = operation == 0;
                    let seen = if is_zero { Observed::Absent } else { Observed::Value(operation) };
                    history.end(id, CallResult::Observed(seen))
                })
            }
            (BlockCommandKind::Compare { operations }, Response::CompareFailed) if pending.ids.len() == 1 => {
                let is_zero = operations[0] == 0;
                let seen = if is_zero { Observed::Present } else { Observed::NotValue(operations[0]) };
                history.end(pending.ids[0], CallResult::Observed(seen))
            }
            // The response does not identify the block that differs.
            (BlockCommandKind::Compare { .. }, Response::CompareFailed) => {
                ids.for_each(|&id| history.mark_not_executed(id));
                Ok(())
            }
            (BlockCommandKind::Verify, Response::Verified) => Ok(()),
            (BlockCommandKind::Flush, Response::Flushed) => {
                history.record_flush(pending.ids[0]);
                Ok(())
            }
            (_, Response::Retry { .. }) => {
                self.mark_not_executed(pending);
                Ok(())
            }
            (_, response) => Err(format!("unexpected response: {response:?}")),
        }
    }

    /// Records that a command had no effect and returned no data.
    fn mark_not_executed(&mut self, pending: &OutstandingBlockCommand) {
        if !matches!(pending.kind, BlockCommandKind::Flush) {
            pending.ids.iter().for_each(|&id| self.histories[pending.disk].mark_not_executed(id));
        }
    }

    fn check_error(&mut self, pending: &OutstandingBlockCommand, error: &Error) -> Result<(), String> {
        let read_failed = self.faults.reads_failed() > pending.reads_failed;
        let reads = matches!(
            pending.kind,
            BlockCommandKind::Read { .. } | BlockCommandKind::Compare { .. } | BlockCommandKind::Verify
        );
        match error {
            Error::Disconnected(lost) if self.is_protocol_violation(lost) => return Err(format!("{error}")),
            Error::Status(status) if self.has_operator && is_rejection(*status) => {
                self.rejected_commands += 1;
                self.mark_not_executed(pending);
            }
            Error::Busy | Error::Disconnected(_) | Error::TimedOut | Error::Closed => {
                self.mark_not_executed(pending)
            }
            Error::OutcomeUnknown => {}
            Error::UnrecoveredRead if reads && read_failed => self.mark_not_executed(pending),
            // Read-modify-write of a partial device block failed at its read.
            Error::UnrecoveredRead if !reads && read_failed => {}
            Error::Status(status)
                if status.is(Status::MEDIA_WRITE_FAULT) && !reads && self.faults.operations_failed() > 0 => {}
            other => return Err(format!("unexpected error: {other}")),
        }
        Ok(())
    }
}

/// Begins a write of new contents, one operation per block.
fn begin_write(
    history: &mut History,
    cells: std::ops::Range<usize>,
    block_bytes: u32,
) -> (Vec<u8>, Vec<CallId>) {
    let (mut data, mut ids) = (Vec::new(), Vec::new());
    for cell in cells {
        let operation = history.next_operation(block_bytes);
        data.extend(value_of(&history.keys()[cell], operation, block_bytes as usize));
        let call = Call::Put { operation, bytes: block_bytes, mode: PutMode::Upsert };
        ids.push(history.begin(cell, call));
    }
    (data, ids)
}

/// Contents that these operations wrote to these blocks; zeroes for operation 0.
fn expected_contents(
    history: &History,
    cells: std::ops::Range<usize>,
    operations: &[u64],
    block_bytes: u32,
) -> Vec<u8> {
    let block = |(cell, &operation): (usize, &u64)| match operation {
        0 => vec![0; block_bytes as usize],
        _ => value_of(&history.keys()[cell], operation, block_bytes as usize),
    };
    cells.zip(operations).flat_map(block).collect()
}

/// The operation that wrote a block; a block of zeroes is [`Observed::Absent`].
///
/// # Errors
/// The mismatch, if no operation wrote these contents to this block.
pub fn observe_block(history: &History, cell: usize, block: &[u8]) -> Result<Observed, String> {
    if block.iter().all(|&byte| byte == 0) {
        return Ok(Observed::Absent);
    }
    history.identify_value(cell, block, block.len() as u32)
}
