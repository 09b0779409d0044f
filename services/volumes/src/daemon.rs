//! How the daemon runs this service.

use std::sync::Arc;

use api::failure::Result;
use api::metrics::Page;
use axum::Router;
use meta::LeaderReport;
use service::found::Found;
use service::{BoxFuture, Service};

use crate::volumes::Volumes;
use crate::{full, leftovers, metrics, routes};

impl Service for Volumes {
    fn name(&self) -> &'static str {
        "volumes"
    }

    fn start(self: Arc<Self>) -> BoxFuture<'static, Result<()>> {
        Box::pin(async move {
            self.find_leftovers().await?;
            self.keep_leases();
            leftovers::keep_finishing(&self);
            full::keep_following(&self);
            Ok(())
        })
    }

    fn stop(&self) -> BoxFuture<'_, ()> {
        Box::pin(self.wait_for_copies())
    }

    fn problems(&self) -> BoxFuture<'_, Vec<Found>> {
        Box::pin(async {
            let mut problems = self.held_problems();
            problems.extend(self.leftover_problems());
            problems.extend(self.leases.problems());
            problems
        })
    }

    fn put_metrics<'a>(&'a self, page: &'a mut Page) -> BoxFuture<'a, ()> {
        Box::pin(async {
            let view = self.cluster.applied(LeaderReport::default());
            if let Ok(view) = view {
                metrics::put(page, &view, &*self.used.as_heard().await);
            }
        })
    }

    fn routes(self: Arc<Self>) -> Router {
        routes::routes(self)
    }
}
