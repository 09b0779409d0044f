//! How much data a data thread has in flight.
//!
//! Whatever is in flight a small request of another volume waits for, on devices, in sockets and for the
//! processor. While there are such requests, long ones go in small pieces and in a window that shrinks when
//! they are answered late, and grows when they are answered soon (additive increase, multiplicative decrease,
//! by delay). So the wait stays short whatever the devices and the network are, and fast ones are kept busy.

use fabric_types::block::BLOCK_BYTES;
use fabric_types::ids::CHUNK_BYTES;

use crate::share::may_take;

/// Requests up to this size have a window of their own: they do not wait behind long ones of the same volume.
pub(super) const SMALL_BYTES: u64 = 16 << 10;
/// Somebody's small requests are heeded for so many requests of the thread after the last.
const HEEDED_REQUESTS: u64 = 1024;
/// A piece of a long request that takes longer makes the shared window shrink, in microseconds.
const DELAY_TARGET_US: u64 = 200;

/// How much data a thread has in flight. A volume that is alone on its thread has half of a window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WindowSizes {
    /// All volumes together, without requests up to 16 KiB, in bytes. A local NVMe drive or a network of 100
    /// Gbit/s is busy with less than the half.
    pub window_bytes: u64,
    /// The least that this shrinks to while another volume has small requests.
    pub shared_window_bytes: u64,
    /// Requests up to 16 KiB.
    pub small_window_bytes: u64,
    /// Largest piece of a read or write: a power of two from a block to a chunk.
    pub piece_bytes: u64,
    /// The least that this shrinks to while another volume has small requests; likewise.
    pub shared_piece_bytes: u64,
}

impl Default for WindowSizes {
    fn default() -> Self {
        Self {
            window_bytes: 8 << 20,
            shared_window_bytes: 32 << 10,
            small_window_bytes: 4 << 20,
            piece_bytes: 1 << 20,
            shared_piece_bytes: 32 << 10,
        }
    }
}

/// Data that replicas have to answer, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct InFlight {
    /// Of pieces longer than [`SMALL_BYTES`].
    long: u64,
    /// Of others.
    small: u64,
}

impl InFlight {
    #[inline]
    fn of(&mut self, bytes: u64) -> &mut u64 {
        match bytes <= SMALL_BYTES {
            true => &mut self.small,
            false => &mut self.long,
        }
    }

    #[inline]
    pub(super) fn add(&mut self, bytes: u64) {
        *self.of(bytes) += bytes;
    }

    #[inline]
    pub(super) fn remove(&mut self, bytes: u64) {
        *self.of(bytes) -= bytes;
    }
}

/// A volume's last small request, by number.
#[derive(Debug, Clone, Copy)]
struct Small {
    volume: u32,
    at: u64,
}

/// The window of a data thread.
#[derive(Debug, Default)]
pub(super) struct Window {
    sizes: WindowSizes,
    pub(super) in_flight: InFlight,
    /// The window while another volume has small requests.
    shared_bytes: u64,
    /// Requests so far.
    requests: u64,
    last_long: Option<u32>,
    /// The last small request, and the last one of another volume than that.
    smalls: [Option<Small>; 2],
}

impl Window {
    /// Other sizes than the default, before the first request.
    pub(super) fn set_sizes(&mut self, sizes: WindowSizes) {
        let is_whole = |bytes: u64| {
            bytes.is_power_of_two() && (BLOCK_BYTES as u64..=CHUNK_BYTES).contains(&bytes)
        };
        assert!(is_whole(sizes.piece_bytes) && is_whole(sizes.shared_piece_bytes));
        self.sizes = sizes;
    }

    /// A request of `bytes` bytes of this volume is taken.
    #[inline]
    pub(super) fn note(&mut self, volume: u32, bytes: u64) {
        let was_shared = self.is_shared();
        self.requests += 1;
        if bytes > SMALL_BYTES {
            self.last_long = Some(volume);
        } else {
            let at = self.requests;
            if self.smalls[0].is_none_or(|small| small.volume != volume) {
                self.smalls[1] = self.smalls[0];
            }
            self.smalls[0] = Some(Small { volume, at });
        }
        if !was_shared {
            self.shared_bytes = self.sizes.shared_window_bytes;
        }
    }

    /// Whether another volume than the one with long requests has small ones.
    #[inline]
    pub(super) fn is_shared(&self) -> bool {
        self.last_long.is_some_and(|long| self.is_shared_by(long))
    }

