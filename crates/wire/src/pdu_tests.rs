//! Tests of [`super`]: golden bytes, round trips, every fault, random bytes.

use super::*;
use crate::status::Status;
use octokv_base::Random;

fn links() -> impl Iterator<Item = Link> {
    [false, true].into_iter().flat_map(|header_digest| {
        [false, true].into_iter().flat_map(move |data_digest| {
            [4, 16, 128].into_iter().map(move |send_alignment| Link {
                header_digest,
                data_digest,
                send_alignment,
                ..Link::plain()
            })
        })
    })
}

fn check(bytes: &[u8], end: End, link: &Link) -> Result<Frame, Fault> {
    Unchecked::new(bytes).expect("a common header").check(end, link)
}

#[test]
fn a_response_is_24_bytes_in_their_places() {
    let cqe = Cqe::new(5, 6, Status::SUCCESS, 7, 0);
    let mut out = Vec::new();
    encode_response(&cqe, &Link::plain(), &mut out);
    assert_eq!(out, [5, 0, 24, 0, 24, 0, 0, 0, 7, 0, 0, 0, 0, 0, 0, 0, 6, 0, 0, 0, 5, 0, 0, 0]);
}

#[test]
fn controller_data_is_24_bytes_then_data() {
    let data = Data { command_id: 0x1234, tag: 0, offset: 16, bytes: 32 };
    let mut out = Vec::new();
    data.encode(End::Controller, flags::LAST, &Link::plain(), &mut out);
    assert_eq!(out, [7, 4, 24, 24, 56, 0, 0, 0, 0x34, 0x12, 0, 0, 16, 0, 0, 0, 32, 0, 0, 0, 0, 0, 0, 0]);
}

#[test]
fn ready_to_transfer_is_24_bytes() {
    let data = Data { command_id: 1, tag: 2, offset: 3, bytes: 4 };
    let mut out = Vec::new();
    data.encode_ready_to_transfer(&Link::plain(), &mut out);
    assert_eq!(out, [9, 0, 24, 0, 24, 0, 0, 0, 1, 0, 2, 0, 3, 0, 0, 0, 4, 0, 0, 0, 0, 0, 0, 0]);
}

#[test]
fn the_initial_exchange_comes_back_as_it_went() {
    let request =
        IcRequest { host_alignment: 128, header_digest: true, data_digest: false, open_transfers_max: 16 };
    let bytes = request.encode();
    assert_eq!(bytes[..16], [0, 0, 128, 0, 128, 0, 0, 0, 0, 0, 31, 1, 15, 0, 0, 0]);
    let frame = check(&bytes, End::Controller, &Link::plain()).unwrap();
    let Ok(Header::IcRequest(ic)) = frame.header(&bytes) else { panic!("an ICReq") };
    assert_eq!(ic.check_request(), Ok(request));

    let response = IcResponse {
        controller_alignment: 4,
        header_digest: false,
        data_digest: true,
        host_data_bytes_max: 131_072,
    };
    let bytes = response.encode();
    assert_eq!(bytes[..16], [1, 0, 128, 0, 128, 0, 0, 0, 0, 0, 0, 2, 0, 0, 2, 0]);
    let frame = check(&bytes, End::Host, &Link::plain()).unwrap();
    let Ok(Header::IcResponse(ic)) = frame.header(&bytes) else { panic!("an ICResp") };
    assert_eq!(ic.check_response(), Ok(response));
}

#[test]
fn bad_fields_of_the_initial_exchange_are_faults() {
    let good = IcResponse {
        controller_alignment: 4,
        header_digest: false,
        data_digest: false,
        host_data_bytes_max: 4096,
    };
    let table: &[(usize, u8, Fault)] = &[
        (8, 1, Fault::FormatVersion { version: 1 }),
        (10, 32, Fault::Alignment { alignment: 32 }),
        (11, 4, Fault::DigestBits { bits: 4 }),
        (12, 2, Fault::DataLimit { bytes: 4098 }),
        (13, 0, Fault::DataLimit { bytes: 0 }),
    ];
    for &(at, byte, fault) in table {
        let mut bytes = good.encode();
        bytes[at] = byte;
        let frame = check(&bytes, End::Host, &Link::plain()).unwrap();
        let Ok(Header::IcResponse(ic)) = frame.header(&bytes) else { panic!("an ICResp") };
        assert_eq!(ic.check_response(), Err(fault));
    }
}

