//! Nodes, devices, pools and events.

use std::sync::Arc;

use api::confirmed::Listed;
use api::failure::{Failure, Result};
use api::server::{body_of, query_of, whole};
use api::types::{
    ClusterNode, Device, DeviceAdd, DeviceRemoveQuery, Drain, Event, EventsQuery, NodeRemoveQuery,
    Pool, PoolCreate, PoolSet, ScrubSet,
};
use axum::extract::rejection::{JsonRejection, QueryRejection};
use axum::extract::{Path, Query, State};
use axum::http::StatusCode;
use axum::routing::{delete, get, put};
use axum::{Json, Router};

use crate::serve::node::Node;

use super::hand_over;

/// The routes of this module.
pub fn routes() -> Router<Arc<Node>> {
    Router::new()
        .route("/v1/nodes", get(nodes))
        .route("/v1/nodes/{node}", get(node).delete(node_remove))
        .route("/v1/nodes/{node}/drain", put(node_drain))
        .route("/v1/devices", get(devices).post(device_add))
        .route("/v1/devices/open", put(hand_over::device_open))
        .route("/v1/devices/{device}", delete(device_remove))
        .route("/v1/devices/{device}/scrub", put(device_scrub))
        .route("/v1/pools", get(pools).post(pool_create))
        .route(
            "/v1/pools/{name}",
            get(pool).patch(pool_set).delete(pool_delete),
        )
        .route("/v1/events", get(events))
}

/// All nodes.
#[utoipa::path(get, path = "/v1/nodes",
    responses((status = 200, body = [ClusterNode]), (status = "default", body = Failure)))]
pub async fn nodes(State(daemon): State<Arc<Node>>) -> Result<Listed<Vec<ClusterNode>>> {
    let reader = daemon.list_reader();
    let all = daemon.nodes(&reader).await?;
    Ok(Listed(all, reader.confirmed()))
}

/// One node, by name or number.
#[utoipa::path(get, path = "/v1/nodes/{node}", params(("node" = String, Path)),
    responses((status = 200, body = ClusterNode), (status = "default", body = Failure)))]
pub async fn node(
    State(daemon): State<Arc<Node>>,
    Path(node): Path<String>,
) -> Result<Json<ClusterNode>> {
    daemon.node(&node).await.map(Json)
}

/// Moves all data off a node, or calls that off.
#[utoipa::path(put, path = "/v1/nodes/{node}/drain", params(("node" = String, Path)), request_body = Drain,
    responses((status = 200, body = ClusterNode), (status = "default", body = Failure)))]
pub async fn node_drain(
    State(daemon): State<Arc<Node>>,
    Path(node): Path<String>,
    body: Result<Json<Drain>, JsonRejection>,
) -> Result<Json<ClusterNode>> {
    let body = body_of(body)?;
    let drained = whole(async move { daemon.node_drain(&node, body.on).await }).await;
    drained.map(Json)
}

/// Forgets a node for good.
#[utoipa::path(delete, path = "/v1/nodes/{node}", params(("node" = String, Path), NodeRemoveQuery),
    responses((status = 204), (status = "default", body = Failure)))]
pub async fn node_remove(
    State(daemon): State<Arc<Node>>,
    Path(node): Path<String>,
    query: Result<Query<NodeRemoveQuery>, QueryRejection>,
) -> Result<StatusCode> {
    let query = query_of(query)?;
    whole(async move { daemon.node_remove(&node, &query).await }).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// The devices of all nodes.
#[utoipa::path(get, path = "/v1/devices",
    responses((status = 200, body = [Device]), (status = "default", body = Failure)))]
pub async fn devices(State(daemon): State<Arc<Node>>) -> Result<Listed<Vec<Device>>> {
    let reader = daemon.list_reader();
    let all = daemon.devices(&reader).await?;
    Ok(Listed(all, reader.confirmed()))
}

/// Adds a device to this node. One that the cluster knows already is used from the daemon's next start on:
/// its state is `pending`.
#[utoipa::path(post, path = "/v1/devices", request_body = DeviceAdd,
    responses((status = 201, body = Device), (status = 202, body = Device),
        (status = "default", body = Failure)))]
pub async fn device_add(
    State(daemon): State<Arc<Node>>,
    body: Result<Json<DeviceAdd>, JsonRejection>,
) -> Result<(StatusCode, Json<Device>)> {
    let body = body_of(body)?;
    let device = whole(async move { daemon.device_add(&body).await }).await?;
    let status = match device.id {
        Some(_) => StatusCode::CREATED,
        None => StatusCode::ACCEPTED,
    };
    Ok((status, Json(device)))
}

