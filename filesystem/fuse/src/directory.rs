//! Listings of directories: records of READDIR and READDIRPLUS, packed until the guest's room is used up.

use zerocopy::IntoBytes;

use crate::attr::{Entry, Kind};
use crate::ids::Cookie;
use crate::names::NAME_BYTES_MAX;
use crate::request::DirLayout;
use crate::wire;

/// Records begin at multiples of this.
const ALIGNMENT: usize = 8;

/// One name of a directory.
#[derive(Debug, Clone, Copy)]
pub struct DirRecord<'a> {
    /// The name: 1 to 255 bytes without `/` and NUL; `.` and `..` are names here.
    pub name: &'a [u8],
    /// Number of its inode.
    pub ino: u64,
    /// What its inode is.
    pub kind: Kind,
    /// Where a listing goes on that has this record: behind it.
    pub cookie: Cookie,
    /// READDIRPLUS only: what LOOKUP of the name would reply. It counts as a lookup of the inode, so it is
    /// `None` for `.` and `..`, which the kernel never counts; it may be `None` for any name, and the kernel
    /// then looks it up when it needs it.
    pub entry: Option<Entry>,
}

/// A listing that is put together. Goes behind [`Encoder::payload_header`](crate::Encoder::payload_header) of
/// as many bytes.
///
/// An empty listing tells the guest that the directory ends. If not even one record fits, the request is
/// answered EINVAL, as `getdents(2)` does.
#[derive(Debug)]
pub struct DirBuffer<'a> {
    out: &'a mut [u8],
    used: usize,
    layout: DirLayout,
}

impl<'a> DirBuffer<'a> {
    /// An empty listing of at most `out.len()` bytes, which is to be what the guest asked for at most
    /// ([`Operation::Readdir`](crate::Operation::Readdir)).
    pub fn new(out: &'a mut [u8], layout: DirLayout) -> Self {
        Self {
            out,
            used: 0,
            layout,
        }
    }

    /// Bytes that a record with a name of this length takes.
    pub const fn record_bytes(layout: DirLayout, name_bytes: usize) -> usize {
        let head = match layout {
            DirLayout::Plain => size_of::<wire::Dirent>(),
            DirLayout::Plus => size_of::<wire::EntryOut>() + size_of::<wire::Dirent>(),
        };
        (head + name_bytes).next_multiple_of(ALIGNMENT)
    }

    /// Adds a record and says whether it fitted. If not, nothing is changed; a shorter one may still fit, but
    /// the listing has to end here, as the guest goes on behind its last record.
    ///
    /// # Panics
    /// If the name is empty or has more than 255 bytes.
    #[must_use = "a record that did not fit is not in the listing"]
    pub fn push(&mut self, record: &DirRecord<'_>) -> bool {
        let name = record.name;
        assert!(!name.is_empty() && name.len() <= NAME_BYTES_MAX);
        let bytes = Self::record_bytes(self.layout, name.len());
        let Some(mut rest) = self.out[self.used..].get_mut(..bytes) else {
            return false;
        };
        if self.layout == DirLayout::Plus {
            // Node id 0 stands for a record without an entry.
            let entry = record.entry.map_or_else(Default::default, Entry::to_wire);
            rest = put(rest, entry.as_bytes());
        }
        let dirent = wire::Dirent {
            ino: record.ino.into(),
            off: record.cookie.raw().into(),
            namelen: (name.len() as u32).into(),
            kind: record.kind.dirent_type().into(),
        };
        rest = put(rest, dirent.as_bytes());
        // What the buffer held before is not for the guest.
        put(rest, name).fill(0);
        self.used += bytes;
        true
    }

    /// The records so far.
    pub fn as_bytes(&self) -> &[u8] {
        &self.out[..self.used]
    }

    /// Bytes of the records so far.
    pub fn len(&self) -> usize {
        self.used
    }

    /// Whether there is no record.
    pub fn is_empty(&self) -> bool {
        self.used == 0
    }
}

/// Puts bytes at the begin of `out`; gives what is behind them.
fn put<'a>(out: &'a mut [u8], bytes: &[u8]) -> &'a mut [u8] {
    let (head, rest) = out.split_at_mut(bytes.len());
    head.copy_from_slice(bytes);
    rest
}
