//! Reliable connections.

use std::sync::Arc;

use rdma_sys::{
    ibv_ah_attr, ibv_create_qp, ibv_destroy_qp, ibv_gid, ibv_global_route, ibv_modify_qp,
    ibv_post_recv, ibv_post_send, ibv_qp, ibv_qp_attr, ibv_qp_attr_mask as mask, ibv_qp_cap,
    ibv_qp_init_attr, ibv_qp_state, ibv_qp_type, ibv_query_qp, ibv_send_wr,
};

use super::address::{AckTimeout, Endpoint, GidIndex, Mtu, PortNumber, Psn, QpNumber};
use super::completion::CompletionQueue;
use super::error::{Operation, VerbsError, log_destroyed};
use super::memory::{Access, ProtectionDomain};
use super::post::{ChainShape, ReceiveChain, SendChain};
use super::window::Bind;

/// Routers that a packet may pass.
const HOPS_MAX: u8 = 64;

/// Room in the queues of a queue pair. A device may make more of it than was asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Depths {
    /// Work requests that are posted and not known to be done. Those without a completion count until a later
    /// one has completed.
    pub sends: u32,
    /// Receives that are posted.
    pub receives: u32,
    /// Segments of a work request.
    pub send_segments: u32,
    /// Segments of a receive.
    pub receive_segments: u32,
    /// Bytes of a work request that are copied when it is posted.
    pub inline_bytes: u32,
}

/// How a queue pair behaves when the peer does not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RetryPolicy {
    /// How long to wait for an acknowledgement.
    pub timeout: AckTimeout,
    /// How often to send again after that, 7 at most; then the connection is in error.
    pub retries: u8,
    /// How often to send again a message for which the peer had no receive, 6 at most; 7 is for ever. With 0
    /// the first one ends the connection, which suits a protocol that never sends more than the peer has said
    /// it has room for.
    pub receiver_not_ready_retries: u8,
}

/// Which way packets go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Route {
    /// Our port.
    pub port: PortNumber,
    /// The entry of our port's table of GIDs that the peer answers to.
    pub gid: GidIndex,
    /// How routers and switches sort the packets.
    pub traffic_class: u8,
    /// How an InfiniBand subnet sorts them.
    pub service_level: u8,
}

/// Where a queue pair stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// Just made.
    Reset,
    /// It takes receives.
    Init,
    /// It receives.
    ReadyToReceive,
    /// It sends, too.
    ReadyToSend,
    /// It is about to send no more.
    Draining,
    /// What it was sending failed, and it sends no more.
    SendError,
    /// All that is posted ends as flushed.
    Error,
    /// The device tells a state that is none.
    Unknown,
}

impl State {
    fn from_code(code: u32) -> Self {
        match code {
            ibv_qp_state::IBV_QPS_RESET => Self::Reset,
            ibv_qp_state::IBV_QPS_INIT => Self::Init,
            ibv_qp_state::IBV_QPS_RTR => Self::ReadyToReceive,
            ibv_qp_state::IBV_QPS_RTS => Self::ReadyToSend,
            ibv_qp_state::IBV_QPS_SQD => Self::Draining,
            ibv_qp_state::IBV_QPS_SQE => Self::SendError,
            ibv_qp_state::IBV_QPS_ERR => Self::Error,
            _ => Self::Unknown,
        }
    }
}

/// Work requests were not all taken.
#[derive(Debug, thiserror::Error)]
#[error("{source} (after {taken} of them)")]
pub struct PostError {
    /// Those that were taken, from the first on. They are carried out.
    pub taken: usize,
    /// Why the next one was not.
    pub source: VerbsError,
}

/// One end of a reliable connection.
#[derive(Debug)]
pub struct QueuePair {
    raw: *mut ibv_qp,
    depths: Depths,
    domain: ProtectionDomain,
    _sends: Arc<CompletionQueue>,
    _receives: Arc<CompletionQueue>,
}

// SAFETY: the library's objects may be used by all threads at once; it locks where that is needed.
unsafe impl Send for QueuePair {}
// SAFETY: as above.
unsafe impl Sync for QueuePair {}

