//! One queue on its data thread: requests go to the service, replies to the guest. The hiprio queue and the
//! request queues are served alike.

use std::marker::PhantomData;
use std::sync::Arc;

use fabric_types::io::Tag;
use fuse_codec::{
    Agreed, Dialect, Errno, HEADER_BYTES, Header, Malformed, Negotiation, Offer, Operation,
    REPLY_HEADER_BYTES, Request, negotiate,
};
use vhost_backend::device::{DeviceQueue, Submitted};
use vhost_backend::latency::Timing;
use vhost_backend::ring::{Chain, RingError};

use crate::access::refusal;
use crate::counters::{LATENCY_CLASSES, OpClass, QueueCounters};
use crate::device::FsDevice;
use crate::engine::FsEngine;
use crate::pieces::{GuestData, Reader};
use crate::reply::Destination;
use crate::service::{FsRequest, Reply, Service, Submit};
use crate::session::SessionView;
use crate::slot::{FsSlot, Lists, Room};

/// A queue of a virtio-fs device whose requests are served by `S`.
pub struct FsQueue<S: Service> {
    device: Arc<FsDevice<S::Filesystem>>,
    index: u16,
    session: SessionView,
    lists: Lists,
    timing: Timing<LATENCY_CLASSES>,
    service: PhantomData<fn() -> S>,
}

impl<S: Service> DeviceQueue for FsQueue<S> {
    type Device = FsDevice<S::Filesystem>;
    type Engine = FsEngine<S>;
    type Request = FsSlot;

    fn start(device: &Arc<Self::Device>, index: u16, size: u16, features: u64) -> Self {
        device.queue_started(index, size, features);
        Self {
            timing: device.latency.timing(index, size),
            device: Arc::clone(device),
            index,
            session: SessionView::default(),
            lists: Lists::new(),
            service: PhantomData,
        }
    }

    /// What is malformed is answered by its error; only a chain without a header, which is nothing that could
    /// be answered, breaks the queue.
    unsafe fn submit(
        &mut self,
        engine: &mut FsEngine<S>,
        tag: Tag,
        chain: &mut Chain,
        slot: &mut FsSlot,
    ) -> Result<Submitted, RingError> {
        let FsEngine { service, control } = engine;
        // SAFETY: the pieces are mapped by the caller's promise.
        let header = unsafe { read_header(chain, control) }?;
        *slot = FsSlot {
            unique: header.unique,
            class: OpClass::of(header.opcode),
            taken: self.timing.taken(),
            has_reply: header.has_reply(),
            ..FsSlot::default()
        };
        // SAFETY: the same.
        let control = match unsafe { read_control(chain, &header, control) } {
            Ok(control) => control,
            Err(reason) => return Ok(self.refuse(chain, slot, reason.errno())),
        };
        let agreed = self.session.agreed(&self.device.session).copied();
        let dialect = agreed.map_or(Dialect::BEFORE_INIT, |agreed| agreed.dialect());
        let request = match Request::parse(control, dialect) {
            Ok(request) => request,
            Err(rejection) => return Ok(self.refuse(chain, slot, rejection.reason.errno())),
        };
        if chain.writable_bytes < request.reply_bytes_max() as u64 {
            return Ok(self.refuse(chain, slot, Errno::EIO));
        }
        match (&request.operation, agreed) {
            (Operation::Init(offer), _) => Ok(self.init(chain, slot, offer)),
            (_, None) => Ok(self.refuse(chain, slot, Errno::EIO)),
            (Operation::Destroy, Some(agreed)) => {
                // Linux syncs nothing when it unmounts: what the service has buffered is made durable first.
                slot.ends_session = true;
                let sync = Request {
                    header: request.header,
                    operation: Operation::Syncfs,
                };
                // SAFETY: the same.
                Ok(unsafe { self.serve(service, tag, chain, slot, &sync, &agreed) })
            }
            (operation, Some(agreed)) => {
                let read_only = self.device.options().read_only;
                if let Some(errno) = refusal(operation, read_only, &agreed) {
                    return Ok(self.answer_at_once(chain, slot, &Reply::Error(errno)));
                }
                // SAFETY: the same.
                Ok(unsafe { self.serve(service, tag, chain, slot, &request, &agreed) })
            }
        }
    }

