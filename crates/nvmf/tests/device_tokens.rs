//! Tokens of devices: feature C0h, log C1h and DW1 of completions.

use crate::common::*;
use octokv_base::ShortKey;
use octokv_nvmf::SubsystemConfig;
use octokv_nvmf::{HostWeights, NamespaceInfo, Target, TokenCommand, TokenShares, TokenSource};
use octokv_wire::device_log::{DeviceEntry, DeviceLog, LoggedCost};
use octokv_wire::kv::{self, opcode};
use octokv_wire::queue_entry::{Sqe, admin, feature};
use octokv_wire::{Status, log_page};
use std::collections::BTreeMap;
use std::sync::Arc;

/// The device of a key is its first byte; device n has 100 × n tokens, none of which is free, and a command costs 10.
#[derive(Debug)]
struct TestTokens;

impl TokenSource for TestTokens {
    fn device_of(&self, key: &[u8]) -> u8 {
        key[0]
    }
    fn devices_max(&self) -> usize {
        10
    }
    fn capacity(&self, device: u8) -> u32 {
        u32::from(device) * 100
    }
    fn free_tokens(&self, _device: u8) -> u32 {
        0
    }
    fn cost(&self, _device: u8, _command: TokenCommand) -> u32 {
        10
    }
    fn device_log(&self) -> DeviceLog {
        let cost = LoggedCost { tokens: 16, tokens_per_4k: 16 };
        let entry = |free| DeviceEntry { capacity: 512, free, get: cost, put: cost, delete: cost };
        DeviceLog { hash_seed: 7, map: [1; 256], devices: vec![entry(0), entry(100)] }
    }
}

/// A target whose namespace 1 has tokens and namespace 2 none.
fn target_with_tokens() -> Arc<Target> {
    let with_tokens = NamespaceInfo { tokens: Some(TokenShares::new(Arc::new(TestTokens))), ..namespace(1) };
    Target::new(SubsystemConfig::new(NQN), vec![with_tokens, namespace(2)])
}

fn tokens_of(response: &CommandResponse) -> u32 {
    assert_eq!(response.cqe.dw1.get() & 0xffff, 0);
    response.cqe.dw1.get() >> 16
}

#[test]
fn completions_have_the_tokens_of_their_device_once_the_host_asked() {
    let admin = &mut TestHost::admin(&target_with_tokens());
    let mut io = TestHost::io(admin, 1);
    let key = [3, 1];
    assert_eq!(tokens_of(&io.store(&key, b"value", 0)), 0, "it has not asked");
    assert_eq!(admin.get_feature(feature::DEVICE_TOKENS, 0).dw0(), 0);
    assert_eq!(admin.set_feature(feature::DEVICE_TOKENS, 0, 1).status(), Status::SUCCESS);
    assert_eq!(admin.get_feature(feature::DEVICE_TOKENS, 0).dw0(), 1);
    assert_eq!(tokens_of(&io.store(&key, b"value", 0)), 300);
    assert_eq!(tokens_of(&io.store_by_transfer(&key, &value(100_000), 5000)), 300);
    let large = io.retrieve(&key, 1 << 20);
    assert_eq!((tokens_of(&large), large.data.len(), large.dw0()), (300, 100_000, 100_000));
    assert_eq!(tokens_of(&io.store(&[4], b"short", 0)), 400);
    let short = io.retrieve(&[4], 4096);
    assert_eq!((tokens_of(&short), short.dw0(), short.data), (400, 5, b"short".to_vec()));
    assert_eq!(tokens_of(&io.key_command(opcode::DELETE, &[2])), 200);
    let missing = io.key_command(opcode::EXIST, &[9]);
    assert_eq!((tokens_of(&missing), missing.status().is_success()), (900, false));
    assert_eq!(admin.set_feature(feature::DEVICE_TOKENS, 0, 0).status(), Status::SUCCESS);
    assert_eq!(tokens_of(&io.retrieve(&key, 16)), 0);
}

#[test]
fn hosts_whose_commands_are_on_a_device_share_it_by_their_weights() {
    let target = target_with_tokens();
    let admin = &mut TestHost::admin(&target);
    let mut io = TestHost::io(admin, 1);
    let other = &mut TestHost::admin(&target);
    let mut other_io = TestHost::io(other, 1);
    for host in [&mut *admin, &mut *other] {
        assert!(host.set_feature(feature::DEVICE_TOKENS, 0, 1).status().is_success());
    }
    assert_eq!(tokens_of(&io.store(&[4], b"value", 0)), 400, "the other has no command there");
    let mut exist = Sqe::new(opcode::EXIST, other_io.id());
    exist.nsid = NSID.0.into();
    kv::set_key(&mut exist, &ShortKey::new(&[4]).unwrap(), 0);
    other_io.send_command(&exist, &[]);
    assert_eq!(tokens_of(&io.store(&[4], b"value", 0)), 200);
    assert_eq!(tokens_of(&io.store(&[5], b"value", 0)), 500, "nor on another device");
    target.set_host_weights(HostWeights { of_hosts: BTreeMap::from([(HOST_NQN.to_owned(), 5)]), default: 2 });
    // What the other has in flight has the weight with which it began.
    assert_eq!(tokens_of(&io.store(&[4], b"value", 0)), 334);
    drop(other_io);
    assert_eq!(tokens_of(&io.store(&[4], b"value", 0)), 400, "its connection is gone");
}

#[test]
fn the_log_has_the_devices_and_the_tokens_of_the_host() {
    let admin = &mut TestHost::admin(&target_with_tokens());
    let page = log_page::id::DEVICES;
    let read = |admin: &mut TestHost, namespace| {
        let dwords: u32 = (288 + 2 * 32) / 4 - 1;
        admin.admin_command(admin::GET_LOG_PAGE, namespace, dwords << 16 | u32::from(page), 0)
    };
    let log = DeviceLog::check(&read(admin, 1).data).expect("is valid");
    assert_eq!((log.hash_seed, log.devices.len(), log.devices[1].free), (7, 2, 0), "it has not asked");
    assert!(admin.set_feature(feature::DEVICE_TOKENS, 0, 1).status().is_success());
    let log = DeviceLog::check(&read(admin, 1).data).expect("is valid");
    assert_eq!((log.devices[0].free, log.devices[1].free), (0, 100));
    assert!(read(admin, 2).status().is(Status::INVALID_LOG_PAGE), "its devices have no tokens");
    assert!(read(admin, 3).status().is(Status::INVALID_NAMESPACE));
}
