//! What the daemon tells the service manager that started it: that it is ready, that it stops, and that it is
//! alive (the protocol of systemd's `sd_notify`). Without `NOTIFY_SOCKET` in the environment nothing is told.
//!
//! **Alive** is told by nobody who only watches a clock. Each time the daemon asks its own admin API, through
//! the socket that commands use, and every data thread. Only if all of them answer is the watchdog told. A
//! device that hangs, a guest, or a cluster without a leader do not matter: a new process would find them as
//! they are. A thread that hangs is what a restart mends, and to guests that is a pause.
//!
//! The socket is opened before the process gives up its rights, and stays open: Landlock keeps a later
//! process from abstract sockets.

use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use api::client::Client;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, timeout};
use vhost_backend::data_thread::Ping;

use super::node::Node;

/// What the watchdog is told.
const ALIVE: &str = "WATCHDOG=1";
/// Names the service manager's socket: a path, or `@` and an abstract name.
const SOCKET_ENV: &str = "NOTIFY_SOCKET";
/// How often the service manager wants to hear, in microseconds.
const WATCHDOG_ENV: &str = "WATCHDOG_USEC";
/// The process that it wants to hear of; any, if it does not say.
const WATCHDOG_PID_ENV: &str = "WATCHDOG_PID";
/// Looks in each watchdog time: one that is late does not count as death.
const LOOKS: u32 = 3;
/// Between two looks at whether a data thread has answered.
const ANSWER_PAUSE: Duration = Duration::from_millis(5);
/// A start may take as long as the other nodes of the cluster keep it waiting, or as recovery of a large
/// device. After this long it counts as started, and says what it waits for: a package manager and services
/// that begin after this one do not wait any longer.
const START_WAIT_MAX: Duration = Duration::from_secs(60);

/// The service manager, as far as there is one.
#[derive(Debug, Default, Clone)]
pub struct Supervisor {
    channel: Option<Arc<Channel>>,
    watchdog: Option<Duration>,
}

#[derive(Debug)]
struct Channel {
    socket: UnixDatagram,
    address: SocketAddr,
}

impl Supervisor {
    /// What the environment names. Called while the process has all its rights.
    pub fn from_environment() -> Self {
        let Some(name) = std::env::var_os(SOCKET_ENV).filter(|name| !name.is_empty()) else {
            return Self::default();
        };
        let number = |name: &str| std::env::var(name).ok()?.parse::<u64>().ok();
        let is_meant =
            number(WATCHDOG_PID_ENV).is_none_or(|pid| pid == u64::from(std::process::id()));
        let watchdog = number(WATCHDOG_ENV).filter(|micros| *micros > 0 && is_meant);
        match Channel::open(name.as_encoded_bytes()) {
            Ok(channel) => Self {
                channel: Some(Arc::new(channel)),
                watchdog: watchdog.map(Duration::from_micros),
            },
            Err(error) => {
                // Whoever waits for word ends this process in time, and this line says why.
                tracing::error!(%error, "reach the service manager by {SOCKET_ENV}");
                Self::default()
            }
        }
    }

    /// Waits in the background for a start that takes long: tells that it lives, and after
    /// [`START_WAIT_MAX`] that it counts as started. Ends when the result is dropped.
    pub fn bridge_start(&self) -> Bridge {
        self.bridge_start_after(START_WAIT_MAX)
    }

    fn bridge_start_after(&self, wait: Duration) -> Bridge {
        let Some(channel) = self.channel.clone() else {
            return Bridge(None);
        };
        let pause = self.watchdog.map(|watchdog| watchdog / LOOKS);
        Bridge(Some(tokio::spawn(async move {
            sleep(wait).await;
            tracing::warn!("the start takes long; the service manager is told to wait no longer");
            channel
                .send("READY=1\nSTATUS=starting: `penstock health` says what it waits for or does");
            // Of a start there is no more to ask than that tasks run.
            while let Some(pause) = pause {
                channel.send(ALIVE);
                sleep(pause).await;
            }
        })))
    }

    /// The daemon serves.
    pub fn ready(&self, status: &str) {
        self.tell(&format!("READY=1\nSTATUS={status}"));
    }

    /// The daemon drains and ends.
    pub fn stopping(&self) {
        self.tell("STOPPING=1\nSTATUS=stopping: guests' requests are finished");
    }

    /// Tells the watchdog for as long as the daemon works.
    pub fn keep(&self, node: &Arc<Node>, admin_socket: PathBuf) {
        let (Some(channel), Some(watchdog)) = (self.channel.clone(), self.watchdog) else {
            return;
        };
        let (node, pause) = (Arc::downgrade(node), watchdog / LOOKS);
        let admin = Client::at(admin_socket);
        tokio::spawn(async move {
            let mut told = false;
            while let Some(node) = node.upgrade() {
                let begun = Instant::now();
                match silent(&admin, node.storage.threads.ping(), pause).await {
                    None => {
                        channel.send(ALIVE);
                        told = false;
                    }
                    Some(who) if !told => {
                        tracing::error!("{who} does not answer; the watchdog is not told");
                        told = true;
                    }
                    Some(_) => {}
                }
                drop(node);
                sleep(pause.saturating_sub(begun.elapsed())).await;
            }
        });
    }

