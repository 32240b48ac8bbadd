//! `unsafe` stays in `sys`; crates take time, threads, files and random seeds as arguments.
//! In: the tree. Out: findings. `clippy.toml` holds the same bans with the compiler's knowledge of names; this
//! check also covers code that is not built here and crates that switch the lint off.
//! Exempt from the bans on calls: `sys`, `admin`, `adversary`, the binaries, and test code.

use super::exceptions::Exceptions;
use super::lexer::{lines_with, without_tests};
use super::tree::{Finding, SourceTree};

/// The only crate with `unsafe`.
const UNSAFE_CRATE: &str = "sys";
/// Crates that may use clocks, threads and files directly: the kernel interface, those off the data cores, the
/// adversary and the binaries.
const UNRESTRICTED_CRATES: &[&str] = &["sys", "admin", "adversary", "lab", "octokv", "xtask"];

/// Forbidden calls and types, each with its replacement.
const FORBIDDEN: &[(&str, &str)] = &[
    ("Instant::now", "time is an argument"),
    ("SystemTime::now", "time is an argument"),
    ("std::thread::spawn", "threads are made by sys"),
    ("std::thread::scope", "threads are made by sys"),
    ("std::thread::Builder", "threads are made by sys"),
    ("std::thread::sleep", "wait for the event, or use the runtime's timers"),
    ("use std::thread;", "threads are made by sys; spell out what else is needed"),
    ("thread_rng", "randomness is an argument: octokv_base::Prng"),
    ("RandomState", "order must repeat: octokv_base::map"),
    ("HashMap::new", "order must repeat: octokv_base::map"),
    ("HashSet::new", "order must repeat: octokv_base::map"),
    ("collections::HashMap", "order must repeat: octokv_base::map"),
    ("collections::HashSet", "order must repeat: octokv_base::map"),
    ("std::fs", "files belong to sys and the binaries"),
    ("File::open", "files belong to sys and the binaries"),
    ("File::create", "files belong to sys and the binaries"),
    ("TcpStream", "sockets belong to sys"),
    ("TcpListener", "sockets belong to sys"),
    ("clippy::disallowed_methods", "the ban holds here"),
    ("clippy::disallowed_types", "the ban holds here"),
];

/// Checks both bans, and that every manifest takes the workspace's lints.
pub fn check(tree: &SourceTree, exceptions: &Exceptions) -> Vec<Finding> {
    let mut findings = Vec::new();
    for file in tree.rust_files().filter(|file| file.crate_name() != UNSAFE_CRATE) {
        for line in lines_with(&file.code, "unsafe") {
            findings.push(Finding::new(&file.path, line, "`unsafe` outside crates/sys"));
        }
    }
    for file in tree
        .rust_files()
        .filter(|file| !UNRESTRICTED_CRATES.contains(&file.crate_name()) && !file.is_test_code())
    {
        let code = without_tests(&file.code);
        let found = FORBIDDEN.iter().flat_map(|(call, instead)| {
            let message = format!("`{call}` is banned in this crate: {instead}");
            lines_with(&code, call)
                .into_iter()
                .map(move |line| Finding::new(&file.path, line, message.clone()))
        });
        let found: Vec<Finding> = found.collect();
        if !found.is_empty() && !exceptions.allows("calls", &file.path) {
            findings.extend(found);
        }
    }
    for file in &tree.files {
        let is_crate_manifest = file.path.starts_with("crates/") && file.path.ends_with("/Cargo.toml");
        let has_own_lints = file.crate_name() == UNSAFE_CRATE;
        if is_crate_manifest && !has_own_lints && !file.text.contains("[lints]\nworkspace = true") {
            findings.push(Finding::new(&file.path, 0, "the crate does not take the workspace's lints"));
        }
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::super::tree::test_tree;
    use super::*;

    fn findings_in(files: &[(&str, &str)]) -> Vec<(usize, String)> {
        let tree = test_tree(files);
        let exceptions = Exceptions::read(&tree, &mut Vec::new());
        check(&tree, &exceptions).into_iter().map(|finding| (finding.line, finding.message)).collect()
    }

    #[test]
    fn unsafe_outside_sys_is_found_even_in_tests() {
        let text = "//! x\nfn f() { unsafe { g() } }\n";
        for path in ["crates/wire/src/a.rs", "crates/wire/tests/a.rs", "xtask/src/a.rs"] {
            assert_eq!(
                findings_in(&[(path, text)]),
                [(2, "`unsafe` outside crates/sys".to_owned())],
                "{path}"
            );
        }
        assert!(findings_in(&[("crates/sys/src/a.rs", text)]).is_empty());
        assert!(
            findings_in(&[("crates/wire/src/a.rs", "//! No unsafe here.\nlet s = \"unsafe\";")]).is_empty()
        );
    }

    #[test]
    fn every_forbidden_call_is_found_in_a_library_and_allowed_in_sys_binaries_and_tests() {
        for (call, _) in FORBIDDEN {
            let text = format!("//! x\nfn f() {{ {call}(); }}\n");
            assert!(!findings_in(&[("crates/engine/src/a.rs", &text)]).is_empty(), "{call}");
            for path in ["crates/sys/src/a.rs", "crates/octokv/src/a.rs", "crates/engine/tests/a.rs"] {
                assert!(findings_in(&[(path, &text)]).is_empty(), "{call} in {path}");
            }
            let tested = format!("//! x\n#[cfg(test)]\nmod tests {{\n{text}}}\n");
            assert!(
                findings_in(&[("crates/engine/src/a.rs", &tested)]).is_empty(),
                "{call} in a test module"
            );
        }
    }

    #[test]
    fn a_listed_exception_is_allowed() {
        let file = ("crates/base/src/map.rs", "//! x\nuse std::collections::HashMap;\n");
        assert_eq!(findings_in(&[file]).len(), 1);
        let listed =
            ("xtask/tidy-exceptions.txt", "calls crates/base/src/map.rs: it is the replacement itself\n");
        assert!(findings_in(&[file, listed]).is_empty());
    }

    #[test]
    fn a_manifest_without_the_workspace_lints_is_found() {
        let manifest = "[package]\nname = \"octokv-wire\"\n";
        assert_eq!(findings_in(&[("crates/wire/Cargo.toml", manifest)]).len(), 1);
        assert!(
            findings_in(&[("crates/wire/Cargo.toml", &format!("{manifest}[lints]\nworkspace = true\n"))])
                .is_empty()
        );
    }
}
