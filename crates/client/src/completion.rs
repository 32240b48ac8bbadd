//! Completions of a queue, and the response or error that each becomes.
//!
//! In: a completion queue entry with the data received before it. Out: a [`Response`], or the [`Error`] of its status.

use crate::command::{CommandKind, RemoteIterator, Response, ResponseData};
use crate::error::Error;
use octokv_base::Buffer;
use octokv_wire::{Cqe, Status};

/// A completed command.
#[derive(Debug)]
pub struct CommandCompletion {
    /// Token of the caller.
    pub token: u64,
    /// Purpose of the command.
    pub kind: CommandKind,
    /// Completion queue entry.
    pub cqe: Cqe,
    /// Received data.
    pub data: ResponseData,
    /// Whether all data digests, if enabled, matched.
    pub digest_ok: bool,
    /// Buffer of the command's data; `None` if the command had none or parts of it are still unsent.
    pub host_buffer: Option<Buffer>,
}

/// The window that a completion has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenReport {
    /// The caller's token of the command.
    pub command: u64,
    /// The tokens that may be outstanding on the device of its key; 0 if the command has none.
    pub tokens: u32,
}

impl TokenReport {
    /// That of a completion.
    pub fn of(completion: &CommandCompletion) -> TokenReport {
        TokenReport { command: completion.token, tokens: completion.cqe.dw1.get() >> 16 }
    }
}

/// A command that a lost connection leaves without a completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AbortedCommand {
    /// Token of the caller.
    pub token: u64,
    /// Purpose of the command.
    pub kind: CommandKind,
    /// Whether any byte of the command was sent.
    pub sent: bool,
}

/// The response of a completion, received in a connection epoch.
///
/// # Errors
/// The error of the node's status; [`Error::DataDigest`] or [`Error::DataLength`] if the received data is
/// wrong.
pub fn decode_response(completion: CommandCompletion, connection_epoch: u64) -> Result<Response, Error> {
    let CommandCompletion { kind, cqe, data, digest_ok, host_buffer, .. } = completion;
    let (status, dw0) = (cqe.status(), cqe.dw0.get());
    if kind.is_block_command() && (is_transient(status) || (status.is_success() && !digest_ok)) {
        return Ok(Response::Retry { buffer: host_buffer.or(data.into_raw_buffer()) });
    }
    if !status.is_success() {
        return decode_error_status(kind, status, dw0);
    }
    if !digest_ok {
        return Err(Error::DataDigest);
    }
    Ok(match kind {
        CommandKind::Store => Response::Stored,
        CommandKind::Retrieve { limit_bytes } => {
            let (expected_bytes, received_bytes) = (dw0.min(limit_bytes), data.len() as u32);
            if expected_bytes != received_bytes {
                return Err(Error::DataLength { expected_bytes, received_bytes });
            }
            Response::Value { data, full_bytes: dw0 }
        }
        CommandKind::Delete => Response::Deleted,
        CommandKind::Exist { returns_length } => {
            Response::Exists { value_bytes: returns_length.then_some(dw0) }
        }
        CommandKind::List => Response::Keys { list: data },
        CommandKind::CreateIterator => {
            Response::IteratorCreated(RemoteIterator { id: dw0, connection_epoch })
        }
        CommandKind::NextPairs => Response::Pairs { pairs: data },
        CommandKind::ChangeIterator => Response::IteratorChanged,
        CommandKind::Flush | CommandKind::Internal | CommandKind::AsyncEvent => Response::Flushed,
        CommandKind::Read { bytes } if data.len() as u32 != bytes => {
            return Err(Error::DataLength { expected_bytes: bytes, received_bytes: data.len() as u32 });
        }
        CommandKind::Read { .. } => Response::Blocks { data },
        CommandKind::Write | CommandKind::ZeroOrDeallocate => Response::Written { buffer: host_buffer },
        CommandKind::Compare | CommandKind::Verify => Response::Verified,
    })
}

/// Whether a retry of the command may succeed.
fn is_transient(status: Status) -> bool {
    let transient =
        [Status::NAMESPACE_NOT_READY, Status::COMMAND_INTERRUPTED, Status::TRANSIENT_TRANSPORT_ERROR];
    transient.into_iter().any(|transient| status.is(transient))
}

fn decode_error_status(kind: CommandKind, status: Status, dw0: u32) -> Result<Response, Error> {
    let plain = Status::new(status.code_type(), status.code());
    if kind.is_block_command() {
        // The codes from 80h have other meanings than in the Key Value command set.
        return match plain {
            Status::MEDIA_COMPARE_FAILURE => Ok(Response::CompareFailed),
            Status::MEDIA_UNRECOVERED_READ => Err(Error::UnrecoveredRead),
            _ => Err(Error::Status(status)),
        };
    }
    Err(match plain {
        Status::KV_KEY_DOES_NOT_EXIST => return Ok(Response::NotFound),
        Status::KV_KEY_EXISTS => return Ok(Response::AlreadyExists),
        Status::KV_CAPACITY_EXCEEDED => Error::CapacityExceeded,
        Status::NAMESPACE_NOT_READY | Status::COMMAND_INTERRUPTED => Error::Busy,
        Status::KV_UNRECOVERED_ERROR | Status::MEDIA_UNRECOVERED_READ => Error::UnrecoveredRead,
        Status::TRANSIENT_TRANSPORT_ERROR => Error::DataDigest,
        Status::UNKNOWN_ITERATOR => Error::UnknownIterator,
        Status::TOO_MANY_ITERATORS => Error::TooManyIterators,
        Status::DEVICE_UNAVAILABLE => Error::DeviceUnavailable,
        Status::PAIR_TOO_LARGE => Error::PairTooLarge { buffer_bytes: dw0 },
        _ => Error::Status(status),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statuses_become_responses_or_errors() {
        let completion = |kind, cqe| CommandCompletion {
            token: 0,
            kind,
            cqe,
            data: ResponseData::default(),
            digest_ok: true,
            host_buffer: None,
        };
        let of =
            |status: Status| decode_response(completion(CommandKind::Store, Cqe::new(0, 0, status, 0, 0)), 1);
        assert!(matches!(of(Status::SUCCESS), Ok(Response::Stored)));
        assert!(matches!(of(Status::KV_KEY_DOES_NOT_EXIST.do_not_retry()), Ok(Response::NotFound)));
        assert!(matches!(of(Status::KV_KEY_EXISTS), Ok(Response::AlreadyExists)));
        assert_eq!(of(Status::KV_CAPACITY_EXCEEDED).unwrap_err(), Error::CapacityExceeded);
        assert_eq!(of(Status::INVALID_FIELD).unwrap_err(), Error::Status(Status::INVALID_FIELD));
        let cqe = Cqe::new(0, 0, Status::SUCCESS, 10, 0);
        let short = decode_response(completion(CommandKind::Retrieve { limit_bytes: 100 }, cqe), 1);
        assert_eq!(short.unwrap_err(), Error::DataLength { expected_bytes: 10, received_bytes: 0 });
    }
}
