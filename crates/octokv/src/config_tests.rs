//! The configuration: every key of the example, what files and flags set, and what is refused.

use super::*;

const EXAMPLE: &str = include_str!("../../../octokv.example.toml");

fn parse_text(text: &str) -> Result<ConfigFile, String> {
    parse_config(Path::new("octokv.toml"), text)
}

#[test]
fn the_example_documents_every_setting_with_its_default() {
    assert_eq!(parse_text(EXAMPLE), Ok(ConfigFile::default()));
    let table: toml::Table = EXAMPLE.parse().unwrap();
    let mut named: Vec<&str> = table.keys().map(String::as_str).collect();
    let mut keys = CONFIG_KEYS.to_vec();
    named.sort_unstable();
    keys.sort_unstable();
    assert_eq!(named, keys);
    for (number, line) in EXAMPLE.lines().enumerate().filter(|(_, line)| line.contains(" = ")) {
        if !line.starts_with('#') {
            let before = EXAMPLE.lines().nth(number - 1).unwrap();
            assert!(before.starts_with("# "), "no comment above {line}");
        }
    }
}

#[test]
fn without_a_file_the_config_equals_the_node_defaults() {
    let ours = format!("{:?}", ConfigFile::default().to_node_config(ExistingDataPolicy::Check).unwrap());
    assert_eq!(ours, format!("{:?}", NodeConfig::default()));
}

#[test]
fn flags_override_the_file() {
    let mut config = parse_text("device = \"a\"\nsize = \"1MiB\"\ncores = [3]").unwrap();
    let flags = ServeArgs { device: vec!["b".into()], cores: vec![0, 1], ..ServeArgs::default() };
    config.apply_flags(&flags);
    assert_eq!(
        (config.device.to_string().as_str(), config.size, config.cores),
        ("b", Size(1 << 20), vec![0, 1])
    );
}

#[test]
fn the_unit_is_the_devices_unless_it_is_given() {
    for (text, want) in
        [("", None), ("unit = \"auto\"", None), ("unit = 512", Some(512)), ("unit = \"4KiB\"", Some(4096))]
    {
        let node = parse_text(text).unwrap().to_node_config(ExistingDataPolicy::Check).unwrap();
        assert_eq!(node.format.unit_bytes, want, "{text}");
    }
    let mut config = parse_text("unit = 1024").unwrap();
    config.apply_flags(&ServeArgs { unit: Some("auto".parse().unwrap()), ..ServeArgs::default() });
    assert_eq!(config.to_node_config(ExistingDataPolicy::Check).unwrap().format.unit_bytes, None);
}

#[test]
fn the_rate_of_compaction_is_the_engines_unless_it_is_given() {
    for (text, want) in [
        ("", None),
        ("compact_bytes_per_second = \"auto\"", None),
        ("compact_bytes_per_second = 0", Some(0)),
        ("compact_bytes_per_second = \"16MiB\"", Some(16 << 20)),
    ] {
        let node = parse_text(text).unwrap().to_node_config(ExistingDataPolicy::Check).unwrap();
        assert_eq!(node.compact_bytes_per_second, want, "{text}");
    }
    assert!(parse_text("compact_bytes_per_second = \"fast\"").is_err());
}

#[test]
fn the_rate_of_the_scrub_is_that_of_the_file_or_the_flag() {
    for (text, want) in
        [("", 4 << 20), ("scrub_bytes_per_second = 0", 0), ("scrub_bytes_per_second = \"1MiB\"", 1 << 20)]
    {
        let node = parse_text(text).unwrap().to_node_config(ExistingDataPolicy::Check).unwrap();
        assert_eq!(node.scrub_bytes_per_second, want, "{text}");
    }
    let mut config = parse_text("scrub_bytes_per_second = 0").unwrap();
    config.apply_flags(&ServeArgs { scrub_bytes_per_second: Some(Size(7)), ..ServeArgs::default() });
    assert_eq!(config.to_node_config(ExistingDataPolicy::Check).unwrap().scrub_bytes_per_second, 7);
}

