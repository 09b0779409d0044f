//! Routes of the admin API: nodes, join tokens, backups of the metadata and what follows a recovery.

use std::sync::Arc;

use api::confirmed::Listed;
use api::failure::{Failure, Result};
use api::server::{body_of, query_of, whole};
use api::types::{ClusterNode, Drain, NodeRemoveQuery, OpenToken, Resume, Token, TokenCreate};
use axum::extract::rejection::{JsonRejection, QueryRejection};
use axum::extract::{Path, Query, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{delete, get, post, put};
use axum::{Json, Router};
use utoipa::OpenApi as _;
use utoipa::openapi::OpenApi;

use crate::nodes::Nodes;

#[derive(utoipa::OpenApi)]
#[openapi(paths(
    node_list,
    node,
    node_drain,
    node_remove,
    token_create,
    token_list,
    token_revoke,
    backup,
    resume,
    forget_unknown,
))]
struct Paths;

/// Documentation of the routes.
pub fn paths() -> OpenApi {
    Paths::openapi()
}

/// The routes.
pub(crate) fn routes(nodes: Arc<Nodes>) -> Router {
    Router::new()
        .route("/v1/nodes", get(node_list))
        .route("/v1/nodes/{node}", get(node).delete(node_remove))
        .route("/v1/nodes/{node}/drain", put(node_drain))
        .route("/v1/tokens", get(token_list).post(token_create))
        .route("/v1/tokens/{id}", delete(token_revoke))
        .route("/v1/meta/backup", get(backup))
        .route("/v1/meta/resume", post(resume))
        .route("/v1/meta/forget-unknown", post(forget_unknown))
        .with_state(nodes)
}

/// All nodes.
#[utoipa::path(get, path = "/v1/nodes",
    responses((status = 200, body = [ClusterNode]), (status = "default", body = Failure)))]
async fn node_list(State(nodes): State<Arc<Nodes>>) -> Result<Listed<Vec<ClusterNode>>> {
    let reader = nodes.cluster.list_reader();
    let all = nodes.list(&reader).await?;
    Ok(Listed(all, reader.confirmed()))
}

/// One node, by name or number.
#[utoipa::path(get, path = "/v1/nodes/{node}", params(("node" = String, Path)),
    responses((status = 200, body = ClusterNode), (status = "default", body = Failure)))]
async fn node(
    State(nodes): State<Arc<Nodes>>,
    Path(node): Path<String>,
) -> Result<Json<ClusterNode>> {
    nodes.get(&node).await.map(Json)
}

/// Moves all data off a node, or calls that off.
#[utoipa::path(put, path = "/v1/nodes/{node}/drain", params(("node" = String, Path)), request_body = Drain,
    responses((status = 200, body = ClusterNode), (status = "default", body = Failure)))]
async fn node_drain(
    State(nodes): State<Arc<Nodes>>,
    Path(node): Path<String>,
    body: Result<Json<Drain>, JsonRejection>,
) -> Result<Json<ClusterNode>> {
    let body = body_of(body)?;
    let drained = whole(async move { nodes.drain(&node, body.on).await }).await;
    drained.map(Json)
}

/// Removes a node from the cluster.
#[utoipa::path(delete, path = "/v1/nodes/{node}", params(("node" = String, Path), NodeRemoveQuery),
    responses((status = 204), (status = "default", body = Failure)))]
async fn node_remove(
    State(nodes): State<Arc<Nodes>>,
    Path(node): Path<String>,
    query: Result<Query<NodeRemoveQuery>, QueryRejection>,
) -> Result<StatusCode> {
    let query = query_of(query)?;
    whole(async move { nodes.remove(&node, &query).await }).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Makes a token with which one node can join, once.
#[utoipa::path(post, path = "/v1/tokens", request_body = TokenCreate,
    responses((status = 201, body = Token), (status = "default", body = Failure)))]
async fn token_create(
    State(nodes): State<Arc<Nodes>>,
    body: Result<Json<TokenCreate>, JsonRejection>,
) -> Result<(StatusCode, Json<Token>)> {
    let token = nodes.token_create(&body_of(body)?).await?;
    Ok((StatusCode::CREATED, Json(token)))
}

/// The tokens that nobody has used yet.
#[utoipa::path(get, path = "/v1/tokens",
    responses((status = 200, body = [OpenToken]), (status = "default", body = Failure)))]
async fn token_list(State(nodes): State<Arc<Nodes>>) -> Result<Listed<Vec<OpenToken>>> {
    let reader = nodes.cluster.list_reader();
    let all = nodes.tokens(&reader).await?;
    Ok(Listed(all, reader.confirmed()))
}

/// Revokes a token: nobody can join with it any more.
#[utoipa::path(delete, path = "/v1/tokens/{id}", params(("id" = String, Path)),
    responses((status = 200, body = OpenToken), (status = "default", body = Failure)))]
async fn token_revoke(
    State(nodes): State<Arc<Nodes>>,
    Path(id): Path<String>,
) -> Result<Json<OpenToken>> {
    nodes.token_revoke(&id).await.map(Json)
}

/// All metadata in one file, which `penstock meta restore` reads.
#[utoipa::path(get, path = "/v1/meta/backup",
    responses((status = 200, content_type = "application/octet-stream", body = Vec<u8>),
    (status = "default", body = Failure)))]
async fn backup(State(nodes): State<Arc<Nodes>>) -> Result<Response> {
    let bytes = whole(async move { nodes.backup().await }).await?;
    let media = [(header::CONTENT_TYPE, "application/octet-stream")];
    Ok((media, bytes).into_response())
}

/// After a restore: decides by what devices say which replicas count.
#[utoipa::path(post, path = "/v1/meta/resume", request_body = Resume,
    responses((status = 200), (status = "default", body = Failure)))]
async fn resume(
    State(nodes): State<Arc<Nodes>>,
    body: Result<Json<Resume>, JsonRejection>,
) -> Result<Json<()>> {
    let body = body_of(body)?;
    whole(async move { nodes.resume(body.without_missing).await })
        .await
        .map(Json)
}

/// After a recovery: gives back the space of volumes that the metadata do not know.
#[utoipa::path(post, path = "/v1/meta/forget-unknown",
    responses((status = 200), (status = "default", body = Failure)))]
async fn forget_unknown(State(nodes): State<Arc<Nodes>>) -> Result<Json<()>> {
    whole(async move { nodes.forget_unknown().await })
        .await
        .map(Json)
}
