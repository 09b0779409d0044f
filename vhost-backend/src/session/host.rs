//! Carries out a session's actions on a device: maps what the front end shares, starts and stops queues.

mod shared_fd;

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::machine::{Action, Kick, Machine, Offer, Ring};
use super::message::{InflightArea, LogArea, Region, VRING_F_LOG, VringAddr};
use super::protocol::{Effect, Host};
use crate::data_thread::{QueueConfig, QueueError, QueueHandle, Threads};
use crate::device::{Device, DeviceEngine, DeviceOf};
use crate::dirty::DirtyLog;
use crate::inflight::{InflightRegion, RingLayout};
use crate::memory::budget::{InUse, MemoryAccount};
use crate::memory::{GuestAddr, GuestMemory, MAX_REGIONS, Mapping, MemoryError, RegionSpec};
use crate::ring::{MAX_DEVICE_ENTRIES, MAX_QUEUE_SIZE};
use shared_fd::{check_kick, check_memory, check_signal, why_unsealed};

pub use shared_fd::FdError;

/// Why an action failed; `D` is the device's own reason.
#[derive(Debug, thiserror::Error)]
pub enum HostError<D> {
    /// Shared memory could not be mapped.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// A descriptor of the wrong kind.
    #[error(transparent)]
    Fd(#[from] FdError),
    /// A data thread refused.
    #[error(transparent)]
    Queue(#[from] QueueError),
    /// The device refused.
    #[error(transparent)]
    Device(D),
    /// Part of a ring is not in the memory that the front end shared.
    #[error("ring {index}: {part} at {addr:#x} is in no memory region")]
    RingOutside {
        /// The ring.
        index: u16,
        /// Which part.
        part: &'static str,
        /// Where it was said to be, in the front end's addresses.
        addr: u64,
    },
    /// A descriptor could not be copied.
    #[error("cannot copy a file descriptor")]
    Copy(#[source] io::Error),
}

/// What a device offers to front ends.
pub fn offer(device: &impl Device) -> Offer {
    Offer {
        features: device.features(),
        protocol_features: device.protocol_features(),
        queues: device.queues(),
        queue_size_max: MAX_QUEUE_SIZE,
        entries_max: MAX_DEVICE_ENTRIES,
        memory_slots: MAX_REGIONS,
    }
}

/// Why an action on the device of an engine failed.
type ErrorOf<E> = HostError<<DeviceOf<E> as Device>::Error>;

/// A device on data threads, during one connection.
pub struct DeviceHost<E: DeviceEngine> {
    device: Arc<DeviceOf<E>>,
    threads: Arc<Threads<E>>,
    memory: Arc<GuestMemory>,
    log: Option<Arc<DirtyLog>>,
    inflight: Option<Arc<InflightRegion>>,
    queues: Vec<Option<QueueHandle<DeviceOf<E>>>>,
    /// Counts the guest's memory and opens it to the network. Dropped after what it counts.
    account: MemoryAccount,
}

impl<E: DeviceEngine> DeviceHost<E> {
    /// The device as a new connection finds it.
    ///
    /// What the guest's driver chose in the configuration space stays as the last connection left it: a front
    /// end that reconnects goes on with a driver that chose it long ago and relies on it.
    pub fn new(device: Arc<DeviceOf<E>>, threads: Arc<Threads<E>>, account: MemoryAccount) -> Self {
        let queues = (0..device.queues()).map(|_| None).collect();
        Self {
            device,
            threads,
            account,
            memory: GuestMemory::empty(),
            log: None,
            inflight: None,
            queues,
        }
    }

    fn queue(&self, index: u16) -> Option<&QueueHandle<DeviceOf<E>>> {
        self.queues.get(usize::from(index))?.as_ref()
    }

    fn start(&mut self, index: u16, machine: &Machine) -> Result<Effect, ErrorOf<E>> {
        let Some((ring, addr)) = machine
            .ring(index)
            .and_then(|ring| Some((ring, ring.addr?)))
        else {
            return Ok(Effect::Done);
        };
        let config = self.configure(index, ring, addr, machine)?;
        let handle = self.threads.start_queue(&self.device, config)?;
        self.queues[usize::from(index)] = Some(handle);
        Ok(Effect::Done)
    }

    fn configure(
        &self,
        index: u16,
        ring: &Ring,
        addr: VringAddr,
        machine: &Machine,
    ) -> Result<QueueConfig, ErrorOf<E>> {
        let locate = |part, addr| {
            let outside: ErrorOf<E> = HostError::RingOutside { index, part, addr };
            self.memory.user_to_guest(addr).ok_or(outside)
        };
        let kick = match &ring.kick {
            Some(Kick::Fd(fd)) => Some(fd),
            Some(Kick::Polled) | None => None,
        };
        let log = self.log.clone().filter(|_| machine.logging());
        let used_log =
            (log.is_some() && addr.flags & VRING_F_LOG != 0).then_some(GuestAddr(addr.log));
        Ok(QueueConfig {
            index,
            size: ring.size,
            desc: locate("descriptor table", addr.desc)?,
            avail: locate("available ring", addr.avail)?,
            used: locate("used ring", addr.used)?,
            base: machine.base(index),
            features: machine.features(),
            kick: Self::copy(kick)?,
            call: Self::copy(ring.call.as_ref())?,
            err: Self::copy(ring.err.as_ref())?,
            inflight: self
                .inflight
                .as_ref()
                .and_then(|region| region.queue(index)),
            log,
            used_log,
            memory: Arc::clone(&self.memory),
        })
    }

    fn stop(
        &mut self,
        index: u16,
        machine: &Machine,
        stop: fn(QueueHandle<DeviceOf<E>>) -> Result<u32, QueueError>,
    ) -> Result<Effect, ErrorOf<E>> {
        let handle = self
            .queues
            .get_mut(usize::from(index))
            .and_then(Option::take);
        match handle {
            Some(handle) => Ok(Effect::Stopped(stop(handle)?)),
            None => Ok(Effect::Stopped(machine.base(index))),
        }
    }

    fn new_call(&self, index: u16, machine: &Machine) -> Result<Effect, ErrorOf<E>> {
        let call = machine.ring(index).and_then(|ring| ring.call.as_ref());
        if let Some(queue) = self.queue(index) {
            queue.set_call(Self::copy(call)?)?;
        }
        Ok(Effect::Done)
    }

    fn new_err(&self, index: u16, machine: &Machine) -> Result<Effect, ErrorOf<E>> {
        let err = machine.ring(index).and_then(|ring| ring.err.as_ref());
        if let Some(queue) = self.queue(index) {
            queue.set_err(Self::copy(err)?)?;
        }
        Ok(Effect::Done)
    }

    fn map_log(&mut self, area: LogArea, file: OwnedFd) -> Result<Effect, ErrorOf<E>> {
        check_memory(&file)?;
        let bytes = Mapping::bytes_for(&file, area.offset, area.size)?;
        self.account
            .reserve_log(bytes)
            .map_err(MemoryError::OverLimit)?;
        let mapped = DirtyLog::map(file, area.size, area.offset);
        if let Ok(log) = &mapped {
            self.log = Some(Arc::clone(log));
        }
        self.update_account();
        mapped?;
        Ok(Effect::Done)
    }

    fn map_inflight(
        &mut self,
        layout: RingLayout,
        area: InflightArea,
        file: OwnedFd,
    ) -> Result<Effect, ErrorOf<E>> {
        check_memory(&file)?;
        let region = InflightRegion::map(
            file,
            layout,
            area.mmap_size,
            area.mmap_offset,
            area.num_queues,
            area.queue_size,
        )?;
        self.inflight = Some(region);
        Ok(Effect::Done)
    }

    fn change_memory(&mut self, action: Action) -> Result<Effect, ErrorOf<E>> {
        let changed = self.changed_memory(action);
        if let Ok(memory) = &changed {
            self.memory = Arc::clone(memory);
        }
        self.update_account();
        changed?;
        Ok(Effect::Done)
    }

    /// The memory table as an action wants it.
    fn changed_memory(&mut self, action: Action) -> Result<Arc<GuestMemory>, ErrorOf<E>> {
        let memory = match action {
            Action::ReplaceMemory(table) => {
                let specs: Result<Vec<_>, _> =
                    table.into_iter().map(|part| self.spec(part)).collect();
                GuestMemory::map(specs?, &mut self.account)?
            }
            Action::AddMemory(region, file) => {
                let spec = self.spec((region, file))?;
                self.memory.with_region(spec, &mut self.account)?
            }
            Action::RemoveMemory(region) => {
                self.memory
                    .without_region(GuestAddr(region.guest), region.size, region.user)?
            }
            _ => Arc::clone(&self.memory),
        };
        Ok(memory)
    }

    fn spec(&mut self, (region, file): (Region, OwnedFd)) -> Result<RegionSpec, ErrorOf<E>> {
        check_memory(&file)?;
        if let Some(why) = why_unsealed(&file) {
            self.account.note_unsealed(why);
        }
        Ok(RegionSpec {
            guest: GuestAddr(region.guest),
            size: region.size,
            user_addr: region.user,
            mmap_offset: region.mmap_offset,
            file,
        })
    }

    fn copy(fd: Option<&Arc<OwnedFd>>) -> Result<Option<OwnedFd>, ErrorOf<E>> {
        let copied = fd.map(|fd| fd.try_clone()).transpose();
        copied.map_err(HostError::Copy)
    }

    /// Counts what is in use now: after each change, and after one that failed.
    fn update_account(&mut self) {
        self.account.set_in_use(InUse {
            table_bytes: self.memory.mapped_bytes(),
            log_bytes: self.log.as_ref().map_or(0, |log| log.mapped_bytes()),
            pinned_bytes: self.memory.pinned_bytes(),
        });
    }
}

impl<E: DeviceEngine> Host for DeviceHost<E> {
    type Error = ErrorOf<E>;

    fn perform(&mut self, action: Action, machine: &Machine) -> Result<Effect, ErrorOf<E>> {
        match action {
            Action::ReplaceMemory(_) | Action::AddMemory(..) | Action::RemoveMemory(_) => {
                self.change_memory(action)
            }
            Action::StartRing(index) => self.start(index, machine),
            Action::StopRing(index) => self.stop(index, machine, QueueHandle::stop),
            Action::AbandonRing(index) => self.stop(index, machine, QueueHandle::abandon),
            Action::CheckKick(fd) => {
                check_kick(&fd)?;
                Ok(Effect::Done)
            }
            Action::CheckSignal(fd) => {
                check_signal(&fd)?;
                Ok(Effect::Done)
            }
            Action::NewCall(index) => self.new_call(index, machine),
            Action::NewErr(index) => self.new_err(index, machine),
            Action::MapLog(area, file) => self.map_log(area, file),
            Action::CreateInflight {
                layout,
                queues,
                size,
            } => {
                let (region, file) = InflightRegion::create(layout, queues, size)?;
                let area = InflightArea {
                    mmap_size: region.mmap_size(),
                    mmap_offset: 0,
                    num_queues: queues,
                    queue_size: size,
                    padding: 0,
                };
                Ok(Effect::Inflight(area, file))
            }
            Action::MapInflight(layout, area, file) => self.map_inflight(layout, area, file),
            Action::ReadConfig(head) => {
                let mut bytes = vec![0; head.size as usize];
                self.device.read_config(head.offset, &mut bytes);
                Ok(Effect::Config(bytes))
            }
            Action::WriteConfig { offset, data } => {
                let written = self.device.write_config(offset, &data);
                written.map_err(HostError::Device)?;
                Ok(Effect::Done)
            }
            Action::ResetDevice => {
                self.device.reset();
                if let Some(inflight) = &self.inflight {
                    inflight.forget();
                }
                Ok(Effect::Done)
            }
            // These are the protocol's own.
            Action::BackendChannel(_)
            | Action::Note(_)
            | Action::Reply(_)
            | Action::ReplyBase(_) => Ok(Effect::Done),
        }
    }
}
