//! Every decoder of commands, pages and buffers on any bytes: a value or an error, never a panic; and
//! what decodes encodes to what decodes to the same.
#![no_main]

use libfuzzer_sys::fuzz_target;
use octokv_base::NamespaceId;
use octokv_wire::{Sqe, discovery, extension, fabrics, identify, kv, log};

fuzz_target!(|input: &[u8]| {
    if let Some(entry) = input.first_chunk::<64>() {
        let sqe = Sqe::from_bytes(entry);
        let (id, namespace) = (sqe.command_id(), sqe.namespace());
        let _ = sqe.sgl.check();
        if let Ok(command) = kv::Command::check(&sqe) {
            assert_eq!(kv::Command::check(&command.encode(id, namespace)), Ok(command));
        }
        if let Ok(command) = extension::Command::check(&sqe) {
            assert_eq!(extension::Command::check(&command.encode(id, NamespaceId(1))), Ok(command));
        }
        if let Ok(command) = fabrics::Command::check(&sqe) {
            assert_eq!(fabrics::Command::check(&command.encode(id)), Ok(command));
        }
        let request = identify::Request::of(&sqe);
        assert_eq!(identify::Request::of(&request.encode(id)), request);
        if let Ok(request) = log::Request::check(&sqe) {
            assert_eq!(log::Request::check(&request.encode(id)), Ok(request));
        }
    }
    if let Ok(list) = kv::UncheckedList(input).check() {
        assert_eq!(list.keys().count(), list.count() as usize);
    }
    if let Some(Ok(data)) = fabrics::UncheckedConnectData::new(input).map(|data| data.check()) {
        let bytes = data.encode();
        assert_eq!(fabrics::UncheckedConnectData::new(&bytes).map(|d| d.check()), Some(Ok(data)));
    }
    let _ = identify::decode_descriptors(input);
    let _ = identify::read::<identify::Controller>(input).map(|page| page.announcement());
    for entry in discovery::entries(input) {
        let page = discovery::encode(1, std::slice::from_ref(&entry));
        assert_eq!(discovery::entries(&page).next(), Some(entry));
    }
});
