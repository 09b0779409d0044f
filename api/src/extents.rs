//! How volume data travel: records of a 16-byte head and, for data, their bytes. Ranges that are not sent are
//! zeroes.
//!
//! | bytes | field |
//! |---|---|
//! | 0..8 | offset, little-endian |
//! | 8..12 | length of the bytes that follow, little-endian |
//! | 12..16 | kind |
//!
//! | kind | what |
//! |---|---|
//! | 1 | data |
//! | 2 | end: the offset is the size, without bytes |
//! | 3 | failure: the bytes are its JSON |
//! | 4 | skipped, only if that was asked for: the bytes are the length of what could not be read, 8 of them |
//!
//! A stream without its end record was cut: whoever reads it discards what it got.

use hyper::body::Bytes;

/// Media type of the stream.
pub const MEDIA_TYPE: &str = "application/vnd.penstock.extents";
/// Most bytes in one record; a longer one is refused.
pub const DATA_BYTES_MAX: usize = 1 << 20;
/// Size of a record's head.
pub const HEAD_BYTES: usize = 16;

const KIND_DATA: u32 = 1;
const KIND_END: u32 = 2;
const KIND_FAILURE: u32 = 3;
const KIND_SKIPPED: u32 = 4;
/// Bytes of the length in a record of what was skipped.
const SKIPPED_BYTES: usize = size_of::<u64>();

/// One record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Record {
    /// Bytes at an offset.
    Data(u64, Vec<u8>),
    /// The stream is whole; the size in bytes.
    End(u64),
    /// The sender failed; JSON of its failure.
    Failure(Vec<u8>),
    /// So many bytes at an offset could not be read.
    Skipped(u64, u64),
}

/// Why a stream makes no sense.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ExtentError {
    /// A kind that does not exist.
    #[error("record of unknown kind {0}")]
    Kind(u32),
    /// More than [`DATA_BYTES_MAX`].
    #[error("record of {0} bytes is too long")]
    TooLong(u32),
    /// A length that is none.
    #[error("record of skipped bytes has {0} bytes")]
    Skipped(u32),
    /// Bytes after the end record.
    #[error("data after the end of the stream")]
    AfterEnd,
    /// The stream ended before its end record.
    #[error("the stream was cut short")]
    Cut,
}

/// Head and bytes of a data record, as one buffer.
pub fn data(offset: u64, bytes: &[u8]) -> Bytes {
    assert!(bytes.len() <= DATA_BYTES_MAX, "record too long");
    encode(offset, bytes, KIND_DATA)
}

/// The end record.
pub fn end(size_bytes: u64) -> Bytes {
    encode(size_bytes, &[], KIND_END)
}

/// A failure record.
pub fn failure(json: &[u8]) -> Bytes {
    encode(0, &json[..json.len().min(DATA_BYTES_MAX)], KIND_FAILURE)
}

/// A record of bytes that could not be read.
pub fn skipped(offset: u64, len: u64) -> Bytes {
    encode(offset, &len.to_le_bytes(), KIND_SKIPPED)
}

fn encode(offset: u64, bytes: &[u8], kind: u32) -> Bytes {
    let mut out = Vec::with_capacity(HEAD_BYTES + bytes.len());
    out.extend_from_slice(&offset.to_le_bytes());
    out.extend_from_slice(&(bytes.len() as u32).to_le_bytes());
    out.extend_from_slice(&kind.to_le_bytes());
    out.extend_from_slice(bytes);
    out.into()
}

/// Takes a stream apart. Holds at most one record.
#[derive(Debug, Default)]
pub struct Decoder {
    head: Vec<u8>,
    body: Option<(u64, u32, Vec<u8>, usize)>,
    ended: bool,
}

