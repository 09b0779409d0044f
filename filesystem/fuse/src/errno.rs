//! Error numbers of replies.

use std::fmt;

/// A Linux error number that a reply may carry: 1 to 511. The kernel has no meaning for others, and treats
/// the reply as broken.
///
/// `ENOSYS` is special. For many operations (OPEN, FLUSH, FSYNC, the xattr calls, FALLOCATE, LSEEK, …) the
/// kernel remembers it and never sends them again on this mount, so it must not stand for the failure of one
/// request.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Errno(u16);

impl Errno {
    /// Largest error number of a reply.
    pub const MAX: i32 = 511;

    /// The number, if a reply may carry it.
    pub const fn new(raw: i32) -> Option<Self> {
        if raw >= 1 && raw <= Self::MAX {
            Some(Self(raw as u16))
        } else {
            None
        }
    }

    /// The positive number, as in `errno.h`.
    pub const fn raw(self) -> i32 {
        self.0 as i32
    }

    const fn known(raw: i32) -> Self {
        match Self::new(raw) {
            Some(errno) => errno,
            None => panic!("an error number of Linux"),
        }
    }
}

macro_rules! errnos {
    ($($name:ident)*) => {
        impl Errno {
            $(
                #[doc = concat!("`", stringify!($name), "`")]
                pub const $name: Self = Self::known(libc::$name);
            )*
        }

        impl fmt::Debug for Errno {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                match *self {
                    $(Self::$name => f.write_str(stringify!($name)),)*
                    Self(raw) => write!(f, "Errno({raw})"),
                }
            }
        }
    };
}

errnos! {
    EPERM ENOENT EINTR EIO ENXIO E2BIG EBADF EAGAIN ENOMEM EACCES EBUSY EEXIST EXDEV ENODEV ENOTDIR EISDIR
    EINVAL ENFILE ENOTTY EFBIG ENOSPC EROFS EMLINK ERANGE ENAMETOOLONG ENOSYS ENOTEMPTY ELOOP ENODATA EPROTO
    EOVERFLOW EOPNOTSUPP ETIMEDOUT ESTALE EDQUOT
}

impl fmt::Display for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}
