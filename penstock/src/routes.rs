//! The daemon's routes of the admin API: HTTP in, calls on the [`Node`], JSON out.

mod cluster;
mod filesystem;
mod hand_over;
mod join;
mod nfs;
mod openapi;
mod recovery;

use std::sync::Arc;

use api::confirmed::Listed;
use api::failure::{Failure, Result};
use api::metrics::MEDIA_TYPE;
use api::server::{body_of, caller, no_route, query_of, whole};
use api::types::{
    Attach, Attachment, AttachmentStats, AttachmentsQuery, ConfigValue, DetachQuery, Detached,
    ExportQuery, Health, ImportQuery, Move, Moved, OfferCreate, OfferQuery, Offered, Status,
    Volume, VolumeCreate, VolumeRename, VolumeResize, VolumeSet,
};
use api::{body, extents};
use axum::body::Body;
use axum::extract::rejection::{JsonRejection, QueryRejection};
use axum::extract::{Path, Query, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{delete, get, post, put};
use axum::{Json, Router, middleware};

use crate::serve::node::Node;
use crate::serve::transfer;

/// All routes.
pub fn router(node: Arc<Node>) -> Router {
    Router::new()
        .route("/v1/openapi.json", get(openapi_document))
        .route("/v1/status", get(status))
        .route("/v1/health", get(health))
        .route("/v1/config", get(config))
        .route("/v1/tokens", get(join::tokens).post(join::token_create))
        .route("/v1/tokens/{id}", delete(join::token_revoke))
        .route("/metrics", get(metrics))
        .merge(cluster::routes())
        .merge(filesystem::routes())
        .merge(nfs::routes())
        .merge(recovery::routes())
        .route("/v1/volumes", get(volumes).post(volume_create))
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
        .route(
            "/v1/attachments",
            get(attachments).post(attach).delete(detach),
        )
        .route("/v1/attachments/move", post(attachment_move))
        .route(
            "/v1/attachments/offer",
            post(attachment_offer).delete(attachment_withdraw),
        )
        .route("/v1/attachments/{target}/stats", get(attachment_stats))
        .fallback(no_route)
        .layer(middleware::from_fn(caller::with_caller))
        .with_state(node)
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

/// What is wrong, since when, and what is being done about it.
#[utoipa::path(get, path = "/v1/health",
    responses((status = 200, body = Health), (status = "default", body = Failure)))]
pub async fn health(State(node): State<Arc<Node>>) -> Result<Json<Health>> {
    node.health().await.map(Json)
}

/// What the daemon goes by, and where each value comes from.
#[utoipa::path(get, path = "/v1/config",
    responses((status = 200, body = [ConfigValue]), (status = "default", body = Failure)))]
pub async fn config(State(node): State<Arc<Node>>) -> Result<Json<Vec<ConfigValue>>> {
    node.configuration().await.map(Json)
}

/// What Prometheus reads; `docs/METRICS.md` lists it.
#[utoipa::path(get, path = "/metrics", responses((status = 200, content_type = "text/plain", body = String),
    (status = "default", body = Failure)))]
pub async fn metrics(State(node): State<Arc<Node>>) -> Result<Response> {
    let page = node.metrics().await?;
    Ok(([(header::CONTENT_TYPE, MEDIA_TYPE)], page).into_response())
}

/// All volumes.
#[utoipa::path(get, path = "/v1/volumes",
    responses((status = 200, body = [Volume]), (status = "default", body = Failure)))]
pub async fn volumes(State(node): State<Arc<Node>>) -> Result<Listed<Vec<Volume>>> {
    let reader = node.list_reader();
    let all = node.volumes(&reader).await?;
    Ok(Listed(all, reader.confirmed()))
}

/// One volume.
#[utoipa::path(get, path = "/v1/volumes/{name}", params(("name" = String, Path)),
    responses((status = 200, body = Volume), (status = "default", body = Failure)))]
pub async fn volume(
    State(node): State<Arc<Node>>,
    Path(name): Path<String>,
) -> Result<Json<Volume>> {
    node.volume(&name).await.map(Json)
}

