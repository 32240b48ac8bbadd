//! Names of simulated drives: `none`, `970-evo`, `leed`, `cosmos-plus`.

use clap::ValueEnum;
use clap::builder::PossibleValue;
use octokv_device::ssd_model::DriveProfile;
use octokv_device::ssd_model::drive_profiles::DRIVE_PROFILES;
use serde::de::{Deserialize, Deserializer, Error};

/// A drive to simulate; `None` for the device's own service time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DriveArg(pub Option<&'static DriveProfile>);

const NONE: &str = "none";
const ALL: [DriveArg; 4] = [
    DriveArg(None),
    DriveArg(Some(DRIVE_PROFILES[0])),
    DriveArg(Some(DRIVE_PROFILES[1])),
    DriveArg(Some(DRIVE_PROFILES[2])),
];
const _: () = assert!(ALL.len() == DRIVE_PROFILES.len() + 1);

impl DriveArg {
    fn name(self) -> &'static str {
        self.0.map_or(NONE, |drive| drive.name)
    }
}

impl ValueEnum for DriveArg {
    fn value_variants<'a>() -> &'a [DriveArg] {
        &ALL
    }
    fn to_possible_value(&self) -> Option<PossibleValue> {
        let help = self.0.map_or("The device's own service time", |drive| drive.product);
        Some(PossibleValue::new(self.name()).help(help))
    }
}

impl<'de> Deserialize<'de> for DriveArg {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<DriveArg, D::Error> {
        let name = String::deserialize(deserializer)?;
        ALL.into_iter().find(|nand| nand.name() == name).ok_or_else(|| {
            let names: Vec<String> = ALL.iter().map(|nand| format!("\"{}\"", nand.name())).collect();
            D::Error::custom(format!("unknown drive \"{name}\"; must be one of {}", names.join(", ")))
        })
    }
}
