//! Import and export of volume data.
//!
//! An import fills a volume of its own, which takes its name when it is whole: until then the old content
//! stays, and whatever stops the import leaves only that nameless volume, which is dropped at once or at the
//! next start.

use std::sync::Arc;
use std::time::Duration;

use api::extents::{self, Decoder, Record};
use api::failure::{Failure, Kind, Result};
use api::types::{ExportQuery, ImportQuery, Volume};
use axum::body::Body;
use http_body_util::BodyExt;
use hyper::body::Bytes;
use meta::{Meta, OnFull, VolumeSpec};
use service::failures::{done_unseen, meta_failure};
use storage::Handle;
use tokio::sync::mpsc;

use crate::open::OpenVolumes;
use crate::volumes::{Volumes, check_name, copied, import_name, refuse_segment, volume_by};

mod sending;
mod stall;

use sending::{Stop, send};
use stall::Filling;

/// How long the rest of a stream is taken that nobody wants. Who still sends then finds the connection
/// closed.
const UNWANTED_MAX: Duration = Duration::from_secs(5);

/// Fills volume `name` from a stream of extents.
pub async fn import(
    volumes: &Arc<Volumes>,
    name: &str,
    query: &ImportQuery,
    mut body: Body,
) -> Result<Volume> {
    let done = import_checked(volumes, name, query, &mut body).await;
    if done.is_err() {
        // A connection that closes while its client sends may take the answer with it.
        tokio::spawn(async move {
            let rest = async { while let Some(Ok(_)) = body.frame().await {} };
            // Either way nobody reads it any more.
            let _ = tokio::time::timeout(UNWANTED_MAX, rest).await;
        });
    }
    done
}

async fn import_checked(
    volumes: &Arc<Volumes>,
    name: &str,
    query: &ImportQuery,
    body: &mut Body,
) -> Result<Volume> {
    check_name(name)?;
    let replaced = {
        let mut open = volumes.open.lock().await;
        let target = check_target(&volumes.cluster.asked, &open, name, query).await?;
        if let Some(volume) = &target {
            open.refuse_replaced(volume)?;
            open.replaced.insert(volume.id);
        }
        target
    };
    // Whatever else people said of the volume that is replaced stays.
    let on_full = replaced.as_ref().map(|volume| volume.on_full);
    let done = import_as_new(volumes, name, (query, on_full.unwrap_or_default()), body).await;
    if let Some(volume) = replaced {
        volumes.open.lock().await.replaced.remove(&volume.id);
    }
    done
}

/// Fills a volume of its own, and gives it the name.
async fn import_as_new(
    volumes: &Arc<Volumes>,
    name: &str,
    (query, on_full): (&ImportQuery, OnFull),
    body: &mut Body,
) -> Result<Volume> {
    let part_name = import_name(volumes.cluster.meta.node_id());
    let spec = VolumeSpec {
        pool: query.pool.clone(),
        on_full,
        ..VolumeSpec::new(part_name, query.size_bytes)
    };
    let part = volumes
        .cluster
        .asked
        .create_volume(spec)
        .await
        .map_err(meta_failure)?;
    let filled = fill(volumes, (name, &part), query.size_bytes, body).await;
    let done = match filled {
        Ok(()) => promote(volumes, &part, name, query).await,
        Err(failure) => Err(failure),
    };
    if done.is_err() {
        drop_part(volumes, &part).await;
    }
    done
}

/// Whether volume `name` may be made, or replaced; what would be replaced.
async fn check_target(
    meta: &Meta,
    open: &OpenVolumes,
    name: &str,
    query: &ImportQuery,
) -> Result<Option<meta::Volume>> {
    let existing = match volume_by(meta, name).await {
        Ok(volume) => volume,
        Err(failure) if failure.kind == Kind::NotFound => return Ok(None),
        Err(failure) => return Err(failure),
    };
    let volume = meta.get_volume(name).await.map_err(meta_failure)?;
    if let Some(socket) = existing.attached.first() {
        return Err(Failure::new(
            Kind::Conflict,
            format!("volume '{name}' is in use on {socket}"),
            format!("run `penstock detach {name}` first"),
        ));
    }
    if !query.replace {
        return Err(Failure::new(
            Kind::Conflict,
            format!("volume '{name}' exists"),
            "choose another name, or let it be replaced with --yes",
        ));
    }
    // An export that runs would go on with zeroes.
    if open.volumes.contains_key(&volume.id) {
        return Err(copied(name));
    }
    Ok(Some(volume))
}

/// Fills `part`, which is to be called `name`.
async fn fill(
    volumes: &Arc<Volumes>,
    (name, part): (&str, &meta::Volume),
    size: u64,
    body: &mut Body,
) -> Result<()> {
    let handle = volumes.open_volume(part).await?;
    let filled = match volumes.storage.copier(&handle).await {
        Ok(copier) => {
            let filling = Filling::new(volumes, (name, part), &handle, &copier);
            let received = receive(&filling, size, body).await;
            let filled = match received {
                Ok(()) => filling.flush().await,
                Err(failure) => Err(failure),
            };
            copier.finish().await;
            filled
        }
        Err(failure) => Err(failure),
    };
    drop(handle);
    volumes.close_volume(part).await;
    filled
}

