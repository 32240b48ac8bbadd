//! Controller initialization: the order of its steps, the command of each step and the effect of its completion.
//!
//! ```text
//! Connect ▶ Capabilities ▶ Enable ▶ Ready (repeated until CSTS.RDY) ▶ Controller ▶ NamespaceList
//!         ▶ Descriptors ▶ KvNamespace or BlockNamespace ▶ AsyncEvents ▶ DeviceTokens ▶ DeviceLog ▶ Queues
//!         ▶ (I/O queues connect) ▶ live
//! ```
//! [`step_command`] and [`next_step`] are pure: the initiator executes them. It repeats the steps from NamespaceList to
//! BlockNamespace when the node reports a namespace change.

use crate::command::{CommandKind, EncodedCommand, Value};
use crate::config::ClientConfig;
use crate::controller_info::ControllerInfo;
use crate::error::ConnectionError;
use octokv_base::NamespaceId;
use octokv_wire::device_log::{DEVICE_LOG_BYTES_MAX, DeviceLog};
use octokv_wire::fabrics::{
    self, ConnectResponse, ControllerCapabilities, ControllerConfiguration, ControllerStatus, property,
};
use octokv_wire::identify::{self, NamespaceDescriptor, cns};
use octokv_wire::queue_entry::{Sqe, admin, csi, event, feature};
use octokv_wire::{Cqe, Status, log_page, vendor};
use std::sync::Arc;

/// Step of the initialization of the admin queue and the controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InitStep {
    /// Fabrics Connect of the admin queue.
    Connect,
    /// Reads CAP: the capabilities, of which the entries per queue are used.
    Capabilities,
    /// Sets CC.EN.
    Enable,
    /// Reads CSTS until the controller is ready.
    Ready,
    /// Identifies the controller.
    Controller,
    /// Checks that the namespace is active.
    NamespaceList,
    /// Reads the command set of the namespace.
    Descriptors,
    /// Reads the limits of a Key Value namespace.
    KvNamespace,
    /// Reads the format of a block namespace.
    BlockNamespace,
    /// Enables events for namespace changes.
    AsyncEvents,
    /// Asks for the tokens of devices, with flow control.
    DeviceTokens,
    /// Reads the devices of the namespace.
    DeviceLog,
    /// Requests I/O queues.
    Queues,
}

/// Continuation after a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InitNext {
    /// Execute this step now.
    Step(InitStep),
    /// Repeat the step after a delay: the controller is not ready.
    Wait,
    /// Initialization is complete: connect the I/O queues.
    Done,
}

/// Number of entries of the admin queue.
pub const ADMIN_QUEUE_ENTRIES: u32 = 32;

/// Encodes the Connect of a queue.
pub fn connect_command(
    queue_id: u16,
    entries: u32,
    controller_id: u16,
    config: &ClientConfig,
) -> EncodedCommand<'static> {
    let keep_alive_ms = match queue_id {
        0 => u32::try_from(config.keep_alive.0 / 1_000_000).unwrap_or(u32::MAX),
        _ => 0,
    };
    let command = fabrics::Connect { format: 0, queue_id, entries, attributes: 0, keep_alive_ms };
    let data = fabrics::ConnectData {
        host_id: config.host_id,
        controller_id,
        subsystem: &config.subsystem_nqn,
        host: &config.host_nqn,
    };
    EncodedCommand {
        value: Some(Value::Shared(data.encode().as_slice().into())),
        ..EncodedCommand::internal(fabrics::FabricsCommand::Connect(command).encode(0), 0)
    }
}

