//! Sizes as people write them: `4096`, `"512MiB"`, `"1GiB"`, `"4KB"`.

use bytesize::ByteSize;
use serde::de::{Deserialize, Deserializer, Error, Visitor};
use std::fmt;
use std::str::FromStr;

/// A number of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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
        struct Either;
        impl Visitor<'_> for Either {
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
        deserializer.deserialize_any(Either)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_as_people_write_them() {
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
