//! Names in requests: bytes, not text.

use std::fmt;

use crate::malformed::Malformed;

/// Longest name of a directory entry, and of an extended attribute, in bytes.
pub const NAME_BYTES_MAX: usize = 255;
/// Longest target of a symlink in bytes: with its NUL it fills `PATH_MAX`.
pub const TARGET_BYTES_MAX: usize = 4095;

/// Declares a borrowed name; only this crate makes them, from checked bytes.
macro_rules! names {
    ($($(#[$doc:meta])* $name:ident;)*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name<'a>(&'a [u8]);

        impl<'a> $name<'a> {
            /// The bytes, without NUL.
            pub const fn as_bytes(self) -> &'a [u8] {
                self.0
            }
        }

        impl fmt::Debug for $name<'_> {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "\"{}\"", self.0.escape_ascii())
            }
        }
    )*};
}

names! {
    /// A name that a directory entry can have: 1 to 255 bytes without NUL and `/`, and neither `.` nor `..`.
    Name;
    /// A name that an extended attribute can have: 1 to 255 bytes without NUL. Its namespace (`user.`, …) is
    /// part of it and not checked here.
    XattrName;
    /// What a symlink points at: 1 to 4095 bytes without NUL.
    Target;
}

/// What LOOKUP looks for. Kernels ask for `.` and `..` to make sense of NFS file handles
/// ([`Features::EXPORT_SUPPORT`](crate::Features::EXPORT_SUPPORT)).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LookupName<'a> {
    /// An entry of the directory.
    Name(Name<'a>),
    /// `.`: the inode itself, which need not be a directory. So is `/`, which Linux sends to check again what
    /// it found by a file handle: the dentry of such an inode has no parent, and this name (`d_alloc_anon`).
    Itself,
    /// `..`: the directory's parent.
    Parent,
}

impl<'a> Name<'a> {
    /// Checks bytes that end where the name does.
    pub fn new(bytes: &'a [u8]) -> Result<Self, Malformed> {
        match bytes {
            [] => Err(Malformed::EmptyName),
            _ if bytes.len() > NAME_BYTES_MAX => Err(Malformed::NameTooLong),
            b"." | b".." => Err(Malformed::InvalidName),
            _ if bytes.iter().any(|byte| matches!(byte, 0 | b'/')) => Err(Malformed::InvalidName),
            _ => Ok(Self(bytes)),
        }
    }
}

impl<'a> LookupName<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Result<Self, Malformed> {
        match bytes {
            b"." | b"/" => Ok(Self::Itself),
            b".." => Ok(Self::Parent),
            _ => Name::new(bytes).map(Self::Name),
        }
    }
}

impl<'a> XattrName<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Result<Self, Malformed> {
        match bytes.len() {
            0 => Err(Malformed::EmptyName),
            1..=NAME_BYTES_MAX => Ok(Self(bytes)),
            _ => Err(Malformed::XattrNameTooLong),
        }
    }
}

impl<'a> Target<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Result<Self, Malformed> {
        match bytes.len() {
            0 => Err(Malformed::EmptyName),
            1..=TARGET_BYTES_MAX => Ok(Self(bytes)),
            _ => Err(Malformed::NameTooLong),
        }
    }
}
