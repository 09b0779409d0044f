//! A simulated disk: what was not flushed may be lost, torn at sectors, in any order.

use std::io;

use fabric_store::device::SyncDevice;
use fabric_types::iov::IoVecs;
use rand::Rng;
use rand_chacha::ChaCha8Rng;

pub const SECTOR: usize = 512;

/// A write that is complete but not durable.
#[derive(Clone)]
struct Pending {
    offset: usize,
    data: Vec<u8>,
}

/// The disk. `now` is what reads see, `durable` what a power loss leaves for sure.
#[derive(Clone)]
pub struct Disk {
    now: Vec<u8>,
    durable: Vec<u8>,
    pending: Vec<Pending>,
    pub writes: u64,
    pub flushes: u64,
    /// Fails the write with this number, and all later ones.
    pub fail_from_write: Option<u64>,
}

impl Disk {
    pub fn new(bytes: usize) -> Self {
        Self {
            now: vec![0; bytes],
            durable: vec![0; bytes],
            pending: Vec::new(),
            writes: 0,
            flushes: 0,
            fail_from_write: None,
        }
    }

    /// The process dies, the machine lives: every write that was complete stays.
    pub fn process_crash(&self) -> Self {
        Self::durable(self.now.clone())
    }

    /// The machine loses power: any subset of sectors of what was not flushed survives. `torn` are writes in
    /// flight, of which parts may have arrived as well.
    pub fn power_loss(&self, rng: &mut ChaCha8Rng, torn: &[(u64, Vec<u8>)]) -> Self {
        let mut bytes = self.durable.clone();
        let style = rng.random_range(0..4);
        let torn = torn.iter().map(|(offset, data)| Pending {
            offset: *offset as usize,
            data: data.clone(),
        });
        for write in self.pending.iter().cloned().chain(torn) {
            let keep_all = style == 0 && rng.random_bool(0.5) || style == 1;
            let keep_none = !keep_all && style != 3 && rng.random_bool(0.5);
            for (i, sector) in write.data.chunks(SECTOR).enumerate() {
                if keep_all || (!keep_none && rng.random_bool(0.7)) {
                    let at = write.offset + i * SECTOR;
                    bytes[at..at + sector.len()].copy_from_slice(sector);
                }
            }
        }
        Self::durable(bytes)
    }

    fn durable(bytes: Vec<u8>) -> Self {
        let mut disk = Self::new(0);
        disk.durable = bytes.clone();
        disk.now = bytes;
        disk
    }

    pub fn read(&mut self, offset: u64, iovecs: &IoVecs) {
        let mut at = offset as usize;
        for i in 0..iovecs.len as usize {
            // SAFETY: the core keeps the list and its destinations valid until the completion.
            let buf = unsafe {
                let iov = &*iovecs.ptr.add(i);
                std::slice::from_raw_parts_mut(iov.iov_base.cast::<u8>(), iov.iov_len)
            };
            buf.copy_from_slice(&self.now[at..at + buf.len()]);
            at += buf.len();
        }
    }

    pub fn write(&mut self, offset: u64, data: Vec<u8>) -> Result<(), i32> {
        self.writes += 1;
        if self.fail_from_write.is_some_and(|n| self.writes >= n) {
            return Err(libc::EIO);
        }
        let offset = offset as usize;
        self.now[offset..offset + data.len()].copy_from_slice(&data);
        self.pending.push(Pending { offset, data });
        Ok(())
    }

    pub fn make_durable(&mut self) {
        self.flushes += 1;
        for write in self.pending.drain(..) {
            self.durable[write.offset..write.offset + write.data.len()]
                .copy_from_slice(&write.data);
        }
    }
}

/// Bytes of a scatter list.
pub fn gather(iovecs: &IoVecs) -> Vec<u8> {
    let mut data = Vec::new();
    for i in 0..iovecs.len as usize {
        // SAFETY: the core keeps the list and its sources valid until the completion.
        let buf = unsafe {
            let iov = &*iovecs.ptr.add(i);
            std::slice::from_raw_parts(iov.iov_base.cast::<u8>(), iov.iov_len)
        };
        data.extend_from_slice(buf);
    }
    data
}

impl SyncDevice for Disk {
    fn capacity_bytes(&self) -> u64 {
        self.now.len() as u64
    }

    fn read_at(&mut self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        buf.copy_from_slice(&self.now[offset as usize..offset as usize + buf.len()]);
        Ok(())
    }

    fn write_at(&mut self, offset: u64, buf: &[u8]) -> io::Result<()> {
        self.write(offset, buf.to_vec())
            .map_err(io::Error::from_raw_os_error)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.make_durable();
        Ok(())
    }
}
