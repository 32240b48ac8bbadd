//! Flow control of a worker: its commands wait for the tokens of their devices ([`FlowControl`]), as those of one tenant.
//!
//! In: streams with commands to send, tokens of completions. Out: the streams whose commands are sent now. Latency counts from before
//! the wait. Invariant: each stream has at most one command, which waits or is in flight. Tested in `crates/octokv/tests`.

use crate::config::BenchConfig;
use crate::workload::WorkloadOp;
use octokv_base::{Key, Nanos, RingPosition};
use octokv_client::{ControllerInfo, FlowControl, FlowRequest, TokenReport};
use octokv_wire::device_log::DeviceLog;
use std::sync::Arc;

/// The longest round of the scheduler: responses are received in between.
const ROUND_MAX: Nanos = Nanos::from_micros(100);

/// What a command does with its key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FlowKind {
    /// Reads a value of unknown length.
    Get,
    /// Stores a value of this length.
    Put(usize),
    /// Deletes it.
    Delete,
}

impl FlowKind {
    /// The key of an operation's next command, and what it does with it; `None` for listings and scans, which have no key.
    pub fn of(config: &BenchConfig, op: WorkloadOp, index: u64, has_read: bool) -> Option<(Key, FlowKind)> {
        Some(match op {
            WorkloadOp::Scan | WorkloadOp::List => return None,
            WorkloadOp::ReadMissing => (config.absent_key(index), FlowKind::Get),
            WorkloadOp::Read => (config.key(index), FlowKind::Get),
            WorkloadOp::ReadModifyWrite if !has_read => (config.key(index), FlowKind::Get),
            WorkloadOp::Delete => (config.key(index), FlowKind::Delete),
            WorkloadOp::Store | WorkloadOp::Insert | WorkloadOp::ReadModifyWrite => {
                (config.key(index), FlowKind::Put(config.value_bytes(index)))
            }
        })
    }
}

/// See the module header.
pub(crate) struct FlowSender {
    log: Arc<DeviceLog>,
    flow: FlowControl<u32>,
    /// The device and the tokens of the command of each stream, in flight or waiting.
    commands: Vec<Option<(usize, u32)>>,
    reports: Vec<TokenReport>,
}

impl FlowSender {
    /// That of a session with so many streams; `None` if its namespace has no tokens.
    pub fn new(info: &ControllerInfo, streams: usize) -> Option<FlowSender> {
        let log = info.device_log.clone()?;
        let tokens: Vec<u32> = log.devices.iter().map(|device| device.free).collect();
        let flow = FlowControl::new(1, &tokens);
        Some(FlowSender { log, flow, commands: vec![None; streams], reports: Vec::new() })
    }

    /// Adds the command of a stream.
    pub fn enqueue(&mut self, stream: u32, key: &Key, kind: FlowKind) {
        let device = usize::from(self.log.device_of(RingPosition::of(key, self.log.hash_seed)));
        let entry = &self.log.devices[device];
        let tokens = match kind {
            FlowKind::Get => entry.get.of(0),
            FlowKind::Put(bytes) => entry.put.of(bytes),
            FlowKind::Delete => entry.delete.of(0),
        };
        self.commands[stream as usize] = Some((device, tokens));
        self.flow.enqueue(0, FlowRequest { device, tokens, request: stream });
    }

    /// Runs a round: `send` sends the command of a stream.
    pub fn run(&mut self, now: impl Fn() -> Nanos, mut send: impl FnMut(u32)) {
        if self.flow.waiting() > 0 {
            self.flow.run(now() + ROUND_MAX, &now, |request| send(request.request));
        }
    }

    /// Takes the tokens of the commands that completed; `take` moves them.
    pub fn complete(&mut self, take: impl FnOnce(&mut Vec<TokenReport>)) {
        take(&mut self.reports);
        for TokenReport { command, tokens: window } in self.reports.drain(..) {
            if let Some((device, tokens)) = self.commands[command as usize].take() {
                self.flow.complete(device, tokens, Some(window));
            }
        }
    }
}
