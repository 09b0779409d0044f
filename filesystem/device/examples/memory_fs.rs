//! Serves a filesystem in memory on a vhost-user-fs socket: the smallest whole use of this crate.
//!
//! ```text
//! cargo run -p fs-device --example memory_fs -- --socket /tmp/fs.sock --tag tree --queues 2
//! ```
//!
//! `--read-only` refuses changes. `--threads N` says on how many data threads the queues are (1). With
//! `--deferred` every reply comes back from a thread of its own, through an inbox, in some other order.
//!
//! A guest mounts it by `mount -t virtiofs tree /mnt`. Any line on standard input prints the state; the end
//! of input closes the attachment, and what was in the filesystem is gone.

use std::error::Error;
use std::io::{self, BufRead};
use std::process::ExitCode;
use std::sync::Arc;

use fs_device::memory_fs::{DeferringService, MemoryFilesystem, MemoryService};
use fs_device::{FsDevice, FsEngine, FsOptions, OpClass, Service};
use tracing_subscriber::Layer;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use vhost_backend::data_thread::{ThreadOptions, Threads};
use vhost_backend::memory::budget::MemoryPolicy;
use vhost_backend::session::Attachment;
use vhost_backend::session::socket::{Endpoint, Listener, SocketOptions};

const USAGE: &str = "usage: memory_fs --socket PATH --tag TAG [--queues N] [--threads N] \
                     [--read-only] [--deferred]";

struct Arguments {
    socket: String,
    options: FsOptions,
    threads: usize,
    deferred: bool,
}

fn arguments() -> Result<Arguments, Box<dyn Error>> {
    let (mut socket, mut tag, mut queues, mut threads) = (None, None, 1, 1);
    let (mut read_only, mut deferred) = (false, false);
    let mut args = std::env::args().skip(1);
    while let Some(name) = args.next() {
        let mut value = || args.next().ok_or(USAGE);
        match name.as_str() {
            "--socket" => socket = Some(value()?),
            "--tag" => tag = Some(value()?),
            "--queues" => queues = value()?.parse()?,
            "--threads" => threads = value()?.parse()?,
            "--read-only" => read_only = true,
            "--deferred" => deferred = true,
            other => return Err(format!("unknown argument {other:?}\n{USAGE}").into()),
        }
    }
    Ok(Arguments {
        socket: socket.ok_or(USAGE)?,
        options: FsOptions {
            tag: tag.ok_or(USAGE)?,
            request_queues: queues,
            read_only,
        },
        threads,
        deferred,
    })
}

fn serve<S: Service<Filesystem = MemoryFilesystem>>(
    arguments: Arguments,
    make: impl Fn(usize) -> io::Result<S> + Send + Sync + 'static,
) -> Result<(), Box<dyn Error>> {
    let device = FsDevice::new(MemoryFilesystem::new(), arguments.options)?;
    let options = ThreadOptions {
        threads: arguments.threads,
        ..ThreadOptions::default()
    };
    let threads = Threads::start(&options, move |thread| make(thread).map(FsEngine::new))?;
    let listener = Listener::bind(&SocketOptions::new(&arguments.socket))?;
    let attachment = Attachment::start(
        Endpoint::Listening(listener),
        Arc::clone(&device),
        Arc::clone(&threads),
        MemoryPolicy::alone(),
    )?;
    print_qemu(&arguments.socket, device.options());
    for line in io::stdin().lock().lines() {
        line?;
        print_state(&attachment, &device);
    }
    attachment.close();
    threads.shutdown();
    Ok(())
}

fn print_qemu(socket: &str, options: &FsOptions) {
    let (tag, queues) = (&options.tag, options.request_queues);
    println!("serving {tag:?} on {socket}; with guest memory that is shared, QEMU takes");
    println!("  -chardev socket,id=fs0,path={socket}");
    println!(
        "  -device vhost-user-fs-pci,chardev=fs0,tag={tag},num-request-queues={queues},queue-size=1024"
    );
}

fn print_state(attachment: &Attachment, device: &FsDevice<MemoryFilesystem>) {
    let counters = device.counters();
    println!("{:?}", attachment.state());
    println!("{:?}", device.agreed());
    for class in OpClass::ALL {
        let (finished, failed) = (counters.finished(*class), counters.failed(*class));
        if finished > 0 {
            println!("  {}: {finished}, failed {failed}", class.name());
        }
    }
    println!(
        "  read {} bytes, wrote {}; refused {}, in flight {}; {} inodes, {} handles",
        counters.read_bytes,
        counters.written_bytes,
        counters.refused,
        counters.in_flight,
        device.filesystem().inodes(),
        device.filesystem().open_handles(),
    );
}

fn run() -> Result<(), Box<dyn Error>> {
    let asked = std::env::var("RUST_LOG").unwrap_or_else(|_| "warn".to_owned());
    let filter: Targets = asked.parse()?;
    let lines = tracing_subscriber::fmt::layer().with_writer(io::stderr);
    tracing_subscriber::registry()
        .with(lines.with_filter(filter))
        .init();
    let arguments = arguments()?;
    if arguments.deferred {
        // Answers the one that has waited for the shortest time.
        serve(arguments, |_| DeferringService::new(|waiting| waiting - 1))
    } else {
        serve(arguments, |_| MemoryService::new())
    }
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("memory_fs: {error}");
            ExitCode::FAILURE
        }
    }
}
