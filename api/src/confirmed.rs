//! How a list says that no leader confirmed it: a header of the answer, and a line for people.

use std::time::Duration;

use axum::Json;
use axum::http::{HeaderMap, HeaderName, HeaderValue};
use axum::response::{IntoResponse, Response};
use meta::Confirmed;
use serde::Serialize;

use crate::moment::duration;

/// Of a list that was not confirmed: when its node last heard a leader, in seconds before now, or
/// [`BEFORE_START`].
pub const NOT_CONFIRMED: HeaderName = HeaderName::from_static("penstock-not-confirmed-for");
/// No leader was heard since the daemon started.
const BEFORE_START: &str = "before-start";

/// A list, as the daemon answers.
pub struct Listed<T>(pub T, pub Confirmed);

impl<T: Serialize> IntoResponse for Listed<T> {
    fn into_response(self) -> Response {
        let value = match self.1 {
            Confirmed::Now => return Json(self.0).into_response(),
            Confirmed::Ago(age) => HeaderValue::from(age.as_secs()),
            Confirmed::BeforeStart => HeaderValue::from_static(BEFORE_START),
        };
        ([(NOT_CONFIRMED, value)], Json(self.0)).into_response()
    }
}

/// What these headers of an answer say of it, if it was not confirmed.
pub fn told(headers: &HeaderMap) -> Option<Confirmed> {
    let text = headers.get(NOT_CONFIRMED)?.to_str().ok()?;
    let age = text.parse().map(Duration::from_secs);
    Some(age.map_or(Confirmed::BeforeStart, Confirmed::Ago))
}

/// The line for people, if there is anything to say.
pub fn warning(confirmed: Confirmed) -> Option<String> {
    let age = match confirmed {
        Confirmed::Now => return None,
        Confirmed::Ago(age) => format!("{} ago", duration(age.as_secs())),
        Confirmed::BeforeStart => "before its daemon started".to_owned(),
    };
    Some(format!(
        "no metadata leader answers: this is what the node knew {age}; see `penstock health`"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_daemon_says_of_a_list_is_what_the_command_line_hears() {
        let said = |confirmed| told(Listed([1], confirmed).into_response().headers());
        assert_eq!(said(Confirmed::Now), None);
        let ago = Confirmed::Ago(Duration::from_secs(75));
        assert_eq!(said(ago), Some(ago));
        assert_eq!(said(Confirmed::BeforeStart), Some(Confirmed::BeforeStart));
        assert!(
            warning(ago).unwrap().contains("knew 1 min ago"),
            "{:?}",
            warning(ago)
        );
    }
}
