//! Takes fields off the body of a request, front to back.

use zerocopy::{FromBytes, Immutable, KnownLayout, Unaligned};

use crate::malformed::Malformed;
use crate::names::{LookupName, NAME_BYTES_MAX, Name, TARGET_BYTES_MAX, Target, XattrName};

/// What is left of a request's body.
pub struct Body<'a> {
    rest: &'a [u8],
}

impl<'a> Body<'a> {
    pub fn new(bytes: &'a [u8]) -> Self {
        Self { rest: bytes }
    }

    /// A structure of the protocol.
    #[inline]
    pub fn take<T>(&mut self) -> Result<&'a T, Malformed>
    where
        T: FromBytes + KnownLayout + Immutable + Unaligned,
    {
        let Ok((value, rest)) = T::ref_from_prefix(self.rest) else {
            return Err(Malformed::Truncated {
                needed: size_of::<T>(),
                given: self.rest.len(),
            });
        };
        self.rest = rest;
        Ok(value)
    }

    /// A structure of the protocol that is all that is left.
    #[inline]
    pub fn take_last<T>(mut self) -> Result<&'a T, Malformed>
    where
        T: FromBytes + KnownLayout + Immutable + Unaligned,
    {
        let value = self.take()?;
        self.end()?;
        Ok(value)
    }

    /// A name of a directory entry.
    pub fn name(&mut self) -> Result<Name<'a>, Malformed> {
        Name::new(self.terminated(NAME_BYTES_MAX, Malformed::NameTooLong)?)
    }

    /// A name that has no meaning: TMPFILE comes with `/`.
    pub fn skip_name(&mut self) -> Result<(), Malformed> {
        self.terminated(NAME_BYTES_MAX, Malformed::NameTooLong)
            .map(drop)
    }

    /// A name of a directory entry, `.` or `..`.
    pub fn lookup_name(&mut self) -> Result<LookupName<'a>, Malformed> {
        LookupName::new(self.terminated(NAME_BYTES_MAX, Malformed::NameTooLong)?)
    }

    /// A name of an extended attribute.
    pub fn xattr_name(&mut self) -> Result<XattrName<'a>, Malformed> {
        XattrName::new(self.terminated(NAME_BYTES_MAX, Malformed::XattrNameTooLong)?)
    }

    /// The target of a symlink.
    pub fn target(&mut self) -> Result<Target<'a>, Malformed> {
        Target::new(self.terminated(TARGET_BYTES_MAX, Malformed::NameTooLong)?)
    }

    /// Bytes up to a NUL, which is taken too. Looks no further than `bytes_max` and the NUL.
    fn terminated(&mut self, bytes_max: usize, too_long: Malformed) -> Result<&'a [u8], Malformed> {
        let window = &self.rest[..self.rest.len().min(bytes_max + 1)];
        match window.iter().position(|byte| *byte == 0) {
            Some(end) => {
                self.rest = &self.rest[end + 1..];
                Ok(&window[..end])
            }
            None if window.len() > bytes_max => Err(too_long),
            None => Err(Malformed::Unterminated),
        }
    }

    /// All that is left; `count` is how many bytes that should be.
    pub fn rest_of(self, count: u64) -> Result<&'a [u8], Malformed> {
        if self.rest.len() as u64 != count {
            return Err(Malformed::Count {
                count,
                given: self.rest.len(),
            });
        }
        Ok(self.rest)
    }

    /// Nothing may be left.
    #[inline]
    pub fn end(&self) -> Result<(), Malformed> {
        if self.rest.is_empty() {
            Ok(())
        } else {
            Err(Malformed::Trailing(self.rest.len()))
        }
    }
}
