//! Volumes: made, resized, deleted in two steps.

use uuid::Uuid;

use super::map::{cluster, named, take_number};
use super::tables::{
    ATTACHMENTS, ATTACHMENTS_BY_VOLUME, LEASES, VOLUME_NAMES, VOLUMES, VOLUMES_BY_POOL,
};
use super::{Read, ReadError, Stop, Txn, export, pool, recovery};
use crate::command::{Outcome, VolumeSpec};
use crate::ids::{UnixMillis, VolumeId, layer_of};
use crate::model::{
    Attachment, DEFAULT_POOL, Durability, Name, OnFull, Pool, SegmentOf, Volume, VolumeSize,
    VolumeState,
};
use crate::refusal::{NamedVolume, VolumeRefusal, name};

pub(super) fn create(
    txn: &mut Txn<'_>,
    uuid: Uuid,
    spec: &VolumeSpec,
    at: UnixMillis,
) -> Result<Outcome, Stop> {
    cluster(txn)?;
    recovery::refuse_while_choosing(txn)?;
    let name = name(&spec.name)?;
    let size = checked_size(&spec.name, spec.size_bytes)?;
    if let Some(volume) = VOLUMES.get(txn, &name)? {
        let name = name.into();
        return match volume.state {
            VolumeState::Deleting => Err(VolumeRefusal::Deleting { name }.into()),
            VolumeState::Ready if volume.uuid == uuid => Ok(Outcome::Volume(volume)),
            VolumeState::Ready => Err(VolumeRefusal::NameTaken { name }.into()),
        };
    }
    let pool = pool::require(txn, spec.pool.as_deref().unwrap_or(DEFAULT_POOL))?;
    let draft = Draft {
        uuid,
        name,
        size,
        read_only: spec.read_only,
        durability: spec.durability,
        on_full: spec.on_full,
        segment: None,
    };
    make(txn, pool, draft, at)
}

/// What is known of a volume before it has numbers.
pub(super) struct Draft {
    pub(super) uuid: Uuid,
    pub(super) name: Name,
    pub(super) size: VolumeSize,
    pub(super) read_only: bool,
    pub(super) durability: Durability,
    pub(super) on_full: OnFull,
    pub(super) segment: Option<SegmentOf>,
}

/// Makes a volume whose name nobody has.
pub(super) fn make(
    txn: &mut Txn<'_>,
    pool: Pool,
    draft: Draft,
    at: UnixMillis,
) -> Result<Outcome, Stop> {
    pool::require_devices(txn, &pool)?;
    let id: VolumeId = take_number(txn, |counters| &mut counters.volume)?;
    if id > VolumeId::MAX {
        return Err(VolumeRefusal::TooMany.into());
    }
    let volume = Volume {
        id,
        uuid: draft.uuid,
        name: draft.name,
        pool: pool.name,
        size_bytes: draft.size.bytes(),
        // The first of its family.
        layers: vec![layer_of(pool.id, id, 1)],
        read_only: draft.read_only,
        durability: draft.durability,
        on_full: draft.on_full,
        state: VolumeState::Ready,
        stale_tail_end_bytes: None,
        segment: draft.segment,
        created_at: at,
    };
    VOLUMES.put(txn, &volume.name, &volume);
    VOLUME_NAMES.put(txn, &volume.id, &volume.name);
    VOLUMES_BY_POOL.put(txn, &(pool.id, volume.id), &volume.id);
    Ok(Outcome::Volume(volume))
}

pub(super) fn checked_size(name: &str, size_bytes: u64) -> Result<VolumeSize, VolumeRefusal> {
    VolumeSize::round_up(size_bytes).map_err(|source| VolumeRefusal::Size {
        name: name.to_owned(),
        source,
    })
}

