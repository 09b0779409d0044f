//! Letting nodes in.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::extract::rejection::JsonRejection;
use axum::http::StatusCode;

use super::server::body_of;
use crate::api::types::{Token, TokenCreate};
use crate::failure::{Failure, Result};
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
