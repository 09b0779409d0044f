//! Events of what people change. One place tells of all commands, after they were granted: what each of them
//! does stays free of it.

use super::map::cluster;
use super::tables::{
    ATTACHMENTS, COUNTERS, EVENTS, EXPORTS, FILESYSTEM_ATTACHMENTS, LEASES, POOLS, TOKENS, VOLUMES,
};
use super::{Read, ReadError, Stop, Txn, event};
use crate::command::{Command, Notice, Outcome};
use crate::ids::UnixMillis;
use crate::model::{Author, EventKind, ExportState, IMPORT_PREFIX, Lease, Volume, VolumeState};
use crate::refusal::AccessRefusal;

/// Tells what a granted command changed, where no other code does; `before` is how the records were. Nothing
/// of what changed nothing, as when it was said twice.
pub(super) fn tell(
    before: &dyn Read,
    txn: &mut Txn<'_>,
    command: &Command,
    outcome: &Outcome,
    at: UnixMillis,
) -> Result<(), ReadError> {
    // People's commands say a time.
    if at == UnixMillis::default() {
        return Ok(());
    }
    let what = match outcome {
        Outcome::Volume(volume) => of_volume(before, command, volume)?,
        Outcome::Attachment(_) | Outcome::FilesystemAttachment(_) => {
            of_attachment(before, command, outcome)?
        }
        Outcome::Pool(pool) => match command {
            Command::CreatePool { .. } => Some(EventKind::PoolCreated {
                pool: pool.name.clone(),
                replicas: pool.replicas,
            }),
            Command::SetPool { .. } => POOLS
                .get(before, &*pool.name)?
                .filter(|old| old != pool)
                .map(|_| EventKind::PoolChanged {
                    pool: pool.name.clone(),
                    replicas: pool.replicas,
                    min_in_sync: pool.min_in_sync,
                }),
            Command::DeletePool { .. } => Some(EventKind::PoolDeleted {
                pool: pool.name.clone(),
            }),
            _ => None,
        },
        Outcome::Lease(lease) => of_lease(before, txn, command, lease)?,
        Outcome::Export(export) => match command {
            Command::DeleteExport { name } => EXPORTS
                .get(before, name)?
                .filter(|old| old.state != ExportState::Deleting)
                .map(|_| EventKind::ExportDeleting {
                    export: export.name.clone(),
                }),
            _ => None,
        },
        _ => match command {
            Command::CreateToken {
                token,
                roles,
                expires_at,
                ..
            } if TOKENS.get(before, token)?.is_none() => Some(EventKind::TokenCreated {
                roles: roles.clone(),
                expires_at: *expires_at,
            }),
            Command::RevokeToken { .. } => Some(EventKind::TokenRevoked),
            _ => None,
        },
    };
    match what {
        Some(what) => event::push(txn, at, what),
        None => Ok(()),
    }
}

/// Keeps an event of what a node noticed.
pub(super) fn note(txn: &mut Txn<'_>, notice: &Notice, at: UnixMillis) -> Result<Outcome, Stop> {
    cluster(txn)?;
    if !notice.is_fit() {
        return Err(AccessRefusal::NoSuchNotice.into());
    }
    event::push(txn, at, notice.event())?;
    Ok(Outcome::Done)
}

/// Writes into the events of a command who asked for it.
pub(super) fn sign(before: &dyn Read, txn: &mut Txn<'_>, by: Author) -> Result<(), ReadError> {
    let next = |view: &dyn Read| -> Result<u64, ReadError> {
        Ok(COUNTERS.get(view, &())?.unwrap_or_default().event)
    };
    for number in next(before)?..next(txn)? {
        if let Some(mut event) = EVENTS.get(txn, &number)? {
            event.by = Some(by);
            EVENTS.put(txn, &number, &event);
        }
    }
    Ok(())
}

