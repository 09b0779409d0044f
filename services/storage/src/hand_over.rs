//! The daemon's end of [`api::hand_over`].

use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;

use api::failure::{Failure, Kind, Result};
use api::hand_over::{PROTOCOL, blocking};
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{StatusCode, header};
use axum::response::Response;
use block_device::wire;
use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use hyper_util::server::conn::auto::upgrade::downcast;

use crate::devices::Devices;

/// Takes a block device that the caller has opened. The connection becomes one that carries descriptors; the
/// device can be added for as long as it is open.
#[utoipa::path(put, path = "/v1/devices/open",
    responses((status = 101, description = "the connection carries descriptors from now on"),
        (status = "default", body = Failure)))]
pub async fn device_open(
    State(devices): State<Arc<Devices>>,
    mut request: Request,
) -> Result<Response> {
    let asked = request.headers().get(header::UPGRADE);
    let is_ours = asked.is_some_and(|name| name == PROTOCOL);
    let upgrade = request.extensions_mut().remove::<OnUpgrade>();
    let (true, Some(upgrade)) = (is_ours, upgrade) else {
        return Err(Failure::invalid(
            "a device is handed over on an upgraded connection",
            format!("send `Connection: upgrade` and `Upgrade: {PROTOCOL}`"),
        ));
    };
    tokio::spawn(async move {
        if let Err(failure) = listen(devices, upgrade).await {
            tracing::warn!(%failure, "take over a device");
        }
    });
    let response = Response::builder()
        .status(StatusCode::SWITCHING_PROTOCOLS)
        .header(header::CONNECTION, "upgrade")
        .header(header::UPGRADE, PROTOCOL);
    response
        .body(Body::empty())
        .map_err(|e| Failure::plain(Kind::Failed, e))
}

/// Serves a connection from its upgrade to its end, on a thread of its own: the runtime's end waits for none.
async fn listen(devices: Arc<Devices>, upgrade: OnUpgrade) -> Result<()> {
    let failed = |e: &dyn std::fmt::Display| Failure::plain(Kind::Failed, e);
    let upgraded = upgrade.await.map_err(|e| failed(&e))?;
    let parts = downcast::<TokioIo<tokio::net::UnixStream>>(upgraded)
        .map_err(|_| failed(&"the admin API is served on something else than a unix socket"))?;
    if !parts.read_buf.is_empty() {
        return Err(failed(&"the client spoke before it was asked to"));
    }
    let socket = blocking(parts.io.into_inner()).map_err(|e| failed(&e))?;
    let serve = move || {
        if let Err(error) = take(&devices, &socket) {
            tracing::warn!(%error, "take over a device");
        }
    };
    let started = std::thread::Builder::new()
        .name("hand-over".into())
        .spawn(serve);
    started.map(drop).map_err(|e| failed(&e))
}

fn take(devices: &Devices, socket: &UnixStream) -> std::io::Result<()> {
    wire::send(socket.as_fd(), &(), None)?;
    let Some((path, device)) = wire::receive::<PathBuf>(socket.as_fd())? else {
        return Ok(());
    };
    let taken = match device {
        Some(device) => devices.take_device(&path, device),
        None => Err(Failure::invalid(
            "no descriptor came along",
            "send one with the path",
        )),
    };
    let told = wire::send(socket.as_fd(), &taken, None);
    if taken.is_ok() {
        let gone = told.and_then(|()| {
            // Until the client has gone.
            socket.set_read_timeout(None)?;
            wire::receive::<()>(socket.as_fd())
        });
        devices.let_go(&path);
        return gone.map(drop);
    }
    told
}
