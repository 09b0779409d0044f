//! The OpenAPI document, made from the handlers and types; the committed copy is `docs/openapi.json`.

use utoipa::OpenApi;
use utoipa::openapi::PathItem;

use super as server;

#[derive(OpenApi)]
#[openapi(
    info(
        title = "Penstock admin API",
        description = "HTTP on the daemon's unix socket. A failure is a JSON object that says what went \
            wrong and how to fix it. A list that no metadata leader confirmed is what this node knew last, \
            and has the header `penstock-not-confirmed-for`: the seconds since this node heard a leader, or \
            `before-start`.",
    ),
    paths(server::status, server::config)
)]
struct Document;

/// Groups the operations of a path by the service that they belong to.
fn tag(path: &mut PathItem, service: &str) {
    let methods = [
        &mut path.get,
        &mut path.put,
        &mut path.post,
        &mut path.patch,
        &mut path.delete,
    ];
    for operation in methods.into_iter().flatten() {
        operation.tags = Some(vec![service.to_owned()]);
    }
}

/// The document as indented JSON with a newline at its end.
pub fn document() -> String {
    let mut all = Document::openapi();
    for (service, mut paths) in [
        ("storage", storage::paths()),
        ("volumes", volumes::paths()),
        ("filesystems", filesystems::paths()),
        ("attachments", attachments::paths()),
        ("exports", exports::paths()),
        ("membership", membership::paths()),
        ("health", health::paths()),
    ] {
        for path in paths.paths.paths.values_mut() {
            tag(path, service);
        }
        all.merge(paths);
    }
    let mut json = all
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
