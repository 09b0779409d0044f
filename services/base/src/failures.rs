//! Failures of the metadata service, as users see them.

use std::path::Path;

use api::failure::{Failure, Kind};
use meta::refusal::MapRefusal;
use meta::{MetaError, Refusal, RefusalKind};

/// Failure to show the result of a change that was made.
pub fn done_unseen(failure: Failure) -> Failure {
    let error = format!("it is done, but cannot be shown: {}", failure.error);
    Failure { error, ..failure }
}

/// Failure that ends a node of a cluster when its metadata service has ended.
pub fn ended_failure(e: MetaError, data: &Path) -> Failure {
    let MetaError::Refused(Refusal::Map(MapRefusal::WasRemoved { name, .. })) = e else {
        return meta_failure(e);
    };
    Failure::new(
        Kind::Conflict,
        format!(
            "node {name} was removed from the cluster and serves nothing any more; all in {} is as it was",
            data.display()
        ),
        "to use this machine again, `penstock token create` on a node of the cluster, and `penstock join` \
         here with another data \
         directory",
    )
}

/// Failure for an error of the metadata service.
pub fn meta_failure(e: MetaError) -> Failure {
    let kind = match &e {
        MetaError::Refused(refusal) => match refusal.kind() {
            RefusalKind::Invalid => Kind::Invalid,
            RefusalKind::NotFound => Kind::NotFound,
            RefusalKind::Conflict => Kind::Conflict,
            RefusalKind::Denied => Kind::Denied,
        },
        MetaError::NoSpace { .. } => Kind::NoSpace,
        _ => Kind::Failed,
    };
    Failure::plain(kind, e)
}
