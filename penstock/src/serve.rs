//! `penstock serve`: the daemon's life from start to end.

mod admin;
pub mod backend_program;
pub mod block_device_helper;
pub mod log;
pub mod nfs_helper;
pub mod node;
mod starting;
mod status;
mod supervision;

use std::io::IsTerminal;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use api::failure::{Context, Failure, Kind, Result};
use api::server::caller::Caller;
use attachments::BlockDevices;
use cli::args::{ServeArgs, merge};
use config::registry::{self, Registration};
use config::{self, Config, Said, StoreKind};
use service::prepared::Prepared;
use service::waiting::runtime;
use storage::DeviceList;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::oneshot;
use tracing_subscriber::Layer;
use tracing_subscriber::filter::{FilterExt, Targets};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

use node::{Node, Purpose};
use starting::Starting;
use supervision::Supervisor;

/// How long a stopping daemon lets running admin requests finish; an import cut after that leaves nothing
/// behind.
const DRAIN_MAX: Duration = Duration::from_secs(5);
/// How long a stopping daemon waits after that for guests' requests in flight and for the store. What is not
/// finished then is left as a kill leaves it: in the record that each front end keeps, from which the next
/// process goes on.
const CLOSE_MAX: Duration = Duration::from_secs(15);
/// Environment variable that says what is logged, like `debug` or `penstock=debug`.
const LOG_ENV: &str = "PENSTOCK_LOG";
/// What is logged otherwise. openraft tells much at `info` that matters only to its developers.
const LOG_DEFAULT: &str = "info,openraft=warn,openraft::replication=off,openraft::core::raft_core=off,\
                           openraft::engine::handler::replication_handler=off";

/// Runs the daemon until it is told to stop. `by_variable`: the data directory was named by its environment
/// variable.
pub fn run(args: ServeArgs, data: Option<PathBuf>, by_variable: bool) -> Result<()> {
    let config = configured(args, data, by_variable)?;
    config::check_admin_socket(&config.admin_socket)?;
    // While the process still has all its rights.
    let registered = register(&config);
    prepare_process();
    let supervisor = Supervisor::from_environment();
    let mut prepared = Prepared::new(config);
    let block_devices = BlockDevices::prepare();
    let added = || {
        let added = DeviceList::read(&prepared.data)?.added;
        Ok(added.into_iter().map(|device| device.path).collect())
    };
    prepared.confinement = sandbox::give_up(&prepared, added, &prepared.opened)?;
    log::keep_telling();
    let _registration = registered.unwrap_or_else(|failure| {
        tracing::warn!(%failure, "commands find this daemon only with --data or --api");
        None
    });
    let runtime = runtime()?;
    let ended = runtime.block_on(serve(prepared, block_devices, supervisor));
    // Guests wait for the next start. It makes an unfinished device file anew.
    runtime.shutdown_timeout(CLOSE_MAX);
    ended
}

/// What the daemon goes by: its options, and the file.
fn configured(args: ServeArgs, data: Option<PathBuf>, by_variable: bool) -> Result<Config> {
    let read = config::read_named(args.config.as_deref())?;
    let with_options = |file| {
        let mut file = merge::peers(file, args.peers.clone());
        if !args.peer.is_empty() {
            file.peers = Some(args.peer.clone());
        }
        let file = merge::privileges(file, args.privileges.clone());
        merge::node(file, args.node.clone(), data.clone())
    };
    let options = with_options(config::File::default());
    let said = Said::new(read.as_ref(), &options, by_variable);
    let file = read.map(|(_, file)| file).unwrap_or_default();
    let config = config::resolve(with_options(file))?;
    Ok(Config { said, ..config })
}

/// Puts this daemon on the list of those that run.
fn register(config: &Config) -> Result<Option<Registration>> {
    let Some(directory) = registry::directory() else {
        return Ok(None);
    };
    let entry = registry::Entry {
        pid: std::process::id(),
        data: config.data.clone(),
        admin_socket: std::path::absolute(&config.admin_socket)
            .unwrap_or_else(|_| config.admin_socket.clone()),
    };
    registry::register(&directory, &entry).map(Some)
}

/// Logging and limits, and a umask that keeps everyone else out of what this process creates. Called before
/// there are other threads, which inherit all of it.
pub fn prepare_process() {
    let asked = std::env::var(LOG_ENV).ok().filter(|text| !text.is_empty());
    let filter: Targets = asked
        .and_then(|text| text.parse().ok())
        .unwrap_or_else(|| LOG_DEFAULT.parse().expect("the default is a filter"));
    let colours = std::io::stderr().is_terminal()
        && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
    let lines = tracing_subscriber::fmt::layer()
        .with_ansi(colours)
        .with_writer(std::io::stderr);
    tracing_subscriber::registry()
        .with(lines.with_filter(filter.and(&*log::LIMITER)))
        .init();
    sandbox::limits::raise_open_files();
    rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o077));
}

