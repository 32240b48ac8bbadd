//! How a controller is set up: the order of the steps, what each asks, what its answer means.
//!
//! ```text
//! Connect ▶ Capabilities ▶ Enable ▶ Ready (again until CSTS.RDY) ▶ Controller ▶ Namespaces
//!         ▶ Descriptors ▶ Namespace, of keys or Blocks ▶ Events ▶ Queues ▶ (the I/O queues connect) ▶ live
//! ```
//! [`request`] and [`next`] are pure: the initiator carries them out. The steps from Namespaces to Blocks are
//! taken again when the node tells that namespaces changed.

use crate::command::{Kind, Prepared, Value};
use crate::config::Settings;
use crate::error::Lost;
use octokv_base::NamespaceId;
use octokv_wire::fabrics::{self, Capabilities, Configuration, Connected, ControllerStatus, property};
use octokv_wire::identify::{self, Descriptor, cns};
use octokv_wire::queue_entry::{Sqe, admin, csi, event, feature};
use octokv_wire::vendor::{self, Announcement};
use octokv_wire::{Cqe, Status, kv, log_page, nvm};

/// What is known of a controller and its namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Facts {
    /// The controller's id.
    pub controller_id: u16,
    /// Entries that a queue may have.
    pub queue_entries_max: u32,
    /// Bytes that an I/O command may carry in its capsule.
    pub capsule_data_bytes: u32,
    /// The most data of one command, in bytes.
    pub data_bytes_max: u32,
    /// octokv's extension, where the controller announces it.
    pub announcement: Option<Announcement>,
    /// The most commands at once on a queue, 0 for no limit.
    pub commands_max: u16,
    /// I/O queues granted.
    pub queues: u16,
    /// The longest key of the namespace by the standard commands, in bytes.
    pub kv_key_bytes_max: u16,
    /// The longest value of the namespace, in bytes; 0 for no limit.
    pub kv_value_bytes_max: u32,
    /// Size of the namespace, in bytes.
    pub size_bytes: u64,
    /// Bytes of it that are used, when it was connected.
    pub used_bytes: u64,
    /// What is known of a namespace of blocks; none where it holds keys and values.
    pub blocks: Option<Blocks>,
    /// Whether the controller takes Dataset Management.
    pub deallocates: bool,
    /// Whether the controller tells of namespaces that changed.
    pub tells_changes: bool,
}

/// What is known of a namespace of blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Blocks {
    /// Bytes of a block: a power of two from 512 to 65536.
    pub block_bytes: u32,
    /// How many there are.
    pub count: u64,
    /// The namespace's globally unique identifier; zeros where it has none.
    pub nguid: [u8; 16],
}

/// The bit of ONCS that says so.
const DATASET_MANAGEMENT: u16 = 1 << 2;

/// The smallest and the largest block that we work with, as powers of two.
const BLOCK_LOG2: std::ops::RangeInclusive<u8> = 9..=16;

impl Blocks {
    /// The most data of one command: whole blocks, no more than it can name.
    pub fn command_bytes_max(&self, data_bytes_max: u32) -> u32 {
        let named = u64::from(nvm::BLOCKS_MAX) * u64::from(self.block_bytes);
        let most = named.min(u64::from(data_bytes_max)).min(1 << 31);
        (most - most % u64::from(self.block_bytes)) as u32
    }

    /// Of the page of a namespace, where its format is one that we can use.
    fn of(page: &identify::Namespace, data_bytes_max: u32) -> Option<Blocks> {
        let index = page.format & 0xf | (page.format >> 1) & 0x30;
        if index > page.formats {
            return None;
        }
        let [low, high, block_log2, _] = page.block_formats[usize::from(index)];
        if (low, high) != (0, 0) || !BLOCK_LOG2.contains(&block_log2) {
            return None;
        }
        let (block_bytes, count) = (1 << block_log2, page.size.get());
        count.checked_mul(u64::from(block_bytes)).filter(|&bytes| bytes > 0)?;
        let blocks = Blocks { block_bytes, count, nguid: page.nguid };
        (blocks.command_bytes_max(data_bytes_max) > 0).then_some(blocks)
    }

