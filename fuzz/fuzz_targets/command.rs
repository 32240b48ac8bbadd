//! Every decoder of commands, pages and buffers on any bytes: a value or an error, never a panic; and
//! what decodes encodes to what decodes to the same.
#![no_main]

#[path = "../../crates/wire/tests/inputs/mod.rs"]
mod inputs;

libfuzzer_sys::fuzz_target!(|input: &[u8]| inputs::decode_commands_and_pages(input));
