//! The file of starting costs: `octokv calibrate --json` writes it, `octokv serve --token-costs` reads it.
//!
//! ```text
//!   {"schema": "octokv-token-costs/1",
//!    "get": {"tokens": 16, "tokens_per_4k": 16}, "put": {...}, "delete": {...},      of a command of up to 4 KiB, of each further 4 KiB
//!    "calibration": {...}}                                                           what they were measured on; not used
//! ```
//! In: a path, or a calibration. Out: [`StartingCosts`], or one line that names file and field.
//! Invariant: costs that are accepted fit the fields in which hosts read them, and a Get of up to 4 KiB costs what defines a token. Tested below.

use octokv_bench::machine_info::MachineInfo;
use octokv_sched::{GET_TOKENS, KindCost, STARTING_TOKENS_MAX, StartingCosts};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::path::Path;

/// Name and version of the format.
const TOKEN_COSTS_SCHEMA: &str = "octokv-token-costs/1";
/// The longest file that is read, in bytes.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// The costs of a kind as they are in a file.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct KindSection {
    tokens: Value,
    tokens_per_4k: Value,
}

/// A file as it is read.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct TokenCostsFile {
    schema: String,
    get: KindSection,
    put: KindSection,
    delete: KindSection,
    #[serde(default, rename = "calibration")]
    _calibration: Value,
}

/// A cost in a written file.
#[derive(Serialize)]
struct WrittenCost {
    tokens: u32,
    tokens_per_4k: u32,
}

/// A file as it is written.
#[derive(Serialize)]
struct WrittenCosts<'a> {
    schema: &'static str,
    get: WrittenCost,
    put: WrittenCost,
    delete: WrittenCost,
    calibration: &'a CalibrationReport,
}

/// What costs were measured on, and how.
#[derive(Debug, Serialize)]
pub struct CalibrationReport {
    /// The version of octokv that measured.
    pub octokv_version: &'static str,
    /// The machine.
    pub machine: MachineInfo,
    /// Path and size of the device.
    pub path: String,
    pub device_bytes: u64,
    /// The simulated drive, if there was one.
    pub nand: Option<&'static str>,
    pub engine: &'static str,
    /// When writes were acknowledged: flush or device.
    pub durability: &'static str,
    pub value_bytes: usize,
    pub keys: u64,
    /// Operations in flight.
    pub depth: usize,
    pub cores: usize,
    pub rounds: usize,
    pub get: KindReport,
    pub put: KindReport,
    pub delete: KindReport,
    /// Measurements that began while the engine still worked in the background.
    pub unsettled: u32,
}

/// The measurements of one kind.
#[derive(Debug, Serialize)]
pub struct KindReport {
    /// Operations and seconds of all rounds.
    pub operations: u64,
    pub seconds: f64,
    /// Time of an operation: the median of the rounds.
    pub us_per_operation: f64,
    /// That time divided by the one of a get: median, least and greatest of the rounds.
    pub ratio: f64,
    pub ratio_min: f64,
    pub ratio_max: f64,
    /// Throughput with twice the operations in flight, divided by the median.
    pub deeper_gain: f64,
}

/// Reads the costs in a file.
///
/// # Errors
/// One line with the file, and the field or the position of what is wrong.
pub fn read(path: &Path) -> Result<StartingCosts, String> {
    let named = |why: &dyn std::fmt::Display| format!("token costs {}: {why}", path.display());
    let metadata = std::fs::metadata(path).map_err(|error| named(&error))?;
    if !metadata.is_file() || metadata.len() > FILE_BYTES_MAX {
        return Err(named(&"not a file that octokv calibrate --json wrote"));
    }
    let text = std::fs::read_to_string(path).map_err(|error| named(&error))?;
    parse(&text).map_err(|why| named(&why))
}

fn parse(text: &str) -> Result<StartingCosts, String> {
    let file: TokenCostsFile = serde_json::from_str(text).map_err(|error| error.to_string())?;
    if file.schema != TOKEN_COSTS_SCHEMA {
        return Err(format!("schema is \"{}\"; must be \"{TOKEN_COSTS_SCHEMA}\"", file.schema));
    }
    let get = kind_cost("get", &file.get)?;
    if get.tokens != GET_TOKENS {
        return Err(format!("get.tokens is {}; must be {GET_TOKENS}, which defines a token", get.tokens));
    }
    Ok(StartingCosts { get, put: kind_cost("put", &file.put)?, delete: kind_cost("delete", &file.delete)? })
}

fn kind_cost(kind: &str, section: &KindSection) -> Result<KindCost, String> {
    let tokens_of = |field: &str, value: &Value| {
        let tokens = value.as_u64().and_then(|tokens| u32::try_from(tokens).ok());
        tokens.filter(|tokens| (1..=STARTING_TOKENS_MAX).contains(tokens)).ok_or_else(|| {
            format!("{kind}.{field} is {value}; must be a whole number from 1 to {STARTING_TOKENS_MAX}")
        })
    };
    Ok(KindCost {
        tokens: tokens_of("tokens", &section.tokens)?,
        tokens_per_4k: tokens_of("tokens_per_4k", &section.tokens_per_4k)?,
    })
}