    /// Whether data that was here before is here still, as far as names and sizes tell.
    pub fn is_still(&self, before: &Blocks) -> bool {
        self.nguid == before.nguid && self.block_bytes == before.block_bytes && self.count >= before.count
    }
}

impl Facts {
    pub(crate) fn unknown() -> Facts {
        Facts {
            controller_id: 0,
            queue_entries_max: 2,
            capsule_data_bytes: 0,
            data_bytes_max: u32::MAX,
            announcement: None,
            commands_max: 0,
            queues: 1,
            kv_key_bytes_max: 0,
            kv_value_bytes_max: 0,
            size_bytes: 0,
            used_bytes: 0,
            blocks: None,
            deallocates: false,
            tells_changes: false,
        }
    }

    /// Facts of a controller with the usual limits, for tests.
    #[doc(hidden)]
    pub fn for_tests() -> Facts {
        Facts {
            queue_entries_max: 1024,
            capsule_data_bytes: 16384,
            data_bytes_max: 2 << 20,
            kv_key_bytes_max: 16,
            kv_value_bytes_max: 2 << 20,
            ..Facts::unknown()
        }
    }

    fn learn_controller(&mut self, page: &identify::Controller) {
        self.capsule_data_bytes = page.capsule_data_bytes();
        self.data_bytes_max = page.data_bytes_max().map_or(u32::MAX, |most| most.min(1 << 31) as u32);
        self.announcement = page.announcement();
        self.commands_max = page.commands_max.get();
        self.tells_changes = page.events.get() & event::NAMESPACE_CHANGED_BIT != 0;
        self.deallocates = page.nvm_commands.get() & DATASET_MANAGEMENT != 0;
    }

    fn learn_blocks(&mut self, page: &identify::Namespace) -> Result<(), Lost> {
        if page.size.get() == 0 {
            // A page of zeros: it was there a step ago and is no more (NVMe Base 2.1, 5.1.13.2.1).
            return Err(Lost::NoNamespace);
        }
        let blocks = Blocks::of(page, self.data_bytes_max).ok_or(Lost::BlockFormat)?;
        self.size_bytes = blocks.count * u64::from(blocks.block_bytes);
        self.used_bytes = page.used.get().min(blocks.count) * u64::from(blocks.block_bytes);
        self.blocks = Some(blocks);
        Ok(())
    }

    fn learn_namespace(&mut self, page: &identify::KvNamespace) {
        self.blocks = None;
        let format = page.kv_formats[usize::from(page.format & 0xf)];
        self.kv_key_bytes_max = format.key_bytes_max.get();
        self.kv_value_bytes_max = format.value_bytes_max.get();
        self.size_bytes = page.size_bytes.get();
        self.used_bytes = page.used_bytes.get();
    }

    /// Whether the extension's commands with long keys can be used. Their keys travel in the capsule.
    pub fn long_keys(&self) -> bool {
        let announced = |a: &Announcement| a.features & vendor::FEATURE_LONG_KEYS != 0;
        self.announcement.as_ref().is_some_and(announced) && self.capsule_data_bytes >= 1024
    }

    /// The longest key of a standard command, in bytes.
    pub fn standard_key_bytes_max(&self) -> usize {
        usize::from(self.kv_key_bytes_max).min(kv::KEY_BYTES_MAX)
    }

    /// The longest key, in bytes.
    pub fn key_bytes_max(&self) -> usize {
        let standard = self.standard_key_bytes_max();
        match self.announcement {
            Some(a) if self.long_keys() => {
                usize::from(a.key_bytes_max).clamp(standard, octokv_base::KEY_BYTES_MAX)
            }
            _ => standard,
        }
    }

