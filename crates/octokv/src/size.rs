//! Sizes with units: `4096`, `"512MiB"`, `"1GiB"`, `"4KB"`; and size distributions: `100..2000`, `4KiB:9,64KiB:1`.

use bytesize::ByteSize;
use octokv_bench::SizeDistribution;
use octokv_engine::lsm::prefetch_degree::PrefetchMode;
use serde::de::{Deserialize, Deserializer, Error, Visitor};
use std::fmt;
use std::str::FromStr;

/// A number of bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Size(pub u64);

const EXPECTED: &str = "a size such as 4096, 512MiB or 1GiB";

impl FromStr for Size {
    type Err = String;
    fn from_str(text: &str) -> Result<Size, String> {
        match text.parse::<ByteSize>() {
            Ok(size) => Ok(Size(size.as_u64())),
            Err(_) => Err(format!("\"{text}\" is not {EXPECTED}")),
        }
    }
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        ByteSize::b(self.0).display().iec().fmt(f)
    }
}

impl<'de> Deserialize<'de> for Size {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Size, D::Error> {
        struct SizeVisitor;
        impl Visitor<'_> for SizeVisitor {
            type Value = Size;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(EXPECTED)
            }
            fn visit_i64<E: Error>(self, bytes: i64) -> Result<Size, E> {
                u64::try_from(bytes).map(Size).map_err(|_| E::custom(format!("{bytes} is not {EXPECTED}")))
            }
            fn visit_u64<E: Error>(self, bytes: u64) -> Result<Size, E> {
                Ok(Size(bytes))
            }
            fn visit_str<E: Error>(self, text: &str) -> Result<Size, E> {
                text.parse().map_err(E::custom)
            }
        }
        deserializer.deserialize_any(SizeVisitor)
    }
}

/// The allocation unit of a volume, or a chunk of one, in bytes; `None`, in text `auto`, if the device determines it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnitSetting(pub Option<u32>);

const AUTO: &str = "auto";

impl FromStr for UnitSetting {
    type Err = String;
    fn from_str(text: &str) -> Result<UnitSetting, String> {
        match text {
            AUTO => Ok(UnitSetting(None)),
            size => match size.parse::<Size>() {
                Ok(size) => Ok(size.into()),
                Err(_) => Err(format!("\"{size}\" is not {AUTO} or {EXPECTED}")),
            },
        }
    }
}

impl From<Size> for UnitSetting {
    /// A size beyond the range of units stays beyond it.
    fn from(Size(bytes): Size) -> UnitSetting {
        UnitSetting(Some(u32::try_from(bytes).unwrap_or(u32::MAX)))
    }
}

impl<'de> Deserialize<'de> for UnitSetting {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<UnitSetting, D::Error> {
        deserialize_auto(deserializer, UnitSetting::from)
    }
}

/// A rate in bytes per second; `None`, in text `auto`, if what it is for determines it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RateSetting(pub Option<u64>);

impl FromStr for RateSetting {
    type Err = String;
    fn from_str(text: &str) -> Result<RateSetting, String> {
        match text {
            AUTO => Ok(RateSetting(None)),
            rate => match rate.parse::<Size>() {
                Ok(Size(bytes)) => Ok(RateSetting(Some(bytes))),
                Err(_) => Err(format!("\"{rate}\" is not {AUTO} or {EXPECTED}")),
            },
        }
    }
}

impl<'de> Deserialize<'de> for RateSetting {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<RateSetting, D::Error> {
        deserialize_auto(deserializer, |Size(bytes)| RateSetting(Some(bytes)))
    }
}

/// How many values iterators read ahead; in text `auto` or a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrefetchSetting(pub PrefetchMode);

impl FromStr for PrefetchSetting {
    type Err = String;
    fn from_str(text: &str) -> Result<PrefetchSetting, String> {
        match text {
            AUTO => Ok(PrefetchSetting(PrefetchMode::Adaptive)),
            values => match values.parse() {
                Ok(values) => Ok(PrefetchSetting(PrefetchMode::Fixed(values))),
                Err(_) => Err(format!("\"{values}\" is not {AUTO} or a number of values")),
            },
        }
    }
}

