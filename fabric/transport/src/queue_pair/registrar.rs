//! Opens guests' memory to a node's card, whole and once, so that data go from and to it without a copy.

use std::ptr::NonNull;

use fabric_types::registrar::{MemoryRegistrar, Registered};

use super::pair::Offered;

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
}

impl MemoryRegistrar for Registrar {
    fn opens_memory(&self) -> bool {
        matches!(self.0, Offered::Port(_))
    }

    unsafe fn register(&self, start: NonNull<u8>, bytes: usize) -> Option<Registered> {
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
    use crate::queue_pair::fake::FakeCard;
    use crate::queue_pair::pair::Port;

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
