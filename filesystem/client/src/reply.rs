//! Replies that own their bytes.

use std::time::Duration;

use fuse_codec::{Attr, Entry, Errno, FsStats, Opened, Reply};

use crate::read_data::ReadData;

/// [`Reply`], owned.
#[derive(Debug, Clone, PartialEq)]
#[allow(missing_docs, reason = "the variants are those of `Reply`")]
pub enum OwnedReply {
    Error(Errno),
    Done,
    Entry(Entry),
    NoEntry(Duration),
    Attr(Attr, Duration),
    Statx(Attr, Duration),
    Opened(Opened),
    Created(Entry, Opened),
    /// READ: the bytes, which the caller copies to the room that the request had.
    Data(ReadData),
    Written(u32),
    Stats(FsStats),
    XattrSize(u32),
    Bytes(Vec<u8>),
    Offset(u64),
}

impl OwnedReply {
    /// The reply for the device. The bytes of [`OwnedReply::Data`] have to be in the guest's room by then.
    pub fn borrow(&self) -> Reply<'_> {
        match self {
            Self::Error(errno) => Reply::Error(*errno),
            Self::Done => Reply::Done,
            Self::Entry(entry) => Reply::Entry(*entry),
            Self::NoEntry(valid) => Reply::NoEntry(*valid),
            Self::Attr(attr, valid) => Reply::Attr(*attr, *valid),
            Self::Statx(attr, valid) => Reply::Statx(*attr, *valid),
            Self::Opened(opened) => Reply::Opened(*opened),
            Self::Created(entry, opened) => Reply::Created(*entry, *opened),
            // A READ is far below 4 GiB.
            Self::Data(bytes) => Reply::Data(bytes.len() as u32),
            Self::Written(bytes) => Reply::Written(*bytes),
            Self::Stats(stats) => Reply::Stats(*stats),
            Self::XattrSize(bytes) => Reply::XattrSize(*bytes),
            Self::Bytes(bytes) => Reply::Bytes(bytes),
            Self::Offset(offset) => Reply::Offset(*offset),
        }
    }
}

impl From<Result<Self, Errno>> for OwnedReply {
    fn from(outcome: Result<Self, Errno>) -> Self {
        outcome.unwrap_or_else(Self::Error)
    }
}
