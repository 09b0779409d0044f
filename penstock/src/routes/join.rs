//! Letting nodes in.

use std::sync::Arc;

use api::confirmed::Listed;
use api::failure::{Failure, Result};
use api::server::body_of;
use api::types::{OpenToken, Token, TokenCreate};
use axum::Json;
use axum::extract::rejection::JsonRejection;
use axum::extract::{Path, State};
use axum::http::StatusCode;

use crate::serve::node::Node;

/// Makes a token with which one node can join, once.
#[utoipa::path(post, path = "/v1/tokens", request_body = TokenCreate,
    responses((status = 201, body = Token), (status = "default", body = Failure)))]
pub async fn token_create(
    State(node): State<Arc<Node>>,
    body: Result<Json<TokenCreate>, JsonRejection>,
) -> Result<(StatusCode, Json<Token>)> {
    let token = node.token_create(&body_of(body)?).await?;
    Ok((StatusCode::CREATED, Json(token)))
}

/// The tokens that nobody has used yet.
#[utoipa::path(get, path = "/v1/tokens",
    responses((status = 200, body = [OpenToken]), (status = "default", body = Failure)))]
pub async fn tokens(State(node): State<Arc<Node>>) -> Result<Listed<Vec<OpenToken>>> {
    let reader = node.list_reader();
    let all = node.tokens(&reader).await?;
    Ok(Listed(all, reader.confirmed()))
}

/// Revokes a token: nobody can join with it any more.
#[utoipa::path(delete, path = "/v1/tokens/{id}", params(("id" = String, Path)),
    responses((status = 200, body = OpenToken), (status = "default", body = Failure)))]
pub async fn token_revoke(
    State(node): State<Arc<Node>>,
    Path(id): Path<String>,
) -> Result<Json<OpenToken>> {
    node.token_revoke(&id).await.map(Json)
}
