//! Encoding of block commands as queue entries (the NVM command set).
//!
//! In: a command and the limits of the namespace. Out: a queue entry with its data, or the violated limit: a command that
//! the node must reject for its range or length is not sent.

use crate::command::{Command, CommandKind, EncodedCommand, Value};
use crate::controller_info::{BlockInfo, ControllerInfo};
use crate::error::Error;
use octokv_base::{Buffer, Lba, NamespaceId};
use octokv_wire::nvm::{self, LbaRange};

/// Encodes a command for a block namespace.
///
/// REQUIRES: `command` is not [`Command::Flush`], which [`EncodedCommand::new`] encodes for both command
/// sets.
pub(crate) fn encode<'a>(
    command: Command<'a>,
    namespace: NamespaceId,
    info: &ControllerInfo,
    blocks: &BlockInfo,
) -> Result<EncodedCommand<'a>, Error> {
    let data_bytes_max = blocks.command_bytes_max(info.data_bytes_max);
    let in_namespace = |range, blocks_max| check_range(range, blocks_max, blocks);
    let covered = |lba: Lba, have: usize| {
        let (have, block_bytes, max) = (have as u64, blocks.block_bytes, u64::from(data_bytes_max));
        if have == 0 || have > max || !have.is_multiple_of(u64::from(block_bytes)) {
            return Err(Error::BlockDataLength { have, block_bytes, max });
        }
        in_namespace(LbaRange { lba, blocks: (have / u64::from(block_bytes)) as u32 }, nvm::BLOCKS_MAX)
    };
    let entry = |command: nvm::NvmCommand, kind, response_bytes_max| {
        EncodedCommand::without_data(command.encode(0, namespace), kind, response_bytes_max)
    };
    match command {
        Command::Read { range, buffer } => {
            let range = in_namespace(range, data_bytes_max / blocks.block_bytes)?;
            let bytes = range.blocks * blocks.block_bytes;
            check_buffer_length(bytes, buffer.as_ref(), blocks)?;
            Ok(EncodedCommand {
                read_buffer: buffer,
                ..entry(nvm::NvmCommand::Read { range }, CommandKind::Read { bytes }, bytes)
            })
        }
        Command::Write { lba, data, force_unit_access } => {
            let range = covered(lba, data.bytes().len())?;
            let command = nvm::NvmCommand::Write { range, force_unit_access };
            Ok(with_data(entry(command, CommandKind::Write, 0), data))
        }
        Command::Compare { lba, data } => {
            let range = covered(lba, data.bytes().len())?;
            Ok(with_data(entry(nvm::NvmCommand::Compare { range }, CommandKind::Compare, 0), data))
        }
        Command::WriteZeroes { range, force_unit_access, deallocate } => {
            let range = in_namespace(range, nvm::BLOCKS_MAX)?;
            let command = nvm::NvmCommand::WriteZeroes { range, force_unit_access, deallocate };
            Ok(entry(command, CommandKind::ZeroOrDeallocate, 0))
        }
        Command::Verify { range } => {
            let range = in_namespace(range, nvm::BLOCKS_MAX)?;
            Ok(entry(nvm::NvmCommand::Verify { range }, CommandKind::Verify, 0))
        }
        Command::Deallocate { ranges } => {
            let (count, have) = (ranges.len() as u64, blocks.block_count);
            if !(1..=u64::from(nvm::RANGES_MAX)).contains(&count) {
                return Err(Error::BlockRange { first: 0, count, have });
            }
            let mut data = Vec::with_capacity(ranges.len() * nvm::RANGE_BYTES);
            for &range in ranges {
                nvm::encode_range(in_namespace(range, u32::MAX)?, &mut data);
            }
            let command = nvm::NvmCommand::DatasetManagement { ranges: count as u32, deallocate: true };
            Ok(with_data(entry(command, CommandKind::ZeroOrDeallocate, 0), Value::Shared(data.into())))
        }
        Command::Store { .. }
        | Command::Retrieve { .. }
        | Command::Delete { .. }
        | Command::Exist { .. }
        | Command::List { .. }
        | Command::CreateIterator { .. }
        | Command::NextPairs { .. }
        | Command::SeekIterator { .. }
        | Command::DestroyIterator { .. } => Err(Error::NotKvNamespace),
        // Encoded by the caller: both command sets share it.
        Command::Flush => Ok(entry(nvm::NvmCommand::Flush, CommandKind::Flush, 0)),
    }
}

fn with_data<'a>(encoded: EncodedCommand<'a>, data: Value<'a>) -> EncodedCommand<'a> {
    EncodedCommand { value: Some(data), ..encoded }
}

