//! What a workload took of this process and of the disk: processor time, device accesses, memory.
//!
//! In: samples before and after. Out: figures per operation. The counters of the disk are those of all processes, and of everything that
//! the store did meanwhile: flushes, compaction, the journal of a file system. Operations of the warm-up count too.

use octokv_base::Nanos;
use octokv_sys::machine::DiskCounters;
use octokv_sys::process;
use std::path::Path;

/// A sample of the counters.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ResourceSample {
    cpu: Nanos,
    disk: Option<DiskCounters>,
}

/// The resource usage between two samples, per operation.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct ResourceUsage {
    /// Processor time of this process, in microseconds an operation.
    pub cpu_us: f64,
    /// Reads, writes and flushes of the disk, and bytes read and written, an operation.
    pub disk: Option<DiskUsage>,
    /// The largest resident set of this process since its start, in bytes.
    pub resident_bytes_peak: Option<u64>,
}

/// Accesses of the disk, each per operation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct DiskUsage {
    pub reads: f64,
    pub writes: f64,
    pub flushes: f64,
    pub read_bytes: f64,
    pub written_bytes: f64,
}

impl ResourceSample {
    /// Samples the counters of this process and of the disk that holds `path`.
    pub fn take(path: &Path) -> ResourceSample {
        ResourceSample { cpu: process::process_cpu_time(), disk: DiskCounters::of(path) }
    }

    /// The usage between this sample and a later one, divided by the number of operations; `None` if that is 0.
    pub fn until(&self, later: &ResourceSample, operations: u64) -> Option<ResourceUsage> {
        if operations == 0 {
            return None;
        }
        let per_operation = |count: u64| count as f64 / operations as f64;
        let disk = later.disk.zip(self.disk).map(|(later, earlier)| {
            let taken = later.since(&earlier);
            DiskUsage {
                reads: per_operation(taken.reads),
                writes: per_operation(taken.writes),
                flushes: per_operation(taken.flushes),
                read_bytes: per_operation(taken.read_bytes),
                written_bytes: per_operation(taken.written_bytes),
            }
        });
        Some(ResourceUsage {
            cpu_us: per_operation(later.cpu.since(self.cpu).0) / 1e3,
            disk,
            resident_bytes_peak: process::peak_resident_bytes(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn usage_is_per_operation() {
        let sample = |cpu_us, reads, written_bytes| ResourceSample {
            cpu: Nanos::from_micros(cpu_us),
            disk: Some(DiskCounters { reads, written_bytes, ..DiskCounters::default() }),
        };
        let (before, after) = (sample(100, 5, 1000), sample(160, 25, 5000));
        let usage = before.until(&after, 10).expect("operations");
        assert!((usage.cpu_us - 6.0).abs() < 1e-9);
        let disk = usage.disk.expect("a disk");
        assert_eq!((disk.reads, disk.writes, disk.written_bytes), (2.0, 0.0, 400.0));
        assert_eq!(before.until(&after, 0), None);
    }
}
