//! A hostile host, driven by bytes: sound PDUs, spoiled ones and noise, in every state of a connection.
//!
//! Shared by the bounded random test of this room and by the fuzz target.

use super::*;
use octokv_target::Counts;
use octokv_wire::extension;
use octokv_wire::pdu::flags;

/// Choices, taken from bytes; zeros when they are used up.
pub struct Script<'a>(&'a [u8]);

impl Script<'_> {
    fn byte(&mut self) -> u8 {
        match self.0.split_first() {
            Some((&first, rest)) => {
                self.0 = rest;
                first
            }
            None => 0,
        }
    }
    fn word(&mut self) -> u32 {
        u32::from_le_bytes([self.byte(), self.byte(), self.byte(), self.byte()])
    }
    fn below(&mut self, bound: u32) -> u32 {
        self.word() % bound
    }
    fn one_in(&mut self, n: u8) -> bool {
        self.byte().is_multiple_of(n)
    }
}

fn settings() -> TargetSettings {
    let mut settings = TargetSettings::new(NQN);
    settings.queue_depth = 16;
    settings.receive_bytes_max = 1 << 20;
    settings.outbox_bytes_max = 256 << 10;
    settings.value_bytes_max = 256 << 10;
    settings
}

/// A host in the state that the script picks, and the admin connection that it may need.
fn start(script: &mut Script<'_>) -> (Option<Host>, Host) {
    let mut namespace = namespace(1);
    namespace.value_bytes_max = 256 << 10;
    let target = Target::new(settings(), vec![namespace]);
    let (header_digest, data_digest) = (script.one_in(3), script.one_in(3));
    let mut host = match script.byte() % 10 {
        0 => return (None, Host::new(&target)),
        1 => return (None, Host::initialized(&target, header_digest, data_digest)),
        2 => return (None, Host::admin_with(&target, header_digest, data_digest)),
        3 => return (None, Host::discovery(&target)),
        _ => {
            let admin = Host::admin(&target);
            let mut io = Host::at(&target, admin.now);
            io.initialize(header_digest, data_digest);
            let id = target.controllers()[0].id;
            let done = io.connect_as(1, id, NQN, HOST_NQN, |connect| connect.entries = 16);
            assert!(done.status().is_success());
            (admin, io)
        }
    };
    host.1.pool = Pool::new(if script.one_in(2) { 4 << 20 } else { 400 << 10 });
    (Some(host.0), host.1)
}

/// Plays a script to its end, or the connection's; gives what was done. Panics only where the target is
/// wrong.
pub fn play(bytes: &[u8]) -> Counts {
    let script = &mut Script(bytes);
    let (mut admin, mut host) = start(script);
    let mut asks = Vec::new();
    while !script.0.is_empty() && !host.connection.is_closed() {
        let mut bytes = next_bytes(script, &mut host, &mut asks);
        if script.one_in(150) && !bytes.is_empty() {
            let at = script.below(bytes.len() as u32) as usize;
            bytes[at] ^= 1 << (script.byte() % 8);
        }
        let cut = if script.one_in(4) { script.below(bytes.len() as u32 + 1) as usize } else { 0 };
        let (first, rest) = bytes.split_at(cut);
        host.send(first);
        host.send(rest);
        let some = script.below(host.requests.len() as u32 + 1) as usize;
        let later = host.requests.split_off(some);
        host.work();
        host.requests.splice(0..0, later);
        if script.one_in(30) {
            host.pass(Nanos::from_millis(u64::from(script.byte())));
        }
        if script.one_in(100)
            && let Some(admin) = &mut admin
        {
            admin.set_property(property::CC, 0);
            admin.enable();
        }
        asks.extend(host.replies.drain(..).filter_map(|reply| match reply {
            Reply::Ask(range) => Some(range),
            _ => None,
        }));
        check(&host);
    }
    host.work();
    drop(host.connection);
    assert_eq!(host.pool.out_bytes(), 0, "a buffer was lost");
    host.target.statistics()
}

fn check(host: &Host) {
    assert!(host.pool.out_bytes() <= host.pool.budget_bytes());
    assert!(host.connection.in_flight() <= 128);
    let longest = 255 + 16 * 1024 + 8;
    if host.last.is_some_and(|last| last.stalled.is_none()) {
        assert!(host.unsent.len() <= longest, "{} B were not taken", host.unsent.len());
    }
}

