//! Building blocks for the routes of the admin API.

pub mod caller;

use axum::Json;
use axum::extract::Query;
use axum::extract::rejection::{JsonRejection, QueryRejection};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};

use crate::failure::{Failure, Kind, Result};

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        let status = match self.kind {
            Kind::Invalid => StatusCode::BAD_REQUEST,
            Kind::NotFound => StatusCode::NOT_FOUND,
            Kind::Conflict => StatusCode::CONFLICT,
            Kind::NoSpace => StatusCode::INSUFFICIENT_STORAGE,
            Kind::Denied => StatusCode::FORBIDDEN,
            Kind::Unreachable | Kind::Starting => StatusCode::SERVICE_UNAVAILABLE,
            Kind::Failed => StatusCode::INTERNAL_SERVER_ERROR,
        };
        (status, Json(self)).into_response()
    }
}

fn bad_request(e: impl std::fmt::Display) -> Failure {
    Failure::invalid(e, "see the OpenAPI document at /v1/openapi.json")
}

/// Returns the body of a request.
///
/// # Errors
/// The body does not have the form that the resource takes.
pub fn body_of<T>(json: Result<Json<T>, JsonRejection>) -> Result<T> {
    json.map(|Json(value)| value)
        .map_err(|e| bad_request(e.body_text()))
}

/// Returns the query of a request.
///
/// # Errors
/// The query does not have the form that the resource takes.
pub fn query_of<T>(query: Result<Query<T>, QueryRejection>) -> Result<T> {
    query
        .map(|Query(value)| value)
        .map_err(|e| bad_request(e.body_text()))
}

/// Runs work in a separate task: a client that disconnects must not interrupt it half way.
pub async fn whole<T: Send + 'static>(
    work: impl Future<Output = Result<T>> + Send + 'static,
) -> Result<T> {
    let done = tokio::spawn(meta::as_user(meta::caller_uid(), work)).await;
    done.map_err(|e| Failure::plain(Kind::Failed, e))?
}

/// Answers requests that name no resource.
pub async fn no_route() -> Failure {
    Failure::new(
        Kind::NotFound,
        "there is no such resource",
        "see the OpenAPI document at /v1/openapi.json",
    )
}
