//! Numbers of operations.

/// Declares [`Opcode`] with its names and its table.
macro_rules! opcodes {
    ($($name:ident = $number:literal, $kernel:literal;)*) => {
        /// An operation of the protocol that this crate knows.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        #[repr(u32)]
        pub enum Opcode {
            $(
                #[doc = concat!("`FUSE_", $kernel, "`")]
                $name = $number,
            )*
        }

        impl Opcode {
            /// Every operation, in the order of their numbers.
            pub const ALL: &'static [Self] = &[$(Self::$name),*];

            /// The kernel's name without `FUSE_`, as logs and metrics show it.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$name => $kernel,)*
                }
            }

            /// The operation with this number.
            #[inline]
            pub const fn from_number(number: u32) -> Option<Self> {
                match number {
                    $($number => Some(Self::$name),)*
                    _ => None,
                }
            }
        }
    };
}

opcodes! {
    Lookup = 1, "LOOKUP";
    Forget = 2, "FORGET";
    Getattr = 3, "GETATTR";
    Setattr = 4, "SETATTR";
    Readlink = 5, "READLINK";
    Symlink = 6, "SYMLINK";
    Mknod = 8, "MKNOD";
    Mkdir = 9, "MKDIR";
    Unlink = 10, "UNLINK";
    Rmdir = 11, "RMDIR";
    Rename = 12, "RENAME";
    Link = 13, "LINK";
    Open = 14, "OPEN";
    Read = 15, "READ";
    Write = 16, "WRITE";
    Statfs = 17, "STATFS";
    Release = 18, "RELEASE";
    Fsync = 20, "FSYNC";
    Setxattr = 21, "SETXATTR";
    Getxattr = 22, "GETXATTR";
    Listxattr = 23, "LISTXATTR";
    Removexattr = 24, "REMOVEXATTR";
    Flush = 25, "FLUSH";
    Init = 26, "INIT";
    Opendir = 27, "OPENDIR";
    Readdir = 28, "READDIR";
    Releasedir = 29, "RELEASEDIR";
    Fsyncdir = 30, "FSYNCDIR";
    Getlk = 31, "GETLK";
    Setlk = 32, "SETLK";
    Setlkw = 33, "SETLKW";
    Access = 34, "ACCESS";
    Create = 35, "CREATE";
    Interrupt = 36, "INTERRUPT";
    Destroy = 38, "DESTROY";
    Ioctl = 39, "IOCTL";
    Poll = 40, "POLL";
    NotifyReply = 41, "NOTIFY_REPLY";
    BatchForget = 42, "BATCH_FORGET";
    Fallocate = 43, "FALLOCATE";
    Readdirplus = 44, "READDIRPLUS";
    Rename2 = 45, "RENAME2";
    Lseek = 46, "LSEEK";
    CopyFileRange = 47, "COPY_FILE_RANGE";
    Syncfs = 50, "SYNCFS";
    Tmpfile = 51, "TMPFILE";
    Statx = 52, "STATX";
}

impl Opcode {
    /// Number of the operation on the wire.
    pub const fn number(self) -> u32 {
        self as u32
    }

    /// Whether the kernel waits for a reply, also for one that is an error.
    ///
    /// FORGET and BATCH_FORGET have none by the protocol. INTERRUPT has none unless the server asks to be
    /// sent it again (EAGAIN) or never again (ENOSYS), which this crate's users do not; what it interrupts is
    /// answered in any case. NOTIFY_REPLY is itself an answer.
    pub const fn has_reply(self) -> bool {
        !matches!(
            self,
            Self::Forget | Self::BatchForget | Self::Interrupt | Self::NotifyReply
        )
    }
}
