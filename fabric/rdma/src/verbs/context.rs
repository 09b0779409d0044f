//! Opened devices: what they can do, their ports, and what they tell by themselves.

use std::ffi::CStr;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use rdma_sys::{
    _compat_ibv_port_attr, ibv_ack_async_event, ibv_async_event, ibv_atomic_cap, ibv_close_device,
    ibv_context, ibv_cq, ibv_device, ibv_device_attr, ibv_device_cap_flags, ibv_get_async_event,
    ibv_gid, ibv_open_device, ibv_port_attr, ibv_port_state, ibv_qp, ibv_query_device,
    ibv_query_gid, ibv_query_port,
};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};

use super::address::{GidIndex, Lid, Mtu, PortNumber, QpNumber};
use super::error::{Operation, VerbsError, log_destroyed};
use super::event::{self, Event, Subject};
use super::gid::{Gid, GidKind};
use super::sysfs::Sysfs;
use super::{completion, fork};

/// Link layer of a port on Ethernet, and of one on InfiniBand (`IBV_LINK_LAYER_…`).
const LINK_INFINIBAND: u8 = 1;
const LINK_ETHERNET: u8 = 2;

/// Who "made" rxe, the kernel's RDMA device in software over any Ethernet card.
pub const VENDOR_RXE: u32 = 0xff_ffff;

/// An opened device. Clones are the same; it is closed when the last one is dropped and nothing made on it is
/// left.
#[derive(Debug, Clone)]
pub struct Context(Arc<Opened>);

#[derive(Debug)]
struct Opened {
    raw: *mut ibv_context,
    name: Box<str>,
    vendor: u32,
}

// SAFETY: the library's objects may be used by all threads at once; it locks where that is needed.
unsafe impl Send for Opened {}
// SAFETY: as above.
unsafe impl Sync for Opened {}

impl Drop for Opened {
    fn drop(&mut self) {
        // SAFETY: opened by us, and whatever was made on it held it, so nothing is left.
        let code = unsafe { ibv_close_device(self.raw) };
        log_destroyed("device", &self.name, code);
    }
}

/// What a device allows.
#[derive(Debug, Clone)]
pub struct Limits {
    /// Version of its firmware; empty for software.
    pub firmware: String,
    /// Number of who made it.
    pub vendor: u32,
    /// Number of what it is.
    pub part: u32,
    /// Ports.
    pub ports: u8,
    /// Queue pairs.
    pub queue_pairs: u32,
    /// Work requests in one queue of a queue pair.
    pub queue_entries: u32,
    /// Segments of one work request.
    pub segments: u32,
    /// Segments of one READ.
    pub read_segments: u32,
    /// Completion queues.
    pub completion_queues: u32,
    /// Entries of a completion queue.
    pub completion_entries: u32,
    /// Protection domains.
    pub protection_domains: u32,
    /// Memory regions.
    pub regions: u32,
    /// Bytes of one memory region.
    pub region_bytes: u64,
    /// Memory windows.
    pub windows: u32,
    /// READs that a queue pair serves at once.
    pub reads_served: u8,
    /// READs that a queue pair has on their way at once.
    pub reads_wanted: u8,
    /// Whether it does atomic operations, between all of its queue pairs at least.
    pub has_atomics: bool,
    /// Which windows it says to have.
    pub window_kinds: WindowKinds,
    /// All that it says to have (`IBV_DEVICE_…`).
    pub capabilities: u32,
}

/// Which memory windows a device says to have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WindowKinds {
    /// Windows at all.
    pub any: bool,
    /// Type 2A: bound to a queue pair by its number.
    pub type_2a: bool,
    /// Type 2B: bound to a queue pair and a protection domain.
    pub type_2b: bool,
}

impl WindowKinds {
    /// Whether windows can be bound by work requests.
    pub fn has_type_2(self) -> bool {
        self.any && (self.type_2a || self.type_2b)
    }

    fn of(capabilities: u32) -> Self {
        let has = |flag: ibv_device_cap_flags| capabilities & flag.0 != 0;
        Self {
            any: has(ibv_device_cap_flags::IBV_DEVICE_MEM_WINDOW),
            type_2a: has(ibv_device_cap_flags::IBV_DEVICE_MEM_WINDOW_TYPE_2A),
            type_2b: has(ibv_device_cap_flags::IBV_DEVICE_MEM_WINDOW_TYPE_2B),
        }
    }
}

/// Whether a port works.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PortState {
    /// It has no link.
    Down,
    /// It has a link, and waits for the subnet's manager.
    Starting,
    /// It works.
    Active,
    /// It works, though its link is down for a moment.
    ActiveDeferred,
    /// The device does not say.
    Unknown,
}

impl PortState {
    fn from_code(code: u32) -> Self {
        match code {
            ibv_port_state::IBV_PORT_DOWN => Self::Down,
            ibv_port_state::IBV_PORT_INIT | ibv_port_state::IBV_PORT_ARMED => Self::Starting,
            ibv_port_state::IBV_PORT_ACTIVE => Self::Active,
            ibv_port_state::IBV_PORT_ACTIVE_DEFER => Self::ActiveDeferred,
            _ => Self::Unknown,
        }
    }
}