/// Encodes the command of a step.
pub fn step_command(step: InitStep, config: &ClientConfig) -> EncodedCommand<'static> {
    let no_namespace = NamespaceId(0);
    let identify = |cns, csi, namespace| {
        let request = identify::IdentifyRequest { cns, csi, controller_id: 0, namespace };
        EncodedCommand::internal(request.encode(0), identify::PAGE_BYTES as u32)
    };
    let get = |offset, is_64_bit| {
        EncodedCommand::internal(fabrics::FabricsCommand::PropertyGet { offset, is_64_bit }.encode(0), 0)
    };
    match step {
        InitStep::Connect => connect_command(0, ADMIN_QUEUE_ENTRIES, fabrics::NEW_CONTROLLER, config),
        InitStep::Capabilities => get(property::CAP, true),
        InitStep::Enable => {
            EncodedCommand::internal(set_configuration_sqe(ControllerConfiguration::ENABLED), 0)
        }
        InitStep::Ready => get(property::CSTS, false),
        InitStep::Controller => identify(cns::CONTROLLER, 0, no_namespace),
        InitStep::NamespaceList => {
            // The list contains identifiers above the given one.
            identify(cns::NAMESPACE_LIST, 0, NamespaceId(config.namespace.0.saturating_sub(1)))
        }
        InitStep::Descriptors => identify(cns::DESCRIPTORS, 0, config.namespace),
        InitStep::KvNamespace => identify(cns::NAMESPACE_OF_SET, csi::KEY_VALUE, config.namespace),
        InitStep::BlockNamespace => identify(cns::NAMESPACE, 0, config.namespace),
        InitStep::AsyncEvents => {
            let mut sqe = Sqe::new(admin::SET_FEATURES, 0);
            sqe.cdw10.set(u32::from(feature::ASYNC_EVENTS));
            sqe.cdw11.set(event::NAMESPACE_CHANGED_BIT);
            EncodedCommand::internal(sqe, 0)
        }
        InitStep::DeviceTokens => {
            let mut sqe = Sqe::new(admin::SET_FEATURES, 0);
            sqe.cdw10.set(u32::from(feature::DEVICE_TOKENS));
            sqe.cdw11.set(1);
            EncodedCommand::internal(sqe, 0)
        }
        InitStep::DeviceLog => {
            let request = log_page::LogPageRequest {
                id: log_page::id::DEVICES,
                log_specific: 0,
                retain_event: true,
                bytes: DEVICE_LOG_BYTES_MAX as u64,
                offset: 0,
                csi: 0,
                namespace: config.namespace,
            };
            EncodedCommand::internal(request.encode(0), DEVICE_LOG_BYTES_MAX as u32)
        }
        InitStep::Queues => {
            let mut sqe = Sqe::new(admin::SET_FEATURES, 0);
            let count_minus_one = u32::from(config.io_queues.max(1) - 1);
            sqe.cdw10.set(u32::from(feature::QUEUES));
            sqe.cdw11.set(count_minus_one | count_minus_one << 16);
            EncodedCommand::internal(sqe, 0)
        }
    }
}

/// Encodes a write of CC.
pub fn set_configuration_sqe(configuration: ControllerConfiguration) -> Sqe {
    let value = u64::from(configuration.0);
    fabrics::FabricsCommand::PropertySet { offset: property::CC, is_64_bit: false, value }.encode(0)
}

/// Encodes a Keep Alive.
pub fn keep_alive_command() -> EncodedCommand<'static> {
    EncodedCommand::internal(Sqe::new(admin::KEEP_ALIVE, 0), 0)
}

/// Encodes an Asynchronous Event Request. It completes with the next event.
pub fn async_event_request() -> EncodedCommand<'static> {
    EncodedCommand::without_data(Sqe::new(admin::ASYNC_EVENT_REQUEST, 0), CommandKind::AsyncEvent, 0)
}

/// Encodes a read of the changed namespace list, which re-enables the event for the next change.
pub fn changed_namespaces_command() -> EncodedCommand<'static> {
    let request = log_page::LogPageRequest {
        id: log_page::id::CHANGED_NAMESPACES,
        log_specific: 0,
        retain_event: false,
        bytes: CHANGED_LIST_BYTES,
        offset: 0,
        csi: 0,
        namespace: NamespaceId(u32::MAX),
    };
    EncodedCommand::internal(request.encode(0), CHANGED_LIST_BYTES as u32)
}

/// Length of the changed namespace list, in bytes.
const CHANGED_LIST_BYTES: u64 = 4096;

