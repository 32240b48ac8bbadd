//! What decoders are held to, whatever bytes they get: shared by the fuzz targets and the replay of what
//! fuzzing found worth keeping.
#![allow(dead_code)] // Each fuzz target uses its part.

use octokv_base::NamespaceId;
use octokv_wire::pdu::{End, Header, Link, Unchecked};
use octokv_wire::{Sqe, discovery, fabrics, identify, kv, log_page, nvm, vendor};

/// A stream of PDUs; the first byte says at which end and with which digests.
pub fn pdu(input: &[u8]) {
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
}

/// An entry, and the same bytes as every page and list.
pub fn command(input: &[u8]) {
    if let Some(entry) = input.first_chunk::<64>() {
        let sqe = Sqe::from_bytes(entry);
        let (id, namespace) = (sqe.command_id(), sqe.namespace());
        let _ = sqe.sgl.check();
        if let Ok(command) = kv::Command::check(&sqe) {
            assert_eq!(kv::Command::check(&command.encode(id, namespace)), Ok(command));
        }
        if let Ok(command) = vendor::Command::check(&sqe) {
            assert_eq!(vendor::Command::check(&command.encode(id, NamespaceId(1))), Ok(command));
        }
        if let Ok(command) = fabrics::Command::check(&sqe) {
            assert_eq!(fabrics::Command::check(&command.encode(id)), Ok(command));
        }
        if let Ok(command) = nvm::Command::check(&sqe) {
            assert_eq!(nvm::Command::check(&command.encode(id, namespace)), Ok(command));
        }
        let request = identify::Request::of(&sqe);
        assert_eq!(identify::Request::of(&request.encode(id)), request);
        if let Ok(request) = log_page::Request::check(&sqe) {
            assert_eq!(log_page::Request::check(&request.encode(id)), Ok(request));
        }
    }
    if let Ok(list) = kv::UncheckedList(input).check() {
        assert_eq!(list.keys().count(), list.count() as usize);
    }
    if let Some(Ok(data)) = fabrics::UncheckedConnectData::new(input).map(|data| data.check()) {
        let bytes = data.encode();
        assert_eq!(fabrics::UncheckedConnectData::new(&bytes).map(|d| d.check()), Some(Ok(data)));
    }
    for range in nvm::decode_ranges(input) {
        let mut bytes = Vec::new();
        nvm::encode_range(range, &mut bytes);
        assert_eq!(nvm::decode_ranges(&bytes).next(), Some(range));
    }
    let _ = identify::decode_descriptors(input);
    let _ = identify::read::<identify::Controller>(input).map(|page| page.announcement());
    for entry in discovery::entries(input) {
        let page = discovery::encode(1, std::slice::from_ref(&entry));
        assert_eq!(discovery::entries(&page).next(), Some(entry));
    }
}
