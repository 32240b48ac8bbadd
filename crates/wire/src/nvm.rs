//! The NVM command set (NVM Command Set 1.1): the fields of each command on logical blocks.
//!
//! ```text
//! SQE   0 opcode   40 CDW10-11 first block   48 CDW12  0-15 blocks, 0's based   25 deallocate   30 FUA
//! Dataset Management   40 CDW10 0-7 ranges, 0's based   44 CDW11 bit 2 deallocate
//! Range   0 attributes u32   4 blocks u32   8 first block u64
//! ```
//! Opcodes 01h and 02h equal KV Store and Retrieve: dispatch on the namespace's command set.

use crate::queue_entry::Sqe;
use crate::status::Status;
use octokv_base::{Lba, NamespaceId};
use zerocopy::byteorder::little_endian::U32;

/// Opcodes of the command set.
pub mod opcode {
    /// Flush.
    pub const FLUSH: u8 = 0x00;
    /// Write.
    pub const WRITE: u8 = 0x01;
    /// Read.
    pub const READ: u8 = 0x02;
    /// Compare.
    pub const COMPARE: u8 = 0x05;
    /// Write Zeroes.
    pub const WRITE_ZEROES: u8 = 0x08;
    /// Dataset Management.
    pub const DATASET_MANAGEMENT: u8 = 0x09;
    /// Verify.
    pub const VERIFY: u8 = 0x0c;
}

/// Maximum number of blocks of one command.
pub const BLOCKS_MAX: u32 = 1 << 16;
/// Maximum number of ranges of one Dataset Management.
pub const RANGES_MAX: u32 = 256;
/// Length of one range of a Dataset Management, in bytes.
pub const RANGE_BYTES: usize = 16;

const FORCE_UNIT_ACCESS: u32 = 1 << 30;
const DEALLOCATE_ZEROES: u32 = 1 << 25;
const DEALLOCATE_RANGES: u32 = 1 << 2;

/// Consecutive logical blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LbaRange {
    /// First block.
    pub lba: Lba,
    /// Number of blocks; a command other than Dataset Management takes 1 to [`BLOCKS_MAX`].
    pub blocks: u32,
}

/// One command of the NVM command set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NvmCommand {
    /// Makes all completed writes durable.
    Flush,
    /// Writes blocks.
    Write {
        /// Blocks to write.
        range: LbaRange,
        /// Whether the blocks are durable when the command completes (FUA).
        force_unit_access: bool,
    },
    /// Reads blocks.
    Read {
        /// Blocks to read.
        range: LbaRange,
    },
    /// Compares blocks with the command's data.
    Compare {
        /// Blocks to compare.
        range: LbaRange,
    },
    /// Sets blocks to zero.
    WriteZeroes {
        /// Blocks to zero.
        range: LbaRange,
        /// Whether the zeros are durable when the command completes (FUA).
        force_unit_access: bool,
        /// Whether the controller may deallocate the blocks.
        deallocate: bool,
    },
    /// Gives attributes of block ranges, which are the command's data. octokv uses the deallocate attribute
    /// only.
    DatasetManagement {
        /// Number of ranges, 1 to [`RANGES_MAX`].
        ranges: u32,
        /// Whether the controller may deallocate the ranges.
        deallocate: bool,
    },
    /// Verifies that blocks are readable, without a data transfer.
    Verify {
        /// Blocks to verify.
        range: LbaRange,
    },
}

impl NvmCommand {
    /// Decodes an entry for a block namespace. The namespace checks the range against its size.
    ///
    /// # Errors
    /// [`Status::INVALID_OPCODE`].
    #[inline]
    pub fn check(sqe: &Sqe) -> Result<NvmCommand, Status> {
        let cdw12 = sqe.cdw12.get();
        let lba = Lba(u64::from(sqe.cdw10.get()) | u64::from(sqe.cdw11.get()) << 32);
        let range = LbaRange { lba, blocks: (cdw12 & 0xffff) + 1 };
        let force_unit_access = cdw12 & FORCE_UNIT_ACCESS != 0;
        Ok(match sqe.opcode {
            opcode::FLUSH => NvmCommand::Flush,
            opcode::WRITE => NvmCommand::Write { range, force_unit_access },
            opcode::READ => NvmCommand::Read { range },
            opcode::COMPARE => NvmCommand::Compare { range },
            opcode::WRITE_ZEROES => {
                let deallocate = cdw12 & DEALLOCATE_ZEROES != 0;
                NvmCommand::WriteZeroes { range, force_unit_access, deallocate }
            }
            opcode::DATASET_MANAGEMENT => NvmCommand::DatasetManagement {
                ranges: (sqe.cdw10.get() & 0xff) + 1,
                deallocate: sqe.cdw11.get() & DEALLOCATE_RANGES != 0,
            },
            opcode::VERIFY => NvmCommand::Verify { range },
            _ => return Err(Status::INVALID_OPCODE.do_not_retry()),
        })
    }

    /// Opcode of this command.
    pub fn opcode(&self) -> u8 {
        match self {
            NvmCommand::Flush => opcode::FLUSH,
            NvmCommand::Write { .. } => opcode::WRITE,
            NvmCommand::Read { .. } => opcode::READ,
            NvmCommand::Compare { .. } => opcode::COMPARE,
            NvmCommand::WriteZeroes { .. } => opcode::WRITE_ZEROES,
            NvmCommand::DatasetManagement { .. } => opcode::DATASET_MANAGEMENT,
            NvmCommand::Verify { .. } => opcode::VERIFY,
        }
    }

