//! Routes of the admin API: filesystems and their attachments.

use std::sync::Arc;

use api::confirmed::Listed;
use api::failure::{Failure, Result};
use api::server::{body_of, query_of, whole};
use api::types::{
    AttachmentsQuery, Filesystem, FilesystemAttach, FilesystemAttachment, FilesystemCreate,
    FilesystemDetachQuery, FilesystemDetached, FilesystemStats,
};
use axum::extract::rejection::{JsonRejection, QueryRejection};
use axum::extract::{Path, Query, State};
use axum::http::StatusCode;
use axum::routing::get;
use axum::{Json, Router};
use utoipa::OpenApi as _;
use utoipa::openapi::OpenApi;

use crate::filesystems::FilesystemService;

#[derive(utoipa::OpenApi)]
#[openapi(paths(
    filesystems,
    filesystem,
    filesystem_create,
    filesystem_delete,
    filesystem_attachments,
    filesystem_attachment_stats,
    filesystem_attach,
    filesystem_detach,
))]
struct Paths;

/// Documentation of the routes.
pub fn paths() -> OpenApi {
    Paths::openapi()
}

/// The routes.
pub(crate) fn routes(service: Arc<FilesystemService>) -> Router {
    Router::new()
        .route("/v1/filesystems", get(filesystems).post(filesystem_create))
        .route(
            "/v1/filesystems/{name}",
            get(filesystem).delete(filesystem_delete),
        )
        .route(
            "/v1/filesystem-attachments",
            get(filesystem_attachments)
                .post(filesystem_attach)
                .delete(filesystem_detach),
        )
        .route(
            "/v1/filesystem-attachments/{target}/stats",
            get(filesystem_attachment_stats),
        )
        .with_state(service)
}

/// All filesystems, without the nodes that use them.
#[utoipa::path(get, path = "/v1/filesystems",
    responses((status = 200, body = [Filesystem]), (status = "default", body = Failure)))]
async fn filesystems(
    State(service): State<Arc<FilesystemService>>,
) -> Result<Listed<Vec<Filesystem>>> {
    let reader = service.cluster().list_reader();
    let all = service.list(&reader).await?;
    Ok(Listed(all, reader.confirmed()))
}

/// One filesystem.
#[utoipa::path(get, path = "/v1/filesystems/{name}", params(("name" = String, Path)),
    responses((status = 200, body = Filesystem), (status = "default", body = Failure)))]
async fn filesystem(
    State(service): State<Arc<FilesystemService>>,
    Path(name): Path<String>,
) -> Result<Json<Filesystem>> {
    service.get(&name).await.map(Json)
}

/// Creates an empty filesystem.
#[utoipa::path(post, path = "/v1/filesystems", request_body = FilesystemCreate,
    responses((status = 201, body = Filesystem), (status = "default", body = Failure)))]
async fn filesystem_create(
    State(service): State<Arc<FilesystemService>>,
    body: Result<Json<FilesystemCreate>, JsonRejection>,
) -> Result<(StatusCode, Json<Filesystem>)> {
    let body = body_of(body)?;
    let filesystem = whole(async move { service.create(body).await }).await?;
    Ok((StatusCode::CREATED, Json(filesystem)))
}

/// Deletes a filesystem with all its files, which are removed in the background.
#[utoipa::path(delete, path = "/v1/filesystems/{name}", params(("name" = String, Path)),
    responses((status = 202), (status = "default", body = Failure)))]
async fn filesystem_delete(
    State(service): State<Arc<FilesystemService>>,
    Path(name): Path<String>,
) -> Result<StatusCode> {
    whole(async move { service.delete(&name).await }).await?;
    Ok(StatusCode::ACCEPTED)
}

/// The attachments of filesystems.
#[utoipa::path(get, path = "/v1/filesystem-attachments", params(AttachmentsQuery),
    responses((status = 200, body = [FilesystemAttachment]), (status = "default", body = Failure)))]
async fn filesystem_attachments(
    State(service): State<Arc<FilesystemService>>,
    query: Result<Query<AttachmentsQuery>, QueryRejection>,
) -> Result<Listed<Vec<FilesystemAttachment>>> {
    let reader = service.cluster().list_reader();
    let all = match query_of(query)?.everywhere {
        true => service.attachments_everywhere(&reader).await?,
        false => service.attachments(&reader).await?,
    };
    Ok(Listed(all, reader.confirmed()))
}

/// What an attachment of a filesystem did since it began.
#[utoipa::path(get, path = "/v1/filesystem-attachments/{target}/stats",
    params(("target" = String, Path,
        description = "Socket of the attachment, or the name of its filesystem")),
    responses((status = 200, body = FilesystemStats), (status = "default", body = Failure)))]
async fn filesystem_attachment_stats(
    State(service): State<Arc<FilesystemService>>,
    Path(target): Path<String>,
) -> Result<Json<FilesystemStats>> {
    service.stats(&target).await.map(Json)
}

/// Serves a filesystem on a vhost-user socket, now and after every start of the daemon.
#[utoipa::path(post, path = "/v1/filesystem-attachments", request_body = FilesystemAttach,
    responses((status = 201, body = FilesystemAttachment), (status = "default", body = Failure)))]
async fn filesystem_attach(
    State(service): State<Arc<FilesystemService>>,
    body: Result<Json<FilesystemAttach>, JsonRejection>,
) -> Result<(StatusCode, Json<FilesystemAttachment>)> {
    let body = body_of(body)?;
    let attachment = whole(async move { service.attach(body).await }).await?;
    Ok((StatusCode::CREATED, Json(attachment)))
}

/// Ends an attachment of a filesystem.
#[utoipa::path(delete, path = "/v1/filesystem-attachments", params(FilesystemDetachQuery),
    responses((status = 200, body = FilesystemDetached), (status = "default", body = Failure)))]
async fn filesystem_detach(
    State(service): State<Arc<FilesystemService>>,
    query: Result<Query<FilesystemDetachQuery>, QueryRejection>,
) -> Result<Json<FilesystemDetached>> {
    let query = query_of(query)?;
    let detached = whole(async move { service.detach(&query).await }).await;
    detached.map(Json)
}
