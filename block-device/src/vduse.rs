//! VDUSE (vDPA Device in Userspace, Linux, `Documentation/userspace-api/vduse.rst`): the kernel's virtio-blk
//! driver on rings and bounce buffers that a process serves.
//!
//! A device outlives the process that has it open. Whoever opens it next finds the rings as they are, and
//! messages that were not answered come again.

mod abi;

use std::ffi::CStr;
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use zerocopy::{FromZeros, IntoBytes};

/// The control device.
pub const CONTROL: &str = "/dev/vduse/control";
/// Where devices appear.
const DEVICES: &str = "/dev/vduse";
/// What the kernel tells about them.
const SYSFS: &str = "/sys/class/vduse";
/// Bytes of bounce buffers of a kernel that does not tell (before Linux 6.4).
const BOUNCE_BYTES_DEFAULT: u64 = 64 << 20;
/// A block device, as virtio numbers them.
const DEVICE_ID_BLOCK: u32 = 2;
/// Alignment of rings: a page.
const RING_ALIGN_BYTES: u32 = 4096;

/// The feature bit without which VDUSE takes no device: the device's addresses are not the kernel's.
pub const F_ACCESS_PLATFORM: u64 = 1 << 33;
/// The feature bit of virtio-blk that VDUSE refuses: a switch of the write cache.
pub const F_CONFIG_WCE: u64 = 1 << 11;

/// Makes and destroys devices.
#[derive(Debug)]
pub struct Control(File);

/// What a device is.
#[derive(Debug)]
pub struct DeviceConfig<'a> {
    /// Virtio features that the driver may choose from.
    pub features: u64,
    /// Rings.
    pub queues: u16,
    /// The configuration space.
    pub config: &'a [u8],
}

impl Control {
    /// Opens `/dev/vduse/control`.
    pub fn open() -> io::Result<Self> {
        let file = OpenOptions::new().read(true).write(true).open(CONTROL)?;
        // SAFETY: the argument is a number that the kernel reads.
        check(unsafe { libc::ioctl(file.as_raw_fd(), abi::SET_API_VERSION, &0_u64) })?;
        Ok(Self(file))
    }

    /// Makes a device that nothing uses yet.
    pub fn create(&self, name: &CStr, device: &DeviceConfig<'_>) -> io::Result<()> {
        let mut head = abi::DevConfig::new_zeroed();
        head.name = name_bytes(name)?;
        head.device_id = DEVICE_ID_BLOCK;
        head.features = device.features;
        head.vq_num = u32::from(device.queues);
        head.vq_align = RING_ALIGN_BYTES;
        head.config_size = device.config.len() as u32;
        let bytes = [head.as_bytes(), device.config].concat();
        // SAFETY: the kernel reads the structure and the `config_size` bytes behind it.
        check(unsafe { libc::ioctl(self.0.as_raw_fd(), abi::CREATE_DEV, bytes.as_ptr()) })
    }

    /// Destroys a device that no process has open and no driver uses.
    pub fn destroy(&self, name: &CStr) -> io::Result<()> {
        let name = name_bytes(name)?;
        // SAFETY: the kernel reads exactly `NAME_BYTES` bytes.
        check(unsafe { libc::ioctl(self.0.as_raw_fd(), abi::DESTROY_DEV, name.as_ptr()) })
    }
}

/// A device, opened by the one process that serves it.
#[derive(Debug)]
pub struct Device {
    file: File,
    /// Bytes of bounce buffers, at the start of its address space.
    bounce_bytes: u64,
}

/// A ring as the driver set it up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ring {
    /// Entries.
    pub size: u16,
    /// Addresses in the device's address space: descriptors, available and used ring.
    pub desc: u64,
    /// See `desc`.
    pub avail: u64,
    /// See `desc`.
    pub used: u64,
    /// Index in the available ring to begin at.
    pub base: u16,
}

/// Memory that the device reaches.
#[derive(Debug)]
pub struct Region {
    /// First address.
    pub start: u64,
    /// Bytes.
    pub size: u64,
    /// Where it begins in `file`.
    pub offset: u64,
    /// What to map.
    pub file: OwnedFd,
}