async fn serve(
    config: Prepared,
    block_devices: BlockDevices,
    supervisor: Supervisor,
) -> Result<()> {
    let mut stop = Stop::new()?;
    let bridge = supervisor.bridge_start();
    let admin_path = config.admin_socket.clone();
    let mut starting = Starting::new(&config);
    // A node of several may wait long for the others.
    let started = tokio::select! {
        node = start_node(config, block_devices, Purpose::Daemon, &mut starting) => node.map(Some),
        name = stop.wait() => {
            tracing::info!(signal = name, "stopping before the start was done");
            Ok(None)
        }
    };
    // Whatever came of it, the socket is not for the start any more.
    let socket = starting.done().await;
    let Some(node) = started? else {
        return Ok(());
    };
    let Some((listener, _admin)) = socket else {
        close(&node).await;
        return Err(Failure::plain(
            Kind::Failed,
            "the admin socket was closed during the start",
        ));
    };
    let metrics = match listen_for_metrics(&node).await {
        Ok(metrics) => metrics,
        Err(failure) => {
            close(&node).await;
            return Err(failure);
        }
    };
    let mut endpoints = format!("admin unix:{}", admin_path.display());
    if let Some(metrics) = &metrics {
        endpoints.push_str(&format!(", metrics http://{}/metrics", metrics.address));
    }
    drop(bridge);
    announce(&node, &endpoints);
    supervisor.ready(&format!("serves; {endpoints}"));
    supervisor.keep(&node, admin_path);
    let (drain, drained) = oneshot::channel::<()>();
    let router = crate::routes::router(&node);
    let router = router.into_make_service_with_connect_info::<Caller>();
    let server = axum::serve(listener, router).with_graceful_shutdown(async {
        // A dropped sender means the same: stop.
        let _ = drained.await;
    });
    let mut server = tokio::spawn(server.into_future());
    let ended = tokio::select! {
        name = stop.wait() => {
            tracing::info!(signal = name, "stopping");
            supervisor.stopping();
            let _ = drain.send(());
            if tokio::time::timeout(DRAIN_MAX, &mut server).await.is_err() {
                server.abort();
            }
            Ok(())
        }
        ended = &mut server => match ended {
            Ok(Err(e)) => Err(Failure::plain(Kind::Failed, format!("the admin socket failed: {e}"))),
            Ok(Ok(())) => Err(Failure::plain(Kind::Failed, "the admin socket was closed")),
            Err(e) => Err(Failure::plain(Kind::Failed, format!("the admin server failed: {e}"))),
        },
        // To the others this node is down, and only a new process helps: guests wait for it, as they do after
        // a kill.
        failure = node.meta_ended() => Err(failure),
        failure = node.end_requested() => Err(failure),
    };
    if let Err(failure) = &ended {
        // Said now: to close may take long, or not come to an end.
        tracing::error!(%failure, "this node ends");
    }
    close(&node).await;
    ended
}

async fn listen_for_metrics(node: &Arc<Node>) -> Result<Option<health::Listening>> {
    match node.config().metrics_listen {
        Some(address) => health::listen(address, &node.health).await.map(Some),
        None => Ok(None),
    }
}

/// Closes a node within [`CLOSE_MAX`].
pub async fn close(node: &Node) {
    let closed = tokio::time::timeout(CLOSE_MAX, node.close()).await;
    if closed.is_err() {
        tracing::error!(
            "requests are still under way after {} s; they are left to the next start",
            CLOSE_MAX.as_secs()
        );
        log::LIMITER.tell();
        // SAFETY: ends the process at once. An orderly end would wait for the threads that hang.
        unsafe { libc::_exit(1) };
    }
    log::LIMITER.tell();
}

/// Starts a node and says what a person should know about it.
pub async fn start_node(
    config: Prepared,
    block_devices: BlockDevices,
    purpose: Purpose,
    starting: &mut Starting,
) -> Result<Arc<Node>> {
    if config.store == StoreKind::Null {
        eprintln!(
            "penstock: WARNING: --store null DROPS EVERY WRITE and reads return garbage; for benchmarks only"
        );
    }
    let node = Node::open(config, block_devices, purpose, starting).await?;
    if let Err(failure) = node.serve(purpose).await {
        node.close().await;
        return Err(failure);
    }
    for line in node.recovery() {
        eprintln!("penstock: store {line}");
    }
    Ok(Arc::new(node))
}

/// The one line that says that the daemon is ready.
pub fn announce(node: &Node, endpoint: &str) {
    let config = node.config();
    let data = config.data.display();
    let threads = config.threads;
    eprintln!("penstock: ready: data {data}, {endpoint}, {threads} data threads");
}

/// The signals that end the daemon.
pub struct Stop {
    terminate: Signal,
    interrupt: Signal,
}

impl Stop {
    /// From here on the signals no longer kill the process.
    pub fn new() -> Result<Self> {
        let on = |kind| signal(kind).context(|| "watch for signals".into());
        Ok(Stop {
            terminate: on(SignalKind::terminate())?,
            interrupt: on(SignalKind::interrupt())?,
        })
    }

    /// Waits for one and returns its name.
    pub async fn wait(&mut self) -> &'static str {
        tokio::select! {
            _ = self.terminate.recv() => "SIGTERM",
            _ = self.interrupt.recv() => "SIGINT",
        }
    }
}
