//! Volume I/O for the control plane. An engine's io_uring belongs to the thread that made it, so each copy
//! has a thread of its own for as long as it lasts.

use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;

use api::failure::{Context, Failure, Kind, Result};
use fabric::{Fabric, FabricError, VolumeHandle, VolumeIo};
use fabric_types::io::{IoError, IoResult};
use service::waiting::ended as thread_ended;
use tokio::sync::oneshot;

use crate::storage::{MAKE_ROOM, fabric_failure};

/// Jobs that wait: there is one caller, which waits for each.
const JOBS_MAX: usize = 1;

/// What a copy does next, with the buffer that it fills or empties.
struct Job {
    what: CopyStep,
    data: Vec<u8>,
    done: oneshot::Sender<(IoResult, Vec<u8>)>,
}

enum CopyStep {
    Read(u64),
    Write(u64),
    Flush,
}

/// A volume opened for import or export.
pub struct Copier {
    jobs: SyncSender<Job>,
    thread: JoinHandle<()>,
}

impl Copier {
    /// Starts the thread and opens the volume in it.
    pub async fn start(fabric: Fabric, volume: VolumeHandle) -> Result<Self> {
        let (jobs, queue) = sync_channel(JOBS_MAX);
        let (opened, is_open) = oneshot::channel();
        let thread = std::thread::Builder::new()
            .name("copy".to_owned())
            .spawn(move || work(&fabric, &volume, opened, &queue))
            .context(|| "start a thread for the copy".into())?;
        match is_open.await {
            Ok(Ok(())) => Ok(Copier { jobs, thread }),
            Ok(Err(e)) => Err(fabric_failure(e)),
            Err(_) => Err(ended()),
        }
    }

    /// Reads `len` bytes at `offset`.
    pub async fn read(&self, offset: u64, len: usize) -> Result<Vec<u8>> {
        self.run(CopyStep::Read(offset), vec![0; len]).await
    }

    /// Reads `len` bytes at `offset`; nothing if they cannot be read, now or ever.
    pub async fn try_read(&self, offset: u64, len: usize) -> Result<Option<Vec<u8>>> {
        let (result, data) = self.ask(CopyStep::Read(offset), vec![0; len]).await?;
        match result {
            Ok(()) => Ok(Some(data)),
            Err(IoError::Corrupt | IoError::Device(_)) => Ok(None),
            Err(error) => Err(io_failure(error)),
        }
    }

    /// Writes `data` at `offset`.
    pub async fn write(&self, offset: u64, data: Vec<u8>) -> Result<()> {
        self.run(CopyStep::Write(offset), data).await.map(drop)
    }

    /// Makes what was written durable.
    pub async fn flush(&self) -> Result<()> {
        self.run(CopyStep::Flush, Vec::new()).await.map(drop)
    }

    /// Ends the thread and waits until it has let go of the volume.
    pub async fn finish(self) {
        drop(self.jobs);
        if thread_ended(self.thread).await.is_err() {
            tracing::error!("the thread of a copy panicked");
        }
    }

    async fn run(&self, what: CopyStep, data: Vec<u8>) -> Result<Vec<u8>> {
        let (result, data) = self.ask(what, data).await?;
        result.map(|()| data).map_err(io_failure)
    }

    async fn ask(&self, what: CopyStep, data: Vec<u8>) -> Result<(IoResult, Vec<u8>)> {
        let (done, outcome) = oneshot::channel();
        // Never full: the job before was waited for.
        self.jobs
            .try_send(Job { what, data, done })
            .map_err(|_| ended())?;
        outcome.await.map_err(|_| ended())
    }
}

fn ended() -> Failure {
    Failure::plain(Kind::Failed, "the thread of the copy has ended")
}

/// The thread: one job after the other until nobody can send any more.
fn work(
    fabric: &Fabric,
    volume: &VolumeHandle,
    opened: oneshot::Sender<std::result::Result<(), FabricError>>,
    queue: &Receiver<Job>,
) {
    let mut io = match fabric.volume_io(volume) {
        Ok(io) => io,
        Err(e) => {
            // Whoever asked may have gone away, here and below.
            let _ = opened.send(Err(e));
            return;
        }
    };
    let _ = opened.send(Ok(()));
    for job in queue {
        let Job {
            what,
            mut data,
            done,
        } = job;
        let result = carry_out(&mut io, &what, &mut data);
        let _ = done.send((result, data));
    }
}

fn carry_out(io: &mut VolumeIo, what: &CopyStep, data: &mut [u8]) -> IoResult {
    match what {
        CopyStep::Read(offset) => io.read_at(*offset, data),
        CopyStep::Write(offset) => io.write_at(*offset, data),
        CopyStep::Flush => io.flush(),
    }
}

/// What a failed request means to a person.
fn io_failure(e: IoError) -> Failure {
    match e {
        IoError::NoSpace => Failure::new(Kind::NoSpace, "no space left on the devices", MAKE_ROOM),
        IoError::Corrupt => Failure::new(
            Kind::Failed,
            "a block failed its checksum and there is no other copy",
            "restore the volume from a backup; `penstock health` names the place, and an export goes on over \
             it with --skip-bad FILE",
        ),
        other => Failure::plain(Kind::Failed, format!("volume I/O failed: {other}")),
    }
}
