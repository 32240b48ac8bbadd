//! Which crate may depend on which: the table below, held against `cargo metadata`. docs/ARCHITECTURE.md shows the
//! crates that exist to readers; no check compares that page with this table, which also has crates yet to come.
//! In: the workspace's packages with their direct dependencies. Out: findings.
//! Invariant: dependencies point one way; a package that is not in the table is a finding. Dev-dependencies are
//! free: they build tests, which no crate stands on.

use anyhow::{Context, Result};
use serde_json::Value;

use super::tree::Finding;

/// Every crate and the crates it may depend on, bottom up.
const CRATES: &[(&str, &[&str])] = &[
    ("base", &[]),
    ("sys", &["base"]),
    ("wire", &["base"]),
    ("runtime", &["base", "sys"]),
    ("device", &["base", "runtime"]),
    ("sched", &["base"]),
    // The tokens of devices are counted where their commands run: docs/decisions/0032.
    ("engine", &["base", "runtime", "device", "sched"]),
    ("nvmf", &["base", "wire"]),
    ("cluster", &["base", "wire"]),
    ("client", &["base", "wire", "runtime", "device"]),
    ("node", &["base", "sys", "wire", "runtime", "device", "engine", "sched", "nvmf", "cluster", "client"]),
    ("admin", &["base", "wire", "engine", "sched", "nvmf", "node"]),
    // Not sys: what the simulator runs on is virtual.
    ("sim", &["base", "wire", "runtime", "device", "engine", "sched", "nvmf", "cluster", "client", "node"]),
    // Runs the engine in the client's process, on blocks and on files: docs/decisions/0006.
    ("bench", &["base", "sys", "wire", "runtime", "device", "engine", "client"]),
    // The papers' experiments, in the binary behind the feature `lab`.
    (
        "lab",
        &["base", "sys", "runtime", "device", "engine", "sched", "nvmf", "client", "node", "admin", "bench"],
    ),
    // Control for the other side of its door; what is attacked is a process.
    ("adversary", &["base", "sys", "wire", "runtime", "client", "bench", "admin"]),
    (
        "octokv",
        &[
            "base", "sys", "wire", "runtime", "device", "engine", "sched", "nvmf", "cluster", "client",
            "node", "admin", "sim", "bench", "lab",
        ],
    ),
    ("xtask", &[]),
];

/// Foreign crates that only some crates may use, and why.
const RESTRICTED_DEPENDENCIES: &[(&str, &[&str], &str)] = &[
    ("libc", &["sys"], "sys is the only interface to the kernel"),
    ("io-uring", &["sys"], "sys is the only interface to the kernel"),
    ("rustix", &["sys"], "sys is the only interface to the kernel"),
    ("signal-hook", &["sys"], "sys is the only interface to the kernel"),
    ("anyhow", &["octokv", "lab", "adversary", "xtask"], "crates have typed errors"),
    ("tokio", &["admin"], "the data cores have their own executor"),
    ("tokio-uring", &[], "it is not maintained"),
    ("glommio", &[], "it is not maintained"),
    ("monoio", &[], "it is not maintained"),
];

/// One package of the workspace.
pub struct Package {
    /// Its crate.
    pub name: String,
    /// What it is built from: crates by their crate names, foreign crates by their own; no dev-dependencies.
    pub dependencies: Vec<String>,
}

/// Reads the packages out of `cargo metadata --no-deps`.
///
/// # Errors
/// If the metadata lacks a field that cargo writes.
pub fn workspace_packages(metadata: &Value) -> Result<Vec<Package>> {
    let text = |value: &Value, field: &str| -> Result<String> {
        Ok(value[field].as_str().with_context(|| format!("cargo metadata has no {field}"))?.to_owned())
    };
    let mut packages = Vec::new();
    for package in metadata["packages"].as_array().context("cargo metadata has no packages")? {
        let mut dependencies = Vec::new();
        for dependency in package["dependencies"].as_array().context("a package has no dependencies")? {
            if dependency["kind"].as_str() != Some("dev") {
                dependencies.push(crate_of(&text(dependency, "name")?).to_owned());
            }
        }
        packages.push(Package { name: crate_of(&text(package, "name")?).to_owned(), dependencies });
    }
    Ok(packages)
}

