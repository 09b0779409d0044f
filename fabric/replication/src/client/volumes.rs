//! The volumes that a data thread has requests of, and whose turn it is to send.

use std::collections::VecDeque;
use std::ops::{Index, IndexMut};
use std::sync::Arc;

use fabric_types::slab::Key;

use super::shares::Holdings;
use super::waiting::{WAITING_MAX, Waiting};
use super::writes::Writes;
use crate::volume::VolumeState;

/// One data thread's view of an open volume.
pub(super) struct LocalVolume {
    pub(super) id: u64,
    pub(super) state: Arc<VolumeState>,
    pub(super) in_flight: u32,
    pub(super) writes: Writes,
    /// What it holds of what all volumes of the thread share.
    pub(super) held: Holdings,
    /// Pieces that wait for space.
    pub(super) held_pieces: u32,
    /// How long the oldest of them did at the last look.
    pub(super) held_for_us: u64,
    /// Requests that wait for others that overlap them, oldest first; at most [`WAITING_MAX`].
    pub(super) waiting: VecDeque<Waiting>,
    /// Requests with pieces that wait for the window, oldest first. A request that failed has none left.
    pub(super) unsent: VecDeque<Key>,
    /// It has its place in [`Volumes::senders`].
    is_sender: bool,
}

/// By the number of the volume's slot.
#[derive(Default)]
pub(super) struct Volumes {
    slots: Vec<Option<LocalVolume>>,
    /// Volumes with data that wait for the window, in the order of their turns.
    senders: VecDeque<u32>,
    /// Requests that wait for others that overlap them, of all volumes.
    waiting: usize,
}

impl Volumes {
    /// Makes the volume known to this thread; false while its slot's last user still has requests here.
    #[inline]
    pub(super) fn attach(&mut self, volume: &Arc<VolumeState>) -> bool {
        self.find(volume).is_some() || self.attach_new(volume)
    }

    #[cold]
    fn attach_new(&mut self, volume: &Arc<VolumeState>) -> bool {
        let slot = volume.slot() as usize;
        if self.slots.len() <= slot {
            self.slots.resize_with(slot + 1, || None);
        }
        let old = self.slots[slot].as_ref();
        if old.is_some_and(|l| l.in_flight > 0) {
            return false;
        }
        let is_sender = old.is_some_and(|l| l.is_sender);
        self.slots[slot] = Some(LocalVolume {
            id: volume.id(),
            state: Arc::clone(volume),
            in_flight: 0,
            writes: Writes::EMPTY,
            held: Holdings::default(),
            held_pieces: 0,
            held_for_us: 0,
            waiting: VecDeque::new(),
            unsent: VecDeque::new(),
            is_sender,
        });
        true
    }

    /// The volume, if this thread knows it.
    #[inline]
    pub(super) fn find(&self, volume: &VolumeState) -> Option<&LocalVolume> {
        let local = self.slots.get(volume.slot() as usize)?.as_ref()?;
        (local.id == volume.id()).then_some(local)
    }

    /// Slots that are in use, or were.
    pub(super) fn slots(&self) -> u32 {
        self.slots.len() as u32
    }

    /// The volume in a slot, if there is one.
    pub(super) fn get(&self, slot: u32) -> Option<&LocalVolume> {
        self.slots.get(slot as usize)?.as_ref()
    }

    /// All that are known.
    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut LocalVolume> {
        self.slots.iter_mut().flatten()
    }

    /// Requests that wait for others that overlap them.
    #[inline]
    pub(super) fn waiting(&self) -> usize {
        self.waiting
    }

    /// Keeps a request until it may begin; false if its volume has too many that wait.
    pub(super) fn wait(&mut self, volume: u32, waiting: Waiting) -> bool {
        let queue = &mut self[volume].waiting;
        if queue.len() >= WAITING_MAX {
            return false;
        }
        queue.push_back(waiting);
        self.waiting += 1;
        true
    }

    /// A request begins that was taken off its volume's queue.
    pub(super) fn note_begun(&mut self) {
        self.waiting -= 1;
    }

    /// Pieces of a request wait for the window.
    pub(super) fn wait_for_window(&mut self, volume: u32, io: Key) {
        let local = &mut self[volume];
        local.unsent.push_back(io);
        if !std::mem::replace(&mut local.is_sender, true) {
            self.senders.push_back(volume);
        }
    }

    /// Volumes with data that wait for the window.
    #[inline]
    pub(super) fn senders(&self) -> usize {
        self.senders.len()
    }

    /// The volume whose turn it is.
    pub(super) fn next_sender(&mut self) -> Option<u32> {
        self.senders.pop_front()
    }

    /// It has had its turn, and has more to send.
    pub(super) fn sends_again(&mut self, volume: u32) {
        self.senders.push_back(volume);
    }

    /// It has had its turn, and nothing more to send.
    pub(super) fn ends_sending(&mut self, volume: u32) {
        self[volume].is_sender = false;
    }
}

impl Index<u32> for Volumes {
    type Output = LocalVolume;

    #[inline]
    fn index(&self, slot: u32) -> &LocalVolume {
        self.slots[slot as usize]
            .as_ref()
            .expect("a volume stays while it has requests")
    }
}

impl IndexMut<u32> for Volumes {
    #[inline]
    fn index_mut(&mut self, slot: u32) -> &mut LocalVolume {
        self.slots[slot as usize]
            .as_mut()
            .expect("a volume stays while it has requests")
    }
}