impl Drop for QueuePair {
    fn drop(&mut self) {
        // SAFETY: made by us, destroyed once. Windows that are bound to it held it, so none is left.
        let code = unsafe { ibv_destroy_qp(self.raw) };
        log_destroyed("queue pair", self.device(), code);
    }
}

impl QueuePair {
    /// A queue pair in the state [`State::Reset`], whose completions go to the two queues, which may be one.
    pub fn new(
        domain: &ProtectionDomain,
        sends: &Arc<CompletionQueue>,
        receives: &Arc<CompletionQueue>,
        wanted: Depths,
    ) -> Result<Self, VerbsError> {
        let mut attributes = ibv_qp_init_attr {
            qp_context: std::ptr::null_mut(),
            send_cq: sends.raw(),
            recv_cq: receives.raw(),
            srq: std::ptr::null_mut(),
            cap: ibv_qp_cap {
                max_send_wr: wanted.sends,
                max_recv_wr: wanted.receives,
                max_send_sge: wanted.send_segments,
                max_recv_sge: wanted.receive_segments,
                max_inline_data: wanted.inline_bytes,
            },
            qp_type: ibv_qp_type::IBV_QPT_RC,
            // Only what asks for it has a completion.
            sq_sig_all: 0,
        };
        let context = domain.context();
        if !(sends.context().is_same(context) && receives.context().is_same(context)) {
            let operation = Operation::MakeQueuePair;
            return Err(VerbsError::returned(
                operation,
                context.name(),
                libc::EINVAL,
            ));
        }
        // SAFETY: domain and queues are there and of one device, and the queue pair holds them.
        let raw = unsafe { ibv_create_qp(domain.raw(), &mut attributes) };
        if raw.is_null() {
            return Err(VerbsError::last(Operation::MakeQueuePair, context.name()));
        }
        Ok(Self {
            raw,
            depths: Depths {
                sends: attributes.cap.max_send_wr,
                receives: attributes.cap.max_recv_wr,
                send_segments: attributes.cap.max_send_sge,
                receive_segments: attributes.cap.max_recv_sge,
                inline_bytes: attributes.cap.max_inline_data,
            },
            domain: domain.clone(),
            _sends: Arc::clone(sends),
            _receives: Arc::clone(receives),
        })
    }

    fn device(&self) -> &str {
        self.domain.context().name()
    }

    /// Its number.
    pub fn number(&self) -> QpNumber {
        // SAFETY: the queue pair is there, and its number does not change.
        QpNumber(unsafe { (*self.raw).qp_num })
    }

    /// The room that the device made.
    pub fn depths(&self) -> Depths {
        self.depths
    }

    /// A chain for so many work requests, each as large as this queue pair takes them.
    pub fn send_chain(&self, requests: usize) -> SendChain {
        SendChain::new(ChainShape {
            requests,
            segments: self.depths.send_segments as usize,
            inline_bytes: self.depths.inline_bytes as usize,
        })
    }

    /// Begins to take receives. `access` is what the peer may do with keys that it has.
    pub fn init(&self, port: PortNumber, access: Access) -> Result<(), VerbsError> {
        let mut attributes = empty_attributes();
        attributes.qp_state = ibv_qp_state::IBV_QPS_INIT;
        attributes.port_num = port.0;
        attributes.qp_access_flags = access.bits();
        self.modify(
            attributes,
            mask::IBV_QP_STATE
                | mask::IBV_QP_PKEY_INDEX
                | mask::IBV_QP_PORT
                | mask::IBV_QP_ACCESS_FLAGS,
        )
    }

    /// Begins to receive from `peer`, with packets of `mtu`, which must be the same at both ends. It serves
    /// as many READs at once as `reads_served` says.
    pub fn ready_to_receive(
        &self,
        peer: &Endpoint,
        route: Route,
        mtu: Mtu,
        reads_served: u8,
    ) -> Result<(), VerbsError> {
        let mut attributes = empty_attributes();
        attributes.qp_state = ibv_qp_state::IBV_QPS_RTR;
        attributes.path_mtu = mtu.code();
        attributes.dest_qp_num = peer.queue_pair.0;
        attributes.rq_psn = peer.psn.get();
        attributes.max_dest_rd_atomic = reads_served;
        // How long the peer waits when we have no receive for it. It is told not to try again, so this says
        // nothing to it.
        attributes.min_rnr_timer = 1;
        attributes.ah_attr = address(peer, route);
        self.modify(
            attributes,
            mask::IBV_QP_STATE
                | mask::IBV_QP_AV
                | mask::IBV_QP_PATH_MTU
                | mask::IBV_QP_DEST_QPN
                | mask::IBV_QP_RQ_PSN
                | mask::IBV_QP_MAX_DEST_RD_ATOMIC
                | mask::IBV_QP_MIN_RNR_TIMER,
        )
    }

