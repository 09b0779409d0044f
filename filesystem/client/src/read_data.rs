//! The bytes that a READ is answered with, where they are.

use std::ops::Range;

use crate::data_cache::{Fetched, Slice};

/// What holes are copied from.
static ZEROS: [u8; 64 << 10] = [0; 64 << 10];

/// Bytes that lie one behind the other, in parts. What is cached is copied only by whoever takes it from
/// here.
#[derive(Debug, Clone, Default)]
pub struct ReadData {
    parts: Vec<Part>,
    length: usize,
}

#[derive(Debug, Clone)]
enum Part {
    Owned(Vec<u8>, Range<usize>),
    Cached(Slice),
    Zeros(usize),
}

impl Part {
    fn slices(&self) -> impl Iterator<Item = &[u8]> {
        let (whole, last) = match self {
            Self::Owned(bytes, range) => (0, &bytes[range.clone()]),
            Self::Cached(slice) => (0, slice.bytes()),
            Self::Zeros(length) => (length / ZEROS.len(), &ZEROS[..length % ZEROS.len()]),
        };
        std::iter::repeat_n(&ZEROS[..], whole).chain([last])
    }
}

impl ReadData {
    /// How many bytes.
    pub fn len(&self) -> usize {
        self.length
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// The bytes in their order.
    pub fn slices(&self) -> impl Iterator<Item = &[u8]> {
        self.parts.iter().flat_map(Part::slices)
    }

    /// The bytes in one piece.
    pub fn into_vec(mut self) -> Vec<u8> {
        if let [Part::Owned(bytes, range)] = self.parts.as_mut_slice() {
            if range.start == 0 {
                bytes.truncate(range.end);
                return std::mem::take(bytes);
            }
        }
        let mut bytes = Vec::with_capacity(self.length);
        for slice in self.slices() {
            bytes.extend_from_slice(slice);
        }
        bytes
    }

    /// Adds some bytes of what was fetched.
    pub(crate) fn push(&mut self, fetched: Fetched, range: Range<usize>) {
        self.length += range.len();
        self.parts.push(match fetched {
            Fetched::Cached(slice) => Part::Cached(slice.part(range)),
            Fetched::Read(bytes) => Part::Owned(bytes, range),
        });
    }

    /// Adds zeros up to a length.
    pub(crate) fn pad(&mut self, length: usize) {
        if self.length < length {
            self.parts.push(Part::Zeros(length - self.length));
            self.length = length;
        }
    }
}

impl From<Vec<u8>> for ReadData {
    fn from(bytes: Vec<u8>) -> Self {
        let length = bytes.len();
        Self {
            parts: vec![Part::Owned(bytes, 0..length)],
            length,
        }
    }
}

impl PartialEq for ReadData {
    fn eq(&self, other: &Self) -> bool {
        let bytes = |data: &Self| data.slices().collect::<Vec<_>>().concat();
        self.length == other.length && bytes(self) == bytes(other)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_lie_one_behind_the_other() {
        let mut data = ReadData::default();
        data.pad(3);
        data.push(Fetched::Read(vec![1, 2, 3, 4]), 1..3);
        data.pad(5);
        data.pad(200_000);
        data.push(Fetched::Read(vec![9]), 0..1);
        assert_eq!(data.len(), 200_001);
        let mut expected = vec![0, 0, 0, 2, 3];
        expected.resize(200_000, 0);
        expected.push(9);
        assert!(data == ReadData::from(expected.clone()));
        assert!(data.into_vec() == expected);
    }

    #[test]
    fn one_part_is_not_copied() {
        let bytes = vec![1, 2, 3];
        let address = bytes.as_ptr();
        let mut data = ReadData::default();
        assert!(data.is_empty());
        data.push(Fetched::Read(bytes), 0..2);
        let bytes = data.into_vec();
        assert_eq!((bytes.as_ptr(), bytes), (address, vec![1, 2]));
    }
}
