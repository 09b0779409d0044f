//! What of a range is there, what others read already, and what has to be read.

use futures_channel::oneshot::Receiver;
use namespace::BLOCK;

use super::pages::{Blocks, Run, Slice};
use super::shard::Known;
use super::{FilesystemData, PAGE_BYTES, PageKey, Span};
use crate::sync::lock;

/// A part of a range. The parts of a plan lie one behind the other.
pub(super) enum Step<'a> {
    Cached(Slice),
    /// To be read at once, and put by the claims.
    Read {
        span: Span,
        claims: Vec<Claim<'a>>,
    },
    /// Others read it. These end when they have.
    UnderWay {
        span: Span,
        ends: Vec<Receiver<()>>,
    },
}

/// Blocks of one page that only this claim's owner reads. Dropping it wakes who waits for them, whether they
/// were put or not.
pub(super) struct Claim<'a> {
    data: &'a FilesystemData,
    key: PageKey,
    id: u64,
    blocks: Blocks,
    /// Where they begin in the segment.
    address: u64,
}

impl Claim<'_> {
    /// Puts the blocks, out of bytes that were read from `address` on.
    pub(super) fn put(self, address: u64, bytes: &[u8], is_read: bool) {
        let at = (self.address - address) as usize;
        let run = Run::new(self.blocks, &bytes[at..at + self.blocks.bytes()]);
        let shard = self.data.cache.shard(&self.key);
        let displaced = lock(shard).put(self.key, run, is_read);
        drop(displaced);
    }
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        let shard = self.data.cache.shard(&self.key);
        let waiting = lock(shard).end_claim(self.key, self.id);
        for waiter in waiting {
            // One that is gone needs no waking.
            let _ = waiter.send(());
        }
    }
}

impl FilesystemData {
    /// Plans to read whole blocks, at most `read_max` bytes at once, and claims what has to be read.
    /// `is_read`: a guest reads them.
    pub(super) fn plan(&self, span: Span, is_read: bool, read_max: u64) -> Vec<Step<'_>> {
        let mut steps = Vec::new();
        if !self.is_on() {
            let claims = Vec::new();
            return vec![Step::Read { span, claims }];
        }
        for (key, wanted, at) in self.pages(span) {
            let known = lock(self.cache.shard(&key)).look(key, wanted, is_read);
            for (blocks, known) in known {
                let from = u64::from(blocks.first - wanted.first) * BLOCK;
                let span = Span {
                    address: span.address + at + from,
                    length: blocks.bytes() as u64,
                    ..span
                };
                self.add(&mut steps, (key, blocks), span, known, read_max);
            }
        }
        steps
    }

    /// Adds some blocks of a page to a plan.
    fn add<'a>(
        &'a self,
        steps: &mut Vec<Step<'a>>,
        (key, blocks): (PageKey, Blocks),
        span: Span,
        known: Known,
        read_max: u64,
    ) {
        match (known, steps.last_mut()) {
            (Known::Cached(slice), _) => steps.push(Step::Cached(slice)),
            (Known::UnderWay(end), Some(Step::UnderWay { span: last, ends })) => {
                last.length += span.length;
                ends.push(end);
            }
            (Known::UnderWay(end), _) => {
                let ends = vec![end];
                steps.push(Step::UnderWay { span, ends });
            }
            (Known::Claimed(id), last) => {
                let claim = Claim {
                    data: self,
                    key,
                    id,
                    blocks,
                    address: span.address,
                };
                match last {
                    Some(Step::Read { span: last, claims })
                        if last.length + span.length <= read_max =>
                    {
                        last.length += span.length;
                        claims.push(claim);
                    }
                    _ => {
                        let claims = vec![claim];
                        steps.push(Step::Read { span, claims });
                    }
                }
            }
        }
    }

    /// A range, if all of it is there.
    pub(super) fn cached(&self, span: Span) -> Option<Vec<Slice>> {
        let mut slices = Vec::with_capacity((span.length / PAGE_BYTES) as usize + 2);
        for (key, wanted, _) in self.pages(span) {
            slices.extend(lock(self.cache.shard(&key)).cached(key, wanted)?);
        }
        Some(slices)
    }
}
