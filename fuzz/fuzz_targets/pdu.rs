//! A stream of PDUs as either end receives it: whatever comes, a frame or a fault, never a panic.
#![no_main]

use libfuzzer_sys::fuzz_target;
use octokv_wire::pdu::{End, Header, Link, Unchecked};

fuzz_target!(|input: &[u8]| {
    let Some((&settings, mut stream)) = input.split_first() else { return };
    let end = if settings & 1 == 0 { End::Controller } else { End::Host };
    let link = Link { header_digest: settings & 2 != 0, data_digest: settings & 4 != 0, ..Link::plain() };
    while let Some(unchecked) = Unchecked::new(stream) {
        let Ok(frame) = unchecked.check(end, &link) else { return };
        let whole = frame.pdu_bytes();
        assert!(whole >= frame.prefix_bytes as usize + frame.data_bytes as usize);
        if stream.len() < whole {
            return;
        }
        match frame.header(stream) {
            Ok(Header::IcRequest(ic)) => drop(ic.check_request()),
            Ok(Header::IcResponse(ic)) => drop(ic.check_response()),
            Ok(_) => {}
            Err(fault) => drop((fault.to_string(), fault.information())),
        }
        stream = &stream[whole..];
    }
});
