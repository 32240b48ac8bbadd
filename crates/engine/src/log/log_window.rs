//! The units of a key log that a recovery looks at: read in pieces of 1 MiB, of which unreadable units are singled out.
//!
//! In: places in chunks. Out: the bytes from there on, in which a unit that could not be read is zeros, and the error of that unit.
//! Invariants: a unit counts as unreadable after [`READ_ATTEMPTS`] failures of its own, so that an error that passes decides nothing; memory
//! is bounded by one piece.
//! Tested below.

use super::log_layout::LogLayout;
use super::log_place::LogPlace;
use crate::common::unit_reader::UnitReader;
use octokv_device::DeviceError;

/// Attempts to read a unit.
pub const READ_ATTEMPTS: u32 = 3;
/// Bytes of a piece: more than the longest image has.
const PIECE_BYTES: u32 = 1 << 20;

/// A piece of a chunk, in memory.
pub struct LogWindow<'a> {
    reader: UnitReader<'a>,
    layout: LogLayout,
    /// The units of the device that the bytes are of.
    first: u64,
    bytes: Vec<u8>,
    /// Units of the piece that could not be read, with the last error, ascending.
    unreadable: Vec<(u64, DeviceError)>,
}

impl<'a> LogWindow<'a> {
    /// A window that has nothing yet.
    pub fn new(reader: UnitReader<'a>, layout: LogLayout) -> LogWindow<'a> {
        LogWindow { reader, layout, first: 0, bytes: Vec::new(), unreadable: Vec::new() }
    }

    /// The regions of the volume.
    pub fn layout(&self) -> &LogLayout {
        &self.layout
    }

    /// The reader of the device.
    pub fn reader(&self) -> UnitReader<'a> {
        self.reader
    }

    /// The units of a chunk from a place on, at least so many but not more than the chunk has. REQUIRES: at most those of the longest image.
    pub async fn load(&mut self, at: LogPlace, units: u32) -> &[u8] {
        let unit = self.layout.unit_of(at.chunk, at.unit);
        let rest = self.layout.chunk_units.saturating_sub(at.unit);
        let wanted = u64::from(units.min(rest));
        let unit_bytes = self.layout.unit_bytes as usize;
        let have = self.first..self.first + (self.bytes.len() / unit_bytes) as u64;
        if unit < have.start || unit + wanted > have.end {
            self.read_piece(unit, rest.min(PIECE_BYTES / self.layout.unit_bytes)).await;
        }
        let within = (unit - self.first) as usize * unit_bytes;
        // A piece may end behind the chunk of an earlier place: it does not here.
        let end = (within + rest as usize * unit_bytes).min(self.bytes.len());
        &self.bytes[within.min(end)..end]
    }

    /// The first error among the units of a chunk from a place on that are in the window.
    pub fn error_in(&self, at: LogPlace, units: u32) -> Option<DeviceError> {
        let first = self.layout.unit_of(at.chunk, at.unit);
        let units = first..first + u64::from(units.min(self.layout.chunk_units.saturating_sub(at.unit)));
        self.unreadable.iter().find(|(unit, _)| units.contains(unit)).map(|&(_, error)| error)
    }

    async fn read_piece(&mut self, first: u64, units: u32) {
        let unit_bytes = self.layout.unit_bytes as usize;
        self.first = first;
        self.bytes.clear();
        self.unreadable.clear();
        // Parts still to be read, the next one last.
        let mut parts = vec![(first, units)];
        while let Some((unit, count)) = parts.pop() {
            let attempts = if count == 1 { READ_ATTEMPTS } else { 1 };
            match read_units(self.reader, unit, count as usize * unit_bytes, attempts).await {
                Ok(bytes) => self.bytes.extend_from_slice(&bytes),
                Err(_) if count > 1 => {
                    let half = count / 2;
                    parts.extend([(unit + u64::from(half), count - half), (unit, half)]);
                }
                Err(error) => {
                    self.bytes.resize(self.bytes.len() + unit_bytes, 0);
                    self.unreadable.push((unit, error));
                }
            }
        }
    }
}

