//! Scatter lists of guest memory, read and written once from front to back.

use vhost_backend::ring::{read_bytes, write_scattered};

/// Reads a scatter list from the front, and cuts off what it has read.
pub(crate) struct Reader<'a> {
    pieces: &'a mut [libc::iovec],
    /// The first piece that is not read whole.
    first: usize,
}

impl<'a> Reader<'a> {
    /// Goes on where an earlier one on the same list left off.
    #[inline]
    pub(crate) fn new(pieces: &'a mut [libc::iovec]) -> Self {
        let first = pieces.iter().take_while(|piece| piece.iov_len == 0).count();
        Self { pieces, first }
    }

    /// Copies the next bytes, each read once; as many as there are.
    ///
    /// # Safety
    /// The pieces are mapped.
    #[inline]
    pub(crate) unsafe fn copy(&mut self, to: &mut [u8]) {
        let mut at = 0;
        while at < to.len() && self.first < self.pieces.len() {
            let piece = &mut self.pieces[self.first];
            let len = piece.iov_len.min(to.len() - at);
            // SAFETY: the piece has at least `len` bytes, and is mapped by the caller's promise.
            unsafe { read_bytes(piece.iov_base.cast(), &mut to[at..at + len]) };
            at += len;
            self.cut(len);
        }
    }

    /// Passes over the next bytes.
    #[inline]
    pub(crate) fn skip(&mut self, bytes: usize) {
        let mut left = bytes;
        while left > 0 && self.first < self.pieces.len() {
            let len = self.pieces[self.first].iov_len.min(left);
            left -= len;
            self.cut(len);
        }
    }

    /// Cuts `len` bytes off the first piece.
    #[inline]
    fn cut(&mut self, len: usize) {
        let piece = &mut self.pieces[self.first];
        piece.iov_base = piece.iov_base.wrapping_byte_add(len);
        piece.iov_len -= len;
        if piece.iov_len == 0 {
            self.first += 1;
        }
    }

    /// The next `bytes` bytes, or as many as there are.
    pub(crate) fn rest(self, bytes: usize) -> &'a [libc::iovec] {
        let rest = &mut self.pieces[self.first..];
        let count = cut_to(rest, bytes);
        &rest[..count]
    }
}

/// How many of the first pieces have `bytes` bytes; the last of them is cut to them.
fn cut_to(pieces: &mut [libc::iovec], bytes: usize) -> usize {
    let mut left = bytes;
    for (at, piece) in pieces.iter_mut().enumerate() {
        if left == 0 {
            return at;
        }
        piece.iov_len = piece.iov_len.min(left);
        left -= piece.iov_len;
    }
    pieces.len()
}

/// Writes `bytes` behind the first `skip` bytes of a list, as many as have room.
///
/// # Safety
/// The pieces are mapped.
#[inline]
pub(crate) unsafe fn write_behind(pieces: &[libc::iovec], skip: usize, bytes: &[u8]) {
    let mut skip = skip;
    let mut at = 0;
    for piece in pieces {
        if at == bytes.len() {
            return;
        }
        let passed = skip.min(piece.iov_len);
        skip -= passed;
        let rest = libc::iovec {
            iov_base: piece.iov_base.wrapping_byte_add(passed),
            iov_len: piece.iov_len - passed,
        };
        // SAFETY: a part of a piece, which is mapped by the caller's promise.
        at += unsafe { write_scattered(&[rest], &bytes[at..]) };
    }
}

/// Data of a request in the memory of its guest, which may change them at any time: the payload of WRITE, or
/// the room for what READ reads.
#[derive(Debug, Clone, Copy)]
pub struct GuestData<'a> {
    pieces: &'a [libc::iovec],
    bytes: usize,
}

impl<'a> GuestData<'a> {
    /// No data.
    pub const NONE: GuestData<'static> = GuestData {
        pieces: &[],
        bytes: 0,
    };

    /// Data of `bytes` bytes.
    ///
    /// # Safety
    /// The pieces have so many bytes. They are mapped, and can be written, for `'a`.
    pub unsafe fn new(pieces: &'a [libc::iovec], bytes: usize) -> Self {
        Self { pieces, bytes }
    }

    /// Number of bytes.
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// Where they lie, in host addresses; no piece is empty. The memory stays mapped until the request is
    /// answered, the list itself only until [`Service::submit`](crate::Service::submit) returns.
    pub fn pieces(&self) -> &'a [libc::iovec] {
        self.pieces
    }

    /// Copies the bytes out, each read once; `to` has as many.
    ///
    /// # Panics
    /// If it has not.
    pub fn copy_to(&self, to: &mut [u8]) {
        assert_eq!(to.len(), self.bytes, "a buffer for all of the data");
        // SAFETY: the pieces are mapped by the promise of `new`.
        unsafe { vhost_backend::ring::read_scattered(self.pieces, to) };
    }

    /// Writes `from` behind the first `at` bytes.
    ///
    /// # Panics
    /// If there is less room.
    pub fn write_at(&self, at: usize, from: &[u8]) {
        assert!(
            at <= self.bytes && from.len() <= self.bytes - at,
            "no room for the data"
        );
        // SAFETY: the pieces are mapped by the promise of `new`.
        unsafe { write_behind(self.pieces, at, from) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(memory: &mut [u8], lens: &[usize]) -> Vec<libc::iovec> {
        let mut at = memory.as_mut_ptr();
        let piece = |&len: &usize| {
            let piece = libc::iovec {
                iov_base: at.cast(),
                iov_len: len,
            };
            // A gap behind each piece.
            at = at.wrapping_add(len + 1);
            piece
        };
        lens.iter().map(piece).collect()
    }

    #[test]
    fn a_list_is_read_in_steps_of_any_size() {
        let mut memory: Vec<u8> = (0..32).collect();
        let bytes: Vec<u8> = (0..3).chain(4..5).chain(6..16).collect();
        for first in 0..=bytes.len() {
            for second in 0..=bytes.len() - first {
                let mut pieces = list(&mut memory, &[3, 1, 10]);
                let mut reader = Reader::new(&mut pieces);
                let mut head = vec![0; first];
                // SAFETY: the pieces lie in `memory`.
                unsafe { reader.copy(&mut head) };
                reader.skip(second);
                let rest = reader.rest(4);
                let have = rest.iter().map(|piece| piece.iov_len).sum::<usize>();
                assert_eq!(have, 4.min(bytes.len() - first - second));
                let mut tail = vec![0; have];
                // SAFETY: as above.
                unsafe { vhost_backend::ring::read_scattered(rest, &mut tail) };
                assert_eq!(head, bytes[..first]);
                assert_eq!(tail, bytes[first + second..][..have]);
                assert!(rest.iter().all(|piece| piece.iov_len > 0));
            }
        }
    }

    #[test]
    fn bytes_are_written_behind_any_place_and_nowhere_else() {
        for skip in 0..14 {
            for len in 0..=14 - skip {
                let mut memory = vec![0; 20];
                let pieces = list(&mut memory, &[3, 1, 10]);
                let from: Vec<u8> = (1..=len as u8).collect();
                // SAFETY: the pieces lie in `memory`.
                unsafe { write_behind(&pieces, skip, &from) };
                let inside: Vec<u8> = [&memory[..3], &memory[4..5], &memory[6..16]].concat();
                assert_eq!(inside[skip..skip + len], from);
                assert_eq!(memory.iter().filter(|byte| **byte != 0).count(), len);
            }
        }
    }
}
