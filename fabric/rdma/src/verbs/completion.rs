//! Completion queues, and the channels that tell of them.

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::{fmt, io};

use rdma_sys::{
    ibv_ack_cq_events, ibv_comp_channel, ibv_cq, ibv_create_comp_channel, ibv_create_cq,
    ibv_destroy_comp_channel, ibv_destroy_cq, ibv_get_cq_event, ibv_poll_cq, ibv_req_notify_cq,
    ibv_wc, ibv_wc_flags, imm_data_invalidated_rkey_union_t,
};

use super::address::{QpNumber, RemoteKey};
use super::context::{Context, set_nonblocking};
use super::error::{Operation, VerbsError, log_destroyed};
use super::status::{Done, Status};

/// Events of a queue that are acknowledged together: that takes a lock of the library.
const ACKNOWLEDGED_TOGETHER: u32 = 64;
/// Set in the count of a queue's events when it is being destroyed.
const DESTROYED: u32 = 1 << 31;

/// Tells of completions through a descriptor.
#[derive(Debug)]
pub struct CompletionChannel {
    raw: *mut ibv_comp_channel,
    context: Context,
}

// SAFETY: the library's objects may be used by all threads at once; it locks where that is needed.
unsafe impl Send for CompletionChannel {}
// SAFETY: as above.
unsafe impl Sync for CompletionChannel {}

impl Drop for CompletionChannel {
    fn drop(&mut self) {
        // SAFETY: made by us, and queues that tell of their completions through it held it, so none is left.
        let code = unsafe { ibv_destroy_comp_channel(self.raw) };
        log_destroyed("completion channel", self.context.name(), code);
    }
}

impl CompletionChannel {
    /// A channel for any number of queues of one device.
    pub fn new(context: &Context) -> Result<Self, VerbsError> {
        // SAFETY: the context is open.
        let raw = unsafe { ibv_create_comp_channel(context.raw()) };
        if raw.is_null() {
            return Err(VerbsError::last(Operation::MakeChannel, context.name()));
        }
        let context = context.clone();
        let channel = Self { raw, context };
        set_nonblocking(channel.fd()).map_err(|error| {
            VerbsError::from_io(Operation::MakeChannel, channel.context.name(), error)
        })?;
        Ok(channel)
    }

    /// Becomes readable when there are events.
    pub fn fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor is open as long as the channel is there.
        unsafe { BorrowedFd::borrow_raw((*self.raw).fd) }
    }

    /// Takes the next event, if there is one: the token of a queue that has completions, and tells of no more
    /// until it is armed again.
    pub fn next_event(&self) -> Result<Option<u64>, VerbsError> {
        let mut queue = std::ptr::null_mut();
        let mut of_queue = std::ptr::null_mut();
        // SAFETY: the channel is there; its descriptor does not block.
        if unsafe { ibv_get_cq_event(self.raw, &mut queue, &mut of_queue) } != 0 {
            let source = io::Error::last_os_error();
            // Common, and no reason to allocate.
            if source.kind() == io::ErrorKind::WouldBlock {
                return Ok(None);
            }
            let operation = Operation::TakeCompletionEvent;
            return Err(VerbsError::from_io(operation, self.context.name(), source));
        }
        // SAFETY: all queues on our channels were made with this. The library does not destroy a queue before
        // each event that was taken is acknowledged, and this one is not yet.
        let events = unsafe { &*of_queue.cast_const().cast::<Events>() };
        let token = events.token;
        if events.unacknowledged.fetch_add(1, Ordering::SeqCst) & DESTROYED != 0 {
            // Whoever destroys the queue has acknowledged what was counted before, and waits for this one.
            // SAFETY: as above; from here on neither queue nor events are touched.
            unsafe { ibv_ack_cq_events(queue, 1) };
        }
        Ok(Some(token))
    }
}

/// What an event leads to.
#[derive(Debug)]
struct Events {
    token: u64,
    /// Taken and not acknowledged, and [`DESTROYED`].
    unacknowledged: AtomicU32,
}

/// The token of a queue of ours.
///
/// # Safety
/// The queue must be one that we made, and not be destroyed.
pub(super) unsafe fn token(queue: *const ibv_cq) -> u64 {
    // SAFETY: the caller's promise; all our queues were made with this.
    unsafe { (*(*queue).cq_context.cast_const().cast::<Events>()).token }
}

