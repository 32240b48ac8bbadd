//! What the log engine's format and the drive allow, by arithmetic: the limits beside LEED's throughputs.
//!
//! ```text
//!   commands     the drive begins one in 1.85 µs                                                540 K/s
//!   die reads    16 dies, 40 µs each; a read of bytes in two pages of 4 KiB takes two           400 K/s
//!   programs     16 dies, 499 µs for 32 KiB each                                                1.05 GB/s
//!   get          two reads: the image of a segment, and the record             → 200 K/s without the second pages
//!   put          one read, two writes                                          → 180 K/s by commands
//! ```
//! Bytes that were written one after the other lie in neighbouring pages, and the drive programs those in the order of writes of all logs, so
//! the second page is as a rule on another die.

use octokv_device::ssd_model::DriveProfile;

/// Bytes that the drive maps as one, and a die reads.
const PAGE_BYTES: f64 = 4096.0;

/// Lengths on the device, in bytes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ObjectLengths {
    /// A unit.
    pub unit: f64,
    /// A granule of the value log.
    pub granule: f64,
    /// The image of a segment, on average, in whole units.
    pub image: f64,
    /// A value record.
    pub record: f64,
}

impl ObjectLengths {
    /// Pages in which the image lies, on average: it begins at any unit.
    pub fn image_pages(&self) -> f64 {
        1.0 + (self.image - self.unit) / PAGE_BYTES
    }

    /// Pages in which the record lies: it begins at any granule.
    pub fn record_pages(&self) -> f64 {
        1.0 + (self.record.min(PAGE_BYTES) - self.granule) / PAGE_BYTES
    }

    /// Die reads of a get.
    pub fn get_die_reads(&self) -> f64 {
        self.image_pages() + self.record_pages()
    }
}

/// Commands per second.
pub fn commands_per_s(drive: &DriveProfile) -> f64 {
    1e9 / drive.read_interval.0.max(drive.write_interval.0) as f64
}

/// Page reads of all dies per second.
pub fn die_reads_per_s(drive: &DriveProfile) -> f64 {
    f64::from(drive.dies()) * 1e9 / drive.page_read.0 as f64
}

/// Bytes that all dies program per second.
pub fn programmed_per_s(drive: &DriveProfile) -> f64 {
    f64::from(drive.dies()) * drive.stripe_bytes() as f64 * 1e9 / drive.page_program.0 as f64
}

/// Requests per second that keep the dies busy: each reads so many pages and writes so many bytes.
pub fn requests_by_dies(drive: &DriveProfile, die_reads: f64, written_bytes: f64) -> f64 {
    1.0 / (die_reads / die_reads_per_s(drive) + written_bytes / programmed_per_s(drive))
}

#[cfg(test)]
mod tests {
    use super::*;
    use octokv_device::ssd_model::drive_profiles::DCT_983;

    #[test]
    fn the_drive_has_the_limits_of_decision_0028() {
        assert_eq!(die_reads_per_s(&DCT_983), 400_000.0);
        assert_eq!((commands_per_s(&DCT_983) / 3.0 / 1e3).round(), 180.0);
        // 0.95 µs a written KB.
        assert_eq!((1e9 / programmed_per_s(&DCT_983) * 100.0).round(), 95.0);
        assert_eq!(requests_by_dies(&DCT_983, 2.0, 0.0).round(), 200_000.0);
    }

    #[test]
    fn what_lies_in_two_pages_is_read_twice() {
        let lengths = ObjectLengths { unit: 512.0, granule: 8.0, image: 1_234.0, record: 288.0 };
        assert_eq!((lengths.image_pages() * 1e3).round(), 1_176.0);
        assert_eq!((lengths.record_pages() * 1e3).round(), 1_068.0);
        let whole = ObjectLengths { unit: 4096.0, image: 4096.0, granule: 8.0, record: 8.0 };
        assert_eq!(whole.get_die_reads(), 2.0);
        // By chance: all positions of an image of three units in pages of eight.
        let pages = |from: u32| f64::from((from + 2) / 8 + 1);
        let mean = (0..8).map(pages).sum::<f64>() / 8.0;
        assert_eq!(ObjectLengths { image: 3.0 * 512.0, ..lengths }.image_pages(), mean);
    }
}
