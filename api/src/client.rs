//! The command line's end of the admin API.

mod hand_over;

use std::future::Future;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use axum::body::Body;
use http_body_util::BodyExt;
use hyper::body::{Bytes, Incoming};
use hyper::client::conn::http1;
use hyper::{Method, Request, Response, StatusCode, header};
use hyper_util::rt::TokioIo;
use meta::Confirmed;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::net::UnixStream;

use crate::failure::{Failure, Kind, Result, plain_io};
use crate::{confirmed, lock};

/// Longest JSON answer that is read, in bytes: more volumes than one node serves.
const ANSWER_BYTES_MAX: usize = 64 << 20;

/// How long an answer that only tells something is waited for. The daemon itself waits five seconds for
/// metadata without a leader.
const TELL_WAIT: Duration = Duration::from_secs(10);
/// The same for what changes something: guests may have to finish their requests first.
const CHANGE_WAIT: Duration = Duration::from_secs(120);

/// How long a command waits for a daemon that is starting. Then it fails: a node of several may wait for the
/// others for ever.
pub const START_MAX: Duration = Duration::from_secs(5);
/// Between two requests to one that is.
const START_INTERVAL: Duration = Duration::from_millis(50);

/// An admin endpoint.
#[derive(Debug, Clone)]
pub struct Client {
    socket: PathBuf,
    /// How long every answer is waited for, if somebody said so.
    timeout: Option<Duration>,
}

impl Client {
    /// An endpoint as `--api` names it: `unix:/path` or `/path`.
    pub fn new(address: &str) -> Result<Self> {
        let path = address.strip_prefix("unix:").unwrap_or(address);
        if path.is_empty() || (path.contains("://") && !path.starts_with('/')) {
            return Err(Failure::invalid(
                format!("'{address}' is no admin endpoint"),
                "give the path of a daemon's socket, like unix:/var/lib/penstock/penstock.sock",
            ));
        }
        Ok(Client::at(path.into()))
    }

    /// The endpoint behind this socket.
    pub fn at(socket: PathBuf) -> Self {
        Client {
            socket,
            timeout: None,
        }
    }

    /// The same endpoint, whose answers are waited for this long.
    #[must_use]
    pub fn with_timeout(self, timeout: Option<Duration>) -> Self {
        Client { timeout, ..self }
    }

    /// The socket.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Whether a daemon answers, as far as a connection tells.
    pub async fn try_connect(&self) -> std::io::Result<()> {
        UnixStream::connect(&self.socket).await.map(drop)
    }

    /// The process that has taken the data directory which the socket is in.
    pub fn holder(&self) -> Option<u32> {
        self.socket.parent().and_then(lock::holder)
    }

    /// Reads a resource. Warns on standard error if it is a list that no leader confirmed.
    pub async fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T> {
        let (value, confirmed) = self.read(path).await?;
        warn(confirmed);
        Ok(value)
    }

    /// Reads a list that only explains another one, whose warning is enough.
    pub async fn get_beside<T: DeserializeOwned>(&self, path: &str) -> Result<T> {
        self.read(path).await.map(|(value, _)| value)
    }

    /// Reads two lists that are shown as one, with one warning at most.
    pub async fn get_both<A, B>(&self, first: &str, second: &str) -> Result<(A, B)>
    where
        A: DeserializeOwned,
        B: DeserializeOwned,
    {
        let (one, confirmed) = self.read(first).await?;
        let (other, also_confirmed) = self.read(second).await?;
        warn(confirmed.or(also_confirmed));
        Ok((one, other))
    }

    /// Reads a resource, and how old it is if no leader confirmed it.
    async fn read<T: DeserializeOwned>(&self, path: &str) -> Result<(T, Option<Confirmed>)> {
        let answer = async {
            let answer = self.send(Method::GET, path, None, Bytes::new()).await?;
            let confirmed = confirmed::told(answer.headers());
            Ok((self.json(answer).await?, confirmed))
        };
        self.within(TELL_WAIT, answer).await?
    }