/// Applies the completion of a step to `info` and returns the continuation.
///
/// # Errors
/// The reason why the controller is unusable.
pub fn next_step(
    step: InitStep,
    cqe: &Cqe,
    data: &[u8],
    config: &ClientConfig,
    info: &mut ControllerInfo,
) -> Result<InitNext, ConnectionError> {
    let status = cqe.status();
    if !status.is_success() {
        return after_failure(step, status, config, info);
    }
    let truncated = ConnectionError::InitFailed(Status::DATA_TRANSFER_ERROR);
    let next = match step {
        InitStep::Connect => {
            let connected = ConnectResponse::decode(cqe.dw0.get());
            if connected.authentication_required {
                return Err(ConnectionError::AuthenticationRequired);
            }
            info.controller_id = connected.controller_id;
            InitStep::Capabilities
        }
        InitStep::Capabilities => {
            let value = u64::from(cqe.dw0.get()) | u64::from(cqe.dw1.get()) << 32;
            info.queue_entries_max = ControllerCapabilities::decode(value).queue_entries_max;
            InitStep::Enable
        }
        InitStep::Enable => InitStep::Ready,
        InitStep::Ready => match ControllerStatus::decode(cqe.dw0.get()) {
            ControllerStatus { fatal: true, .. } => return Err(ConnectionError::ControllerFatal),
            ControllerStatus { ready: false, .. } => return Ok(InitNext::Wait),
            ControllerStatus { ready: true, .. } => InitStep::Controller,
        },
        InitStep::Controller => {
            info.apply_controller_page(identify::decode_page(data).ok_or(truncated)?);
            InitStep::NamespaceList
        }
        InitStep::NamespaceList => {
            let list: &identify::NamespaceIdList = identify::decode_page(data).ok_or(truncated)?;
            if list.ids().next() != Some(config.namespace) {
                return Err(ConnectionError::NamespaceNotFound);
            }
            InitStep::Descriptors
        }
        InitStep::Descriptors => {
            let sets = identify::decode_descriptors(data);
            let has = |set| sets.contains(&NamespaceDescriptor::CommandSet(set));
            match (has(csi::KEY_VALUE), has(csi::NVM)) {
                (true, _) => InitStep::KvNamespace,
                (false, true) => InitStep::BlockNamespace,
                (false, false) => return Err(ConnectionError::UnsupportedCommandSet),
            }
        }
        InitStep::KvNamespace => {
            info.apply_kv_namespace_page(identify::decode_page(data).ok_or(truncated)?)?;
            step_after_namespace(config, info)
        }
        InitStep::BlockNamespace => {
            info.apply_namespace_page(identify::decode_page(data).ok_or(truncated)?)?;
            step_after_namespace(config, info)
        }
        InitStep::AsyncEvents => step_after_events(config, info),
        InitStep::DeviceTokens => InitStep::DeviceLog,
        InitStep::DeviceLog => {
            info.device_log = DeviceLog::check(data).ok().map(Arc::new);
            InitStep::Queues
        }
        InitStep::Queues => {
            let dw0 = cqe.dw0.get();
            let granted = (dw0 & 0xffff).min(dw0 >> 16) + 1;
            info.io_queues = granted.min(u32::from(config.io_queues.max(1))) as u16;
            return Ok(InitNext::Done);
        }
    };
    Ok(InitNext::Step(next))
}

/// The continuation after a step that the controller failed with `status`.
fn after_failure(
    step: InitStep,
    status: Status,
    config: &ClientConfig,
    info: &mut ControllerInfo,
) -> Result<InitNext, ConnectionError> {
    Err(match step {
        InitStep::Connect => ConnectionError::ConnectRejected(status),
        InitStep::Descriptors | InitStep::KvNamespace | InitStep::BlockNamespace
            if status.is(Status::INVALID_NAMESPACE) =>
        {
            ConnectionError::NamespaceNotFound
        }
        InitStep::KvNamespace => ConnectionError::UnsupportedCommandSet,
        InitStep::AsyncEvents => {
            // Support of events is optional.
            info.reports_namespace_changes = false;
            return Ok(InitNext::Step(step_after_events(config, info)));
        }
        InitStep::DeviceTokens | InitStep::DeviceLog => {
            // Another namespace of the controller has tokens.
            info.device_log = None;
            return Ok(InitNext::Step(InitStep::Queues));
        }
        _ => ConnectionError::InitFailed(status),
    })
}

fn step_after_namespace(config: &ClientConfig, info: &ControllerInfo) -> InitStep {
    if info.reports_namespace_changes { InitStep::AsyncEvents } else { step_after_events(config, info) }
}

fn step_after_events(config: &ClientConfig, info: &ControllerInfo) -> InitStep {
    let features = info.vendor_capabilities.map_or(0, |capabilities| capabilities.features);
    let has_tokens = features & vendor::FEATURE_DEVICE_TOKENS != 0;
    if config.flow_control && has_tokens { InitStep::DeviceTokens } else { InitStep::Queues }
}

#[cfg(test)]
mod tests {
    use super::*;
    use octokv_wire::device_log::{DeviceEntry, LoggedCost};

    fn success(dw0: u32, dw1: u32) -> Cqe {
        Cqe::new(0, 0, Status::SUCCESS, dw0, dw1)
    }

