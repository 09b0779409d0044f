//! What can be wrong with a request.

use crate::errno::Errno;

/// Why a request is refused before anything looks at the filesystem.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    /// It ends within a structure.
    #[error("needs {needed} bytes more than the {given} that are there")]
    Truncated {
        /// Bytes of the structure.
        needed: usize,
        /// Bytes that are left for it.
        given: usize,
    },
    /// Its header gives another length than it has.
    #[error("its header says {header} bytes, and it has {given}")]
    Length {
        /// As the header says.
        header: u32,
        /// Bytes that are there.
        given: usize,
    },
    /// It has more bytes besides payload than [`MAX_CONTROL_BYTES`](crate::MAX_CONTROL_BYTES), or a
    /// BATCH_FORGET more than [`MAX_BATCH_FORGET_BYTES`](crate::MAX_BATCH_FORGET_BYTES).
    #[error("{0} bytes besides payload are too many")]
    TooLong(u32),
    /// Bytes follow its last field.
    #[error("{0} bytes follow its last field")]
    Trailing(usize),
    /// The machine that sent it has another byte order.
    #[error("its byte order is not little-endian")]
    ByteOrder,
    /// It carries extensions, which were not agreed.
    #[error("it carries extensions")]
    Extensions,
    /// A length or count within it contradicts its size.
    #[error("a count within it is {count}, and {given} bytes are there")]
    Count {
        /// As the field says.
        count: u64,
        /// Bytes that are there for it.
        given: usize,
    },
    /// A name or symlink target has no NUL at its end.
    #[error("a name without its end")]
    Unterminated,
    /// A name or symlink target has no bytes.
    #[error("an empty name")]
    EmptyName,
    /// A name has more than 255 bytes, or a symlink target more than 4095.
    #[error("a name that is too long")]
    NameTooLong,
    /// The name of an extended attribute has more than 255 bytes.
    #[error("a name of an extended attribute that is too long")]
    XattrNameTooLong,
    /// A name that no directory entry can have: with a slash, `.` or `..`.
    #[error("a name that a directory entry cannot have")]
    InvalidName,
    /// The value of an extended attribute has more than 64 KiB.
    #[error("a value of an extended attribute of {0} bytes")]
    XattrTooLarge(u32),
    /// A field has a value without a meaning.
    #[error("its field {field} is {value:#x}")]
    Field {
        /// Name in the kernel's header.
        field: &'static str,
        /// What it is.
        value: u64,
    },
    /// A range ends beyond the largest file offset.
    #[error("a range that ends beyond the largest offset")]
    RangeTooLarge,
    /// Data or a hole is sought from before the file's begin on.
    #[error("a seek from a negative offset")]
    NegativeSeek,
    /// A mode of FALLOCATE that is not served.
    #[error("fallocate's mode {0:#x} is not served")]
    FallocateMode(u32),
}

impl Malformed {
    /// What the guest is told.
    ///
    /// EIO: no kernel sends it. Otherwise what the system call gives on Linux for such an argument.
    pub const fn errno(&self) -> Errno {
        match self {
            Self::Truncated { .. }
            | Self::Length { .. }
            | Self::Trailing(_)
            | Self::ByteOrder
            | Self::Extensions
            | Self::Count { .. }
            | Self::Unterminated => Errno::EIO,
            Self::EmptyName | Self::InvalidName | Self::Field { .. } => Errno::EINVAL,
            Self::NameTooLong => Errno::ENAMETOOLONG,
            Self::XattrNameTooLong => Errno::ERANGE,
            Self::TooLong(_) | Self::XattrTooLarge(_) => Errno::E2BIG,
            Self::NegativeSeek => Errno::ENXIO,
            Self::RangeTooLarge => Errno::EFBIG,
            // ENOSYS would end FALLOCATE for the whole mount.
            Self::FallocateMode(_) => Errno::EOPNOTSUPP,
        }
    }
}
