//! Tests of [`super`]: golden bytes, round trips, every protocol error, random bytes.

use super::*;
use crate::status::Status;
use octokv_base::Prng;

fn param_combinations() -> impl Iterator<Item = NegotiatedParams> {
    [false, true].into_iter().flat_map(|header_digest| {
        [false, true].into_iter().flat_map(move |data_digest| {
            [4, 16, 128].into_iter().map(move |send_alignment| NegotiatedParams {
                header_digest,
                data_digest,
                send_alignment,
                ..NegotiatedParams::initial()
            })
        })
    })
}

fn check(bytes: &[u8], role: Role, params: &NegotiatedParams) -> Result<PduLayout, PduError> {
    UncheckedCommonHeader::new(bytes).expect("a common header").check(role, params)
}

#[test]
fn a_response_has_the_specified_24_bytes() {
    let cqe = Cqe::new(5, 6, Status::SUCCESS, 7, 0);
    let mut out = Vec::new();
    encode_response(&cqe, &NegotiatedParams::initial(), &mut out);
    assert_eq!(out, [5, 0, 24, 0, 24, 0, 0, 0, 7, 0, 0, 0, 0, 0, 0, 0, 6, 0, 0, 0, 5, 0, 0, 0]);
}

#[test]
fn controller_data_is_24_bytes_then_data() {
    let data = DataHeader { command_id: 0x1234, tag: 0, offset: 16, bytes: 32 };
    let mut out = Vec::new();
    data.encode(Role::Controller, flags::LAST, &NegotiatedParams::initial(), &mut out);
    assert_eq!(out, [7, 4, 24, 24, 56, 0, 0, 0, 0x34, 0x12, 0, 0, 16, 0, 0, 0, 32, 0, 0, 0, 0, 0, 0, 0]);
}

#[test]
fn ready_to_transfer_is_24_bytes() {
    let data = DataHeader { command_id: 1, tag: 2, offset: 3, bytes: 4 };
    let mut out = Vec::new();
    data.encode_ready_to_transfer(&NegotiatedParams::initial(), &mut out);
    assert_eq!(out, [9, 0, 24, 0, 24, 0, 0, 0, 1, 0, 2, 0, 3, 0, 0, 0, 4, 0, 0, 0, 0, 0, 0, 0]);
}

#[test]
fn ic_request_and_ic_response_round_trip() {
    let request =
        IcRequest { host_alignment: 128, header_digest: true, data_digest: false, open_transfers_max: 16 };
    let bytes = request.encode();
    assert_eq!(bytes[..16], [0, 0, 128, 0, 128, 0, 0, 0, 0, 0, 31, 1, 15, 0, 0, 0]);
    let layout = check(&bytes, Role::Controller, &NegotiatedParams::initial()).unwrap();
    let Ok(PduHeader::IcRequest(ic)) = layout.decode_header(&bytes) else { panic!("an ICReq") };
    assert_eq!(ic.check_request(), Ok(request));

    let response = IcResponse {
        controller_alignment: 4,
        header_digest: false,
        data_digest: true,
        h2c_data_bytes_max: 131_072,
    };
    let bytes = response.encode();
    assert_eq!(bytes[..16], [1, 0, 128, 0, 128, 0, 0, 0, 0, 0, 0, 2, 0, 0, 2, 0]);
    let layout = check(&bytes, Role::Host, &NegotiatedParams::initial()).unwrap();
    let Ok(PduHeader::IcResponse(ic)) = layout.decode_header(&bytes) else { panic!("an ICResp") };
    assert_eq!(ic.check_response(), Ok(response));
}

#[test]
fn bad_fields_of_ic_pdus_are_errors() {
    let good = IcResponse {
        controller_alignment: 4,
        header_digest: false,
        data_digest: false,
        h2c_data_bytes_max: 4096,
    };
    let table: &[(usize, u8, PduError)] = &[
        (8, 1, PduError::FormatVersion { version: 1 }),
        (10, 32, PduError::Alignment { alignment: 32 }),
        (11, 4, PduError::DigestBits { bits: 4 }),
        (12, 2, PduError::DataLimit { bytes: 4098 }),
        (13, 0, PduError::DataLimit { bytes: 0 }),
    ];
    for &(at, byte, error) in table {
        let mut bytes = good.encode();
        bytes[at] = byte;
        let layout = check(&bytes, Role::Host, &NegotiatedParams::initial()).unwrap();
        let Ok(PduHeader::IcResponse(ic)) = layout.decode_header(&bytes) else { panic!("an ICResp") };
        assert_eq!(ic.check_response(), Err(error));
    }
}