fn of_volume(
    before: &dyn Read,
    command: &Command,
    volume: &Volume,
) -> Result<Option<EventKind>, ReadError> {
    // Nobody asks for segments. An import has no event before it has the volume's name.
    if volume.segment.is_some() || volume.name.starts_with(IMPORT_PREFIX) {
        return Ok(None);
    }
    let name = volume.name.clone();
    let was = |name: &str| VOLUMES.get(before, name);
    let created = || EventKind::VolumeCreated {
        volume: volume.name.clone(),
        pool: volume.pool.clone(),
        size_bytes: volume.size_bytes,
    };
    Ok(match command {
        Command::CreateVolume { .. } if was(&name)?.is_none() => Some(created()),
        Command::ResizeVolume { .. } => was(&name)?
            .map(|old| old.size_bytes)
            .filter(|from_bytes| *from_bytes != volume.size_bytes)
            .map(|from_bytes| EventKind::VolumeResized {
                volume: name,
                from_bytes,
                to_bytes: volume.size_bytes,
            }),
        Command::SetVolume { .. } => {
            was(&name)?
                .filter(|old| old.on_full != volume.on_full)
                .map(|_| EventKind::VolumeOnFullSet {
                    volume: name,
                    on_full: volume.on_full,
                })
        }
        Command::DeleteVolume { .. } => was(&name)?
            .filter(|old| old.state == VolumeState::Ready)
            .map(|_| EventKind::VolumeDeleted { volume: name }),
        Command::RenameVolume { from, .. } | Command::PromoteVolume { from, .. } => {
            let Some(from) = was(from)?.map(|old| old.name).filter(|from| *from != name) else {
                return Ok(None);
            };
            let imported = from.starts_with(IMPORT_PREFIX);
            Some(match (was(&name)?, imported) {
                (None, true) => created(),
                (None, false) => EventKind::VolumeRenamed { volume: name, from },
                (Some(_), imported) => EventKind::VolumeReplaced {
                    volume: name,
                    with: (!imported).then_some(from),
                },
            })
        }
        _ => None,
    })
}

fn of_attachment(
    before: &dyn Read,
    command: &Command,
    outcome: &Outcome,
) -> Result<Option<EventKind>, ReadError> {
    Ok(match (command, outcome) {
        (Command::CreateAttachment { .. }, Outcome::Attachment(new)) => {
            Some(EventKind::VolumeAttached {
                volume: new.target.name().clone(),
                node: new.node,
                socket: new.socket.clone(),
                read_only: new.read_only,
            })
        }
        (Command::OfferAttachment { .. }, Outcome::Attachment(offered)) => {
            offered.offer.map(|offer| EventKind::VolumeOffered {
                volume: offered.target.name().clone(),
                node: offered.node,
                to: offer.to,
                expires_at: offer.expires_at,
            })
        }
        (Command::WithdrawOffer { .. }, Outcome::Attachment(withdrawn)) => {
            Some(EventKind::OfferWithdrawn {
                volume: withdrawn.target.name().clone(),
                node: withdrawn.node,
            })
        }
        (Command::DeleteAttachment { .. }, Outcome::Attachment(old)) => {
            Some(EventKind::VolumeDetached {
                volume: old.target.name().clone(),
                node: old.node,
                socket: old.socket.clone(),
            })
        }
        (Command::CreateFilesystemAttachment { .. }, Outcome::FilesystemAttachment(new)) => {
            let is_new = FILESYSTEM_ATTACHMENTS.get(before, &new.id)?.is_none();
            is_new.then(|| EventKind::FilesystemAttached {
                filesystem: new.name.clone(),
                node: new.node,
                socket: new.socket.clone(),
                read_only: new.read_only,
            })
        }
        (Command::DeleteFilesystemAttachment { .. }, Outcome::FilesystemAttachment(old)) => {
            Some(EventKind::FilesystemDetached {
                filesystem: old.name.clone(),
                node: old.node,
                socket: old.socket.clone(),
            })
        }
        _ => None,
    })
}

/// A guest came from another node, or a node that had the right to write a volume was not heard of and
/// another one got it.
fn of_lease(
    before: &dyn Read,
    after: &dyn Read,
    command: &Command,
    lease: &Lease,
) -> Result<Option<EventKind>, ReadError> {
    if let Command::TakeOverAttachment { attachment, .. } = command {
        let moved = ATTACHMENTS.get(after, attachment)?;
        return Ok(moved.map(|moved| EventKind::VolumeMoved {
            volume: moved.target.name().clone(),
            node: moved.node,
            socket: moved.socket,
        }));
    }
    let Command::GrantLease { volume, node, .. } = command else {
        return Ok(None);
    };
    let old = LEASES.get(before, &lease.volume)?;
    let lost = old.and_then(|old| old.holder).filter(|old| old != node);
    let volume = VOLUMES.get(before, volume)?;
    let volume = volume.filter(|volume| volume.segment.is_none());
    Ok(lost
        .zip(volume)
        .map(|(from, volume)| EventKind::LeaseTakenOver {
            volume: volume.name,
            from,
            node: *node,
        }))
}
