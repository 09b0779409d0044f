//! The state machine: a pure function from the records and a [`Command`] to a [`Reply`] and changed records.
//!
//! **Architecture Invariant:** nothing in this module and its children reads a clock, a random source, a file
//! or a socket, or iterates anything whose order is not fixed. The same commands on the same records give the
//! same bytes on every node, for ever: a change of behaviour must be told apart by the command that asks for
//! it, or wait for a [feature level](crate::level).
//!
//! The records live in ordered key-value space behind [`Read`], so that RocksDB keeps them one by one and
//! tests keep them in a `BTreeMap`. A command's writes are collected in a [`Txn`] and kept only if it is
//! granted.

mod attachment;
mod audit;
mod event;
pub(crate) mod export;
mod filesystem;
pub(crate) mod filesystem_attachment;
pub(crate) mod group;
mod kv;
mod lease;
mod loss;
mod map;
mod migration;
mod node;
pub(crate) mod placement;
mod pool;
mod recovery;
pub(crate) mod segment;
pub(crate) mod tables;
mod token;
pub(crate) mod volume;
pub(crate) mod within;

#[cfg(test)]
mod proptests;
#[cfg(test)]
mod tests;

pub(crate) use kv::{Read, ReadError, Txn, Writes};
pub(crate) use lease::renewable as renewable_lease;

use namespace::{FilesystemId, SegmentId};

use crate::command::{Command, Lost, Outcome, Reply};
use crate::model::SegmentOf;
use crate::refusal::{AccessRefusal, Refusal};

