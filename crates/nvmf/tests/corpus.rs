//! Replays every input of the fuzz corpus: each covers code that no other one covers.
#![allow(clippy::disallowed_methods)] // A test reads files.

use crate::common;
use std::path::Path;

#[test]
fn every_corpus_script_runs_to_its_end() {
    let kept = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus/nvmf_connection");
    let mut script_count = 0;
    for entry in std::fs::read_dir(&kept).expect("the corpus") {
        let path = entry.expect("an entry of the corpus").path();
        let script = std::fs::read(&path).expect("a script of the corpus");
        if std::panic::catch_unwind(|| common::adversary::run_script(&script)).is_err() {
            panic!("{}", path.display());
        }
        script_count += 1;
    }
    assert!(script_count >= 500, "the corpus has {script_count} scripts");
}
