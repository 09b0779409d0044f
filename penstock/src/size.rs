//! Sizes as people write them: `10G`, `512M`, `4096`.

use std::fmt;
use std::str::FromStr;

/// A number of bytes. Written with a binary suffix (`K`, `M`, `G`, `T`, `P`), which may be followed by `iB`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Size(pub u64);

/// Why a text is no size.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SizeError {
    /// No digits in front.
    #[error("'{0}' is not a size; write a whole number with a suffix, like 10G or 512M")]
    NotANumber(String),
    /// Something after the digits that is no suffix.
    #[error("unknown size suffix '{0}'; use K, M, G, T or P, like 10G or 512M")]
    Suffix(String),
    /// More than 2^64 − 1 bytes.
    #[error("size '{0}' is too large; the most is 16383P")]
    Overflow(String),
}

/// Suffixes in ascending order, each 1024 times the one before.
const SUFFIXES: [char; 5] = ['K', 'M', 'G', 'T', 'P'];

impl FromStr for Size {
    type Err = SizeError;

    fn from_str(text: &str) -> Result<Self, SizeError> {
        let digits = text.bytes().take_while(u8::is_ascii_digit).count();
        let (number, suffix) = text.split_at(digits);
        if number.is_empty() {
            return Err(SizeError::NotANumber(text.to_owned()));
        }
        let shift = suffix_shift(suffix).ok_or_else(|| SizeError::Suffix(suffix.to_owned()))?;
        number
            .parse::<u64>()
            .ok()
            .and_then(|n| n.checked_mul(1 << shift))
            .map(Size)
            .ok_or_else(|| SizeError::Overflow(text.to_owned()))
    }
}

/// Power of two that a suffix stands for, `None` for an unknown one. `GB` is refused: it means 10^9 to some.
fn suffix_shift(suffix: &str) -> Option<u32> {
    if suffix.is_empty() || suffix == "B" {
        return Some(0);
    }
    let letter = suffix.strip_suffix("iB").unwrap_or(suffix);
    let mut chars = letter.chars();
    let first = chars.next()?.to_ascii_uppercase();
    if chars.next().is_some() {
        return None;
    }
    let power = SUFFIXES.iter().position(|s| *s == first)?;
    Some(10 * (power as u32 + 1))
}

impl fmt::Display for Size {
    /// Three significant digits with a suffix; exact sizes stay whole (`10G`).
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut value = self.0 as f64;
        let mut suffix = None;
        for s in SUFFIXES {
            if value < 1024.0 {
                break;
            }
            value /= 1024.0;
            suffix = Some(s);
        }
        let text = match suffix {
            None => self.0.to_string(),
            Some(s) if value.fract() == 0.0 => format!("{value}{s}"),
            Some(s) if value < 10.0 => format!("{value:.2}{s}"),
            Some(s) if value < 100.0 => format!("{value:.1}{s}"),
            Some(s) => format!("{value:.0}{s}"),
        };
        f.pad(&text)
    }
}

impl<'de> serde::Deserialize<'de> for Size {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

/// The new size given to `volume resize`: absolute (`20G`) or relative (`+10G`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NewSize {
    /// The size to have afterwards.
    To(Size),
    /// How much to add.
    By(Size),
}

impl FromStr for NewSize {
    type Err = SizeError;

    fn from_str(text: &str) -> Result<Self, SizeError> {
        match text.strip_prefix('+') {
            Some(rest) => rest.parse().map(NewSize::By),
            None => text.parse().map(NewSize::To),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_parse_with_binary_suffixes() {
        for (text, bytes) in [
            ("0", 0),
            ("4096", 4096),
            ("1K", 1024),
            ("512M", 512 << 20),
            ("10G", 10 << 30),
            ("10g", 10 << 30),
            ("2TiB", 2 << 40),
            ("1P", 1 << 50),
        ] {
            assert_eq!(text.parse::<Size>(), Ok(Size(bytes)), "{text}");
        }
    }

    #[test]
    fn a_wrong_size_is_refused_with_the_culprit() {
        assert_eq!("10X".parse::<Size>(), Err(SizeError::Suffix("X".into())));
        assert_eq!("10GB".parse::<Size>(), Err(SizeError::Suffix("GB".into())));
        assert_eq!("1.5G".parse::<Size>(), Err(SizeError::Suffix(".5G".into())));
        assert!(matches!("G".parse::<Size>(), Err(SizeError::NotANumber(_))));
        assert!(matches!("".parse::<Size>(), Err(SizeError::NotANumber(_))));
        assert!(matches!(
            "-1G".parse::<Size>(),
            Err(SizeError::NotANumber(_))
        ));
        assert!(matches!(
            "99999999P".parse::<Size>(),
            Err(SizeError::Overflow(_))
        ));
    }

    #[test]
    fn sizes_print_short() {
        assert_eq!(Size(10 << 30).to_string(), "10G");
        assert_eq!(Size(0).to_string(), "0");
        assert_eq!(Size(1536 << 20).to_string(), "1.50G");
        assert_eq!(Size((10 << 30) + (1 << 20)).to_string(), "10.0G");
        assert_eq!(Size(1023).to_string(), "1023");
    }

    #[test]
    fn a_new_size_is_absolute_or_relative() {
        assert_eq!("+1G".parse(), Ok(NewSize::By(Size(1 << 30))));
        assert_eq!("1G".parse(), Ok(NewSize::To(Size(1 << 30))));
    }
}