pub(super) fn resize(
    txn: &mut Txn<'_>,
    name: &str,
    size_bytes: u64,
    allow_shrink: bool,
) -> Result<Outcome, Stop> {
    let mut volume = require_ready(txn, name)?;
    let size_bytes = checked_size(name, size_bytes)?.bytes();
    if size_bytes < volume.size_bytes {
        if !allow_shrink {
            let (name, asked_bytes, size_bytes) = (name.to_owned(), size_bytes, volume.size_bytes);
            return Err(VolumeRefusal::WouldShrink {
                name,
                size_bytes,
                asked_bytes,
            }
            .into());
        }
        // The guest would go on writing beyond the end.
        require_unattached(txn, &volume)?;
        volume.stale_tail_end_bytes = volume.stale_tail_end_bytes.max(Some(volume.size_bytes));
    } else if size_bytes > volume.size_bytes && volume.stale_tail_end_bytes.is_some() {
        // What the shrink cut off would come back instead of zeroes.
        return Err(VolumeRefusal::StillShrinking {
            name: name.to_owned(),
        }
        .into());
    }
    if size_bytes != volume.size_bytes {
        volume.size_bytes = size_bytes;
        VOLUMES.put(txn, name, &volume);
    }
    Ok(Outcome::Volume(volume))
}

pub(super) fn tail_dropped(txn: &mut Txn<'_>, id: VolumeId) -> Result<Outcome, Stop> {
    let mut volume = by_id(txn, id)?.ok_or(VolumeRefusal::UnknownId { id })?;
    if volume.stale_tail_end_bytes.take().is_some() {
        VOLUMES.put(txn, &volume.name, &volume);
    }
    Ok(Outcome::Volume(volume))
}

pub(super) fn delete(txn: &mut Txn<'_>, name: &str) -> Result<Outcome, Stop> {
    let volume = require(txn, name)?;
    if volume.state == VolumeState::Ready {
        require_unattached(txn, &volume)?;
    }
    begin_deletion(txn, volume)
}

/// Says that a volume is being deleted, unless that was said before.
pub(super) fn begin_deletion(txn: &mut Txn<'_>, mut volume: Volume) -> Result<Outcome, Stop> {
    if volume.state == VolumeState::Ready {
        volume.state = VolumeState::Deleting;
        VOLUMES.put(txn, &volume.name, &volume);
        super::lease::revoke(txn, volume.id)?;
    }
    Ok(Outcome::Volume(volume))
}

pub(super) fn data_dropped(txn: &mut Txn<'_>, id: VolumeId) -> Result<Outcome, Stop> {
    let Some(volume) = by_id(txn, id)? else {
        // Said twice, because the first answer was lost.
        return Ok(Outcome::Done);
    };
    if volume.state != VolumeState::Deleting {
        return Err(VolumeRefusal::NotDeleting {
            name: volume.name.into(),
        }
        .into());
    }
    let pool = pool::require(txn, &volume.pool)?;
    VOLUMES.delete(txn, &volume.name);
    VOLUME_NAMES.delete(txn, &id);
    VOLUMES_BY_POOL.delete(txn, &(pool.id, id));
    // The number is never given to another volume, so its generation need not be kept.
    LEASES.delete(txn, &id);
    Ok(Outcome::Volume(volume))
}

pub(super) fn promote(txn: &mut Txn<'_>, from: &str, to: &str) -> Result<Outcome, Stop> {
    let mut volume = require_ready(txn, from)?;
    require_unattached(txn, &volume)?;
    let to = name(to)?;
    if to == volume.name {
        return Ok(Outcome::Volume(volume));
    }
    let from = std::mem::replace(&mut volume.name, to);
    match VOLUMES.get(txn, &volume.name)? {
        None => VOLUMES.delete(txn, &from),
        Some(mut replaced) => {
            require_ready(txn, &replaced.name)?;
            require_unattached(txn, &replaced)?;
            replaced.name = from;
            replaced.state = VolumeState::Deleting;
            VOLUMES.put(txn, &replaced.name, &replaced);
            VOLUME_NAMES.put(txn, &replaced.id, &replaced.name);
            super::lease::revoke(txn, replaced.id)?;
        }
    }
    VOLUMES.put(txn, &volume.name, &volume);
    VOLUME_NAMES.put(txn, &volume.id, &volume.name);
    Ok(Outcome::Volume(volume))
}

