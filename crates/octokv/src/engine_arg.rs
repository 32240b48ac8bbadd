//! Names of storage engines, such as `hash`.

use clap::ValueEnum;
use clap::builder::PossibleValue;
use octokv_engine::EngineKind;
use serde::de::{Deserialize, Deserializer, Error};

/// The storage engine of a namespace.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EngineArg(pub EngineKind);

const ALL: [EngineArg; EngineKind::ALL.len()] = {
    let mut all = [EngineArg(EngineKind::ALL[0]); EngineKind::ALL.len()];
    let mut at = 0;
    while at < all.len() {
        all[at] = EngineArg(EngineKind::ALL[at]);
        at += 1;
    }
    all
};

impl ValueEnum for EngineArg {
    fn value_variants<'a>() -> &'a [EngineArg] {
        &ALL
    }
    fn to_possible_value(&self) -> Option<PossibleValue> {
        Some(PossibleValue::new(self.0.name()).help(self.0.summary()))
    }
}

impl<'de> Deserialize<'de> for EngineArg {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<EngineArg, D::Error> {
        let name = String::deserialize(deserializer)?;
        name.parse().map(EngineArg).map_err(D::Error::custom)
    }
}
