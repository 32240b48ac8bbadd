//! The JSON document of one of several devices of a namespace: what it did, how long that took, and whether it has failed.

use octokv_base::Nanos;
use octokv_engine::QueueReport;
use octokv_node::{DeviceStatus, NamespaceStatus, OperationLoad};
use serde::{Deserialize, Serialize};

/// The operations of one kind that succeeded since the device was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct OperationLoadReport {
    /// Their number.
    pub operations: u64,
    /// The bytes that they transferred.
    pub bytes: u64,
    /// Their mean latency in microseconds.
    pub mean_us: f64,
    /// The longest of their latencies in microseconds.
    pub max_us: f64,
}

impl OperationLoadReport {
    fn new(load: &OperationLoad) -> OperationLoadReport {
        let micros = |time: Nanos| time.0 as f64 / 1e3;
        OperationLoadReport {
            operations: load.operations,
            bytes: load.bytes,
            mean_us: micros(load.latency_mean()),
            max_us: micros(load.latency_max),
        }
    }
}

/// The tokens of a device, which bound the operations that are active there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct DeviceTokenReport {
    /// The tokens that may be active, by the throughput of the device.
    pub capacity: u32,
    /// Those of active operations.
    pub active: u32,
    /// Those of operations that wait.
    pub waiting: u64,
    /// The measured cost of a Get of up to 4 KiB.
    pub get_cost: u32,
    /// That of a Put of up to 4 KiB.
    pub put_cost: u32,
    /// That of a Delete.
    pub delete_cost: u32,
}

impl DeviceTokenReport {
    fn new(report: QueueReport) -> DeviceTokenReport {
        let QueueReport { capacity, active, waiting, get_cost, put_cost, delete_cost } = report;
        DeviceTokenReport { capacity, active, waiting, get_cost, put_cost, delete_cost }
    }
}

/// One of several devices of a namespace.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DeviceLoadReport {
    /// Namespace ID.
    pub nsid: u32,
    /// The index of the device in the volume.
    pub index: u16,
    /// Its path, or "memory".
    pub device: String,
    /// Why it is not available; `None` if it is.
    pub failure: Option<String>,
    /// Reads.
    pub reads: OperationLoadReport,
    /// Writes.
    pub writes: OperationLoadReport,
    /// Flushes.
    pub flushes: OperationLoadReport,
    /// Bytes of the keys and values that puts stored.
    #[serde(default)]
    pub put_bytes: u64,
    /// Bytes of the values that were read.
    #[serde(default)]
    pub got_bytes: u64,
    /// Bytes written to the device for each of `put_bytes`; `None` without any.
    #[serde(default)]
    pub write_amplification: Option<f64>,
    /// Keys whose newest values are in the swap regions of other devices.
    #[serde(default)]
    pub swapped_keys: usize,
    /// Puts that were stored there since the namespace was opened.
    #[serde(default)]
    pub swapped_puts: u64,
    /// Values that came back from there.
    #[serde(default)]
    pub merged_values: u64,
    /// Tokens of the device and costs of operations; `None` if the device has none.
    #[serde(default)]
    pub tokens: Option<DeviceTokenReport>,
    /// Operations that failed since the namespace was opened, without those that hung.
    pub errors: u64,
    /// Operations that have not ended.
    pub in_flight: u64,
}

impl DeviceLoadReport {
    /// Those of a namespace on several devices.
    pub fn all_of(namespace: &NamespaceStatus) -> impl Iterator<Item = DeviceLoadReport> {
        let nsid = namespace.config.id.0;
        namespace.devices.iter().map(move |DeviceStatus { name, failure, report, load }| DeviceLoadReport {
            nsid,
            index: report.index,
            device: name.clone(),
            failure: failure.clone(),
            reads: OperationLoadReport::new(&load.reads),
            writes: OperationLoadReport::new(&load.writes),
            flushes: OperationLoadReport::new(&load.flushes),
            put_bytes: report.traffic.put_bytes,
            swapped_keys: report.swaps.keys,
            swapped_puts: report.swaps.swapped,
            merged_values: report.swaps.merged,
            got_bytes: report.traffic.got_bytes,
            write_amplification: (report.traffic.put_bytes > 0)
                .then(|| load.writes.bytes as f64 / report.traffic.put_bytes as f64),
            tokens: report.tokens.map(DeviceTokenReport::new),
            errors: load.errors,
            in_flight: load.in_flight,
        })
    }
}