#[test]
fn every_pdu_comes_back_under_every_digest_and_alignment() {
    for link in links() {
        for bytes in [0usize, 1, 100, 8192] {
            let mut sqe = Sqe::new(1, 77);
            sqe.cdw10 = U32::new(9);
            let mut out = Vec::new();
            encode_command(&sqe, bytes, &link, &mut out);
            let prefix = out.len();
            out.resize(prefix + bytes + link.trailer_bytes(bytes), 0);
            let frame = check(&out, End::Controller, &link).unwrap();
            assert_eq!((frame.pdu_bytes(), frame.data_bytes as usize), (out.len(), bytes));
            assert_eq!(frame.prefix_bytes as usize, prefix);
            assert!(bytes == 0 || prefix.is_multiple_of(usize::from(link.send_alignment)));
            let Ok(Header::Command(read)) = frame.header(&out) else { panic!("a command") };
            assert_eq!(*read, sqe);
        }
        for (sender, receiver) in [(End::Host, End::Controller), (End::Controller, End::Host)] {
            let data = Data { command_id: 1, tag: 2, offset: 4096, bytes: 512 };
            let mut out = Vec::new();
            data.encode(sender, flags::LAST, &link, &mut out);
            out.resize(out.len() + 512 + link.trailer_bytes(512), 0);
            let frame = check(&out, receiver, &link).unwrap();
            assert!(frame.is_last() && !frame.is_success() && frame.pdu_bytes() == out.len());
            let Ok(Header::Data(read)) = frame.header(&out) else { panic!("data") };
            assert_eq!(read, data);
        }
        let mut out = Vec::new();
        let cqe = Cqe::new(1, 2, Status::KV_KEY_EXISTS, 3, 4);
        encode_response(&cqe, &link, &mut out);
        let frame = check(&out, End::Host, &link).unwrap();
        assert_eq!(frame.pdu_bytes(), out.len());
        let Ok(Header::Response(read)) = frame.header(&out) else { panic!("a response") };
        assert_eq!(*read, cqe);
    }
}

#[test]
fn a_termination_quotes_at_most_128_bytes_of_the_wrong_pdu() {
    let fault = Fault::HeaderDigest { received: 0xdead_beef, computed: 0 };
    let mut out = Vec::new();
    Terminate::for_fault(&fault).encode(End::Controller, &[9; 500], &mut out);
    assert_eq!((out.len(), out[0], out[4]), (TERM_BYTES_MAX, 3, 152));
    assert_eq!(out[8..16], [3, 0, 0xef, 0xbe, 0xad, 0xde, 0, 0]);
    let frame = check(&out, End::Host, &Link::plain()).unwrap();
    assert_eq!(frame.data_bytes, 128);
    let Ok(Header::Terminate(term)) = frame.header(&out) else { panic!("a termination") };
    assert_eq!(term, Terminate { fatal: 3, information: 0xdead_beef });
}

