//! What an export sends.

use std::time::{Duration, Instant};

use api::extents::{self, DATA_BYTES_MAX};
use api::failure::{Failure, Kind, Result};
use api::sparse;
use fabric_types::block::BLOCK_BYTES;
use hyper::body::Bytes;
use storage::{Copier, Handle};
use tokio::sync::mpsc;
use tokio::time::timeout;

use crate::volumes::Volumes;

/// A read waits so long for replicas that are away. Nodes that are killed or cut off cost seconds, and their
/// restart less than this.
const WAIT_MAX: Duration = Duration::from_secs(60);

/// Pause between two records that say only how far it is.
const PROGRESS_PAUSE: Duration = Duration::from_secs(1);

/// Why an export stopped before its end.
pub enum Stop {
    /// It failed.
    Failed(Failure),
    /// A read still waits, and is not waited for any longer.
    Waits(Failure),
    /// Nobody receives it any more. A read may still wait.
    Gone,
}

type Sent = std::result::Result<(), Stop>;

impl From<Failure> for Stop {
    fn from(failure: Failure) -> Self {
        Stop::Failed(failure)
    }
}

/// Sends the data of a volume of `size` bytes, without what cannot be read if `skip_bad`.
pub async fn send(
    copier: &Copier,
    (size, skip_bad): (u64, bool),
    out: &mpsc::Sender<Bytes>,
) -> Sent {
    let mut at = 0;
    let mut told = Instant::now();
    while at < size {
        let len = (size - at).min(DATA_BYTES_MAX as u64) as usize;
        match skip_bad {
            false => send_data(at, &read(copier.read(at, len), out).await?, out).await?,
            true => send_readable(copier, (at, len), out).await?,
        }
        at += len as u64;
        // Zeroes are not sent, and may be many. Who waits sees how far it is.
        if told.elapsed() >= PROGRESS_PAUSE {
            send_record(extents::data(at, &[]), out).await?;
            told = Instant::now();
        }
    }
    Ok(())
}

/// The outcome of a read that is not waited for without end.
async fn read<T>(
    read: impl Future<Output = Result<T>>,
    out: &mpsc::Sender<Bytes>,
) -> std::result::Result<T, Stop> {
    tokio::select! {
        done = timeout(WAIT_MAX, read) => match done {
            Ok(done) => Ok(done?),
            Err(_) => Err(Stop::Waits(Failure::new(
                Kind::Failed,
                format!("a read of the export has waited for {} s", WAIT_MAX.as_secs()),
                "see `penstock health` for what is away, and export again when it is back",
            ))),
        },
        () = out.closed() => Err(Stop::Gone),
    }
}

async fn send_data(at: u64, data: &[u8], out: &mpsc::Sender<Bytes>) -> Sent {
    let mut records = Vec::new();
    sparse::data_runs(at, data, |at, run| {
        records.push(extents::data(at, run));
        Ok::<(), Failure>(())
    })?;
    for record in records {
        send_record(record, out).await?;
    }
    Ok(())
}

async fn send_record(record: Bytes, out: &mpsc::Sender<Bytes>) -> Sent {
    out.send(record).await.map_err(|_| Stop::Gone)
}

/// The same without what cannot be read, which is found block by block.
async fn send_readable(
    copier: &Copier,
    (at, len): (u64, usize),
    out: &mpsc::Sender<Bytes>,
) -> Sent {
    if let Some(data) = read(copier.try_read(at, len), out).await? {
        return send_data(at, &data, out).await;
    }
    let end = at + len as u64;
    let mut bad: Option<(u64, u64)> = None;
    for at in (at..end).step_by(BLOCK_BYTES) {
        let len = (end - at).min(BLOCK_BYTES as u64);
        match read(copier.try_read(at, len as usize), out).await? {
            Some(data) => {
                if let Some((begin, len)) = bad.take() {
                    send_record(extents::skipped(begin, len), out).await?;
                }
                send_data(at, &data, out).await?;
            }
            None => {
                let (begin, before) = bad.unwrap_or((at, 0));
                bad = Some((begin, before + len));
            }
        }
    }
    match bad {
        Some((begin, len)) => send_record(extents::skipped(begin, len), out).await,
        None => Ok(()),
    }
}

impl Volumes {
    /// Ends the use of a volume of which a read may still wait: once nobody else uses it, the read ends.
    pub(super) async fn abandon(&self, volume: &meta::Volume, handle: Handle, copier: Copier) {
        if let Some(one) = self.open.lock().await.volumes.get_mut(&volume.id) {
            one.give_up();
        }
        drop(handle);
        copier.finish().await;
        let mut open = self.open.lock().await;
        if let Some(one) = open.volumes.get_mut(&volume.id) {
            one.note_given_up_ended();
        }
        self.close_in(&mut open, volume.id).await;
    }
}
