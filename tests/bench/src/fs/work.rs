//! What is measured: scripts of the guest, most of them one call of `rigio tree`.

use clap::ValueEnum;
use serde::Serialize;

use super::Options;
use super::peers::Peer;

/// Bytes of each file of a tree.
pub const FILE_BYTES: u64 = 4096;
/// Directories of a tree, as the guest's helper makes them.
pub const DIRECTORIES: u64 = 100;
/// A measurement of creators makes the tree's files divided by this.
const CREATED_SHARE: u64 = 10;
/// The archive has the tree's files divided by this: of each, a client also sets owner, mode and times.
const ARCHIVED_SHARE: u64 = 25;
/// Threads of many creators.
const CREATORS: u64 = 64;
/// Where the archive is in the guest: in memory.
const ARCHIVE: &str = "/tmp/files.tar";

/// Measurements that belong together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Part {
    /// Attributes of files whose names are known.
    Stat,
    /// A walk over all directories and attributes.
    Find,
    /// Opening, reading and closing files in random order.
    Open,
    /// A large file in pieces of 1 MiB.
    Sequential,
    /// Making files.
    Create,
    /// Unpacking an archive.
    Tar,
    /// Attributes, walk and open once more, the requests sent without a guest.
    Host,
    /// What files of 1 KiB take, and what reading them costs with empty caches; once, without a guest.
    Footprint,
}

impl Part {
    pub const ALL: [Self; 8] = [
        Self::Stat,
        Self::Find,
        Self::Open,
        Self::Sequential,
        Self::Create,
        Self::Tar,
        Self::Host,
        Self::Footprint,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Self::Stat => "stat",
            Self::Find => "find",
            Self::Open => "open, read, close",
            Self::Sequential => "the large file",
            Self::Create => "create",
            Self::Tar => "tar",
            Self::Host => "requests without a guest",
            Self::Footprint => "footprint",
        }
    }

    /// Its measurements of a peer in the order in which they follow each other: what is warm was cold before.
    pub fn measurements(self, peer: Peer) -> &'static [Measurement] {
        use Measurement as M;
        match (self, peer) {
            (Self::Open, _) => &[M::Open, M::OpenAgain],
            (Self::Host, Peer::PenstockReadOnly) => &[M::HostOpen],
            // Its server is in the guest.
            (Self::Host, Peer::Nfs) | (Self::Footprint, _) => &[],
            (Self::Host, _) => &[M::HostStat, M::HostFind, M::HostOpen],
            // The second attachment shows what only reading costs.
            (_, Peer::PenstockReadOnly) => &[],
            (Self::Stat, _) => &[M::Stat, M::StatAgain],
            (Self::Find, _) => &[M::Find],
            (Self::Sequential, _) => &[M::Write, M::Read],
            (Self::Create, _) => &[M::CreateByOne, M::CreateByMany],
            (Self::Tar, _) => &[M::Tar],
        }
    }
}

/// Who does what is timed.
#[derive(Debug)]
pub enum Work {
    /// The guest's helper, by these arguments.
    Guest(String),
    /// A front end without a guest.
    Host(HostWork),
}

/// What a front end without a guest does to all files.
#[derive(Debug, Clone, Copy)]
pub enum HostWork {
    Stat,
    Walk,
    Open { seed: u64 },
}

/// One thing that is timed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Measurement {
    Stat,
    StatAgain,
    Find,
    Open,
    OpenAgain,
    Write,
    Read,
    CreateByOne,
    CreateByMany,
    Tar,
    HostStat,
    HostFind,
    HostOpen,
}

