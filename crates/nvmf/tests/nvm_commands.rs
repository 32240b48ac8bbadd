//! NVM commands: data in both directions, limits, the write cache, statuses, and the pages that describe
//! block namespaces.

use crate::common::*;
use octokv_base::{Lba, NamespaceId};
use octokv_nvmf::{LbaRange, NamespaceInfo, RequestOperation, RequestOutcome};
use octokv_wire::fabrics::{ControllerConfiguration, NEW_CONTROLLER, property};
use octokv_wire::identify::{self, NamespaceDescriptor, cns};
use octokv_wire::log_page::{ErrorEntry, HealthLog, id};
use octokv_wire::nvm::{NvmCommand, encode_range};
use octokv_wire::queue_entry::{admin, csi, feature};
use octokv_wire::{Sgl, Sqe, Status, kv};

/// The block namespaces of a mixed target with their block sizes.
const NAMESPACES: [(u32, u32); 2] = [(2, 512), (3, 4096)];

fn queue() -> (TestHost, TestHost) {
    let admin = TestHost::admin(&mixed_target());
    let io = TestHost::io(&admin, 1);
    (admin, io)
}

fn range(lba: u64, blocks: u32) -> LbaRange {
    LbaRange { lba: Lba(lba), blocks }
}

fn write(lba: u64, blocks: u32) -> NvmCommand {
    NvmCommand::Write { range: range(lba, blocks), force_unit_access: false }
}

fn read(lba: u64, blocks: u32) -> NvmCommand {
    NvmCommand::Read { range: range(lba, blocks) }
}

fn deallocate(io: &mut TestHost, namespace: u32, ranges: &[LbaRange]) -> Status {
    let mut data = Vec::new();
    ranges.iter().for_each(|&range| encode_range(range, &mut data));
    let command = NvmCommand::DatasetManagement { ranges: ranges.len() as u32, deallocate: true };
    io.block_command(namespace, command, &data).status()
}

#[test]
fn blocks_round_trip_with_and_without_digests() {
    for (header_digest, data_digest) in [(false, false), (true, false), (false, true), (true, true)] {
        let admin = TestHost::admin_with(&mixed_target(), header_digest, data_digest);
        let mut io = TestHost::io_with(&admin, 1, header_digest, data_digest);
        for (namespace, block) in NAMESPACES {
            // In the capsule, by R2T, and up to MDTS.
            for blocks in [1, 4, 100, (2 << 20) / block] {
                let data = value((blocks * block) as usize);
                assert!(io.block_command(namespace, write(7, blocks), &data).status().is_success());
                let response = io.block_command(namespace, read(7, blocks), &[]);
                assert_eq!(
                    (response.status(), response.dw0(), response.data.len()),
                    (Status::SUCCESS, 0, data.len())
                );
                assert_eq!(response.data, data, "{blocks} blocks of {block} B");
            }
            let beside = io.block_command(namespace, read(6, 1), &[]).data;
            assert_eq!(beside, vec![0; block as usize]);
        }
    }
}

#[test]
fn opcode_01h_is_store_or_write_by_the_namespaces_command_set() {
    let (_admin, mut io) = queue();
    assert!(io.store(b"k", b"value", 0).status().is_success());
    assert!(io.block_command(2, write(0, 1), &value(512)).status().is_success());
    assert_eq!(io.retrieve(b"k", 100).data, b"value");
    assert_eq!(io.block_command(2, read(0, 1), &[]).data, value(512));
    assert!(io.engine.values.len() == 1 && io.engine.blocks.len() == 1);
    let id = io.id();
    let mut exist = Sqe::new(kv::opcode::EXIST, id);
    exist.nsid = 2.into();
    assert!(io.run(exist, &[]).status().is(Status::INVALID_OPCODE));
    for opcode in [0x04, 0x06, 0x0d, 0x0e, 0x10, 0x11, 0x14, 0x15, 0x19, 0x81, 0xff] {
        let id = io.id();
        let mut sqe = Sqe::new(opcode, id);
        sqe.nsid = 3.into();
        assert!(io.run(sqe, &[]).status().is(Status::INVALID_OPCODE), "{opcode:02x}");
    }
}

