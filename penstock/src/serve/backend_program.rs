//! `penstock vhost-user-blk`: one volume of a data directory, served by QEMU's vhost-user backend program
//! conventions (docs/interop/vhost-user.rst): `--socket-path`, `--fd`, `--print-capabilities`, and an end at
//! SIGTERM.

use std::os::fd::{FromRawFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use api::failure::{Context, Failure, Kind, Result};
use attachments::sockets::socket_failure;
use attachments::{BlockDevices, device};
use cli::args::{BackendProgramArgs, merge};
use service::failures::meta_failure;
use service::prepared::Prepared;
use service::waiting::{ended as thread_ended, runtime};
use storage::{Device, Session};
use vhost_backend::blk::{BlkOptions, QUEUE_SIZE_DEFAULT};
use vhost_backend::session::socket::{Endpoint, PATH_BYTES_MAX, SocketError};

use super::node::{Node, Purpose};
use super::starting::Starting;
use super::{CLOSE_MAX, Stop, announce, close, log, prepare_process, start_node};

/// What the conventions ask to be printed. `blk-file` is not among the features: the disk is a volume, not a
/// file.
const CAPABILITIES: &str = r#"{
  "type": "block",
  "features": [
    "read-only"
  ]
}"#;

/// How often is looked whether a front end on a handed-over descriptor has gone.
const ENDED_POLL: Duration = Duration::from_millis(100);

enum SocketSource {
    Path(PathBuf),
    Fd(OwnedFd),
}

/// Runs until the guest's side of a given descriptor is closed, or until told to stop.
pub fn run(args: BackendProgramArgs, data: Option<PathBuf>) -> Result<()> {
    if args.print_capabilities {
        println!("{CAPABILITIES}");
        return Ok(());
    }
    let volume = args
        .volume
        .clone()
        .ok_or_else(|| Failure::invalid("vhost-user-blk needs a volume", "add --volume NAME"))?;
    let socket = match (args.socket_path, args.fd) {
        (Some(path), _) => {
            let path = std::path::absolute(&path).unwrap_or(path);
            // Found out before anything is made.
            if path.as_os_str().len() > PATH_BYTES_MAX {
                return Err(socket_failure(&SocketError::TooLong(path)));
            }
            SocketSource::Path(path)
        }
        (None, Some(fd)) => SocketSource::Fd(inherited(fd)?),
        (None, None) => {
            return Err(Failure::invalid(
                "vhost-user-blk needs a socket",
                "add --socket-path PATH or --fd FDNUM",
            ));
        }
    };
    let file = merge::node(config::File::default(), args.node, data);
    let config = Prepared::new(config::resolve(file)?);
    prepare_process();
    sandbox::limits::drop_privileges();
    log::keep_telling();
    let served = ServedVolume {
        volume,
        socket,
        queues: args.queues,
        queue_size: args.queue_size.unwrap_or(QUEUE_SIZE_DEFAULT),
        read_only: args.read_only,
    };
    runtime()?
        .block_on(serve(config, served))
        .map_err(with_daemon_hint)
}

struct ServedVolume {
    volume: String,
    socket: SocketSource,
    queues: u16,
    queue_size: u16,
    read_only: bool,
}

async fn serve(config: Prepared, served: ServedVolume) -> Result<()> {
    let mut stop = Stop::new()?;
    let mut starting = Starting::new(&config);
    let node = start_node(
        config,
        BlockDevices::default(),
        Purpose::OneVolume,
        &mut starting,
    )
    .await?;
    let result = serve_volume(&node, served, &mut stop).await;
    close(&node).await;
    result
}

async fn serve_volume(node: &Node, served: ServedVolume, stop: &mut Stop) -> Result<()> {
    let name = &served.volume;
    if let Some(socket) = node.volumes.get(name).await?.attached.first() {
        return Err(Failure::new(
            Kind::Conflict,
            format!("volume '{name}' is attached on {socket}, where the daemon serves it"),
            format!(
                "run `penstock serve` instead, or detach it there first: penstock detach {name}"
            ),
        ));
    }
    let volume = node
        .cluster
        .meta
        .get_volume(name)
        .await
        .map_err(meta_failure)?;
    let handle = node.volumes.open_volume(&volume).await?;
    let options = BlkOptions {
        read_only: served.read_only,
        queues: served.queues,
        queue_size: served.queue_size,
        ..BlkOptions::default()
    };
    let listening =
        device(&volume, handle, options).and_then(|device| listen(node, served.socket, device));
    let result = match listening {
        Ok((session, shown)) => {
            announce(node, &shown);
            until_end(session, stop).await;
            Ok(())
        }
        Err(failure) => Err(failure),
    };
    node.volumes.close_volume(&volume).await;
    result
}

async fn until_end(session: Session, stop: &mut Stop) {
    tokio::select! {
        name = stop.wait() => tracing::info!(signal = name, "stopping"),
        () = ended(&session) => tracing::info!("the front end closed its descriptor"),
    }
    // Waits for requests in flight, no longer than a daemon that stops.
    let closed = thread_ended(session.begin_close());
    if tokio::time::timeout(CLOSE_MAX, closed).await.is_err() {
        tracing::error!("requests are still under way");
    }
}

fn listen(node: &Node, socket: SocketSource, device: Arc<Device>) -> Result<(Session, String)> {
    match socket {
        SocketSource::Path(path) => {
            let session = node.attachments.listen(&path, device, true)?;
            Ok((session, format!("socket {}", path.display())))
        }
        SocketSource::Fd(fd) => {
            let endpoint = Endpoint::from_fd(fd).map_err(|e| socket_failure(&e))?;
            let session = node.attachments.serve_endpoint(endpoint, device, true)?;
            Ok((session, "an inherited descriptor".to_owned()))
        }
    }
}

/// Returns when the one connection that was handed over is gone. A listening socket never ends.
async fn ended(session: &Session) {
    while !session.is_finished() {
        tokio::time::sleep(ENDED_POLL).await;
    }
}

/// Takes over a descriptor that whoever started us left open.
pub fn inherited(fd: i32) -> Result<OwnedFd> {
    let flags = if fd > 2 {
        // SAFETY: asks about a number; that no such descriptor is open is one of the answers.
        unsafe { libc::fcntl(fd, libc::F_GETFD) }
    } else {
        -1
    };
    if flags < 0 {
        return Err(Failure::invalid(
            format!("--fd {fd} is not an open descriptor above 2"),
            "give the number of an inherited socket",
        ));
    }
    // SAFETY: the descriptor is open, and by the conventions it was left to this process alone.
    let owned = unsafe { OwnedFd::from_raw_fd(fd) };
    rustix::io::fcntl_setfd(&owned, rustix::io::FdFlags::CLOEXEC)
        .map_err(std::io::Error::from)
        .context(|| format!("use --fd {fd}"))?;
    Ok(owned)
}

/// A daemon that owns the data directory serves its volumes itself.
fn with_daemon_hint(mut failure: Failure) -> Failure {
    if failure.error.contains("in use by another daemon") {
        failure.hint =
            Some("let it serve the volume: penstock attach volume NAME --socket PATH".to_owned());
    }
    failure
}
