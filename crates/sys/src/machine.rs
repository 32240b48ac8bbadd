//! This machine's processor, memory, kernel and disk counters, for reports. Tested below.

use rustix::fs::{FileType, major, minor};
use std::path::Path;

/// The model name of the first processor in `/proc/cpuinfo`; `None` if there is none.
pub fn processor_name() -> Option<String> {
    field(&read("/proc/cpuinfo"), "model name")
}

/// The memory of the machine (`MemTotal`), in bytes; 0 if the kernel does not report it.
pub fn memory_bytes() -> u64 {
    let total = field(&read("/proc/meminfo"), "MemTotal");
    let kib = total.and_then(|text| text.split_ascii_whitespace().next()?.parse::<u64>().ok());
    kib.unwrap_or(0) * 1024
}

/// The release of the running kernel, as `uname -r` prints it.
pub fn kernel_release() -> String {
    read("/proc/sys/kernel/osrelease").trim().to_owned()
}

/// What a disk has completed since the machine started, for all processes together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DiskCounters {
    /// Reads, after the kernel merged adjacent ones.
    pub reads: u64,
    /// Writes, after the kernel merged adjacent ones.
    pub writes: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// Bytes written.
    pub written_bytes: u64,
    /// Flushes of the disk's cache.
    pub flushes: u64,
}

impl DiskCounters {
    /// The counters of the disk that holds `path`, or that `path` is; `None` if the kernel counts nothing for it, as for a file
    /// system without a disk.
    pub fn of(path: &Path) -> Option<DiskCounters> {
        let stat = rustix::fs::stat(path).ok()?;
        let is_device = FileType::from_raw_mode(stat.st_mode) == FileType::BlockDevice;
        let device = if is_device { stat.st_rdev } else { stat.st_dev };
        let counters = format!("/sys/dev/block/{}:{}/stat", major(device), minor(device));
        DiskCounters::parse(&std::fs::read_to_string(counters).ok()?)
    }

    /// The fields of the kernel's Documentation/block/stat.rst. Sectors there have 512 bytes, whatever the disk's do.
    fn parse(text: &str) -> Option<DiskCounters> {
        let fields: Vec<u64> = text.split_ascii_whitespace().map_while(|field| field.parse().ok()).collect();
        let &[reads, _, sectors_read, _, writes, _, sectors_written, ..] = &fields[..] else { return None };
        Some(DiskCounters {
            reads,
            writes,
            read_bytes: sectors_read * 512,
            written_bytes: sectors_written * 512,
            // Linux counts them since 5.5.
            flushes: fields.get(15).copied().unwrap_or(0),
        })
    }

    /// What was completed since `earlier`.
    pub fn since(&self, earlier: &DiskCounters) -> DiskCounters {
        DiskCounters {
            reads: self.reads.saturating_sub(earlier.reads),
            writes: self.writes.saturating_sub(earlier.writes),
            read_bytes: self.read_bytes.saturating_sub(earlier.read_bytes),
            written_bytes: self.written_bytes.saturating_sub(earlier.written_bytes),
            flushes: self.flushes.saturating_sub(earlier.flushes),
        }
    }
}

fn read(path: &str) -> String {
    std::fs::read_to_string(path).unwrap_or_default()
}

fn field(text: &str, name: &str) -> Option<String> {
    let line = text.lines().find(|line| line.starts_with(name))?;
    Some(line.split_once(':')?.1.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn disk_counters_are_parsed_and_subtracted() {
        let text = "  10 1 80 5 20 2 320 7 0 9 12 0 0 0 0 4 1\n";
        let counters = DiskCounters::parse(text).expect("complete");
        let want =
            DiskCounters { reads: 10, writes: 20, read_bytes: 40_960, written_bytes: 163_840, flushes: 4 };
        assert_eq!(counters, want);
        let earlier = DiskCounters { reads: 4, writes: 1, ..DiskCounters::default() };
        assert_eq!((counters.since(&earlier).reads, counters.since(&earlier).writes), (6, 19));
        assert_eq!(DiskCounters::parse("1 2 3"), None);
        assert_eq!(DiskCounters::of(Path::new("/proc/self/stat")), None, "no disk holds it");
    }

    #[test]
    fn the_machine_has_memory_and_a_kernel() {
        assert!(memory_bytes() > 1 << 20 && !kernel_release().is_empty());
        assert_eq!(field("a\t: 1\nb\t: two words \n", "b").as_deref(), Some("two words"));
    }
}