    /// Encodes the entry of this command, its data pointer left empty.
    ///
    /// # Panics
    /// If it has no blocks or ranges, or more than [`BLOCKS_MAX`] or [`RANGES_MAX`].
    pub fn encode(&self, command_id: u16, namespace: NamespaceId) -> Sqe {
        let mut sqe = Sqe::new(self.opcode(), command_id);
        sqe.nsid = U32::new(namespace.0);
        let flag = |set: bool, bit: u32| if set { bit } else { 0 };
        match *self {
            NvmCommand::Flush => {}
            NvmCommand::Read { range } | NvmCommand::Compare { range } | NvmCommand::Verify { range } => {
                set_range(&mut sqe, range, 0);
            }
            NvmCommand::Write { range, force_unit_access } => {
                set_range(&mut sqe, range, flag(force_unit_access, FORCE_UNIT_ACCESS));
            }
            NvmCommand::WriteZeroes { range, force_unit_access, deallocate } => {
                let flags = flag(force_unit_access, FORCE_UNIT_ACCESS) | flag(deallocate, DEALLOCATE_ZEROES);
                set_range(&mut sqe, range, flags);
            }
            NvmCommand::DatasetManagement { ranges, deallocate } => {
                assert!((1..=RANGES_MAX).contains(&ranges), "{ranges} ranges in one command");
                sqe.cdw10 = U32::new(ranges - 1);
                sqe.cdw11 = U32::new(flag(deallocate, DEALLOCATE_RANGES));
            }
        }
        sqe
    }
}

fn set_range(sqe: &mut Sqe, range: LbaRange, flags: u32) {
    assert!((1..=BLOCKS_MAX).contains(&range.blocks), "{} blocks in one command", range.blocks);
    sqe.cdw10 = U32::new(range.lba.0 as u32);
    sqe.cdw11 = U32::new((range.lba.0 >> 32) as u32);
    sqe.cdw12 = U32::new((range.blocks - 1) | flags);
}

/// Decodes the whole ranges in the data of a Dataset Management.
pub fn decode_ranges(data: &[u8]) -> impl Iterator<Item = LbaRange> + '_ {
    data.chunks_exact(RANGE_BYTES).map(|range| {
        let word = |at: usize| u32::from_le_bytes([range[at], range[at + 1], range[at + 2], range[at + 3]]);
        LbaRange { lba: Lba(u64::from(word(8)) | u64::from(word(12)) << 32), blocks: word(4) }
    })
}

/// Appends one range to the data of a Dataset Management.
pub fn encode_range(range: LbaRange, out: &mut Vec<u8>) {
    out.extend_from_slice(&0u32.to_le_bytes());
    out.extend_from_slice(&range.blocks.to_le_bytes());
    out.extend_from_slice(&range.lba.0.to_le_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;
    use octokv_base::Prng;

    const RANGE: LbaRange = LbaRange { lba: Lba(0x1_2345_6789), blocks: 8 };

    #[test]
    fn commands_round_trip() {
        let commands = [
            NvmCommand::Flush,
            NvmCommand::Write { range: RANGE, force_unit_access: true },
            NvmCommand::Write {
                range: LbaRange { lba: Lba(0), blocks: BLOCKS_MAX },
                force_unit_access: false,
            },
            NvmCommand::Read { range: RANGE },
            NvmCommand::Compare { range: RANGE },
            NvmCommand::WriteZeroes { range: RANGE, force_unit_access: false, deallocate: true },
            NvmCommand::WriteZeroes { range: RANGE, force_unit_access: true, deallocate: false },
            NvmCommand::DatasetManagement { ranges: 256, deallocate: true },
            NvmCommand::Verify { range: RANGE },
        ];
        for command in commands {
            assert_eq!(NvmCommand::check(&command.encode(1, NamespaceId(2))), Ok(command));
        }
    }

    #[test]
    fn a_write_is_encoded_as_by_the_linux_kernel() {
        let sqe = NvmCommand::Write { range: RANGE, force_unit_access: true }.encode(7, NamespaceId(1));
        assert_eq!((sqe.cdw10.get(), sqe.cdw11.get()), (0x2345_6789, 1));
        assert_eq!(sqe.cdw12.get(), 1 << 30 | 7);
    }

    #[test]
    fn ranges_round_trip_and_a_partial_range_is_ignored() {
        let ranges = [RANGE, LbaRange { lba: Lba(u64::MAX), blocks: 0 }];
        let mut data = Vec::new();
        ranges.iter().for_each(|&range| encode_range(range, &mut data));
        assert_eq!(data.len(), 2 * RANGE_BYTES);
        assert_eq!(decode_ranges(&data).collect::<Vec<_>>(), ranges);
        assert_eq!(decode_ranges(&data[..31]).count(), 1);
    }

    #[test]
    fn random_entries_never_panic() {
        let mut random = Prng::new(3);
        for _ in 0..20_000 {
            let mut bytes = [0; 64];
            random.fill(&mut bytes);
            bytes[0] &= 0x0f;
            if let Ok(command) = NvmCommand::check(&Sqe::from_bytes(&bytes)) {
                let again = NvmCommand::check(&command.encode(1, NamespaceId(1)));
                assert_eq!(again, Ok(command));
            }
        }
    }
}
