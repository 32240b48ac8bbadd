//! The target's connection machine against a hostile host: no bytes may panic, lose a buffer or pass a
//! bound. The script's meaning is in the test room that it shares with the bounded run of `cargo test`.
#![no_main]

#[path = "../../crates/nvmf/tests/common/mod.rs"]
mod common;

libfuzzer_sys::fuzz_target!(|script: &[u8]| {
    common::adversary::run_script(script);
});
