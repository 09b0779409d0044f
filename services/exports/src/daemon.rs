//! How the daemon runs this service.

use std::sync::Arc;

use api::failure::Result;
use axum::Router;
use service::found::Found;
use service::view::View;
use service::{BoxFuture, Service};

use crate::exports::Exports;
use crate::{health, keeper, routes};

impl Service for Exports {
    fn name(&self) -> &'static str {
        "exports"
    }

    fn start(self: Arc<Self>) -> BoxFuture<'static, Result<()>> {
        Box::pin(async move {
            keeper::keep(&self);
            Ok(())
        })
    }

    fn problems(&self) -> BoxFuture<'_, Vec<Found>> {
        Box::pin(async { self.export_problems() })
    }

    fn cluster_problems(&self, view: &View) -> Vec<Found> {
        let exports = self.cluster.meta.applied().exports();
        health::orphans(view, &exports.unwrap_or_default())
    }

    fn routes(self: Arc<Self>) -> Router {
        routes::routes(self)
    }
}