#[test]
fn every_pdu_round_trips_under_every_digest_and_alignment() {
    for params in param_combinations() {
        for bytes in [0usize, 1, 100, 8192] {
            let mut sqe = Sqe::new(1, 77);
            sqe.cdw10 = U32::new(9);
            let mut out = Vec::new();
            encode_command(&sqe, bytes, &params, &mut out);
            let prefix = out.len();
            out.resize(prefix + bytes + params.trailer_bytes(bytes), 0);
            let layout = check(&out, Role::Controller, &params).unwrap();
            assert_eq!((layout.pdu_bytes(), layout.data_bytes as usize), (out.len(), bytes));
            assert_eq!(layout.prefix_bytes as usize, prefix);
            assert!(bytes == 0 || prefix.is_multiple_of(usize::from(params.send_alignment)));
            let Ok(PduHeader::Command(read)) = layout.decode_header(&out) else { panic!("a command") };
            assert_eq!(*read, sqe);
        }
        for (sender, receiver) in [(Role::Host, Role::Controller), (Role::Controller, Role::Host)] {
            let data = DataHeader { command_id: 1, tag: 2, offset: 4096, bytes: 512 };
            let mut out = Vec::new();
            data.encode(sender, flags::LAST, &params, &mut out);
            out.resize(out.len() + 512 + params.trailer_bytes(512), 0);
            let layout = check(&out, receiver, &params).unwrap();
            assert!(layout.is_last() && !layout.is_success() && layout.pdu_bytes() == out.len());
            let Ok(PduHeader::Data(read)) = layout.decode_header(&out) else { panic!("data") };
            assert_eq!(read, data);
        }
        let mut out = Vec::new();
        let cqe = Cqe::new(1, 2, Status::KV_KEY_EXISTS, 3, 4);
        encode_response(&cqe, &params, &mut out);
        let layout = check(&out, Role::Host, &params).unwrap();
        assert_eq!(layout.pdu_bytes(), out.len());
        let Ok(PduHeader::Response(read)) = layout.decode_header(&out) else { panic!("a response") };
        assert_eq!(*read, cqe);
    }
}

#[test]
fn a_termination_quotes_at_most_128_bytes_of_the_wrong_pdu() {
    let error = PduError::HeaderDigest { received: 0xdead_beef, computed: 0 };
    let mut out = Vec::new();
    TermReq::for_error(&error).encode(Role::Controller, &[9; 500], &mut out);
    assert_eq!((out.len(), out[0], out[4]), (TERM_REQ_BYTES_MAX, 3, 152));
    assert_eq!(out[8..16], [3, 0, 0xef, 0xbe, 0xad, 0xde, 0, 0]);
    let layout = check(&out, Role::Host, &NegotiatedParams::initial()).unwrap();
    assert_eq!(layout.data_bytes, 128);
    let Ok(PduHeader::TermReq(term)) = layout.decode_header(&out) else { panic!("a termination") };
    assert_eq!(term, TermReq { fatal_status: 3, information: 0xdead_beef });
}

#[test]
fn every_wrong_common_header_gives_its_error() {
    let digests = NegotiatedParams { header_digest: true, data_digest: true, ..NegotiatedParams::initial() };
    let plain = NegotiatedParams { receive_data_bytes_max: 16, ..NegotiatedParams::initial() };
    let table: &[([u8; 8], &NegotiatedParams, PduError)] = &[
        ([8, 0, 24, 0, 24, 0, 0, 0], &plain, PduError::UnknownPduType { kind: 8 }),
        ([10, 0, 24, 0, 24, 0, 0, 0], &plain, PduError::UnknownPduType { kind: 10 }),
        ([5, 0, 24, 0, 24, 0, 0, 0], &plain, PduError::UnexpectedPduType { kind: 5 }),
        ([4, 0, 71, 0, 72, 0, 0, 0], &plain, PduError::HeaderLength { header_bytes: 71 }),
        ([4, 0, 72, 0, 73, 0, 0, 0], &plain, PduError::PduLength { pdu_bytes: 73 }),
        ([4, 0, 72, 71, 80, 0, 0, 0], &plain, PduError::DataOffset { data_offset: 71 }),
        ([4, 0, 72, 68, 80, 0, 0, 0], &plain, PduError::DataOffset { data_offset: 68 }),
        ([4, 0, 72, 74, 80, 0, 0, 0], &plain, PduError::DataOffset { data_offset: 74 }),
        ([4, 0, 72, 76, 75, 0, 0, 0], &plain, PduError::PduLength { pdu_bytes: 75 }),
        ([4, 0, 72, 72, 89, 0, 0, 0], &plain, PduError::PduLength { pdu_bytes: 89 }),
        ([4, 0, 72, 72, 255, 255, 255, 255], &plain, PduError::PduLength { pdu_bytes: u32::MAX }),
        ([4, 1, 72, 0, 72, 0, 0, 0], &plain, PduError::Flags { flags: 1 }),
        ([4, 2, 72, 72, 80, 0, 0, 0], &plain, PduError::Flags { flags: 2 }),
        ([4, 0, 72, 0, 76, 0, 0, 0], &digests, PduError::Flags { flags: 0 }),
        ([4, 1, 72, 76, 84, 0, 0, 0], &digests, PduError::Flags { flags: 1 }),
        ([4, 3, 72, 76, 79, 0, 0, 0], &digests, PduError::PduLength { pdu_bytes: 79 }),
        ([2, 0, 24, 0, 23, 0, 0, 0], &plain, PduError::PduLength { pdu_bytes: 23 }),
        ([2, 0, 24, 0, 153, 0, 0, 0], &plain, PduError::PduLength { pdu_bytes: 153 }),
        ([0, 0, 128, 0, 127, 0, 0, 0], &plain, PduError::PduLength { pdu_bytes: 127 }),
    ];
    for (bytes, params, error) in table {
        assert_eq!(check(bytes, Role::Controller, params), Err(*error), "{bytes:?}");
    }
    assert!(UncheckedCommonHeader::new(&[0; 7]).is_none());
}