    /// The longest value that can be stored, in bytes.
    pub fn value_bytes_max(&self) -> u32 {
        match self.kv_value_bytes_max {
            0 => self.data_bytes_max,
            most => most.min(self.data_bytes_max),
        }
    }

    /// The most that one command can read, in bytes.
    pub fn read_bytes_max(&self) -> u32 {
        self.value_bytes_max()
    }

    /// Commands that may be in flight on a queue: one less than its entries.
    pub fn depth(&self, wanted: u16) -> u16 {
        let limit = if self.commands_max == 0 { u16::MAX } else { self.commands_max };
        let entries = (self.queue_entries_max - 1).min(u32::from(u16::MAX)) as u16;
        wanted.min(limit).min(entries).max(1)
    }
}

/// A step of setting up the admin queue and the controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Fabrics Connect of the admin queue.
    Connect,
    /// Read CAP.
    Capabilities,
    /// Write CC.EN.
    Enable,
    /// Read CSTS until it is ready.
    Ready,
    /// Identify the controller.
    Controller,
    /// Is the namespace there?
    Namespaces,
    /// Which command set has it?
    Descriptors,
    /// Its limits, where it holds keys and values.
    Namespace,
    /// Its blocks, where it holds blocks.
    Blocks,
    /// Ask to be told of namespaces that change.
    Events,
    /// Ask for I/O queues.
    Queues,
}

/// What follows a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// This step at once.
    Step(Step),
    /// Read CSTS again, a little later.
    Wait,
    /// The controller is set up: connect the I/O queues.
    Done,
}

/// Entries of the admin queue.
pub const ADMIN_ENTRIES: u32 = 32;

/// The Connect of a queue.
pub fn connect(queue_id: u16, entries: u32, controller_id: u16, settings: &Settings) -> Prepared<'static> {
    let keep_alive_ms = match queue_id {
        0 => u32::try_from(settings.keep_alive.0 / 1_000_000).unwrap_or(u32::MAX),
        _ => 0,
    };
    let command = fabrics::Connect { format: 0, queue_id, entries, attributes: 0, keep_alive_ms };
    let data = fabrics::ConnectData {
        host_id: settings.host_id,
        controller_id,
        subsystem: &settings.subsystem,
        host: &settings.host,
    };
    Prepared {
        value: Some(Value::Shared(data.encode().as_slice().into())),
        ..Prepared::own(fabrics::Command::Connect(command).encode(0), 0)
    }
}

/// The command of a step.
pub fn request(step: Step, settings: &Settings) -> Prepared<'static> {
    let nobody = NamespaceId(0);
    let identify = |cns, csi, namespace| {
        let request = identify::Request { cns, csi, controller_id: 0, namespace };
        Prepared::own(request.encode(0), identify::PAGE_BYTES as u32)
    };
    let get = |offset, wide| Prepared::own(fabrics::Command::PropertyGet { offset, wide }.encode(0), 0);
    match step {
        Step::Connect => connect(0, ADMIN_ENTRIES, fabrics::NEW_CONTROLLER, settings),
        Step::Capabilities => get(property::CAP, true),
        Step::Enable => Prepared::own(set_configuration(Configuration::ENABLED), 0),
        Step::Ready => get(property::CSTS, false),
        Step::Controller => identify(cns::CONTROLLER, 0, nobody),
        Step::Namespaces => {
            // The list begins above the namespace it is given.
            identify(cns::NAMESPACE_LIST, 0, NamespaceId(settings.namespace.0.saturating_sub(1)))
        }
        Step::Descriptors => identify(cns::DESCRIPTORS, 0, settings.namespace),
        Step::Namespace => identify(cns::NAMESPACE_OF_SET, csi::KEY_VALUE, settings.namespace),
        Step::Blocks => identify(cns::NAMESPACE, 0, settings.namespace),
        Step::Events => {
            let mut sqe = Sqe::new(admin::SET_FEATURES, 0);
            sqe.cdw10.set(u32::from(feature::ASYNC_EVENTS));
            sqe.cdw11.set(event::NAMESPACE_CHANGED_BIT);
            Prepared::own(sqe, 0)
        }
        Step::Queues => {
            let mut sqe = Sqe::new(admin::SET_FEATURES, 0);
            let most = u32::from(settings.queues.max(1) - 1);
            sqe.cdw10.set(u32::from(feature::QUEUES));
            sqe.cdw11.set(most | most << 16);
            Prepared::own(sqe, 0)
        }
    }
}