    #[test]
    fn every_step_has_its_successor() {
        let config = ClientConfig { io_queues: 4, ..ClientConfig::default() };
        let mut info = ControllerInfo::unknown();
        let mut controller = identify::IdentifyController::zeroed();
        controller.command_capsule_units.set((16384 + 64) / 16);
        controller.data_pages_log2 = 9;
        controller.events.set(event::NAMESPACE_CHANGED_BIT);
        let mut block_namespace = identify::IdentifyNamespace::zeroed();
        block_namespace.size.set(1000);
        block_namespace.block_formats[0][2] = 12;
        let of_blocks = identify::encode_descriptors(&[NamespaceDescriptor::CommandSet(0)]);
        let list = identify::NamespaceIdList::above(0, [NamespaceId(1)].into_iter());
        let descriptors = identify::encode_descriptors(&[NamespaceDescriptor::CommandSet(1)]);
        let mut namespace = identify::IdentifyKvNamespace::zeroed();
        namespace.kv_formats[0].key_bytes_max.set(16);
        namespace.kv_formats[0].value_bytes_max.set(1 << 20);
        use zerocopy::IntoBytes;
        let table: &[(InitStep, Cqe, &[u8], InitNext)] = &[
            (InitStep::Connect, success(7, 0), &[], InitNext::Step(InitStep::Capabilities)),
            (InitStep::Capabilities, success(1023, 0), &[], InitNext::Step(InitStep::Enable)),
            (InitStep::Enable, success(0, 0), &[], InitNext::Step(InitStep::Ready)),
            (InitStep::Ready, success(0, 0), &[], InitNext::Wait),
            (InitStep::Ready, success(1, 0), &[], InitNext::Step(InitStep::Controller)),
            (
                InitStep::Controller,
                success(0, 0),
                controller.as_bytes(),
                InitNext::Step(InitStep::NamespaceList),
            ),
            (InitStep::NamespaceList, success(0, 0), list.as_bytes(), InitNext::Step(InitStep::Descriptors)),
            (InitStep::Descriptors, success(0, 0), &descriptors, InitNext::Step(InitStep::KvNamespace)),
            (InitStep::Descriptors, success(0, 0), &of_blocks, InitNext::Step(InitStep::BlockNamespace)),
            (
                InitStep::BlockNamespace,
                success(0, 0),
                block_namespace.as_bytes(),
                InitNext::Step(InitStep::AsyncEvents),
            ),
            (
                InitStep::KvNamespace,
                success(0, 0),
                namespace.as_bytes(),
                InitNext::Step(InitStep::AsyncEvents),
            ),
            (InitStep::AsyncEvents, success(0, 0), &[], InitNext::Step(InitStep::Queues)),
            (
                InitStep::AsyncEvents,
                Cqe::new(0, 0, Status::INVALID_FIELD, 0, 0),
                &[],
                InitNext::Step(InitStep::Queues),
            ),
            (InitStep::Queues, success(0x0001_0002, 0), &[], InitNext::Done),
        ];
        for (step, cqe, data, want) in table {
            assert_eq!(next_step(*step, cqe, data, &config, &mut info), Ok(*want), "{step:?}");
        }
        let config = ClientConfig { flow_control: true, ..config };
        let features = vendor::FEATURE_DEVICE_TOKENS;
        info.vendor_capabilities =
            Some(vendor::VendorCapabilities { version: 1, key_bytes_max: 16, features });
        let cost = LoggedCost { tokens: 16, tokens_per_4k: 16 };
        let device = DeviceEntry { capacity: 512, free: 100, get: cost, put: cost, delete: cost };
        let log = DeviceLog { hash_seed: 3, map: [0; 256], devices: vec![device] };
        let tokens: &[(InitStep, Cqe, &[u8], InitStep)] = &[
            (InitStep::AsyncEvents, success(0, 0), &[], InitStep::DeviceTokens),
            (InitStep::DeviceTokens, success(0, 0), &[], InitStep::DeviceLog),
            (InitStep::DeviceLog, success(0, 0), &log.encode(), InitStep::Queues),
        ];
        for (step, cqe, data, want) in tokens {
            assert_eq!(next_step(*step, cqe, data, &config, &mut info), Ok(InitNext::Step(*want)));
        }
        assert_eq!(info.device_log.as_deref(), Some(&log));
        let without = Cqe::new(0, 0, Status::INVALID_LOG_PAGE, 0, 0);
        let next = next_step(InitStep::DeviceLog, &without, &[], &config, &mut info);
        assert_eq!((next, &info.device_log), (Ok(InitNext::Step(InitStep::Queues)), &None));
        assert_eq!((info.controller_id, info.io_queues, info.queue_depth(2000)), (7, 2, 1023));
        assert_eq!((info.capsule_data_bytes, info.value_bytes_max()), (16384, 1 << 20));
        assert_eq!(info.key_bytes_max(), 16);
    }

