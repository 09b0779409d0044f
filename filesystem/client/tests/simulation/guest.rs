//! A guest's kernel, as far as its requests go.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use fs_client::{
    Client, ClientOptions, DIRTY_BYTES_MAX, DataCache, LookupTarget, Mount, OwnedCreate,
    OwnedOperation, OwnedReply,
};
use fuse_codec::{
    Agreed, Attr, Cookie, DirLayout, Entry, Errno, Fallocate, FallocateMode, Features, Handle,
    Header, Negotiation, NodeId, Offer, OpenFlags, Opened, Read, RenameFlags, SetAttr, Unique,
    Wanted, Write, negotiate,
};

use crate::host::{Host, Mutation};
use crate::leader::settings;
use crate::world::{World, Writes};

pub const ROOT: u64 = 1;
pub const RDWR: i32 = libc::O_RDWR;

pub type Outcome<T> = Result<T, Errno>;

/// A host with one client, whose background runs.
pub fn client(world: &World, node: u64, mutation: Option<Mutation>) -> Arc<Client<Host>> {
    let options = ClientOptions {
        data_cache: DataCache::new(DATA_CACHE_BYTES[node as usize % 3]),
        ..options(world, mutation)
    };
    client_with(world, node, mutation, options)
}

/// Room of hosts for data: none, so little that data go all the time, enough for reading ahead.
pub const DATA_CACHE_BYTES: [u64; 3] = [0, 100_000, 16 << 20];

/// The usual options.
pub fn options(world: &World, mutation: Option<Mutation>) -> ClientOptions {
    let mistake = match mutation {
        Some(Mutation::Client(mistake)) => Some(mistake),
        _ => None,
    };
    ClientOptions {
        segment_bytes: 64 << 20,
        dirty_bytes_max: match world.writes {
            Writes::Through => 0,
            Writes::Buffered => DIRTY_BYTES_MAX,
        },
        data_cache: DataCache::new(DATA_CACHE_BYTES[1]),
        capabilities: settings(),
        mistake,
        ..ClientOptions::default()
    }
}

/// The same with these options.
pub fn client_with(
    world: &World,
    node: u64,
    mutation: Option<Mutation>,
    options: ClientOptions,
) -> Arc<Client<Host>> {
    let host = Host::new(world.clone(), node, mutation);
    let client = Client::new(host, options);
    // It ends with the client.
    drop(world.runtime.spawn(Arc::clone(&client).run()));
    client
}

/// Minor version of the guests' protocol: that of Linux 6.1.
const MINOR: u32 = 38;

#[derive(Clone)]
pub struct Guest {
    pub mount: Arc<Mount<Host>>,
    pub agreed: Agreed,
    /// Lookup counts of inodes that the guest's kernel keeps. Without it, the kernel forgets each inode at
    /// once.
    kept: Option<Arc<Mutex<BTreeMap<u64, u64>>>>,
}

pub fn flags(bits: i32) -> OpenFlags {
    OpenFlags::from_wire(bits as u32).unwrap()
}

fn agree(read_only: bool, minor: u32) -> Agreed {
    let offer = Offer {
        major: 7,
        minor,
        max_readahead_bytes: 1 << 20,
        features: Features::from_bits(u64::MAX),
    };
    let wanted = Wanted {
        read_only,
        nodeids_are_inodes: true,
        max_write_bytes: 1 << 20,
        max_pages: 256,
        max_readahead_bytes: 1 << 20,
        max_background: 64,
        congestion_threshold: 48,
    };
    match negotiate(&offer, &wanted) {
        Negotiation::Agreed(agreed) => agreed,
        other => panic!("{other:?}"),
    }
}

impl Guest {
    fn with(client: &Arc<Client<Host>>, read_only: bool, minor: u32) -> Self {
        Self {
            mount: Arc::new(client.attach(read_only)),
            agreed: agree(read_only, minor),
            kept: None,
        }
    }

    pub fn new(client: &Arc<Client<Host>>) -> Self {
        Self::with(client, false, MINOR)
    }

    pub fn read_only(client: &Arc<Client<Host>>) -> Self {
        Self::with(client, true, MINOR)
    }

    /// One whose kernel does not pass sync(2) on.
    pub fn before_syncfs(client: &Arc<Client<Host>>) -> Self {
        Self::with(client, false, 33)
    }

    /// Makes the guest's kernel keep inodes until [`Guest::forget`].
    pub fn keeping(self) -> Self {
        Self {
            kept: Some(Arc::default()),
            ..self
        }
    }

