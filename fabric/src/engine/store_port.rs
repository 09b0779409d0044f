//! The store behind one data thread's replica machine.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::{EventfdFlags, eventfd};

use super::config::FabricError;
use super::shared::{Lane, Shared};
use crate::core::replica::{StoreFailure, StoreKey, StorePort};
use crate::proto::Request;

/// What a thread's requests end in.
pub enum StorePorts {
    /// Nothing is kept.
    Null(NullPort),
}

/// Answers everything at once and keeps nothing.
pub struct NullPort {
    /// Never readable: nothing ever completes later.
    never: OwnedFd,
    _lane: Lane,
}

impl StorePorts {
    pub fn new(_shared: &Shared, lane: Lane) -> Result<Self, FabricError> {
        let never = eventfd(0, EventfdFlags::CLOEXEC).map_err(|errno| FabricError::Os {
            what: "create an eventfd",
            source: errno.into(),
        })?;
        Ok(Self::Null(NullPort { never, _lane: lane }))
    }

    /// Hands what was submitted to the devices.
    #[inline]
    pub fn kick(&mut self) {
        match self {
            Self::Null(_) => {}
        }
    }

    /// Takes in what the devices finished.
    #[inline]
    pub fn reap(&mut self) {
        match self {
            Self::Null(_) => {}
        }
    }

    /// Next finished operation.
    #[inline]
    pub fn next_completion(&mut self) -> Option<(StoreKey, Result<(), StoreFailure>)> {
        match self {
            Self::Null(_) => None,
        }
    }

    /// Readable when `reap` has something to do.
    pub fn wait_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Null(port) => port.never.as_fd(),
        }
    }
}

impl StorePort for StorePorts {
    #[inline]
    fn submit(&mut self, _key: StoreKey, _request: &Request) -> Option<Result<(), StoreFailure>> {
        match self {
            Self::Null(_) => Some(Ok(())),
        }
    }
}
