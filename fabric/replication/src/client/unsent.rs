//! What of a guest request has not been sent.

use super::flush::Flush;
use super::ios::NONE;

/// What of a request has not been sent, by its kind.
#[derive(Clone, Copy)]
pub(super) enum Unsent {
    /// Of a read or write: the first of its pieces that are cut and not sent, or `NONE`. Each names the next.
    Pieces(u32),
    /// Of a discard or write-zeroes: bytes of the volume that are not cut into pieces.
    Bytes(Rest),
    /// Of a flush: groups that it has yet to go to.
    Groups(Flush),
}

/// A range that is gone through.
#[derive(Clone, Copy)]
pub(super) struct Rest {
    pub(super) at: u64,
    pub(super) end: u64,
}

impl Unsent {
    /// The first piece that is cut and not sent.
    #[inline]
    pub(super) fn first_piece(&self) -> Option<u32> {
        match *self {
            Self::Pieces(piece) => (piece != NONE).then_some(piece),
            Self::Bytes(_) | Self::Groups(_) => None,
        }
    }

    /// Where the next piece is to be cut, if one is.
    #[inline]
    pub(super) fn next_cut(&self) -> Option<u64> {
        let rest = match self {
            Self::Pieces(_) => return None,
            Self::Bytes(rest) => rest,
            Self::Groups(flush) => &flush.rest,
        };
        (rest.at < rest.end).then_some(rest.at)
    }

    /// A piece was cut, and the next one begins here.
    #[inline]
    pub(super) fn cut_to(&mut self, next: u64) {
        if let Some(rest) = self.rest_mut() {
            rest.at = next;
        }
    }

    /// What is not cut yet is not tried.
    pub(super) fn stop_cutting(&mut self) {
        if let Some(rest) = self.rest_mut() {
            rest.at = rest.end;
        }
    }

    #[inline]
    fn rest_mut(&mut self) -> Option<&mut Rest> {
        match self {
            Self::Pieces(_) => None,
            Self::Bytes(rest) => Some(rest),
            Self::Groups(flush) => Some(&mut flush.rest),
        }
    }
}
