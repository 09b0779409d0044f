//! What a vhost-user message looks like on the socket: numbers, structures, limits. All integers have native
//! byte order.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Bytes of [`Header`].
pub const HEADER_BYTES: usize = size_of::<Header>();

/// Largest configuration space access. The specification's reference front end stops at 256; a larger read is
/// refused with an empty reply.
pub const MAX_CONFIG_BYTES: usize = 4096;

/// Largest payload of a message; a header that announces more ends the connection, before anything is read or
/// allocated.
pub const MAX_PAYLOAD_BYTES: usize = MAX_CONFIG_BYTES + size_of::<ConfigHead>();

/// Most file descriptors with one message; the kernel cuts the rest off and the connection ends.
pub const MAX_FDS: usize = 32;

/// Most regions in SET_MEM_TABLE. The specification says 8, some front ends send up to [`MAX_FDS`].
pub const MAX_TABLE_REGIONS: usize = MAX_FDS;

/// Low bits of [`Header::flags`]: the only version there is.
pub const FLAG_VERSION: u32 = 0x1;
/// Mask of the version bits.
pub const FLAG_VERSION_MASK: u32 = 0x3;
/// The message is a reply.
pub const FLAG_REPLY: u32 = 0x4;
/// The sender wants an acknowledgement (REPLY_ACK).
pub const FLAG_NEED_REPLY: u32 = 0x8;

/// In the payload of SET_VRING_KICK, _CALL and _ERR: the ring's index.
pub const VRING_INDEX_MASK: u64 = 0xff;
/// In the same payload: no descriptor comes along, the ring is polled.
pub const VRING_NOFD: u64 = 0x100;

/// In [`VringAddr::flags`]: writes to the used ring are logged at [`VringAddr::log`].
pub const VRING_F_LOG: u32 = 0x1;

/// Feature bit: log all writes to guest memory (live migration).
pub const F_LOG_ALL: u64 = 1 << 26;
/// Virtio feature: rings are packed ones.
pub const F_RING_PACKED: u64 = 1 << 34;
/// Feature bit: protocol features can be negotiated.
pub const F_PROTOCOL_FEATURES: u64 = 1 << 30;

/// Numbers of requests from the front end, as the specification names them.
#[expect(
    missing_docs,
    reason = "each is named and described in the vhost-user specification"
)]
pub mod code {
    pub const GET_FEATURES: u32 = 1;
    pub const SET_FEATURES: u32 = 2;
    pub const SET_OWNER: u32 = 3;
    pub const RESET_OWNER: u32 = 4;
    pub const SET_MEM_TABLE: u32 = 5;
    pub const SET_LOG_BASE: u32 = 6;
    pub const SET_LOG_FD: u32 = 7;
    pub const SET_VRING_NUM: u32 = 8;
    pub const SET_VRING_ADDR: u32 = 9;
    pub const SET_VRING_BASE: u32 = 10;
    pub const GET_VRING_BASE: u32 = 11;
    pub const SET_VRING_KICK: u32 = 12;
    pub const SET_VRING_CALL: u32 = 13;
    pub const SET_VRING_ERR: u32 = 14;
    pub const GET_PROTOCOL_FEATURES: u32 = 15;
    pub const SET_PROTOCOL_FEATURES: u32 = 16;
    pub const GET_QUEUE_NUM: u32 = 17;
    pub const SET_VRING_ENABLE: u32 = 18;
    pub const SET_BACKEND_REQ_FD: u32 = 21;
    pub const GET_CONFIG: u32 = 24;
    pub const SET_CONFIG: u32 = 25;
    pub const GET_INFLIGHT_FD: u32 = 31;
    pub const SET_INFLIGHT_FD: u32 = 32;
    pub const RESET_DEVICE: u32 = 34;
    pub const GET_MAX_MEM_SLOTS: u32 = 36;
    pub const ADD_MEM_REG: u32 = 37;
    pub const REM_MEM_REG: u32 = 38;

    /// Sent by us on the back-end channel: the configuration space changed.
    pub const BACKEND_CONFIG_CHANGE_MSG: u32 = 2;
}

/// Protocol feature bits that Penstock offers.
pub mod protocol {
    /// GET_QUEUE_NUM and more than one queue.
    pub const MQ: u64 = 1 << 0;
    /// The dirty log comes as shared memory.
    pub const LOG_SHMFD: u64 = 1 << 1;
    /// Acknowledgements on demand.
    pub const REPLY_ACK: u64 = 1 << 3;
    /// A channel for requests from the back end.
    pub const BACKEND_REQ: u64 = 1 << 5;
    /// GET_CONFIG and SET_CONFIG.
    pub const CONFIG: u64 = 1 << 9;
    /// In-flight requests survive the back end.
    pub const INFLIGHT_SHMFD: u64 = 1 << 12;
    /// RESET_DEVICE.
    pub const RESET_DEVICE: u64 = 1 << 13;
    /// Memory regions one by one.
    pub const CONFIGURE_MEM_SLOTS: u64 = 1 << 15;

