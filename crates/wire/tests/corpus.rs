//! Decodes every input of the fuzz corpus.
#![allow(clippy::disallowed_methods)] // A test reads files.

mod inputs;

use std::path::Path;

fn replay_corpus(target: &str, decode: fn(&[u8])) {
    let kept = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus").join(target);
    let mut decoded = 0;
    for entry in std::fs::read_dir(&kept).expect("the corpus folder") {
        let path = entry.expect("an entry of the corpus").path();
        let input = std::fs::read(&path).expect("an input of the corpus");
        if std::panic::catch_unwind(|| decode(&input)).is_err() {
            panic!("{}", path.display());
        }
        decoded += 1;
    }
    assert!(decoded >= 20, "the corpus of {target} has only {decoded} inputs");
}

#[test]
fn every_corpus_pdu_stream_is_decoded() {
    replay_corpus("pdu", inputs::decode_pdu_stream);
}

#[test]
fn every_corpus_entry_and_page_is_decoded() {
    replay_corpus("command", inputs::decode_commands_and_pages);
}