/// Where completions arrive.
#[derive(Debug)]
pub struct CompletionQueue {
    raw: *mut ibv_cq,
    events: Arc<Events>,
    channel: Option<Arc<CompletionChannel>>,
    context: Context,
}

// SAFETY: as for the channel.
unsafe impl Send for CompletionQueue {}
// SAFETY: as above.
unsafe impl Sync for CompletionQueue {}

impl Drop for CompletionQueue {
    fn drop(&mut self) {
        let left = self.events.unacknowledged.swap(DESTROYED, Ordering::SeqCst);
        // SAFETY: the queue is there, and has given out so many events.
        unsafe { ibv_ack_cq_events(self.raw, left) };
        // SAFETY: made by us, and queue pairs that complete here held it, so none is left. It waits for
        // events that another thread is just taking.
        let code = unsafe { ibv_destroy_cq(self.raw) };
        log_destroyed("completion queue", self.context.name(), code);
        if code != 0 {
            // It is there still, and its next event names them.
            let _: *const Events = Arc::into_raw(Arc::clone(&self.events));
        }
    }
}

impl CompletionQueue {
    /// A queue for `entries` completions at least, which tells of them through `channel` when it is armed;
    /// `token` says of whom events speak. More completions than it has room for break it, and its queue
    /// pairs.
    pub fn new(
        context: &Context,
        entries: u32,
        channel: Option<&Arc<CompletionChannel>>,
        token: u64,
    ) -> Result<Self, VerbsError> {
        let events = Arc::new(Events {
            token,
            unacknowledged: AtomicU32::new(0),
        });
        let raw_channel = channel.map_or(std::ptr::null_mut(), |channel| channel.raw);
        if channel.is_some_and(|channel| !channel.context.is_same(context)) {
            let operation = Operation::MakeCompletionQueue;
            return Err(VerbsError::returned(
                operation,
                context.name(),
                libc::EINVAL,
            ));
        }
        // SAFETY: context and channel are there and of one device, and the channel's queues hold it; `events`
        // stays where it is as long as the queue.
        let raw = unsafe {
            ibv_create_cq(
                context.raw(),
                i32::try_from(entries).unwrap_or(i32::MAX),
                Arc::as_ptr(&events).cast_mut().cast(),
                raw_channel,
                0,
            )
        };
        if raw.is_null() {
            let operation = Operation::MakeCompletionQueue;
            return Err(VerbsError::last(operation, context.name()));
        }
        Ok(Self {
            raw,
            events,
            channel: channel.cloned(),
            context: context.clone(),
        })
    }

    /// The room that the device made.
    pub fn entries(&self) -> u32 {
        // SAFETY: the queue is there, and its size does not change.
        u32::try_from(unsafe { (*self.raw).cqe }).unwrap_or(0)
    }

    /// Asks for an event when the next completion arrives. One that has arrived meanwhile makes none, so poll
    /// after this.
    pub fn arm(&self) -> Result<(), VerbsError> {
        self.acknowledge();
        // SAFETY: the queue is there.
        let code = unsafe { ibv_req_notify_cq(self.raw, 0) };
        if code != 0 {
            let name = self.context.name();
            return Err(VerbsError::returned(Operation::Arm, name, code));
        }
        Ok(())
    }

    /// Acknowledges events that were taken, if there are enough for it to be worth a lock. Nobody can be
    /// destroying the queue.
    fn acknowledge(&self) {
        let events = &self.events.unacknowledged;
        if events.load(Ordering::Relaxed) >= ACKNOWLEDGED_TOGETHER {
            let taken = events.swap(0, Ordering::SeqCst);
            // SAFETY: the queue is there, and has given out so many events.
            unsafe { ibv_ack_cq_events(self.raw, taken) };
        }
    }

    /// Takes completions, as many as there are and `completions` has room for; returns how many.
    pub fn poll(&self, completions: &mut [Completion]) -> Result<usize, VerbsError> {
        let room = i32::try_from(completions.len()).unwrap_or(i32::MAX);
        // SAFETY: the queue is there; a completion of ours is one of the library's, and it writes as many as
        // there is room for.
        let count = unsafe { ibv_poll_cq(self.raw, room, completions.as_mut_ptr().cast()) };
        let count = usize::try_from(count)
            .map_err(|_| VerbsError::returned(Operation::Poll, self.context.name(), count))?;
        if self.context.is_rxe() {
            completions[..count]
                .iter_mut()
                .for_each(Completion::correct_flags_of_rxe);
        }
        Ok(count)
    }