    /// Begins to send, from the packet `psn` on, with as many READs on their way as `reads_wanted` says, not
    /// more than the peer serves.
    pub fn ready_to_send(
        &self,
        psn: Psn,
        reads_wanted: u8,
        patience: RetryPolicy,
    ) -> Result<(), VerbsError> {
        let mut attributes = empty_attributes();
        attributes.qp_state = ibv_qp_state::IBV_QPS_RTS;
        attributes.sq_psn = psn.get();
        attributes.max_rd_atomic = reads_wanted;
        attributes.timeout = patience.timeout.code();
        attributes.retry_cnt = patience.retries;
        attributes.rnr_retry = patience.receiver_not_ready_retries;
        self.modify(
            attributes,
            mask::IBV_QP_STATE
                | mask::IBV_QP_SQ_PSN
                | mask::IBV_QP_MAX_QP_RD_ATOMIC
                | mask::IBV_QP_TIMEOUT
                | mask::IBV_QP_RETRY_CNT
                | mask::IBV_QP_RNR_RETRY,
        )
    }

    /// Ends the connection: all that is posted, and all that will be, ends as flushed.
    pub fn fail(&self) -> Result<(), VerbsError> {
        let mut attributes = empty_attributes();
        attributes.qp_state = ibv_qp_state::IBV_QPS_ERR;
        self.modify(attributes, mask::IBV_QP_STATE)
    }

    fn modify(&self, mut attributes: ibv_qp_attr, fields: mask) -> Result<(), VerbsError> {
        // SAFETY: the queue pair is there.
        let code = unsafe { ibv_modify_qp(self.raw, &mut attributes, fields.0 as i32) };
        if code != 0 {
            return Err(VerbsError::returned(Operation::Modify, self.device(), code));
        }
        Ok(())
    }

    /// Where it stands.
    pub fn state(&self) -> Result<State, VerbsError> {
        let mut attributes = empty_attributes();
        let mut made_with = ibv_qp_init_attr {
            qp_context: std::ptr::null_mut(),
            send_cq: std::ptr::null_mut(),
            recv_cq: std::ptr::null_mut(),
            srq: std::ptr::null_mut(),
            cap: attributes.cap,
            qp_type: ibv_qp_type::IBV_QPT_RC,
            sq_sig_all: 0,
        };
        let fields = mask::IBV_QP_STATE.0 as i32;
        // SAFETY: the queue pair is there; the library fills what it is given.
        let code = unsafe { ibv_query_qp(self.raw, &mut attributes, fields, &mut made_with) };
        if code != 0 {
            let operation = Operation::QueryQueuePair;
            return Err(VerbsError::returned(operation, self.device(), code));
        }
        Ok(State::from_code(attributes.qp_state))
    }

    /// Posts a chain, and empties it.
    pub fn post(&self, chain: &mut SendChain) -> Result<(), PostError> {
        let head = chain.link();
        if head.is_null() {
            return Ok(());
        }
        let taken = self.check_shape(chain).and_then(|()| {
            // SAFETY: a chain is linked, its segments and bytes lie within it, and it is not touched
            // meanwhile.
            unsafe { self.post_raw(head) }
        });
        let result = taken.map_err(|(bad, source)| PostError {
            taken: chain.index_of(bad).unwrap_or(0),
            source,
        });
        chain.clear();
        result
    }