    /// Number of lookups of an inode that the guest's kernel keeps.
    pub fn lookups(&self, node: u64) -> u64 {
        let kept = self.kept.as_ref().expect("the guest keeps inodes");
        kept.lock().unwrap().get(&node).copied().unwrap_or(0)
    }

    /// Makes the guest's kernel forget an inode.
    pub fn forget(&self, node: u64) {
        let kept = self.kept.as_ref().expect("the guest keeps inodes");
        if let Some(lookups) = kept.lock().unwrap().remove(&node) {
            self.mount.forget(NodeId(node), lookups);
        }
    }

    /// Makes the guest's kernel forget all inodes.
    pub fn forget_all(&self) {
        let kept = self.kept.as_ref().expect("the guest keeps inodes");
        for (node, lookups) in std::mem::take(&mut *kept.lock().unwrap()) {
            self.mount.forget(NodeId(node), lookups);
        }
    }

    /// Counts an inode that a reply contains.
    fn note_lookup(&self, node: u64) {
        match &self.kept {
            Some(kept) => *kept.lock().unwrap().entry(node).or_default() += 1,
            None => self.mount.forget(NodeId(node), 1),
        }
    }

    pub async fn call(&self, node: u64, operation: OwnedOperation) -> OwnedReply {
        self.call_with(node, operation, Vec::new()).await
    }

    pub async fn call_with(
        &self,
        node: u64,
        operation: OwnedOperation,
        payload: Vec<u8>,
    ) -> OwnedReply {
        let header = Header {
            len: 0,
            opcode: 1,
            unique: Unique(1),
            nodeid: NodeId(node),
            uid: 1000,
            gid: 1000,
            pid: 1,
        };
        let agreed = &self.agreed;
        let is_plus = matches!(
            operation,
            OwnedOperation::Readdir {
                layout: DirLayout::Plus,
                ..
            }
        );
        let reply = self.mount.serve(header, agreed, operation, payload).await;
        match &reply {
            OwnedReply::Entry(entry) | OwnedReply::Created(entry, _) => {
                self.note_lookup(entry.nodeid.0)
            }
            OwnedReply::Bytes(bytes) if is_plus => {
                let nodes = nodes_in(bytes).into_iter();
                nodes.for_each(|node| self.note_lookup(node));
            }
            _ => {}
        }
        reply
    }

    pub async fn done(&self, node: u64, operation: OwnedOperation) -> Outcome<()> {
        match self.call(node, operation).await {
            OwnedReply::Done => Ok(()),
            OwnedReply::Error(errno) => Err(errno),
            other => panic!("{other:?}"),
        }
    }

    pub async fn entry(&self, node: u64, operation: OwnedOperation) -> Outcome<Entry> {
        match self.call(node, operation).await {
            OwnedReply::Entry(entry) => Ok(entry),
            OwnedReply::NoEntry(_) => Err(Errno::ENOENT),
            OwnedReply::Error(errno) => Err(errno),
            other => panic!("{other:?}"),
        }
    }

    pub async fn lookup(&self, parent: u64, name: &str) -> Outcome<Entry> {
        let name = LookupTarget::Name(name.into());
        self.entry(parent, OwnedOperation::Lookup { name }).await
    }

    pub async fn getattr(&self, node: u64) -> Outcome<Attr> {
        attr(
            self.call(node, OwnedOperation::Getattr { handle: None })
                .await,
        )
    }

    pub async fn setattr(&self, node: u64, set: SetAttr) -> Outcome<Attr> {
        attr(self.call(node, OwnedOperation::Setattr(set)).await)
    }

    pub async fn truncate(&self, node: u64, size: u64) -> Outcome<Attr> {
        let set = SetAttr {
            size: Some(size),
            ..SetAttr::default()
        };
        self.setattr(node, set).await
    }

    pub async fn create(&self, parent: u64, name: &str, bits: i32) -> Outcome<(u64, Handle)> {
        let create = OwnedCreate {
            name: name.into(),
            flags: flags(bits),
            permissions: 0o644,
            kill_suidgid: false,
        };
        created(self.call(parent, OwnedOperation::Create(create)).await)
    }

    /// A file without a name.
    pub async fn tmpfile(&self, parent: u64) -> Outcome<(u64, Handle)> {
        let tmpfile = OwnedOperation::Tmpfile {
            flags: flags(RDWR | libc::O_TMPFILE),
            permissions: 0o600,
        };
        created(self.call(parent, tmpfile).await)
    }

    pub async fn open_with(&self, node: u64, bits: i32) -> Outcome<Opened> {
        let open = OwnedOperation::Open {
            flags: flags(bits),
            kill_suidgid: false,
        };
        opened(self.call(node, open).await)
    }

