//! The adversarial host's PDUs, selected by bytes of a script: capsules of every command, data, noise.

use super::adversary::{CAPSULE_BYTES_MAX, FuzzConnection, VALUE_BYTES_MAX};
use super::*;
use octokv_base::{Lba, ShortKey};
use octokv_nvmf::LbaRange;
use octokv_wire::pdu::flags;
use octokv_wire::vendor;
use std::sync::LazyLock;

/// The remaining bytes of a script, which select actions; zeros after its end.
pub struct Script<'a>(pub &'a [u8]);

impl Script<'_> {
    pub fn byte(&mut self) -> u8 {
        match self.0.split_first() {
            Some((&first, rest)) => {
                self.0 = rest;
                first
            }
            None => 0,
        }
    }

    pub fn is_over(&self) -> bool {
        self.0.is_empty()
    }

    pub fn word(&mut self) -> u32 {
        u32::from_le_bytes([self.byte(), self.byte(), self.byte(), self.byte()])
    }

    pub fn one_in(&mut self, n: u8) -> bool {
        self.byte().is_multiple_of(n)
    }

    /// A length: mostly short, sometimes at a limit or beyond it.
    fn length(&mut self) -> u32 {
        let (kind, size) = (self.byte(), u32::from(self.byte()));
        match kind % 8 {
            0 => size,
            1 => size * 16,
            2 => (size % 33) * 512,
            3 => (size % 5) * 4096,
            4 => CAPSULE_BYTES_MAX + size % 3 - 1,
            5 => VALUE_BYTES_MAX + size % 3 - 1,
            6 => size % 4,
            _ => size * 64,
        }
    }
}

/// The first bytes of a pattern whose bytes depend on their position.
pub fn pattern(bytes: usize) -> &'static [u8] {
    static PATTERN: LazyLock<Vec<u8>> = LazyLock::new(|| value(256 << 10));
    &PATTERN[..bytes]
}

fn capsule(sink: &mut PduSink<'_>, sqe: &Sqe, data: &[u8]) {
    let PduSink { params, out } = sink;
    pdu::encode_command(sqe, data.len(), params, out);
    out.extend_from_slice(data);
    if params.trailer_bytes(data.len()) > 0 {
        out.extend_from_slice(&crc32c(data).to_le_bytes());
    }
}

/// The destination of encoded PDUs and the negotiated parameters.
struct PduSink<'a> {
    params: &'a NegotiatedParams,
    out: &'a mut Vec<u8>,
}

/// The bytes that initialize a connection with these digests, connect it if a queue and a subsystem are
/// given, and enable the controller of an admin queue.
pub fn connect_sequence(
    (header_digest, data_digest): (bool, bool),
    connect: Option<(u16, &str)>,
    controller_id: u16,
) -> Vec<u8> {
    let request = IcRequest { host_alignment: 4, header_digest, data_digest, open_transfers_max: 1 };
    let mut out = request.encode().to_vec();
    let mut params = NegotiatedParams::initial();
    (params.header_digest, params.data_digest) = (header_digest, data_digest);
    let mut sink = PduSink { params: &params, out: &mut out };
    if let Some((queue_id, subsystem)) = connect {
        let connect = Connect { format: 0, queue_id, entries: 16, attributes: 0, keep_alive_ms: 0 };
        let controller_id = if queue_id == 0 { NEW_CONTROLLER } else { controller_id };
        let data = ConnectData { host_id: [9; 16], controller_id, subsystem, host: HOST_NQN };
        capsule(&mut sink, &fabrics::FabricsCommand::Connect(connect).encode(1), &data.encode());
        if queue_id == 0 {
            let value = u64::from(ControllerConfiguration::ENABLED.0);
            let enable =
                fabrics::FabricsCommand::PropertySet { offset: property::CC, is_64_bit: false, value };
            capsule(&mut sink, &enable.encode(2), &[]);
        }
    }
    out
}

/// Appends the host's next bytes; returns how many commands they are.
pub fn next_bytes(script: &mut Script<'_>, conn: &mut FuzzConnection, choice: u8) -> u64 {
    let mut out = conn.take_unsent();
    let params = conn.params;
    let sink = &mut PduSink { params: &params, out: &mut out };
    let commands = match choice {
        // An admin queue rarely gets commands that it rejects.
        77..=150 if !conn.is_io => admin_command(script, sink),
        77..=109 => kv_command(script, sink),
        110..=154 => nvm_command(script, sink),
        155..=194 => h2c_data(script, conn, sink),
        195..=218 => admin_command(script, sink),
        219..=238 => random_sqe(script, sink),
        239..=246 => connect(script, sink),
        247..=254 => ic_or_term_request(script, conn, sink),
        _ => {
            let bytes = script.byte() % 64;
            sink.out.extend((0..bytes).map(|_| script.byte()));
            conn.is_corrupted |= bytes > 0;
            0
        }
    };
    conn.give_unsent(out);
    commands
}

