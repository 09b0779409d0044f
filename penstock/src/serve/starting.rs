//! What a daemon says of itself before its start is done: a node of several may wait long for the others, and
//! its operator wants to know for whom. Until then the admin socket answers `status` and `health`.

use std::future::IntoFuture;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use api::failure::{Context, Failure, Kind, Result};
use api::moment::Moment;
use api::types::{Health, HealthState, Problem, Status};
use axum::extract::State;
use axum::routing::get;
use axum::{Json, Router};
use config::{self, StoreKind};
use health::leader_missed;
use membership::WaitsForLeader;
use meta::Meta;
use service::code::Code;
use service::prepared::Prepared;
use tokio::net::UnixListener;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use super::admin::{self, AdminSocket};

/// How long answers that are under way may take when the start is done.
const END_MAX: Duration = Duration::from_millis(500);

/// What to do while it waits for others.
const GO_ON: &str = "start the nodes that are down, or repair the network; this node goes on by itself, \
                     unless the others went on without it by `penstock cluster recover`: its log says so, \
                     and names `penstock cluster rejoin`";

/// A start under way. Dropped before it is done, the admin socket goes.
pub struct Starting {
    told: Arc<Told>,
    socket: Option<Socket>,
}

/// What those who answer know of a start.
struct Told {
    config: Prepared,
    begun: (Instant, Moment),
    /// Whom it waits for; none while it does not wait.
    waits: Mutex<Option<Meta>>,
}

/// The admin socket, and who answers on it until the start is done.
struct Socket {
    listener: UnixListener,
    file: AdminSocket,
    end: oneshot::Sender<()>,
    answering: JoinHandle<std::io::Result<()>>,
}

impl Starting {
    /// Begins.
    pub fn new(config: &Prepared) -> Self {
        let told = Told {
            config: config.clone(),
            begun: (Instant::now(), Moment::now()),
            waits: Mutex::default(),
        };
        Self {
            told: Arc::new(told),
            socket: None,
        }
    }

    /// Listens on the admin socket, which is in a data directory that is ours, and answers from now on.
    pub fn listen(&mut self) -> Result<()> {
        let config = &self.told.config;
        let usual = config::admin_socket_in(&config.data);
        let (listener, file) = admin::listen(&config.admin_socket, &usual)?;
        let both = listener.into_std().and_then(|listener| {
            let other = UnixListener::from_std(listener.try_clone()?)?;
            Ok((UnixListener::from_std(listener)?, other))
        });
        let (listener, other) = both.context(|| "listen on the admin socket".into())?;
        let (end, ended) = oneshot::channel::<()>();
        let router = router(Arc::clone(&self.told));
        let server = axum::serve(other, router).with_graceful_shutdown(async {
            // A dropped sender means the same.
            let _ = ended.await;
        });
        self.socket = Some(Socket {
            listener,
            file,
            end,
            answering: tokio::spawn(server.into_future()),
        });
        Ok(())
    }

    /// Takes note while the start waits until a leader of the metadata has heard of this node.
    pub fn waits(&self) -> Box<WaitsForLeader> {
        let told = Arc::clone(&self.told);
        Box::new(move |meta| *told.waits() = meta)
    }

    /// The start is done: the admin socket goes to whoever answers everything.
    pub async fn done(self) -> Option<(UnixListener, AdminSocket)> {
        let mut socket = self.socket?;
        let _ = socket.end.send(());
        match tokio::time::timeout(END_MAX, &mut socket.answering).await {
            Ok(answered) => {
                let answered = answered.map_err(std::io::Error::other);
                if let Ok(Err(error)) | Err(error) = answered {
                    tracing::warn!(%error, "the admin socket failed during the start");
                }
            }
            // Who sends half a request does not keep the daemon from its guests.
            Err(_) => socket.answering.abort(),
        }
        Some((socket.listener, socket.file))
    }
}

fn router(told: Arc<Told>) -> Router {
    Router::new()
        .route("/v1/status", get(status))
        .route("/v1/health", get(health))
        .fallback(not_yet)
        .with_state(told)
}

impl Told {
    fn waits(&self) -> MutexGuard<'_, Option<Meta>> {
        // Whatever panicked, it is one value.
        self.waits.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn problem(&self) -> Problem {
        let waits = self.waits().clone();
        let (what, doing) = match &waits {
            Some(meta) => {
                let map = meta.map();
                let name = |id| {
                    map.node(id)
                        .map_or_else(|| format!("{id}"), |node| node.name.to_string())
                };
                (
                    format!(
                        "and {}",
                        leader_missed(meta.node_id(), &meta.raft_status(), &name)
                    ),
                    GO_ON,
                )
            }
            None => (
                "and opens its metadata and devices".to_owned(),
                "wait; its log tells how far it is",
            ),
        };
        Problem {
            code: Code::Starting.word().to_owned(),
            what: format!("this node is starting, {what}"),
            since: Some(self.begun.1),
            doing: doing.to_owned(),
            eta_s: None,
            is_warning: false,
        }
    }

    fn health(&self) -> Health {
        Health {
            state: HealthState::Degraded,
            problems: vec![self.problem()],
            background_jobs: Vec::new(),
            notices: Vec::new(),
        }
    }

    fn status(&self) -> Status {
        let config = &self.config;
        let waits = self.waits().clone();
        let map = waits.as_ref().map(Meta::map);
        let cluster = map.as_ref().and_then(|map| map.cluster());
        let node = waits.as_ref().zip(map.as_ref());
        let node = node.and_then(|(meta, map)| map.node(meta.node_id()));
        let roles = node.map(|node| node.roles.iter().map(ToString::to_string).collect());
        Status {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            is_starting: true,
            cluster_id: cluster.map(|one| one.uuid.to_string()).unwrap_or_default(),
            feature_level: cluster.map_or(0, |one| one.level.0),
            roles: roles.unwrap_or_default(),
            data: config.data.clone(),
            pid: std::process::id(),
            uptime_s: self.begun.0.elapsed().as_secs(),
            store: match config.store {
                StoreKind::Null => "null",
                StoreKind::File => "file",
            }
            .to_owned(),
            threads: config.threads,
            open_files_max: sandbox::limits::open_files_max(),
            volumes: 0,
            attachments: 0,
            guests: 0,
            capacity_bytes: 0,
            used_bytes: 0,
            privileges: sandbox::in_force(config.privileges.user.as_ref(), &config.confinement),
            block_devices: String::new(),
            recovery: Vec::new(),
            transports: Vec::new(),
            health: self.health(),
        }
    }
}

async fn status(State(told): State<Arc<Told>>) -> Json<Status> {
    Json(told.status())
}

async fn health(State(told): State<Arc<Told>>) -> Json<Health> {
    Json(told.health())
}

/// Everything else has to wait.
async fn not_yet(State(told): State<Arc<Told>>) -> Failure {
    let problem = told.problem();
    Failure::new(Kind::Starting, problem.what, problem.doing)
}
