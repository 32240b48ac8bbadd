//! The target beside the specification, from handshake to namespaces that come and go.
//! One binary: a second one would compile the node's generic code again.

mod admin;
mod adversary;
mod common;
mod corpus;
mod device_tokens;
mod direct_path;
mod discovery;
mod handshake;
mod io;
mod iterators;
mod nvm_commands;
mod pdu_errors;
mod reconfigure;
mod token_competition;