#[test]
fn blocks_beyond_the_end_are_out_of_range_and_transfers_beyond_mdts_invalid() {
    let (_admin, mut io) = queue();
    for (namespace, block) in NAMESPACES {
        let end = (64 << 20) / u64::from(block);
        let most = (2 << 20) / block;
        let commands = |range: LbaRange| {
            [
                NvmCommand::Read { range },
                NvmCommand::Write { range, force_unit_access: true },
                NvmCommand::Compare { range },
                NvmCommand::WriteZeroes { range, force_unit_access: false, deallocate: true },
                NvmCommand::Verify { range },
            ]
        };
        let table = [
            (range(end, 1), Status::LBA_OUT_OF_RANGE),
            (range(end - 1, 2), Status::LBA_OUT_OF_RANGE),
            (range(u64::MAX, 1), Status::LBA_OUT_OF_RANGE),
            (range(u64::MAX - 5, 16), Status::LBA_OUT_OF_RANGE),
            (range(0, most + 1), Status::INVALID_FIELD),
            (range(0, 65536), Status::INVALID_FIELD),
        ];
        for (range, want) in table {
            for command in commands(range) {
                let id = io.id();
                let mut sqe = command.encode(id, NamespaceId(namespace));
                sqe.sgl = Sgl::transport(u32::MAX);
                let status = io.run(sqe, &[]).status();
                assert!(status.is(want) && status.is_final(), "{command:?}: {status:?}");
            }
        }
        let last = range(end - 1, 1);
        let data = value(block as usize);
        assert!(io.block_command(namespace, commands(last)[1], &data).status().is_success());
        assert_eq!(io.block_command(namespace, commands(last)[0], &[]).data, data);
    }
    assert!(io.requests.is_empty());
}

#[test]
fn the_sgl_must_cover_the_blocks() {
    let (_admin, mut io) = queue();
    let table = [
        (read(0, 2), Sgl::transport(1023), 0, Status::INVALID_SGL_LENGTH),
        (read(0, 2), Sgl::transport(0), 0, Status::INVALID_SGL_LENGTH),
        (read(0, 2), Sgl::in_capsule(1024), 1024, Status::INVALID_SGL_TYPE),
        (read(0, 2), Sgl::transport(1024), 0, Status::SUCCESS),
        (read(0, 2), Sgl::transport(5000), 0, Status::SUCCESS),
        (write(0, 2), Sgl::in_capsule(1023), 1023, Status::INVALID_SGL_LENGTH),
        (write(0, 2), Sgl::in_capsule(1024), 1000, Status::INVALID_SGL_LENGTH),
        (write(0, 2), Sgl::transport(1023), 0, Status::INVALID_SGL_LENGTH),
        (write(0, 2), Sgl::transport(0), 0, Status::INVALID_SGL_LENGTH),
        (write(0, 2), Sgl::in_capsule(2000), 2000, Status::SUCCESS), // The rest is ignored.
    ];
    for (command, sgl, data_bytes, want) in table {
        let id = io.id();
        let mut sqe = command.encode(id, NamespaceId(2));
        sqe.sgl = sgl;
        let response = io.run(sqe, &value(data_bytes));
        assert!(response.status().is(want), "{command:?} {sgl:?}: {:?}", response.status());
        assert_eq!(response.data.len(), if want.is_success() && command == read(0, 2) { 1024 } else { 0 });
    }
}

#[test]
fn compare_and_verify_check_the_blocks_contents() {
    let (_admin, mut io) = queue();
    let data = value(8192);
    io.block_command(2, write(10, 16), &data);
    let compare = NvmCommand::Compare { range: range(10, 16) };
    assert!(io.block_command(2, compare, &data).status().is_success());
    let mut other = data.clone();
    other[8191] ^= 1;
    assert!(io.block_command(2, compare, &other).status().is(Status::MEDIA_COMPARE_FAILURE));
    // By R2T as well.
    let many = value(40_960);
    io.block_command(2, write(100, 80), &many);
    assert!(io.block_command(2, NvmCommand::Compare { range: range(100, 80) }, &many).status().is_success());
    assert!(io.block_command(2, NvmCommand::Verify { range: range(10, 16) }, &[]).status().is_success());
}

#[test]
fn zeroed_and_deallocated_blocks_read_as_zeros() {
    let (_admin, mut io) = queue();
    io.block_command(3, write(0, 8), &value(8 * 4096));
    let zeroes = NvmCommand::WriteZeroes { range: range(1, 2), force_unit_access: false, deallocate: false };
    assert!(io.block_command(3, zeroes, &[]).status().is_success());
    assert!(deallocate(&mut io, 3, &[range(4, 1), range(0, 0), range(6, 2)]).is_success());
    let left: Vec<u64> = io.engine.blocks.keys().map(|(_, lba)| *lba).collect();
    assert_eq!(left, [0, 3, 5]);
}

