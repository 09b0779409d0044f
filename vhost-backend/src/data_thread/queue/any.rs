//! A queue with either kind of ring. Which of the two it has is asked once per turn of the thread, not once
//! per request.

use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use fabric_types::io::Tag;
use virtio_bindings::virtio_config::VIRTIO_F_RING_PACKED;
use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};

use super::{Parts, Queue, Schedule, Scratch};
use crate::data_thread::handle::{Change, QueueId};
use crate::data_thread::{QueueConfig, QueueError};
use crate::device::{Device, DeviceEngine, DeviceQueue};
use crate::inflight::{InflightQueue, InflightRecord, PackedInflight};
use crate::memory::MemoryView;
use crate::ring::{PackedRing, PackedRingConfig, Ring, SplitRing, SplitRingConfig};

/// A queue of one device.
pub(crate) enum AnyQueue<Q: DeviceQueue> {
    Split(Queue<Q, SplitRing>),
    Packed(Queue<Q, PackedRing>),
}

macro_rules! each {
    ($queue:expr, $it:ident => $does:expr) => {
        match $queue {
            AnyQueue::Split($it) => $does,
            AnyQueue::Packed($it) => $does,
        }
    };
}

impl<Q: DeviceQueue> AnyQueue<Q> {
    /// A queue with the kind of ring that the driver chose; `id` is its name on the thread.
    pub(crate) fn new(
        device: &Arc<Q::Device>,
        mut config: QueueConfig,
        id: QueueId,
    ) -> Result<Self, QueueError> {
        if config.index >= device.queues() {
            return Err(QueueError::Index {
                index: config.index,
                queues: device.queues(),
            });
        }
        let packed = config.features & 1 << VIRTIO_F_RING_PACKED != 0;
        match (packed, config.inflight.take()) {
            (false, None) => Self::split(device, config, id, None),
            (false, Some(InflightRecord::Split(record))) => {
                Self::split(device, config, id, Some(record))
            }
            (true, None) => Self::packed(device, config, id, None),
            (true, Some(InflightRecord::Packed(record))) => {
                Self::packed(device, config, id, Some(record))
            }
            _ => Err(QueueError::InflightLayout),
        }
    }

    fn split(
        device: &Arc<Q::Device>,
        config: QueueConfig,
        id: QueueId,
        mut inflight: Option<InflightQueue>,
    ) -> Result<Self, QueueError> {
        check_size(inflight.as_ref().map(InflightQueue::size), config.size)?;
        let mut view = MemoryView::new(Arc::clone(&config.memory));
        let ring_config = SplitRingConfig {
            size: config.size,
            desc: config.desc,
            avail: config.avail,
            used: config.used,
            event_idx: config.has(VIRTIO_RING_F_EVENT_IDX),
            indirect: config.has(VIRTIO_RING_F_INDIRECT_DESC),
        };
        // The session lets no larger one in.
        let mut ring = SplitRing::new(ring_config, config.base as u16, &mut view)?;
        let mut replay = Vec::new();
        if let Some(record) = &mut inflight {
            let recovery = record.recover(ring.next_used(), config.size);
            ring.set_next_available(recovery.next_avail);
            replay = recovery.heads;
        }
        let parts = Parts {
            device: Q::start(device, config.index, config.size, config.features),
            view,
            id,
            inflight,
            replay,
        };
        Ok(Self::Split(Queue::with_ring(ring, config, parts)))
    }

    fn packed(
        device: &Arc<Q::Device>,
        config: QueueConfig,
        id: QueueId,
        record: Option<PackedInflight>,
    ) -> Result<Self, QueueError> {
        check_size(record.as_ref().map(PackedInflight::size), config.size)?;
        let mut view = MemoryView::new(Arc::clone(&config.memory));
        let ring_config = PackedRingConfig {
            size: config.size,
            desc: config.desc,
            driver: config.avail,
            device: config.used,
            event_idx: config.has(VIRTIO_RING_F_EVENT_IDX),
            indirect: config.has(VIRTIO_RING_F_INDIRECT_DESC),
        };
        let (ring, replay) = PackedRing::new(ring_config, config.base, record, &mut view)?;
        let parts = Parts {
            device: Q::start(device, config.index, config.size, config.features),
            view,
            id,
            inflight: None,
            replay,
        };
        Ok(Self::Packed(Queue::with_ring(ring, config, parts)))
    }

    #[inline(always)]
    pub(crate) fn poll(&mut self, engine: &mut Q::Engine, scratch: &mut Scratch) -> usize {
        match self {
            Self::Split(queue) => queue.poll(engine, scratch),
            Self::Packed(queue) => poll_packed(queue, engine, scratch),
        }
    }

    #[inline(always)]
    pub(crate) fn complete(
        &mut self,
        tag: Tag,
        outcome: <Q::Engine as DeviceEngine>::Outcome<'_>,
        scratch: &mut Scratch,
    ) {
        each!(self, queue => queue.complete(tag, outcome, scratch));
    }

    #[inline(always)]
    pub(crate) fn unpublished(&self) -> u16 {
        each!(self, queue => queue.unpublished())
    }

    #[inline(always)]
    pub(crate) fn publish(&mut self) {
        each!(self, queue => queue.publish());
    }

    #[inline(always)]
    pub(crate) fn signal(&mut self) {
        each!(self, queue => queue.signal());
    }

    pub(crate) fn running(&self) -> bool {
        each!(self, queue => queue.running())
    }

    pub(crate) fn drained(&self) -> bool {
        each!(self, queue => queue.drained())
    }

    pub(crate) fn stalled(&self) -> bool {
        each!(self, queue => queue.stalled())
    }

    pub(crate) fn stop_taking(&mut self, gone: bool) {
        each!(self, queue => queue.stop_taking(gone));
    }

    pub(crate) fn arm(&mut self) -> bool {
        each!(self, queue => queue.arm())
    }

    pub(crate) fn disarm(&mut self) {
        each!(self, queue => queue.disarm());
    }

    pub(crate) fn change(&mut self, change: Change) {
        each!(self, queue => queue.change(change));
    }

    pub(crate) fn close(&mut self) -> u32 {
        each!(self, queue => queue.close())
    }
}

/// Out of line, so that the way of split rings stays as short as it is without.
#[inline(never)]
fn poll_packed<Q: DeviceQueue>(
    queue: &mut Queue<Q, PackedRing>,
    engine: &mut Q::Engine,
    scratch: &mut Scratch,
) -> usize {
    queue.poll(engine, scratch)
}

impl<Q: DeviceQueue> Deref for AnyQueue<Q> {
    type Target = Schedule;

    #[inline(always)]
    fn deref(&self) -> &Schedule {
        each!(self, queue => &queue.schedule)
    }
}

impl<Q: DeviceQueue> DerefMut for AnyQueue<Q> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut Schedule {
        each!(self, queue => &mut queue.schedule)
    }
}

impl QueueConfig {
    fn has(&self, bit: u32) -> bool {
        self.features & 1 << bit != 0
    }
}

fn check_size(record: Option<u16>, size: u16) -> Result<(), QueueError> {
    match record {
        Some(record) if record < size => Err(QueueError::InflightSize { record, size }),
        _ => Ok(()),
    }
}