impl Measurement {
    pub fn name(self) -> &'static str {
        match self {
            Self::Stat => "stat",
            Self::StatAgain => "stat, guest's caches warm",
            Self::Find => "find",
            Self::Open => "open, read, close",
            Self::OpenAgain => "open, read, close, warm",
            Self::Write => "write 1 MiB, fsync at the end",
            Self::Read => "read 1 MiB in sequence",
            Self::CreateByOne => "create, 1 thread",
            Self::CreateByMany => "create, 64 threads",
            Self::Tar => "tar -x",
            Self::HostStat => "stat, without a guest",
            Self::HostFind => "find, without a guest",
            Self::HostOpen => "open, read, close, no guest",
        }
    }

    /// What it counts.
    pub fn unit(self) -> &'static str {
        match self {
            Self::Write | Self::Read => "MiB",
            _ => "files",
        }
    }

    /// How many of them.
    pub fn count(self, options: &Options) -> u64 {
        match self {
            Self::Stat | Self::StatAgain | Self::Find | Self::Open | Self::OpenAgain => {
                options.files
            }
            Self::HostStat | Self::HostFind | Self::HostOpen => options.files,
            Self::Write | Self::Read => options.megabytes,
            Self::CreateByOne | Self::CreateByMany => created(options),
            Self::Tar => archived(options),
        }
    }

    /// What the guest's helper counts of it: a program that it runs is one.
    pub fn counted(self, options: &Options) -> u64 {
        match self {
            Self::Tar => 1,
            _ => self.count(options),
        }
    }

    /// What is timed.
    pub fn work(self, options: &Options, peer: Peer, round: u64) -> Work {
        let at = peer.mount();
        let script = match self {
            Self::HostStat => return Work::Host(HostWork::Stat),
            Self::HostFind => return Work::Host(HostWork::Walk),
            Self::HostOpen => {
                return Work::Host(HostWork::Open {
                    seed: 2 * round + 1,
                });
            }
            Self::Write => format!("write {at}/large {}", options.megabytes),
            Self::CreateByOne => format!("create {at}/created {} 1", created(options)),
            Self::CreateByMany => format!("create {at}/created {} {CREATORS}", created(options)),
            Self::Tar => format!("run tar -x -f {ARCHIVE} -C {at}/unpacked"),
            Self::Stat
            | Self::StatAgain
            | Self::Find
            | Self::Open
            | Self::OpenAgain
            | Self::Read => self.reads(options, at, round),
        };
        Work::Guest(script)
    }

    /// One that only reads, of the tree at `at`. Rounds have seeds of their own, peers the same.
    fn reads(self, options: &Options, at: &str, round: u64) -> String {
        let (files, megabytes) = (options.files, options.megabytes);
        match self {
            Self::Find => format!("walk {at}/tree"),
            Self::Open | Self::OpenAgain => {
                format!("open {at}/tree {files} {FILE_BYTES} {}", 2 * round + 1)
            }
            Self::Read => format!("read {at}/large {megabytes}"),
            _ => format!("stat {at}/tree {files}"),
        }
    }

    /// What comes before, in the guest's shell. A guest's caches are dropped; those of an NFS server are in
    /// the same guest, and are filled again, as they would be on a host of their own.
    pub fn before(self, options: &Options, peer: Peer, round: u64) -> Option<String> {
        let drop_caches = "sync; echo 3 > /proc/sys/vm/drop_caches";
        match self {
            Self::StatAgain | Self::OpenAgain => None,
            Self::HostStat | Self::HostFind | Self::HostOpen => None,
            Self::Stat | Self::Find | Self::Open | Self::Read => {
                let fill = peer.served_in_guest().map(|directory| {
                    let reads = self.reads(options, directory, round);
                    format!(" && rigio tree {reads}")
                });
                Some(format!("{drop_caches}{}", fill.unwrap_or_default()))
            }
            Self::Tar => Some(format!("{drop_caches}; mkdir {}/unpacked", peer.mount())),
            // The file of the round before; its space comes back beside other peers' turns.
            Self::Write => Some(format!("rm -f {}/large; {drop_caches}", peer.mount())),
            Self::CreateByOne | Self::CreateByMany => Some(drop_caches.to_owned()),
        }
    }

    /// What comes after.
    pub fn after(self, peer: Peer) -> Option<String> {
        match self {
            Self::CreateByOne | Self::CreateByMany => {
                Some(format!("rm -r {}/created", peer.mount()))
            }
            Self::Tar => Some(format!("rm -r {}/unpacked", peer.mount())),
            _ => None,
        }
    }
}

fn created(options: &Options) -> u64 {
    options.files.div_ceil(CREATED_SHARE)
}

fn archived(options: &Options) -> u64 {
    options.files.div_ceil(ARCHIVED_SHARE)
}

/// Makes the archive.
pub fn archive(options: &Options) -> String {
    let files = archived(options);
    format!(
        "make /tmp/archived {files} {FILE_BYTES} && tar -c -f {ARCHIVE} -C /tmp/archived . && \
         rm -r /tmp/archived"
    )
}

/// Makes a peer's tree, and reads all of it once.
pub fn trees(options: &Options, peer: Peer) -> Vec<String> {
    let (at, files) = (peer.mount(), options.files);
    let make = format!("make {at}/tree {files} {FILE_BYTES}");
    let read = format!("open {at}/tree {files} {FILE_BYTES} 1");
    match peer {
        // It shows the other attachment's.
        Peer::PenstockReadOnly => vec![read],
        _ => vec![make, read],
    }
}