#[test]
fn all_ranges_are_checked_before_any_is_deallocated() {
    let (_admin, mut io) = queue();
    io.block_command(3, write(0, 1), &value(4096));
    let end = (64 << 20) / 4096;
    let out = deallocate(&mut io, 3, &[range(0, 1), range(end, 1)]);
    assert!(out.is(Status::LBA_OUT_OF_RANGE));
    assert_eq!(io.engine.blocks.len(), 1);
    assert!(deallocate(&mut io, 3, &[range(u64::MAX, u32::MAX)]).is(Status::LBA_OUT_OF_RANGE));
    assert!(deallocate(&mut io, 3, &[range(u64::MAX, 0)]).is_success(), "an empty range is ignored");
    assert!(deallocate(&mut io, 3, &[range(0, 1); 256]).is_success(), "the most ranges of a command");
    // Linux always sends 4096 bytes of ranges.
    let mut data = Vec::new();
    encode_range(range(0, 1), &mut data);
    data.resize(4096, 0xff);
    let one = NvmCommand::DatasetManagement { ranges: 1, deallocate: true };
    assert!(io.block_command(3, one, &data).status().is_success());
    let id = io.id();
    let mut sqe = one.encode(id, NamespaceId(3));
    sqe.sgl = Sgl::transport(4096);
    io.send_command(&sqe, &[]);
    io.send_requested_data(&data, 16);
    io.execute_requests();
    assert!(io.next_response().status().is_success());
    let short = NvmCommand::DatasetManagement { ranges: 3, deallocate: true };
    assert!(io.block_command(3, short, &data[..47]).status().is(Status::INVALID_SGL_LENGTH));
    let hint = NvmCommand::DatasetManagement { ranges: 3, deallocate: false };
    assert!(io.block_command(3, hint, &data[..48]).status().is_success());
    assert!(io.requests.is_empty());
}

#[test]
fn fused_commands_fail() {
    let (_admin, mut io) = queue();
    for fused in [1, 2] {
        let id = io.id();
        let mut sqe = read(0, 1).encode(id, NamespaceId(2));
        sqe.sgl = Sgl::transport(512);
        sqe.flags |= fused;
        assert!(io.run(sqe, &[]).status().is(Status::INVALID_FIELD));
    }
}

#[test]
fn without_the_write_cache_every_write_is_durable_at_once() {
    let (mut admin, mut io) = queue();
    let zeroes = |force_unit_access| NvmCommand::WriteZeroes {
        range: range(0, 1),
        force_unit_access,
        deallocate: false,
    };
    let write = |force_unit_access| NvmCommand::Write { range: range(0, 1), force_unit_access };
    let mut forced = |command, data: &[u8]| {
        io.block_command(2, command, data);
        io.engine.forced_unit_access.take().unwrap()
    };
    let data = value(512);
    assert!(!forced(write(false), &data) && forced(write(true), &data));
    assert!(!forced(zeroes(false), &[]) && forced(zeroes(true), &[]));
    admin.set_feature(feature::WRITE_CACHE, 0, 0);
    assert!(forced(write(false), &data) && forced(zeroes(false), &[]));
    admin.set_feature(feature::WRITE_CACHE, 0, 1);
    assert!(!forced(write(false), &data));
    // Another controller's setting is independent, and a reset restores the default.
    admin.set_feature(feature::WRITE_CACHE, 0, 0);
    let mut other = TestHost::admin(&admin.target);
    assert_eq!(other.get_feature(feature::WRITE_CACHE, 0).dw0(), 1);
    admin.set_property(property::CC, 0);
    admin.enable();
    assert_eq!(admin.get_feature(feature::WRITE_CACHE, 0).dw0(), 1);
}

#[test]
fn flush_applies_to_one_namespace() {
    let (_admin, mut io) = queue();
    for namespace in 1..=3 {
        assert!(io.block_command(namespace, NvmCommand::Flush, &[]).status().is_success());
    }
    let all = io.block_command(u32::MAX, NvmCommand::Flush, &[]).status();
    assert!(all.is(Status::INVALID_NAMESPACE), "VWC excludes Flush of all namespaces");
}

