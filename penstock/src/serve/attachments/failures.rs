//! Failures of attaching and detaching.

use api::failure::{Failure, Kind};
use service::view::View;
use vhost_backend::session::socket::SocketError;

use crate::serve::prepared::Prepared;

/// Why an attachment of another node is not detached here.
pub(in crate::serve) fn attached_elsewhere(
    view: &View,
    target: &str,
    node: meta::NodeId,
) -> Failure {
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
pub(super) fn by_user(config: &Prepared, e: &SocketError) -> Failure {
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
