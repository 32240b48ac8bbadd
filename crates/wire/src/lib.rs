//! NVMe, its Key Value and NVM command sets, Fabrics and NVMe/TCP: bytes to types and back, for both ends.
//!
//! Nothing here holds a connection or makes a choice: the target's and the client's machines do. What a
//! peer sends is an *unchecked* value until `check` has made it a typed one; no bytes panic. Little-endian
//! throughout. The facts, by layer, are in `docs/PROTOCOL.md`.
//!
//! # Layout
//! - [`pdu`]: NVMe/TCP framing: common header, capsule, data and R2T PDUs, digests.
//! - [`ic_term`]: the PDUs that begin and end a connection (also named in [`pdu`]).
//! - [`pdu_error`]: what a peer can do wrong with a PDU, and how a termination request names it.
//! - [`queue_entry`]: submission and completion queue entries, opcodes, SGL descriptors, feature ids, events.
//! - [`status`]: status codes.
//! - [`kv`]: the Key Value command set: fields of each command, the list buffer.
//! - [`nvm`]: the NVM command set: fields of each command, ranges.
//! - [`vendor`]: octokv's vendor commands (keys of more than 16 bytes) and how they are announced.
//! - [`fabrics`]: Connect, properties, Disconnect.
//! - [`identify`]: what a controller says of itself.
//! - [`identify_namespace`]: pages of namespaces (also named in [`identify`]).
//! - [`log_page`]: log pages.
//! - [`discovery`]: the discovery log page.
//! - [`nqn`]: names of hosts and subsystems.

pub mod discovery;
pub mod fabrics;
pub mod ic_term;
pub mod identify;
pub mod identify_namespace;
pub mod kv;
pub mod log_page;
pub mod nqn;
pub mod nvm;
pub mod pdu;
pub mod pdu_error;
pub mod queue_entry;
pub mod status;
pub mod vendor;

pub use pdu_error::PduError;
pub use queue_entry::{Cqe, Sgl, SglKind, Sqe};
pub use status::Status;
