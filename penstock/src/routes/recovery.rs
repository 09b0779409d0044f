//! Backups of the metadata, and what follows a recovery.

use std::sync::Arc;

use api::failure::{Failure, Result};
use api::server::{body_of, whole};
use api::types::Resume;
use axum::extract::State;
use axum::extract::rejection::JsonRejection;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};

use crate::serve::node::Node;

/// The routes of this module.
pub fn routes() -> Router<Arc<Node>> {
    Router::new()
        .route("/v1/meta/backup", get(backup))
        .route("/v1/meta/resume", post(resume))
        .route("/v1/meta/forget-unknown", post(forget_unknown))
}

/// All metadata in one file, which `penstock meta restore` reads.
#[utoipa::path(get, path = "/v1/meta/backup",
    responses((status = 200, content_type = "application/octet-stream", body = Vec<u8>),
    (status = "default", body = Failure)))]
pub async fn backup(State(node): State<Arc<Node>>) -> Result<Response> {
    let bytes = whole(async move { node.backup().await }).await?;
    let media = [(header::CONTENT_TYPE, "application/octet-stream")];
    Ok((media, bytes).into_response())
}

/// After a restore: decides by what devices say which replicas count.
#[utoipa::path(post, path = "/v1/meta/resume", request_body = Resume,
    responses((status = 200), (status = "default", body = Failure)))]
pub async fn resume(
    State(node): State<Arc<Node>>,
    body: Result<Json<Resume>, JsonRejection>,
) -> Result<Json<()>> {
    let body = body_of(body)?;
    whole(async move { node.resume(body.without_missing).await })
        .await
        .map(Json)
}

/// After a recovery: gives back the space of volumes that the metadata do not know.
#[utoipa::path(post, path = "/v1/meta/forget-unknown",
    responses((status = 200), (status = "default", body = Failure)))]
pub async fn forget_unknown(State(node): State<Arc<Node>>) -> Result<Json<()>> {
    whole(async move { node.forget_unknown().await })
        .await
        .map(Json)
}