    fn complete(&mut self, _tag: Tag, reply: Reply<'_>, slot: &mut FsSlot) -> Option<u32> {
        Some(self.answer(slot, &reply))
    }

    fn has_room(&self, engine: &FsEngine<S>) -> bool {
        self.lists.has_room() && engine.service.has_room(self.device.filesystem())
    }

    #[inline]
    fn taking(&mut self) {
        self.timing.take();
    }

    #[inline]
    fn published(&mut self, in_flight: usize) {
        self.timing.published(in_flight);
    }

    #[inline]
    fn set_in_flight(&mut self, requests: usize) {
        self.timing.set_in_flight(requests);
    }

    fn interrupted(&mut self) {
        self.counters().interrupted();
    }
}

impl<S: Service> FsQueue<S> {
    /// Asks the service. The chain's readable part is the payload of a WRITE alone.
    ///
    /// # Safety
    /// As for [`DeviceQueue::submit`].
    unsafe fn serve(
        &mut self,
        service: &mut S,
        tag: Tag,
        chain: &mut Chain,
        slot: &mut FsSlot,
        request: &Request<'_>,
        agreed: &Agreed,
    ) -> Submitted {
        let reply_bytes = match &request.operation {
            // The data are the service's to write.
            Operation::Read(read) => {
                slot.data_bytes = read.size as usize;
                REPLY_HEADER_BYTES
            }
            _ => request.reply_bytes_max(),
        };
        let Some(room) = Room::keep(&chain.writable, reply_bytes, &mut self.lists) else {
            return Submitted::Busy;
        };
        slot.room = room;
        let request = FsRequest {
            tag,
            header: request.header,
            operation: request.operation,
            agreed,
            read_only: self.device.options().read_only,
            // SAFETY: by the caller's promise.
            data: unsafe { data_of(chain, &request.operation) },
        };
        match service.submit(self.device.filesystem(), &request) {
            Submit::Done(reply) => Submitted::Done(self.answer(slot, &reply)),
            Submit::Pending => Submitted::Pending,
            Submit::Busy => {
                slot.room.give_back(&mut self.lists);
                Submitted::Busy
            }
        }
    }

    fn init(&mut self, chain: &Chain, slot: &FsSlot, offer: &Offer) -> Submitted {
        let written = match negotiate(offer, &self.device.wanted()) {
            Negotiation::Agreed(agreed) => {
                self.device.begin_session(agreed);
                // SAFETY: the pieces are mapped while the request is submitted.
                unsafe { destination(chain, slot).encode(|encoder| encoder.init(&agreed)) }
            }
            // SAFETY: the same.
            Negotiation::Again => unsafe {
                destination(chain, slot).encode(|encoder| encoder.init_version())
            },
            Negotiation::Refused(errno) => {
                return self.refuse(chain, slot, errno);
            }
        };
        self.counters().finished(slot.class);
        Submitted::Done(written.expect("room for the reply was made sure of"))
    }

    /// Answers what is no request of this device, or none that it can carry out now.
    #[cold]
    fn refuse(&mut self, chain: &Chain, slot: &FsSlot, errno: Errno) -> Submitted {
        tracing::debug!(queue = self.index, class = slot.class.name(), %errno, "request refused");
        self.counters().refused();
        if chain.writable_bytes < REPLY_HEADER_BYTES as u64 {
            self.counters().finished(slot.class);
            return Submitted::Done(0);
        }
        self.answer_at_once(chain, slot, &Reply::Error(errno))
    }

    /// Answers what the service is not asked about: an error, or that it is done.
    fn answer_at_once(&mut self, chain: &Chain, slot: &FsSlot, reply: &Reply<'_>) -> Submitted {
        self.count(slot, reply);
        if !slot.has_reply {
            return Submitted::Done(0);
        }
        // SAFETY: the pieces are mapped while the request is submitted.
        let written = unsafe { destination(chain, slot).write(reply) };
        Submitted::Done(written.expect("room for a header was made sure of"))
    }