    pub async fn open(&self, node: u64, bits: i32) -> Outcome<Handle> {
        Ok(self.open_with(node, bits).await?.handle)
    }

    pub async fn opendir(&self, node: u64) -> Outcome<Handle> {
        Ok(opened(self.call(node, OwnedOperation::Opendir).await)?.handle)
    }

    pub async fn release(&self, node: u64, handle: Handle) -> Outcome<()> {
        self.done(node, OwnedOperation::Release { handle }).await
    }

    pub async fn read(&self, node: u64, handle: Handle, from: u64, size: u32) -> Outcome<Vec<u8>> {
        let read = Read {
            handle,
            offset: from,
            size,
            lock_owner: None,
            flags: flags(RDWR),
        };
        match self.call(node, OwnedOperation::Read(read)).await {
            OwnedReply::Data(data) => Ok(data.into_vec()),
            OwnedReply::Error(errno) => Err(errno),
            other => panic!("{other:?}"),
        }
    }

    pub async fn write(&self, node: u64, handle: Handle, offset: u64, data: &[u8]) -> Outcome<u32> {
        self.write_with(node, handle, offset, data, RDWR).await
    }

    pub async fn append(&self, node: u64, handle: Handle, data: &[u8]) -> Outcome<u32> {
        self.write_with(node, handle, 0, data, RDWR | libc::O_APPEND)
            .await
    }

    pub async fn write_with(
        &self,
        node: u64,
        handle: Handle,
        offset: u64,
        data: &[u8],
        bits: i32,
    ) -> Outcome<u32> {
        let write = Write {
            handle,
            offset,
            size: data.len() as u32,
            lock_owner: None,
            flags: flags(bits),
            from_page_cache: false,
            kill_suidgid: false,
        };
        written(
            self.call_with(node, OwnedOperation::Write(write), data.to_vec())
                .await,
        )
    }

    pub async fn fsync(&self, node: u64, handle: Handle) -> Outcome<()> {
        self.done(node, OwnedOperation::Fsync { handle }).await
    }

    pub async fn mkdir(&self, parent: u64, name: &str) -> Outcome<u64> {
        let mkdir = OwnedOperation::Mkdir {
            name: name.into(),
            permissions: 0o755,
        };
        Ok(self.entry(parent, mkdir).await?.nodeid.0)
    }

    pub async fn unlink(&self, parent: u64, name: &str) -> Outcome<()> {
        self.done(parent, OwnedOperation::Unlink { name: name.into() })
            .await
    }

    pub async fn rmdir(&self, parent: u64, name: &str) -> Outcome<()> {
        self.done(parent, OwnedOperation::Rmdir { name: name.into() })
            .await
    }

    pub async fn link(&self, inode: u64, parent: u64, name: &str) -> Outcome<Entry> {
        let link = OwnedOperation::Link {
            inode: NodeId(inode),
            name: name.into(),
        };
        self.entry(parent, link).await
    }

    pub async fn rename(
        &self,
        (parent, name): (u64, &str),
        (new_parent, new_name): (u64, &str),
        flags: RenameFlags,
    ) -> Outcome<()> {
        let rename = OwnedOperation::Rename {
            name: name.into(),
            new_parent: NodeId(new_parent),
            new_name: new_name.into(),
            flags,
        };
        self.done(parent, rename).await
    }

    pub async fn fallocate(
        &self,
        node: u64,
        handle: Handle,
        (offset, length): (u64, u64),
        mode: FallocateMode,
    ) -> Outcome<()> {
        let fallocate = Fallocate {
            handle,
            offset,
            length,
            mode,
        };
        self.done(node, OwnedOperation::Fallocate(fallocate)).await
    }

    /// The records of one READDIR: cookie, name and inode of each.
    pub async fn readdir(
        &self,
        node: u64,
        handle: Handle,
        behind: u64,
        size: u32,
    ) -> Outcome<Vec<(u64, Vec<u8>, u64)>> {
        let readdir = OwnedOperation::Readdir {
            layout: DirLayout::Plain,
            handle,
            cookie: Cookie::new(behind).unwrap(),
            size,
        };
        match self.call(node, readdir).await {
            OwnedReply::Bytes(bytes) => Ok(records(&bytes)),
            OwnedReply::Error(errno) => Err(errno),
            other => panic!("{other:?}"),
        }
    }

