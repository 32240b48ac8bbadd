//! The devices of a namespace, by name: one string in JSON and TOML, or a list of several.

use octokv_node::DeviceConfig;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::path::{Path, PathBuf};

/// The name of a device in memory.
pub const MEMORY_DEVICE: &str = "memory";

/// Names of devices, each a path or [`MEMORY_DEVICE`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "OneOrSeveral", into = "OneOrSeveral")]
pub struct DeviceNames(Vec<String>);

#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum OneOrSeveral {
    One(String),
    Several(Vec<String>),
}

impl From<OneOrSeveral> for DeviceNames {
    fn from(names: OneOrSeveral) -> DeviceNames {
        DeviceNames(match names {
            OneOrSeveral::One(name) => vec![name],
            OneOrSeveral::Several(names) => names,
        })
    }
}

impl From<DeviceNames> for OneOrSeveral {
    fn from(DeviceNames(mut names): DeviceNames) -> OneOrSeveral {
        match names.len() {
            1 => OneOrSeveral::One(names.remove(0)),
            _ => OneOrSeveral::Several(names),
        }
    }
}

impl DeviceNames {
    /// Devices of these names.
    pub fn new(names: Vec<String>) -> DeviceNames {
        DeviceNames(names)
    }

    /// Those of a node's configuration.
    ///
    /// # Errors
    /// A path that is not UTF-8.
    pub fn of_configs(devices: &[DeviceConfig]) -> DeviceNames {
        let name = |device: &DeviceConfig| match device {
            DeviceConfig::Memory { .. } => MEMORY_DEVICE.to_owned(),
            DeviceConfig::File { path, .. } => path.display().to_string(),
        };
        DeviceNames(devices.iter().map(name).collect())
    }

    /// Whether there is none, or one without a name.
    pub fn is_incomplete(&self) -> bool {
        self.0.is_empty() || self.0.iter().any(String::is_empty)
    }

    /// Whether one is memory.
    pub fn has_memory(&self) -> bool {
        self.0.iter().any(|name| name == MEMORY_DEVICE)
    }

    /// The paths of those that are not memory.
    pub fn paths(&self) -> impl Iterator<Item = PathBuf> {
        self.0.iter().filter(|name| *name != MEMORY_DEVICE).map(PathBuf::from)
    }

    /// With absolute paths, since the node's working directory may differ.
    ///
    /// # Errors
    /// A path that cannot be made absolute, or is not UTF-8: a text that names it.
    pub fn absolute(&self) -> Result<DeviceNames, String> {
        let absolute = |name: &String| {
            if name == MEMORY_DEVICE || name.is_empty() {
                return Ok(name.clone());
            }
            let path =
                std::path::absolute(Path::new(name)).map_err(|error| format!("device {name}: {error}"))?;
            path.into_os_string().into_string().map_err(|_| "device: the path is not UTF-8".to_owned())
        };
        self.0.iter().map(absolute).collect::<Result<_, _>>().map(DeviceNames)
    }

    /// The configuration of each: of a missing file, or of memory, `size_bytes` is the size.
    pub fn to_configs(&self, size_bytes: Option<u64>, memory_block_bytes: u32) -> Vec<DeviceConfig> {
        let config = |name: &String| match name.as_str() {
            MEMORY_DEVICE => {
                DeviceConfig::Memory { bytes: size_bytes.unwrap_or(0), block_bytes: memory_block_bytes }
            }
            path => DeviceConfig::File { path: path.into(), create_bytes: size_bytes },
        };
        self.0.iter().map(config).collect()
    }
}

impl fmt::Display for DeviceNames {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_device_is_a_string_and_several_are_a_list() {
        let names = |of: &[&str]| DeviceNames::new(of.iter().map(|name| (*name).to_owned()).collect());
        for (devices, json) in [(names(&["/a"]), "\"/a\""), (names(&["/a", "memory"]), "[\"/a\",\"memory\"]")]
        {
            assert_eq!(serde_json::to_string(&devices).unwrap(), json);
            assert_eq!(serde_json::from_str::<DeviceNames>(json).unwrap(), devices);
        }
        assert_eq!(serde_json::from_str::<DeviceNames>("[\"/a\"]").unwrap(), names(&["/a"]));
        assert_eq!(names(&["/a", "memory"]).to_string(), "/a, memory");
        assert!(names(&[]).is_incomplete() && names(&["/a", ""]).is_incomplete());
        assert!(names(&["/a", "memory"]).has_memory() && !names(&["/a"]).has_memory());
        assert_eq!(names(&["/a", "memory"]).absolute(), Ok(names(&["/a", "memory"])));
    }
}