async fn receive(filling: &Filling<'_>, size: u64, body: &mut Body) -> Result<()> {
    let wrong = |e: &dyn std::fmt::Display| {
        Failure::new(
            Kind::Invalid,
            format!("the stream of the import is wrong: {e}"),
            "send it again",
        )
    };
    let mut decoder = Decoder::default();
    while let Some(frame) = body.frame().await {
        let Ok(bytes) = frame.map_err(|e| wrong(&e))?.into_data() else {
            continue;
        };
        let mut input = &bytes[..];
        while let Some(record) = decoder.next(&mut input).map_err(|e| wrong(&e))? {
            match record {
                Record::Data(at, data) => {
                    if at
                        .checked_add(data.len() as u64)
                        .is_none_or(|end| end > size)
                    {
                        return Err(wrong(&"data beyond the size"));
                    }
                    filling.write(at, data).await?;
                }
                Record::End(end) if end == size => {}
                Record::End(end) => {
                    return Err(wrong(&format!("it ends at {end} instead of {size}")));
                }
                Record::Skipped(..) => return Err(wrong(&"bytes that the sender could not read")),
                Record::Failure(_) => return Err(wrong(&"a failure on the sender's side")),
            }
        }
    }
    decoder.finish().map_err(|e| wrong(&e))
}

/// Gives a whole import its name.
async fn promote(
    volumes: &Arc<Volumes>,
    part: &meta::Volume,
    name: &str,
    query: &ImportQuery,
) -> Result<Volume> {
    {
        let open = volumes.open.lock().await;
        // All that was sent would be lost: this waits as long as it can.
        check_target(&volumes.cluster.meta, &open, name, query).await?;
        volumes
            .cluster
            .meta
            .promote_volume(&part.name, name)
            .await
            .map_err(meta_failure)?;
        // What it replaced has its name now. The import took effect, whatever becomes of that.
        if let Ok(old) = volumes.cluster.meta.get_volume(&part.name).await
            && let Err(failure) = volumes.drop_data(&old).await
        {
            volumes.left_over(&old, failure);
        }
    }
    volumes.get(name).await.map_err(done_unseen)
}

async fn drop_part(volumes: &Volumes, part: &meta::Volume) {
    let dropped = match volumes
        .cluster
        .meta
        .delete_volume(&part.name)
        .await
        .map_err(meta_failure)
    {
        Ok(volume) => volumes.drop_data(&volume).await,
        Err(failure) => Err(failure),
    };
    if let Err(failure) = dropped {
        volumes.left_over(part, failure);
    }
}

/// Starts to copy volume `name` into `out`. Unless `live` allows it, a volume that is written meanwhile makes
/// a failed copy, not one that looks whole.
pub async fn export(
    volumes: Arc<Volumes>,
    name: &str,
    query: &ExportQuery,
    out: mpsc::Sender<Bytes>,
) -> Result<()> {
    let ExportQuery { live, skip_bad } = *query;
    let (volume, handle, before) = open_to_export(&volumes, name, live).await?;
    let copier = match volumes.storage.copier(&handle).await {
        Ok(copier) => copier,
        Err(failure) => {
            volumes.close_volume(&volume).await;
            return Err(failure);
        }
    };
    tokio::spawn(async move {
        let mut sent = send(&copier, (volume.size_bytes, skip_bad), &out).await;
        if sent.is_ok() && !live && handle.sequences_left() != before {
            sent = Err(Stop::Failed(Failure::new(
                Kind::Conflict,
                format!(
                    "a guest wrote to volume '{}' while it was copied",
                    volume.name
                ),
                "stop it and export again, or take --live for a copy that is not of one point in time",
            )));
        }
        let (last, is_over) = match sent {
            Ok(()) => (Some(extents::end(volume.size_bytes)), true),
            Err(Stop::Failed(failure)) => (Some(failed(&volume, &failure)), true),
            Err(Stop::Waits(failure)) => (Some(failed(&volume, &failure)), false),
            Err(Stop::Gone) => (None, false),
        };
        if is_over {
            // Before whoever asked does something else with the volume.
            drop(handle);
            copier.finish().await;
            volumes.close_volume(&volume).await;
            answer(&out, last).await;
        } else {
            answer(&out, last).await;
            volumes.abandon(&volume, handle, copier).await;
        }
    });
    Ok(())
}

fn failed(volume: &meta::Volume, failure: &Failure) -> Bytes {
    tracing::warn!(volume = %volume.name, %failure, "export");
    extents::failure(&serde_json::to_vec(failure).unwrap_or_default())
}

async fn answer(out: &mpsc::Sender<Bytes>, last: Option<Bytes>) {
    if let Some(last) = last {
        // Whoever asked may have gone away.
        let _ = out.send(last).await;
    }
}

/// Opens a volume, and tells how many writes it can still number: one fewer at the end means that it was
/// written.
async fn open_to_export(
    volumes: &Volumes,
    name: &str,
    live: bool,
) -> Result<(meta::Volume, Handle, u64)> {
    refuse_segment(name)?;
    let mut open = volumes.open.lock().await;
    let volume = volumes
        .cluster
        .asked
        .get_volume(name)
        .await
        .map_err(meta_failure)?;
    volumes.outwait_lease(&volume).await?;
    let handle = volumes.open_in(&mut open, &volume).await?;
    let before = handle.sequences_left();
    let writer = volumes.users().and_then(|users| users.writer(volume.id));
    if let (Some(socket), false) = (writer, live) {
        let failure = Failure::new(
            Kind::Conflict,
            format!("a guest uses volume '{name}' on {socket}"),
            "stop it, or take --live for a copy that is not of one point in time",
        );
        volumes.close_in(&mut open, volume.id).await;
        return Err(failure);
    }
    Ok((volume, handle, before))
}