impl<'de> Deserialize<'de> for PrefetchSetting {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<PrefetchSetting, D::Error> {
        #[derive(serde::Deserialize)]
        #[serde(untagged)]
        enum ValuesOrText {
            Values(u32),
            Text(String),
        }
        match ValuesOrText::deserialize(deserializer) {
            Ok(ValuesOrText::Values(values)) => Ok(PrefetchSetting(PrefetchMode::Fixed(values))),
            Ok(ValuesOrText::Text(text)) => text.parse().map_err(Error::custom),
            Err(_) => Err(Error::custom(format!("not {AUTO} or a number of values"))),
        }
    }
}

/// A size, or a text that may be `auto`.
fn deserialize_auto<'de, D: Deserializer<'de>, T: FromStr<Err = String>>(
    deserializer: D,
    of_size: impl FnOnce(Size) -> T,
) -> Result<T, D::Error> {
    #[derive(serde::Deserialize)]
    #[serde(untagged)]
    enum SizeOrText {
        Bytes(u64),
        Text(String),
    }
    match SizeOrText::deserialize(deserializer) {
        Ok(SizeOrText::Bytes(bytes)) => Ok(of_size(Size(bytes))),
        Ok(SizeOrText::Text(text)) => text.parse().map_err(Error::custom),
        Err(_) => Err(Error::custom(format!("not {AUTO} or {EXPECTED}"))),
    }
}

/// Size distribution of keys or values.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SizeDistributionArg(pub SizeDistribution);

impl FromStr for SizeDistributionArg {
    type Err = String;
    fn from_str(text: &str) -> Result<SizeDistributionArg, String> {
        let one = |text: &str| -> Result<usize, String> {
            let Size(bytes) = text.parse()?;
            usize::try_from(bytes).map_err(|_| format!("{bytes} bytes exceed the address space"))
        };
        let weighted = |part: &str| {
            let (bytes, share) = part.split_once(':').ok_or("every size needs a weight: BYTES:WEIGHT")?;
            let share =
                share.trim().parse().map_err(|_| format!("\"{share}\" is not a weight (an integer)"))?;
            Ok::<_, String>((one(bytes)?, share))
        };
        let sizes = if let Some((least, most)) = text.split_once("..") {
            SizeDistribution::Uniform { min: one(least)?, max: one(most)? }
        } else if text.contains([',', ':']) {
            SizeDistribution::Weighted(text.split(',').map(weighted).collect::<Result<_, _>>()?)
        } else {
            SizeDistribution::Fixed(one(text)?)
        };
        match sizes.is_valid() {
            true => Ok(SizeDistributionArg(sizes)),
            false => Err("a range must not be empty, and of 1 to 64 weights at least one must be above zero"
                .to_owned()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn size_distributions_are_fixed_uniform_or_weighted() {
        let table = [
            ("4KiB", Some(SizeDistribution::Fixed(4096))),
            ("100..2000", Some(SizeDistribution::Uniform { min: 100, max: 2000 })),
            ("1KiB..2KiB", Some(SizeDistribution::Uniform { min: 1024, max: 2048 })),
            ("4096:9,64KiB:1", Some(SizeDistribution::Weighted(vec![(4096, 9), (65536, 1)]))),
            ("7:1", Some(SizeDistribution::Weighted(vec![(7, 1)]))),
            ("2000..100", None),
            ("..100", None),
            ("100..", None),
            ("4096,100", None),
            ("4096:x", None),
            ("4096:-1", None),
            ("4096:0", None),
            ("", None),
        ];
        for (text, want) in table {
            assert_eq!(text.parse().ok(), want.map(SizeDistributionArg), "{text}");
        }
    }

    #[test]
    fn sizes_are_parsed_with_their_units() {
        let table = [
            ("4096", Some(4096)),
            ("1GiB", Some(1 << 30)),
            ("512 MiB", Some(512 << 20)),
            ("4KB", Some(4000)),
            ("1.5KiB", Some(1536)),
            ("", None),
            ("-1", None),
            ("1 parsec", None),
            ("GiB", None),
        ];
        for (text, want) in table {
            assert_eq!(text.parse().ok(), want.map(Size), "{text}");
        }
    }
}
