//! Serves a file as a disk on a vhost-user socket: the smallest whole use of this crate, with an engine of
//! its own.
//!
//! ```text
//! cargo run -p vhost-backend --example ramdisk -- /tmp/disk.sock /dev/shm/disk 64
//! ```
//!
//! A file on tmpfs makes it a RAM disk that survives the death of this process, so that a guest that
//! reconnects finds its data. A line `resize MIB` on standard input changes the size under the guest; any
//! other line prints the state; the end of input closes the attachment.

use std::error::Error;
use std::fs::{File, OpenOptions};
use std::io::{self, BufRead};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use fabric_types::io::{Engine, IoError, IoResult, Op, Request, Submit, Tag, Volume};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{FallocateFlags, fallocate};
use tracing_subscriber::Layer;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use vhost_backend::blk::{BlkDevice, BlkOptions};
use vhost_backend::data_thread::{ThreadOptions, Threads};
use vhost_backend::memory::budget::MemoryPolicy;
use vhost_backend::session::Attachment;
use vhost_backend::session::socket::{Endpoint, Listener, SocketOptions};

const USAGE: &str = "usage: ramdisk SOCKET FILE SIZE_MIB";
const MIB: u64 = 1024 * 1024;

#[derive(Clone)]
struct Disk(Arc<Shared>);

struct Shared {
    file: File,
    size_bytes: AtomicU64,
}

impl Disk {
    fn open(path: &str, size_bytes: u64) -> io::Result<Self> {
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(path)?;
        file.set_len(size_bytes)?;
        let size_bytes = AtomicU64::new(size_bytes);
        Ok(Self(Arc::new(Shared { file, size_bytes })))
    }

    fn resize(&self, size_bytes: u64) -> io::Result<()> {
        self.0.file.set_len(size_bytes)?;
        self.0.size_bytes.store(size_bytes, Ordering::Release);
        Ok(())
    }

    fn zero(&self, request: &Request<'_>) -> io::Result<()> {
        let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        Ok(fallocate(&self.0.file, hole, request.offset, request.len)?)
    }
}

impl Volume for Disk {
    fn size_bytes(&self) -> u64 {
        self.0.size_bytes.load(Ordering::Acquire)
    }
}

/// Carries out each request at once, in `submit`.
struct Inline {
    never: OwnedFd,
}

impl Inline {
    fn new() -> io::Result<Self> {
        let never = eventfd(0, EventfdFlags::CLOEXEC)?;
        Ok(Self { never })
    }
}

fn whole(transferred: isize, request: &Request<'_>) -> io::Result<()> {
    match u64::try_from(transferred) {
        Err(_) => Err(io::Error::last_os_error()),
        Ok(count) if count < request.len => Err(io::ErrorKind::UnexpectedEof.into()),
        Ok(_) => Ok(()),
    }
}

impl Engine for Inline {
    type Volume = Disk;

    unsafe fn submit(&mut self, disk: &Disk, request: &Request<'_>) -> Submit {
        let outside = request.offset.checked_add(request.len);
        if outside.is_none_or(|end| end > disk.size_bytes()) {
            return Submit::Done(Err(IoError::OutOfRange));
        }
        let (fd, iov) = (disk.0.file.as_raw_fd(), request.buffers);
        let (count, offset) = (iov.len() as libc::c_int, request.offset as libc::off_t);
        let outcome = match request.op {
            // SAFETY: the caller keeps the buffers valid until this returns; the kernel fills them.
            Op::Read => whole(
                unsafe { libc::preadv(fd, iov.as_ptr(), count, offset) },
                request,
            ),
            // SAFETY: as above; the kernel reads them.
            Op::Write { .. } => whole(
                unsafe { libc::pwritev(fd, iov.as_ptr(), count, offset) },
                request,
            ),
            Op::Flush => disk.0.file.sync_data(),
            Op::Discard | Op::WriteZeroes { .. } => disk.zero(request),
        };
        let errno = |error: io::Error| IoError::Device(error.raw_os_error().unwrap_or(libc::EIO));
        Submit::Done(outcome.map_err(errno))
    }

    fn kick(&mut self) {}

    fn reap(&mut self, _: &mut dyn FnMut(Tag, IoResult)) -> usize {
        0
    }

    fn in_flight(&self) -> usize {
        0
    }

    fn wait_fd(&self) -> BorrowedFd<'_> {
        self.never.as_fd()
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let asked = std::env::var("RUST_LOG").unwrap_or_else(|_| "error".to_owned());
    let filter: Targets = asked.parse()?;
    let lines = tracing_subscriber::fmt::layer().with_writer(io::stderr);
    tracing_subscriber::registry()
        .with(lines.with_filter(filter))
        .init();
    let mut args = std::env::args().skip(1);
    let mut next = || args.next().ok_or(USAGE);
    let (socket, file, size_mib) = (next()?, next()?, next()?.parse::<u64>()?);

    let disk = Disk::open(&file, size_mib * MIB)?;
    let options = BlkOptions {
        serial: "ramdisk".into(),
        queues: 2,
        ..BlkOptions::default()
    };
    let device = BlkDevice::new(disk.clone(), options)?;
    let one = ThreadOptions {
        threads: 1,
        ..ThreadOptions::default()
    };
    let threads = Threads::start(&one, |_| Inline::new())?;
    let endpoint = Endpoint::Listening(Listener::bind(&SocketOptions::new(&socket))?);
    let attachment = Attachment::start(
        endpoint,
        Arc::clone(&device),
        Arc::clone(&threads),
        MemoryPolicy::alone(),
    )?;
    println!("serving {size_mib} MiB of {file} on {socket}");
    for line in io::stdin().lock().lines() {
        if let Some(mib) = line?.strip_prefix("resize ") {
            disk.resize(mib.parse::<u64>()? * MIB)?;
            attachment.notify_config_changed();
        }
        println!("{:?} {:?}", attachment.state(), device.counters());
    }
    attachment.close();
    threads.shutdown();
    Ok(())
}