/// Moves all data off a device and then forgets it, or calls that off. The device is named by number, or by
/// its path on this node.
#[utoipa::path(delete, path = "/v1/devices/{device}", params(("device" = String, Path), DeviceRemoveQuery),
    responses((status = 200, body = Device), (status = "default", body = Failure)))]
pub async fn device_remove(
    State(daemon): State<Arc<Node>>,
    Path(device): Path<String>,
    query: Result<Query<DeviceRemoveQuery>, QueryRejection>,
) -> Result<Json<Device>> {
    let query = query_of(query)?;
    let removed = whole(async move { daemon.device_remove(&device, &query).await }).await;
    removed.map(Json)
}

/// Begins a pass of the scrub over a device of this node, or ends the one that is under way.
#[utoipa::path(put, path = "/v1/devices/{device}/scrub", params(("device" = String, Path)),
    request_body = ScrubSet,
    responses((status = 200, body = Device), (status = "default", body = Failure)))]
pub async fn device_scrub(
    State(daemon): State<Arc<Node>>,
    Path(device): Path<String>,
    body: Result<Json<ScrubSet>, JsonRejection>,
) -> Result<Json<Device>> {
    let body = body_of(body)?;
    daemon.device_scrub(&device, body.run).await.map(Json)
}

/// All pools.
#[utoipa::path(get, path = "/v1/pools",
    responses((status = 200, body = [Pool]), (status = "default", body = Failure)))]
pub async fn pools(State(daemon): State<Arc<Node>>) -> Result<Listed<Vec<Pool>>> {
    let reader = daemon.list_reader();
    let all = daemon.pools(&reader).await?;
    Ok(Listed(all, reader.confirmed()))
}

/// One pool.
#[utoipa::path(get, path = "/v1/pools/{name}", params(("name" = String, Path)),
    responses((status = 200, body = Pool), (status = "default", body = Failure)))]
pub async fn pool(State(daemon): State<Arc<Node>>, Path(name): Path<String>) -> Result<Json<Pool>> {
    daemon.pool(&name).await.map(Json)
}

/// Makes a pool.
#[utoipa::path(post, path = "/v1/pools", request_body = PoolCreate,
    responses((status = 201, body = Pool), (status = "default", body = Failure)))]
pub async fn pool_create(
    State(daemon): State<Arc<Node>>,
    body: Result<Json<PoolCreate>, JsonRejection>,
) -> Result<(StatusCode, Json<Pool>)> {
    let body = body_of(body)?;
    let pool = whole(async move { daemon.pool_create(body).await }).await?;
    Ok((StatusCode::CREATED, Json(pool)))
}

/// Gives a pool other numbers of copies.
#[utoipa::path(patch, path = "/v1/pools/{name}", params(("name" = String, Path)), request_body = PoolSet,
    responses((status = 200, body = Pool), (status = "default", body = Failure)))]
pub async fn pool_set(
    State(daemon): State<Arc<Node>>,
    Path(name): Path<String>,
    body: Result<Json<PoolSet>, JsonRejection>,
) -> Result<Json<Pool>> {
    let body = body_of(body)?;
    let set = whole(async move { daemon.pool_set(&name, &body).await }).await;
    set.map(Json)
}

/// Deletes a pool without volumes.
#[utoipa::path(delete, path = "/v1/pools/{name}", params(("name" = String, Path)),
    responses((status = 204), (status = "default", body = Failure)))]
pub async fn pool_delete(
    State(daemon): State<Arc<Node>>,
    Path(name): Path<String>,
) -> Result<StatusCode> {
    whole(async move { daemon.pool_delete(&name).await }).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// What happened in the cluster, oldest first.
#[utoipa::path(get, path = "/v1/events", params(EventsQuery),
    responses((status = 200, body = [Event]), (status = "default", body = Failure)))]
pub async fn events(
    State(daemon): State<Arc<Node>>,
    query: Result<Query<EventsQuery>, QueryRejection>,
) -> Result<Listed<Vec<Event>>> {
    let (query, reader) = (query_of(query)?, daemon.list_reader());
    let events = daemon.events(&query, &reader).await?;
    Ok(Listed(events, reader.confirmed()))
}