async fn read_units(
    reader: UnitReader<'_>,
    unit: u64,
    bytes: usize,
    attempts: u32,
) -> Result<Vec<u8>, DeviceError> {
    let mut read = reader.read(unit, 0, bytes).await;
    for _ in 1..attempts {
        if read.is_ok() {
            break;
        }
        read = reader.read(unit, 0, bytes).await;
    }
    read
}

#[cfg(test)]
mod tests {
    use super::super::log_place::{ChunkIndex, ChunkNumber};
    use super::*;
    use octokv_base::{Buffer, Lba};
    use octokv_device::fault_injection::{FaultDevice, FaultPlan, FaultRule, InjectedFault, OpFilter};
    use octokv_device::{Device, MemoryDevice, RamDisk};
    use octokv_runtime::block_on;
    use std::rc::Rc;

    const LAYOUT: LogLayout = LogLayout {
        unit_bytes: 512,
        chunk_units: 32,
        area_units: 8,
        chunks_start_unit: 64,
        chunks: 64,
        stores: 1,
        granule_log2: 3,
    };

    /// A device whose blocks each have their number in every byte.
    fn device(plan: FaultPlan) -> FaultDevice {
        let inner = Rc::new(MemoryDevice::new(RamDisk::new(LAYOUT.units() * 512, 512).unwrap()));
        for block in 0..LAYOUT.units() {
            let mut buffer = Buffer::zeroed(512);
            buffer.fill(block as u8);
            block_on(inner.write(Lba(block), buffer), || {}).result.unwrap();
        }
        FaultDevice::new(inner, plan)
    }

    fn place(chunk: u32, unit: u32) -> LogPlace {
        LogPlace { index: ChunkIndex(0), chunk: ChunkNumber(chunk), unit }
    }

    fn blocks(bytes: &[u8]) -> Vec<u8> {
        assert!(bytes.chunks(512).all(|block| block.iter().all(|&byte| byte == block[0])));
        bytes.iter().copied().step_by(512).collect()
    }

    #[test]
    fn a_window_ends_with_the_chunk() {
        let device = device(FaultPlan::default());
        let mut window = LogWindow::new(UnitReader::new(&device, 512), LAYOUT);
        for (chunk, unit, units) in [(1, 3, 1), (1, 30, 63), (1, 3, 2), (0, 0, 4), (1, 31, 1), (1, 32, 1)] {
            let first = 64 + chunk * 32 + unit;
            let want: Vec<u8> = (first..64 + chunk * 32 + 32).map(|block| block as u8).collect();
            assert_eq!(
                blocks(block_on(window.load(place(chunk, unit), units), || {})),
                want,
                "{chunk}, {unit}"
            );
        }
    }

    #[test]
    fn an_unreadable_unit_is_zeros_and_costs_no_other() {
        let plan = FaultPlan::default();
        let device = device(plan.clone());
        let mut window = LogWindow::new(UnitReader::new(&device, 512), LAYOUT);
        plan.add(FaultRule::within(OpFilter::Read, Lba(70), Lba(71), InjectedFault::Error(61)));
        let bytes = blocks(block_on(window.load(place(0, 0), 1), || {}));
        let want: Vec<u8> = (64..96).map(|block| if block == 70 { 0 } else { block }).collect();
        assert_eq!(bytes, want);
        assert_eq!(window.error_in(place(0, 0), 6), None);
        assert_eq!(window.error_in(place(0, 6), 1), Some(DeviceError::Io(61)));
        assert_eq!(window.error_in(place(0, 7), 25), None);
    }

    #[test]
    fn an_error_that_passes_is_none() {
        let plan = FaultPlan::default();
        let device = device(plan.clone());
        let mut window = LogWindow::new(UnitReader::new(&device, 512), LAYOUT);
        // The first read of the piece, of each half and of the unit fails, and two more.
        let rule = FaultRule::within(OpFilter::Read, Lba(70), Lba(71), InjectedFault::Error(5));
        plan.add(FaultRule { times: 7, ..rule });
        let bytes = blocks(block_on(window.load(place(0, 0), 1), || {}));
        assert_eq!(bytes, (64..96).collect::<Vec<u8>>());
        assert_eq!(window.error_in(place(0, 0), 32), None);
    }
}
