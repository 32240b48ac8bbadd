//! Every decoder of commands, pages and lists on arbitrary bytes: a value or an error, never a panic. A decoded value
//! encodes to bytes that decode to the same value.
#![no_main]

#[path = "../../crates/wire/tests/inputs/mod.rs"]
mod inputs;

libfuzzer_sys::fuzz_target!(|input: &[u8]| inputs::decode_commands_and_pages(input));