#[test]
fn every_block_outcome_has_its_status() {
    let (mut admin, mut io) = queue();
    let zeroes = NvmCommand::WriteZeroes { range: range(5, 1), force_unit_access: false, deallocate: false };
    let verify = NvmCommand::Verify { range: range(5, 1) };
    let table = [
        (zeroes, RequestOutcome::WriteFault, Status::MEDIA_WRITE_FAULT),
        (zeroes, RequestOutcome::Unrecovered, Status::MEDIA_WRITE_FAULT),
        (zeroes, RequestOutcome::CapacityExceeded, Status::KV_CAPACITY_EXCEEDED),
        (zeroes, RequestOutcome::NotReady, Status::NAMESPACE_NOT_READY),
        (zeroes, RequestOutcome::Busy, Status::COMMAND_INTERRUPTED),
        (NvmCommand::Flush, RequestOutcome::WriteFault, Status::MEDIA_WRITE_FAULT),
        (read(5, 1), RequestOutcome::Unrecovered, Status::MEDIA_UNRECOVERED_READ),
        (read(5, 1), RequestOutcome::NotReady, Status::NAMESPACE_NOT_READY),
        (read(5, 1), RequestOutcome::Busy, Status::COMMAND_INTERRUPTED),
        (verify, RequestOutcome::Unrecovered, Status::MEDIA_UNRECOVERED_READ),
        (verify, RequestOutcome::Mismatch, Status::MEDIA_COMPARE_FAILURE),
    ];
    for (command, outcome, want) in table {
        let id = io.id();
        let mut sqe = command.encode(id, NamespaceId(3));
        sqe.sgl = Sgl::transport(4096);
        io.send_command(&sqe, &[]);
        let slot = io.requests.pop().unwrap().slot;
        io.connection.complete(slot, outcome);
        io.drain();
        assert!(io.next_response().status().is(want), "{command:?}");
    }
    // Device failures are in the error log with their block; invalid requests are not.
    let page = admin.log(id::ERROR, 0, 0, 64).data;
    let newest: &ErrorEntry = identify::decode_page(&page).unwrap();
    assert_eq!((newest.count.get(), newest.lba.get(), newest.nsid.get()), (10, 5, 3));
    assert!(Status::from_field(newest.status.get()).is(Status::MEDIA_UNRECOVERED_READ));
    io.advance_time(octokv_base::Nanos::from_millis(1));
    let page = admin.log(id::HEALTH, 0, 0, 512).data;
    let health: &HealthLog = identify::decode_page(&page).unwrap();
    assert_eq!((health.media_errors.get(), health.errors.get()), (5, 10));
}

#[test]
fn health_counts_commands_and_bytes_of_both_kinds() {
    let (mut admin, mut io) = queue();
    let data = value(1 << 20);
    io.block_command(3, write(0, 256), &data);
    io.block_command(3, NvmCommand::Compare { range: range(0, 256) }, &data);
    io.block_command(3, read(0, 256), &[]);
    io.store(b"k", &value(1000), 0);
    io.retrieve(b"k", 1000);
    io.advance_time(octokv_base::Nanos::from_millis(1));
    let page = admin.log(id::HEALTH, 0, 0, 512).data;
    let health: &HealthLog = identify::decode_page(&page).unwrap();
    assert_eq!((health.reads.get(), health.writes.get()), (3, 2));
    // In units of 512000 bytes, rounded up: 2 MiB and 1000 B, 1 MiB and 1000 B.
    assert_eq!((health.units_read.get(), health.units_written.get()), (5, 3));
}

#[test]
fn every_identify_page_describes_a_block_namespace() {
    let mut host = TestHost::admin(&mixed_target());
    let used = 1 << 20;
    for (namespace, block) in NAMESPACES {
        let response = host.identify(cns::NAMESPACE, 0, namespace);
        let page: &identify::IdentifyNamespace = identify::decode_page(&response.data).unwrap();
        let blocks = (64 << 20) / u64::from(block);
        assert_eq!((page.size.get(), page.capacity.get()), (blocks, blocks));
        assert_eq!(page.used.get(), used / u64::from(block));
        assert_eq!((page.formats, page.format, page.sharing, page.ana_group.get()), (0, 0, 1, 1));
        assert_eq!(page.block_formats[0], [0, 0, block.ilog2() as u8, 0]);
        assert_eq!((page.nguid, page.features, response.data[33]), ([namespace as u8; 16], 0, 0));
        let response = host.identify(cns::NAMESPACE_OF_SET, csi::NVM, namespace);
        assert_eq!(response.data, [0; 4096], "NVM-specific fields are 0");
        let wrong = host.identify(cns::NAMESPACE_OF_SET, csi::KEY_VALUE, namespace).status();
        assert!(wrong.is(Status::INVALID_FIELD));
        let response = host.identify(cns::DESCRIPTORS, 0, namespace);
        let want =
            [NamespaceDescriptor::Nguid([namespace as u8; 16]), NamespaceDescriptor::CommandSet(csi::NVM)];
        assert_eq!(identify::decode_descriptors(&response.data), want);
        let response = host.identify(cns::NAMESPACE_INDEPENDENT, 0, namespace);
        assert_eq!(
            (response.data[1], response.data[4], response.data[14]),
            (1, 1, 1),
            "shared, group 1, ready"
        );
    }
    let response = host.identify(cns::CONTROLLER_OF_SET, csi::NVM, 0);
    let limits: &identify::IdentifyNvmController = identify::decode_page(&response.data).unwrap();
    assert_eq!((limits.verify_pages_log2, limits.zeroes_pages_log2), (9, 9), "as MDTS");
    for (set, want) in [(csi::NVM, vec![2, 3]), (csi::KEY_VALUE, vec![1])] {
        let response = host.identify(cns::NAMESPACE_LIST_OF_SET, set, 0);
        let list: &identify::NamespaceIdList = identify::decode_page(&response.data).unwrap();
        assert_eq!(list.ids().map(|id| id.0).collect::<Vec<_>>(), want);
    }
}