    fn tell(&self, message: &str) {
        if let Some(channel) = &self.channel {
            channel.send(message);
        }
    }
}

/// Who does not answer within `limit`.
async fn silent(admin: &Client, threads: Vec<Ping>, limit: Duration) -> Option<String> {
    let until = Instant::now() + limit;
    // A document that it makes of nothing else: to answer takes the listener and the router alone.
    let asked = timeout(limit, admin.get::<serde_json::Value>("/v1/openapi.json"));
    if !matches!(asked.await, Ok(Ok(_))) {
        return Some("the admin API".to_owned());
    }
    for (index, thread) in threads.into_iter().enumerate() {
        while !thread.is_answered() {
            if Instant::now() >= until {
                return Some(format!("data thread {index}"));
            }
            sleep(ANSWER_PAUSE).await;
        }
    }
    None
}

/// A start under way.
#[derive(Debug)]
pub struct Bridge(Option<JoinHandle<()>>);

impl Drop for Bridge {
    fn drop(&mut self) {
        if let Some(task) = &self.0 {
            task.abort();
        }
    }
}

impl Channel {
    fn open(name: &[u8]) -> io::Result<Self> {
        let address = match name.strip_prefix(b"@") {
            Some(name) => SocketAddr::from_abstract_name(name)?,
            None => SocketAddr::from_pathname(std::path::Path::new(
                <std::ffi::OsStr as std::os::unix::ffi::OsStrExt>::from_bytes(name),
            ))?,
        };
        let socket = UnixDatagram::unbound()?;
        // A service manager that is busy must not hold the daemon up; what it misses is said again.
        socket.set_nonblocking(true)?;
        socket.connect_addr(&address)?;
        Ok(Self { socket, address })
    }

    /// A message that is lost is one look that failed: the next one comes.
    fn send(&self, message: &str) {
        if self.socket.send(message.as_bytes()).is_ok() {
            return;
        }
        // The service manager was started anew and has another socket of the same name.
        let sent = self
            .socket
            .connect_addr(&self.address)
            .and_then(|()| self.socket.send(message.as_bytes()));
        if let Err(error) = sent {
            tracing::warn!(%error, "tell the service manager");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn heard(manager: &UnixDatagram) -> String {
        let mut bytes = [0; 4096];
        let length = manager.recv(&mut bytes).unwrap();
        String::from_utf8_lossy(&bytes[..length]).into_owned()
    }

    fn told_to(name: &[u8]) -> Supervisor {
        Supervisor {
            channel: Some(Arc::new(Channel::open(name).unwrap())),
            watchdog: None,
        }
    }

    #[test]
    fn words_reach_paths_and_abstract_names() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("notify");
        let manager = UnixDatagram::bind(&path).unwrap();
        told_to(path.as_os_str().as_encoded_bytes()).ready("serves");
        assert_eq!(heard(&manager), "READY=1\nSTATUS=serves");
        let name = format!("penstock-test-{}", std::process::id());
        let address = SocketAddr::from_abstract_name(&name).unwrap();
        let manager = UnixDatagram::bind_addr(&address).unwrap();
        told_to(format!("@{name}").as_bytes()).stopping();
        assert!(heard(&manager).starts_with("STOPPING=1\n"));
    }

    #[test]
    fn words_reach_a_service_manager_that_was_started_anew() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("notify");
        let manager = UnixDatagram::bind(&path).unwrap();
        let supervisor = told_to(path.as_os_str().as_encoded_bytes());
        drop(manager);
        // Nobody is there: nothing is told, and nothing fails.
        supervisor.ready("lost");
        std::fs::remove_file(&path).unwrap();
        let manager = UnixDatagram::bind(&path).unwrap();
        supervisor.ready("heard");
        assert_eq!(heard(&manager), "READY=1\nSTATUS=heard");
    }

    #[tokio::test]
    async fn a_long_start_counts_as_started_after_a_while() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("notify");
        let manager = UnixDatagram::bind(&path).unwrap();
        let mut supervisor = told_to(path.as_os_str().as_encoded_bytes());
        supervisor.watchdog = Some(Duration::from_millis(3));
        let bridge = supervisor.bridge_start_after(Duration::ZERO);
        let listening = tokio::task::spawn_blocking(move || {
            let first = heard(&manager);
            assert!(first.starts_with("READY=1\nSTATUS=starting"), "{first}");
            assert_eq!([heard(&manager), heard(&manager)], [ALIVE, ALIVE]);
        });
        listening.await.unwrap();
        drop(bridge);
    }
}
