//! The value of a put in one buffer, around which its record is encoded: a record is written and checked as a whole.

use super::record::{LAYOUT, record_bytes};
use crate::{EngineError, PutValue};
use octokv_base::{Buffer, BufferPool, Key};

/// The buffer that has the value of a put at its place in the record of a key; the one of the put if the value lies in it as a whole. `None` if the buffers hold less than the value.
///
/// # Errors
/// [`EngineError::NoMemory`].
pub fn join_value(
    pool: &BufferPool,
    unit_bytes: usize,
    key: &Key,
    value: PutValue,
) -> Result<Option<Buffer>, EngineError> {
    let bytes = record_bytes(key.len(), value.bytes);
    let Some(more) = &value.more else {
        return Ok(Some(value.record).filter(|record| bytes <= record.capacity()));
    };
    let offset = LAYOUT.value_offset(key.len());
    let mut joined = pool.take(bytes.next_multiple_of(unit_bytes)).ok_or(EngineError::NoMemory)?;
    let mut at = offset;
    let front = value.record.get(offset..).unwrap_or_default();
    for part in std::iter::once(front).chain(more.iter().map(|buffer| &buffer[..])) {
        let room = part.len().min(bytes - at);
        joined[at..at + room].copy_from_slice(&part[..room]);
        at += room;
    }
    Ok((at == bytes).then_some(joined))
}
