//! Concatenated gzip or bzip2 streams, with padding after the last one.
//!
//! Block devices, tapes and some build tools pad a file with zeroes. `gzip -t` and `bzip2 -t` accept that;
//! the decoders for several streams do not, because they expect another header there.

use std::io::{self, BufRead, ErrorKind, Read};

use bzip2::bufread::BzDecoder;
use flate2::bufread::GzDecoder;

/// Decoder of one stream.
pub trait Stream<R>: Read {
    /// Returns the source, positioned after the end of the stream.
    fn into_source(self) -> R;
}

impl<R: BufRead> Stream<R> for GzDecoder<R> {
    fn into_source(self) -> R {
        self.into_inner()
    }
}

impl<R: BufRead> Stream<R> for BzDecoder<R> {
    fn into_source(self) -> R {
        self.into_inner()
    }
}

/// Reader of the content of all streams of a source.
#[derive(Debug)]
pub struct Streams<R, D> {
    begin: fn(R) -> D,
    state: State<R, D>,
}

#[derive(Debug)]
enum State<R, D> {
    /// Reading a stream.
    Within(D),
    /// A stream has ended; `is_padded` after the first zero behind it.
    Between { source: R, is_padded: bool },
    /// The source has ended.
    Ended,
}

impl<R: BufRead> Streams<R, GzDecoder<R>> {
    /// Reads gzip streams.
    pub fn gzip(source: R) -> Self {
        Self {
            begin: GzDecoder::new,
            state: State::Within(GzDecoder::new(source)),
        }
    }
}

impl<R: BufRead> Streams<R, BzDecoder<R>> {
    /// Reads bzip2 streams.
    pub fn bzip2(source: R) -> Self {
        Self {
            begin: BzDecoder::new,
            state: State::Within(BzDecoder::new(source)),
        }
    }
}

impl<R: BufRead, D: Stream<R>> Read for Streams<R, D> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if buffer.is_empty() {
            return Ok(0);
        }
        loop {
            match &mut self.state {
                State::Within(stream) => {
                    let count = stream.read(buffer)?;
                    if count > 0 {
                        return Ok(count);
                    }
                }
                State::Between { source, is_padded } => {
                    if has_ended(source, is_padded)? {
                        self.state = State::Ended;
                    }
                }
                State::Ended => return Ok(0),
            }
            self.state = match std::mem::replace(&mut self.state, State::Ended) {
                State::Within(stream) => State::Between {
                    source: stream.into_source(),
                    is_padded: false,
                },
                State::Between { source, .. } => State::Within((self.begin)(source)),
                State::Ended => State::Ended,
            };
        }
    }
}

/// Skips padding. Returns true at the end of the source, and false at the beginning of a stream.
fn has_ended(source: &mut impl BufRead, is_padded: &mut bool) -> io::Result<bool> {
    loop {
        let bytes = source.fill_buf()?;
        if bytes.is_empty() {
            return Ok(true);
        }
        let zeroes = bytes.iter().take_while(|byte| **byte == 0).count();
        let is_all_zero = zeroes == bytes.len();
        source.consume(zeroes);
        *is_padded |= zeroes > 0;
        match (is_all_zero, *is_padded) {
            (true, _) => {}
            (false, false) => return Ok(false),
            (false, true) => {
                let error = "there are other data after its padding";
                return Err(io::Error::new(ErrorKind::InvalidData, error));
            }
        }
    }
}