#[test]
fn iterators_and_inline_values_are_those_of_the_file_or_the_flags() {
    let mut config = parse_text("iterator_idle_s = 7\ninline_bytes_max = \"1KiB\"").unwrap();
    let node = config.to_node_config(ExistingDataPolicy::Check).unwrap();
    assert_eq!((node.tree.iterator_idle, node.format.inline_bytes_max), (Nanos::from_secs(7), 1024));
    let inline_bytes_max = Some(Size(0));
    config.apply_flags(&ServeArgs { iterator_idle_s: Some(9), inline_bytes_max, ..ServeArgs::default() });
    let node = config.to_node_config(ExistingDataPolicy::Check).unwrap();
    assert_eq!((node.tree.iterator_idle, node.format.inline_bytes_max), (Nanos::from_secs(9), 0));
}

#[test]
fn partitions_and_chunks_are_those_of_the_file_or_the_flags() {
    let of = |config: &ConfigFile| {
        let format = config.to_node_config(ExistingDataPolicy::Check).unwrap().format;
        (format.engine, format.partitions, format.chunk_bytes)
    };
    assert_eq!(of(&parse_text("").unwrap()), (EngineKind::Hash, 32, None));
    let mut config = parse_text("engine = \"log\"\npartitions = 7\nchunk_bytes = \"1MiB\"").unwrap();
    assert_eq!(of(&config), (EngineKind::Log, 7, Some(1 << 20)));
    // At least 64 units: of 4 KiB, or of those that are configured.
    for (unit, chunk_bytes) in [("auto", 256 << 10), ("4KiB", 256 << 10), ("512", 32 << 10)] {
        let text = format!("engine = \"log\"\nunit = \"{unit}\"\nchunk_bytes = \"16KiB\"");
        assert_eq!(of(&parse_text(&text).unwrap()).2, Some(chunk_bytes), "units of {unit}");
    }
    let chunk_bytes = Some("auto".parse().unwrap());
    config.apply_flags(&ServeArgs { partitions: Some(9), chunk_bytes, ..ServeArgs::default() });
    assert_eq!(of(&config), (EngineKind::Log, 9, None));
    // A namespace of the file may be the only one of the engine.
    let other = "[[namespace]]\nnsid = 2\nkind = \"kv\"\ndevice = \"x\"\nengine = \"log\"";
    let engines = [EngineKind::Hash, EngineKind::Lsm, EngineKind::Log];
    assert_eq!(engines.map(|kind| parse_text(other).unwrap().has_engine(kind)), [true, false, true]);
    let refused = node_config(&ServeArgs { partitions: Some(9), ..ServeArgs::default() }).unwrap_err();
    assert_eq!(refused, "--partitions is for engine = \"log\", which no namespace has");
}

#[test]
fn cores_for_drives_and_the_gap_of_swaps_reach_the_node() {
    let (node, _) = node_config(&ServeArgs::default()).unwrap();
    assert_eq!((node.drive_cores, node.swap_gap), (vec![], 64));
    let flags = ServeArgs {
        cores: vec![0, 1, 2],
        drive_cores: vec![2, 0],
        swap_gap: Some(16),
        ..ServeArgs::default()
    };
    let (node, _) = node_config(&flags).unwrap();
    assert_eq!((node.cores, node.drive_cores, node.swap_gap), (vec![0, 1, 2], vec![2, 0], 16));
    let refused = node_config(&ServeArgs { swap_gap: Some(0), ..ServeArgs::default() }).unwrap_err();
    assert!(refused.contains("swap_gap") && refused.contains("1 to 1000000"), "{refused}");
}