/// The text of a file with these costs.
///
/// # Errors
/// A number that JSON does not have.
pub fn to_text(costs: &StartingCosts, calibration: &CalibrationReport) -> Result<String, serde_json::Error> {
    let written = |KindCost { tokens, tokens_per_4k }| WrittenCost { tokens, tokens_per_4k };
    let mut text = serde_json::to_string_pretty(&WrittenCosts {
        schema: TOKEN_COSTS_SCHEMA,
        get: written(costs.get),
        put: written(costs.put),
        delete: written(costs.delete),
        calibration,
    })?;
    text.push('\n');
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    const VALID: &str = r#"{"schema": "octokv-token-costs/1", "get": {"tokens": 16, "tokens_per_4k": 12},
        "put": {"tokens": 40, "tokens_per_4k": 7}, "delete": {"tokens": 1, "tokens_per_4k": 32767}}"#;

    fn costs() -> StartingCosts {
        StartingCosts {
            get: KindCost { tokens: 16, tokens_per_4k: 12 },
            put: KindCost { tokens: 40, tokens_per_4k: 7 },
            delete: KindCost { tokens: 1, tokens_per_4k: 32_767 },
        }
    }

    #[test]
    fn costs_are_those_of_the_file() {
        assert_eq!(parse(VALID), Ok(costs()));
        let noted = VALID.replacen('{', r#"{"calibration": {"of": ["anything"]}, "#, 1);
        assert_eq!(parse(&noted), Ok(costs()));
    }

    #[test]
    fn what_is_written_is_read() {
        let kind = |ratio| KindReport {
            operations: 7,
            seconds: 0.5,
            us_per_operation: 3.25,
            ratio,
            ratio_min: ratio,
            ratio_max: ratio,
            deeper_gain: 1.0,
        };
        let calibration = CalibrationReport {
            octokv_version: "1",
            machine: MachineInfo::of_this_machine(),
            path: "a \"file\"".to_owned(),
            device_bytes: 5,
            nand: None,
            engine: "hash",
            durability: "flush",
            value_bytes: 1024,
            keys: 9,
            depth: 256,
            cores: 1,
            rounds: 5,
            get: kind(1.0),
            put: kind(2.5),
            delete: kind(0.1),
            unsettled: 0,
        };
        let text = to_text(&costs(), &calibration).unwrap();
        assert_eq!(parse(&text), Ok(costs()));
        let value: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(
            (&value["calibration"]["put"]["ratio"], &value["put"]["tokens"]),
            (&2.5.into(), &40.into())
        );
    }

    #[test]
    fn what_is_no_cost_is_refused_with_its_field() {
        let table: &[(&str, &str, &[&str])] = &[
            ("\"tokens\": 40", "\"tokens\": 0", &["put.tokens is 0", "from 1 to 32767"]),
            ("\"tokens\": 40", "\"tokens\": -4", &["put.tokens is -4", "from 1 to 32767"]),
            ("\"tokens\": 40", "\"tokens\": 32768", &["put.tokens is 32768"]),
            ("\"tokens\": 40", "\"tokens\": 4294967312", &["put.tokens is 4294967312"]),
            ("\"tokens\": 40", "\"tokens\": 40.5", &["put.tokens is 40.5", "whole number"]),
            ("\"tokens\": 40", "\"tokens\": \"40\"", &["put.tokens is \"40\""]),
            ("\"tokens\": 40", "\"tokens\": null", &["put.tokens is null"]),
            ("\"tokens\": 40", "\"tokens\": NaN", &["line 2"]),
            ("\"tokens\": 40", "\"tokens\": 40, \"tokens\": 41", &["duplicate field `tokens`"]),
            ("\"tokens\": 40, ", "", &["missing field `tokens`"]),
            ("\"tokens_per_4k\": 7", "\"tokens_per_4k\": 0", &["put.tokens_per_4k is 0"]),
            ("32767", "32768", &["delete.tokens_per_4k is 32768"]),
            ("\"tokens\": 16", "\"tokens\": 17", &["get.tokens is 17", "must be 16"]),
            ("\"put\"", "\"store\"", &["unknown field `store`", "`put`"]),
            ("\"tokens\": 1,", "\"tokens\": 1, \"bytes\": 1,", &["unknown field `bytes`"]),
            ("costs/1", "costs/2", &["schema is \"octokv-token-costs/2\"", "octokv-token-costs/1"]),
            ("\"schema\": \"octokv-token-costs/1\", ", "", &["missing field `schema`"]),
            ("\"delete\": {", "\"delete\": [", &["line 2"]),
            (VALID, "", &["EOF"]),
        ];
        for (what, with, parts) in table {
            assert!(VALID.contains(what), "{what}");
            let why = parse(&VALID.replacen(what, with, 1)).unwrap_err();
            for part in *parts {
                assert!(why.contains(part), "{with}: no \"{part}\" in {why}");
            }
            assert!(!why.contains('\n'), "{why}");
        }
    }

    #[test]
    fn an_error_names_the_file() {
        let why = read(Path::new("no-such.json")).unwrap_err();
        assert!(why.starts_with("token costs no-such.json: "), "{why}");
        let why = read(Path::new("/")).unwrap_err();
        assert!(why.contains("octokv calibrate"), "{why}");
    }
}
