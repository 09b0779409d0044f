//! Routes of the admin API: health, events and metrics.

use std::sync::Arc;

use api::confirmed::Listed;
use api::failure::{Failure, Result};
use api::metrics::MEDIA_TYPE;
use api::server::query_of;
use api::types::{self, Event, EventsQuery};
use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use axum::http::header;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use utoipa::OpenApi as _;
use utoipa::openapi::OpenApi;

use crate::health::Health;

#[derive(utoipa::OpenApi)]
#[openapi(paths(health, events, metrics))]
struct Paths;

/// Documentation of the routes.
pub fn paths() -> OpenApi {
    Paths::openapi()
}

/// The routes.
pub(crate) fn routes(service: Arc<Health>) -> Router {
    Router::new()
        .route("/v1/health", get(health))
        .route("/v1/events", get(events))
        .route("/metrics", get(metrics))
        .with_state(service)
}

/// Problems of the node and the cluster, with their beginning and remedy.
#[utoipa::path(get, path = "/v1/health",
    responses((status = 200, body = types::Health), (status = "default", body = Failure)))]
async fn health(State(health): State<Arc<Health>>) -> Result<Json<types::Health>> {
    health.health().await.map(Json)
}

/// Events of the cluster, oldest first.
#[utoipa::path(get, path = "/v1/events", params(EventsQuery),
    responses((status = 200, body = [Event]), (status = "default", body = Failure)))]
async fn events(
    State(health): State<Arc<Health>>,
    query: Result<Query<EventsQuery>, QueryRejection>,
) -> Result<Listed<Vec<Event>>> {
    let (query, reader) = (query_of(query)?, health.cluster.list_reader());
    let events = health.events(&query, &reader).await?;
    Ok(Listed(events, reader.confirmed()))
}

/// Metrics for Prometheus; `docs/METRICS.md` lists them.
#[utoipa::path(get, path = "/metrics", responses((status = 200, content_type = "text/plain", body = String),
    (status = "default", body = Failure)))]
async fn metrics(State(health): State<Arc<Health>>) -> Result<Response> {
    let page = health.metrics().await?;
    Ok(([(header::CONTENT_TYPE, MEDIA_TYPE)], page).into_response())
}
