//! The hostile room: hosts that break every rule, an honest one that must not notice, and a node between them.
//!
//! What is attacked is a real `octokv serve` process, over TCP. The tests of the binary use the parts one by one and
//! say what each attack must be answered with; the program of this room (`main.rs`) measures what attacks cost
//! others, and soaks a node in all of it for a long time.
//!
//! # Layout
//! - [`peer`]: one connection that says what it likes.
//! - [`attacks`]: attacks that go on for as long as they are let.
//! - [`commands`]: entries of commands, right by default.
//! - [`honest`]: the host that must be served all the while.
//! - [`hosts`]: the hosts of a soak.
//! - [`keeper`]: a client that keeps account of every key it has.
//! - [`measure`]: what attacks cost others.
//! - [`process`]: a node as a process, and what it holds.
//! - [`siege`]: a node under attack, held to its promises and its bound on memory.
//! - [`soak`]: a node in everything at once for a long time.

#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "attackers have sockets, threads and clocks of their own"
)]

pub mod attacks;
pub mod commands;
pub mod honest;
pub mod hosts;
pub mod keeper;
pub mod measure;
pub mod peer;
pub mod process;
pub mod siege;
pub mod soak;
