//! Queue pairs on a device, by verbs.

use std::net::IpAddr;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use super::choice::{Choice, choose};
use super::inventory::Inventory;
use super::verbs::address::Psn;
use super::verbs::context::Context;
use super::verbs::device::DeviceList;
use super::verbs::error::VerbsError;
use super::verbs::memory::{Access, MemoryRegion, ProtectionDomain};
use super::verbs::post::ChainError;
use super::verbs::queue_pair::PostError;
use super::verbs::window::BindError;
use fabric_transport::queue_pair::pair::{Pair, Port, Side};
use fabric_transport::queue_pair::regions::{RegionCounts, Regions};
use fabric_transport::queue_pair::slots::Slots;
use fabric_types::registrar::Registered;

use pair::CardPair;

mod pair;
mod posted;
mod windows;

/// Why there is none, or it has failed.
#[derive(Debug, thiserror::Error)]
enum CardError {
    #[error(transparent)]
    Verbs(#[from] VerbsError),
    #[error("{}", .0.source)]
    Post(#[from] PostError),
    #[error(transparent)]
    Chain(#[from] ChainError),
    #[error(transparent)]
    Bind(#[from] BindError),
    #[error("memory is not open to the device, or not any more")]
    Closed,
    #[error("{0}")]
    Other(String),
}

/// The port of a device that a node's data address belongs to, opened.
pub struct Card {
    context: Context,
    domain: ProtectionDomain,
    choice: Choice,
    regions: Arc<Regions<MemoryRegion>>,
    /// Where the next queue pair begins to number its packets: a packet of an older one of the same number is
    /// none of its.
    psn: AtomicU32,
}

impl Card {
    /// The port for this address. `Err` says why there is none, for people.
    pub fn open(address: IpAddr) -> Result<Self, String> {
        let inventory = Inventory::take().map_err(|error| error.to_string())?;
        let choice = choose(&inventory, address).map_err(|unfit| unfit.to_string())?;
        let open = || -> Result<Self, CardError> {
            let list = DeviceList::get()?;
            let device = list.find(&choice.device);
            let device = device.ok_or_else(|| CardError::Other("the device is gone".to_owned()))?;
            let context = device.open()?;
            let clock = std::time::UNIX_EPOCH.elapsed().unwrap_or_default();
            Ok(Self {
                domain: ProtectionDomain::new(&context)?,
                context,
                choice: choice.clone(),
                regions: Arc::default(),
                psn: AtomicU32::new(clock.subsec_nanos()),
            })
        };
        open().map_err(|error| format!("{choice}: {error}"))
    }

    /// Which it is, for people.
    pub fn name(&self) -> String {
        self.choice.to_string()
    }

    fn next_psn(&self) -> Psn {
        Psn::new(self.psn.fetch_add(0x3_1415, Ordering::Relaxed))
    }
}

impl Port for Card {
    fn open(&self, slots: &Arc<Slots>, side: Side) -> Result<Box<dyn Pair>, String> {
        let made = CardPair::make(self, slots, side);
        let made = made.map_err(|error| format!("{}: {error}", self.choice))?;
        Ok(Box::new(made))
    }

    unsafe fn register(&self, start: NonNull<u8>, bytes: usize) -> Result<Registered, String> {
        // Peers reach it by windows only: a region's own key opens nothing to them.
        let access = Access::LOCAL_WRITE | Access::WINDOWS;
        // SAFETY: the caller's promise. Until it is dropped nobody but the device has more than pointers to
        // it.
        let region = unsafe { self.domain.register(start, bytes, access) };
        let region = region.map_err(|error| format!("{}: {error}", self.choice))?;
        let opened = self.regions.insert(start.addr().get(), bytes, region);
        let opened = opened.ok_or("a part of this memory is registered already")?;
        Ok(Registered::new(opened))
    }

    fn counts(&self) -> RegionCounts {
        self.regions.counts()
    }
}
