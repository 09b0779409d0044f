//! Routes of the admin API: volumes.

use std::sync::Arc;

use api::confirmed::Listed;
use api::failure::{Failure, Result};
use api::server::{body_of, query_of, whole};
use api::types::{
    ExportQuery, ImportQuery, Volume, VolumeCreate, VolumeRename, VolumeResize, VolumeSet,
};
use api::{body, extents};
use axum::body::Body;
use axum::extract::rejection::{JsonRejection, QueryRejection};
use axum::extract::{Path, Query, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, put};
use axum::{Json, Router};
use utoipa::OpenApi as _;
use utoipa::openapi::OpenApi;

use crate::transfer;
use crate::volumes::Volumes;

#[derive(utoipa::OpenApi)]
#[openapi(paths(
    volume_list,
    volume,
    volume_create,
    volume_resize,
    volume_rename,
    volume_set,
    volume_delete,
    volume_import,
    volume_export,
))]
struct Paths;

/// Documentation of the routes.
pub fn paths() -> OpenApi {
    Paths::openapi()
}

/// The routes.
pub(crate) fn routes(volumes: Arc<Volumes>) -> Router {
    Router::new()
        .route("/v1/volumes", get(volume_list).post(volume_create))
        .route(
            "/v1/volumes/{name}",
            get(volume).patch(volume_resize).delete(volume_delete),
        )
        .route("/v1/volumes/{name}/name", put(volume_rename))
        .route("/v1/volumes/{name}/settings", put(volume_set))
        .route(
            "/v1/volumes/{name}/data",
            put(volume_import).get(volume_export),
        )
        .with_state(volumes)
}

/// All volumes.
#[utoipa::path(get, path = "/v1/volumes",
    responses((status = 200, body = [Volume]), (status = "default", body = Failure)))]
async fn volume_list(State(volumes): State<Arc<Volumes>>) -> Result<Listed<Vec<Volume>>> {
    let reader = volumes.cluster().list_reader();
    let all = volumes.list(&reader).await?;
    Ok(Listed(all, reader.confirmed()))
}

/// One volume.
#[utoipa::path(get, path = "/v1/volumes/{name}", params(("name" = String, Path)),
    responses((status = 200, body = Volume), (status = "default", body = Failure)))]
async fn volume(
    State(volumes): State<Arc<Volumes>>,
    Path(name): Path<String>,
) -> Result<Json<Volume>> {
    volumes.get(&name).await.map(Json)
}

/// Creates an empty volume.
#[utoipa::path(post, path = "/v1/volumes", request_body = VolumeCreate,
    responses((status = 201, body = Volume), (status = "default", body = Failure)))]
async fn volume_create(
    State(volumes): State<Arc<Volumes>>,
    body: Result<Json<VolumeCreate>, JsonRejection>,
) -> Result<(StatusCode, Json<Volume>)> {
    let body = body_of(body)?;
    let volume = whole(async move { volumes.create(body).await }).await?;
    Ok((StatusCode::CREATED, Json(volume)))
}

/// Changes a volume's size; guests are notified.
#[utoipa::path(patch, path = "/v1/volumes/{name}", params(("name" = String, Path)),
    request_body = VolumeResize,
    responses((status = 200, body = Volume), (status = "default", body = Failure)))]
async fn volume_resize(
    State(volumes): State<Arc<Volumes>>,
    Path(name): Path<String>,
    body: Result<Json<VolumeResize>, JsonRejection>,
) -> Result<Json<Volume>> {
    let body = body_of(body)?;
    let resized = whole(async move { volumes.resize(&name, &body).await }).await;
    resized.map(Json)
}

/// Gives a volume that nobody uses another name.
#[utoipa::path(put, path = "/v1/volumes/{name}/name", params(("name" = String, Path)),
    request_body = VolumeRename,
    responses((status = 200, body = Volume), (status = "default", body = Failure)))]
async fn volume_rename(
    State(volumes): State<Arc<Volumes>>,
    Path(name): Path<String>,
    body: Result<Json<VolumeRename>, JsonRejection>,
) -> Result<Json<Volume>> {
    let body = body_of(body)?;
    let renamed = whole(async move { volumes.rename(&name, &body.name).await }).await;
    renamed.map(Json)
}

/// Changes how a volume behaves, within seconds.
#[utoipa::path(put, path = "/v1/volumes/{name}/settings", params(("name" = String, Path)),
    request_body = VolumeSet,
    responses((status = 200, body = Volume), (status = "default", body = Failure)))]
async fn volume_set(
    State(volumes): State<Arc<Volumes>>,
    Path(name): Path<String>,
    body: Result<Json<VolumeSet>, JsonRejection>,
) -> Result<Json<Volume>> {
    let body = body_of(body)?;
    let set = whole(async move { volumes.set(&name, &body).await }).await;
    set.map(Json)
}

/// Deletes a volume and its data.
#[utoipa::path(delete, path = "/v1/volumes/{name}", params(("name" = String, Path)),
    responses((status = 204), (status = "default", body = Failure)))]
async fn volume_delete(
    State(volumes): State<Arc<Volumes>>,
    Path(name): Path<String>,
) -> Result<StatusCode> {
    whole(async move { volumes.delete(&name).await }).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Fills a volume, creating it if it does not exist. What was there before stays until the stream is whole.
#[utoipa::path(put, path = "/v1/volumes/{name}/data", params(("name" = String, Path), ImportQuery),
    request_body(content = Vec<u8>, content_type = "application/vnd.penstock.extents"),
    responses((status = 200, body = Volume), (status = "default", body = Failure)))]
async fn volume_import(
    State(volumes): State<Arc<Volumes>>,
    Path(name): Path<String>,
    query: Result<Query<ImportQuery>, QueryRejection>,
    body: Body,
) -> Result<Json<Volume>> {
    let query = query_of(query)?;
    let imported =
        whole(async move { transfer::import(&volumes, &name, &query, body).await }).await;
    imported.map(Json)
}

/// A volume's data, without what was never written.
#[utoipa::path(get, path = "/v1/volumes/{name}/data", params(("name" = String, Path), ExportQuery),
    responses((status = 200, content_type = "application/vnd.penstock.extents", body = Vec<u8>),
        (status = "default", body = Failure)))]
async fn volume_export(
    State(volumes): State<Arc<Volumes>>,
    Path(name): Path<String>,
    query: Result<Query<ExportQuery>, QueryRejection>,
) -> Result<Response> {
    let query = query_of(query)?;
    let (sender, stream) = body::channel();
    whole(async move { transfer::export(volumes, &name, &query, sender).await }).await?;
    Ok(([(header::CONTENT_TYPE, extents::MEDIA_TYPE)], stream).into_response())
}