/// What a port's cable leads to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LinkLayer {
    /// InfiniBand.
    Infiniband,
    /// Ethernet: RoCE.
    Ethernet,
    /// The device does not say.
    Unknown,
}

/// A port, as it was when asked for.
#[derive(Debug, Clone, Copy)]
pub struct Port {
    /// Whether it works.
    pub state: PortState,
    /// Largest packet that it is set up for; `None` if the device tells a number that is none.
    pub mtu: Option<Mtu>,
    /// Largest packet that it could be set up for.
    pub mtu_max: Option<Mtu>,
    /// What its cable leads to.
    pub link_layer: LinkLayer,
    /// Its address on InfiniBand.
    pub lid: Lid,
    /// Entries of its table of GIDs, empty ones included.
    pub gids: u16,
    /// Bytes of one message.
    pub message_bytes: u32,
}

/// An entry of a port's table of GIDs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GidEntry {
    /// Which entry.
    pub index: GidIndex,
    /// The address.
    pub gid: Gid,
    /// Its kind, if the kernel tells one that is known.
    pub kind: Option<GidKind>,
    /// The interface that it belongs to.
    pub interface: Option<String>,
}

impl Context {
    /// # Safety
    /// The device must be one of a list that was not given back.
    pub(super) unsafe fn open(device: *mut ibv_device, name: &str) -> Result<Self, VerbsError> {
        fork::protect_once();
        // SAFETY: the caller's promise.
        let raw = unsafe { ibv_open_device(device) };
        if raw.is_null() {
            return Err(VerbsError::last(Operation::Open, name));
        }
        let mut opened = Opened {
            raw,
            name: name.into(),
            vendor: 0,
        };
        opened.vendor = query(&opened)?.vendor_id;
        let context = Self(Arc::new(opened));
        set_nonblocking(context.event_fd())
            .map_err(|error| VerbsError::from_io(Operation::Open, context.name(), error))?;
        Ok(context)
    }

    /// Whether both are the same opening of the same device. A driver takes whatever it is given for one of
    /// its own objects, so what is used together must be of one opening.
    pub(super) fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// Whether the device is rxe, whose completions have other flags than they should.
    pub(super) fn is_rxe(&self) -> bool {
        self.0.vendor == VENDOR_RXE
    }

    /// The device's name.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    pub(super) fn raw(&self) -> *mut ibv_context {
        self.0.raw
    }

    /// What the device allows.
    pub fn limits(&self) -> Result<Limits, VerbsError> {
        Ok(limits(&query(&self.0)?))
    }

    /// A port's state.
    pub fn port(&self, port: PortNumber) -> Result<Port, VerbsError> {
        let mut raw = MaybeUninit::<ibv_port_attr>::zeroed();
        let attributes = raw.as_mut_ptr().cast::<_compat_ibv_port_attr>();
        // SAFETY: the context is open; the library fills the part of the attributes that it knew in its first
        // version, all that is asked for here among it, and the rest stays zero.
        let code = unsafe { ibv_query_port(self.raw(), port.0, attributes) };
        if code != 0 {
            return Err(VerbsError::returned(
                Operation::QueryPort,
                self.name(),
                code,
            ));
        }
        // SAFETY: numbers only, of which all zeros is a value, too.
        let raw = unsafe { raw.assume_init() };
        Ok(Port {
            state: PortState::from_code(raw.state),
            mtu: Mtu::from_code(raw.active_mtu),
            mtu_max: Mtu::from_code(raw.max_mtu),
            link_layer: match raw.link_layer {
                LINK_INFINIBAND => LinkLayer::Infiniband,
                LINK_ETHERNET => LinkLayer::Ethernet,
                _ => LinkLayer::Unknown,
            },
            lid: Lid(raw.lid),
            gids: u16::try_from(raw.gid_tbl_len).unwrap_or(0),
            message_bytes: raw.max_msg_sz,
        })
    }

    /// An entry of a port's table of GIDs.
    pub fn gid(&self, port: PortNumber, index: GidIndex) -> Result<Gid, VerbsError> {
        let mut raw = ibv_gid { raw: [0; 16] };
        // SAFETY: the context is open; the library fills what it is given.
        let code = unsafe { ibv_query_gid(self.raw(), port.0, i32::from(index.0), &mut raw) };
        if code != 0 {
            return Err(VerbsError::returned(Operation::QueryGid, self.name(), code));
        }
        // SAFETY: all members are bytes.
        Ok(Gid::from_bytes(unsafe { raw.raw }))
    }

    /// A port's GIDs, empty entries left out.
    pub fn gids(&self, port: PortNumber) -> Result<Vec<GidEntry>, VerbsError> {
        let sysfs = Sysfs::default();
        let count = self.port(port)?.gids.min(u16::from(u8::MAX));
        let mut entries = Vec::new();
        for index in (0..count).map(|index| GidIndex(index as u8)) {
            let gid = self.gid(port, index)?;
            if !gid.is_empty() {
                entries.push(GidEntry {
                    index,
                    gid,
                    kind: sysfs.gid_kind(self.name(), port, index),
                    interface: sysfs.gid_interface(self.name(), port, index),
                });
            }
        }
        Ok(entries)
    }

    /// Becomes readable when there are events.
    pub fn event_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor is open as long as the context is.
        unsafe { BorrowedFd::borrow_raw((*self.raw()).async_fd) }
    }

    /// Takes the next event, if there is one.
    pub fn next_event(&self) -> Result<Option<Event>, VerbsError> {
        let mut raw = MaybeUninit::<ibv_async_event>::zeroed();
        // SAFETY: the context is open; the library fills what it is given. The descriptor does not block.
        if unsafe { ibv_get_async_event(self.raw(), raw.as_mut_ptr()) } != 0 {
            let error = VerbsError::last(Operation::TakeEvent, self.name());
            return match error.source.kind() {
                io::ErrorKind::WouldBlock => Ok(None),
                _ => Err(error),
            };
        }
        // SAFETY: the library filled it, and it is not acknowledged.
        let event = unsafe { read_event(raw.as_ptr()) };
        // SAFETY: the library gave this event, and it is acknowledged once.
        unsafe { ibv_ack_async_event(raw.as_mut_ptr()) };
        Ok(Some(event))
    }
}

