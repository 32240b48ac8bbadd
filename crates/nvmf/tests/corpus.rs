//! Every input that fuzzing found worth keeping is played again: each reaches something that no other does.
#![allow(clippy::disallowed_methods)] // A test reads files.

mod common;

use std::path::Path;

#[test]
fn every_corpus_script_runs_to_its_end() {
    let kept = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus/nvmf_connection");
    let mut played = 0;
    for entry in std::fs::read_dir(&kept).expect("the kept corpus") {
        let path = entry.expect("an entry of the kept corpus").path();
        let script = std::fs::read(&path).expect("a script of the kept corpus");
        if std::panic::catch_unwind(|| common::adversary::run_script(&script)).is_err() {
            panic!("{}", path.display());
        }
        played += 1;
    }
    assert!(played >= 500, "{played} scripts are kept");
}
