//! Routes of the admin API: devices and pools.

use std::sync::Arc;

use api::confirmed::Listed;
use api::failure::{Failure, Result};
use api::server::{body_of, query_of, whole};
use api::types::{Device, DeviceAdd, DeviceRemoveQuery, Pool, PoolCreate, PoolSet, ScrubSet};
use axum::extract::rejection::{JsonRejection, QueryRejection};
use axum::extract::{Path, Query, State};
use axum::http::StatusCode;
use axum::routing::{delete, get, put};
use axum::{Json, Router};
use utoipa::OpenApi as _;
use utoipa::openapi::OpenApi;

use crate::devices::Devices;
use crate::hand_over;
use crate::pools::Pools;

#[derive(utoipa::OpenApi)]
#[openapi(paths(
    device_list,
    device_add,
    device_remove,
    device_scrub,
    hand_over::device_open,
    pool_list,
    pool,
    pool_create,
    pool_set,
    pool_delete,
))]
struct Paths;

/// Documentation of the routes.
pub fn paths() -> OpenApi {
    Paths::openapi()
}

/// The routes.
pub(crate) fn routes(devices: Arc<Devices>, pools: Arc<Pools>) -> Router {
    let devices = Router::new()
        .route("/v1/devices", get(device_list).post(device_add))
        .route("/v1/devices/open", put(hand_over::device_open))
        .route("/v1/devices/{device}", delete(device_remove))
        .route("/v1/devices/{device}/scrub", put(device_scrub))
        .with_state(devices);
    let pools = Router::new()
        .route("/v1/pools", get(pool_list).post(pool_create))
        .route(
            "/v1/pools/{name}",
            get(pool).patch(pool_set).delete(pool_delete),
        )
        .with_state(pools);
    devices.merge(pools)
}

/// The devices of all nodes.
#[utoipa::path(get, path = "/v1/devices",
    responses((status = 200, body = [Device]), (status = "default", body = Failure)))]
async fn device_list(State(devices): State<Arc<Devices>>) -> Result<Listed<Vec<Device>>> {
    let reader = devices.cluster().list_reader();
    let all = devices.list(&reader).await?;
    Ok(Listed(all, reader.confirmed()))
}

/// Adds a device to this node. One that the cluster knows already is used from the daemon's next start on:
/// its state is `pending`.
#[utoipa::path(post, path = "/v1/devices", request_body = DeviceAdd,
    responses((status = 201, body = Device), (status = 202, body = Device),
        (status = "default", body = Failure)))]
async fn device_add(
    State(devices): State<Arc<Devices>>,
    body: Result<Json<DeviceAdd>, JsonRejection>,
) -> Result<(StatusCode, Json<Device>)> {
    let body = body_of(body)?;
    let device = whole(async move { devices.add(&body).await }).await?;
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
async fn device_remove(
    State(devices): State<Arc<Devices>>,
    Path(device): Path<String>,
    query: Result<Query<DeviceRemoveQuery>, QueryRejection>,
) -> Result<Json<Device>> {
    let query = query_of(query)?;
    let removed = whole(async move { devices.remove(&device, &query).await }).await;
    removed.map(Json)
}

/// Begins a pass of the scrub over a device of this node, or ends the one that is under way.
#[utoipa::path(put, path = "/v1/devices/{device}/scrub", params(("device" = String, Path)),
    request_body = ScrubSet,
    responses((status = 200, body = Device), (status = "default", body = Failure)))]
async fn device_scrub(
    State(devices): State<Arc<Devices>>,
    Path(device): Path<String>,
    body: Result<Json<ScrubSet>, JsonRejection>,
) -> Result<Json<Device>> {
    let body = body_of(body)?;
    devices.scrub(&device, body.run).await.map(Json)
}

/// All pools.
#[utoipa::path(get, path = "/v1/pools",
    responses((status = 200, body = [Pool]), (status = "default", body = Failure)))]
async fn pool_list(State(pools): State<Arc<Pools>>) -> Result<Listed<Vec<Pool>>> {
    let reader = pools.cluster().list_reader();
    let all = pools.list(&reader).await?;
    Ok(Listed(all, reader.confirmed()))
}

/// One pool.
#[utoipa::path(get, path = "/v1/pools/{name}", params(("name" = String, Path)),
    responses((status = 200, body = Pool), (status = "default", body = Failure)))]
async fn pool(State(pools): State<Arc<Pools>>, Path(name): Path<String>) -> Result<Json<Pool>> {
    pools.get(&name).await.map(Json)
}

/// Makes a pool.
#[utoipa::path(post, path = "/v1/pools", request_body = PoolCreate,
    responses((status = 201, body = Pool), (status = "default", body = Failure)))]
async fn pool_create(
    State(pools): State<Arc<Pools>>,
    body: Result<Json<PoolCreate>, JsonRejection>,
) -> Result<(StatusCode, Json<Pool>)> {
    let body = body_of(body)?;
    let pool = whole(async move { pools.create(body).await }).await?;
    Ok((StatusCode::CREATED, Json(pool)))
}

/// Gives a pool other numbers of copies.
#[utoipa::path(patch, path = "/v1/pools/{name}", params(("name" = String, Path)), request_body = PoolSet,
    responses((status = 200, body = Pool), (status = "default", body = Failure)))]
async fn pool_set(
    State(pools): State<Arc<Pools>>,
    Path(name): Path<String>,
    body: Result<Json<PoolSet>, JsonRejection>,
) -> Result<Json<Pool>> {
    let body = body_of(body)?;
    let set = whole(async move { pools.set(&name, &body).await }).await;
    set.map(Json)
}

/// Deletes a pool without volumes.
#[utoipa::path(delete, path = "/v1/pools/{name}", params(("name" = String, Path)),
    responses((status = 204), (status = "default", body = Failure)))]
async fn pool_delete(
    State(pools): State<Arc<Pools>>,
    Path(name): Path<String>,
) -> Result<StatusCode> {
    whole(async move { pools.delete(&name).await }).await?;
    Ok(StatusCode::NO_CONTENT)
}
