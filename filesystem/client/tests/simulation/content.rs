//! The content of a file is that of an array of bytes to which the same is done.

use fs_client::{OwnedOperation, OwnedReply};
use fuse_codec::{CopyFileRange, FallocateMode, Handle, NodeId};

use crate::guest::{Guest, RDWR, ROOT, client, written};
use crate::seeds;
use crate::slow;
use crate::world::{Faults, World};

/// Bytes that changes begin below.
const SPAN: u64 = 60_000;

struct Model {
    world: World,
    guests: Vec<(Guest, Handle)>,
    file: u64,
    bytes: Vec<u8>,
}

impl Model {
    async fn new(world: World) -> Self {
        let mut guests = Vec::new();
        let mut file = 0;
        for node in 1..3 {
            let guest = Guest::new(&client(&world, node, None));
            let (ino, handle) = guest.create(ROOT, "f", RDWR).await.unwrap();
            guests.push((guest, handle));
            file = ino;
        }
        Self {
            world,
            guests,
            file,
            bytes: Vec::new(),
        }
    }

    fn set(&mut self, offset: u64, data: &[u8]) {
        let (from, to) = (offset as usize, offset as usize + data.len());
        let len = self.bytes.len().max(to);
        self.bytes.resize(len, 0);
        self.bytes[from..to].copy_from_slice(data);
    }

    /// One change by either host, and a look by either.
    async fn step(&mut self) {
        let random = self.world.runtime.clone();
        let (guest, handle) = self.guests[random.below(2) as usize].clone();
        let file = self.file;
        let (mut offset, mut length) = (random.below(SPAN), random.below(9000) + 1);
        if random.happens(0.3) {
            (offset, length) = (offset / 4096 * 4096, length.next_multiple_of(4096));
        }
        match random.below(8) {
            0..3 => {
                let data = random.bytes(length as usize);
                let count = guest.write(file, handle, offset, &data).await;
                assert_eq!(count, Ok(length as u32));
                self.set(offset, &data);
            }
            3 => {
                let data = random.bytes(length as usize);
                guest.append(file, handle, &data).await.unwrap();
                self.bytes.extend(data);
            }
            4 => {
                guest.truncate(file, offset).await.unwrap();
                self.bytes.resize(offset as usize, 0);
            }
            5 => self.zero(&guest, handle, (offset, length)).await,
            6 => self.copy(&guest, handle, (offset, length)).await,
            _ => {
                let mode = FallocateMode::Allocate { keep_size: false };
                guest
                    .fallocate(file, handle, (offset, length), mode)
                    .await
                    .unwrap();
                let len = self.bytes.len().max((offset + length) as usize);
                self.bytes.resize(len, 0);
            }
        }
        self.look().await;
    }

    async fn zero(&mut self, guest: &Guest, handle: Handle, (offset, length): (u64, u64)) {
        let keep_size = self.world.runtime.happens(0.5);
        let mode = match keep_size && self.world.runtime.happens(0.5) {
            true => FallocateMode::PunchHole,
            false => FallocateMode::Zero { keep_size },
        };
        guest
            .fallocate(self.file, handle, (offset, length), mode)
            .await
            .unwrap();
        let end = (offset + length) as usize;
        if !keep_size {
            self.bytes.resize(self.bytes.len().max(end), 0);
        }
        let len = self.bytes.len();
        self.bytes[(offset as usize).min(len)..end.min(len)].fill(0);
    }

    async fn copy(&mut self, guest: &Guest, handle: Handle, (offset, length): (u64, u64)) {
        let to_offset = match offset % 4096 {
            0 => self.world.runtime.below(20) * 4096,
            _ => self.world.runtime.below(SPAN),
        };
        // Within one file, ranges do not overlap.
        if offset < to_offset + 13_000 && to_offset < offset + 13_000 {
            return;
        }
        let copy = OwnedOperation::CopyFileRange(CopyFileRange {
            from: handle,
            from_offset: offset,
            to_inode: NodeId(self.file),
            to: handle,
            to_offset,
            length,
        });
        let copied = written(guest.call(self.file, copy).await).unwrap() as usize;
        let left = self.bytes.len().saturating_sub(offset as usize);
        assert!(copied <= length as usize && copied <= left);
        assert!(copied > 0 || left == 0);
        let data = self.bytes[self.bytes.len() - left..][..copied].to_vec();
        if copied > 0 {
            self.set(to_offset, &data);
        }
    }

    async fn look(&self) {
        let random = &self.world.runtime;
        let (guest, handle) = &self.guests[random.below(2) as usize];
        let attr = guest.getattr(self.file).await.unwrap();
        assert_eq!(attr.size, self.bytes.len() as u64);
        let all = guest.read(self.file, *handle, 0, 1 << 20).await.unwrap();
        let differs = all
            .iter()
            .zip(&self.bytes)
            .position(|(here, there)| here != there);
        assert_eq!((all.len(), differs), (self.bytes.len(), None));
        let (offset, length) = (random.below(SPAN), random.below(9000) as usize);
        let part = guest
            .read(self.file, *handle, offset, length as u32)
            .await
            .unwrap();
        let from = (offset as usize).min(self.bytes.len());
        let to = (from + length).min(self.bytes.len());
        assert_eq!(part, self.bytes[from..to]);
    }
}

#[test]
fn a_file_is_an_array_of_bytes_on_every_host() {
    seeds(20, |world| async move {
        world.set_faults(slow());
        let mut model = Model::new(world.clone()).await;
        for _ in 0..60 {
            model.step().await;
        }
        world.check();
    });
}

#[test]
fn a_file_is_an_array_of_bytes_whatever_is_lost_on_the_way() {
    seeds(20, |world| async move {
        let mut model = Model::new(world.clone()).await;
        world.set_faults(Faults {
            // Three times in a row is seldom enough.
            reply_lost: 0.002,
            hasty_reclaim: true,
            ..slow()
        });
        for _ in 0..60 {
            model.step().await;
        }
        world.check();
    });
}

#[test]
fn large_writes_and_reads_are_whole() {
    seeds(2, |world| async move {
        let mut model = Model::new(world.clone()).await;
        let (guest, handle) = model.guests[0].clone();
        for (offset, length) in [
            (0, 1 << 20),
            (1 << 20, 1 << 20),
            (500, 1 << 20),
            (3_000_000, 7),
        ] {
            let data = world.runtime.bytes(length);
            guest
                .write(model.file, handle, offset, &data)
                .await
                .unwrap();
            model.set(offset, &data);
        }
        let (other, handle) = model.guests[1].clone();
        let mut read = Vec::new();
        for offset in [0, 1 << 20, 2 << 20] {
            read.extend(
                other
                    .read(model.file, handle, offset, 1 << 20)
                    .await
                    .unwrap(),
            );
        }
        assert!(read == model.bytes);
        let reply = other
            .call(model.file, OwnedOperation::Getattr { handle: None })
            .await;
        assert!(matches!(reply, OwnedReply::Attr(..)));
    });
}