    /// Sends JSON and reads the answer.
    pub async fn call<B: Serialize, T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        body: &B,
    ) -> Result<T> {
        let json = serde_json::to_vec(body).map_err(|e| Failure::plain(Kind::Failed, e))?;
        let json = Bytes::from(json);
        let answer = async {
            let answer = self
                .send(method, path, Some("application/json"), json)
                .await?;
            self.json(answer).await
        };
        self.within(CHANGE_WAIT, answer).await?
    }

    /// Deletes a resource.
    pub async fn delete(&self, path: &str) -> Result<()> {
        let answer = self.send(Method::DELETE, path, None, Bytes::new());
        self.within(CHANGE_WAIT, answer).await?.map(drop)
    }

    /// Sends a stream and reads a JSON answer. It takes as long as the stream and the daemon's device take:
    /// nothing ends it while the daemon answers at all.
    pub async fn upload<T: DeserializeOwned>(
        &self,
        path: &str,
        media_type: &str,
        body: Body,
    ) -> Result<T> {
        // A stream is sent once: whether the daemon has started is asked before.
        self.get::<serde_json::Value>("/v1/config").await?;
        let answer = async {
            let answer = self.send_once(Method::PUT, path, Some(media_type), body);
            self.json(answer.await?).await
        };
        self.while_it_answers(answer).await?
    }

    /// What comes of something that may take any time. Meanwhile the daemon is asked again and again whether
    /// it is there: one that is stopped would never say anything.
    ///
    /// # Errors
    /// It does not answer.
    pub async fn while_it_answers<T>(&self, work: impl Future<Output = T>) -> Result<T> {
        let pause = self.timeout.unwrap_or(TELL_WAIT);
        let silence = async {
            loop {
                tokio::time::sleep(pause).await;
                let asked = self.send_once(Method::GET, "/v1/config", None, Body::empty());
                // One that takes no connection has ended, or is about to: so will the work.
                if tokio::time::timeout(pause, asked).await.is_err() {
                    return self.silent(pause);
                }
            }
        };
        tokio::select! {
            biased;
            done = work => Ok(done),
            silent = silence => Err(silent),
        }
    }

    /// Reads a stream, whose beginning is waited for.
    pub async fn download(&self, path: &str) -> Result<Incoming> {
        let answer = self.send(Method::GET, path, None, Bytes::new());
        Ok(self.within(CHANGE_WAIT, answer).await??.into_body())
    }

    /// What comes of it in time.
    async fn within<T>(&self, usual: Duration, answer: impl Future<Output = T>) -> Result<T> {
        let limit = self.timeout.unwrap_or(usual);
        let in_time = tokio::time::timeout(limit, answer).await;
        in_time.map_err(|_| self.silent(limit))
    }

    /// Sends a request, again while the daemon says that it is starting.
    async fn send(
        &self,
        method: Method,
        path: &str,
        media: Option<&str>,
        body: Bytes,
    ) -> Result<Response<Incoming>> {
        let begin = Instant::now();
        let start_max = self.timeout.map_or(START_MAX, |all| START_MAX.min(all / 2));
        loop {
            let body = Body::from(body.clone());
            match self.send_once(method.clone(), path, media, body).await {
                Err(failure) if failure.kind == Kind::Starting && begin.elapsed() < start_max => {
                    tokio::time::sleep(START_INTERVAL).await;
                }
                answer => return answer,
            }
        }
    }

    async fn send_once(
        &self,
        method: Method,
        path: &str,
        media: Option<&str>,
        body: Body,
    ) -> Result<Response<Incoming>> {
        let mut request = Request::builder()
            .method(method)
            .uri(path)
            .header(header::HOST, "penstock");
        if let Some(media) = media {
            request = request.header(header::CONTENT_TYPE, media);
        }
        let request = request
            .body(body)
            .map_err(|e| Failure::plain(Kind::Invalid, e))?;
        let answer = self.exchange(request).await?;
        match answer.status().is_success() {
            true => Ok(answer),
            false => Err(self.failure(answer).await),
        }
    }

    /// Sends a request on a connection of its own, and returns whatever is answered.
    async fn exchange(&self, request: Request<Body>) -> Result<Response<Incoming>> {
        let stream = UnixStream::connect(&self.socket)
            .await
            .map_err(|e| self.unreachable(&e))?;
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream))
            .await
            .map_err(|e| self.broken(&e))?;
        tokio::spawn(connection.with_upgrades());
        sender
            .send_request(request)
            .await
            .map_err(|e| self.broken(&e))
    }

    async fn json<T: DeserializeOwned>(&self, answer: Response<Incoming>) -> Result<T> {
        let bytes = self.bytes(answer.into_body()).await?;
        serde_json::from_slice(&bytes).map_err(|e| {
            Failure::new(
                Kind::Failed,
                format!(
                    "{} answered what this version does not understand: {e}",
                    self.socket.display()
                ),
                "use the command line of the daemon's version",
            )
        })
    }

    async fn failure(&self, answer: Response<Incoming>) -> Failure {
        let status = answer.status();
        let bytes = match self.bytes(answer.into_body()).await {
            Ok(bytes) => bytes,
            Err(failure) => return failure,
        };
        serde_json::from_slice(&bytes).unwrap_or_else(|_| {
            let kind = if status == StatusCode::NOT_FOUND {
                Kind::NotFound
            } else {
                Kind::Failed
            };
            Failure::plain(
                kind,
                format!(
                    "the daemon answered {status}: {}",
                    String::from_utf8_lossy(&bytes)
                ),
            )
        })
    }

    async fn bytes(&self, body: Incoming) -> Result<Bytes> {
        let limited = http_body_util::Limited::new(body, ANSWER_BYTES_MAX);
        let collected = limited
            .collect()
            .await
            .map_err(|e| Failure::plain(Kind::Failed, e))?;
        Ok(collected.to_bytes())
    }

    fn unreachable(&self, e: &std::io::Error) -> Failure {
        if let Some(process) = self.holder() {
            return Failure::new(
                Kind::Unreachable,
                format!(
                    "process {process} runs on this data directory and does not answer on {}: {}",
                    self.socket.display(),
                    plain_io(e)
                ),
                "look at its log: a daemon that starts may wait for most nodes of its cluster; or repeat \
                 this in a moment",
            );
        }
        let hint = match e.kind() {
            std::io::ErrorKind::PermissionDenied => "run this command as the daemon's user",
            _ => {
                "start it with `penstock serve`, or `systemctl start penstock` where the package is \
                 installed; or name its --data directory or --api endpoint"
            }
        };
        let socket = self.socket.display();
        Failure::new(
            Kind::Unreachable,
            format!("no daemon answers on {socket}: {}", plain_io(e)),
            hint,
        )
    }

    /// It takes connections and says nothing: stopped, or not able to go on.
    fn silent(&self, limit: Duration) -> Failure {
        let process = self.holder().map(|id| format!(" (process {id})"));
        Failure::new(
            Kind::Unreachable,
            format!(
                "the daemon{} on {} has not answered within {} s",
                process.unwrap_or_default(),
                self.socket.display(),
                limit.as_secs_f64()
            ),
            "what was asked for may still be done; look whether the process is stopped, and at its log, or \
             wait longer with --timeout",
        )
    }

    fn broken(&self, e: &hyper::Error) -> Failure {
        Failure::new(
            Kind::Unreachable,
            format!("the daemon on {} went away: {e}", self.socket.display()),
            "look at its log, then try again",
        )
    }
}

/// Says on standard error how old a list is that no leader confirmed.
fn warn(told: Option<Confirmed>) {
    if let Some(warning) = told.and_then(confirmed::warning) {
        eprintln!("penstock: warning: {warning}");
    }
}

/// A path segment or query value with everything but unreserved characters percent-encoded.
pub fn encode(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => {
                out.push(byte as char)
            }
            _ => out.push_str(&format!("%{byte:02X}")),
        }
    }
    out
}

#[cfg(test)]
mod tests;