/// `octokv-base` is the crate `base`; other names stand for themselves.
fn crate_of(package: &str) -> &str {
    package.strip_prefix("octokv-").unwrap_or(package)
}

/// Holds every edge against the tables.
pub fn check(packages: &[Package]) -> Vec<Finding> {
    let mut findings = Vec::new();
    for package in packages {
        let manifest = manifest_path(&package.name);
        let Some((_, allowed)) = CRATES.iter().find(|(name, _)| *name == package.name) else {
            findings.push(Finding::new(
                &manifest,
                0,
                format!("the crate {} is not in the table of crates", package.name),
            ));
            continue;
        };
        for dependency in &package.dependencies {
            let is_crate = CRATES.iter().any(|(name, _)| name == dependency);
            if is_crate && !allowed.contains(&dependency.as_str()) {
                findings.push(Finding::new(
                    &manifest,
                    0,
                    format!("{} may not depend on {dependency}", package.name),
                ));
            }
            let foreign = RESTRICTED_DEPENDENCIES.iter().find(|(name, ..)| name == dependency);
            if let Some((name, crates, why)) = foreign
                && !crates.contains(&package.name.as_str())
            {
                findings.push(Finding::new(
                    &manifest,
                    0,
                    format!("{} may not use {name}: {why}", package.name),
                ));
            }
        }
    }
    findings
}

fn manifest_path(name: &str) -> String {
    if name == "xtask" { "xtask/Cargo.toml".to_owned() } else { format!("crates/{name}/Cargo.toml") }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn messages(json: &str) -> Vec<String> {
        let metadata = serde_json::from_str(json).expect("a test's JSON");
        check(&workspace_packages(&metadata).expect("a test's metadata"))
            .into_iter()
            .map(|f| f.message)
            .collect()
    }

    fn package(name: &str, dependency: &str, kind: &str) -> String {
        format!(
            r#"{{"packages": [{{"name": "{name}", "dependencies": [{{"name": "{dependency}", "kind": {kind}}}]}}]}}"#
        )
    }

    #[test]
    fn dependencies_are_checked_against_the_table() {
        let table: &[(&str, &str, &str, &[&str])] = &[
            ("octokv-engine", "octokv-device", "null", &[]),
            ("octokv-device", "octokv-engine", "null", &["device may not depend on engine"]),
            ("octokv-sim", "octokv-sys", "null", &["sim may not depend on sys"]),
            ("octokv-sim", "octokv-sys", "\"build\"", &["sim may not depend on sys"]),
            ("octokv-wire", "octokv-engine", "\"dev\"", &[]),
            ("octokv", "octokv-bench", "null", &[]),
            ("octokv-misc", "octokv-base", "null", &["the crate misc is not in the table of crates"]),
            (
                "octokv-wire",
                "libc",
                "null",
                &["wire may not use libc: sys is the only interface to the kernel"],
            ),
            ("octokv-sys", "libc", "null", &[]),
            ("octokv-node", "glommio", "null", &["node may not use glommio: it is not maintained"]),
        ];
        for (name, dependency, kind, wanted) in table {
            assert_eq!(messages(&package(name, dependency, kind)), *wanted, "{name} -> {dependency}");
        }
    }

    #[test]
    fn the_table_has_no_cycle() {
        for (index, (name, allowed)) in CRATES.iter().enumerate() {
            for dependency in *allowed {
                let at = CRATES.iter().position(|(name, _)| name == dependency);
                assert!(at.is_some_and(|at| at < index), "{name} -> {dependency} points up");
            }
        }
    }
}
