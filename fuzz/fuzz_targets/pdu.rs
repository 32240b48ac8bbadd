//! A stream of PDUs as either end receives it: whatever comes, a frame or a fault, never a panic.
#![no_main]

#[path = "../../crates/wire/tests/inputs/mod.rs"]
mod inputs;

libfuzzer_sys::fuzz_target!(|input: &[u8]| inputs::decode_pdu_stream(input));
