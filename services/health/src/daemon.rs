//! How the daemon runs this service.

use std::sync::Arc;

use api::failure::Result;
use axum::Router;
use service::{BoxFuture, Service};

use crate::health::Health;
use crate::routes;

impl Service for Health {
    fn name(&self) -> &'static str {
        "health"
    }

    fn start(self: Arc<Self>) -> BoxFuture<'static, Result<()>> {
        Box::pin(async move {
            self.keep();
            Ok(())
        })
    }

    fn routes(self: Arc<Self>) -> Router {
        routes::routes(self)
    }
}
