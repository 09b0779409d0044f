//! Sizes as people write them: `10G`, `512M`, `4096`.

use std::fmt;
use std::str::FromStr;

/// A number of bytes. Written with a binary suffix (`K`, `M`, `G`, `T`, `P`), which may be followed by `iB`,
/// or with a decimal one (`KB`, `MB` and so on); then it may have a fraction.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Size(pub u64);

/// Why a text is no size.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SizeError {
    /// No digits in front.
    #[error("'{0}' is not a size; write a number with a suffix, like 10G, 1.5T or 512M")]
    NotANumber(String),
    /// A fraction of what has no fractions.
    #[error("'{0}' is not a size; a fraction needs digits and a suffix, like 1.5G")]
    Fraction(String),
    /// Something after the digits that is no suffix.
    #[error("unknown size suffix '{0}'; use K, M, G, T or P, like 10G, or decimal ones, like 10GB")]
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
        let whole = text.bytes().take_while(u8::is_ascii_digit).count();
        let (number, rest) = text.split_at(whole);
        if number.is_empty() {
            return Err(SizeError::NotANumber(text.to_owned()));
        }
        let (fraction, suffix) = match rest.strip_prefix('.') {
            Some(rest) => rest.split_at(rest.bytes().take_while(u8::is_ascii_digit).count()),
            None => ("", rest),
        };
        let unit = unit_bytes(suffix).ok_or_else(|| SizeError::Suffix(suffix.to_owned()))?;
        if rest.starts_with('.') && (fraction.is_empty() || unit == 1) {
            return Err(SizeError::Fraction(text.to_owned()));
        }
        let overflow = || SizeError::Overflow(text.to_owned());
        let number: u64 = number.parse().map_err(|_| overflow())?;
        let bytes = number.checked_mul(unit).ok_or_else(overflow)?;
        let part = fraction_of(unit, fraction);
        bytes.checked_add(part).map(Size).ok_or_else(overflow)
    }
}

/// Bytes of a decimal fraction of a unit, rounded down. Digits behind the 18th make no whole byte.
fn fraction_of(unit: u64, digits: &str) -> u64 {
    let digits = &digits[..digits.len().min(18)];
    let parts = 10u128.pow(digits.len() as u32);
    let number: u128 = digits.parse().unwrap_or(0);
    (u128::from(unit) * number / parts) as u64
}

/// Bytes that a suffix stands for, `None` for an unknown one. `G` and `GiB` are binary, `GB` is decimal.
fn unit_bytes(suffix: &str) -> Option<u64> {
    if suffix.is_empty() || suffix == "B" {
        return Some(1);
    }
    let mut chars = suffix.chars();
    let first = chars.next()?.to_ascii_uppercase();
    let power = 1 + SUFFIXES.iter().position(|s| *s == first)? as u32;
    match chars.as_str() {
        "" | "iB" => Some(1 << (10 * power)),
        "B" => Some(1000u64.pow(power)),
        _ => None,
    }
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

impl serde::Serialize for Size {
    /// Without loss, in the largest unit that divides it.
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let divides = |power: &usize| self.0 != 0 && self.0 % (1 << (10 * (power + 1))) == 0;
        let text = match (0..SUFFIXES.len()).rev().find(divides) {
            Some(power) => format!("{}{}", self.0 >> (10 * (power + 1)), SUFFIXES[power]),
            None => self.0.to_string(),
        };
        serializer.serialize_str(&text)
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
    fn sizes_parse_with_suffixes_and_fractions() {
        for (text, bytes) in [
            ("0", 0),
            ("4096", 4096),
            ("1K", 1024),
            ("512M", 512 << 20),
            ("10G", 10 << 30),
            ("10g", 10 << 30),
            ("2TiB", 2 << 40),
            ("1P", 1 << 50),
            ("1.5G", 1536 << 20),
            ("0.1K", 102),
            ("1.25TiB", 1280 << 30),
            ("10GB", 10_000_000_000),
            ("1.5MB", 1_500_000),
            ("16B", 16),
        ] {
            assert_eq!(text.parse::<Size>(), Ok(Size(bytes)), "{text}");
        }
    }

    #[test]
    fn a_wrong_size_is_refused_with_the_culprit() {
        assert_eq!("10X".parse::<Size>(), Err(SizeError::Suffix("X".into())));
        assert_eq!("10Gb".parse::<Size>(), Err(SizeError::Suffix("Gb".into())));
        for text in ["1.5", "1.G", "1.5B"] {
            assert_eq!(text.parse::<Size>(), Err(SizeError::Fraction(text.into())));
        }
        assert_eq!("1,5G".parse::<Size>(), Err(SizeError::Suffix(",5G".into())));
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
    fn a_size_is_written_without_loss() {
        for (bytes, text) in [
            (0, "0"),
            (1536 << 20, "1536M"),
            (10 << 30, "10G"),
            (4097, "4097"),
            (16383 << 50, "16383P"),
        ] {
            let written = serde_json::to_string(&Size(bytes)).unwrap();
            assert_eq!(written, format!("\"{text}\""));
            assert_eq!(text.parse(), Ok(Size(bytes)));
        }
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
