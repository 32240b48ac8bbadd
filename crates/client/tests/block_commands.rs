//! Block commands on a session: every command, its local limits, and responses of a faulty node.

use crate::support::address;
use crate::support::block_node::BlockNodeSockets;
use octokv_base::{Buffer, Key, Lba};
use octokv_client::error::ConnectionError;
use octokv_client::{ClientConfig, Command, Error, Reconnect, Response, Session, StoreMode, Value};
use octokv_wire::Status;
use octokv_wire::identify::{self, NamespaceDescriptor, cns};
use octokv_wire::nvm::LbaRange;

const BLOCKS: usize = 512;

fn node() -> BlockNodeSockets {
    BlockNodeSockets::new(512, vec![0; BLOCKS * 512])
}

fn range(first: u64, blocks: u32) -> LbaRange {
    LbaRange { lba: Lba(first), blocks }
}

fn pattern(bytes: usize, seed: u8) -> Vec<u8> {
    (0..bytes).map(|i| (i * 7 % 251) as u8 ^ seed).collect()
}

fn write(first: u64, data: &[u8]) -> Command<'_> {
    Command::Write { lba: Lba(first), data: Value::Slice(data), force_unit_access: true }
}

fn read(node: &BlockNodeSockets, session: &mut Session<BlockNodeSockets>, range: LbaRange) -> Vec<u8> {
    match node.execute(session, Command::Read { range, buffer: None }) {
        Ok(Response::Blocks { data }) => data.to_vec(),
        other => panic!("{other:?}"),
    }
}

#[test]
fn blocks_are_written_read_compared_zeroed_and_deallocated() {
    let node = node();
    let session = &mut node.connect_session(ClientConfig::default());
    let info = session.controller_info().expect("it is live");
    let blocks = info.blocks.expect("a namespace of blocks");
    assert_eq!((blocks.block_bytes, blocks.block_count, info.size_bytes), (512, 512, 512 * 512));
    // In-capsule data, copied and referenced, and data by R2T.
    for (first, count) in [(0, 1), (1, 2), (3, 8), (20, 100)] {
        let data = pattern(count * 512, count as u8);
        assert!(matches!(node.execute(session, write(first, &data)), Ok(Response::Written { .. })));
        assert!(read(&node, session, range(first, count as u32)) == data, "{count} blocks");
        let compare = |data| Command::Compare { lba: Lba(first), data: Value::Slice(data) };
        assert!(matches!(node.execute(session, compare(&data)), Ok(Response::Verified)));
        assert!(matches!(node.execute(session, compare(&vec![1; data.len()])), Ok(Response::CompareFailed)));
    }
    let zeroes = Command::WriteZeroes { range: range(21, 1), force_unit_access: false, deallocate: false };
    assert!(matches!(node.execute(session, zeroes), Ok(Response::Written { .. })));
    let ranges = [range(23, 2), range(30, 1)];
    assert!(matches!(
        node.execute(session, Command::Deallocate { ranges: &ranges }),
        Ok(Response::Written { .. })
    ));
    let mut want = pattern(100 * 512, 100);
    for block in [1, 3, 4, 10] {
        want[block * 512..(block + 1) * 512].fill(0);
    }
    assert!(read(&node, session, range(20, 100)) == want);
    assert!(matches!(
        node.execute(session, Command::Verify { range: range(0, 512) }),
        Ok(Response::Verified)
    ));
    assert!(matches!(node.execute(session, Command::Flush), Ok(Response::Flushed)));
    assert_eq!(node.0.borrow().media.durable, node.0.borrow().media.cached);
}

#[test]
fn a_buffer_of_the_caller_returns_with_the_response() {
    let node = node();
    let session = &mut node.connect_session(ClientConfig::default());
    for bytes in [512, 4096, 65536] {
        let mut buffer = Buffer::zeroed(bytes);
        buffer.copy_from_slice(&pattern(bytes, 3));
        let at = buffer.as_ptr();
        let data = Value::Buffer { buffer, from: 0, to: bytes };
        let written = node.execute(session, Command::Write { lba: Lba(8), data, force_unit_access: false });
        let Ok(Response::Written { buffer: Some(buffer) }) = written else { panic!("{written:?}") };
        assert_eq!((buffer.as_ptr(), buffer.len()), (at, bytes));
        let read = Command::Read { range: range(8, bytes as u32 / 512), buffer: Some(buffer) };
        let Ok(Response::Blocks { data }) = node.execute(session, read) else { panic!("not read") };
        let buffer = data.into_buffer().expect("the buffer of the caller");
        assert_eq!((buffer.as_ptr(), &buffer[..]), (at, &pattern(bytes, 3)[..]));
    }
}