/// What the kernel asks of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Asked {
    /// The index in the available ring to go on at.
    RingState {
        /// The ring.
        index: u16,
    },
    /// The driver wrote the status, with virtio's bits.
    Status(u8),
    /// Addresses whose memory is another one from now on.
    Remap,
    /// A later kernel's question.
    Unknown(u32),
}

/// A question, by whose number it is answered.
#[derive(Debug, Clone, Copy)]
pub struct Question {
    id: u32,
    /// What is asked.
    pub asked: Asked,
}

impl Device {
    /// Where a device of this name is opened.
    pub fn path(name: &str) -> PathBuf {
        Path::new(DEVICES).join(name)
    }

    /// Opens a device; `ResourceBusy` if another process serves it.
    pub fn open(name: &str) -> io::Result<Self> {
        let mut options = OpenOptions::new();
        let options = options.read(true).write(true);
        let options = options.custom_flags(libc::O_NONBLOCK);
        let file = options.open(Self::path(name))?;
        let bounce = Path::new(SYSFS).join(name).join("bounce_size");
        let bounce = std::fs::read_to_string(bounce).ok();
        let bounce = bounce.and_then(|text| text.trim().parse().ok());
        Ok(Self {
            file,
            bounce_bytes: bounce.unwrap_or(BOUNCE_BYTES_DEFAULT),
        })
    }

    /// Features that the driver chose; 0 before.
    pub fn features(&self) -> io::Result<u64> {
        let mut features = 0_u64;
        // SAFETY: the kernel writes one number.
        check(unsafe { libc::ioctl(self.fd(), abi::DEV_GET_FEATURES, &mut features) })?;
        Ok(features)
    }

    /// Rings that it has.
    pub fn queues(&self) -> io::Result<u16> {
        for index in 0..=u16::MAX {
            match self.ring(index) {
                Ok(_) => {}
                Err(error) if error.raw_os_error() == Some(libc::EINVAL) => return Ok(index),
                Err(error) => return Err(error),
            }
        }
        Ok(u16::MAX)
    }

    /// Says how large a ring may be. Before the device is used.
    pub fn set_ring_size_max(&self, index: u16, entries: u16) -> io::Result<()> {
        let mut config = abi::VqConfig::new_zeroed();
        (config.index, config.max_size) = (u32::from(index), entries);
        // SAFETY: the kernel reads one structure.
        check(unsafe { libc::ioctl(self.fd(), abi::VQ_SETUP, &config) })
    }

    /// A ring that the driver has made ready.
    pub fn ring(&self, index: u16) -> io::Result<Option<Ring>> {
        let mut info = abi::VqInfo::new_zeroed();
        info.index = u32::from(index);
        // SAFETY: the kernel reads and writes one structure.
        check(unsafe { libc::ioctl(self.fd(), abi::VQ_GET_INFO, &mut info) })?;
        Ok((info.ready != 0).then_some(Ring {
            size: info.num as u16,
            desc: info.desc_addr,
            avail: info.driver_addr,
            used: info.device_addr,
            base: info.avail_index,
        }))
    }

    /// Has `kick` signalled when the driver has put requests on the ring; once now if it did so before.
    pub fn set_kick(&self, index: u16, kick: BorrowedFd<'_>) -> io::Result<()> {
        let event = abi::VqEventFd {
            index: u32::from(index),
            fd: kick.as_raw_fd(),
        };
        // SAFETY: the kernel reads one structure.
        check(unsafe { libc::ioctl(self.fd(), abi::VQ_SETUP_KICKFD, &event) })
    }

    /// Tells the driver that there are answers. A ring that is not ready refuses.
    pub fn interrupt(&self, index: u16) -> io::Result<()> {
        // SAFETY: the kernel reads one number.
        check(unsafe { libc::ioctl(self.fd(), abi::VQ_INJECT_IRQ, &u32::from(index)) })
    }

    /// Changes the configuration space, and tells the driver if it runs.
    pub fn set_config(&self, config: &[u8]) -> io::Result<()> {
        let head = abi::ConfigHead {
            offset: 0,
            length: config.len() as u32,
        };
        let bytes = [head.as_bytes(), config].concat();
        // SAFETY: the kernel reads the structure and the `length` bytes behind it.
        check(unsafe { libc::ioctl(self.fd(), abi::DEV_SET_CONFIG, bytes.as_ptr()) })?;
        // SAFETY: takes no argument.
        match check(unsafe { libc::ioctl(self.fd(), abi::DEV_INJECT_CONFIG_IRQ) }) {
            // The driver does not run: it will read the configuration by itself.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => Ok(()),
            other => other,
        }
    }