/// Why a command has no reply: either it is refused, or the records could not be read.
#[derive(Debug, thiserror::Error)]
enum Stop {
    #[error(transparent)]
    Refused(Refusal),
    #[error(transparent)]
    Read(#[from] ReadError),
}

impl<R: Into<Refusal>> From<R> for Stop {
    fn from(refusal: R) -> Self {
        Self::Refused(refusal.into())
    }
}

/// Applies one command. A refused one writes nothing.
///
/// # Errors
/// Only when the records cannot be read, and then nothing is written either.
pub(crate) fn apply(records: &mut Txn<'_>, command: &Command) -> Result<Reply, ReadError> {
    let mut txn = Txn::over(&*records);
    let (change, at) = (command.change(), command.at());
    let result = run(&mut txn, change).and_then(|outcome| {
        audit::tell(&*records, &mut txn, change, &outcome, at)?;
        event::tell_health(&*records, &mut txn, at)?;
        if let Some(by) = command.author() {
            audit::sign(&*records, &mut txn, by)?;
        }
        Ok(outcome)
    });
    let writes = txn.into_writes();
    match result {
        Ok(outcome) => {
            records.absorb(writes);
            Ok(Ok(outcome))
        }
        Err(Stop::Refused(refusal)) => Ok(Err(refusal)),
        Err(Stop::Read(error)) => Err(error),
    }
}

fn run_group(txn: &mut Txn<'_>, command: &Command) -> Result<Outcome, Stop> {
    match command {
        Command::ReportFailed {
            group,
            device,
            incarnation,
            epoch,
            heard,
            ..
        } => group::report_failed(txn, *group, *device, *incarnation, *epoch, heard),
        Command::Regroup { changes, heard, .. } => group::regroup(txn, changes, heard),
        Command::Promote {
            group,
            device,
            incarnation,
            since,
            ..
        } => group::promote(txn, *group, *device, *incarnation, *since),
        other => unreachable!("{other:?} is about no group"),
    }
}

fn run_export(txn: &mut Txn<'_>, command: &Command) -> Result<Outcome, Stop> {
    match command {
        Command::CreateExport { fsid, export, at } => export::create(txn, *fsid, export, *at),
        Command::AssignExport {
            name,
            from,
            to,
            planned,
            at,
        } => export::assign(txn, name, (*from, *to), *planned, *at),
        Command::DeleteExport { name } => export::delete(txn, name),
        Command::ExportWithdrawn { name, node, at } => export::withdrawn(txn, name, *node, *at),
        other => unreachable!("{other:?} is about no export"),
    }
}

fn run_filesystem(txn: &mut Txn<'_>, command: &Command) -> Result<Outcome, Stop> {
    let of = |filesystem: &FilesystemId, segment: &SegmentId| SegmentOf {
        filesystem: *filesystem,
        segment: *segment,
    };
    match command {
        Command::CreateFilesystem {
            uuid,
            filesystem,
            at,
        } => filesystem::create(txn, *uuid, filesystem, *at),
        Command::DeleteFilesystem { name, at } => filesystem::delete(txn, name, *at),
        Command::FilesystemDropped { id } => filesystem::dropped(txn, *id),
        Command::CreateSegmentVolume {
            filesystem,
            segment,
            uuid,
            size_bytes,
            at,
        } => segment::create(txn, of(filesystem, segment), *uuid, *size_bytes, *at),
        Command::DeleteSegmentVolume {
            filesystem,
            segment,
        } => segment::delete(txn, of(filesystem, segment)),
        Command::CreateFilesystemAttachment { attachment, at } => {
            filesystem_attachment::create(txn, attachment, *at)
        }
        Command::DeleteFilesystemAttachment { attachment } => {
            filesystem_attachment::delete(txn, attachment)
        }
        Command::SetNamespaceGroupVoters { group, voters } => {
            filesystem::set_voters(txn, *group, voters)
        }
        other => unreachable!("{other:?} is about no filesystem"),
    }
}

fn run_recovery(txn: &mut Txn<'_>, command: &Command) -> Result<Outcome, Stop> {
    match command {
        Command::BeginHistory {
            history,
            node,
            backup_at,
            choose,
            groups,
            at,
        } => {
            let beginning = recovery::Beginning {
                history: *history,
                by: *node,
                backup_at: *backup_at,
                choose: *choose,
                groups,
                at: *at,
            };
            recovery::begin(txn, &beginning)
        }
        Command::ReportEvidence { evidence, .. } => recovery::report(txn, evidence),
        Command::ChooseReplicas {
            without_missing,
            at,
        } => recovery::choose(txn, *without_missing, *at),
        Command::ForgetUnknown { at } => recovery::forget_unknown(txn, *at),
        other => unreachable!("{other:?} is about no recovery"),
    }
}

fn run(txn: &mut Txn<'_>, command: &Command) -> Result<Outcome, Stop> {
    match command {
        Command::Bootstrap {
            cluster,
            node,
            pool,
            at,
        } => map::bootstrap(txn, *cluster, node, pool.as_deref(), *at),
        Command::RegisterNode { node, replaces, at } => node::register(txn, node, *replaces, *at),
        Command::SetNodeState {
            node,
            incarnation,
            state,
            at,
        } => node::set_state(txn, *node, *incarnation, *state, *at),
        Command::SetNodeAdminState {
            node,
            admin_state,
            at,
        } => node::set_admin_state(txn, *node, *admin_state, *at),
        Command::RemoveNode { node, at } => node::remove(txn, *node, node::Removal::Unused, *at),
        Command::EvictNode { node, at } => node::remove(txn, *node, node::Removal::Evicted, *at),
        Command::RemoveLost { lost, at } => match lost {
            Lost::Node(node) => node::remove(txn, *node, node::Removal::Lost, *at),
            Lost::Device(device) => map::remove_lost_device(txn, *device, *at),
        },
        Command::RaiseLevel { to, at } => map::raise_level(txn, *to, *at),
        Command::CreateToken {
            token,
            roles,
            expires_at,
            at,
        } => token::create(txn, *token, roles.as_ref(), *expires_at, *at),
        Command::RedeemToken { token, roles, at } => token::redeem(txn, *token, roles, *at),
        Command::RevokeToken { token } => token::revoke(txn, *token),
        Command::RegisterDevice {
            device,
            incarnation,
            at,
        } => map::register_device(txn, device, *incarnation, *at),
        Command::SetDeviceState { device, state, at } => {
            map::set_device_state(txn, *device, *state, *at)
        }
        Command::LoseDevice {
            device,
            incarnation,
            for_long,
            at,
        } => map::lose_device(txn, *device, *incarnation, *for_long, *at),
        Command::DrainDevice { device, on, at } => map::drain_device(txn, *device, *on, *at),
        Command::RemoveDevice { device, at } => map::remove_device(txn, *device, *at),
        Command::ReportFailed { .. } | Command::Regroup { .. } | Command::Promote { .. } => {
            run_group(txn, command)
        }
        Command::CreatePool { pool, at } => pool::create(txn, pool, *at),
        Command::SetPool {
            name,
            replicas,
            min_in_sync,
        } => pool::set(txn, name, *replicas, *min_in_sync),
        Command::DeletePool { name } => pool::delete(txn, name),
        Command::CreateVolume { uuid, volume, at } => volume::create(txn, *uuid, volume, *at),
        Command::ResizeVolume {
            name,
            size_bytes,
            allow_shrink,
        } => volume::resize(txn, name, *size_bytes, *allow_shrink),
        Command::VolumeTailDropped { volume } => volume::tail_dropped(txn, *volume),
        Command::DeleteVolume { name } => volume::delete(txn, name),
        Command::VolumeDataDropped { volume } => volume::data_dropped(txn, *volume),
        Command::PromoteVolume { from, to } => volume::promote(txn, from, to),
        Command::SetVolume { name, on_full } => volume::set(txn, name, *on_full),
        Command::RenameVolume { from, to } => volume::rename(txn, from, to),
        Command::GrantLease {
            volume,
            node,
            expired,
            at,
        } => {
            lease::check_asker(txn, volume, *node)?;
            lease::grant(txn, volume, *node, *expired, *at)
        }
        Command::ReleaseLease {
            volume,
            node,
            generation,
        } => lease::release(txn, *volume, *node, *generation),
        Command::CreateAttachment { attachment, at } => attachment::create(txn, attachment, *at),
        Command::SetWriteThrough { attachment, on } => {
            attachment::set_write_through(txn, *attachment, *on)
        }
        Command::TakeOverAttachment {
            attachment,
            expired,
            at,
        } => migration::take_over(txn, *attachment, *expired, *at),
        Command::MoveAttachment {
            attachment,
            to,
            socket,
            at,
        } => migration::move_to(txn, *attachment, *to, socket, *at),
        Command::OfferAttachment {
            attachment,
            to,
            lifetime_s,
            at,
        } => migration::offer(txn, *attachment, *to, *lifetime_s, *at),
        Command::WithdrawOffer { attachment } => migration::withdraw(txn, *attachment),
        Command::ExpireOffers { at } => migration::expire(txn, *at),
        Command::DeleteAttachment { attachment } => attachment::delete(txn, attachment),
        Command::BeginHistory { .. }
        | Command::ReportEvidence { .. }
        | Command::ChooseReplicas { .. }
        | Command::ForgetUnknown { .. } => run_recovery(txn, command),
        Command::CreateFilesystem { .. }
        | Command::DeleteFilesystem { .. }
        | Command::FilesystemDropped { .. }
        | Command::CreateSegmentVolume { .. }
        | Command::DeleteSegmentVolume { .. }
        | Command::CreateFilesystemAttachment { .. }
        | Command::DeleteFilesystemAttachment { .. }
        | Command::SetNamespaceGroupVoters { .. } => run_filesystem(txn, command),
        Command::CreateExport { .. }
        | Command::AssignExport { .. }
        | Command::DeleteExport { .. }
        | Command::ExportWithdrawn { .. } => run_export(txn, command),
        Command::RecordNotice { notice, at } => audit::note(txn, notice, *at),
        // Authors do not nest.
        Command::Authored { .. } => Err(AccessRefusal::NoSuchAuthor.into()),
    }
}
