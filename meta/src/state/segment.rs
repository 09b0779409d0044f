//! Segments of filesystems: hidden volumes, of which only the state machine makes the names.
//!
//! A segment is written under its volume's lease, recovered, moved and counted as any volume is. People's
//! commands do not find it by its name.

use namespace::FilesystemId;
use uuid::Uuid;

use super::tables::{POOLS, VOLUMES};
use super::{Read, ReadError, Stop, Txn, filesystem, recovery, volume};
use crate::command::Outcome;
use crate::ids::UnixMillis;
use crate::model::{Durability, Name, OnFull, SegmentOf, Volume, VolumeState};
use crate::refusal::{FilesystemRefusal, VolumeRefusal};

pub(super) fn create(
    txn: &mut Txn<'_>,
    of: SegmentOf,
    uuid: Uuid,
    size_bytes: u64,
    at: UnixMillis,
) -> Result<Outcome, Stop> {
    recovery::refuse_while_choosing(txn)?;
    let filesystem = filesystem::by_id(txn, of.filesystem)?;
    let id = of.filesystem;
    let filesystem = filesystem.ok_or(FilesystemRefusal::UnknownId { id })?;
    let filesystem = filesystem::ready(filesystem)?;
    let name = Name::of_segment(of);
    let size = volume::checked_size(&name, size_bytes)?;
    if let Some(volume) = VOLUMES.get(txn, &name)? {
        return match volume.state {
            VolumeState::Ready => Ok(Outcome::Volume(volume)),
            VolumeState::Deleting => Err(VolumeRefusal::Deleting { name: name.into() }.into()),
        };
    }
    let mut pools = POOLS.all(txn)?.into_iter();
    let pool = pools.find(|pool| pool.id == filesystem.pool);
    let pool = pool.expect("a pool stays as long as a filesystem is in it");
    let draft = volume::Draft {
        uuid,
        name,
        size,
        read_only: false,
        // Extents are named after a flush, and nothing reads what is not named.
        durability: Durability::Flush,
        on_full: OnFull::default(),
        segment: Some(of),
    };
    volume::make(txn, pool, draft, at)
}

/// Deleting needs no filesystem: the segments of one that is being deleted go, too.
pub(super) fn delete(txn: &mut Txn<'_>, of: SegmentOf) -> Result<Outcome, Stop> {
    match VOLUMES.get(txn, &Name::of_segment(of))? {
        Some(volume) => volume::begin_deletion(txn, volume),
        // Said twice, because the first answer was lost.
        None => Ok(Outcome::Done),
    }
}

/// The volumes of a filesystem's segments, also those being deleted.
pub(crate) fn volumes(view: &dyn Read, filesystem: FilesystemId) -> Result<Vec<Volume>, ReadError> {
    VOLUMES.all_below(view, Name::segment_prefix(filesystem).as_str())
}
