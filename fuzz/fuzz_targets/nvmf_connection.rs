//! The target's connection state machine against a malicious host: no bytes panic, leak a buffer or exceed a limit. The
//! test module that interprets the script is shared with the bounded run in `crates/nvmf/tests/adversary.rs`.
#![no_main]

#[path = "../../crates/nvmf/tests/common/mod.rs"]
mod common;

libfuzzer_sys::fuzz_target!(|script: &[u8]| {
    let _ = common::adversary::run_script(script);
});
