//! How long, as options say it: `30s`, `5m`, `2h`, `7d`.

use std::time::Duration;

/// Reads it.
///
/// # Errors
/// There is no number or no unit, or it is no time at all.
pub fn parse(text: &str) -> Result<Duration, String> {
    let wrong = || "give a number and s, m, h or d, like 2h".to_owned();
    let number = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let seconds: u64 = match &text[number.len()..] {
        "s" => 1,
        "m" => 60,
        "h" => 3600,
        "d" => 24 * 3600,
        _ => return Err(wrong()),
    };
    let number: u64 = number.parse().map_err(|_| wrong())?;
    match number.checked_mul(seconds) {
        Some(0) => Err("give at least 1s".to_owned()),
        Some(total) => Ok(Duration::from_secs(total)),
        None => Err(wrong()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_are_numbers_with_units() {
        assert_eq!(parse("90s"), Ok(Duration::from_secs(90)));
        assert_eq!(parse("5m"), Ok(Duration::from_secs(300)));
        assert_eq!(parse("7d"), Ok(Duration::from_secs(7 * 24 * 3600)));
        for bad in [
            "",
            "h",
            "5",
            "-1s",
            "1.5h",
            "0s",
            "99999999999999999999s",
            "5w",
        ] {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }
}