    #[inline]
    fn is_shared_by(&self, long: u32) -> bool {
        let mut smalls = self.smalls.iter().flatten();
        smalls.any(|small| small.volume != long && self.requests - small.at < HEEDED_REQUESTS)
    }

    /// How long the pieces of a long request are that this volume has come with.
    #[inline]
    pub(super) fn piece_bytes(&self, volume: u32) -> u64 {
        let sizes = &self.sizes;
        if !self.is_shared_by(volume) {
            return sizes.piece_bytes;
        }
        // Several of them fit the window.
        let fits = 1 << (self.shared_bytes / 4).max(1).ilog2();
        sizes.piece_bytes.min(sizes.shared_piece_bytes.max(fits))
    }

    /// Whether a volume with so much in flight may send `bytes` more.
    #[inline]
    pub(super) fn admits(&self, mine: &InFlight, bytes: u64) -> bool {
        let (mine, all, size) = if bytes <= SMALL_BYTES {
            let size = self.sizes.small_window_bytes;
            (mine.small, self.in_flight.small, size)
        } else if self.is_shared() {
            (mine.long, self.in_flight.long, self.shared_bytes)
        } else {
            (mine.long, self.in_flight.long, self.sizes.window_bytes)
        };
        let free = size.saturating_sub(all);
        // Who has nothing in flight may always send one piece.
        mine == 0 || may_take(mine as usize, bytes as usize, free as usize)
    }

    /// A piece was answered after `us` microseconds.
    #[inline]
    pub(super) fn adapt(&mut self, bytes: u64, us: u64) {
        if bytes <= SMALL_BYTES || !self.is_shared() {
            return;
        }
        let now = self.shared_bytes;
        if us > DELAY_TARGET_US {
            self.shared_bytes = (now - now / 8).max(self.sizes.shared_window_bytes);
        } else if self.in_flight.long >= now / 4 {
            // Only what is used tells that more would do.
            self.shared_bytes = (now + bytes / 8).min(self.sizes.window_bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: u64 = 1 << 20;
    const QUIET: u32 = 1;
    const STREAM: u32 = 2;
    const OTHER: u32 = 3;

    #[test]
    fn a_window_is_shared_while_another_volume_has_small_requests() {
        let mut window = Window::default();
        window.note(STREAM, LONG);
        window.note(STREAM, 4096);
        window.note(OTHER, LONG);
        assert!(window.is_shared(), "the first one's small request");
        let mut window = Window::default();
        window.note(STREAM, 4096);
        window.note(STREAM, LONG);
        assert!(!window.is_shared(), "its own");
        window.note(QUIET, 4096);
        window.note(STREAM, 4096);
        assert!(window.is_shared(), "its own do not hide the other's");
        for _ in 0..HEEDED_REQUESTS {
            window.note(STREAM, LONG);
        }
        assert!(!window.is_shared(), "long ago");
    }

    #[test]
    fn the_first_long_request_beside_a_quiet_volume_is_cut_small() {
        let mut window = Window::default();
        let sizes = WindowSizes::default();
        assert_eq!(window.piece_bytes(STREAM), sizes.piece_bytes);
        window.note(QUIET, 4096);
        assert_eq!(window.piece_bytes(STREAM), sizes.shared_piece_bytes);
        assert_eq!(window.piece_bytes(QUIET), sizes.piece_bytes);
    }

    #[test]
    fn late_answers_shrink_the_window_and_early_ones_widen_it() {
        let mut window = Window::default();
        let sizes = WindowSizes::default();
        window.note(QUIET, 4096);
        window.note(STREAM, LONG);
        assert_eq!(window.shared_bytes, sizes.shared_window_bytes);
        let mut answer = |us| {
            window.in_flight.long = window.shared_bytes / 2;
            window.adapt(window.piece_bytes(STREAM), us);
            window.shared_bytes
        };
        let wide = (0..10_000).map(|_| answer(DELAY_TARGET_US)).last();
        assert_eq!(wide, Some(sizes.window_bytes));
        let narrow = (0..100).map(|_| answer(DELAY_TARGET_US + 1)).last();
        assert_eq!(narrow, Some(sizes.shared_window_bytes));
        window.in_flight.long = 0;
        window.adapt(LONG, 1);
        assert_eq!(
            window.shared_bytes, sizes.shared_window_bytes,
            "it was not used"
        );
    }
}