    /// The channel that tells of its completions.
    pub fn channel(&self) -> Option<&Arc<CompletionChannel>> {
        self.channel.as_ref()
    }

    pub(super) fn context(&self) -> &Context {
        &self.context
    }

    pub(super) fn raw(&self) -> *mut ibv_cq {
        self.raw
    }
}

/// How one work request ended.
#[repr(transparent)]
pub struct Completion(ibv_wc);

impl Completion {
    /// Room for one, to be polled into.
    pub const EMPTY: Self = Self(ibv_wc {
        wr_id: 0,
        status: 0,
        opcode: 0,
        vendor_err: 0,
        byte_len: 0,
        imm_data_invalidated_rkey_union: imm_data_invalidated_rkey_union_t { imm_data: 0 },
        qp_num: 0,
        src_qp: 0,
        wc_flags: 0,
        pkey_index: 0,
        slid: 0,
        sl: 0,
        dlid_path_bits: 0,
    });

    /// Room for some.
    pub const fn room<const N: usize>() -> [Self; N] {
        [const { Self::EMPTY }; N]
    }

    /// The number that the work request was posted with.
    pub fn id(&self) -> u64 {
        self.0.wr_id
    }

    /// How it ended.
    pub fn status(&self) -> Status {
        Status::from_code(self.0.status)
    }

    /// What the device's maker says of an error.
    pub fn vendor_error(&self) -> u32 {
        self.0.vendor_err
    }

    /// The queue pair that it was posted on.
    pub fn queue_pair(&self) -> QpNumber {
        QpNumber(self.0.qp_num)
    }

    /// What succeeded; nothing is told of what failed.
    pub fn done(&self) -> Option<Done> {
        (self.status() == Status::Success).then(|| Done::from_code(self.0.opcode))
    }

    /// Bytes that arrived, for receives and READs.
    pub fn bytes(&self) -> u32 {
        self.0.byte_len
    }

    /// The number that came with a message.
    pub fn immediate(&self) -> Option<u32> {
        // SAFETY: both members are numbers of the same size.
        let number = unsafe { self.0.imm_data_invalidated_rkey_union.imm_data };
        self.has(ibv_wc_flags::IBV_WC_WITH_IMM)
            .then_some(u32::from_be(number))
    }

    /// The key that the peer's message invalidated.
    pub fn invalidated(&self) -> Option<RemoteKey> {
        // SAFETY: both members are numbers of the same size.
        let key = unsafe { self.0.imm_data_invalidated_rkey_union.invalidated_rkey };
        self.has(ibv_wc_flags::IBV_WC_WITH_INV)
            .then_some(RemoteKey(key))
    }

    /// rxe gives programs the kernel's own flags, in which the bit for an invalidated key is the one that
    /// means a good checksum here; that is told of datagrams only, which we do not receive.
    fn correct_flags_of_rxe(&mut self) {
        let kernels = ibv_wc_flags::IBV_WC_IP_CSUM_OK.0;
        if self.0.wc_flags & kernels != 0 {
            self.0.wc_flags = self.0.wc_flags & !kernels | ibv_wc_flags::IBV_WC_WITH_INV.0;
        }
    }

    fn has(&self, flag: ibv_wc_flags) -> bool {
        self.status() == Status::Success && self.0.wc_flags & flag.0 != 0
    }
}

impl fmt::Debug for Completion {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("Completion")
            .field("id", &self.id())
            .field("status", &self.status())
            .field("done", &self.done())
            .field("bytes", &self.bytes())
            .field("queue_pair", &self.queue_pair().0)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_of_rxe_mean_an_invalidated_key() {
        let mut completion = Completion::EMPTY;
        completion.0.wc_flags = 0b101;
        completion.0.imm_data_invalidated_rkey_union = imm_data_invalidated_rkey_union_t {
            invalidated_rkey: 77,
        };
        assert_eq!(completion.invalidated(), None);
        completion.correct_flags_of_rxe();
        assert_eq!(completion.invalidated(), Some(RemoteKey(77)));
        assert_eq!(completion.immediate(), None);
        // What did not succeed tells nothing.
        completion.0.status = Status::Flushed.code();
        assert_eq!((completion.invalidated(), completion.done()), (None, None));
    }
}
