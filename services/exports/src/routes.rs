//! Routes of the admin API: NFS exports.

use std::sync::Arc;

use api::confirmed::Listed;
use api::failure::{Failure, Result};
use api::server::{body_of, whole};
use api::types::{Export, ExportCreate, ExportMove, NfsStatus};
use axum::extract::rejection::JsonRejection;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::routing::{get, post};
use axum::{Json, Router};
use utoipa::OpenApi as _;
use utoipa::openapi::OpenApi;

use crate::exports::Exports;

#[derive(utoipa::OpenApi)]
#[openapi(paths(
    export_list,
    export,
    export_create,
    export_move,
    export_delete,
    nfs_status,
))]
struct Paths;

/// Documentation of the routes.
pub fn paths() -> OpenApi {
    Paths::openapi()
}

/// The routes.
pub(crate) fn routes(exports: Arc<Exports>) -> Router {
    Router::new()
        .route("/v1/nfs/exports", get(export_list).post(export_create))
        .route("/v1/nfs/exports/{name}", get(export).delete(export_delete))
        .route("/v1/nfs/exports/{name}/move", post(export_move))
        .route("/v1/nfs/status", get(nfs_status))
        .with_state(exports)
}

/// All NFS exports.
#[utoipa::path(get, path = "/v1/nfs/exports",
    responses((status = 200, body = [Export]), (status = "default", body = Failure)))]
async fn export_list(State(exports): State<Arc<Exports>>) -> Result<Listed<Vec<Export>>> {
    let reader = exports.cluster().list_reader();
    let all = exports.list(&reader).await?;
    Ok(Listed(all, reader.confirmed()))
}

/// One NFS export.
#[utoipa::path(get, path = "/v1/nfs/exports/{name}", params(("name" = String, Path)),
    responses((status = 200, body = Export), (status = "default", body = Failure)))]
async fn export(
    State(exports): State<Arc<Exports>>,
    Path(name): Path<String>,
) -> Result<Json<Export>> {
    exports.get(&name).await.map(Json)
}

/// Exports a volume over NFS from this node, which must be an NFS node.
#[utoipa::path(post, path = "/v1/nfs/exports", request_body = ExportCreate,
    responses((status = 201, body = Export), (status = "default", body = Failure)))]
async fn export_create(
    State(exports): State<Arc<Exports>>,
    body: Result<Json<ExportCreate>, JsonRejection>,
) -> Result<(StatusCode, Json<Export>)> {
    let body = body_of(body)?;
    let export = whole(async move { exports.create(body).await }).await?;
    Ok((StatusCode::CREATED, Json(export)))
}

/// Moves an export to another NFS node. Its clients see a pause.
#[utoipa::path(post, path = "/v1/nfs/exports/{name}/move", params(("name" = String, Path)),
    request_body = ExportMove,
    responses((status = 200, body = Export), (status = "default", body = Failure)))]
async fn export_move(
    State(exports): State<Arc<Exports>>,
    Path(name): Path<String>,
    body: Result<Json<ExportMove>, JsonRejection>,
) -> Result<Json<Export>> {
    let body = body_of(body)?;
    let moved = whole(async move { exports.move_to(&name, &body.to).await }).await;
    moved.map(Json)
}

/// Takes an export down and forgets it. Its volume stays.
#[utoipa::path(delete, path = "/v1/nfs/exports/{name}", params(("name" = String, Path)),
    responses((status = 204), (status = "default", body = Failure)))]
async fn export_delete(
    State(exports): State<Arc<Exports>>,
    Path(name): Path<String>,
) -> Result<StatusCode> {
    whole(async move { exports.delete(&name).await }).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// This node as an NFS node.
#[utoipa::path(get, path = "/v1/nfs/status",
    responses((status = 200, body = NfsStatus), (status = "default", body = Failure)))]
async fn nfs_status(State(exports): State<Arc<Exports>>) -> Result<Json<NfsStatus>> {
    exports.status().await.map(Json)
}
