//! Tests of the device model; requests are tested with the ring, in `data_thread`.

use std::sync::{Mutex, OnceLock, Weak};

use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};

use super::*;

#[derive(Clone)]
struct Disk(Arc<std::sync::atomic::AtomicU64>);

impl Volume for Disk {
    fn size_bytes(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

fn disk(size: u64) -> (Disk, Arc<std::sync::atomic::AtomicU64>) {
    let size = Arc::new(std::sync::atomic::AtomicU64::new(size));
    (Disk(Arc::clone(&size)), size)
}

fn device(options: BlkOptions) -> Arc<BlkDevice<Disk>> {
    BlkDevice::new(disk(1 << 30).0, options).unwrap()
}

#[test]
fn config_space_has_every_field_at_its_offset() {
    let device = device(BlkOptions {
        queues: 4,
        ..BlkOptions::default()
    });
    let mut out = [0; CONFIG_BYTES];
    device.read_config(0, &mut out);
    let u32_at = |at: usize| u32::from_le_bytes(out[at..at + 4].try_into().unwrap());
    assert_eq!(
        u64::from_le_bytes(out[..8].try_into().unwrap()),
        (1 << 30) / 512
    );
    assert_eq!((u32_at(8), u32_at(12)), (57 * 4096, 126));
    assert_eq!((u32_at(20), out[24], out[26]), (512, 3, 8));
    assert_eq!((out[32], out[34]), (1, 4));
    assert_eq!(
        (u32_at(36), u32_at(40), u32_at(44)),
        (MAX_RANGE_SECTORS, MAX_RANGES, 8)
    );
    assert_eq!(
        (u32_at(48), u32_at(52), out[56]),
        (MAX_RANGE_SECTORS, MAX_RANGES, 1)
    );
}

#[test]
fn the_largest_request_fits_the_queue_size() {
    for (queue_size, seg_max, ranges_max) in [
        (1, 1, 1),
        (2, 1, 1),
        (4, 2, 2),
        (16, 14, 14),
        (128, 126, 16),
        (256, 254, 16),
        (512, SEG_MAX, 16),
        (32768, SEG_MAX, 16),
    ] {
        let device = device(BlkOptions {
            queue_size,
            ..BlkOptions::default()
        });
        let word = |at: u32| {
            let mut bytes = [0; 4];
            device.read_config(at, &mut bytes);
            u32::from_le_bytes(bytes)
        };
        assert_eq!(word(12), seg_max, "{queue_size}");
        assert_eq!((word(40), word(52)), (ranges_max, ranges_max));
        // SeaBIOS derives the bytes of one read from the two values.
        let read_bytes = (word(8) * seg_max) as u16;
        assert!(read_bytes >= 56 * 1024, "{queue_size}: {read_bytes}");
        assert!(u64::from(word(8)) * u64::from(seg_max) <= MAX_REQUEST_BYTES);
    }
}

#[test]
fn config_reads_past_the_end_are_zeroes() {
    let device = device(BlkOptions::default());
    let mut out = [0xff; 256];
    device.read_config(56, &mut out);
    assert_eq!(out[0], 1);
    assert!(out[1..].iter().all(|b| *b == 0));
    out.fill(0xff);
    device.read_config(u32::MAX, &mut out);
    assert!(out.iter().all(|b| *b == 0));
}

#[test]
fn capacity_follows_a_live_resize() {
    let (disk, size) = disk(1 << 20);
    let device = BlkDevice::new(disk, BlkOptions::default()).unwrap();
    size.store(1 << 21, Ordering::Relaxed);
    let mut capacity = [0; 8];
    device.read_config(0, &mut capacity);
    assert_eq!(u64::from_le_bytes(capacity), (1 << 21) / 512);
}

#[test]
fn only_writeback_can_be_written_and_a_reset_restores_it() {
    let device = device(BlkOptions::default());
    assert_eq!(device.write_config(WRITEBACK_OFFSET, &[0]), Ok(()));
    assert!(!device.writeback());
    let mut mode = [9];
    device.read_config(WRITEBACK_OFFSET, &mut mode);
    assert_eq!(mode, [0]);
    device.reset();
    assert!(device.writeback());
    for (offset, bytes) in [
        (0, &[0u8][..]),
        (WRITEBACK_OFFSET, &[2]),
        (WRITEBACK_OFFSET, &[0, 0]),
        (u32::MAX, &[]),
    ] {
        assert_eq!(
            device.write_config(offset, bytes),
            Err(BlkError::ConfigWrite {
                offset,
                len: bytes.len()
            })
        );
    }
}

#[test]
fn a_read_only_device_says_so_and_offers_no_discard() {
    let has = |device: &BlkDevice<Disk>, bit: u32| device.features() & 1 << bit != 0;
    let (rw, ro) = (
        device(BlkOptions::default()),
        device(BlkOptions {
            read_only: true,
            ..BlkOptions::default()
        }),
    );
    assert!(
        !has(&rw, VIRTIO_BLK_F_RO)
            && has(&rw, VIRTIO_BLK_F_DISCARD)
            && has(&rw, VIRTIO_BLK_F_WRITE_ZEROES)
    );
    assert!(
        has(&ro, VIRTIO_BLK_F_RO)
            && !has(&ro, VIRTIO_BLK_F_DISCARD)
            && !has(&ro, VIRTIO_BLK_F_WRITE_ZEROES)
    );
    for bit in [
        VIRTIO_F_VERSION_1,
        VIRTIO_RING_F_EVENT_IDX,
        VIRTIO_RING_F_INDIRECT_DESC,
        VIRTIO_BLK_F_CONFIG_WCE,
    ] {
        assert!(has(&rw, bit) && has(&ro, bit));
    }
}

#[test]
fn impossible_options_are_refused() {
    let new = |options| BlkDevice::new(disk(512).0, options).map(|_| ());
    assert_eq!(
        new(BlkOptions {
            queues: 0,
            ..BlkOptions::default()
        }),
        Err(BlkError::Queues(0))
    );
    assert_eq!(
        new(BlkOptions {
            queues: 257,
            ..BlkOptions::default()
        }),
        Err(BlkError::Queues(257))
    );
    for queue_size in [0, 3, 40000] {
        let options = BlkOptions {
            queue_size,
            ..BlkOptions::default()
        };
        assert_eq!(new(options), Err(BlkError::QueueSize(queue_size)));
    }
    for serial in ["123456789012345678901", "tab\t"] {
        let options = BlkOptions {
            serial: serial.into(),
            ..BlkOptions::default()
        };
        assert_eq!(new(options), Err(BlkError::Serial(serial.into())));
    }
}

/// Keeps the mode in memory, or refuses to.
#[derive(Debug, Default)]
struct Keeper {
    kept: Mutex<Vec<bool>>,
    refuses: AtomicBool,
}

impl ModeKeeper for Keeper {
    fn keep(&self, writeback: bool) -> Result<(), String> {
        if self.refuses.load(Ordering::Relaxed) {
            return Err("no".into());
        }
        self.kept.lock().unwrap().push(writeback);
        Ok(())
    }
}

#[test]
fn the_write_cache_mode_changes_only_once_it_is_kept() {
    let keeper = Arc::new(Keeper::default());
    let device = device(BlkOptions {
        writeback: false,
        keeper: Some(Arc::clone(&keeper) as Arc<dyn ModeKeeper>),
        ..BlkOptions::default()
    });
    assert!(!device.writeback(), "it begins as it was kept");
    device.write_config(WRITEBACK_OFFSET, &[0]).unwrap();
    device.write_config(WRITEBACK_OFFSET, &[1]).unwrap();
    device.write_config(WRITEBACK_OFFSET, &[0]).unwrap();
    assert_eq!(*keeper.kept.lock().unwrap(), [true, false]);
    keeper.refuses.store(true, Ordering::Relaxed);
    let refused = device.write_config(WRITEBACK_OFFSET, &[1]);
    assert_eq!(refused, Err(BlkError::ModeNotKept("no".into())));
    assert!(!device.writeback());
    keeper.refuses.store(false, Ordering::Relaxed);
    device.reset();
    assert!(device.writeback());
    assert_eq!(*keeper.kept.lock().unwrap(), [true, false, true]);
}

/// Looks at the device's mode when it is asked to keep one.
#[derive(Debug, Default)]
struct Observer {
    device: OnceLock<Weak<BlkDevice<Disk>>>,
    seen: Mutex<Vec<(bool, bool)>>,
}

impl ModeKeeper for Observer {
    fn keep(&self, writeback: bool) -> Result<(), String> {
        let device = self.device.get().unwrap().upgrade().unwrap();
        self.seen
            .lock()
            .unwrap()
            .push((writeback, device.writeback()));
        Ok(())
    }
}

#[test]
fn writethrough_holds_while_it_is_still_being_kept() {
    let observer = Arc::new(Observer::default());
    let device = device(BlkOptions {
        keeper: Some(Arc::clone(&observer) as Arc<dyn ModeKeeper>),
        ..BlkOptions::default()
    });
    observer.device.set(Arc::downgrade(&device)).unwrap();
    device.write_config(WRITEBACK_OFFSET, &[0]).unwrap();
    device.write_config(WRITEBACK_OFFSET, &[1]).unwrap();
    assert_eq!(
        *observer.seen.lock().unwrap(),
        [(false, false), (true, false)]
    );
}
