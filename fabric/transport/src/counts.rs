//! What has gone over the network since the start. Each data thread counts for itself, so that none waits for
//! another's cache line.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// What is counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Count {
    /// Bytes of payload sent over TCP.
    TcpBytesOut,
    /// Bytes of payload received over TCP.
    TcpBytesIn,
    /// Bytes of payload sent over RDMA, by messages, WRITEs and peers' READs.
    RdmaBytesOut,
    /// Bytes of payload received over RDMA.
    RdmaBytesIn,
    /// Messages sent over RDMA: requests and replies.
    MessagesOut,
    /// Messages received.
    MessagesIn,
    /// Messages sent with their payload inside.
    Inside,
    /// Payloads that this node has read from peers' memory.
    Reads,
    /// Payloads that it has written to peers' memory.
    Writes,
    /// Windows that it has opened to peers.
    Windows,
    /// Bytes of payload that were copied on this node, for their memory is not open to the device.
    CopiedBytes,
    /// Requests for which there was no credit, or no window, and which went over TCP.
    CreditsExhausted,
    /// Queue pairs that were given up.
    FailedPair,
}

const COUNTS: usize = Count::FailedPair as usize + 1;

/// Those of one data thread, on cache lines of their own.
#[derive(Debug, Default)]
#[repr(align(128))]
pub struct Counters([AtomicU64; COUNTS]);

impl Counters {
    /// Counts so many more.
    #[inline]
    pub fn add(&self, count: Count, more: u64) {
        self.0[count as usize].fetch_add(more, Ordering::Relaxed);
    }

    /// How many there are.
    pub fn get(&self, count: Count) -> u64 {
        self.0[count as usize].load(Ordering::Relaxed)
    }
}

/// Those of all data threads of a node.
#[derive(Debug, Default)]
pub struct AllCounters(Mutex<Vec<Arc<Counters>>>);

impl AllCounters {
    /// For one more data thread.
    pub(super) fn begin(&self) -> Arc<Counters> {
        let counters = Arc::<Counters>::default();
        let mut all = self.0.lock().expect("no panic under this lock");
        all.push(Arc::clone(&counters));
        counters
    }

    /// How many there are, of all data threads that ever were.
    pub fn get(&self, count: Count) -> u64 {
        let all = self.0.lock().expect("no panic under this lock");
        all.iter().map(|counters| counters.get(count)).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_count_for_themselves_and_are_told_together() {
        let all = AllCounters::default();
        let (one, two) = (all.begin(), all.begin());
        one.add(Count::TcpBytesOut, 4096);
        two.add(Count::TcpBytesOut, 512);
        two.add(Count::FailedPair, 1);
        drop(two);
        assert_eq!(one.get(Count::TcpBytesOut), 4096);
        assert_eq!(all.get(Count::TcpBytesOut), 4608);
        assert_eq!((all.get(Count::FailedPair), all.get(Count::Reads)), (1, 0));
    }
}
