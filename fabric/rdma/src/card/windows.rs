//! The windows of a queue pair: taken in turn, bound with the next flush, and closed one by the peer, the
//! rest by us.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use fabric_transport::queue_pair::pair::Reach;

use super::CardError;
use crate::verbs::address::RemoteKey;
use crate::verbs::memory::{Access, MemoryRegion, ProtectionDomain};
use crate::verbs::post::SendChain;
use crate::verbs::queue_pair::QueuePair;
use crate::verbs::window::{Bind, MemoryWindow};

/// Binds of a flush that need no allocation.
const BINDS_USUAL: usize = 32;

/// A window that is bound with the next flush.
struct Pending {
    window: MemoryWindow,
    region: Arc<MemoryRegion>,
    range: Range<usize>,
    access: Access,
    token: u32,
}

/// See the module.
pub struct Windows {
    free: VecDeque<MemoryWindow>,
    pending: Vec<Pending>,
    /// Bound, by their token; the first of each is closed by the peer.
    bound: Vec<Vec<MemoryWindow>>,
    /// Closings that have yet to be posted: what is bound or pending, but for the first of each token.
    owed: usize,
}

impl Windows {
    /// So many.
    pub fn new(domain: &ProtectionDomain, count: usize) -> Result<Self, CardError> {
        let windows = (0..count).map(|_| MemoryWindow::new(domain));
        Ok(Self {
            free: windows.collect::<Result<_, _>>()?,
            pending: Vec::with_capacity(count),
            bound: Vec::new(),
            owed: 0,
        })
    }

    /// Those that are free.
    pub fn free(&self) -> usize {
        self.free.len()
    }

    /// Work requests that they are still to cost.
    pub fn owed(&self) -> usize {
        self.pending.len() + self.owed
    }

    /// Takes one to be bound, if there is one: its key.
    pub fn open(
        &mut self,
        region: Arc<MemoryRegion>,
        range: Range<usize>,
        reach: Reach,
        token: u32,
        is_first: bool,
    ) -> Option<RemoteKey> {
        let window = self.free.pop_front()?;
        let key = window.key_to_be();
        self.owed += usize::from(!is_first);
        self.pending.push(Pending {
            window,
            region,
            range,
            access: match reach {
                Reach::Read => Access::REMOTE_READ,
                Reach::Write => Access::REMOTE_WRITE,
            },
            token,
        });
        Some(key)
    }

    /// Posts what is pending, and then the chain. `number` gives each binding the number of its completion.
    pub fn post(
        &mut self,
        pair: &Arc<QueuePair>,
        chain: &mut SendChain,
        mut number: impl FnMut() -> u64,
    ) -> Result<(), CardError> {
        if self.pending.is_empty() {
            return Ok(pair.post(chain)?);
        }
        let mut binds: smallvec::SmallVec<[Bind<'_>; BINDS_USUAL]> = smallvec::SmallVec::new();
        for pending in &mut self.pending {
            let range = pending.range.clone();
            let bind = pending
                .window
                .bind(number(), &pending.region, range, pending.access);
            binds.push(bind?);
        }
        pair.post_bound(&mut binds, chain)?;
        drop(binds);
        for pending in self.pending.drain(..) {
            let token = pending.token as usize;
            if self.bound.len() <= token {
                self.bound.resize_with(token + 1, Vec::new);
            }
            self.bound[token].push(pending.window);
        }
        Ok(())
    }

    /// The first window of a token and the others, if there is such a token.
    pub fn of(&self, token: u32) -> Option<(RemoteKey, impl Iterator<Item = RemoteKey> + '_)> {
        let (first, others) = self.bound.get(token as usize)?.split_first()?;
        Some((first.key(), others.iter().map(MemoryWindow::key)))
    }

    /// Closings of a token's windows, but for the first, were posted.
    pub fn closing(&mut self, token: u32) {
        self.owed -= self.bound[token as usize].len() - 1;
    }

    /// A token's windows are closed, and free again.
    ///
    /// # Safety
    /// They are: the peer's message has closed the first, and our work requests for the others have
    /// succeeded.
    pub unsafe fn closed(&mut self, token: u32) {
        let Some(bound) = self.bound.get_mut(token as usize) else {
            return;
        };
        for mut window in bound.drain(..) {
            // SAFETY: the caller's promise.
            unsafe { window.invalidated() };
            self.free.push_back(window);
        }
    }
}