#[test]
fn every_wrong_common_header_is_its_fault() {
    let digests = Link { header_digest: true, data_digest: true, ..Link::plain() };
    let plain = Link { receive_data_bytes_max: 16, ..Link::plain() };
    let table: &[([u8; 8], &Link, Fault)] = &[
        ([8, 0, 24, 0, 24, 0, 0, 0], &plain, Fault::UnknownKind { kind: 8 }),
        ([10, 0, 24, 0, 24, 0, 0, 0], &plain, Fault::UnknownKind { kind: 10 }),
        ([5, 0, 24, 0, 24, 0, 0, 0], &plain, Fault::UnexpectedKind { kind: 5 }),
        ([4, 0, 71, 0, 72, 0, 0, 0], &plain, Fault::HeaderBytes { header_bytes: 71 }),
        ([4, 0, 72, 0, 73, 0, 0, 0], &plain, Fault::PduBytes { pdu_bytes: 73 }),
        ([4, 0, 72, 71, 80, 0, 0, 0], &plain, Fault::DataOffset { data_offset: 71 }),
        ([4, 0, 72, 68, 80, 0, 0, 0], &plain, Fault::DataOffset { data_offset: 68 }),
        ([4, 0, 72, 74, 80, 0, 0, 0], &plain, Fault::DataOffset { data_offset: 74 }),
        ([4, 0, 72, 76, 75, 0, 0, 0], &plain, Fault::PduBytes { pdu_bytes: 75 }),
        ([4, 0, 72, 72, 89, 0, 0, 0], &plain, Fault::PduBytes { pdu_bytes: 89 }),
        ([4, 0, 72, 72, 255, 255, 255, 255], &plain, Fault::PduBytes { pdu_bytes: u32::MAX }),
        ([4, 1, 72, 0, 72, 0, 0, 0], &plain, Fault::Flags { flags: 1 }),
        ([4, 2, 72, 72, 80, 0, 0, 0], &plain, Fault::Flags { flags: 2 }),
        ([4, 0, 72, 0, 76, 0, 0, 0], &digests, Fault::Flags { flags: 0 }),
        ([4, 1, 72, 76, 84, 0, 0, 0], &digests, Fault::Flags { flags: 1 }),
        ([4, 3, 72, 76, 79, 0, 0, 0], &digests, Fault::PduBytes { pdu_bytes: 79 }),
        ([2, 0, 24, 0, 23, 0, 0, 0], &plain, Fault::PduBytes { pdu_bytes: 23 }),
        ([2, 0, 24, 0, 153, 0, 0, 0], &plain, Fault::PduBytes { pdu_bytes: 153 }),
        ([0, 0, 128, 0, 127, 0, 0, 0], &plain, Fault::PduBytes { pdu_bytes: 127 }),
    ];
    for (bytes, link, fault) in table {
        assert_eq!(check(bytes, End::Controller, link), Err(*fault), "{bytes:?}");
    }
    assert!(Unchecked::new(&[0; 7]).is_none());
}

#[test]
fn a_wrong_header_digest_is_found() {
    let link = Link { header_digest: true, ..Link::plain() };
    let mut out = Vec::new();
    encode_command(&Sqe::new(1, 1), 0, &link, &mut out);
    let frame = check(&out, End::Controller, &link).unwrap();
    for at in 8..out.len() {
        let mut bad = out.clone();
        bad[at] ^= 0x10;
        let Err(fault) = frame.header(&bad) else { panic!("byte {at} is not covered") };
        assert!(matches!(fault, Fault::HeaderDigest { .. }));
        assert_eq!(fault.fatal() as u16, 3);
    }
}

#[test]
fn random_bytes_never_panic_and_a_frame_fits_its_length() {
    let mut random = Random::new(9);
    let links: Vec<Link> = links().collect();
    for round in 0..200_000 {
        let mut bytes = [0; 256];
        random.fill(&mut bytes);
        bytes[0] &= 0xf;
        bytes[1] &= 0xf;
        if let Some(kind) = Kind::new(bytes[0]) {
            bytes[2] = kind.header_bytes() as u8;
        }
        bytes[5..8].fill(0);
        let link = &links[round % links.len()];
        let end = if random.one_in(2) { End::Host } else { End::Controller };
        let Ok(frame) = check(&bytes, end, link) else { continue };
        assert_eq!(frame.pdu_bytes(), usize::from(bytes[4]));
        match frame.header(&bytes) {
            Ok(Header::IcRequest(ic)) => drop(ic.check_request()),
            Ok(Header::IcResponse(ic)) => drop(ic.check_response()),
            Ok(_) => {}
            Err(fault) => drop((fault.to_string(), fault.fatal(), fault.information())),
        }
    }
}