fn id(script: &mut Script<'_>) -> u16 {
    u16::from(script.byte() % 20)
}

/// An SGL and the in-capsule bytes for data of this length, mostly consistent.
fn sgl(script: &mut Script<'_>, bytes: u32) -> (Sgl, usize) {
    let choice = script.byte();
    let stated_bytes = match choice >> 2 & 15 {
        0 => bytes.saturating_sub(1),
        1 => bytes + 1,
        _ => bytes,
    };
    // In-capsule data that exceeds the capsule limit ends the connection, so it is rare.
    let in_capsule = choice & 3 < 2 && (bytes <= CAPSULE_BYTES_MAX || choice > 250);
    if in_capsule {
        (Sgl::in_capsule(stated_bytes), bytes as usize)
    } else {
        (Sgl::transport(stated_bytes), 0)
    }
}

fn kv_command(script: &mut Script<'_>, sink: &mut PduSink<'_>) -> u64 {
    let (what, id, nsid) = (script.byte(), id(script), NamespaceId(1));
    let key_bytes = script.byte();
    let key = &pattern(64)[..usize::from(key_bytes % 17)];
    let bytes = script.length();
    let mut sqe = match what % 8 {
        0 | 1 => store_sqe(id, key, bytes as usize, Sgl::transport(0), what >> 3 & 3),
        2 => {
            let mut sqe = Sqe::new(kv::opcode::RETRIEVE, id);
            kv::set_key(&mut sqe, &ShortKey::new(key).unwrap(), 0);
            (sqe.nsid, sqe.cdw10, sqe.sgl) = (nsid.0.into(), bytes.into(), Sgl::transport(bytes));
            capsule(sink, &sqe, &[]);
            return 1;
        }
        3 => {
            let opcode = [kv::opcode::DELETE, kv::opcode::EXIST, kv::opcode::LIST, kv::opcode::FLUSH];
            let mut sqe = Sqe::new(opcode[usize::from(what >> 3 & 3)], id);
            kv::set_key(&mut sqe, &ShortKey::new(key).unwrap(), 0);
            (sqe.nsid, sqe.cdw10, sqe.sgl) = (nsid.0.into(), bytes.into(), Sgl::transport(bytes));
            capsule(sink, &sqe, &[]);
            return 1;
        }
        _ => {
            let key_bytes = u16::from(key_bytes % 70);
            let command = match what >> 3 & 7 {
                0 | 1 => vendor::VendorCommand::Delete { key_bytes },
                2 => vendor::VendorCommand::Exist { key_bytes },
                3 => vendor::VendorCommand::List { key_bytes, limit_bytes: bytes },
                4 => vendor::VendorCommand::Retrieve { key_bytes, limit_bytes: bytes },
                _ => {
                    let options = vendor::store_options(StoreMode::Upsert);
                    vendor::VendorCommand::Store { options, key_bytes, value_bytes: bytes }
                }
            };
            let mut sqe = command.encode(id, nsid);
            let (sgl, data) = sgl(script, command.host_data_bytes() as u32);
            sqe.sgl = sgl;
            capsule(sink, &sqe, pattern(data));
            return 1;
        }
    };
    let (sgl, data) = sgl(script, bytes);
    sqe.sgl = sgl;
    capsule(sink, &sqe, pattern(data));
    1
}

