//! The seam by which guests' memory is opened to the network, beside [`io::Engine`](crate::io::Engine): who
//! maps it does not know which devices there are.

use std::fmt;
use std::ptr::NonNull;

/// Memory that a device may reach, until this is dropped.
pub struct Registered {
    _region: Box<dyn Send + Sync>,
}

impl Registered {
    /// Keeps `region`, whose drop closes it.
    pub fn new(region: impl Send + Sync + 'static) -> Self {
        Self {
            _region: Box::new(region),
        }
    }
}

impl fmt::Debug for Registered {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Registered")
    }
}

/// Opens memory to a node's devices, whole and once, so that data go from and to it without a copy.
pub trait MemoryRegistrar: fmt::Debug + Send + Sync {
    /// Whether it opens anything at all.
    fn opens_memory(&self) -> bool;

    /// Opens memory, which pins it, until what is returned is dropped. `None` if nothing is opened here, or
    /// it cannot be, of which the log tells: then its data are copied.
    ///
    /// # Safety
    /// The memory stays mapped as it is until then, and is reached by pointers only. Devices read and write
    /// what requests name.
    unsafe fn register(&self, start: NonNull<u8>, bytes: usize) -> Option<Registered>;
}

/// Opens nothing: data are copied to memory that is open.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoRegistrar;

impl MemoryRegistrar for NoRegistrar {
    fn opens_memory(&self) -> bool {
        false
    }

    unsafe fn register(&self, _: NonNull<u8>, _: usize) -> Option<Registered> {
        None
    }
}
