//! Reading segments through the cache.

use futures_channel::oneshot::Receiver;
use futures_util::future::{Either, join_all, select, try_join_all};
use namespace::SegmentId;

use super::CLAIM_WAIT;
use super::pages::Slice;
use super::plan::{Claim, Step};
use crate::backend::{Backend, DataError};
use crate::client::Client;

/// Bytes that are read ahead at once, so that the first of them are there soon.
const AHEAD_READ_MAX: u64 = 512 << 10;

/// Whole blocks of a segment that an extent names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Span {
    pub(crate) segment: SegmentId,
    pub(crate) address: u64,
    pub(crate) length: u64,
}

/// A part of what was to be read.
pub(crate) enum Fetched {
    Cached(Slice),
    Read(Vec<u8>),
}

impl Fetched {
    pub(crate) fn bytes(&self) -> &[u8] {
        match self {
            Self::Cached(slice) => slice.bytes(),
            Self::Read(bytes) => bytes,
        }
    }
}

/// What is cached of some spans; what is missing, nobody else reads meanwhile.
pub(crate) struct Fetch<'a> {
    /// The steps of each span, with the epoch to read it in.
    spans: Vec<(Vec<Step<'a>>, u64)>,
}

impl<B: Backend> Client<B> {
    /// Reads spans, each in the epoch of its extent: the parts of each, one behind the other.
    pub(crate) async fn fetch(
        &self,
        spans: &[(Span, u64)],
    ) -> Result<Vec<Vec<Fetched>>, DataError> {
        let plan = |(span, epoch): &(Span, u64)| (self.data.plan(*span, true, u64::MAX), *epoch);
        let fetch = Fetch {
            spans: spans.iter().map(plan).collect(),
        };
        let fetch = match fetch.cached() {
            Ok(cached) => {
                let bytes = spans.iter().map(|(span, _)| span.length).sum();
                self.counters.data_hit_bytes.add(bytes);
                return Ok(cached);
            }
            Err(fetch) => fetch,
        };
        let spans = fetch.spans.into_iter();
        let spans = spans.map(|(steps, epoch)| async move {
            let steps = steps.into_iter().map(|step| self.fetch_step(step, epoch));
            let parts = try_join_all(steps).await?;
            Ok(parts.into_iter().flatten().collect())
        });
        try_join_all(spans).await
    }

    async fn fetch_step(&self, step: Step<'_>, epoch: u64) -> Result<Vec<Fetched>, DataError> {
        match step {
            Step::Cached(slice) => {
                self.counters.data_hit_bytes.add(slice.bytes().len() as u64);
                Ok(vec![Fetched::Cached(slice)])
            }
            Step::Read { span, claims } => {
                self.counters.data_miss_bytes.add(span.length);
                let bytes = self.read_span(span, claims, epoch, true).await?;
                Ok(vec![Fetched::Read(bytes)])
            }
            Step::UnderWay { span, ends } => {
                self.await_claims(ends).await;
                if let Some(slices) = self.data.cached(span) {
                    self.counters.data_hit_bytes.add(span.length);
                    return Ok(slices.into_iter().map(Fetched::Cached).collect());
                }
                // It failed there, or is gone again, or takes long.
                self.counters.data_miss_bytes.add(span.length);
                let bytes = self.read_span(span, Vec::new(), epoch, true).await?;
                Ok(vec![Fetched::Read(bytes)])
            }
        }
    }

    /// Reads a span, and puts what is claimed of it.
    async fn read_span(
        &self,
        span: Span,
        claims: Vec<Claim<'_>>,
        epoch: u64,
        is_read: bool,
    ) -> Result<Vec<u8>, DataError> {
        let Span {
            segment,
            address,
            length,
        } = span;
        let read = self.backend.read_data(segment, address, length, epoch);
        let bytes = read.await?;
        if bytes.len() as u64 != length {
            return Err(DataError::Io);
        }
        for claim in claims {
            claim.put(address, &bytes, is_read);
        }
        Ok(bytes)
    }

    /// Waits for the ends of others' claims, for a bounded time.
    async fn await_claims(&self, ends: Vec<Receiver<()>>) {
        let patience = Box::pin(self.backend.sleep(CLAIM_WAIT));
        if let Either::Right(_) = select(join_all(ends), patience).await {
            tracing::debug!("another read of the same data takes long");
        }
    }

    /// Has spans in the cache. What others read already is left to them, and failures to whoever reads it.
    pub(super) async fn fetch_ahead(&self, spans: &[(Span, u64)]) {
        let reads = spans.iter().flat_map(|(span, epoch)| {
            let steps = self.data.plan(*span, false, AHEAD_READ_MAX).into_iter();
            steps.filter_map(move |step| match step {
                Step::Read { span, claims } => Some((span, claims, *epoch)),
                Step::Cached(_) | Step::UnderWay { .. } => None,
            })
        });
        let reads = reads.map(|(span, claims, epoch)| async move {
            if let Ok(bytes) = self.read_span(span, claims, epoch, false).await {
                self.counters.read_ahead_bytes.add(bytes.len() as u64);
            }
        });
        join_all(reads).await;
    }
}

impl<'a> Fetch<'a> {
    /// All of it, if all is cached.
    fn cached(self) -> Result<Vec<Vec<Fetched>>, Self> {
        let steps = self.spans.iter().flat_map(|(steps, _)| steps);
        if !steps.clone().all(|step| matches!(step, Step::Cached(_))) {
            return Err(self);
        }
        let spans = self.spans.into_iter().map(|(steps, _)| {
            let slices = steps.into_iter().filter_map(|step| match step {
                Step::Cached(slice) => Some(Fetched::Cached(slice)),
                _ => None,
            });
            slices.collect()
        });
        Ok(spans.collect())
    }
}