    /// Answers what the service was asked about; returns how many bytes were written.
    #[inline]
    fn answer(&mut self, slot: &mut FsSlot, reply: &Reply<'_>) -> u32 {
        if slot.ends_session {
            self.device.end_session();
        }
        self.count(slot, reply);
        if let Some(class) = slot.class.latency_class() {
            self.timing.answered(class as usize, slot.taken);
        }
        if !slot.has_reply {
            return 0;
        }
        let destination = Destination {
            unique: slot.unique,
            pieces: slot.room.pieces(&self.lists),
            bytes: slot.room.bytes,
            data_bytes: slot.data_bytes,
        };
        // SAFETY: the pieces stay mapped until the request is answered.
        let written = unsafe { destination.write(reply) }.unwrap_or_else(|error| {
            tracing::error!(class = slot.class.name(), ?reply, %error, "a reply does not fit");
            // SAFETY: the same; there is room for a header.
            unsafe { destination.error(Errno::EIO) }
        });
        slot.room.give_back(&mut self.lists);
        written
    }

    #[inline]
    fn count(&self, slot: &FsSlot, reply: &Reply<'_>) {
        let counters = self.counters();
        counters.finished(slot.class);
        match *reply {
            Reply::Error(_) => counters.failed(slot.class),
            Reply::Data(bytes) => counters.read(bytes.into()),
            Reply::Written(bytes) if slot.class == OpClass::Write => counters.written(bytes.into()),
            _ => {}
        }
    }

    /// Lists that replies in many pieces have, which is none while no request is in flight.
    #[cfg(feature = "fuzzing")]
    pub(crate) fn lists_taken(&self) -> usize {
        self.lists.taken()
    }

    #[inline]
    fn counters(&self) -> &QueueCounters {
        self.device.counters_of(self.index)
    }
}

/// Takes the header off the readable part, to the begin of `control`. An error breaks the queue: there is
/// nobody to answer.
///
/// # Safety
/// The pieces of the chain are mapped.
#[inline]
unsafe fn read_header(chain: &mut Chain, control: &mut [u8]) -> Result<Header, RingError> {
    if chain.readable_bytes < HEADER_BYTES as u64 {
        return Err(RingError::Unanswerable("without a whole fuse_in_header"));
    }
    // SAFETY: by the caller's promise.
    unsafe { Reader::new(&mut chain.readable).copy(&mut control[..HEADER_BYTES]) };
    Header::parse(&control[..HEADER_BYTES])
        .map_err(|_| RingError::Unanswerable("of a machine with another byte order"))
}

/// Takes the rest of a request but for its payload off the readable part; gives all of it, with the header.
///
/// # Safety
/// The pieces of the chain are mapped.
#[inline]
unsafe fn read_control<'a>(
    chain: &mut Chain,
    header: &Header,
    control: &'a mut [u8],
) -> Result<&'a [u8], Malformed> {
    if u64::from(header.len) != chain.readable_bytes {
        return Err(Malformed::Length {
            header: header.len,
            given: chain.readable_bytes as usize,
        });
    }
    let control = &mut control[..header.control_bytes()?];
    // SAFETY: by the caller's promise.
    unsafe { Reader::new(&mut chain.readable).copy(&mut control[HEADER_BYTES..]) };
    Ok(control)
}

/// The data of an operation, of a chain from which its control bytes are taken.
///
/// # Safety
/// The pieces of the chain are mapped, and have as many bytes as the operation was checked for.
unsafe fn data_of<'a>(chain: &'a mut Chain, operation: &Operation<'_>) -> GuestData<'a> {
    let (pieces, bytes) = match operation {
        Operation::Write(write) => {
            let bytes = write.size as usize;
            (Reader::new(&mut chain.readable).rest(bytes), bytes)
        }
        Operation::Read(read) => {
            let mut reader = Reader::new(&mut chain.writable);
            reader.skip(REPLY_HEADER_BYTES);
            let bytes = read.size as usize;
            (reader.rest(bytes), bytes)
        }
        _ => return GuestData::NONE,
    };
    // SAFETY: by the caller's promise.
    unsafe { GuestData::new(pieces, bytes) }
}

/// All of a chain's writable part.
fn destination<'a>(chain: &'a Chain, slot: &FsSlot) -> Destination<'a> {
    Destination {
        unique: slot.unique,
        pieces: &chain.writable,
        bytes: usize::try_from(chain.writable_bytes).unwrap_or(usize::MAX),
        data_bytes: 0,
    }
}
