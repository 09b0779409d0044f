//! Devices of all three replicas run full under a guest that writes on.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use fabric::{FabricEngine, VolumeHandle};
use fabric_replication::volume::OnFull;
use fabric_types::io::{Engine, IoError, IoResult, Op, Request, Submit, Tag};

use super::meta::Cluster;
use super::rig::{MIB, pattern, wait};

/// Of the smallest device. A volume is larger.
const DEVICE_BYTES: u64 = 16 * MIB;
const WRITE_BYTES: u64 = 16384;
/// Writes in flight.
const DEPTH: usize = 6;
/// After which a test hangs.
const WAIT_MAX: Duration = Duration::from_secs(60);

/// A guest with several requests in flight.
struct Guest {
    engine: FabricEngine,
    volume: VolumeHandle,
    /// Memory of requests in flight, by tag.
    memory: BTreeMap<u64, Vec<u8>>,
    ended: BTreeMap<u64, IoResult>,
}

impl Guest {
    fn new(cluster: &mut Cluster) -> Self {
        let volume = cluster.open(1, 7);
        Self {
            engine: cluster.fabric(1).engine().unwrap(),
            volume,
            memory: BTreeMap::new(),
            ended: BTreeMap::new(),
        }
    }

    /// Begins a request, which its offset names.
    fn start(&mut self, op: Op, offset: u64, bytes: Vec<u8>, len: u64) {
        self.memory.insert(offset, bytes);
        let bytes = self.memory.get_mut(&offset).expect("just put there");
        let buffers = [libc::iovec {
            iov_base: bytes.as_mut_ptr().cast(),
            iov_len: bytes.len(),
        }];
        let request = Request {
            tag: Tag(offset),
            op,
            offset,
            len,
            buffers: if bytes.is_empty() { &[] } else { &buffers },
        };
        let begin = Instant::now();
        loop {
            // SAFETY: the memory is kept until the request has ended.
            match unsafe { self.engine.submit(&self.volume, &request) } {
                Submit::Pending => break,
                Submit::Done(result) => {
                    self.ended.insert(offset, result);
                    break;
                }
                // It has no lease yet.
                Submit::Busy => self.turn(),
            }
            assert!(begin.elapsed() < WAIT_MAX, "busy for ever");
        }
        self.engine.kick();
    }

    fn write(&mut self, offset: u64) {
        let bytes = pattern(offset, WRITE_BYTES as usize);
        self.start(Op::Write { fua: false }, offset, bytes, WRITE_BYTES);
    }

    fn turn(&mut self) {
        let ended = &mut self.ended;
        self.engine.reap(&mut |tag, result| {
            assert_eq!(ended.insert(tag.0, result), None, "it ends once");
        });
        wait(&self.engine, 5);
    }

    fn until(&mut self, what: &str, mut is_so: impl FnMut(&Self) -> bool) {
        let begin = Instant::now();
        while !is_so(self) {
            assert!(
                begin.elapsed() < WAIT_MAX,
                "not within {WAIT_MAX:?}: {what}"
            );
            self.turn();
        }
    }

    /// What has ended since this was asked last.
    fn take_ended(&mut self) -> BTreeMap<u64, IoResult> {
        self.memory
            .retain(|offset, _| !self.ended.contains_key(offset));
        std::mem::take(&mut self.ended)
    }

    /// Writes one after the other until some end with an error; which offsets were acknowledged, and which
    /// not.
    fn fill(&mut self) -> (Vec<u64>, Vec<u64>) {
        let (mut stored, mut refused) = (Vec::new(), Vec::new());
        let mut next = 0;
        while refused.is_empty() || self.engine.in_flight() > 0 {
            while refused.is_empty() && self.engine.in_flight() < DEPTH {
                self.write(next * WRITE_BYTES);
                next += 1;
            }
            self.turn();
            for (offset, result) in self.take_ended() {
                match result {
                    Ok(()) => stored.push(offset),
                    Err(error) => {
                        assert_eq!(error, IoError::NoSpace);
                        refused.push(offset);
                    }
                }
            }
        }
        (stored, refused)
    }

    /// Reads what is at these places.
    fn read(&mut self, offset: u64) -> Vec<u8> {
        let bytes = vec![0xee; WRITE_BYTES as usize];
        self.start(Op::Read, offset, bytes, WRITE_BYTES);
        self.until("read", |guest| guest.ended.contains_key(&offset));
        assert_eq!(self.ended.remove(&offset), Some(Ok(())));
        self.memory.remove(&offset).unwrap()
    }
}

/// What the others stored in the moment in which the smallest is full is urgent for that one.
#[test]
fn one_full_device_pauses_writes_and_takes_no_replica_out() {
    fill_and_make_room(&[2 * DEVICE_BYTES, 3 * DEVICE_BYTES, DEVICE_BYTES]);
}

#[test]
fn a_full_pool_pauses_writes_and_takes_no_replica_out() {
    fill_and_make_room(&[DEVICE_BYTES; 3]);
}

/// Each time replicas were taken out and in again for each of the groups.
fn fill_and_make_room(device_bytes: &[u64]) {
    let mut cluster = Cluster::start_sized(device_bytes);
    let mut guest = Guest::new(&mut cluster);
    guest.volume.set_on_full(OnFull {
        wait: Duration::from_millis(300),
    });
    let map = cluster.epoch();
    let (mut stored, refused) = guest.fill();
    assert!(stored.len() as u64 * WRITE_BYTES > DEVICE_BYTES / 2);
    assert_eq!(cluster.epoch(), map, "the map has changed");
    for &offset in refused.iter().filter(|offset| **offset > 0) {
        assert_eq!(guest.read(offset), vec![0; WRITE_BYTES as usize]);
    }

    // With a volume that waits: until there is room.
    guest.volume.set_on_full(OnFull::default());
    for &offset in &refused {
        guest.write(offset);
    }
    let held = refused.len() as u64;
    guest.until("held", |guest| guest.volume.held_writes().pieces == held);
    assert_eq!(
        guest.read(stored[0]),
        pattern(stored[0], WRITE_BYTES as usize)
    );
    let freed = 8 * MIB;
    guest.start(Op::Discard, 0, Vec::new(), freed);
    guest.until("discarded", |guest| guest.ended.contains_key(&0));
    guest.until("written", |guest| guest.ended.len() as u64 == held + 1);
    assert!(guest.take_ended().values().all(Result::is_ok));
    assert_eq!(guest.volume.held_writes().pieces, 0);
    guest.start(Op::Flush, 0, Vec::new(), 0);
    guest.until("flushed", |guest| guest.ended.contains_key(&0));
    assert_eq!(guest.take_ended()[&0], Ok(()));
    assert_eq!(cluster.epoch(), map, "the map has changed");

    stored.extend(refused);
    for node in 1..=3 {
        cluster.trust_only(node);
        for &offset in &stored {
            let expected = match offset < freed {
                true => vec![0; WRITE_BYTES as usize],
                false => pattern(offset, WRITE_BYTES as usize),
            };
            assert!(guest.read(offset) == expected, "node {node}, {offset}");
        }
    }
}
