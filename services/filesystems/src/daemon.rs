//! How the daemon runs this service.

use std::sync::Arc;

use api::failure::Result;
use api::metrics::Page;
use axum::Router;
use service::found::Found;
use service::{BoxFuture, Service};

use crate::filesystems::FilesystemService;
use crate::{filesystems, routes};

impl Service for FilesystemService {
    fn name(&self) -> &'static str {
        "filesystems"
    }

    fn start(self: Arc<Self>) -> BoxFuture<'static, Result<()>> {
        Box::pin(async move {
            self.restore().await?;
            filesystems::keep(&self);
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
        Box::pin(async { self.put_figures(page).await })
    }

    fn routes(self: Arc<Self>) -> Router {
        routes::routes(self)
    }
}
