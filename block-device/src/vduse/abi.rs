//! Numbers and structures of VDUSE, as `linux/vduse.h` has them (API version 0).

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Bytes of a device's name, its NUL included.
pub const NAME_BYTES: usize = 256;

const fn ioctl(direction: u32, number: u32, bytes: usize) -> libc::c_ulong {
    ((direction << 30) | ((bytes as u32) << 16) | (0x81 << 8) | number) as libc::c_ulong
}

const NONE: u32 = 0;
const WRITE: u32 = 1;
const READ: u32 = 2;

pub const SET_API_VERSION: libc::c_ulong = ioctl(WRITE, 0x01, 8);
pub const CREATE_DEV: libc::c_ulong = ioctl(WRITE, 0x02, size_of::<DevConfig>());
pub const DESTROY_DEV: libc::c_ulong = ioctl(WRITE, 0x03, NAME_BYTES);
pub const IOTLB_GET_FD: libc::c_ulong = ioctl(READ | WRITE, 0x10, size_of::<IotlbEntry>());
pub const DEV_GET_FEATURES: libc::c_ulong = ioctl(READ, 0x11, 8);
pub const DEV_SET_CONFIG: libc::c_ulong = ioctl(WRITE, 0x12, size_of::<ConfigHead>());
pub const DEV_INJECT_CONFIG_IRQ: libc::c_ulong = ioctl(NONE, 0x13, 0);
pub const VQ_SETUP: libc::c_ulong = ioctl(WRITE, 0x14, size_of::<VqConfig>());
pub const VQ_GET_INFO: libc::c_ulong = ioctl(READ | WRITE, 0x15, size_of::<VqInfo>());
pub const VQ_SETUP_KICKFD: libc::c_ulong = ioctl(WRITE, 0x16, size_of::<VqEventFd>());
pub const VQ_INJECT_IRQ: libc::c_ulong = ioctl(WRITE, 0x17, 4);

/// `struct vduse_dev_config`; the configuration space follows.
#[repr(C)]
#[derive(Debug, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct DevConfig {
    pub name: [u8; NAME_BYTES],
    pub vendor_id: u32,
    pub device_id: u32,
    pub features: u64,
    pub vq_num: u32,
    pub vq_align: u32,
    pub reserved: [u32; 13],
    pub config_size: u32,
}

/// `struct vduse_config_data`; the bytes follow.
#[repr(C)]
#[derive(Debug, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct ConfigHead {
    pub offset: u32,
    pub length: u32,
}

/// `struct vduse_iotlb_entry`.
#[repr(C)]
#[derive(Debug, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct IotlbEntry {
    pub offset: u64,
    pub start: u64,
    pub last: u64,
    pub perm: u8,
    pub padding: [u8; 7],
}

/// `struct vduse_vq_config`.
#[repr(C)]
#[derive(Debug, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct VqConfig {
    pub index: u32,
    pub max_size: u16,
    pub reserved: [u16; 13],
}

/// `struct vduse_vq_info`, of a split ring.
#[repr(C)]
#[derive(Debug, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct VqInfo {
    pub index: u32,
    pub num: u32,
    pub desc_addr: u64,
    pub driver_addr: u64,
    pub device_addr: u64,
    pub avail_index: u16,
    pub packed: [u16; 3],
    pub ready: u8,
    pub padding: [u8; 7],
}

/// `struct vduse_vq_eventfd`.
#[repr(C)]
#[derive(Debug, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct VqEventFd {
    pub index: u32,
    pub fd: i32,
}

/// Values of [`DevRequest::kind`].
pub const GET_VQ_STATE: u32 = 0;
pub const SET_STATUS: u32 = 1;
pub const UPDATE_IOTLB: u32 = 2;

/// `struct vduse_dev_request`.
#[repr(C)]
#[derive(Debug, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct DevRequest {
    pub kind: u32,
    pub id: u32,
    pub reserved: [u32; 4],
    pub body: [u32; 32],
}

/// Values of [`DevResponse::result`].
pub const RESULT_OK: u32 = 0;
pub const RESULT_FAILED: u32 = 1;

/// `struct vduse_dev_response`.
#[repr(C)]
#[derive(Debug, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct DevResponse {
    pub id: u32,
    pub result: u32,
    pub reserved: [u32; 4],
    pub body: [u32; 32],
}

const _: () = {
    assert!(size_of::<DevConfig>() == 336);
    assert!(size_of::<IotlbEntry>() == 32);
    assert!(size_of::<VqConfig>() == 32);
    assert!(size_of::<VqInfo>() == 48);
    assert!(size_of::<VqEventFd>() == 8);
    assert!(size_of::<DevRequest>() == 152);
    assert!(size_of::<DevResponse>() == 152);
};

#[cfg(test)]
mod tests {
    use super::*;

    /// Numbers that the C compiler makes of the header.
    #[test]
    fn numbers_are_those_of_the_header() {
        assert_eq!(CREATE_DEV, 0x4150_8102);
        assert_eq!(DESTROY_DEV, 0x4100_8103);
        assert_eq!(IOTLB_GET_FD, 0xc020_8110);
        assert_eq!(DEV_GET_FEATURES, 0x8008_8111);
        assert_eq!(DEV_SET_CONFIG, 0x4008_8112);
        assert_eq!(DEV_INJECT_CONFIG_IRQ, 0x8113);
        assert_eq!(VQ_SETUP, 0x4020_8114);
        assert_eq!(VQ_GET_INFO, 0xc030_8115);
        assert_eq!(VQ_SETUP_KICKFD, 0x4008_8116);
        assert_eq!(VQ_INJECT_IRQ, 0x4004_8117);
    }
}
