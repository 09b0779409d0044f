//! What a client counts.

use std::sync::atomic::{AtomicU64, Ordering};

use fuse_codec::Opcode;

/// A number that only grows.
#[derive(Default)]
pub(crate) struct Counter(AtomicU64);

impl Counter {
    pub(crate) fn add(&self, count: u64) {
        self.0.fetch_add(count, Ordering::Relaxed);
    }

    fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// What a client has done since it was made.
        #[derive(Debug, Clone, Default, PartialEq, Eq)]
        pub struct ClientCounters {
            /// Requests of guests by their kind, of those kinds that came.
            pub requests: Vec<(Opcode, u64)>,
            $($(#[$doc])* pub $name: u64,)*
            /// Capabilities that were recalled.
            pub recalls: u64,
            /// Capabilities that are held now.
            pub capabilities: u64,
            /// Bytes that are buffered now, with those that are being written back.
            pub dirty_bytes: u64,
            /// Bytes that were buffered and committed, in whole blocks.
            pub written_back_bytes: u64,
            /// Commits of what was buffered.
            pub write_backs: u64,
            /// Files of which something could not be written back.
            pub write_back_failures: u64,
            /// Bytes that were lost by that, in whole blocks.
            pub lost_bytes: u64,
        }

        pub(crate) struct Counters {
            requests: Vec<Counter>,
            $(pub(crate) $name: Counter,)*
        }

        impl Counters {
            pub(crate) fn new() -> Self {
                Self {
                    requests: Opcode::ALL.iter().map(|_| Counter::default()).collect(),
                    $($name: Counter::default(),)*
                }
            }

            pub(crate) fn get(&self) -> ClientCounters {
                let requests = Opcode::ALL.iter().zip(&self.requests);
                let requests = requests.map(|(opcode, counter)| (*opcode, counter.get()));
                ClientCounters {
                    requests: requests.filter(|(_, count)| *count > 0).collect(),
                    $($name: self.$name.get(),)*
                    ..ClientCounters::default()
                }
            }
        }
    };
}

counters! {
    /// Bytes that guests read.
    read_bytes,
    /// Bytes of file data that were read and cached, in whole blocks.
    data_hit_bytes,
    /// Bytes of file data that were read and not cached, likewise.
    data_miss_bytes,
    /// Bytes of file data that were read ahead.
    read_ahead_bytes,
    /// Bytes that guests wrote.
    written_bytes,
    /// Questions to the namespace.
    questions,
    /// Names of directories in the answers.
    listed_names,
    /// Looks at what is cached that found what was looked for.
    hits,
    /// Looks at what is cached that did not find it.
    misses,
    /// Operations of the namespace.
    operations,
    /// Operations whose outcome was not known. The guest got EIO.
    unknown_outcomes,
    /// Looks at a file that were repeated, as another host changed it meanwhile.
    changed_meanwhile,
    /// Reads of file data that were repeated, as the data had been freed meanwhile.
    freed_meanwhile,
    /// Pauses of writes, as freed space was to come back to the pool first.
    throttled,
    /// Sessions that were opened.
    sessions,
    /// Segments that were begun.
    segments,
    /// Flushes that writes asked for.
    flushes_asked,
    /// Flushes that were done for them.
    flushes,
    /// Orphans that were let go of.
    orphans_released,
    /// Access times that were noted.
    access_times,
}

impl Counters {
    /// Counts a request of a guest.
    pub(crate) fn request(&self, opcode: u32) {
        let position = Opcode::ALL
            .iter()
            .position(|known| known.number() == opcode);
        if let Some(position) = position {
            self.requests[position].add(1);
        }
    }
}
