//! The store behind one data thread's replica machine.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use fabric_replication::replica::{StoreFailure, StoreKey, StorePort};
use fabric_types::Request;
use rustix::event::{EventfdFlags, eventfd};

use super::config::FabricError;
use super::shard_port::ShardPort;
use super::shared::{Lane, Shared};
use super::stores::HELD_MAX;

/// What a thread's requests end in.
pub enum StorePorts {
    /// Nothing is kept.
    Null(NullPort),
    /// Shards on devices.
    Shards(Box<ShardPort>),
}

/// Has done everything by the next look, and keeps nothing.
pub struct NullPort {
    done: VecDeque<StoreKey>,
    /// What was submitted, at the index of its key.
    requests: Box<[Request]>,
    /// Never readable: whoever has something done here looks before it sleeps.
    never: OwnedFd,
    _lane: Lane,
}

impl StorePorts {
    pub fn new(shared: &Arc<Shared>, lane: Lane) -> Result<Self, FabricError> {
        if let Some(stores) = &shared.stores {
            let groups = Arc::clone(&shared.cluster.groups);
            let port =
                ShardPort::new(Arc::clone(stores), Arc::clone(&shared.fences), groups, lane)?;
            return Ok(Self::Shards(Box::new(port)));
        }
        let never =
            eventfd(0, EventfdFlags::CLOEXEC).map_err(FabricError::os("create an eventfd"))?;
        Ok(Self::Null(NullPort {
            done: VecDeque::with_capacity(HELD_MAX as usize),
            requests: (0..HELD_MAX).map(|_| Request::NOTHING).collect(),
            never,
            _lane: lane,
        }))
    }

    /// Hands what was submitted to the devices.
    #[inline]
    pub fn kick(&mut self) {
        match self {
            Self::Null(_) => {}
            Self::Shards(port) => port.kick(),
        }
    }

    /// Takes in some of what the devices finished; tells whether there is more.
    #[inline]
    pub fn reap(&mut self) -> bool {
        match self {
            Self::Null(_) => false,
            Self::Shards(port) => port.reap(),
        }
    }

    /// Next finished operation.
    #[inline]
    pub fn next_completion(&mut self) -> Option<(StoreKey, Result<(), StoreFailure>)> {
        match self {
            Self::Null(port) => Some((port.done.pop_front()?, Ok(()))),
            Self::Shards(port) => port.next_completion(),
        }
    }

    /// What was submitted as `key`, which no other request has been given since.
    #[inline]
    pub fn request(&self, key: StoreKey) -> &Request {
        match self {
            Self::Null(port) => &port.requests[key.index() as usize],
            Self::Shards(port) => port.request(key),
        }
    }

    /// Whether devices owe answers, be it to other threads' requests.
    #[inline]
    pub fn awaits_devices(&self) -> bool {
        match self {
            Self::Null(_) => false,
            Self::Shards(port) => port.awaits_devices(),
        }
    }

    /// Whether `reap` is to be called although no device owes an answer.
    #[inline]
    pub fn must_look(&self) -> bool {
        match self {
            Self::Null(_) => false,
            Self::Shards(port) => port.must_look(),
        }
    }

    /// Waits for outstanding device requests without starting new ones.
    pub fn drain_completions(&mut self) {
        match self {
            Self::Null(_) => {}
            Self::Shards(port) => port.drain_completions(),
        }
    }

    /// Readable when `reap` has something to do.
    pub fn wait_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Null(port) => port.never.as_fd(),
            Self::Shards(port) => port.wait_fd(),
        }
    }
}

impl StorePort for StorePorts {
    #[inline]
    fn submit(&mut self, key: StoreKey, request: &Request) -> Option<Result<(), StoreFailure>> {
        match self {
            Self::Null(port) => {
                port.requests[key.index() as usize] = *request;
                port.done.push_back(key);
                None
            }
            Self::Shards(port) => port.submit(key, request),
        }
    }
}
