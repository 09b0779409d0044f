//! How the daemon runs this service.

use std::sync::Arc;

use api::failure::Result;
use api::metrics::Page;
use axum::Router;
use service::found::Found;
use service::{BoxFuture, Service};

use crate::attachments::Attachments;
use crate::{block, lost, metrics, migration, routes};

impl Service for Attachments {
    fn name(&self) -> &'static str {
        "attachments"
    }

    fn start(self: Arc<Self>) -> BoxFuture<'static, Result<()>> {
        Box::pin(async move {
            self.restore().await?;
            lost::keep(&self);
            block::keep(&self);
            migration::keep(&self);
            Ok(())
        })
    }

    fn stop(&self) -> BoxFuture<'_, ()> {
        Box::pin(self.close())
    }

    fn problems(&self) -> BoxFuture<'_, Vec<Found>> {
        Box::pin(self.attachment_problems())
    }

    fn put_metrics<'a>(&'a self, page: &'a mut Page) -> BoxFuture<'a, ()> {
        Box::pin(async {
            if let (Ok(attachments), Ok(stats)) =
                (self.as_applied().await, self.stats_as_applied().await)
            {
                metrics::put_attachments(page, &attachments);
                metrics::put_latencies(page, &stats);
            }
        })
    }

    fn routes(self: Arc<Self>) -> Router {
        routes::routes(self)
    }
}
