//! NVMe, its Key Value and NVM command sets, Fabrics and NVMe/TCP: bytes to types and back, for both ends.
//!
//! Nothing here holds a connection or makes a choice: the target's and the client's machines do. What a
//! peer sends is an *unchecked* value until `check` has made it a typed one; no bytes panic. Little-endian
//! throughout. The facts, by layer, are in `docs/PROTOCOL.md`.
//!
//! # Layout
//! - [`pdu`]: NVMe/TCP framing: common header, capsule, data and R2T PDUs, digests.
//! - [`initial`]: the PDUs that begin and end a connection (also named in [`pdu`]).
//! - [`fault`]: what a peer can do wrong with a PDU, and how a termination request names it.
//! - [`command`]: submission and completion queue entries, opcodes, SGL descriptors, feature ids, events.
//! - [`status`]: status codes.
//! - [`kv`]: the Key Value command set: fields of each command, the list buffer.
//! - [`nvm`]: the NVM command set: fields of each command, ranges.
//! - [`extension`]: octokv's vendor commands (keys of more than 16 bytes) and how they are announced.
//! - [`fabrics`]: Connect, properties, Disconnect.
//! - [`identify`]: what a controller says of itself.
//! - [`namespace`]: pages of namespaces (also named in [`identify`]).
//! - [`log`]: log pages.
//! - [`discovery`]: the discovery log page.
//! - [`nqn`]: names of hosts and subsystems.

pub mod command;
pub mod discovery;
pub mod extension;
pub mod fabrics;
pub mod fault;
pub mod identify;
pub mod initial;
pub mod kv;
pub mod log;
pub mod namespace;
pub mod nqn;
pub mod nvm;
pub mod pdu;
pub mod status;

pub use command::{Cqe, Sgl, SglKind, Sqe};
pub use fault::Fault;
pub use status::Status;
