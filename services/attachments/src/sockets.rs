//! Sockets of attachments, of volumes and of filesystems, and what their listings and failures have in
//! common.

use std::path::Path;

use api::failure::{Failure, Kind, Result};
use api::types::{LatencyBucket, RequestStats};
use service::code::Code;
use service::found::Found;
use service::prepared::Prepared;
use service::view::View;
use storage::Session;
use vhost_backend::latency::Latencies;
use vhost_backend::session::socket::{Endpoint, Listener, SocketError, SocketOptions};

/// Makes a socket with the configured access.
pub fn listen_on(config: &Prepared, path: &Path) -> Result<Endpoint> {
    config.confinement.check_socket(path)?;
    let access = config.socket_access;
    let options = SocketOptions {
        path: path.to_owned(),
        mode: access.mode,
        owner: (access.uid, access.gid),
    };
    let listener = Listener::bind(&options).map_err(|e| by_user(config, &e))?;
    Ok(Endpoint::Listening(listener))
}

/// Has a session's socket made again if its file is gone; the problem if that cannot be done.
pub fn restored(session: &Session, socket: &str) -> Option<Found> {
    let error = session.restore_socket().err()?;
    let what = format!("nobody can connect to attachment {socket}: its socket was removed");
    Some(Found::new(
        Code::AttachmentUnreachable,
        socket,
        what,
        format!("it is made again as soon as that is possible: {error}"),
    ))
}

/// Why an attachment of another node is not detached here.
pub fn attached_elsewhere(view: &View, target: &str, node: meta::NodeId) -> Failure {
    let name = view.node_name(node);
    match view.is_down(node) {
        true => Failure::new(
            Kind::NotFound,
            format!("'{target}' is attached on node '{name}', which is down"),
            format!(
                "start that node and detach it there; if it is gone or stays cut off, run `penstock detach \
                 {target} --force` on a node with the role meta, which forgets the attachment"
            ),
        ),
        false => Failure::new(
            Kind::NotFound,
            format!("'{target}' is attached on node '{name}', which is up"),
            format!(
                "detach it there, or name the admin socket of that node with --api; if that node does not \
                 let go of it, `penstock node remove {name} --evict` takes it away"
            ),
        ),
    }
}

/// Why a socket cannot be used, with the user that may not do it.
fn by_user(config: &Prepared, e: &SocketError) -> Failure {
    let failure = socket_failure(e);
    let denied = |source: &std::io::Error| source.kind() == std::io::ErrorKind::PermissionDenied;
    match (e, &config.privileges.user) {
        (SocketError::Os { source, .. }, Some(user)) if denied(source) => Failure::new(
            Kind::Denied,
            format!("{}, for the daemon is user {}", failure.error, user.name),
            format!("let user {} write the socket's directory", user.name),
        ),
        _ => failure,
    }
}

/// Why a socket cannot be used.
pub fn socket_failure(e: &SocketError) -> Failure {
    let kind = match e {
        SocketError::InUse(_)
        | SocketError::Locked(..)
        | SocketError::NotASocket(_)
        | SocketError::Replaced(_)
        | SocketError::LockNotAFile(_) => Kind::Conflict,
        SocketError::TooLong(_) | SocketError::WrongDescriptor => Kind::Invalid,
        SocketError::NoDirectory(_) => Kind::NotFound,
        SocketError::Os { .. } => Kind::Failed,
    };
    Failure::plain(kind, e)
}

/// Why an attachment of another node shows nothing here.
pub fn attached_on(target: &str, node: &str) -> Failure {
    Failure::new(
        Kind::NotFound,
        format!("'{target}' is attached on node '{node}'"),
        "ask there, or name the admin socket of that node with --api",
    )
}

/// Requests of one kind, with the bytes that they moved.
pub fn request_stats(bytes: u64, latencies: &Latencies) -> RequestStats {
    let buckets = latencies.buckets().map(|bucket| LatencyBucket {
        from_ns: bucket.from_ns,
        to_ns: bucket.to_ns,
        count: bucket.count,
    });
    RequestStats::new(bytes, latencies.sum_ns, buckets.collect())
}