impl Decoder {
    /// Consumes input from the front of `input`; returns a record as soon as one is whole, `None` when input
    /// ran out.
    pub fn next(&mut self, input: &mut &[u8]) -> Result<Option<Record>, ExtentError> {
        if input.is_empty() {
            return Ok(None);
        }
        if self.ended {
            return Err(ExtentError::AfterEnd);
        }
        if self.body.is_none() && !self.take_head(input)? {
            return Ok(None);
        }
        let (_, _, bytes, len) = self.body.as_mut().expect("head taken");
        let take = (*len - bytes.len()).min(input.len());
        bytes.extend_from_slice(&input[..take]);
        *input = &input[take..];
        if bytes.len() < *len {
            return Ok(None);
        }
        let (offset, kind, bytes, _) = self.body.take().expect("body whole");
        Ok(Some(match kind {
            KIND_DATA => Record::Data(offset, bytes),
            KIND_FAILURE => Record::Failure(bytes),
            KIND_SKIPPED => {
                let len = bytes.try_into().expect("its head was checked");
                Record::Skipped(offset, u64::from_le_bytes(len))
            }
            _ => {
                self.ended = true;
                Record::End(offset)
            }
        }))
    }

    /// Call when input has ended.
    pub fn finish(&self) -> Result<(), ExtentError> {
        if self.ended {
            Ok(())
        } else {
            Err(ExtentError::Cut)
        }
    }

    /// Reads a head; false when input ran out first.
    fn take_head(&mut self, input: &mut &[u8]) -> Result<bool, ExtentError> {
        let take = (HEAD_BYTES - self.head.len()).min(input.len());
        self.head.extend_from_slice(&input[..take]);
        *input = &input[take..];
        if self.head.len() < HEAD_BYTES {
            return Ok(false);
        }
        let word =
            |at: usize| u32::from_le_bytes(self.head[at..at + 4].try_into().expect("4 bytes"));
        let offset = u64::from_le_bytes(self.head[..8].try_into().expect("8 bytes"));
        let (len, kind) = (word(8), word(12));
        if !(KIND_DATA..=KIND_SKIPPED).contains(&kind) {
            return Err(ExtentError::Kind(kind));
        }
        if len as usize > DATA_BYTES_MAX || (kind == KIND_END && len > 0) {
            return Err(ExtentError::TooLong(len));
        }
        if kind == KIND_SKIPPED && len as usize != SKIPPED_BYTES {
            return Err(ExtentError::Skipped(len));
        }
        self.head.clear();
        self.body = Some((offset, kind, Vec::with_capacity(len as usize), len as usize));
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decode(stream: &[u8], piece: usize) -> Result<Vec<Record>, ExtentError> {
        let mut decoder = Decoder::default();
        let mut records = Vec::new();
        for mut input in stream.chunks(piece) {
            while !input.is_empty() {
                records.extend(decoder.next(&mut input)?);
            }
        }
        decoder.finish()?;
        Ok(records)
    }

    #[test]
    fn records_survive_any_cutting_into_pieces() {
        let mut stream = Vec::new();
        stream.extend_from_slice(&data(4096, b"hello"));
        stream.extend_from_slice(&data(8192, b""));
        stream.extend_from_slice(&skipped(12288, 1 << 33));
        stream.extend_from_slice(&end(1 << 30));
        let expected = vec![
            Record::Data(4096, b"hello".into()),
            Record::Data(8192, Vec::new()),
            Record::Skipped(12288, 1 << 33),
            Record::End(1 << 30),
        ];
        for piece in 1..=stream.len() {
            assert_eq!(
                decode(&stream, piece),
                Ok(expected.clone()),
                "pieces of {piece}"
            );
        }
    }

    #[test]
    fn a_cut_stream_is_never_taken_for_a_whole_one() {
        let mut stream = data(0, b"abc").to_vec();
        stream.extend_from_slice(&end(512));
        for len in 0..stream.len() {
            assert_eq!(
                decode(&stream[..len], 7).unwrap_err(),
                ExtentError::Cut,
                "cut at {len}"
            );
        }
    }

    #[test]
    fn nonsense_is_refused() {
        let mut wrong = data(0, b"").to_vec();
        wrong[12] = 9;
        assert_eq!(decode(&wrong, 64), Err(ExtentError::Kind(9)));
        let mut long = data(0, b"").to_vec();
        long[8..12].copy_from_slice(&u32::MAX.to_le_bytes());
        assert_eq!(decode(&long, 64), Err(ExtentError::TooLong(u32::MAX)));
        let mut short = skipped(0, 4096).to_vec();
        short[8] = 4;
        assert_eq!(decode(&short, 64), Err(ExtentError::Skipped(4)));
        let mut after = end(0).to_vec();
        after.push(0);
        assert_eq!(decode(&after, 64), Err(ExtentError::AfterEnd));
    }
}
