//! How the daemon runs this service.

use std::sync::Arc;

use api::failure::Result;
use axum::Router;
use service::{BoxFuture, Service};

use crate::nodes::Nodes;
use crate::routes;

impl Service for Nodes {
    fn name(&self) -> &'static str {
        "membership"
    }

    fn start(self: Arc<Self>) -> BoxFuture<'static, Result<()>> {
        Box::pin(async { Ok(()) })
    }

    fn routes(self: Arc<Self>) -> Router {
        routes::routes(self)
    }
}
