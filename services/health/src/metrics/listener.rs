//! `GET /metrics` over plain HTTP, and nothing else.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::{Arc, Weak};
use std::time::Duration;

use api::failure::{Context, Result};
use api::metrics::MEDIA_TYPE;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode, header};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::task::JoinHandle;

use crate::health::Health;

/// Scrapes at a time; more wait in the kernel's queue.
const CONNECTIONS_MAX: usize = 8;
/// Longest life of a connection: who is slower is cut off, and holds up no other.
const CONNECTION_MAX: Duration = Duration::from_secs(10);
/// Pause after the kernel gave no connection, for want of file descriptors mostly.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Serves until it is dropped.
pub struct Listening {
    task: JoinHandle<()>,
    /// Where.
    pub address: SocketAddr,
}

impl Drop for Listening {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Listens at `address`.
pub async fn listen(address: SocketAddr, health: &Arc<Health>) -> Result<Listening> {
    let bind = TcpListener::bind(address).await;
    let listener = bind.context_hint(
        || format!("listen on metrics_listen = \"{address}\""),
        "choose an address of this machine and a free port",
    )?;
    let address = listener.local_addr().unwrap_or(address);
    let task = tokio::spawn(accept(listener, Arc::downgrade(health)));
    Ok(Listening { task, address })
}

async fn accept(listener: TcpListener, health: Weak<Health>) {
    let permits = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    loop {
        // The semaphore is never closed.
        let Ok(permit) = Arc::clone(&permits).acquire_owned().await else {
            return;
        };
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::debug!(%error, "accept a scrape");
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        let Some(health) = health.upgrade() else {
            return;
        };
        tokio::spawn(async move {
            // However it ends, the next scrape is another connection.
            let _ = tokio::time::timeout(CONNECTION_MAX, serve(stream, health)).await;
            drop(permit);
        });
    }
}

async fn serve(stream: TcpStream, health: Arc<Health>) -> hyper::Result<()> {
    let answer = service_fn(move |request: Request<Incoming>| {
        let health = Arc::clone(&health);
        async move { Ok::<_, Infallible>(answer(&request, &health).await) }
    });
    http1::Builder::new()
        .timer(TokioTimer::new())
        .keep_alive(false)
        .serve_connection(TokioIo::new(stream), answer)
        .await
}

async fn answer(request: &Request<Incoming>, health: &Arc<Health>) -> Response<String> {
    let (status, body) = if request.uri().path() != "/metrics" {
        (StatusCode::NOT_FOUND, "only /metrics is here\n".to_owned())
    } else if ![Method::GET, Method::HEAD].contains(request.method()) {
        (
            StatusCode::METHOD_NOT_ALLOWED,
            "only GET is allowed\n".to_owned(),
        )
    } else {
        match health.metrics().await {
            Ok(page) => (StatusCode::OK, page),
            Err(failure) => (StatusCode::INTERNAL_SERVER_ERROR, format!("{failure}\n")),
        }
    };
    let mut response = Response::new(body);
    *response.status_mut() = status;
    let media = header::HeaderValue::from_static(MEDIA_TYPE);
    response.headers_mut().insert(header::CONTENT_TYPE, media);
    response
}