fn next_bytes(script: &mut Script<'_>, host: &mut Host, asks: &mut Vec<Data>) -> Vec<u8> {
    let id = u16::from(script.byte() % 24);
    let bytes = script.below(20_000) >> (script.byte() % 14);
    match script.byte() % 14 {
        0 if script.one_in(20) => (0..script.byte() % 64).map(|_| script.byte()).collect(),
        0 => Vec::new(),
        1 | 2 => {
            let data = value(bytes as usize % (16 << 10));
            let sqe = store_sqe(id, b"t", data.len(), Sgl::in_capsule(data.len() as u32), 0);
            host.capsule(&sqe, &data)
        }
        3 | 4 => {
            let long = bytes * (1 + u32::from(script.byte() % 12));
            host.capsule(&store_sqe(id, b"t", long as usize, Sgl::transport(long), 0), &[])
        }
        5..=7 => answer(script, host, asks),
        8 => {
            let mut sqe =
                kv::Command::Retrieve { key: Key::new(b"t").unwrap(), limit_bytes: bytes }.encode(id, NSID);
            sqe.sgl = Sgl::transport(bytes);
            host.capsule(&sqe, &[])
        }
        9 => {
            let key = value(1 + bytes as usize % 1100);
            let key_bytes = key.len() as u16;
            let command = match script.byte() % 3 {
                0 => extension::Command::Delete { key_bytes },
                1 => extension::Command::List { key_bytes, limit_bytes: bytes },
                _ => extension::Command::Retrieve { key_bytes, limit_bytes: bytes },
            };
            let mut sqe = command.encode(id, NSID);
            sqe.sgl = Sgl::in_capsule(u32::from(key_bytes));
            host.capsule(&sqe, &key)
        }
        10 => {
            let offset = [0, 8, 0x14, 0x1c, script.word()][usize::from(script.byte() % 5)];
            let value = u64::from(script.word());
            let command = if script.one_in(2) {
                fabrics::Command::PropertySet { offset, wide: false, value }
            } else {
                fabrics::Command::PropertyGet { offset, wide: script.one_in(2) }
            };
            host.capsule(&command.encode(id), &[])
        }
        11 => any_entry(script, host, id),
        12 => {
            let connect = Connect {
                format: 0,
                queue_id: u16::from(script.byte() % 3),
                entries: 1 + script.below(20),
                attributes: script.byte(),
                keep_alive_ms: script.below(10_000),
            };
            let controller_id = if script.one_in(2) { NEW_CONTROLLER } else { 1 };
            let subsystem = if script.one_in(3) { nqn::DISCOVERY } else { NQN };
            let data = ConnectData { host_id: [9; 16], controller_id, subsystem, host: HOST_NQN };
            host.capsule(&fabrics::Command::Connect(connect).encode(id), &data.encode())
        }
        _ => beginning_or_end(script, host),
    }
}

/// An ICReq, or rarely a termination request.
fn beginning_or_end(script: &mut Script<'_>, host: &Host) -> Vec<u8> {
    let mut bytes = Vec::new();
    if script.one_in(40) {
        let terminate = Terminate { fatal: 1, information: script.word() };
        terminate.encode(End::Host, &[1; 30], &mut bytes);
    } else if host.connection.host_nqn().is_none() && host.connection.closing_reason().is_none() {
        let (header_digest, data_digest) = (script.one_in(2), script.one_in(2));
        let request = IcRequest { host_alignment: 4, header_digest, data_digest, open_transfers_max: 1 };
        bytes.extend(request.encode());
    }
    bytes
}

/// An H2CData for a transfer that was asked for, or nearly.
fn answer(script: &mut Script<'_>, host: &Host, asks: &mut Vec<Data>) -> Vec<u8> {
    let Some(ask) = asks.pop() else { return Vec::new() };
    let mut range = ask;
    let is_whole = script.one_in(2);
    if !is_whole {
        range.bytes = 1 + script.below(ask.bytes);
    }
    if is_whole || range.bytes == ask.bytes {
        return host.data_pdu(range, &value(range.bytes as usize), flags::LAST);
    }
    let (left, offset) = (ask.bytes - range.bytes, ask.offset + range.bytes);
    asks.push(Data { offset, bytes: left, ..ask });
    match script.byte() % 64 {
        0 => range.offset ^= 4,
        1 => range.tag ^= 1,
        2 => range.command_id ^= 1,
        3 => return host.data_pdu(range, &value(range.bytes as usize), flags::LAST),
        _ => {}
    }
    host.data_pdu(range, &value(range.bytes as usize), 0)
}

/// An entry of any fields, mostly of an opcode that exists.
fn any_entry(script: &mut Script<'_>, host: &Host, id: u16) -> Vec<u8> {
    const OPCODES: [u8; 20] = [
        0x00, 0x01, 0x02, 0x06, 0x08, 0x09, 0x0a, 0x0c, 0x10, 0x14, 0x18, 0x7f, 0x81, 0x83, 0x87, 0x91, 0x95,
        0xa1, 0x06, 0x02,
    ];
    let mut bytes = [0; 64];
    bytes.iter_mut().for_each(|byte| *byte = if script.one_in(3) { script.byte() } else { 0 });
    let mut sqe = Sqe::from_bytes(&bytes);
    sqe.command_id = id.into();
    sqe.opcode = if script.one_in(8) { script.byte() } else { OPCODES[usize::from(script.byte()) % 20] };
    if !script.one_in(8) {
        sqe.nsid = [0, 1, 2, u32::MAX][usize::from(script.byte() % 4)].into();
        sqe.sgl = match script.byte() % 3 {
            0 => Sgl::transport(4096),
            1 => Sgl::in_capsule(u32::from(script.byte())),
            _ => Sgl::transport(0),
        };
    }
    let data = value(usize::from(script.byte()));
    host.capsule(&sqe, &data)
}