/// Returns `range` if it has 1 to `blocks_max` blocks, all of them in the namespace.
fn check_range(range: LbaRange, blocks_max: u32, blocks: &BlockInfo) -> Result<LbaRange, Error> {
    let LbaRange { lba, blocks: count } = range;
    let end = lba.0.checked_add(u64::from(count));
    if (1..=blocks_max).contains(&count) && end.is_some_and(|end| end <= blocks.block_count) {
        Ok(range)
    } else {
        Err(Error::BlockRange { first: lba.0, count: u64::from(count), have: blocks.block_count })
    }
}

/// Fails unless the caller's buffer has the length of the blocks.
fn check_buffer_length(bytes: u32, buffer: Option<&Buffer>, blocks: &BlockInfo) -> Result<(), Error> {
    match buffer {
        Some(buffer) if buffer.len() != bytes as usize => {
            let (have, block_bytes) = (buffer.len() as u64, blocks.block_bytes);
            Err(Error::BlockDataLength { have, block_bytes, max: u64::from(bytes) })
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use octokv_base::Key;
    use octokv_wire::kv::StoreMode;

    fn encoded(command: Command<'_>) -> Result<(u8, usize, u32), Error> {
        let info = ControllerInfo { data_bytes_max: 64 << 10, ..ControllerInfo::for_tests() };
        let info = ControllerInfo {
            blocks: Some(BlockInfo { block_bytes: 512, block_count: 1000, nguid: [0; 16] }),
            ..info
        };
        let encoded = EncodedCommand::new(command, NamespaceId(1), &info)?;
        Ok((encoded.sqe.opcode, encoded.host_data_bytes(), encoded.response_bytes_max))
    }

    fn range(first: u64, blocks: u32) -> LbaRange {
        LbaRange { lba: Lba(first), blocks }
    }

    fn read(first: u64, blocks: u32) -> Command<'static> {
        Command::Read { range: range(first, blocks), buffer: None }
    }

    fn write(first: u64, data: &[u8]) -> Command<'_> {
        Command::Write { lba: Lba(first), data: Value::Slice(data), force_unit_access: false }
    }

    #[test]
    fn ranges_up_to_the_last_block_and_the_command_limit_are_encoded() {
        let zeroes = |blocks| Command::WriteZeroes {
            range: range(0, blocks),
            force_unit_access: false,
            deallocate: true,
        };
        let table = [
            (read(999, 1), (nvm::opcode::READ, 0, 512)),
            (read(0, 128), (nvm::opcode::READ, 0, 64 << 10)),
            (write(872, &[0; 64 << 10]), (nvm::opcode::WRITE, 64 << 10, 0)),
            (zeroes(1000), (nvm::opcode::WRITE_ZEROES, 0, 0)),
            (Command::Verify { range: range(0, 1000) }, (nvm::opcode::VERIFY, 0, 0)),
            (
                Command::Deallocate { ranges: &[range(0, 1000); 256] },
                (nvm::opcode::DATASET_MANAGEMENT, 4096, 0),
            ),
            (Command::Flush, (nvm::opcode::FLUSH, 0, 0)),
        ];
        for (command, want) in table {
            assert_eq!(encoded(command), Ok(want));
        }
    }

    #[test]
    fn commands_that_the_node_must_reject_are_not_sent() {
        let range_error = |first, count| Err(Error::BlockRange { first, count, have: 1000 });
        let length_error = |have| Err(Error::BlockDataLength { have, block_bytes: 512, max: 64 << 10 });
        let key = Key::new(b"k").unwrap();
        let other = Command::Read { range: range(0, 2), buffer: Some(Buffer::zeroed(512)) };
        let table = [
            (read(1000, 1), range_error(1000, 1)),
            (read(u64::MAX, 2), range_error(u64::MAX, 2)),
            (read(0, 0), range_error(0, 0)),
            (read(0, 129), range_error(0, 129)),
            (write(999, &[0; 1024]), range_error(999, 2)),
            (write(0, &[0; 511]), length_error(511)),
            (write(0, &[]), length_error(0)),
            (write(0, &[0; (64 << 10) + 512]), length_error((64 << 10) + 512)),
            (other, Err(Error::BlockDataLength { have: 512, block_bytes: 512, max: 1024 })),
            (Command::Deallocate { ranges: &[] }, range_error(0, 0)),
            (Command::Deallocate { ranges: &[range(0, 1); 257] }, range_error(0, 257)),
            (Command::Deallocate { ranges: &[range(0, 1001)] }, range_error(0, 1001)),
            (Command::Delete { key: key.clone() }, Err(Error::NotKvNamespace)),
        ];
        for (command, want) in table {
            assert_eq!(encoded(command), want);
        }
        let info = ControllerInfo::for_tests();
        let encode_for_kv = |command| EncodedCommand::new(command, NamespaceId(1), &info).map(|_| ());
        assert_eq!(encode_for_kv(read(0, 1)), Err(Error::NotBlockNamespace));
        let store = Command::Store { key, value: Value::Slice(b"v"), mode: StoreMode::Upsert };
        assert_eq!(encode_for_kv(store), Ok(()));
    }
}
