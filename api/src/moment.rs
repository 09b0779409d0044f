//! Points in time, and how long something takes, as people and scripts read them.

use meta::UnixMillis;
use serde::{Deserialize, Serialize};
use time::OffsetDateTime;
use utoipa::ToSchema;

/// A point in time. Travels as RFC 3339 in UTC, to the millisecond.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
#[schema(value_type = String, format = DateTime)]
pub struct Moment(#[serde(with = "time::serde::rfc3339")] OffsetDateTime);

impl Moment {
    /// Now.
    pub fn now() -> Self {
        UnixMillis::now().into()
    }

    /// A point in time as RFC 3339 has it, if the text is one.
    pub fn parse(text: &str) -> Option<Self> {
        let format = &time::format_description::well_known::Rfc3339;
        OffsetDateTime::parse(text, format).ok().map(Moment)
    }

    /// Seconds from then to `now`; 0 if it is still to come, as clocks of two machines differ.
    pub fn seconds_until(self, now: Moment) -> u64 {
        u64::try_from((now.0 - self.0).whole_seconds()).unwrap_or(0)
    }

    /// The point in time as other code counts it.
    pub fn to_millis(self) -> UnixMillis {
        UnixMillis(u64::try_from(self.0.unix_timestamp_nanos() / 1_000_000).unwrap_or(0))
    }
}

impl From<UnixMillis> for Moment {
    fn from(at: UnixMillis) -> Self {
        let nanos = i128::from(at.0) * 1_000_000;
        // A clock that is set beyond the year 9999 shows the epoch.
        let moment = OffsetDateTime::from_unix_timestamp_nanos(nanos);
        Moment(moment.unwrap_or(OffsetDateTime::UNIX_EPOCH))
    }
}

impl std::fmt::Display for Moment {
    /// To the second.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let whole = self.0.replace_nanosecond(0).unwrap_or(self.0);
        let text = whole.format(&time::format_description::well_known::Rfc3339);
        f.pad(&text.map_err(|_| std::fmt::Error)?)
    }
}

/// A duration in its two largest units.
pub fn duration(seconds: u64) -> String {
    let (days, hours, minutes) = (seconds / 86_400, seconds / 3600 % 24, seconds / 60 % 60);
    match (days, hours, minutes) {
        (0, 0, 0) => format!("{seconds} s"),
        (0, 0, m) => format!("{m} min"),
        (0, h, 0) => format!("{h} h"),
        (0, h, m) => format!("{h} h {m} min"),
        (d, 0, _) => format!("{d} d"),
        (d, h, _) => format!("{d} d {h} h"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moments_are_rfc_3339() {
        let moment = Moment::from(UnixMillis(1_700_000_000_123));
        assert_eq!(moment.to_string(), "2023-11-14T22:13:20Z");
        let json = serde_json::to_string(&moment).unwrap();
        assert_eq!(json, "\"2023-11-14T22:13:20.123Z\"");
        let back: Moment = serde_json::from_str(&json).unwrap();
        assert_eq!(back.to_millis(), UnixMillis(1_700_000_000_123));
        let later = Moment::from(UnixMillis(1_700_000_060_000));
        assert_eq!(moment.seconds_until(later), 59);
        assert_eq!(later.seconds_until(moment), 0);
        assert_eq!(Moment::from(UnixMillis(u64::MAX)).to_millis().0, 0);
    }

    #[test]
    fn durations_have_two_units() {
        let told = [0, 59, 60, 3600, 3660, 86_400, 90_000].map(duration);
        assert_eq!(
            told,
            ["0 s", "59 s", "1 min", "1 h", "1 h 1 min", "1 d", "1 d 1 h"]
        );
    }
}
