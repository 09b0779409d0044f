//! Interface between the daemon and each of its services.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use api::failure::Result;
use api::metrics::Page;
use axum::Router;

use crate::found::Found;
use crate::view::View;

/// Future of a trait object's method.
pub type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// A part of the daemon with its own state, tasks and routes.
///
/// The daemon starts services in order and stops them in reverse order.
pub trait Service: Send + Sync + 'static {
    /// Name for messages.
    fn name(&self) -> &'static str;

    /// Serves again what is recorded in the metadata, and starts the service's tasks.
    ///
    /// # Errors
    /// The daemon cannot serve without this.
    fn start(self: Arc<Self>) -> BoxFuture<'static, Result<()>>;

    /// Ends requests in flight and tasks. Records in the metadata stay for the next start.
    fn stop(&self) -> BoxFuture<'_, ()> {
        Box::pin(async {})
    }

    /// Problems of this node.
    fn problems(&self) -> BoxFuture<'_, Vec<Found>> {
        Box::pin(async { Vec::new() })
    }

    /// Time within which [`problems`](Self::problems) answers. After it the service's last answer is used.
    fn answers_within(&self) -> Duration {
        Duration::from_millis(800)
    }

    /// Puts the service's figures into the metrics page.
    fn put_metrics<'a>(&'a self, _page: &'a mut Page) -> BoxFuture<'a, ()> {
        Box::pin(async {})
    }

    /// Problems of the cluster that no node reports by itself, as far as this service knows.
    fn cluster_problems(&self, _view: &View) -> Vec<Found> {
        Vec::new()
    }

    /// Routes of the admin API.
    fn routes(self: Arc<Self>) -> Router;
}