fn nvm_command(script: &mut Script<'_>, sink: &mut PduSink<'_>) -> u64 {
    let (what, id, location) = (script.byte(), id(script), script.byte());
    let namespace = NamespaceId(2 + u32::from(what >> 7));
    let block_bytes = if namespace.0 == 2 { 512 } else { 4096 };
    let (range_lba, range_blocks) = (location & 15, script.byte());
    let lba = match range_lba {
        15 => u64::MAX - u64::from(location >> 4),
        14 => u64::from((64 << 10) / block_bytes - 1),
        few => u64::from(few),
    };
    let range = LbaRange { lba: Lba(lba), blocks: 1 + u32::from(range_blocks % 36) };
    let force_unit_access = what & 8 != 0;
    let command = match what % 8 {
        0 | 1 => nvm::NvmCommand::Write { range, force_unit_access },
        2 | 3 => nvm::NvmCommand::Read { range },
        4 => nvm::NvmCommand::Compare { range },
        5 => nvm::NvmCommand::WriteZeroes { range, force_unit_access, deallocate: what & 16 != 0 },
        6 => nvm::NvmCommand::DatasetManagement { ranges: range.blocks, deallocate: what & 16 != 0 },
        _ if what & 8 != 0 => nvm::NvmCommand::Verify { range },
        _ => nvm::NvmCommand::Flush,
    };
    let mut sqe = command.encode(id, namespace);
    let bytes = range.blocks * block_bytes;
    let mut ranges = Vec::new();
    match command {
        nvm::NvmCommand::Write { .. } | nvm::NvmCommand::Compare { .. } => {
            let (sgl, data) = sgl(script, bytes);
            sqe.sgl = sgl;
            capsule(sink, &sqe, pattern(data));
        }
        nvm::NvmCommand::DatasetManagement { .. } => {
            let (sgl, data) = sgl(script, range.blocks * nvm::RANGE_BYTES as u32);
            let one = LbaRange { lba: range.lba, blocks: u32::from(location >> 4) };
            (0..range.blocks).for_each(|_| nvm::encode_range(one, &mut ranges));
            sqe.sgl = sgl;
            capsule(sink, &sqe, &ranges[..data]);
        }
        _ => {
            let stated_bytes = if range_blocks > 250 { bytes - 1 } else { bytes };
            sqe.sgl = Sgl::transport(stated_bytes);
            capsule(sink, &sqe, &[]);
        }
    }
    1
}

/// A property command, an admin command, or Disconnect.
fn admin_command(script: &mut Script<'_>, sink: &mut PduSink<'_>) -> u64 {
    let (what, id, how) = (script.byte(), id(script), script.byte());
    let mut sqe = match what % 10 {
        0 | 1 => {
            const ON: u32 = ControllerConfiguration::ENABLED.0;
            const VALUES: [u32; 8] =
                [ON, ON, ON, 0, ON | 1 << 14, ControllerConfiguration::ENABLED_NVM.0, 1 << 14, ON | 0x80];
            let offset = [0x14, 0x14, 0x14, 0, 8, 0x1c][usize::from(how % 6)];
            let value = u64::from(VALUES[usize::from(how >> 3) % 8]);
            match what {
                200.. => fabrics::FabricsCommand::Disconnect,
                100.. => fabrics::FabricsCommand::PropertyGet { offset, is_64_bit: how & 1 != 0 },
                _ => fabrics::FabricsCommand::PropertySet { offset, is_64_bit: false, value },
            }
            .encode(id)
        }
        2 | 3 => {
            const PAGES: [u8; 14] = [0, 1, 2, 3, 5, 6, 7, 8, 0x10, 0x11, 0x12, 0x13, 0x1a, 0x1c];
            let cns = PAGES[usize::from(how) % PAGES.len()];
            let namespace = NamespaceId(u32::from(what >> 4));
            identify::IdentifyRequest { cns, csi: how >> 6, controller_id: 0, namespace }.encode(id)
        }
        4 | 5 => {
            const PAGES: [u8; 10] = [0, 1, 2, 3, 4, 5, 0xc, 0x12, 0x13, 0x70];
            log_page::LogPageRequest {
                id: PAGES[usize::from(how) % PAGES.len()],
                log_specific: what >> 7,
                retain_event: what & 32 != 0,
                bytes: u64::from(script.length()) / 4 * 4 + 4,
                offset: u64::from(script.byte()) * 64,
                csi: how >> 7,
                namespace: NamespaceId(u32::MAX),
            }
            .encode(id)
        }
        6 | 7 => {
            const FEATURES: [u8; 12] = [1, 2, 4, 5, 6, 7, 0xa, 0xb, 0xf, 0x16, 0x20, 0x81];
            let opcode = if what & 16 != 0 { admin::GET_FEATURES } else { admin::SET_FEATURES };
            let mut sqe = Sqe::new(opcode, id);
            let select = u32::from(how >> 6) << 8;
            sqe.cdw10 = (u32::from(FEATURES[usize::from(how) % 12]) | select).into();
            sqe.cdw11 = u32::from(script.byte()).wrapping_mul(0x0101_0101).into();
            sqe.nsid = u32::from(what >> 6).into();
            sqe
        }
        8 => Sqe::new(admin::ASYNC_EVENT_REQUEST, id),
        _ => {
            let opcode = if how & 1 != 0 { admin::ABORT } else { admin::KEEP_ALIVE };
            let mut sqe = Sqe::new(opcode, id);
            sqe.cdw10 = (u32::from(how >> 3) << 16 | u32::from(how >> 1 & 3)).into();
            sqe
        }
    };
    if sqe.opcode != 0x7f {
        sqe.sgl = Sgl::transport(4096);
    }
    capsule(sink, &sqe, &[]);
    1
}

