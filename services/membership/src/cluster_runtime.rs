//! Runtime for the work that other nodes and guests' disks depend on: Raft of the cluster map, heartbeats,
//! leases, and the data path's updates and queries when a node fails.
//!
//! Everything else runs on the control plane's runtime: the admin API, namespace groups, clients of
//! filesystems, copies. It may be busy for any time. The two runtimes share neither worker threads nor the
//! pool for blocking calls.

use std::future::Future;

use api::failure::{Context, Failure, Kind, Result};
use tokio::runtime::{Builder, Handle, Runtime};

/// Worker threads: one may be busy while the other answers heartbeats.
const THREADS: usize = 2;
/// Threads for blocking calls: writes of the log, snapshots, and new maps for the data path. Further calls
/// wait for a free thread.
const BLOCKING_THREADS_MAX: usize = 16;

/// Handle of the runtime. Dropping it shuts the runtime down without waiting for blocking calls.
pub struct ClusterRuntime(Option<Runtime>);

impl ClusterRuntime {
    /// Starts the runtime.
    pub fn start() -> Result<Self> {
        let runtime = Builder::new_multi_thread()
            .worker_threads(THREADS)
            .max_blocking_threads(BLOCKING_THREADS_MAX)
            .thread_name("cluster")
            .enable_all()
            .build()
            .context(|| "start the runtime for heartbeats and leases".into())?;
        Ok(Self(Some(runtime)))
    }

    /// Handle for starting tasks.
    pub fn handle(&self) -> Handle {
        let runtime = self.0.as_ref();
        runtime
            .expect("the runtime exists until it is dropped")
            .handle()
            .clone()
    }

    /// Runs a future on this runtime and waits for its result.
    pub async fn run<T: Send + 'static>(
        &self,
        work: impl Future<Output = T> + Send + 'static,
    ) -> Result<T> {
        let done = self.handle().spawn(work).await;
        done.map_err(|error| Failure::plain(Kind::Failed, error))
    }
}

impl Drop for ClusterRuntime {
    fn drop(&mut self) {
        if let Some(runtime) = self.0.take() {
            runtime.shutdown_background();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;

    /// Time after which the test fails instead of waiting for a runtime that is stuck.
    const STUCK_AFTER: Duration = Duration::from_secs(60);

    #[test]
    fn the_cluster_runtime_works_while_the_control_plane_is_blocked() {
        let control = service::waiting::runtime().unwrap();
        let cluster = ClusterRuntime::start().unwrap();
        let (release, stuck) = mpsc::channel::<()>();
        let stuck = std::sync::Arc::new(std::sync::Mutex::new(stuck));
        let (begun, has_begun) = mpsc::channel();
        // Blocks every worker of the control plane until the end of the test.
        for _ in 0..service::waiting::CONTROL_THREADS {
            let (stuck, begun) = (std::sync::Arc::clone(&stuck), begun.clone());
            control.spawn(async move {
                begun.send(()).unwrap();
                let _ = stuck.lock().unwrap().recv();
            });
        }
        for _ in 0..service::waiting::CONTROL_THREADS {
            has_begun.recv_timeout(STUCK_AFTER).unwrap();
        }
        let (done, is_done) = mpsc::channel();
        cluster.handle().spawn(async move {
            tokio::task::spawn_blocking(|| ()).await.unwrap();
            done.send(()).unwrap();
        });
        is_done.recv_timeout(STUCK_AFTER).unwrap();
        drop(release);
    }
}
