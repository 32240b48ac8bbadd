//! Admin commands: Identify, log pages, features and asynchronous events, as hosts use them.

use crate::common::*;
use octokv_base::{NamespaceId, Nanos};
use octokv_wire::fabrics::{self, ControllerConfiguration, NEW_CONTROLLER, property};
use octokv_wire::identify::{self, NamespaceDescriptor, cns};
use octokv_wire::kv::opcode;
use octokv_wire::log_page::{self, CommandEffectsLog, ErrorEntry, HealthLog, id};
use octokv_wire::queue_entry::{admin, csi, event, feature};
use octokv_wire::{Sqe, Status, vendor};

fn list(host: &mut TestHost, page: u8, command_set: u8, after: u32) -> Vec<u32> {
    let response = host.identify(page, command_set, after);
    assert!(response.status().is_success(), "{:?}", response.status());
    identify::decode_page::<identify::NamespaceIdList>(&response.data).unwrap().ids().map(|id| id.0).collect()
}

#[test]
fn identify_controller_has_the_fields_that_linux_and_spdk_require() {
    let target = target();
    let mut host = TestHost::admin(&target);
    let response = host.identify(cns::CONTROLLER, 0, 0);
    let page: &identify::IdentifyController = identify::decode_page(&response.data).unwrap();
    assert_eq!(page.controller_id.get(), target.controllers()[0].id);
    assert_eq!((page.controller_type, page.multi_path, page.version.get()), (1, 0b1010, 0x20000));
    assert_eq!((page.sqe_sizes, page.cqe_sizes), (0x66, 0x44));
    // Linux rejects a controller that supports ANA and whose MNAN is 0 or above NN.
    assert_eq!(
        (page.namespace_id_max.get(), page.namespaces_max.get(), page.commands_max.get()),
        (1024, 1024, 1024)
    );
    assert_eq!((page.write_cache, page.nvm_commands.get()), (0b101, 0x8d));
    assert_eq!((page.ana_groups.get(), page.ana_group_id_max.get(), page.ana_capabilities), (32, 32, 0x5f));
    assert_eq!(page.events.get(), event::NAMESPACE_CHANGED_BIT | event::ANA_CHANGED_BIT);
    assert_eq!((page.capsule_data_bytes(), page.data_bytes_max()), (16 * 1024, Some(2 << 20)));
    assert_eq!(page.response_capsule_units.get(), 1);
    assert!(page.keep_alive_granularity.get() > 0 && page.sgl_support.get() & 3 != 0);
    assert!(page.subsystem.starts_with(NQN.as_bytes()));
    assert_eq!(page.vendor_capabilities().unwrap().key_bytes_max, 1024);
    let features = vendor::FEATURE_LONG_KEYS | vendor::FEATURE_ITERATORS;
    assert_eq!(page.vendor_capabilities().unwrap().features, features);
}

