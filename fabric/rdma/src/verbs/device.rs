//! The list of devices.

use std::ffi::CStr;
use std::marker::PhantomData;

use rdma_sys::{ibv_device, ibv_free_device_list, ibv_get_device_list};

use super::context::Context;
use super::error::{Operation, VerbsError};
use super::sysfs::Sysfs;

/// What errors call the machine.
const MACHINE: &str = "RDMA devices";

/// The devices that the machine had when it was asked.
#[derive(Debug)]
pub struct DeviceList {
    /// The library's array; null if there is none.
    array: *mut *mut ibv_device,
    count: usize,
}

impl DeviceList {
    /// Asks for the devices. Where the kernel has no RDMA, the list is empty.
    pub fn get() -> Result<Self, VerbsError> {
        let shown = Sysfs::default()
            .devices()
            .map_err(|error| VerbsError::from_io(Operation::ListDevices, MACHINE, error))?;
        if shown.is_empty() {
            let array = std::ptr::null_mut();
            return Ok(Self { array, count: 0 });
        }
        let mut count = 0;
        // SAFETY: writes the count; the array is ours until it is given back.
        let array = unsafe { ibv_get_device_list(&mut count) };
        if !array.is_null() {
            let count = usize::try_from(count).unwrap_or(0);
            return Ok(Self { array, count });
        }
        let error = VerbsError::last(Operation::ListDevices, MACHINE);
        // Without ib_uverbs the kernel has devices, but none for programs.
        if error.errno() == Some(libc::ENOSYS) {
            return Ok(Self { array, count: 0 });
        }
        Err(error)
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.count
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Each device.
    pub fn iter(&self) -> impl Iterator<Item = Device<'_>> {
        (0..self.count).map(|index| Device {
            // SAFETY: the array has `count` entries until it is given back, which the borrow rules out.
            raw: unsafe { *self.array.add(index) },
            list: PhantomData,
        })
    }

    /// The device called `name`.
    pub fn find(&self, name: &str) -> Option<Device<'_>> {
        self.iter().find(|device| device.name() == name)
    }
}

impl Drop for DeviceList {
    fn drop(&mut self) {
        if !self.array.is_null() {
            // SAFETY: the library gave the array, and nobody borrows of it any more.
            unsafe { ibv_free_device_list(self.array) }
        }
    }
}

/// A device that is not opened.
#[derive(Debug, Clone, Copy)]
pub struct Device<'a> {
    raw: *mut ibv_device,
    list: PhantomData<&'a DeviceList>,
}

impl<'a> Device<'a> {
    /// Its name, `mlx5_0` for example.
    pub fn name(&self) -> &'a str {
        // SAFETY: the device lives as long as the list; its name ends with a NUL and does not change.
        let name = unsafe { CStr::from_ptr((*self.raw).name.as_ptr()) };
        name.to_str().unwrap_or("?")
    }

    /// Opens it. What is opened lives on without the list.
    pub fn open(&self) -> Result<Context, VerbsError> {
        // SAFETY: the device is one of a list that is still there.
        unsafe { Context::open(self.raw, self.name()) }
    }
}