/// Gives a volume that nobody uses a name that no other has.
pub(super) fn rename(txn: &mut Txn<'_>, from: &str, to: &str) -> Result<Outcome, Stop> {
    let mut volume = require_ready(txn, from)?;
    let to = name(to)?;
    if to == volume.name {
        return Ok(Outcome::Volume(volume));
    }
    require_unattached(txn, &volume)?;
    if VOLUMES.get(txn, &to)?.is_some() {
        return Err(VolumeRefusal::NameTaken { name: to.into() }.into());
    }
    VOLUMES.delete(txn, &volume.name);
    volume.name = to;
    VOLUMES.put(txn, &volume.name, &volume);
    VOLUME_NAMES.put(txn, &volume.id, &volume.name);
    Ok(Outcome::Volume(volume))
}

pub(super) fn set(txn: &mut Txn<'_>, name: &str, on_full: OnFull) -> Result<Outcome, Stop> {
    let mut volume = require_ready(txn, name)?;
    if volume.on_full != on_full {
        volume.on_full = on_full;
        VOLUMES.put(txn, name, &volume);
    }
    Ok(Outcome::Volume(volume))
}

/// A volume by the name that people gave it. Segments' volumes are not theirs to use.
pub(super) fn require(view: &dyn Read, name: &str) -> Result<Volume, Stop> {
    let volume = require_any(view, name)?;
    match volume.segment {
        None => Ok(volume),
        Some(_) => Err(unknown(name).into()),
    }
}

fn require_any(view: &dyn Read, name: &str) -> Result<Volume, Stop> {
    Ok(VOLUMES.get(view, name)?.ok_or_else(|| unknown(name))?)
}

fn unknown(name: &str) -> VolumeRefusal {
    VolumeRefusal::Unknown {
        name: name.to_owned(),
    }
}

pub(super) fn require_ready(view: &dyn Read, name: &str) -> Result<Volume, Stop> {
    ready(require(view, name)?)
}

/// The same, also of a segment's volume: it has a lease, as others do.
pub(super) fn require_leasable(view: &dyn Read, name: &str) -> Result<Volume, Stop> {
    ready(require_any(view, name)?)
}

fn ready(volume: Volume) -> Result<Volume, Stop> {
    match volume.state {
        VolumeState::Ready => Ok(volume),
        VolumeState::Deleting => Err(VolumeRefusal::Deleting {
            name: volume.name.into(),
        }
        .into()),
    }
}

/// Name of a volume for a refusal; its number if it was deleted.
pub(super) fn named_volume(view: &dyn Read, id: VolumeId) -> Result<NamedVolume, ReadError> {
    let name = VOLUME_NAMES.get(view, &id)?;
    Ok(match name {
        Some(name) => NamedVolume::Name(name.into()),
        None => NamedVolume::Number(id),
    })
}

fn by_id(view: &dyn Read, id: VolumeId) -> Result<Option<Volume>, ReadError> {
    match VOLUME_NAMES.get(view, &id)? {
        Some(name) => VOLUMES.get(view, &name),
        None => Ok(None),
    }
}

/// The attachments of a volume.
pub(crate) fn attachments(view: &dyn Read, volume: VolumeId) -> Result<Vec<Attachment>, ReadError> {
    let ids = ATTACHMENTS_BY_VOLUME.all_below(view, &volume)?;
    let mut found = Vec::with_capacity(ids.len());
    for id in ids {
        found.extend(ATTACHMENTS.get(view, &id)?);
    }
    Ok(found)
}

fn require_unattached(view: &dyn Read, volume: &Volume) -> Result<(), Stop> {
    if let Some(export) = export::of_volume(view, volume.id)? {
        return Err(VolumeRefusal::Exported {
            name: volume.name.clone().into(),
            export: export.name.into(),
        }
        .into());
    }
    if let Some(attachment) = attachments(view, volume.id)?.into_iter().next() {
        let (name, socket, node) = (
            volume.name.clone().into(),
            attachment.socket,
            named(view, attachment.node)?,
        );
        return Err(VolumeRefusal::InUse { name, socket, node }.into());
    }
    Ok(())
}