/// Creates an empty volume.
#[utoipa::path(post, path = "/v1/volumes", request_body = VolumeCreate,
    responses((status = 201, body = Volume), (status = "default", body = Failure)))]
pub async fn volume_create(
    State(node): State<Arc<Node>>,
    body: Result<Json<VolumeCreate>, JsonRejection>,
) -> Result<(StatusCode, Json<Volume>)> {
    let body = body_of(body)?;
    let volume = whole(async move { node.volume_create(body).await }).await?;
    Ok((StatusCode::CREATED, Json(volume)))
}

/// Changes a volume's size; guests are told.
#[utoipa::path(patch, path = "/v1/volumes/{name}", params(("name" = String, Path)),
    request_body = VolumeResize,
    responses((status = 200, body = Volume), (status = "default", body = Failure)))]
pub async fn volume_resize(
    State(node): State<Arc<Node>>,
    Path(name): Path<String>,
    body: Result<Json<VolumeResize>, JsonRejection>,
) -> Result<Json<Volume>> {
    let body = body_of(body)?;
    let resized = whole(async move { node.volume_resize(&name, &body).await }).await;
    resized.map(Json)
}

/// Gives a volume that nobody uses another name.
#[utoipa::path(put, path = "/v1/volumes/{name}/name", params(("name" = String, Path)),
    request_body = VolumeRename,
    responses((status = 200, body = Volume), (status = "default", body = Failure)))]
pub async fn volume_rename(
    State(node): State<Arc<Node>>,
    Path(name): Path<String>,
    body: Result<Json<VolumeRename>, JsonRejection>,
) -> Result<Json<Volume>> {
    let body = body_of(body)?;
    let renamed = whole(async move { node.volume_rename(&name, &body.name).await }).await;
    renamed.map(Json)
}

/// Changes how a volume behaves, within seconds.
#[utoipa::path(put, path = "/v1/volumes/{name}/settings", params(("name" = String, Path)),
    request_body = VolumeSet,
    responses((status = 200, body = Volume), (status = "default", body = Failure)))]
pub async fn volume_set(
    State(node): State<Arc<Node>>,
    Path(name): Path<String>,
    body: Result<Json<VolumeSet>, JsonRejection>,
) -> Result<Json<Volume>> {
    let body = body_of(body)?;
    let set = whole(async move { node.volume_set(&name, &body).await }).await;
    set.map(Json)
}

/// Deletes a volume and its data.
#[utoipa::path(delete, path = "/v1/volumes/{name}", params(("name" = String, Path)),
    responses((status = 204), (status = "default", body = Failure)))]
pub async fn volume_delete(
    State(node): State<Arc<Node>>,
    Path(name): Path<String>,
) -> Result<StatusCode> {
    whole(async move { node.volume_delete(&name).await }).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Fills a volume, creating it if it does not exist. What was there before stays until the stream is whole.
#[utoipa::path(put, path = "/v1/volumes/{name}/data", params(("name" = String, Path), ImportQuery),
    request_body(content = Vec<u8>, content_type = "application/vnd.penstock.extents"),
    responses((status = 200, body = Volume), (status = "default", body = Failure)))]
pub async fn volume_import(
    State(node): State<Arc<Node>>,
    Path(name): Path<String>,
    query: Result<Query<ImportQuery>, QueryRejection>,
    body: Body,
) -> Result<Json<Volume>> {
    let query = query_of(query)?;
    let imported = whole(async move { transfer::import(&node, &name, &query, body).await }).await;
    imported.map(Json)
}

/// A volume's data, without what was never written.
#[utoipa::path(get, path = "/v1/volumes/{name}/data", params(("name" = String, Path), ExportQuery),
    responses((status = 200, content_type = "application/vnd.penstock.extents", body = Vec<u8>),
        (status = "default", body = Failure)))]
