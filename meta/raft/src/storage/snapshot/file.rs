//! A snapshot as a stream of bytes, opened when it is first used.

use std::io::{self, SeekFrom};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use tokio::fs::File;
use tokio::io::{AsyncRead, AsyncSeek, AsyncWrite, ReadBuf};
use tokio::task::JoinHandle;

use super::Current;

enum State {
    /// Not asked for yet: most snapshots never leave their node.
    Lazy(Arc<Current>),
    /// On its way.
    Exporting(JoinHandle<io::Result<std::fs::File>>),
    Open(File),
}

/// Content of a snapshot. A reader keeps the snapshot's directory alive through the open file.
pub struct SnapshotFile {
    state: State,
    /// A seek asked for before the file was open.
    seek: Option<SeekFrom>,
}

impl std::fmt::Debug for SnapshotFile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SnapshotFile")
            .field("open", &matches!(self.state, State::Open(_)))
            .finish()
    }
}

impl SnapshotFile {
    pub(crate) fn of(current: Arc<Current>) -> Self {
        Self {
            state: State::Lazy(current),
            seek: None,
        }
    }

    pub(super) fn receiving(file: std::fs::File) -> Self {
        Self {
            state: State::Open(File::from_std(file)),
            seek: None,
        }
    }

    /// Drives towards an open file at the position asked for.
    fn poll_open(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<&mut File>> {
        loop {
            match &mut self.state {
                State::Lazy(current) => {
                    let current = Arc::clone(current);
                    let export = move || current.export().map_err(io::Error::other);
                    self.state = State::Exporting(tokio::task::spawn_blocking(export));
                }
                State::Exporting(task) => {
                    let file = ready!(Pin::new(task).poll(cx)).map_err(io::Error::other)??;
                    self.state = State::Open(File::from_std(file));
                }
                State::Open(_) => break,
            }
        }
        let State::Open(file) = &mut self.state else {
            unreachable!("the loop ends with an open file")
        };
        if let Some(position) = self.seek.take() {
            Pin::new(&mut *file).start_seek(position)?;
        }
        Poll::Ready(Ok(file))
    }
}

impl AsyncRead for SnapshotFile {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let file = ready!(self.poll_open(cx))?;
        Pin::new(file).poll_read(cx, buf)
    }
}

impl AsyncSeek for SnapshotFile {
    fn start_seek(mut self: Pin<&mut Self>, position: SeekFrom) -> io::Result<()> {
        match &mut self.state {
            State::Open(file) => Pin::new(file).start_seek(position),
            State::Lazy(_) | State::Exporting(_) => {
                self.seek = Some(position);
                Ok(())
            }
        }
    }

    fn poll_complete(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<u64>> {
        if matches!(self.state, State::Lazy(_)) && self.seek.is_none() {
            // `poll_complete` is asked before a first seek too; that alone is no reason to export.
            return Poll::Ready(Ok(0));
        }
        let file = ready!(self.poll_open(cx))?;
        Pin::new(file).poll_complete(cx)
    }
}

impl AsyncWrite for SnapshotFile {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        let file = ready!(self.poll_open(cx))?;
        Pin::new(file).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.state {
            State::Open(file) => Pin::new(file).poll_flush(cx),
            State::Lazy(_) | State::Exporting(_) => Poll::Ready(Ok(())),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.poll_flush(cx)
    }
}
