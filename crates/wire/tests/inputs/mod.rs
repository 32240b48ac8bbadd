//! Properties of the decoders on arbitrary bytes, shared by the fuzz targets and the replay of the corpus.
#![allow(dead_code)] // Each fuzz target uses its part.

use octokv_base::NamespaceId;
use octokv_wire::cluster::UncheckedClusterHeader;
use octokv_wire::partition_log::PartitionLog;
use octokv_wire::pdu::{NegotiatedParams, PduHeader, Role, UncheckedCommonHeader};
use octokv_wire::{Sqe, discovery, fabrics, identify, kv, log_page, nvm, vendor};

/// Decodes a stream of PDUs; the first byte selects the receiver and the digests.
pub fn decode_pdu_stream(input: &[u8]) {
    let Some((&option_bits, mut stream)) = input.split_first() else { return };
    let role = if option_bits & 1 == 0 { Role::Controller } else { Role::Host };
    let params = NegotiatedParams {
        header_digest: option_bits & 2 != 0,
        data_digest: option_bits & 4 != 0,
        ..NegotiatedParams::initial()
    };
    while let Some(unchecked) = UncheckedCommonHeader::new(stream) {
        let Ok(layout) = unchecked.check(role, &params) else { return };
        let pdu_bytes = layout.pdu_bytes();
        assert!(pdu_bytes >= layout.prefix_bytes as usize + layout.data_bytes as usize);
        if stream.len() < pdu_bytes {
            return;
        }
        match layout.decode_header(stream) {
            Ok(PduHeader::IcRequest(ic)) => drop(ic.check_request()),
            Ok(PduHeader::IcResponse(ic)) => drop(ic.check_response()),
            Ok(_) => {}
            Err(error) => drop((error.to_string(), error.fatal_error_information())),
        }
        stream = &stream[pdu_bytes..];
    }
}

/// Decodes an entry, and the same bytes as every page and list.
pub fn decode_commands_and_pages(input: &[u8]) {
    if let Some(entry) = input.first_chunk::<64>() {
        let sqe = Sqe::from_bytes(entry);
        let (id, namespace) = (sqe.command_id(), sqe.namespace());
        let _ = sqe.sgl.check();
        if let Ok(command) = kv::KvCommand::check(&sqe) {
            assert_eq!(kv::KvCommand::check(&command.encode(id, namespace)), Ok(command));
        }
        if let Ok(command) = vendor::VendorCommand::check(&sqe) {
            assert_eq!(vendor::VendorCommand::check(&command.encode(id, NamespaceId(1))), Ok(command));
        }
        if let Ok(command) = fabrics::FabricsCommand::check(&sqe) {
            assert_eq!(fabrics::FabricsCommand::check(&command.encode(id)), Ok(command));
        }
        if let Ok(command) = nvm::NvmCommand::check(&sqe) {
            assert_eq!(nvm::NvmCommand::check(&command.encode(id, namespace)), Ok(command));
        }
        let request = identify::IdentifyRequest::from_sqe(&sqe);
        assert_eq!(identify::IdentifyRequest::from_sqe(&request.encode(id)), request);
        if let Ok(request) = log_page::LogPageRequest::check(&sqe) {
            assert_eq!(log_page::LogPageRequest::check(&request.encode(id)), Ok(request));
        }
    }
    if let Ok(list) = kv::UncheckedKeyList(input).check() {
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
    if let Ok(header) = UncheckedClusterHeader::check(input) {
        assert_eq!(UncheckedClusterHeader::check(&header.encode()), Ok(header));
    }
    if let Ok(log) = PartitionLog::check(input) {
        assert_eq!(PartitionLog::check(&log.encode()), Ok(log));
    }
    let _ = identify::decode_descriptors(input);
    let _ =
        identify::decode_page::<identify::IdentifyController>(input).map(|page| page.vendor_capabilities());
    for entry in discovery::decode_entries(input) {
        let page = discovery::encode(1, std::slice::from_ref(&entry));
        assert_eq!(discovery::decode_entries(&page).next(), Some(entry));
    }
}
