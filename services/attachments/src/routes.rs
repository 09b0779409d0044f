//! Routes of the admin API: attachments.

use std::sync::Arc;

use api::confirmed::Listed;
use api::failure::{Failure, Result};
use api::server::{body_of, query_of, whole};
use api::types::{
    Attach, Attachment, AttachmentStats, AttachmentsQuery, DetachQuery, Detached, Move, Moved,
    OfferCreate, OfferQuery, Offered,
};
use axum::extract::rejection::{JsonRejection, QueryRejection};
use axum::extract::{Path, Query, State};
use axum::http::StatusCode;
use axum::routing::{get, post};
use axum::{Json, Router};
use utoipa::OpenApi as _;
use utoipa::openapi::OpenApi;

use crate::attachments::Attachments;

#[derive(utoipa::OpenApi)]
#[openapi(paths(
    attachment_list,
    attachment_stats,
    attach,
    detach,
    attachment_move,
    attachment_offer,
    attachment_withdraw,
))]
struct Paths;

/// Documentation of the routes.
pub fn paths() -> OpenApi {
    Paths::openapi()
}

/// The routes.
pub(crate) fn routes(attachments: Arc<Attachments>) -> Router {
    Router::new()
        .route(
            "/v1/attachments",
            get(attachment_list).post(attach).delete(detach),
        )
        .route("/v1/attachments/move", post(attachment_move))
        .route(
            "/v1/attachments/offer",
            post(attachment_offer).delete(attachment_withdraw),
        )
        .route("/v1/attachments/{target}/stats", get(attachment_stats))
        .with_state(attachments)
}

/// All attachments.
#[utoipa::path(get, path = "/v1/attachments", params(AttachmentsQuery),
    responses((status = 200, body = [Attachment]), (status = "default", body = Failure)))]
async fn attachment_list(
    State(attachments): State<Arc<Attachments>>,
    query: Result<Query<AttachmentsQuery>, QueryRejection>,
) -> Result<Listed<Vec<Attachment>>> {
    let reader = attachments.cluster().list_reader();
    let all = attachments
        .list(&reader, query_of(query)?.everywhere)
        .await?;
    Ok(Listed(all, reader.confirmed()))
}

/// Counters and latencies of an attachment since it began.
#[utoipa::path(get, path = "/v1/attachments/{target}/stats",
    params(("target" = String, Path, description = "Socket of the attachment, or the name of its volume")),
    responses((status = 200, body = AttachmentStats), (status = "default", body = Failure)))]
async fn attachment_stats(
    State(attachments): State<Arc<Attachments>>,
    Path(target): Path<String>,
) -> Result<Json<AttachmentStats>> {
    attachments.stats(&target).await.map(Json)
}

/// Serves a volume on a vhost-user socket, now and after every start of the daemon.
#[utoipa::path(post, path = "/v1/attachments", request_body = Attach,
    responses((status = 201, body = Attachment), (status = "default", body = Failure)))]
async fn attach(
    State(attachments): State<Arc<Attachments>>,
    body: Result<Json<Attach>, JsonRejection>,
) -> Result<(StatusCode, Json<Attachment>)> {
    let body = body_of(body)?;
    let attachment = whole(async move { attachments.attach(body).await }).await?;
    Ok((StatusCode::CREATED, Json(attachment)))
}

/// Ends an attachment, or forgets one of a node that is down.
#[utoipa::path(delete, path = "/v1/attachments", params(DetachQuery),
    responses((status = 200, body = Detached), (status = "default", body = Failure)))]
async fn detach(
    State(attachments): State<Arc<Attachments>>,
    query: Result<Query<DetachQuery>, QueryRejection>,
) -> Result<Json<Detached>> {
    let query = query_of(query)?;
    let detached = whole(async move { attachments.detach(&query).await }).await;
    detached.map(Json)
}

/// Moves an attachment that no guest uses to another node.
#[utoipa::path(post, path = "/v1/attachments/move", request_body = Move,
    responses((status = 200, body = Moved), (status = "default", body = Failure)))]
async fn attachment_move(
    State(attachments): State<Arc<Attachments>>,
    body: Result<Json<Move>, JsonRejection>,
) -> Result<Json<Moved>> {
    let body = body_of(body)?;
    let moved = whole(async move { attachments.move_to(body).await }).await;
    moved.map(Json)
}

/// Offers an attachment to another node: the consent that a live migration needs.
#[utoipa::path(post, path = "/v1/attachments/offer", request_body = OfferCreate,
    responses((status = 200, body = Offered), (status = "default", body = Failure)))]
async fn attachment_offer(
    State(attachments): State<Arc<Attachments>>,
    body: Result<Json<OfferCreate>, JsonRejection>,
) -> Result<Json<Offered>> {
    let body = body_of(body)?;
    let offered = whole(async move { attachments.offer(&body).await }).await;
    offered.map(Json)
}

/// Withdraws an offer and ends the incoming attachment that it allowed.
#[utoipa::path(delete, path = "/v1/attachments/offer", params(OfferQuery),
    responses((status = 200, body = Offered), (status = "default", body = Failure)))]
async fn attachment_withdraw(
    State(attachments): State<Arc<Attachments>>,
    query: Result<Query<OfferQuery>, QueryRejection>,
) -> Result<Json<Offered>> {
    let query = query_of(query)?;
    let withdrawn = whole(async move { attachments.withdraw(&query).await }).await;
    withdrawn.map(Json)
}