#[test]
fn token_costs_are_those_of_their_file_and_need_device_tokens() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("costs.json");
    let kind = |tokens: u32| format!("{{\"tokens\": {tokens}, \"tokens_per_4k\": 3}}");
    let text = |put| {
        let (get, put, delete) = (kind(16), kind(put), kind(5));
        format!(
            "{{\"schema\": \"octokv-token-costs/1\", \"get\": {get}, \"put\": {put}, \"delete\": {delete}}}"
        )
    };
    std::fs::write(&path, text(70)).unwrap();
    let file = path.to_str().unwrap().to_owned();
    let of = |device_tokens, token_costs: Option<&str>| {
        let token_costs = token_costs.map(str::to_owned);
        let flags = ServeArgs { device_tokens, token_costs, ..ServeArgs::default() };
        node_config(&flags).map(|(node, _)| node.device_tokens)
    };
    assert_eq!(of(false, None), Ok(None));
    for none in [None, Some("none")] {
        assert_eq!(of(true, none), Ok(Some(StartingCosts::default())));
    }
    let costs = of(true, Some(&file)).unwrap().expect("tokens are on");
    assert_eq!((costs.get.tokens, costs.put.tokens, costs.delete.tokens), (16, 70, 5));
    assert_eq!(of(false, Some(&file)), Err("--token-costs is for --device-tokens, which is off".to_owned()));
    assert_eq!(of(true, Some("")), Err("token_costs must be a path, or \"none\"".to_owned()));
    // By the configuration file, which may name costs that are not used.
    let config_path = directory.path().join("octokv.toml");
    for (device_tokens, used) in [(true, Some(costs)), (false, None)] {
        std::fs::write(&config_path, format!("device_tokens = {device_tokens}\ntoken_costs = \"{file}\""))
            .unwrap();
        let flags = ServeArgs { config: Some(config_path.clone()), ..ServeArgs::default() };
        assert_eq!(node_config(&flags).unwrap().0.device_tokens, used);
    }
    std::fs::write(&path, text(0)).unwrap();
    let refused = of(true, Some(&file)).unwrap_err();
    assert!(refused.contains("costs.json: put.tokens is 0; must be"), "{refused}");
}

#[test]
fn prefetch_and_compression_of_trees_are_those_of_the_file_or_the_flags() {
    let of = |config: &ConfigFile| {
        let tree = config.to_node_config(ExistingDataPolicy::Check).unwrap().tree;
        (tree.prefetch, tree.compresses)
    };
    assert_eq!(of(&parse_text("").unwrap()), (PrefetchMode::Adaptive, false));
    let mut config = parse_text("value_prefetch = 0\ncompress = true").unwrap();
    assert_eq!(of(&config), (PrefetchMode::Fixed(0), true));
    let value_prefetch = Some("64".parse().unwrap());
    config.apply_flags(&ServeArgs { value_prefetch, ..ServeArgs::default() });
    assert_eq!(of(&config), (PrefetchMode::Fixed(64), true));
    config.apply_flags(&ServeArgs { value_prefetch: Some("auto".parse().unwrap()), ..ServeArgs::default() });
    assert_eq!(of(&config), (PrefetchMode::Adaptive, true));
    for text in ["value_prefetch = \"many\"", "value_prefetch = -1", "value_prefetch = 5000000000"] {
        assert!(parse_text(text).is_err(), "{text}");
    }
}

#[test]
fn invalid_values_fail_with_their_key() {
    let table = [
        ("unit = 5000", "unit"),
        ("unit = \"4GiB\"", "unit"),
        ("unit = 0", "unit"),
        ("bitmap_partitions = 3", "bitmap_partitions"),
        ("nqn = \"node\"", "nqn"),
        ("queue_depth = 1", "queue_depth"),
        ("in_capsule_bytes = 100", "in_capsule_bytes"),
        ("h2c_data_bytes_max = 4098", "h2c_data_bytes_max"),
        ("receive_bytes_max = \"1MiB\"", "receive_bytes_max"),
        ("value_bytes_max = 100", "value_bytes_max"),
        ("inline_bytes_max = 16385", "inline_bytes_max"),
        ("partitions = 0", "partitions"),
        ("chunk_bytes = 5000", "chunk_bytes"),
        ("chunk_bytes = \"32MiB\"", "chunk_bytes"),
        ("iterator_idle_s = 0", "iterator_idle_s"),
        ("iterator_idle_s = 86401", "iterator_idle_s"),
        ("device_timeout_s = 0", "device_timeout_s"),
        ("device_timeout_s = 3601", "device_timeout_s"),
        ("value_prefetch = 65", "value_prefetch"),
        ("serial = \"0123456789012345678901\"", "serial"),
    ];
    for (text, key) in table {
        let error = parse_text(text).unwrap().to_node_config(ExistingDataPolicy::Check).unwrap_err();
        assert_eq!(error.key, key);
    }
}