    /// The memory that the device reaches: bounce buffers, and the rings.
    pub fn memory(&self) -> io::Result<Vec<Region>> {
        let mut regions = self.mapped()?;
        // Bounce buffers are among them only once the driver has used one. The memory of a device is one
        // file, in which an address is its own offset.
        if let Some(first) = regions.first()
            && first.start == first.offset
            && first.start >= self.bounce_bytes
        {
            regions.push(Region {
                start: 0,
                size: self.bounce_bytes,
                offset: 0,
                file: first.file.try_clone()?,
            });
        }
        Ok(regions)
    }

    fn mapped(&self) -> io::Result<Vec<Region>> {
        let mut regions = Vec::new();
        let mut from = 0;
        loop {
            let mut entry = abi::IotlbEntry::new_zeroed();
            (entry.start, entry.last) = (from, u64::MAX);
            // SAFETY: the kernel reads and writes one structure.
            let fd = unsafe { libc::ioctl(self.fd(), abi::IOTLB_GET_FD, &mut entry) };
            if fd < 0 {
                let error = io::Error::last_os_error();
                return match error.raw_os_error() {
                    // Nothing from there on.
                    Some(libc::EINVAL | libc::ENOENT) => Ok(regions),
                    _ => Err(error),
                };
            }
            // SAFETY: the kernel has just opened it for us.
            let file = unsafe { OwnedFd::from_raw_fd(fd) };
            let size = entry.last.wrapping_sub(entry.start).wrapping_add(1);
            if size == 0 || entry.start < from {
                return Err(io::Error::other("VDUSE names an impossible memory region"));
            }
            regions.push(Region {
                start: entry.start,
                size,
                offset: entry.offset,
                file,
            });
            match entry.last.checked_add(1) {
                Some(next) => from = next,
                None => return Ok(regions),
            }
        }
    }

    /// The next question, if there is one.
    pub fn question(&self) -> io::Result<Option<Question>> {
        let mut request = abi::DevRequest::new_zeroed();
        match (&self.file).read(request.as_mut_bytes()) {
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
            Err(error) => return Err(error),
        }
        let asked = match request.kind {
            abi::GET_VQ_STATE => Asked::RingState {
                index: request.body[0] as u16,
            },
            abi::SET_STATUS => Asked::Status(request.body[0] as u8),
            abi::UPDATE_IOTLB => Asked::Remap,
            other => Asked::Unknown(other),
        };
        let id = request.id;
        Ok(Some(Question { id, asked }))
    }

    /// Answers a question: `None` if what was asked cannot be done; the index of a ring where that was asked.
    pub fn answer(&self, question: Question, ring_index: Option<u16>) -> io::Result<()> {
        let mut response = abi::DevResponse::new_zeroed();
        response.id = question.id;
        match (question.asked, ring_index) {
            (Asked::RingState { index }, Some(base)) => {
                response.body[0] = u32::from(index);
                response.body[1] = u32::from(base);
            }
            (Asked::RingState { .. } | Asked::Unknown(_), _) => {
                response.result = abi::RESULT_FAILED;
            }
            _ => response.result = abi::RESULT_OK,
        }
        (&self.file).write_all(response.as_bytes())
    }

    fn fd(&self) -> i32 {
        self.file.as_raw_fd()
    }
}

impl AsFd for Device {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

fn name_bytes(name: &CStr) -> io::Result<[u8; abi::NAME_BYTES]> {
    let given = name.to_bytes_with_nul();
    let mut bytes = [0; abi::NAME_BYTES];
    let place = bytes.get_mut(..given.len());
    let place = place.ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput))?;
    place.copy_from_slice(given);
    Ok(bytes)
}

fn check(status: i32) -> io::Result<()> {
    match status {
        ..0 => Err(io::Error::last_os_error()),
        0.. => Ok(()),
    }
}