#[test]
fn commands_of_the_other_set_and_blocks_out_of_range_fail_locally() {
    let node = node();
    let session = &mut node.connect_session(ClientConfig::default());
    let key = Key::new(b"k").expect("short");
    let store = Command::Store { key, value: Value::Slice(b"v"), mode: StoreMode::Upsert };
    assert_eq!(node.execute(session, store).unwrap_err(), Error::NotKvNamespace);
    let beyond = node.execute(session, write(511, &[0; 1024])).unwrap_err();
    assert_eq!(beyond, Error::BlockRange { first: 511, count: 2, have: 512 });
    assert!(node.0.borrow().command_counts.is_empty());
}

#[test]
fn a_busy_status_is_distinguished_from_a_failure() {
    let node = node();
    let session = &mut node.connect_session(ClientConfig::default());
    node.0.borrow_mut().busy_responses = 1;
    let data = Value::Buffer { buffer: Buffer::zeroed(8192), from: 0, to: 8192 };
    let retry = node.execute(session, Command::Write { lba: Lba(0), data, force_unit_access: false });
    assert!(matches!(retry, Ok(Response::Retry { buffer: Some(_) })), "{retry:?}");
    let table = [
        (Status::MEDIA_UNRECOVERED_READ, Error::UnrecoveredRead),
        (Status::MEDIA_WRITE_FAULT, Error::Status(Status::MEDIA_WRITE_FAULT)),
        // In the Key Value command set this status means "exists".
        (Status::KV_KEY_EXISTS, Error::Status(Status::KV_KEY_EXISTS)),
    ];
    for (status, want) in table {
        node.0.borrow_mut().next_status = Some(status);
        let failed = node.execute(session, Command::Verify { range: range(0, 1) });
        assert_eq!(failed.unwrap_err(), want);
    }
}

/// Connects to a node that changes its pages, and returns the connection error.
fn connect_error_with(mutation: impl Fn(u8, &mut Vec<u8>) + 'static) -> Option<ConnectionError> {
    let node = node();
    node.0.borrow_mut().page_mutation = Some(Box::new(mutation));
    let session = node.connect_session(ClientConfig::default());
    match session.ended() {
        Some(Error::Connect(at, error)) if at == address() => Some(error),
        None => None,
        other => panic!("{other:?}"),
    }
}

fn connect_error_with_bytes(page: u8, at: usize, bytes: &'static [u8]) -> Option<ConnectionError> {
    connect_error_with(move |cns, data| {
        if cns == page {
            data[at..at + bytes.len()].copy_from_slice(bytes);
        }
    })
}

