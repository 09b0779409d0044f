//! vhost-backend