    #[test]
    fn responses_that_end_initialization_give_the_cause() {
        let config = ClientConfig::default();
        let failed = |status| Cqe::new(0, 0, status, 0, 0);
        let nothing = vec![0; identify::PAGE_BYTES];
        // Eight blocks with an unsupported block size.
        let odd: Vec<u8> = [&[8], &nothing[1..]].concat();
        let refused = Status::CONNECT_INVALID_HOST;
        let table = [
            (InitStep::Connect, failed(refused), &[][..], ConnectionError::ConnectRejected(refused)),
            (InitStep::Connect, success(1 << 17, 0), &[], ConnectionError::AuthenticationRequired),
            (InitStep::Ready, success(2, 0), &[], ConnectionError::ControllerFatal),
            (
                InitStep::Enable,
                failed(Status::INVALID_FIELD),
                &[],
                ConnectionError::InitFailed(Status::INVALID_FIELD),
            ),
            (
                InitStep::Controller,
                success(0, 0),
                &nothing[1..],
                ConnectionError::InitFailed(Status::DATA_TRANSFER_ERROR),
            ),
            (InitStep::NamespaceList, success(0, 0), &nothing, ConnectionError::NamespaceNotFound),
            (InitStep::Descriptors, success(0, 0), &nothing, ConnectionError::UnsupportedCommandSet),
            (
                InitStep::KvNamespace,
                failed(Status::INVALID_FIELD),
                &[],
                ConnectionError::UnsupportedCommandSet,
            ),
            (InitStep::KvNamespace, success(0, 0), &nothing, ConnectionError::NamespaceNotFound),
            (InitStep::BlockNamespace, success(0, 0), &nothing, ConnectionError::NamespaceNotFound),
            (InitStep::BlockNamespace, success(0, 0), &odd, ConnectionError::UnsupportedBlockFormat),
            (
                InitStep::BlockNamespace,
                failed(Status::INVALID_NAMESPACE),
                &[],
                ConnectionError::NamespaceNotFound,
            ),
            (
                InitStep::KvNamespace,
                failed(Status::INVALID_NAMESPACE),
                &[],
                ConnectionError::NamespaceNotFound,
            ),
        ];
        for (step, cqe, data, want) in table {
            assert_eq!(
                next_step(step, &cqe, data, &config, &mut ControllerInfo::unknown()),
                Err(want),
                "{step:?}"
            );
        }
    }

    #[test]
    fn random_pages_never_panic_and_accepted_pages_are_consistent() {
        let mut random = octokv_base::Prng::new(11);
        let steps = [
            InitStep::Controller,
            InitStep::NamespaceList,
            InitStep::Descriptors,
            InitStep::KvNamespace,
            InitStep::BlockNamespace,
        ];
        let mut page = vec![0; identify::PAGE_BYTES];
        let mut accepted = 0;
        for round in 0..20_000u32 {
            random.fill(&mut page);
            if round % 2 == 0 {
                // Nearly valid: no metadata, few blocks, an existing format.
                page[..8].copy_from_slice(&random.below(1 << 40).to_le_bytes());
                (page[25], page[26]) = (63, page[26] & 0x6f);
                page[128..384].chunks_mut(4).for_each(|format| (format[0], format[1]) = (0, 0));
            }
            let cut = if random.one_in(8) { random.below(4097) as usize } else { 4096 };
            let mut info = ControllerInfo::unknown();
            for step in steps {
                let _ = next_step(step, &success(0, 0), &page[..cut], &ClientConfig::default(), &mut info);
            }
            if let Some(blocks) = info.blocks {
                accepted += 1;
                let most = blocks.command_bytes_max(info.data_bytes_max);
                assert!(blocks.block_bytes.is_power_of_two() && (512..=65536).contains(&blocks.block_bytes));
                assert!(most > 0 && most % blocks.block_bytes == 0 && most <= info.data_bytes_max);
                assert!(info.size_bytes > 0 && info.used_bytes <= info.size_bytes);
            }
        }
        assert!(accepted > 100, "only {accepted} block pages were accepted");
    }
}