    /// Posts `binds` and then the chain, all at once, and empties it: what opens memory, and the message that
    /// tells of it. An error counts the binds among what was taken.
    pub fn post_bound(
        self: &Arc<Self>,
        binds: &mut [Bind<'_>],
        chain: &mut SendChain,
    ) -> Result<(), PostError> {
        let mut head = chain.link();
        let checked = self.check_shape(chain).and_then(|()| {
            let ours = |bind: &Bind<'_>| bind.domain().is_same(&self.domain) && !bind.is_posted();
            binds
                .iter()
                .all(ours)
                .then_some(())
                .ok_or_else(|| self.unfit())
        });
        for bind in binds.iter_mut().rev() {
            let request = bind.request();
            request.next = head;
            head = request;
        }
        if head.is_null() {
            return Ok(());
        }
        let posted = checked.and_then(|()| {
            // SAFETY: as in `post`; windows and regions are of this queue pair's domain and borrowed by the
            // binds, and bound ones are held from then on.
            unsafe { self.post_raw(head) }
        });
        let result = posted.map_err(|(bad, source)| {
            let of_bind = binds
                .iter_mut()
                .position(|bind| std::ptr::eq(bind.request(), bad));
            let of_chain = || chain.index_of(bad).map(|index| binds.len() + index);
            PostError {
                taken: of_bind.or_else(of_chain).unwrap_or(0),
                source,
            }
        });
        chain.clear();
        let taken = result
            .as_ref()
            .err()
            .map_or(usize::MAX, |error| error.taken);
        for bind in binds.iter_mut().take(taken) {
            bind.posted(self);
        }
        result
    }

    /// A chain made for another queue pair may be larger than this one takes.
    fn check_shape(&self, chain: &SendChain) -> Result<(), (*const ibv_send_wr, VerbsError)> {
        let shape = chain.shape();
        if shape.segments <= self.depths.send_segments as usize
            && shape.inline_bytes <= self.depths.inline_bytes as usize
        {
            return Ok(());
        }
        Err(self.unfit())
    }

    fn unfit(&self) -> (*const ibv_send_wr, VerbsError) {
        let source = VerbsError::returned(Operation::PostSend, self.device(), libc::EINVAL);
        (std::ptr::null(), source)
    }

    /// # Safety
    /// The requests must be linked, and they, their segments and the bytes to be copied must be there until
    /// this returns.
    unsafe fn post_raw(
        &self,
        head: *mut ibv_send_wr,
    ) -> Result<(), (*const ibv_send_wr, VerbsError)> {
        let mut bad = std::ptr::null_mut();
        // SAFETY: the queue pair is there; the rest is the caller's promise. The library copies the requests.
        // Memory that they name by keys of regions is opened by whoever registered it.
        let code = unsafe { ibv_post_send(self.raw, head, &mut bad) };
        if code == 0 {
            return Ok(());
        }
        let source = VerbsError::returned(Operation::PostSend, self.device(), code);
        Err((bad, source))
    }

    /// Posts receives, and empties the chain.
    pub fn post_receives(&self, chain: &mut ReceiveChain) -> Result<(), PostError> {
        let head = chain.link();
        if head.is_null() {
            return Ok(());
        }
        let refused = |taken, code| PostError {
            taken,
            source: VerbsError::returned(Operation::PostReceive, self.device(), code),
        };
        if chain.segments() > self.depths.receive_segments as usize {
            chain.clear();
            return Err(refused(0, libc::EINVAL));
        }
        let mut bad = std::ptr::null_mut();
        // SAFETY: the queue pair is there; a chain is linked, its segments lie within it, and it is not
        // touched meanwhile.
        let code = unsafe { ibv_post_recv(self.raw, head, &mut bad) };
        let taken = chain.index_of(bad).unwrap_or(0);
        chain.clear();
        if code == 0 {
            return Ok(());
        }
        Err(refused(taken, code))
    }
}

fn address(peer: &Endpoint, route: Route) -> ibv_ah_attr {
    ibv_ah_attr {
        grh: ibv_global_route {
            dgid: ibv_gid {
                raw: peer.gid.bytes(),
            },
            flow_label: 0,
            sgid_index: route.gid.0,
            hop_limit: HOPS_MAX,
            traffic_class: route.traffic_class,
        },
        dlid: peer.lid.0,
        sl: route.service_level,
        src_path_bits: 0,
        static_rate: 0,
        is_global: 1,
        port_num: route.port.0,
    }
}

fn empty_attributes() -> ibv_qp_attr {
    // SAFETY: numbers, and GIDs, which are bytes: all zeros is a value.
    unsafe { std::mem::zeroed() }
}
