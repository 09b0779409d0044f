//! Who calls: the user at the other end of the admin socket.

use axum::extract::connect_info::{ConnectInfo, Connected};
use axum::extract::{FromRequestParts, Request};
use axum::middleware::Next;
use axum::response::Response;
use axum::serve::IncomingStream;
use tokio::net::UnixListener;

/// The caller of a connection.
#[derive(Debug, Clone, Copy)]
pub struct Caller {
    /// Its user, as the kernel says; nobody if it does not.
    uid: Option<u32>,
}

impl Connected<IncomingStream<'_, UnixListener>> for Caller {
    fn connect_info(stream: IncomingStream<'_, UnixListener>) -> Self {
        let peer = stream.io().peer_cred();
        Self {
            uid: peer.ok().map(|peer| peer.uid()),
        }
    }
}

/// Serves a request in its caller's name.
pub async fn with_caller(request: Request, next: Next) -> Response {
    let (mut parts, body) = request.into_parts();
    let caller = ConnectInfo::<Caller>::from_request_parts(&mut parts, &()).await;
    let uid = caller.ok().and_then(|ConnectInfo(caller)| caller.uid);
    let request = Request::from_parts(parts, body);
    meta::as_user(uid, next.run(request)).await
}