    /// All names of a directory, without `.` and `..`.
    pub async fn list(&self, node: u64) -> Outcome<Vec<(String, u64)>> {
        let handle = self.opendir(node).await?;
        let (mut found, mut behind) = (Vec::new(), 0);
        loop {
            let records = self.readdir(node, handle, behind, 500).await?;
            let Some(last) = records.last() else {
                break;
            };
            behind = last.0;
            found.extend(records.into_iter().map(|(_, name, ino)| (name, ino)));
        }
        self.done(node, OwnedOperation::Releasedir { handle })
            .await?;
        let names = found
            .into_iter()
            .map(|(name, ino)| (String::from_utf8(name).unwrap(), ino));
        let mut names: Vec<_> = names
            .filter(|(name, _)| name != "." && name != "..")
            .collect();
        names.sort_unstable();
        Ok(names)
    }
}

/// Reads records of READDIR: `struct fuse_dirent`.
fn records(mut bytes: &[u8]) -> Vec<(u64, Vec<u8>, u64)> {
    let mut found = Vec::new();
    while !bytes.is_empty() {
        let number = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
        let length = u32::from_le_bytes(bytes[16..20].try_into().unwrap()) as usize;
        found.push((number(8), bytes[24..24 + length].to_vec(), number(0)));
        bytes = &bytes[(24 + length).next_multiple_of(8)..];
    }
    found
}

/// The cookie of a listing's last record.
pub fn last_cookie(mut bytes: &[u8], layout: DirLayout) -> u64 {
    let entry_bytes = entry_bytes(layout);
    let mut cookie = 0;
    while !bytes.is_empty() {
        let record = &bytes[entry_bytes..];
        cookie = u64::from_le_bytes(record[8..16].try_into().unwrap());
        let length = u32::from_le_bytes(record[16..20].try_into().unwrap()) as usize;
        bytes = &bytes[(entry_bytes + 24 + length).next_multiple_of(8)..];
    }
    cookie
}

/// Bytes of `struct fuse_entry_out` before each record.
fn entry_bytes(layout: DirLayout) -> usize {
    match layout {
        DirLayout::Plain => 0,
        DirLayout::Plus => 128,
    }
}

/// Returns the inodes of a listing with attributes. Each record counts as a lookup.
fn nodes_in(mut bytes: &[u8]) -> Vec<u64> {
    let entry_bytes = entry_bytes(DirLayout::Plus);
    let mut nodes = Vec::new();
    while !bytes.is_empty() {
        // `.` and `..` have no inode.
        let node = u64::from_le_bytes(bytes[..8].try_into().unwrap());
        nodes.extend((node != 0).then_some(node));
        let record = &bytes[entry_bytes..];
        let length = u32::from_le_bytes(record[16..20].try_into().unwrap()) as usize;
        bytes = &bytes[(entry_bytes + 24 + length).next_multiple_of(8)..];
    }
    nodes
}

/// The names of a listing without `.` and `..`, and the inodes that they lead to.
pub fn names_in(mut bytes: &[u8], layout: DirLayout) -> BTreeMap<String, u64> {
    let entry_bytes = entry_bytes(layout);
    let mut names = BTreeMap::new();
    while !bytes.is_empty() {
        let record = &bytes[entry_bytes..];
        let ino = u64::from_le_bytes(record[..8].try_into().unwrap());
        let length = u32::from_le_bytes(record[16..20].try_into().unwrap()) as usize;
        let name = String::from_utf8(record[24..24 + length].to_vec()).unwrap();
        if name != "." && name != ".." {
            names.insert(name, ino);
        }
        bytes = &bytes[(entry_bytes + 24 + length).next_multiple_of(8)..];
    }
    names
}

fn attr(reply: OwnedReply) -> Outcome<Attr> {
    match reply {
        OwnedReply::Attr(attr, _) => Ok(attr),
        OwnedReply::Error(errno) => Err(errno),
        other => panic!("{other:?}"),
    }
}

fn opened(reply: OwnedReply) -> Outcome<Opened> {
    match reply {
        OwnedReply::Opened(opened) => Ok(opened),
        OwnedReply::Error(errno) => Err(errno),
        other => panic!("{other:?}"),
    }
}

fn created(reply: OwnedReply) -> Outcome<(u64, Handle)> {
    match reply {
        OwnedReply::Created(entry, opened) => Ok((entry.nodeid.0, opened.handle)),
        OwnedReply::Error(errno) => Err(errno),
        other => panic!("{other:?}"),
    }
}

pub fn written(reply: OwnedReply) -> Outcome<u32> {
    match reply {
        OwnedReply::Written(bytes) => Ok(bytes),
        OwnedReply::Error(errno) => Err(errno),
        other => panic!("{other:?}"),
    }
}
