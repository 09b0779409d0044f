//! The daemon's routes of the admin API: those of its services, and what concerns the daemon as a whole.

mod openapi;

use std::sync::Arc;

use api::failure::{Failure, Result};
use api::server::{caller, no_route};
use api::types::{ConfigValue, Status};
use axum::extract::State;
use axum::http::header;
use axum::response::IntoResponse;
use axum::routing::get;
use axum::{Json, Router, middleware};

use crate::serve::node::Node;

/// All routes.
pub fn router(node: &Arc<Node>) -> Router {
    let mut router = Router::new()
        .route("/v1/status", get(status))
        .route("/v1/config", get(config))
        .route("/v1/openapi.json", get(openapi_document))
        .with_state(Arc::clone(node));
    for service in node.services() {
        router = router.merge(Arc::clone(service).routes());
    }
    router
        .fallback(no_route)
        .layer(middleware::from_fn(caller::with_caller))
}

async fn openapi_document() -> impl IntoResponse {
    (
        [(header::CONTENT_TYPE, "application/json")],
        openapi::document(),
    )
}

/// The node at a glance.
#[utoipa::path(get, path = "/v1/status",
    responses((status = 200, body = Status), (status = "default", body = Failure)))]
pub async fn status(State(node): State<Arc<Node>>) -> Result<Json<Status>> {
    node.status().await.map(Json)
}

/// What the daemon goes by, and where each value comes from.
#[utoipa::path(get, path = "/v1/config",
    responses((status = 200, body = [ConfigValue]), (status = "default", body = Failure)))]
pub async fn config(State(node): State<Arc<Node>>) -> Result<Json<Vec<ConfigValue>>> {
    node.configuration().await.map(Json)
}
