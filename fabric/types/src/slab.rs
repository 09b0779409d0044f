//! A fixed number of slots with stable addresses, and keys that tell a slot's uses apart.

/// Names one use of a slot: the index in the lower half, the count of uses in the upper but for its highest
/// bit, which is free for marks ([`incoming`](crate::incoming)).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Key(pub u64);

impl Key {
    /// The slot's index.
    #[inline]
    pub fn index(self) -> u32 {
        (self.0 & u64::from(u32::MAX)) as u32
    }

    fn new(uses: u32, index: u32) -> Self {
        Self(u64::from(uses) << 32 | u64::from(index))
    }
}

/// Uses are counted modulo this, a power of two.
const USES: u32 = 1 << 31;

#[derive(Debug)]
struct Slot<T> {
    uses: u32,
    taken: bool,
    value: T,
}

/// The slots. Nothing is allocated or moved after `new`; a slot keeps its allocations when it is freed.
#[derive(Debug)]
pub struct Slab<T> {
    slots: Box<[Slot<T>]>,
    free: Vec<u32>,
}

impl<T> Slab<T> {
    /// `count` free slots holding what `init` makes.
    pub fn new(count: u32, mut init: impl FnMut() -> T) -> Self {
        let slots = (0..count)
            .map(|_| Slot {
                uses: 0,
                taken: false,
                value: init(),
            })
            .collect();
        Self {
            slots,
            free: (0..count).rev().collect(),
        }
    }

    /// Takes a free slot; its value is what its last user left.
    #[inline]
    pub fn take(&mut self) -> Option<u32> {
        let index = self.free.pop()?;
        self.slots[index as usize].taken = true;
        Some(index)
    }

    /// Frees a slot. Keys of this use match no more.
    ///
    /// # Panics
    /// If the slot is free: its user lost count, and going on would mix up two guests' requests.
    #[inline]
    pub fn give_back(&mut self, index: u32) {
        let slot = &mut self.slots[index as usize];
        assert!(slot.taken, "slot {index} freed twice");
        slot.taken = false;
        slot.uses = (slot.uses + 1) % USES;
        self.free.push(index);
    }

    /// The key of a taken slot's present use.
    #[inline]
    pub fn key(&self, index: u32) -> Key {
        Key::new(self.slots[index as usize].uses, index)
    }

    /// The index, if `key` names the present use of a taken slot.
    #[inline]
    pub fn find(&self, key: Key) -> Option<u32> {
        let slot = self.slots.get(key.index() as usize)?;
        (slot.taken && Key::new(slot.uses, key.index()) == key).then_some(key.index())
    }

    /// Number of free slots.
    pub fn free(&self) -> usize {
        self.free.len()
    }

    /// Number of taken slots.
    pub fn taken(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Number of slots.
    pub fn capacity(&self) -> u32 {
        u32::try_from(self.slots.len()).expect("made from a u32")
    }

    /// Values of the taken slots.
    pub fn iter(&self) -> impl Iterator<Item = &T> {
        let taken = self.slots.iter().filter(|slot| slot.taken);
        taken.map(|slot| &slot.value)
    }

    /// True if the slot is taken.
    pub fn is_taken(&self, index: u32) -> bool {
        self.slots[index as usize].taken
    }
}

impl<T> std::ops::Index<u32> for Slab<T> {
    type Output = T;

    #[inline]
    fn index(&self, index: u32) -> &T {
        &self.slots[index as usize].value
    }
}

impl<T> std::ops::IndexMut<u32> for Slab<T> {
    #[inline]
    fn index_mut(&mut self, index: u32) -> &mut T {
        &mut self.slots[index as usize].value
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_names_one_use_only() {
        let mut slab = Slab::new(1, || 0u8);
        let index = slab.take().unwrap();
        let first = slab.key(index);
        assert_eq!(slab.find(first), Some(index));
        assert_eq!(slab.take(), None);
        slab.give_back(index);
        assert_eq!(slab.find(first), None, "a free slot has no user");
        slab.take().unwrap();
        assert_eq!(slab.find(first), None, "another use");
        assert_eq!(slab.find(Key(7)), None, "no such slot");
    }

    #[test]
    #[should_panic(expected = "freed twice")]
    fn freeing_twice_is_caught() {
        let mut slab = Slab::new(2, || ());
        let index = slab.take().unwrap();
        slab.give_back(index);
        slab.give_back(index);
    }
}