pub async fn volume_export(
    State(node): State<Arc<Node>>,
    Path(name): Path<String>,
    query: Result<Query<ExportQuery>, QueryRejection>,
) -> Result<Response> {
    let query = query_of(query)?;
    let (sender, stream) = body::channel();
    whole(async move { transfer::export(node, &name, &query, sender).await }).await?;
    Ok(([(header::CONTENT_TYPE, extents::MEDIA_TYPE)], stream).into_response())
}

/// All attachments.
#[utoipa::path(get, path = "/v1/attachments", params(AttachmentsQuery),
    responses((status = 200, body = [Attachment]), (status = "default", body = Failure)))]
pub async fn attachments(
    State(node): State<Arc<Node>>,
    query: Result<Query<AttachmentsQuery>, QueryRejection>,
) -> Result<Listed<Vec<Attachment>>> {
    let reader = node.list_reader();
    let all = node
        .attachments(&reader, query_of(query)?.everywhere)
        .await?;
    Ok(Listed(all, reader.confirmed()))
}

/// What an attachment did since it began, and how long its requests took.
#[utoipa::path(get, path = "/v1/attachments/{target}/stats",
    params(("target" = String, Path, description = "Socket of the attachment, or the name of its volume")),
    responses((status = 200, body = AttachmentStats), (status = "default", body = Failure)))]
pub async fn attachment_stats(
    State(node): State<Arc<Node>>,
    Path(target): Path<String>,
) -> Result<Json<AttachmentStats>> {
    node.attachment_stats(&target).await.map(Json)
}

/// Serves a volume on a vhost-user socket, now and after every start of the daemon.
#[utoipa::path(post, path = "/v1/attachments", request_body = Attach,
    responses((status = 201, body = Attachment), (status = "default", body = Failure)))]
pub async fn attach(
    State(node): State<Arc<Node>>,
    body: Result<Json<Attach>, JsonRejection>,
) -> Result<(StatusCode, Json<Attachment>)> {
    let body = body_of(body)?;
    let attachment = whole(async move { node.attach(body).await }).await?;
    Ok((StatusCode::CREATED, Json(attachment)))
}

/// Ends an attachment, or forgets one of a node that is down.
#[utoipa::path(delete, path = "/v1/attachments", params(DetachQuery),
    responses((status = 200, body = Detached), (status = "default", body = Failure)))]
pub async fn detach(
    State(node): State<Arc<Node>>,
    query: Result<Query<DetachQuery>, QueryRejection>,
) -> Result<Json<Detached>> {
    let query = query_of(query)?;
    let detached = whole(async move { node.detach(&query).await }).await;
    detached.map(Json)
}

/// Moves an attachment that no guest uses to another node.
#[utoipa::path(post, path = "/v1/attachments/move", request_body = Move,
    responses((status = 200, body = Moved), (status = "default", body = Failure)))]
pub async fn attachment_move(
    State(node): State<Arc<Node>>,
    body: Result<Json<Move>, JsonRejection>,
) -> Result<Json<Moved>> {
    let body = body_of(body)?;
    let moved = whole(async move { node.attachment_move(body).await }).await;
    moved.map(Json)
}

/// Offers an attachment to another node: the consent that a live migration needs.
#[utoipa::path(post, path = "/v1/attachments/offer", request_body = OfferCreate,
    responses((status = 200, body = Offered), (status = "default", body = Failure)))]
pub async fn attachment_offer(
    State(node): State<Arc<Node>>,
    body: Result<Json<OfferCreate>, JsonRejection>,
) -> Result<Json<Offered>> {
    let body = body_of(body)?;
    let offered = whole(async move { node.attachment_offer(&body).await }).await;
    offered.map(Json)
}

/// Withdraws an offer and ends the incoming attachment that it allowed.
#[utoipa::path(delete, path = "/v1/attachments/offer", params(OfferQuery),
    responses((status = 200, body = Offered), (status = "default", body = Failure)))]
pub async fn attachment_withdraw(
    State(node): State<Arc<Node>>,
    query: Result<Query<OfferQuery>, QueryRejection>,
) -> Result<Json<Offered>> {
    let query = query_of(query)?;
    let withdrawn = whole(async move { node.attachment_withdraw(&query).await }).await;
    withdrawn.map(Json)
}