    /// All that a device may offer, and a block device does. STATUS and DEVICE_STATE are not among it: a
    /// block device has no state of its own to reset or to carry that the messages above do not cover.
    pub const OFFERED: u64 = MQ
        | LOG_SHMFD
        | REPLY_ACK
        | BACKEND_REQ
        | CONFIG
        | INFLIGHT_SHMFD
        | RESET_DEVICE
        | CONFIGURE_MEM_SLOTS;
}

/// Begins every message.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct Header {
    /// One of [`code`].
    pub code: u32,
    /// Version, [`FLAG_REPLY`], [`FLAG_NEED_REPLY`].
    pub flags: u32,
    /// Bytes of the payload that follows.
    pub size: u32,
}

/// An index and a number.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct VringState {
    /// The ring.
    pub index: u32,
    /// Size, base or switch.
    pub num: u32,
}

/// Where a ring lies, in the front end's own addresses.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct VringAddr {
    /// The ring.
    pub index: u32,
    /// [`VRING_F_LOG`].
    pub flags: u32,
    /// Descriptor table.
    pub desc: u64,
    /// Used ring.
    pub used: u64,
    /// Available ring.
    pub avail: u64,
    /// Guest address under which writes to the used ring are logged.
    pub log: u64,
}

/// Begins SET_MEM_TABLE.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct MemoryHead {
    /// Regions that follow.
    pub count: u32,
    /// Unused.
    pub padding: u32,
}

/// One memory region.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct Region {
    /// First guest physical address.
    pub guest: u64,
    /// Bytes.
    pub size: u64,
    /// First address in the front end's own address space.
    pub user: u64,
    /// Where it begins in the file.
    pub mmap_offset: u64,
}

/// Payload of ADD_MEM_REG and REM_MEM_REG.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct SingleRegion {
    /// Unused.
    pub padding: u64,
    /// The region.
    pub region: Region,
}

/// Payload of SET_LOG_BASE, and of its reply.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct LogArea {
    /// Bytes of the log.
    pub size: u64,
    /// Where it begins in the file.
    pub offset: u64,
}

/// Begins GET_CONFIG, SET_CONFIG and the reply.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct ConfigHead {
    /// First byte of the configuration space.
    pub offset: u32,
    /// Bytes.
    pub size: u32,
    /// 0 for a write by the driver, 1 for live migration.
    pub flags: u32,
}

/// Payload of GET_INFLIGHT_FD, its reply, and SET_INFLIGHT_FD.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct InflightArea {
    /// Bytes of the record.
    pub mmap_size: u64,
    /// Where it begins in the file.
    pub mmap_offset: u64,
    /// Rings.
    pub num_queues: u16,
    /// Entries of each.
    pub queue_size: u16,
    /// The C structure's tail.
    pub padding: u32,
}

const _: () = assert!(
    HEADER_BYTES == 12
        && size_of::<VringAddr>() == 40
        && size_of::<Region>() == 32
        && size_of::<SingleRegion>() == 40
        && size_of::<InflightArea>() == 24
);

/// The name of a request, for messages to people.
pub fn name(request: u32) -> &'static str {
    match request {
        code::GET_FEATURES => "GET_FEATURES",
        code::SET_FEATURES => "SET_FEATURES",
        code::SET_OWNER => "SET_OWNER",
        code::RESET_OWNER => "RESET_OWNER",
        code::SET_MEM_TABLE => "SET_MEM_TABLE",
        code::SET_LOG_BASE => "SET_LOG_BASE",
        code::SET_LOG_FD => "SET_LOG_FD",
        code::SET_VRING_NUM => "SET_VRING_NUM",
        code::SET_VRING_ADDR => "SET_VRING_ADDR",
        code::SET_VRING_BASE => "SET_VRING_BASE",
        code::GET_VRING_BASE => "GET_VRING_BASE",
        code::SET_VRING_KICK => "SET_VRING_KICK",
        code::SET_VRING_CALL => "SET_VRING_CALL",
        code::SET_VRING_ERR => "SET_VRING_ERR",
        code::GET_PROTOCOL_FEATURES => "GET_PROTOCOL_FEATURES",
        code::SET_PROTOCOL_FEATURES => "SET_PROTOCOL_FEATURES",
        code::GET_QUEUE_NUM => "GET_QUEUE_NUM",
        code::SET_VRING_ENABLE => "SET_VRING_ENABLE",
        code::SET_BACKEND_REQ_FD => "SET_BACKEND_REQ_FD",
        code::GET_CONFIG => "GET_CONFIG",
        code::SET_CONFIG => "SET_CONFIG",
        code::GET_INFLIGHT_FD => "GET_INFLIGHT_FD",
        code::SET_INFLIGHT_FD => "SET_INFLIGHT_FD",
        code::RESET_DEVICE => "RESET_DEVICE",
        code::GET_MAX_MEM_SLOTS => "GET_MAX_MEM_SLOTS",
        code::ADD_MEM_REG => "ADD_MEM_REG",
        code::REM_MEM_REG => "REM_MEM_REG",
        _ => "unknown message",
    }
}
