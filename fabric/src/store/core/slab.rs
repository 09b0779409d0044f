//! A fixed number of reusable slots. A slot keeps its allocations when it is freed.

use std::ops::{Index, IndexMut};

/// See the module.
#[derive(Debug)]
pub(super) struct Slab<T> {
    slots: Vec<(bool, T)>,
    free: Vec<u32>,
}

impl<T: Default> Slab<T> {
    pub(super) fn new(capacity: usize) -> Self {
        let slots = (0..capacity).map(|_| (false, T::default())).collect();
        Self {
            slots,
            free: (0..capacity as u32).rev().collect(),
        }
    }

    /// A slot with whatever its last user left in it.
    pub(super) fn take(&mut self) -> Option<u32> {
        let slot = self.free.pop()?;
        self.slots[slot as usize].0 = true;
        Some(slot)
    }

    pub(super) fn give_back(&mut self, slot: u32) {
        let used = &mut self.slots[slot as usize].0;
        assert!(*used, "slot freed twice");
        *used = false;
        self.free.push(slot);
    }

    pub(super) fn free_count(&self) -> usize {
        self.free.len()
    }

    pub(super) fn in_use(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    pub(super) fn capacity(&self) -> usize {
        self.slots.len()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &T> {
        self.slots
            .iter()
            .filter(|(used, _)| *used)
            .map(|(_, value)| value)
    }
}

impl<T> Index<u32> for Slab<T> {
    type Output = T;

    fn index(&self, slot: u32) -> &T {
        &self.slots[slot as usize].1
    }
}

impl<T> IndexMut<u32> for Slab<T> {
    fn index_mut(&mut self, slot: u32) -> &mut T {
        &mut self.slots[slot as usize].1
    }
}
