//! The control plane's end of a data thread: mailbox, commands, and the handle of a queue.

use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use super::{QueueConfig, QueueError};
use crate::device::Device;

/// Commands that wait for a data thread; one more makes its sender wait.
const MAILBOX_COMMANDS: usize = 64;

/// Where the answer to a command goes. Its receiver may have given up, so sending never fails loudly.
pub(crate) type Reply<T> = SyncSender<Result<T, QueueError>>;

/// Names a queue on its thread; the number of a queue that was stopped is used again with another generation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct QueueId {
    pub(crate) slot: usize,
    pub(crate) generation: u64,
}

/// A change of a running queue.
pub(crate) enum Change {
    Call(Option<OwnedFd>),
    Err(Option<OwnedFd>),
}

/// What the control plane asks of a data thread.
pub(super) enum Command<D> {
    Start {
        device: Arc<D>,
        config: Box<QueueConfig>,
        reply: Reply<QueueId>,
    },
    Stop {
        id: QueueId,
        /// The front end has gone.
        gone: bool,
        reply: Option<Reply<u32>>,
    },
    Change {
        id: QueueId,
        change: Change,
        reply: Reply<()>,
    },
    /// Answered by the next turn of the thread's loop.
    Ping {
        reply: Reply<()>,
    },
    Shutdown,
}

/// The mailbox of one data thread.
pub(super) struct Port<D> {
    sender: SyncSender<Command<D>>,
    /// Set while commands wait; the thread looks at this and not at the channel.
    pending: AtomicBool,
    /// Wakes the thread when it sleeps.
    wake: OwnedFd,
    /// Queues on the thread.
    load: AtomicUsize,
}

impl<D> fmt::Debug for Port<D> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("Port")
            .field("pending", &self.pending)
            .field("load", &self.load)
            .finish_non_exhaustive()
    }
}

impl<D> Port<D> {
    pub(super) fn new() -> std::io::Result<(Arc<Self>, Receiver<Command<D>>)> {
        let (sender, receiver) = sync_channel(MAILBOX_COMMANDS);
        let flags = rustix::event::EventfdFlags::CLOEXEC | rustix::event::EventfdFlags::NONBLOCK;
        let wake = rustix::event::eventfd(0, flags)?;
        let port = Self {
            sender,
            pending: AtomicBool::new(false),
            wake,
            load: AtomicUsize::new(0),
        };
        Ok((Arc::new(port), receiver))
    }

    pub(super) fn send(&self, command: Command<D>) -> Result<(), QueueError> {
        self.sender
            .send(command)
            .map_err(|_| QueueError::ThreadGone)?;
        self.pending.store(true, Ordering::Release);
        notify(&self.wake);
        Ok(())
    }

    /// Sends a ping without waiting for room in the mailbox. A full one counts as no answer: the thread has
    /// not looked at it for long.
    pub(super) fn ping(&self) -> Ping {
        let (reply, answer) = sync_channel(1);
        let sent = self.sender.try_send(Command::Ping { reply }).is_ok();
        if sent {
            self.pending.store(true, Ordering::Release);
            notify(&self.wake);
        }
        Ping(sent.then_some(answer))
    }

    /// Whether commands wait.
    #[inline(always)]
    pub(super) fn pending(&self) -> bool {
        self.pending.load(Ordering::Relaxed)
    }

    /// The thread is about to empty the channel.
    pub(super) fn begin(&self) {
        self.pending.swap(false, Ordering::AcqRel);
    }

    pub(super) fn wake_fd(&self) -> &OwnedFd {
        &self.wake
    }

    pub(super) fn load(&self) -> usize {
        self.load.load(Ordering::Relaxed)
    }

    fn ask<T>(&self, command: impl FnOnce(Reply<T>) -> Command<D>) -> Result<T, QueueError> {
        let (reply, answer) = sync_channel(1);
        self.send(command(reply))?;
        answer.recv().map_err(|_| QueueError::ThreadGone)?
    }
}

/// A question to a data thread whether its loop still turns.
#[derive(Debug)]
pub struct Ping(Option<Receiver<Result<(), QueueError>>>);

impl Ping {
    /// Whether the thread has answered by now. Never waits; an answer is told once.
    #[must_use]
    pub fn is_answered(&self) -> bool {
        self.0
            .as_ref()
            .is_some_and(|answer| answer.try_recv().is_ok())
    }
}

/// Writes an event descriptor. It can only refuse when its counter is full, and then the reader is awake
/// already.
pub(super) fn notify(fd: &OwnedFd) {
    let _ = rustix::io::write(fd, &1u64.to_ne_bytes());
}

/// A queue that is being served. Only its call and error descriptors can change meanwhile; for anything else
/// it is stopped and started again. Every call waits for the answer of its data thread. Dropping the handle
/// stops the queue without waiting.
#[derive(Debug)]
pub struct QueueHandle<D> {
    port: Arc<Port<D>>,
    id: QueueId,
    stopped: bool,
}

impl<D: Device> QueueHandle<D> {
    pub(super) fn start(
        port: &Arc<Port<D>>,
        device: &Arc<D>,
        config: QueueConfig,
    ) -> Result<Self, QueueError> {
        if config.index >= device.queues() {
            return Err(QueueError::Index {
                index: config.index,
                queues: device.queues(),
            });
        }
        let (device, config) = (Arc::clone(device), Box::new(config));
        port.load.fetch_add(1, Ordering::Relaxed);
        match port.ask(|reply| Command::Start {
            device,
            config,
            reply,
        }) {
            Ok(id) => Ok(Self {
                port: Arc::clone(port),
                id,
                stopped: false,
            }),
            Err(error) => {
                port.load.fetch_sub(1, Ordering::Relaxed);
                Err(error)
            }
        }
    }

    /// Takes no more requests, waits until those in flight are answered, and returns where to go on.
    pub fn stop(self) -> Result<u32, QueueError> {
        self.end(false)
    }

    /// Same, for a front end that has gone: of what an earlier daemon took, nothing more is begun. It stays
    /// in the record.
    pub fn abandon(self) -> Result<u32, QueueError> {
        self.end(true)
    }

    fn end(mut self, gone: bool) -> Result<u32, QueueError> {
        self.stopped = true;
        let outcome = self.port.ask(|reply| Command::Stop {
            id: self.id,
            gone,
            reply: Some(reply),
        });
        self.port.load.fetch_sub(1, Ordering::Relaxed);
        outcome
    }

    /// Replaces the call descriptor, and interrupts the guest once, since an answer may have been announced
    /// on the old.
    pub fn set_call(&self, call: Option<OwnedFd>) -> Result<(), QueueError> {
        self.change(Change::Call(call))
    }

    /// Replaces the error descriptor.
    pub fn set_err(&self, err: Option<OwnedFd>) -> Result<(), QueueError> {
        self.change(Change::Err(err))
    }

    fn change(&self, change: Change) -> Result<(), QueueError> {
        self.port.ask(|reply| Command::Change {
            id: self.id,
            change,
            reply,
        })
    }
}

impl<D> Drop for QueueHandle<D> {
    fn drop(&mut self) {
        if !self.stopped {
            self.port.load.fetch_sub(1, Ordering::Relaxed);
            // A thread that is gone has dropped the queue already.
            let _ = self.port.send(Command::Stop {
                id: self.id,
                gone: true,
                reply: None,
            });
        }
    }
}
