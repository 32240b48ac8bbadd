//! The engines that there are, by name and by the number in a superblock.

use crate::common::superblock::EngineNumber;
use std::fmt;
use std::str::FromStr;

/// The engine of a volume.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EngineKind {
    /// OctoKV's hash engine: an index entry of 16 bytes in memory for each key.
    #[default]
    Hash,
    /// The ordered engine: a log-structured merge tree with snapshot iterators.
    Lsm,
}

impl EngineKind {
    /// Every engine.
    pub const ALL: [EngineKind; 2] = [EngineKind::Hash, EngineKind::Lsm];

    /// Its name in configurations.
    pub fn name(self) -> &'static str {
        match self {
            EngineKind::Hash => "hash",
            EngineKind::Lsm => "lsm",
        }
    }

    /// What it is, in a few words.
    pub fn summary(self) -> &'static str {
        match self {
            EngineKind::Hash => "A hash index in memory",
            EngineKind::Lsm => "A log-structured merge tree, with snapshots in the order of keys",
        }
    }

    /// The engine of a superblock.
    pub fn from_number(number: EngineNumber) -> Option<EngineKind> {
        match number {
            EngineNumber::HASH => Some(EngineKind::Hash),
            EngineNumber::LSM => Some(EngineKind::Lsm),
            _ => None,
        }
    }
}

/// No engine has this name. The text completes "engine: …".
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("there is no engine \"{0}\": {names}", names = names())]
pub struct UnknownEngine(String);

fn names() -> String {
    EngineKind::ALL.map(|kind| format!("\"{kind}\"")).join(", ")
}

impl FromStr for EngineKind {
    type Err = UnknownEngine;
    fn from_str(name: &str) -> Result<EngineKind, UnknownEngine> {
        EngineKind::ALL.into_iter().find(|kind| kind.name() == name).ok_or(UnknownEngine(name.to_owned()))
    }
}

impl fmt::Display for EngineKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
