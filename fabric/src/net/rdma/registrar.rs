//! Opens guests' memory to a node's card, whole and once, so that data go from and to it without a copy.

use std::ptr::NonNull;

use super::pair::{Offered, Registered};

/// See the module. Clones are of the same card.
#[derive(Debug, Clone)]
pub struct Registrar(Offered);

impl Registrar {
    /// Of a node whose data go so.
    pub fn new(pairs: Offered) -> Self {
        Self(pairs)
    }

    /// One that opens nothing: data are copied to memory that is open.
    pub fn none() -> Self {
        Self(Offered::No("nothing is opened here".to_owned()))
    }

    /// Whether it opens anything at all.
    pub fn opens_memory(&self) -> bool {
        matches!(self.0, Offered::Port(_))
    }

    /// Opens memory, which pins it, until what is returned is dropped. `None` if nothing goes over RDMA here,
    /// or it cannot be opened, of which the log tells: then its data are copied.
    ///
    /// # Safety
    /// The memory stays mapped as it is until then, and is reached by pointers only. The device reads and
    /// writes what requests name.
    pub unsafe fn register(&self, start: NonNull<u8>, bytes: usize) -> Option<Registered> {
        let Offered::Port(port) = &self.0 else {
            return None;
        };
        // SAFETY: the caller's promise.
        match unsafe { port.register(start, bytes) } {
            Ok(registered) => Some(registered),
            Err(reason) => {
                tracing::warn!(
                    reason,
                    bytes,
                    "cannot register guest memory with the card: its data are copied; `penstock rdma \
                     check` shows the limits"
                );
                None
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::net::rdma::fake::FakeCard;
    use crate::net::rdma::pair::Port;

    #[test]
    fn memory_is_registered_while_held_and_never_without_a_card() {
        let mut memory = [0u8; 64];
        let start = NonNull::from(&mut memory[0]);
        let card = FakeCard::new(1);
        let registrar = Registrar::new(Offered::Port(Arc::new(card.clone())));
        // SAFETY: the memory outlives what is registered.
        unsafe {
            let registered = registrar.register(start, 64);
            assert!(registered.is_some());
            assert_eq!((card.counts().regions, card.counts().bytes), (1, 64));
            // It is open, and cannot be opened once more.
            assert!(registrar.register(start, 64).is_none());
            drop(registered);
            assert!(Registrar::none().register(start, 64).is_none());
        }
        assert_eq!((card.counts().regions, card.counts().registrations), (0, 1));
    }
}
