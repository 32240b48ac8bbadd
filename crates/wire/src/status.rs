//! Status codes of completions.
//!
//! Bits 15:1 of the completion's last two bytes, above the phase tag (unused in Fabrics):
//! ```text
//! 14    13    12:11  10:8  7:0
//! DNR   More  CRD    SCT   SC
//! ```
//! [`Status`] holds these 15 bits.

use std::fmt;

/// Status type, status code and the Do Not Retry bit. [`Status::SUCCESS`] is 0.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Status(u16);

const DO_NOT_RETRY: u16 = 1 << 14;

macro_rules! statuses {
    ($($(#[$doc:meta])* $name:ident = $sct:literal, $sc:literal, $text:literal;)*) => {
        impl Status {
            $($(#[$doc])* pub const $name: Status = Status::new($sct, $sc);)*

            /// The meaning of the code, if octokv knows it.
            pub fn text(self) -> Option<&'static str> {
                match (self.code_type(), self.code()) {
                    $(($sct, $sc) => Some($text),)*
                    _ => None,
                }
            }
        }
    };
}

impl Status {
    /// A status of this status code type (0–7) and status code.
    pub const fn new(code_type: u8, code: u8) -> Status {
        Status(((code_type as u16 & 7) << 8) | code as u16)
    }
    /// Decodes a completion's status field, the phase tag included.
    pub const fn from_field(field: u16) -> Status {
        Status(field >> 1)
    }
    /// Encodes a completion's status field with phase tag 0.
    pub const fn to_field(self) -> u16 {
        self.0 << 1
    }
    /// The same status with Do Not Retry (DNR): a retry of the same command would fail too.
    pub const fn do_not_retry(self) -> Status {
        Status(self.0 | DO_NOT_RETRY)
    }
    /// Whether Do Not Retry is set.
    pub const fn is_final(self) -> bool {
        self.0 & DO_NOT_RETRY != 0
    }
    /// Status code type: 0 generic, 1 command specific, 2 media, 3 path, 7 vendor.
    pub const fn code_type(self) -> u8 {
        (self.0 >> 8) as u8 & 7
    }
    /// Status code.
    pub const fn code(self) -> u8 {
        self.0 as u8
    }
    /// Whether the command succeeded.
    pub const fn is_success(self) -> bool {
        self.0 & 0x7ff == 0
    }
    /// Whether type and code are equal, ignoring the other bits.
    pub const fn is(self, other: Status) -> bool {
        self.0 & 0x7ff == other.0 & 0x7ff
    }
}

statuses! {
    /// Success.
    SUCCESS = 0, 0x00, "success";
    /// The queue or namespace does not support the opcode.
    INVALID_OPCODE = 0, 0x01, "invalid command opcode";
    /// A field has an invalid value.
    INVALID_FIELD = 0, 0x02, "invalid field in command";
    /// The command identifier is in use.
    COMMAND_ID_CONFLICT = 0, 0x03, "command identifier conflict";
    /// Data could not be transferred.
    DATA_TRANSFER_ERROR = 0, 0x04, "data transfer error";
    /// Internal error of the controller.
    INTERNAL_ERROR = 0, 0x06, "internal error";
    /// Aborted by an Abort command.
    ABORT_REQUESTED = 0, 0x07, "command abort requested";
    /// Aborted because its queue was deleted.
    ABORTED_SQ_DELETION = 0, 0x08, "command aborted: queue deleted";
    /// The namespace does not exist or has another format.
    INVALID_NAMESPACE = 0, 0x0b, "invalid namespace or format";
    /// Commands out of order.
    COMMAND_SEQUENCE_ERROR = 0, 0x0c, "command sequence error";
    /// Invalid SGL segment descriptor.
    INVALID_SGL_SEGMENT = 0, 0x0d, "invalid SGL segment descriptor";
    /// Too many or too few SGL descriptors.
    INVALID_SGL_COUNT = 0, 0x0e, "invalid number of SGL descriptors";
    /// The SGL length does not match the data.
    INVALID_SGL_LENGTH = 0, 0x0f, "data SGL length invalid";
    /// The SGL descriptor type is not supported.
    INVALID_SGL_TYPE = 0, 0x11, "SGL descriptor type invalid";
    /// The offset of an in-capsule SGL is invalid.
    INVALID_SGL_OFFSET = 0, 0x16, "SGL offset invalid";
    /// The keep alive timer expired.
    KEEP_ALIVE_EXPIRED = 0, 0x18, "keep alive timeout expired";
    /// The keep alive timeout is not supported.
    KEEP_ALIVE_INVALID = 0, 0x19, "keep alive timeout invalid";
    /// Transport failure, such as a data digest mismatch; a retry may succeed.
    TRANSIENT_TRANSPORT_ERROR = 0, 0x22, "transient transport error";
    /// The controller is initializing or lacks a resource; a retry may succeed.
    COMMAND_INTERRUPTED = 0, 0x21, "command interrupted";
    /// The requested I/O command set is not supported or not enabled.
    COMMAND_SET_NOT_SUPPORTED = 0, 0x2b, "I/O command set not supported";
    /// NVM: blocks beyond the end of the namespace.
    LBA_OUT_OF_RANGE = 0, 0x80, "LBA out of range";
    /// The namespace is full.
    KV_CAPACITY_EXCEEDED = 0, 0x81, "capacity exceeded";
    /// The namespace is not ready or busy; a retry may succeed.
    NAMESPACE_NOT_READY = 0, 0x82, "namespace not ready";
    /// KV: the value is longer than the namespace allows.
    KV_INVALID_VALUE_SIZE = 0, 0x85, "invalid value size";
    /// KV: the key is empty or longer than the namespace allows.
    KV_INVALID_KEY_SIZE = 0, 0x86, "invalid key size";
    /// KV: the key does not exist.
    KV_KEY_DOES_NOT_EXIST = 0, 0x87, "key does not exist";
    /// KV: the value could not be read.
    KV_UNRECOVERED_ERROR = 0, 0x88, "unrecovered error";
    /// KV: the key exists and the Store was add only.
    KV_KEY_EXISTS = 0, 0x89, "key exists";
    /// Command specific: the queue does not exist.
    INVALID_QUEUE_ID = 1, 0x01, "invalid queue identifier";
    /// Command specific: too many asynchronous event requests.
    EVENT_LIMIT_EXCEEDED = 1, 0x05, "asynchronous event request limit exceeded";
    /// Command specific: the log page does not exist.
    INVALID_LOG_PAGE = 1, 0x09, "invalid log page";
    /// Command specific: the feature cannot be saved.
    FEATURE_NOT_SAVEABLE = 1, 0x0d, "feature identifier not saveable";
    /// Command specific: the feature cannot be changed.
    FEATURE_NOT_CHANGEABLE = 1, 0x0e, "feature not changeable";
    /// Command specific: the combination of I/O command sets was rejected.
    COMMAND_SET_REJECTED = 1, 0x2b, "I/O command set combination rejected";
    /// Fabrics: the Connect record format is not supported.
    CONNECT_INCOMPATIBLE_FORMAT = 1, 0x80, "connect: incompatible format";
    /// Fabrics: the controller is in use.
    CONNECT_CONTROLLER_BUSY = 1, 0x81, "connect: controller busy";
    /// Fabrics: a Connect parameter is invalid; DW0 locates it.
    CONNECT_INVALID_PARAMETERS = 1, 0x82, "connect: invalid parameters";
    /// Fabrics: the host must repeat discovery.
    CONNECT_RESTART_DISCOVERY = 1, 0x83, "connect: restart discovery";
    /// Fabrics: this host is not allowed to connect.
    CONNECT_INVALID_HOST = 1, 0x84, "connect: invalid host";
    /// Fabrics: Disconnect on a queue that is not an I/O queue.
    DISCONNECT_INVALID_QUEUE = 1, 0x85, "disconnect: invalid queue type";
    /// Fabrics: the discovery log changed while it was read.
    DISCOVERY_RESTART = 1, 0x90, "discovery log changed";
    /// Fabrics: authentication is required first.
    AUTHENTICATION_REQUIRED = 1, 0x91, "authentication required";
    /// Media: unrecovered read error.
    MEDIA_UNRECOVERED_READ = 2, 0x81, "unrecovered read error";
    /// Media: the data could not be written.
    MEDIA_WRITE_FAULT = 2, 0x80, "write fault";
    /// Media: the blocks differ from the compared data.
    MEDIA_COMPARE_FAILURE = 2, 0x85, "compare failure";
    /// Path: the namespace is permanently inaccessible on this path.
    ANA_PERSISTENT_LOSS = 3, 0x01, "asymmetric access persistent loss";
    /// Path: the ANA state is changing; a retry may succeed.
    ANA_TRANSITION = 3, 0x03, "asymmetric access transition";
    /// Path: the namespace is inaccessible on this path.
    ANA_INACCESSIBLE = 3, 0x02, "asymmetric access inaccessible";
    /// octokv: the iterator does not exist.
    UNKNOWN_ITERATOR = 7, 0x01, "unknown iterator";
    /// octokv: too many iterators.
    TOO_MANY_ITERATORS = 7, 0x02, "too many iterators";
    /// octokv: the next pair is longer than the host's buffer; DW0 says which length has room for it.
    PAIR_TOO_LARGE = 7, 0x03, "pair larger than the buffer";
    /// octokv: the device that has the key is not available, which says nothing of whether the key exists.
    DEVICE_UNAVAILABLE = 7, 0x04, "the key's device is not available";
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.text() {
            Some(text) => f.write_str(text),
            None => write!(f, "status type {} code {:02x}h", self.code_type(), self.code()),
        }
    }
}

impl fmt::Debug for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let retry = if self.is_final() { ", do not retry" } else { "" };
        write!(f, "Status({}/{:02x}h {self}{retry})", self.code_type(), self.code())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_field_keeps_type_code_and_the_retry_bit() {
        let status = Status::KV_KEY_DOES_NOT_EXIST.do_not_retry();
        assert_eq!(status.to_field(), 0x810e);
        assert_eq!(Status::from_field(0x810f), status);
        assert!(status.is(Status::KV_KEY_DOES_NOT_EXIST) && status.is_final() && !status.is_success());
        assert_eq!(Status::CONNECT_INVALID_PARAMETERS.to_field(), 0x0304);
    }

    #[test]
    fn unknown_codes_are_printed_as_numbers() {
        assert_eq!(Status::new(7, 0x55).to_string(), "status type 7 code 55h");
    }
}