#[test]
fn a_wrong_header_digest_is_detected() {
    let params = NegotiatedParams { header_digest: true, ..NegotiatedParams::initial() };
    let mut out = Vec::new();
    encode_command(&Sqe::new(1, 1), 0, &params, &mut out);
    let layout = check(&out, Role::Controller, &params).unwrap();
    for at in 8..out.len() {
        let mut bad = out.clone();
        bad[at] ^= 0x10;
        let Err(error) = layout.decode_header(&bad) else { panic!("byte {at} is not covered") };
        assert!(matches!(error, PduError::HeaderDigest { .. }));
        assert_eq!(error.fatal_error_status() as u16, 3);
    }
}

#[test]
fn random_bytes_never_panic_and_a_layout_fits_its_length() {
    let mut random = Prng::new(9);
    let param_sets: Vec<NegotiatedParams> = param_combinations().collect();
    for round in 0..200_000 {
        let mut bytes = [0; 256];
        random.fill(&mut bytes);
        bytes[0] &= 0xf;
        bytes[1] &= 0xf;
        if let Some(kind) = PduType::from_u8(bytes[0]) {
            bytes[2] = kind.header_bytes() as u8;
        }
        bytes[5..8].fill(0);
        let params = &param_sets[round % param_sets.len()];
        let role = if random.one_in(2) { Role::Host } else { Role::Controller };
        let Ok(layout) = check(&bytes, role, params) else { continue };
        assert_eq!(layout.pdu_bytes(), usize::from(bytes[4]));
        match layout.decode_header(&bytes) {
            Ok(PduHeader::IcRequest(ic)) => drop(ic.check_request()),
            Ok(PduHeader::IcResponse(ic)) => drop(ic.check_response()),
            Ok(_) => {}
            Err(error) => {
                drop((error.to_string(), error.fatal_error_status(), error.fatal_error_information()))
            }
        }
    }
}

/// Bytes that are nearly a capsule: whatever is recognized is what the check of any PDU finds.
#[test]
fn a_plain_capsule_is_one_to_the_general_check_too() {
    let mut random = Prng::new(9);
    let params = NegotiatedParams::initial();
    let mut recognized = 0;
    for _ in 0..200_000 {
        let mut bytes = vec![0; 72 + random.below(80) as usize];
        random.fill(&mut bytes);
        let stated = match random.below(4) {
            0 => 72,
            1 => random.next_u64() as u32,
            _ => 72 + random.below(80) as u32,
        };
        let data_offset = [0, 72, 72, 76, 4][random.below(5) as usize];
        bytes[..4].copy_from_slice(&[4, 0, 72, data_offset]);
        bytes[4..8].copy_from_slice(&stated.to_le_bytes());
        if random.below(4) == 0 {
            bytes[random.below(4) as usize] ^= 1 << random.below(8);
        }
        let data_bytes_max = random.below(100) as u32;
        let Some(capsule) = PlainCapsule::recognize(&bytes, data_bytes_max) else { continue };
        recognized += 1;
        let layout = check(&bytes, Role::Controller, &params).unwrap();
        assert_eq!((layout.pdu_type, layout.pdu_bytes()), (PduType::CapsuleCommand, capsule.pdu_bytes()));
        assert!(layout.data_bytes <= data_bytes_max && layout.pdu_bytes() <= bytes.len());
        let header = layout.decode_header(&bytes).unwrap();
        assert!(matches!(header, PduHeader::Command(sqe) if sqe == capsule.sqe));
        assert_eq!(bytes[layout.prefix_bytes as usize..][..layout.data_bytes as usize], *capsule.data);
    }
    assert!(recognized > 20_000, "{recognized}");
}
