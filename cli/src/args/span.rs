//! How long, as options say it: `30s`, `5m`, `2h`, `7d`.

use std::time::Duration;

use api::moment::Moment;
use meta::UnixMillis;

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

/// Reads since when: how long ago, or a time as RFC 3339 has it.
///
/// # Errors
/// It is neither.
pub fn since(text: &str) -> Result<Moment, String> {
    if let Some(moment) = Moment::parse(text) {
        return Ok(moment);
    }
    let wrong = |_| "give how long ago, like 2h, or a time, like 2026-11-24T08:00:00Z".to_owned();
    let ago = parse(text).map_err(wrong)?;
    let ago_ms = u64::try_from(ago.as_millis()).unwrap_or(u64::MAX);
    Ok(UnixMillis(UnixMillis::now().0.saturating_sub(ago_ms)).into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn since_is_a_time_or_how_long_ago() {
        let moment = since("2023-11-14T22:13:20Z").unwrap();
        assert_eq!(moment.to_millis(), UnixMillis(1_700_000_000_000));
        assert_eq!(since("2023-11-14T23:13:20+01:00"), Ok(moment));
        let hour_ago = UnixMillis::now().0 - since("1h").unwrap().to_millis().0;
        assert!((3_600_000..3_660_000).contains(&hour_ago), "{hour_ago}");
        assert_eq!(since("99999999d").unwrap().to_millis(), UnixMillis(0));
        for bad in ["", "yesterday", "2023-11-14"] {
            assert!(since(bad).unwrap_err().contains("like 2h"), "{bad}");
        }
    }

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
