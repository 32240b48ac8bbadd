//! The JSON document of a namespace and its devices, from what the node reports.

use crate::api_types::{DeviceSummary, NamespaceSummary, NamespaceType};
use crate::device_names::DeviceNames;
use octokv_node::{CommandSetConfig, DeviceStatus, NamespaceStatus};

/// Command set, engine, block size.
pub(crate) fn namespace_type(content: &CommandSetConfig) -> (NamespaceType, Option<String>, Option<u32>) {
    match content {
        CommandSetConfig::KeyValue { format } => {
            (NamespaceType::Kv, Some(format.engine.name().to_owned()), None)
        }
        CommandSetConfig::Blocks { block_bytes } => (NamespaceType::Block, None, Some(*block_bytes)),
    }
}

fn device_summary(device: &DeviceStatus) -> DeviceSummary {
    let report = &device.report;
    DeviceSummary {
        device: device.name.clone(),
        index: report.index,
        size_bytes: report.statistics.capacity_bytes,
        used_bytes: report.statistics.used_bytes,
        keys: report.statistics.keys,
        read_only: report.is_read_only,
        failure: device.failure.clone(),
    }
}

pub(crate) fn namespace_summary(report: &NamespaceStatus, added: bool) -> NamespaceSummary {
    let (kind, engine, block_bytes) = namespace_type(&report.config.command_set);
    NamespaceSummary {
        nsid: report.config.id.0,
        kind,
        device: DeviceNames::of_configs(&report.config.devices),
        devices: report.devices.iter().map(device_summary).collect(),
        size_bytes: report.size_bytes,
        used_bytes: report.used_bytes,
        keys: report.keys,
        engine,
        block_bytes,
        cache_bytes: report.config.cache_bytes,
        prepare_bytes: report.config.prepare_bytes,
        ana_group: report.config.ana_group,
        added,
        offline: None,
    }
}
