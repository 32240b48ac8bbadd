//! Encoding and decoding of NVMe, its Key Value and NVM command sets, Fabrics and NVMe/TCP, for target and host.
//!
//! This crate has no connection state and no policy: those are in the target (`nvmf`) and the initiator (`client`).
//! Bytes from the peer decode to an *unchecked* value; its `check` returns the typed value or an error. No input
//! panics. Little-endian throughout. `docs/PROTOCOL.md` lists the facts by layer.
//!
//! # Layout
//! - [`pdu`]: NVMe/TCP framing: capsule, data and R2T PDUs, digests.
//! - [`pdu_header`]: common header, PDU types, negotiated parameters (re-exported by [`pdu`]).
//! - [`ic_term`]: ICReq, ICResp and termination requests (re-exported by [`pdu`]).
//! - [`pdu_error`]: protocol errors of a peer and the termination request for each.
//! - [`send_buffer`]: the unsent bytes of a connection, for gathered sends.
//! - [`queue_entry`]: submission and completion queue entries, opcodes, SGL descriptors, feature ids, events.
//! - [`status`]: status codes.
//! - [`kv`]: the Key Value command set: fields of each command, the key list.
//! - [`nvm`]: the NVM command set: fields of each command, block ranges.
//! - [`vendor`]: octokv's vendor commands (keys of more than 16 bytes) and how a controller reports them.
//! - [`iterator`]: octokv's vendor commands over iterators, their bounds and pairs.
//! - [`cluster`]: opcodes and the header of commands between nodes (reserved).
//! - [`partition_log`]: the vendor log page of a namespace's ring seed, epoch and partitions.
//! - [`device_log`]: the vendor log page of the devices of a namespace, their keys and tokens.
//! - [`fabrics`]: Connect, properties, Disconnect.
//! - [`identify`]: Identify pages of a controller.
//! - [`identify_namespace`]: Identify pages of a namespace (re-exported by [`identify`]).
//! - [`identify_page`]: page size and ASCII fields of Identify pages (re-exported by [`identify`]).
//! - [`log_page`]: log pages.
//! - [`discovery`]: the discovery log page.
//! - [`nqn`]: NVMe qualified names of hosts and subsystems.

pub mod cluster;
pub mod device_log;
pub mod discovery;
pub mod fabrics;
pub mod ic_term;
pub mod identify;
pub mod identify_namespace;
pub mod identify_page;
pub mod iterator;
pub mod kv;
pub mod log_page;
pub mod nqn;
pub mod nvm;
pub mod partition_log;
pub mod pdu;
pub mod pdu_error;
pub mod pdu_header;
pub mod queue_entry;
pub mod send_buffer;
pub mod status;
pub mod vendor;

pub use pdu_error::PduError;
pub use queue_entry::{Cqe, Sgl, SglKind, Sqe};
pub use send_buffer::SendBuffer;
pub use status::Status;
