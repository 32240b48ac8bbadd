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
    /// The log engine: a few bytes of memory for each segment of keys, values in circular logs.
    Log,
}

impl EngineKind {
    /// Every engine.
    pub const ALL: [EngineKind; 3] = [EngineKind::Hash, EngineKind::Lsm, EngineKind::Log];

    /// Its name in configurations.
    pub fn name(self) -> &'static str {
        match self {
            EngineKind::Hash => "hash",
            EngineKind::Lsm => "lsm",
            EngineKind::Log => "log",
        }
    }

    /// What it is, in a few words.
    pub fn summary(self) -> &'static str {
        match self {
            EngineKind::Hash => "A hash index in memory",
            EngineKind::Lsm => "A log-structured merge tree, with snapshots in the order of keys",
            EngineKind::Log => {
                "Circular logs with little memory for each key (experimental: its format may change)"
            }
        }
    }

    /// Its number in superblocks.
    pub fn number(self) -> EngineNumber {
        match self {
            EngineKind::Hash => EngineNumber::HASH,
            EngineKind::Lsm => EngineNumber::LSM,
            EngineKind::Log => EngineNumber::LOG,
        }
    }

    /// The engine of a superblock.
    pub fn from_number(number: EngineNumber) -> Option<EngineKind> {
        match number {
            EngineNumber::HASH => Some(EngineKind::Hash),
            EngineNumber::LSM => Some(EngineKind::Lsm),
            EngineNumber::LOG => Some(EngineKind::Log),
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_engine_has_a_name_and_a_number_of_its_own() {
        for (kind, number) in
            EngineKind::ALL.into_iter().zip([EngineNumber::HASH, EngineNumber::LSM, EngineNumber::LOG])
        {
            assert_eq!(EngineKind::from_number(number), Some(kind));
            assert_eq!(kind.name().parse(), Ok(kind));
        }
        assert_eq!(EngineKind::from_number(EngineNumber(4)), None);
        let error = "btree".parse::<EngineKind>().expect_err("there is none").to_string();
        assert_eq!(error, "there is no engine \"btree\": \"hash\", \"lsm\", \"log\"");
    }
}