#[test]
fn an_inconsistent_block_namespace_is_rejected() {
    let format = Some(ConnectionError::UnsupportedBlockFormat);
    const LBAF0: usize = 128;
    let table: &[(usize, &'static [u8], Option<ConnectionError>)] = &[
        (LBAF0 + 2, &[9], None),
        (LBAF0 + 2, &[8], format),
        (LBAF0 + 2, &[0], format),
        (LBAF0 + 2, &[17], format),
        (LBAF0 + 2, &[255], format),
        // Metadata.
        (LBAF0, &[8, 0], format),
        // No blocks: the namespace was deleted during initialization. Then a size in bytes beyond 64 bits.
        (0, &[0; 8], Some(ConnectionError::NamespaceNotFound)),
        (0, &[255; 8], format),
        // A format index beyond the number of formats.
        (26, &[1], format),
        (26, &[0xff], format),
    ];
    for (at, bytes, want) in table {
        assert_eq!(connect_error_with_bytes(cns::NAMESPACE, *at, bytes), *want, "byte {at} {bytes:?}");
    }
    // MDTS allows two pages, and a block has sixteen.
    let small = connect_error_with(|cns, data| match cns {
        cns::CONTROLLER => data[77] = 1,
        cns::NAMESPACE => data[LBAF0 + 2] = 16,
        _ => {}
    });
    assert_eq!(small, format);
    let zoned = connect_error_with(|cns, data| {
        if cns == identify::cns::DESCRIPTORS {
            *data = identify::encode_descriptors(&[NamespaceDescriptor::CommandSet(2)]).to_vec();
        }
    });
    assert_eq!(zoned, Some(ConnectionError::UnsupportedCommandSet));
    let short = connect_error_with(|cns, data| {
        if cns == cns::NAMESPACE {
            data.truncate(100);
        }
    });
    assert_eq!(short, Some(ConnectionError::InitFailed(Status::DATA_TRANSFER_ERROR)));
}

#[test]
fn a_read_with_too_little_data_is_an_error() {
    let node = node();
    let session = &mut node.connect_session(ClientConfig::default());
    node.0.borrow_mut().short_reads = true;
    let short =
        node.execute(session, Command::Read { range: range(0, 4), buffer: Some(Buffer::zeroed(2048)) });
    assert_eq!(short.unwrap_err(), Error::DataLength { expected_bytes: 2048, received_bytes: 1536 });
    let none = node.execute(session, Command::Read { range: range(0, 1), buffer: None });
    assert_eq!(none.unwrap_err(), Error::DataLength { expected_bytes: 512, received_bytes: 0 });
}

#[test]
fn success_of_a_write_before_its_data_was_sent_is_an_error() {
    let node = node();
    let session =
        &mut node.connect_session(ClientConfig { reconnect: Reconnect::Never, ..ClientConfig::default() });
    node.0.borrow_mut().complete_writes_early = true;
    let response = node.execute(session, write(0, &vec![1; 65536]));
    assert_eq!(response.unwrap_err(), Error::OutcomeUnknown);
    assert!(
        matches!(session.ended(), Some(Error::Connect(_, ConnectionError::Protocol(_)))),
        "{:?}",
        session.ended()
    );
}

#[test]
fn a_deleted_namespace_ends_the_session_and_a_larger_one_does_not() {
    let node = node();
    let session = &mut node.connect_session(ClientConfig::default());
    for blocks in [1024, 2048] {
        node.0.borrow_mut().media.cached.resize(blocks * 512, 0);
        node.notify_namespace_change();
        let grown = |session: &Session<BlockNodeSockets>| {
            session
                .controller_info()
                .and_then(|info| info.blocks)
                .is_some_and(|b| b.block_count == blocks as u64)
        };
        node.drive(session, |session, _| grown(session));
        assert!(session.is_live());
    }
    session.submit(Command::Flush, 1).unwrap();
    node.0.borrow_mut().is_namespace_gone = true;
    node.notify_namespace_change();
    node.drive(session, |session, _| session.ended().is_some());
    assert_eq!(session.ended(), Some(Error::Connect(address(), ConnectionError::NamespaceNotFound)));
}

#[test]
fn another_namespace_with_the_same_id_ends_the_session() {
    for (notified, shrunk) in [(true, false), (false, false), (true, true), (false, true)] {
        let node = node();
        let session = &mut node.connect_session(ClientConfig::default());
        match shrunk {
            true => node.0.borrow_mut().media.cached.truncate(512),
            false => node.0.borrow_mut().nguid = [8; 16],
        }
        match notified {
            true => node.notify_namespace_change(),
            false => node.cut_connections(),
        }
        node.drive(session, |session, _| session.ended().is_some());
        assert_eq!(session.ended(), Some(Error::Connect(address(), ConnectionError::NamespaceChanged)));
    }
}

#[test]
fn an_idle_session_sleeps_while_an_event_request_is_pending() {
    let node = node();
    let session = &mut node.connect_session(ClientConfig::default());
    node.drive(session, |_, _| node.has_event_request());
    let now = node.0.borrow().now;
    let wait = session.next_deadline().since(now);
    assert!(
        wait.0 > 10_000_000_000,
        "the next deadline is in {wait:?}, expected half of the keep alive timeout, 15 s"
    );
}