#[test]
fn namespaces_are_listed_and_described_by_every_page() {
    let mut host = TestHost::admin(&target());
    assert_eq!(list(&mut host, cns::NAMESPACE_LIST, 0, 0), [1, 2]);
    assert_eq!(list(&mut host, cns::NAMESPACE_LIST, 0, 1), [2]);
    assert_eq!(list(&mut host, cns::NAMESPACE_LIST_OF_SET, csi::KEY_VALUE, 0), [1, 2]);
    assert!(list(&mut host, cns::NAMESPACE_LIST_OF_SET, csi::NVM, 0).is_empty());
    assert_eq!(list(&mut host, cns::ALLOCATED_LIST, 0, 0), [1, 2]);
    let response = host.identify(cns::NAMESPACE, 0, 1);
    let page: &identify::IdentifyNamespace = identify::decode_page(&response.data).unwrap();
    assert_eq!((page.size.get(), page.capacity.get(), page.used.get()), (1 << 18, 1 << 18, 256));
    let response = host.identify(cns::NAMESPACE_OF_SET, csi::KEY_VALUE, 2);
    let page: &identify::IdentifyKvNamespace = identify::decode_page(&response.data).unwrap();
    assert_eq!((page.size_bytes.get(), page.used_bytes.get(), page.nguid), (1 << 30, 1 << 20, [2; 16]));
    assert_eq!(page.kv_formats[0].key_bytes_max.get(), 16);
    assert_eq!(page.kv_formats[0].value_bytes_max.get(), 2 << 20);
    let response = host.identify(cns::DESCRIPTORS, 0, 2);
    let descriptors = identify::decode_descriptors(&response.data);
    assert_eq!(
        descriptors,
        [NamespaceDescriptor::Nguid([2; 16]), NamespaceDescriptor::CommandSet(csi::KEY_VALUE)]
    );
    let response = host.identify(cns::NAMESPACE_INDEPENDENT, 0, 1);
    assert_eq!(response.data[14] & 1, 1, "ready");
    let response = host.identify(cns::COMMAND_SETS, 0, 0);
    assert_eq!(response.data[..16], [3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
}

#[test]
fn unsupported_identify_pages_fail() {
    let mut host = TestHost::admin(&target());
    for (page, command_set, nsid, status) in [
        (cns::NAMESPACE, 0, 1025, Status::INVALID_NAMESPACE),
        (cns::NAMESPACE, 0, 0, Status::INVALID_NAMESPACE),
        (cns::NAMESPACE, 0, u32::MAX, Status::INVALID_NAMESPACE),
        (cns::DESCRIPTORS, 0, 0, Status::INVALID_NAMESPACE),
        (cns::DESCRIPTORS, 0, 9, Status::INVALID_NAMESPACE),
        (cns::NAMESPACE_OF_SET, csi::KEY_VALUE, 2000, Status::INVALID_NAMESPACE),
        (cns::NAMESPACE_OF_SET, csi::NVM, 1, Status::INVALID_FIELD),
        (cns::NAMESPACE_OF_SET, 2, 1, Status::INVALID_FIELD),
        (cns::CONTROLLER_OF_SET, 2, 0, Status::INVALID_FIELD),
        (cns::NAMESPACE_LIST, 0, u32::MAX, Status::INVALID_NAMESPACE),
        (0x77, 0, 0, Status::INVALID_FIELD),
    ] {
        let response = host.identify(page, command_set, nsid);
        assert!(response.status().is(status) && response.data.is_empty(), "CNS {page:02x} NSID {nsid:x}");
    }
    // Unused identifiers up to NN are inactive namespaces.
    for page in [cns::NAMESPACE, cns::NAMESPACE_INDEPENDENT] {
        assert_eq!(host.identify(page, 0, 9).data, [0; 4096], "CNS {page:02x}");
    }
    assert_eq!(host.identify(cns::NAMESPACE_OF_SET, csi::KEY_VALUE, 9).data, [0; 4096]);
    for command_set in [csi::NVM, csi::KEY_VALUE] {
        assert!(host.identify(cns::CONTROLLER_OF_SET, command_set, 0).status().is_success());
    }
    assert_eq!(host.identify(0x13, 0, 0).data[..4], [1, 0, 1, 0], "the list of controllers");
}

#[test]
fn a_host_without_the_kv_command_set_sees_no_kv_namespace() {
    let mut host = TestHost::initialized(&target(), false, false);
    host.connect(0, NEW_CONTROLLER).unwrap();
    host.set_property(property::CC, u64::from(ControllerConfiguration::ENABLED_NVM.0));
    assert!(list(&mut host, cns::NAMESPACE_LIST, 0, 0).is_empty());
}

#[test]
fn a_short_host_buffer_gets_the_start_of_the_page() {
    let mut host = TestHost::admin(&target());
    let mut sqe = Sqe::new(admin::IDENTIFY, 900);
    sqe.cdw10 = u32::from(cns::CONTROLLER).into();
    sqe.sgl = octokv_wire::Sgl::transport(64);
    assert_eq!(host.run(sqe, &[]).data.len(), 64);
}

#[test]
fn the_effects_log_names_every_key_value_command() {
    let mut host = TestHost::admin(&target());
    let response = host.log(id::EFFECTS, csi::KEY_VALUE, 0, 4096);
    let effects: &CommandEffectsLog = identify::decode_page(&response.data).unwrap();
    for (opcode, want) in [
        (opcode::STORE, 3),
        (opcode::DELETE, 3),
        (opcode::RETRIEVE, 1),
        (opcode::LIST, 1),
        (opcode::EXIST, 1),
        (opcode::FLUSH, 1),
        (0x81, 3),
        (0x83, 1),
        (0x05, 0),
    ] {
        let found = effects.io[usize::from(opcode)].get();
        // No further bits and no scope: other bits make Linux warn, and some freeze its queues.
        assert_eq!(found, want, "{opcode:02x}");
    }
    assert_eq!(effects.admin[usize::from(admin::IDENTIFY)].get(), 1 | log_page::SCOPE_CONTROLLER);
    let response = host.log(id::EFFECTS, csi::NVM, 0, 4096);
    let effects: &CommandEffectsLog = identify::decode_page(&response.data).unwrap();
    for (opcode, want) in [(0, 1), (1, 3), (2, 1), (5, 1), (8, 3), (9, 3), (0x0c, 1), (0x10, 0), (0x14, 0)] {
        assert_eq!(effects.io[opcode].get(), want, "{opcode:02x}");
    }
    assert!(host.log(id::EFFECTS, 9, 0, 4096).status().is(Status::INVALID_FIELD));
}

#[test]
fn log_pages_are_read_by_offset_and_padded_with_zeros() {
    let mut host = TestHost::admin(&target());
    let whole = host.log(id::EFFECTS, csi::KEY_VALUE, 0, 4096).data;
    let mut pieces = Vec::new();
    for offset in (0..4096).step_by(512) {
        pieces.extend(host.log(id::EFFECTS, csi::KEY_VALUE, offset, 512).data);
    }
    assert_eq!(pieces, whole);
    assert_eq!(host.log(id::FIRMWARE, 0, 508, 8).data, [0; 8]);
    assert_eq!(host.log(id::FIRMWARE, 0, 1 << 40, 8).data, [0; 8]);
    assert!(host.log(id::FIRMWARE, 0, 0, 1 << 30).status().is(Status::INVALID_FIELD), "bounded");
    assert!(host.log(id::DISCOVERY, 0, 0, 1024).status().is(Status::INVALID_LOG_PAGE));
    assert!(host.log(0xee, 0, 0, 1024).status().is(Status::INVALID_LOG_PAGE));
    assert_eq!(host.log(id::SUPPORTED, 0, 0, 1024).data[4 * 5], 1);
    assert_eq!(host.log(id::ANA, 0, 0, 1024).data[..10], [1, 0, 0, 0, 0, 0, 0, 0, 1, 0]);
}

#[test]
fn health_and_errors_are_counted() {
    let target = target();
    let mut host = TestHost::admin(&target);
    let mut io = TestHost::io(&host, 1);
    io.store(b"k", &value(1000), 0);
    io.key_command(0xff, b"k");
    io.advance_time(Nanos::from_millis(10));
    let response = host.log(id::HEALTH, 0, 0, 512);
    let health: &HealthLog = identify::decode_page(&response.data).unwrap();
    assert_eq!((health.writes.get(), health.units_written.get(), health.errors.get()), (1, 1, 1));
    let response = host.log(id::ERROR, 0, 0, 64);
    let entry: &ErrorEntry = identify::decode_page(&response.data).unwrap();
    assert_eq!((entry.count.get(), entry.queue_id.get(), entry.nsid.get()), (1, 1, 1));
    assert!(Status::from_field(entry.status.get()).is(Status::INVALID_OPCODE));
}

#[test]
fn features_store_valid_values_only() {
    let mut host = TestHost::admin(&target());
    // 8 queues of each kind are granted as requested, 65535 are not.
    assert_eq!(host.set_feature(feature::QUEUES, 0, 0x0007_0007).dw0(), 0x0007_0007);
    assert_eq!(host.set_feature(feature::QUEUES, 0, 0x00ff_00ff).dw0(), 0x003f_003f);
    assert_eq!(host.get_feature(feature::QUEUES, 0).dw0(), 0x003f_003f);
    assert!(host.set_feature(feature::QUEUES, 0, 0xffff_ffff).status().is(Status::INVALID_FIELD));
    assert!(host.set_feature(feature::KEEP_ALIVE, 0, 15_000).status().is_success());
    assert_eq!(host.get_feature(feature::KEEP_ALIVE, 0).dw0(), 15_000);
    assert!(host.set_feature(feature::KEEP_ALIVE, 0, u32::MAX).status().is(Status::KEEP_ALIVE_INVALID));
    assert!(host.set_feature(feature::ASYNC_EVENTS, 0, 0x900).status().is_success());
    assert_eq!(host.get_feature(feature::ASYNC_EVENTS, 0).dw0(), 0x900);
    assert!(host.set_feature(feature::COMMAND_SET_PROFILE, 0, 0).status().is_success());
    let rejected = host.set_feature(feature::COMMAND_SET_PROFILE, 0, 1).status();
    assert!(rejected.is(Status::COMMAND_SET_REJECTED));
    assert_eq!(host.get_feature(feature::WRITE_CACHE, 0).dw0(), 1);
    assert!(host.set_feature(feature::WRITE_CACHE, 0, 0).status().is_success());
    assert_eq!(host.get_feature(feature::WRITE_CACHE, 0).dw0(), 0);
    let default = u32::from(feature::WRITE_CACHE) | 1 << 8;
    assert_eq!(host.admin_command(admin::GET_FEATURES, 0, default, 0).dw0(), 1);
    assert!(host.set_feature(feature::HOST_IDENTIFIER, 0, 1).status().is(Status::COMMAND_SEQUENCE_ERROR));
    let host_id = host.admin_command(admin::GET_FEATURES, 0, u32::from(feature::HOST_IDENTIFIER), 1);
    assert_eq!(host_id.data, [9; 16]);
    for unknown in [0x00, 0x0d, 0x11, 0x99, 0xff] {
        assert!(host.get_feature(unknown, 0).status().is(Status::INVALID_FIELD), "{unknown:02x}");
        assert!(host.set_feature(unknown, 0, 0).status().is(Status::INVALID_FIELD), "{unknown:02x}");
    }
    let save = u32::from(feature::KEEP_ALIVE) | 1 << 31;
    let saved = host.admin_command(admin::SET_FEATURES, 0, save, 1000);
    assert!(saved.status().is(Status::FEATURE_NOT_SAVEABLE));
    let supported = u32::from(feature::KV_CONFIGURATION) | 3 << 8;
    assert_eq!(host.admin_command(admin::GET_FEATURES, 1, supported, 0).dw0(), 0b110);
}

#[test]
fn a_reset_forgets_features_and_event_requests() {
    let mut host = TestHost::admin(&target());
    host.set_feature(feature::ASYNC_EVENTS, 0, event::NAMESPACE_CHANGED_BIT);
    host.set_feature(feature::KV_CONFIGURATION, 1, 1);
    host.send_command(&Sqe::new(admin::ASYNC_EVENT_REQUEST, 500), &[]);
    host.set_property(property::CC, 0);
    host.enable();
    assert_eq!(host.get_feature(feature::ASYNC_EVENTS, 0).dw0(), 0);
    assert_eq!(host.get_feature(feature::KV_CONFIGURATION, 1).dw0(), 0);
    host.send_command(&Sqe::new(admin::ASYNC_EVENT_REQUEST, 500), &[]);
    assert!(host.received_pdus.is_empty(), "the identifier is free again");
}

#[test]
fn event_requests_complete_with_enabled_events() {
    let target = target();
    let mut host = TestHost::admin(&target);
    host.set_feature(feature::ASYNC_EVENTS, 0, event::NAMESPACE_CHANGED_BIT);
    for id in 500..504 {
        host.send_command(&Sqe::new(admin::ASYNC_EVENT_REQUEST, id), &[]);
    }
    assert!(host.received_pdus.is_empty());
    host.send_command(&Sqe::new(admin::ASYNC_EVENT_REQUEST, 504), &[]);
    assert!(host.next_response().status().is(Status::EVENT_LIMIT_EXCEEDED));
    target.notify_namespace_changed(NamespaceId(2));
    host.advance_time(Nanos::from_millis(600));
    let response = host.next_response();
    assert_eq!((response.status(), response.dw0()), (Status::SUCCESS, event::NAMESPACE_CHANGED));
    target.notify_namespace_changed(NamespaceId(1));
    host.advance_time(Nanos::from_millis(600));
    assert!(host.received_pdus.is_empty(), "masked until the log is read");
    // The read's completion comes first, then the event that the read unmasks.
    host.connection.send_buffer();
    let response = host.log(id::CHANGED_NAMESPACES, 0, 0, 4096);
    assert_eq!(response.data[..12], [1, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(host.next_response().dw0(), event::NAMESPACE_CHANGED);
    assert_eq!(host.log(id::CHANGED_NAMESPACES, 0, 0, 4096).data, [0; 4096]);
}

#[test]
fn an_event_request_can_be_aborted_and_nothing_else() {
    let mut host = TestHost::admin(&target());
    host.send_command(&Sqe::new(admin::ASYNC_EVENT_REQUEST, 500), &[]);
    host.send_command(&Sqe::new(admin::ASYNC_EVENT_REQUEST, 500), &[]);
    assert!(host.next_response().status().is(Status::COMMAND_ID_CONFLICT));
    assert_eq!(host.admin_command(admin::ABORT, 0, 501 << 16, 0).dw0(), 1);
    assert_eq!(host.admin_command(admin::ABORT, 0, 500 << 16 | 1, 0).dw0(), 1);
    let aborted = host.admin_command(admin::ABORT, 0, 500 << 16, 0);
    assert_eq!((aborted.status(), aborted.cqe.command_id.get()), (Status::ABORT_REQUESTED, 500));
    assert_eq!(host.next_response().dw0(), 0);
}

#[test]
fn a_property_command_may_reuse_the_identifier_of_an_event_request() {
    // SPDK's host does this to shut a controller down.
    let mut host = TestHost::admin(&target());
    host.send_command(&Sqe::new(admin::ASYNC_EVENT_REQUEST, 500), &[]);
    let get = fabrics::FabricsCommand::PropertyGet { offset: property::CC, is_64_bit: false };
    let response = host.run(get.encode(500), &[]);
    assert_eq!((response.status(), response.dw0()), (Status::SUCCESS, ControllerConfiguration::ENABLED.0));
    assert_eq!(host.admin_command(admin::ABORT, 0, 500 << 16, 0).dw0(), 1, "the event request is released");
    // Commands other than Fabrics commands conflict.
    host.send_command(&Sqe::new(admin::ASYNC_EVENT_REQUEST, 501), &[]);
    host.send_command(&Sqe::new(admin::GET_FEATURES, 501), &[]);
    assert!(host.next_response().status().is(Status::COMMAND_ID_CONFLICT));
}

#[test]
fn unknown_admin_commands_and_properties_fail() {
    let mut host = TestHost::admin(&target());
    for opcode in [0x00, 0x01, 0x04, 0x05, 0x0d, 0x10, 0x11, 0x15, 0x80, 0xc0, 0xff] {
        let status = host.admin_command(opcode, 0, 0, 0).status();
        assert!(status.is(Status::INVALID_OPCODE), "{opcode:02x}: {status:?}");
    }
    let id = host.id();
    let wrong = [
        octokv_wire::fabrics::FabricsCommand::PropertyGet { offset: 0x30, is_64_bit: false },
        octokv_wire::fabrics::FabricsCommand::PropertyGet { offset: property::CAP, is_64_bit: false },
        octokv_wire::fabrics::FabricsCommand::PropertyGet { offset: property::CC, is_64_bit: true },
        octokv_wire::fabrics::FabricsCommand::PropertySet {
            offset: property::CAP,
            is_64_bit: true,
            value: 0,
        },
        octokv_wire::fabrics::FabricsCommand::PropertySet {
            offset: property::CSTS,
            is_64_bit: false,
            value: 0,
        },
    ];
    for command in wrong {
        assert!(host.run(command.encode(id), &[]).status().is(Status::INVALID_FIELD), "{command:?}");
    }
    // nvme-cli's show-regs reads every register and continues only after the bare status.
    let absent = octokv_wire::fabrics::FabricsCommand::PropertyGet { offset: 0x0c, is_64_bit: false };
    assert_eq!(host.run(absent.encode(id), &[]).status(), Status::INVALID_FIELD);
    let authentication = octokv_wire::fabrics::FabricsCommand::AuthenticationSend.encode(id);
    assert!(host.run(authentication, &[]).status().is(Status::INVALID_OPCODE));
}

#[test]
fn an_unsupported_cc_fails_the_controller_until_it_is_reset() {
    let mut host = TestHost::initialized(&target(), false, false);
    host.connect(0, NEW_CONTROLLER).unwrap();
    host.set_property(property::CC, u64::from(ControllerConfiguration::ENABLED.0 | 1 << 7));
    assert_eq!(host.get_property(property::CSTS, false), 2);
    assert!(host.identify(cns::CONTROLLER, 0, 0).status().is(Status::COMMAND_SEQUENCE_ERROR));
    host.set_property(property::CC, 0);
    host.enable();
}