/// Writing CC.
pub fn set_configuration(configuration: Configuration) -> Sqe {
    let value = u64::from(configuration.0);
    fabrics::Command::PropertySet { offset: property::CC, wide: false, value }.encode(0)
}

/// Keep Alive.
pub fn keep_alive() -> Prepared<'static> {
    Prepared::own(Sqe::new(admin::KEEP_ALIVE, 0), 0)
}

/// An event request, which is answered when there is something to tell.
pub fn event_request() -> Prepared<'static> {
    Prepared::without_data(Sqe::new(admin::ASYNC_EVENT_REQUEST, 0), Kind::Event, 0)
}

/// Reads the list of namespaces that changed, so that the next change is told, too.
pub fn changed_namespaces() -> Prepared<'static> {
    let request = log_page::Request {
        id: log_page::id::CHANGED_NAMESPACES,
        specific: 0,
        retain_event: false,
        bytes: CHANGED_BYTES,
        offset: 0,
        csi: 0,
        namespace: NamespaceId(u32::MAX),
    };
    Prepared::own(request.encode(0), CHANGED_BYTES as u32)
}

/// Bytes of that list.
const CHANGED_BYTES: u64 = 4096;

/// Takes the answer of a step into `facts` and says what follows.
///
/// # Errors
/// Why the controller cannot be used.
pub fn next(
    step: Step,
    cqe: &Cqe,
    data: &[u8],
    settings: &Settings,
    facts: &mut Facts,
) -> Result<Next, Lost> {
    let status = cqe.status();
    if !status.is_success() {
        return Err(match step {
            Step::Connect => Lost::Refused(status),
            Step::Descriptors | Step::Namespace | Step::Blocks if status.is(Status::INVALID_NAMESPACE) => {
                Lost::NoNamespace
            }
            Step::Namespace => Lost::CommandSet,
            Step::Events => {
                // Nobody is obliged to tell.
                facts.tells_changes = false;
                return Ok(Next::Step(Step::Queues));
            }
            _ => Lost::Setup(status),
        });
    }
    let short = Lost::Setup(Status::DATA_TRANSFER_ERROR);
    let following = match step {
        Step::Connect => {
            let connected = Connected::decode(cqe.dw0.get());
            if connected.authentication_required {
                return Err(Lost::Authentication);
            }
            facts.controller_id = connected.controller_id;
            Step::Capabilities
        }
        Step::Capabilities => {
            let value = u64::from(cqe.dw0.get()) | u64::from(cqe.dw1.get()) << 32;
            facts.queue_entries_max = Capabilities::decode(value).queue_entries_max;
            Step::Enable
        }
        Step::Enable => Step::Ready,
        Step::Ready => match ControllerStatus::decode(cqe.dw0.get()) {
            ControllerStatus { fatal: true, .. } => return Err(Lost::Controller),
            ControllerStatus { ready: false, .. } => return Ok(Next::Wait),
            ControllerStatus { ready: true, .. } => Step::Controller,
        },
        Step::Controller => {
            facts.learn_controller(identify::read(data).ok_or(short)?);
            Step::Namespaces
        }
        Step::Namespaces => {
            let list: &identify::NamespaceList = identify::read(data).ok_or(short)?;
            if list.ids().next() != Some(settings.namespace) {
                return Err(Lost::NoNamespace);
            }
            Step::Descriptors
        }
        Step::Descriptors => {
            let sets = identify::decode_descriptors(data);
            let has = |set| sets.contains(&Descriptor::CommandSet(set));
            match (has(csi::KEY_VALUE), has(csi::NVM)) {
                (true, _) => Step::Namespace,
                (false, true) => Step::Blocks,
                (false, false) => return Err(Lost::CommandSet),
            }
        }
        Step::Namespace => {
            facts.learn_namespace(identify::read(data).ok_or(short)?);
            after_namespace(facts)
        }
        Step::Blocks => {
            facts.learn_blocks(identify::read(data).ok_or(short)?)?;
            after_namespace(facts)
        }
        Step::Events => Step::Queues,
        Step::Queues => {
            let dw0 = cqe.dw0.get();
            let granted = (dw0 & 0xffff).min(dw0 >> 16) + 1;
            facts.queues = granted.min(u32::from(settings.queues.max(1))) as u16;
            return Ok(Next::Done);
        }
    };
    Ok(Next::Step(following))
}