/// # Safety
/// The event must come from the library, and not be acknowledged: until then the object of which it speaks is
/// not destroyed.
unsafe fn read_event(event: *const ibv_async_event) -> Event {
    // A newer kernel may send a type which the enum of the bindings lacks, so it is read as a number.
    // SAFETY: within the event, and C's enum is a number of this size.
    let code = unsafe { (&raw const (*event).event_type).cast::<u32>().read() };
    // SAFETY: all members of the union begin at its beginning.
    let element = unsafe { &raw const (*event).element };
    match event::subject(code) {
        Subject::QueuePair => {
            // SAFETY: the member that the code speaks of; the queue pair is there until the event is
            // acknowledged.
            let number = unsafe { (*element.cast::<*const ibv_qp>().read()).qp_num };
            event::of_queue_pair(code, QpNumber(number))
        }
        Subject::CompletionQueue => {
            // SAFETY: as above.
            let token = unsafe { completion::token(element.cast::<*const ibv_cq>().read()) };
            Event::CompletionQueueFatal(token)
        }
        Subject::Port => {
            // SAFETY: the member that the code speaks of.
            let number = unsafe { element.cast::<i32>().read() };
            event::of_port(code, PortNumber(number as u8))
        }
        Subject::Device => Event::DeviceFatal,
        Subject::Other => Event::Other(code),
    }
}

fn query(opened: &Opened) -> Result<ibv_device_attr, VerbsError> {
    let mut raw = MaybeUninit::<ibv_device_attr>::zeroed();
    // SAFETY: the context is open; the library fills what it is given.
    let code = unsafe { ibv_query_device(opened.raw, raw.as_mut_ptr()) };
    if code != 0 {
        let operation = Operation::QueryDevice;
        return Err(VerbsError::returned(operation, &opened.name, code));
    }
    // SAFETY: numbers only, of which all zeros is a value, too.
    Ok(unsafe { raw.assume_init() })
}

fn limits(raw: &ibv_device_attr) -> Limits {
    let count = |number: i32| u32::try_from(number).unwrap_or(0);
    let reads = |number: i32| u8::try_from(number.clamp(0, 255)).unwrap_or(0);
    let firmware = raw.fw_ver.map(|byte| byte as u8);
    let firmware = CStr::from_bytes_until_nul(&firmware).unwrap_or(c"");
    Limits {
        firmware: firmware.to_string_lossy().into_owned(),
        vendor: raw.vendor_id,
        part: raw.vendor_part_id,
        ports: raw.phys_port_cnt,
        queue_pairs: count(raw.max_qp),
        queue_entries: count(raw.max_qp_wr),
        segments: count(raw.max_sge),
        read_segments: count(raw.max_sge_rd),
        completion_queues: count(raw.max_cq),
        completion_entries: count(raw.max_cqe),
        protection_domains: count(raw.max_pd),
        regions: count(raw.max_mr),
        region_bytes: raw.max_mr_size,
        windows: count(raw.max_mw),
        reads_served: reads(raw.max_qp_rd_atom),
        reads_wanted: reads(raw.max_qp_init_rd_atom),
        has_atomics: raw.atomic_cap != ibv_atomic_cap::IBV_ATOMIC_NONE,
        window_kinds: WindowKinds::of(raw.device_cap_flags),
        capabilities: raw.device_cap_flags,
    }
}

pub(super) fn set_nonblocking(fd: impl AsFd) -> io::Result<()> {
    let flags = fcntl_getfl(&fd)?;
    Ok(fcntl_setfl(&fd, flags | OFlags::NONBLOCK)?)
}