#[test]
fn a_host_without_the_kv_command_set_cannot_see_or_access_kv_namespaces() {
    let mut admin = TestHost::initialized(&mixed_target(), false, false);
    admin.connect(0, NEW_CONTROLLER).unwrap();
    admin.set_property(property::CC, u64::from(ControllerConfiguration::ENABLED_NVM.0));
    for page in [cns::NAMESPACE_LIST, cns::ALLOCATED_LIST] {
        let response = admin.identify(page, 0, 0);
        let list: &identify::NamespaceIdList = identify::decode_page(&response.data).unwrap();
        assert_eq!(list.ids().collect::<Vec<_>>(), [NamespaceId(2), NamespaceId(3)]);
    }
    assert_eq!(admin.identify(cns::NAMESPACE, 0, 1).data, [0; 4096], "inactive");
    let group = admin.log(id::ANA, 0, 0, 64).data;
    assert_eq!((group[20], group[48], group[52], group[56]), (2, 2, 3, 0), "namespaces 2 and 3");
    let mut io = TestHost::io(&admin, 1);
    assert!(io.store(b"k", b"v", 0).status().is(Status::INVALID_NAMESPACE));
    assert!(io.block_command(2, write(0, 1), &value(512)).status().is_success());
}

#[test]
fn reads_in_flight_count_against_the_unsent_limit() {
    let (_admin, mut io) = queue();
    let mut stalled = false;
    for _ in 0..40 {
        let id = io.id();
        let mut sqe = read(0, 4096).encode(id, NamespaceId(2));
        sqe.sgl = Sgl::transport(2 << 20);
        io.send_command(&sqe, &[]);
        stalled |= io.last.unwrap().stalled.is_some();
    }
    // The limit is 32 MiB: each Read adds 2 MiB, and one more is accepted before the limit is exceeded.
    assert!(stalled && io.connection.in_flight() <= 17, "{}", io.connection.in_flight());
}

#[test]
fn aborting_a_command_at_the_engine_reports_not_aborted() {
    let (mut admin, mut io) = queue();
    let id = io.id();
    let mut sqe = read(0, 1).encode(id, NamespaceId(2));
    sqe.sgl = Sgl::transport(512);
    io.send_command(&sqe, &[]);
    let aborted = admin.admin_command(admin::ABORT, 0, u32::from(id) << 16 | 1, 0);
    assert_eq!((aborted.status(), aborted.dw0()), (Status::SUCCESS, 1), "not aborted");
    io.execute_requests();
    assert!(io.next_response().status().is_success());
}

#[test]
fn namespaces_have_separate_blocks() {
    let (admin, mut io) = queue();
    let NamespaceInfo { nguid, .. } = admin.target.namespaces().get(NamespaceId(2)).cloned().unwrap();
    assert_eq!(nguid, [2; 16]);
    io.block_command(2, write(0, 8), &value(4096));
    assert_eq!(io.block_command(3, read(0, 1), &[]).data, [0; 4096]);
    let id = io.id();
    let mut sqe = write(0, 1).encode(id, NamespaceId(3));
    sqe.sgl = Sgl::in_capsule(4096);
    io.send_command(&sqe, &value(4096));
    let request = io.requests.pop().unwrap();
    assert_eq!(request.namespace, NamespaceId(3));
    assert!(
        matches!(request.operation, RequestOperation::Write { lba: Lba(0), ref data, .. } if data.len() == 4096)
    );
}