fn after_namespace(facts: &Facts) -> Step {
    if facts.tells_changes { Step::Events } else { Step::Queues }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn success(dw0: u32, dw1: u32) -> Cqe {
        Cqe::new(0, 0, Status::SUCCESS, dw0, dw1)
    }

    #[test]
    fn every_step_has_its_follower() {
        let settings = Settings { queues: 4, ..Settings::default() };
        let mut facts = Facts::unknown();
        let mut controller = identify::Controller::zeroed();
        controller.command_capsule_units.set((16384 + 64) / 16);
        controller.data_pages_log2 = 9;
        controller.events.set(event::NAMESPACE_CHANGED_BIT);
        let mut block_namespace = identify::Namespace::zeroed();
        block_namespace.size.set(1000);
        block_namespace.block_formats[0][2] = 12;
        let of_blocks = identify::encode_descriptors(&[Descriptor::CommandSet(0)]);
        let list = identify::NamespaceList::above(0, [NamespaceId(1)].into_iter());
        let descriptors = identify::encode_descriptors(&[Descriptor::CommandSet(1)]);
        let mut namespace = identify::KvNamespace::zeroed();
        namespace.kv_formats[0].key_bytes_max.set(16);
        namespace.kv_formats[0].value_bytes_max.set(1 << 20);
        use zerocopy::IntoBytes;
        let table: &[(Step, Cqe, &[u8], Next)] = &[
            (Step::Connect, success(7, 0), &[], Next::Step(Step::Capabilities)),
            (Step::Capabilities, success(1023, 0), &[], Next::Step(Step::Enable)),
            (Step::Enable, success(0, 0), &[], Next::Step(Step::Ready)),
            (Step::Ready, success(0, 0), &[], Next::Wait),
            (Step::Ready, success(1, 0), &[], Next::Step(Step::Controller)),
            (Step::Controller, success(0, 0), controller.as_bytes(), Next::Step(Step::Namespaces)),
            (Step::Namespaces, success(0, 0), list.as_bytes(), Next::Step(Step::Descriptors)),
            (Step::Descriptors, success(0, 0), &descriptors, Next::Step(Step::Namespace)),
            (Step::Descriptors, success(0, 0), &of_blocks, Next::Step(Step::Blocks)),
            (Step::Blocks, success(0, 0), block_namespace.as_bytes(), Next::Step(Step::Events)),
            (Step::Namespace, success(0, 0), namespace.as_bytes(), Next::Step(Step::Events)),
            (Step::Events, success(0, 0), &[], Next::Step(Step::Queues)),
            (Step::Events, Cqe::new(0, 0, Status::INVALID_FIELD, 0, 0), &[], Next::Step(Step::Queues)),
            (Step::Queues, success(0x0001_0002, 0), &[], Next::Done),
        ];
        for (step, cqe, data, want) in table {
            assert_eq!(next(*step, cqe, data, &settings, &mut facts), Ok(*want), "{step:?}");
        }
        assert_eq!((facts.controller_id, facts.queues, facts.depth(2000)), (7, 2, 1023));
        assert_eq!((facts.capsule_data_bytes, facts.value_bytes_max()), (16384, 1 << 20));
        assert_eq!(facts.key_bytes_max(), 16);
    }

    #[test]
    fn answers_that_end_the_setup_say_why() {
        let settings = Settings::default();
        let failed = |status| Cqe::new(0, 0, status, 0, 0);
        let nothing = vec![0; identify::PAGE_BYTES];
        // Eight blocks, of a size that is not said.
        let odd: Vec<u8> = [&[8], &nothing[1..]].concat();
        let refused = Status::CONNECT_INVALID_HOST;
        let table = [
            (Step::Connect, failed(refused), &[][..], Lost::Refused(refused)),
            (Step::Connect, success(1 << 17, 0), &[], Lost::Authentication),
            (Step::Ready, success(2, 0), &[], Lost::Controller),
            (Step::Enable, failed(Status::INVALID_FIELD), &[], Lost::Setup(Status::INVALID_FIELD)),
            (Step::Controller, success(0, 0), &nothing[1..], Lost::Setup(Status::DATA_TRANSFER_ERROR)),
            (Step::Namespaces, success(0, 0), &nothing, Lost::NoNamespace),
            (Step::Descriptors, success(0, 0), &nothing, Lost::CommandSet),
            (Step::Namespace, failed(Status::INVALID_FIELD), &[], Lost::CommandSet),
            (Step::Blocks, success(0, 0), &nothing, Lost::NoNamespace),
            (Step::Blocks, success(0, 0), &odd, Lost::BlockFormat),
            (Step::Blocks, failed(Status::INVALID_NAMESPACE), &[], Lost::NoNamespace),
            (Step::Namespace, failed(Status::INVALID_NAMESPACE), &[], Lost::NoNamespace),
        ];
        for (step, cqe, data, want) in table {
            assert_eq!(next(step, &cqe, data, &settings, &mut Facts::unknown()), Err(want), "{step:?}");
        }
    }

    #[test]
    fn random_pages_never_panic_and_what_is_taken_makes_sense() {
        let mut random = octokv_base::Random::new(11);
        let steps = [Step::Controller, Step::Namespaces, Step::Descriptors, Step::Namespace, Step::Blocks];
        let mut page = vec![0; identify::PAGE_BYTES];
        let mut taken = 0;
        for round in 0..20_000u32 {
            random.fill(&mut page);
            if round % 2 == 0 {
                // Nearly right: no metadata, few blocks, a format that there is.
                page[..8].copy_from_slice(&random.below(1 << 40).to_le_bytes());
                (page[25], page[26]) = (63, page[26] & 0x6f);
                page[128..384].chunks_mut(4).for_each(|format| (format[0], format[1]) = (0, 0));
            }
            let cut = if random.one_in(8) { random.below(4097) as usize } else { 4096 };
            let mut facts = Facts::unknown();
            for step in steps {
                let _ = next(step, &success(0, 0), &page[..cut], &Settings::default(), &mut facts);
            }
            if let Some(blocks) = facts.blocks {
                taken += 1;
                let most = blocks.command_bytes_max(facts.data_bytes_max);
                assert!(blocks.block_bytes.is_power_of_two() && (512..=65536).contains(&blocks.block_bytes));
                assert!(most > 0 && most % blocks.block_bytes == 0 && most <= facts.data_bytes_max);
                assert!(facts.size_bytes > 0 && facts.used_bytes <= facts.size_bytes);
            }
        }
        assert!(taken > 100, "{taken} pages of blocks were right");
    }
}
