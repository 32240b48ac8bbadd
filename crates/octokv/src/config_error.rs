//! Error messages about a configuration file: line, key, and the most similar valid key.

use octokv_admin::scheduling_api::{renamed_setting, unknown_field};
use std::path::Path;

/// Former names of top-level keys, each with the present name.
const RENAMED_KEYS: &[(&str, &str)] = &[("outbox_bytes_max", "send_buffer_bytes_max")];
/// Minimum similarity (0 to 1) of a wrong key and a valid one for a suggestion.
const SIMILARITY_MIN: f64 = 0.5;

/// A setting with an invalid value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InvalidSetting {
    /// Its key.
    pub key: &'static str,
    /// Its valid values, after "must be".
    pub requirement: String,
}

/// Checks that a value is within `from..=to`; `requirement` says so in words.
///
/// # Errors
/// The setting with its requirement.
pub fn check_range<T: PartialOrd>(
    key: &'static str,
    value: &T,
    from: T,
    to: T,
    requirement: &str,
) -> Result<(), InvalidSetting> {
    if *value < from || *value > to {
        return Err(InvalidSetting { key, requirement: requirement.to_owned() });
    }
    Ok(())
}

/// One line with the location and the cause of an error. `keys` are the valid top-level keys.
pub fn describe_error(
    path: &Path,
    text: &str,
    error: &toml::de::Error,
    keys: &'static [&'static str],
) -> String {
    let at = error.span().map_or(0, |span| span.start).min(text.len());
    let location = file_and_line(path, text, at);
    if let Some(key) = unknown_field(error.message()) {
        if let Some(renamed) = renamed_key(key) {
            return format!("{location}: {renamed}");
        }
        let nearest = match nearest_key(key, keys) {
            // Valid, but at the top level and not in this table.
            Some(name) if name == key => {
                format!("\"{name}\" is set at the top of the file, for all namespaces")
            }
            Some(name) => format!("did you mean \"{name}\"?"),
            None => "octokv.example.toml documents all settings".to_owned(),
        };
        return format!("{location}: unknown setting \"{key}\"; {nearest}");
    }
    let message = error.message().replace('\n', ", ");
    match key_at(text, at) {
        Some(key) => format!("{location}: {key}: {message}"),
        None => format!("{location}: {message}"),
    }
}

/// The location of a key as `file:line`, if the file sets it.
pub fn locate_key(path: &Path, text: &str, key: &str) -> Option<String> {
    let mut at = 0;
    for line in text.split_inclusive('\n') {
        if key_in_line(line) == Some(key) {
            return Some(file_and_line(path, text, at));
        }
        at += line.len();
    }
    None
}

/// The most similar valid key, if one is similar enough.
fn nearest_key(key: &str, keys: &'static [&'static str]) -> Option<&'static str> {
    let similarity = |name: &&&str| strsim::normalized_damerau_levenshtein(&key.to_lowercase(), name);
    let best = keys.iter().max_by(|a, b| similarity(a).total_cmp(&similarity(b)))?;
    // A short form of the key from a flag or another project: `depth`, `partitions`.
    let part = || keys.iter().find(|name| key.len() >= 4 && name.contains(key));
    if similarity(&best) >= SIMILARITY_MIN { Some(best) } else { part().copied() }
}

/// A sentence with the present name of a key, if `key` is a former name.
fn renamed_key(key: &str) -> Option<String> {
    if let Some(new) = renamed_setting(key) {
        return Some(format!("sched.{key} is now sched.{new}"));
    }
    let (_, new) = RENAMED_KEYS.iter().find(|(old, _)| *old == key)?;
    Some(format!("{key} is now {new}"))
}

fn file_and_line(path: &Path, text: &str, at: usize) -> String {
    let line = text.as_bytes()[..at].iter().filter(|&&byte| byte == b'\n').count() + 1;
    format!("{}:{line}", path.display())
}

fn key_in_line(line: &str) -> Option<&str> {
    let (key, _) = line.split_once('=')?;
    let key = key.trim();
    (!key.is_empty() && !key.starts_with('#')).then_some(key)
}

/// The key whose value is at a position or spans it.
fn key_at(text: &str, at: usize) -> Option<&str> {
    let end = text[at..].find('\n').map_or(text.len(), |newline| at + newline);
    text[..end].lines().rev().find_map(key_in_line)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::parse_config;

    #[test]
    fn errors_name_file_line_key_and_the_nearest_name() {
        let table: &[(&str, &[&str])] = &[
            ("\ndurabilty = \"flush\"", &["a.toml:2: unknown setting \"durabilty\"", "\"durability\""]),
            ("Device = \"x\"", &["a.toml:1: ", "\"device\""]),
            ("depth = 4", &["unknown setting \"depth\"", "\"device_depth\""]),
            ("zzzzzzz = 4", &["unknown setting \"zzzzzzz\"", "octokv.example.toml"]),
            ("[limits]\nx = 1", &["a.toml:1: unknown setting \"limits\""]),
            ("size = 1\npolling = \"fast\"", &["a.toml:2: polling: ", "fast", "adaptive"]),
            ("[[namespace]]\nunit = 512", &["unknown setting \"unit\"", "at the top of the file"]),
            ("size = \"big\"", &["a.toml:1: size: ", "\"big\" is not a size"]),
            ("listen = [\n \"127.0.0.1\",\n]", &["listen: ", "socket address"]),
            ("cores = \"0\"", &["a.toml:1: cores: "]),
            ("event_requests_max = 300", &["a.toml:1: event_requests_max: ", "300"]),
            ("size = ", &["a.toml:1: size: "]),
            ("unit = 1\nunit = 2", &["a.toml:2: unit: ", "duplicate"]),
        ];
        for (text, wanted) in table {
            let error = parse_config(Path::new("a.toml"), text).unwrap_err();
            for part in *wanted {
                assert!(error.contains(part), "{text:?}: {error}");
            }
            assert!(!error.contains('\n'), "{error}");
        }
    }

    #[test]
    fn a_former_key_fails_with_its_present_name() {
        for (text, wanted) in [
            ("\noutbox_bytes_max = 4096", "a.toml:2: outbox_bytes_max is now send_buffer_bytes_max"),
            ("sched = { window_ms = 9 }", "a.toml:1: sched.window_ms is now sched.interval_ms"),
            ("[sched]\nbackwardings_max = 9", "a.toml:2: sched.backwardings_max is now sched.requeues_max"),
            ("sched.move_flows = \"all\"", "a.toml:1: sched.move_flows is now sched.migrate_tenants"),
        ] {
            assert_eq!(parse_config(Path::new("a.toml"), text).unwrap_err(), wanted);
        }
    }

    #[test]
    fn a_key_is_found_where_it_is_set() {
        let text = "# unit = 1\nsize = 2\n unit = 3\n";
        assert_eq!(locate_key(Path::new("a"), text, "unit").as_deref(), Some("a:3"));
        assert_eq!(locate_key(Path::new("a"), text, "hash"), None);
    }
}