fn connect(script: &mut Script<'_>, sink: &mut PduSink<'_>) -> u64 {
    let (what, id) = (script.byte(), id(script));
    let connect = Connect {
        format: 0,
        queue_id: u16::from(what % 3),
        entries: 1 + u32::from(script.byte() % 20),
        attributes: what >> 3 & 7,
        keep_alive_ms: u32::from(script.byte()) * 40,
    };
    let controller_id = if what & 0x40 != 0 { NEW_CONTROLLER } else { 1 };
    let subsystem = if what & 0x80 != 0 { nqn::DISCOVERY } else { NQN };
    let data = ConnectData { host_id: [9; 16], controller_id, subsystem, host: HOST_NQN };
    capsule(sink, &fabrics::FabricsCommand::Connect(connect).encode(id), &data.encode());
    1
}

/// An ICReq, or rarely a termination request.
fn ic_or_term_request(script: &mut Script<'_>, conn: &mut FuzzConnection, sink: &mut PduSink<'_>) -> u64 {
    let what = script.byte();
    if what < 16 {
        let terminate = TermReq { fatal_status: 1, information: script.word() };
        terminate.encode(Role::Host, &[1; 30], sink.out);
    } else if conn.connection.host_nqn().is_none() && conn.connection.close_reason().is_none() {
        let (header_digest, data_digest) = (what & 1 != 0, what & 2 != 0);
        let request = IcRequest { host_alignment: 4, header_digest, data_digest, open_transfers_max: 1 };
        sink.out.extend(request.encode());
    }
    0
}

/// An H2CData for an open R2T, mostly valid.
fn h2c_data(script: &mut Script<'_>, conn: &mut FuzzConnection, sink: &mut PduSink<'_>) -> u64 {
    const PDU_DATA_MAX: u32 = 4096;
    let Some(r2t) = conn.open_r2ts.pop() else { return 0 };
    let how = script.byte();
    let mut range = r2t;
    range.bytes = match how {
        0..=200 => r2t.bytes.min(PDU_DATA_MAX),
        _ => 1 + u32::from(script.byte()) % r2t.bytes.min(PDU_DATA_MAX),
    };
    let is_last = range.bytes == r2t.bytes;
    if !is_last {
        let (bytes, offset) = (r2t.bytes - range.bytes, r2t.offset + range.bytes);
        conn.open_r2ts.push(DataHeader { offset, bytes, ..r2t });
    }
    let mut bits = if is_last { flags::LAST } else { 0 };
    match how {
        196 => range.offset ^= 4,
        197 => range.tag ^= 1,
        198 => range.command_id ^= 1,
        199 => bits ^= flags::LAST,
        200 => range.bytes = PDU_DATA_MAX + 4,
        _ => {}
    }
    let data = pattern(range.bytes as usize);
    range.encode(Role::Host, bits, sink.params, sink.out);
    sink.out.extend_from_slice(data);
    if sink.params.trailer_bytes(data.len()) > 0 {
        sink.out.extend_from_slice(&crc32c(data).to_le_bytes());
    }
    0
}

/// An SQE with random fields, mostly with an existing opcode.
fn random_sqe(script: &mut Script<'_>, sink: &mut PduSink<'_>) -> u64 {
    const OPCODES: [u8; 24] = [
        0x00, 0x01, 0x02, 0x05, 0x06, 0x08, 0x09, 0x0a, 0x0c, 0x10, 0x14, 0x18, 0x7f, 0x81, 0x83, 0x87, 0x91,
        0x95, 0xa1, 0x06, 0x02, 0x01, 0x0d, 0x04,
    ];
    let what = script.byte();
    let mut bytes = [0; 64];
    for _ in 0..what % 8 {
        bytes[usize::from(script.byte() % 64)] = script.byte();
    }
    let mut sqe = Sqe::from_bytes(&bytes);
    sqe.command_id = id(script).into();
    let opcode = script.byte();
    sqe.opcode = if what & 8 != 0 { opcode } else { OPCODES[usize::from(opcode) % 24] };
    let mut data = 0;
    if what & 0x30 != 0 {
        let how = script.byte();
        sqe.nsid = [0, 1, 2, 3, 4, u32::MAX, 2, 3][usize::from(how & 7)].into();
        data = usize::from(script.byte());
        sqe.sgl = match how >> 3 & 3 {
            0 => Sgl::transport(4096),
            1 => Sgl::in_capsule(u32::from(how)),
            _ => Sgl::transport(0),
        };
    }
    capsule(sink, &sqe, pattern(data));
    1
}
