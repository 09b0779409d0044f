//! The OpenAPI document, made from the handlers and types; the committed copy is `docs/openapi.json`.

use utoipa::OpenApi;

use super::{cluster, filesystem, hand_over, join, nfs, recovery};
use crate::routes as server;

#[derive(OpenApi)]
#[openapi(
    info(
        title = "Penstock admin API",
        description = "HTTP on the daemon's unix socket. A failure is a JSON object that says what went \
            wrong and how to fix it. A list that no metadata leader confirmed is what this node knew last, \
            and has the header `penstock-not-confirmed-for`: the seconds since this node heard a leader, or \
            `before-start`.",
    ),
    paths(
        hand_over::device_open,
        join::tokens,
        join::token_create,
        join::token_revoke,
        server::status,
        server::health,
        server::config,
        server::metrics,
        cluster::nodes,
        cluster::node,
        cluster::node_drain,
        cluster::node_remove,
        cluster::devices,
        cluster::device_add,
        cluster::device_remove,
        cluster::device_scrub,
        cluster::pools,
        cluster::pool_create,
        cluster::pool,
        cluster::pool_set,
        cluster::pool_delete,
        cluster::events,
        server::volumes,
        server::volume_create,
        server::volume,
        server::volume_resize,
        server::volume_rename,
        server::volume_set,
        server::volume_delete,
        server::volume_import,
        server::volume_export,
        server::attachments,
        server::attach,
        server::attachment_stats,
        server::detach,
        server::attachment_move,
        server::attachment_offer,
        server::attachment_withdraw,
        filesystem::filesystems,
        filesystem::filesystem_create,
        filesystem::filesystem,
        filesystem::filesystem_delete,
        filesystem::filesystem_attachments,
        filesystem::filesystem_attachment_stats,
        filesystem::filesystem_attach,
        filesystem::filesystem_detach,
        recovery::backup,
        recovery::resume,
        recovery::forget_unknown,
        nfs::exports,
        nfs::export_create,
        nfs::export,
        nfs::export_move,
        nfs::export_delete,
        nfs::nfs_status,
    )
)]
struct Document;

/// The document as indented JSON with a newline at its end.
pub fn document() -> String {
    let mut json = Document::openapi()
        .to_pretty_json()
        .expect("the document has string keys only");
    json.push('\n');
    json
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Set to write the committed document anew instead of comparing with it.
    const WRITE: &str = "PENSTOCK_WRITE_OPENAPI";

    #[test]
    fn the_committed_document_is_the_generated_one() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/openapi.json");
        if std::env::var_os(WRITE).is_some() {
            std::fs::write(path, document()).unwrap();
        }
        let committed = std::fs::read_to_string(path).unwrap();
        assert!(
            committed == document(),
            "docs/openapi.json is out of date: {WRITE}=1 cargo nextest run -p penstock openapi"
        );
    }
}
