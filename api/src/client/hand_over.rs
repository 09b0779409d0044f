//! Handing an open device over to the daemon: [`crate::hand_over`].

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use axum::body::Body;
use block_device::wire;
use hyper::{Method, Request, StatusCode, header, upgrade};
use hyper_util::rt::TokioIo;

use super::{CHANGE_WAIT, Client};
use crate::failure::{Failure, Kind, Result, plain_io};
use crate::hand_over::{PROTOCOL, blocking};

/// A device that the daemon has, until this is dropped.
#[derive(Debug)]
pub struct HandedOver {
    _connection: UnixStream,
}

impl Client {
    /// Hands an open device over; the daemon can add it while the result is kept.
    pub async fn hand_over(&self, path: &Path, device: OwnedFd) -> Result<HandedOver> {
        let (socket, has_spoken) = self.within(CHANGE_WAIT, self.upgraded()).await??;
        let path = path.to_owned();
        let said = move || say(&socket, has_spoken, &path, &device).map(|taken| (taken, socket));
        let said = tokio::task::spawn_blocking(said).await;
        let (taken, socket) = said.map_err(lost)?.map_err(|e| {
            lost(match e.kind() {
                io::ErrorKind::WouldBlock => "it does not answer".to_owned(),
                _ => plain_io(&e),
            })
        })?;
        taken?;
        Ok(HandedOver {
            _connection: socket,
        })
    }

    /// A connection that carries descriptors, and whether the daemon's first message came with its answer.
    async fn upgraded(&self) -> Result<(UnixStream, bool)> {
        let request = Request::builder()
            .method(Method::PUT)
            .uri("/v1/devices/open")
            .header(header::HOST, "penstock")
            .header(header::CONNECTION, "upgrade")
            .header(header::UPGRADE, PROTOCOL)
            .body(Body::empty());
        let request = request.map_err(|e| Failure::plain(Kind::Invalid, e))?;
        let answer = self.exchange(request).await?;
        match answer.status() {
            StatusCode::SWITCHING_PROTOCOLS => {}
            StatusCode::NOT_FOUND | StatusCode::METHOD_NOT_ALLOWED => {
                return Err(Failure::new(
                    Kind::Denied,
                    "the daemon may not open this disk, and its version cannot be handed an open one",
                    "restart the daemon: it opens what its configuration names",
                ));
            }
            _ => return Err(self.failure(answer).await),
        }
        let upgraded = upgrade::on(answer).await.map_err(|e| self.broken(&e))?;
        let parts = upgraded.downcast::<TokioIo<tokio::net::UnixStream>>();
        let parts = parts.map_err(|_| lost("the connection is no unix socket"))?;
        let socket = blocking(parts.io.into_inner()).map_err(|e| lost(plain_io(&e)))?;
        Ok((socket, !parts.read_buf.is_empty()))
    }
}

fn say(
    socket: &UnixStream,
    has_spoken: bool,
    path: &PathBuf,
    device: &OwnedFd,
) -> io::Result<Result<()>> {
    if !has_spoken {
        wire::receive::<()>(socket.as_fd())?;
    }
    wire::send(socket.as_fd(), path, Some(device.as_fd()))?;
    let taken = wire::receive::<Result<()>>(socket.as_fd())?;
    Ok(taken.map_or_else(|| Err(lost("it closed the connection")), |(taken, _)| taken))
}

fn lost(why: impl std::fmt::Display) -> Failure {
    Failure::new(
        Kind::Unreachable,
        format!("the daemon did not take the open device: {why}"),
        "look at its log, then try again",
    )
}
