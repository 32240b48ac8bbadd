//! A stream of PDUs as host and controller receive it: a layout or a protocol error, never a panic.
#![no_main]

#[path = "../../crates/wire/tests/inputs/mod.rs"]
mod inputs;

libfuzzer_sys::fuzz_target!(|input: &[u8]| inputs::decode_pdu_stream(input));
