//! Exports that clients wait for.

use meta::{AdminState, NodeState, Role};
use nfs::placement::{NfsNode, successor};
use service::code::Code;
use service::found::Found;
use service::view::View;

use crate::exports::Exports;

/// Begins what is told of an export, so that other nodes find it.
fn title(name: &str) -> String {
    format!("NFS export '{name}'")
}

impl Exports {
    /// Exports of this node that it does not serve.
    pub(crate) fn export_problems(&self) -> Vec<Found> {
        let own = self.cluster.node_id();
        let exports = self.cluster.meta.applied().exports().unwrap_or_default();
        let ours = exports.iter().filter(|export| export.node == own);
        let found = ours.filter_map(|export| {
            let progress = self.progress_of(&export.name);
            if progress.is_at_rest {
                return None;
            }
            let (why, doing) = match (&progress.failure, progress.waits_for) {
                (Some(failure), _) => (
                    failure.error.clone(),
                    failure.hint.clone().unwrap_or_default(),
                ),
                (None, Some(reason)) => (reason.to_owned(), "it goes on by itself".to_owned()),
                (None, None) => ("it starts".to_owned(), "it goes on by itself".to_owned()),
            };
            let what = format!("{} is not served: {why}", title(&export.name));
            Some(Found::new(Code::ExportNotServed, &export.name, what, doing))
        });
        found.collect()
    }
}

/// Why an export of another NFS node is not served, by that node's word.
pub fn told_by_node(view: &View, export: &meta::Export) -> Option<String> {
    let begin = format!("{} is not served: ", title(&export.name));
    let words = view.words().filter(|(node, _)| *node == export.node);
    let mut problems = words.flat_map(|(_, word)| &word.problems);
    problems.find_map(|problem| problem.what.strip_prefix(&begin).map(str::to_owned))
}

/// Exports whose NFS node is down, with nobody to take them over.
pub fn orphans(view: &View, exports: &[meta::Export]) -> Vec<Found> {
    let node = |node: &meta::Node| NfsNode {
        id: node.id.0,
        has_role: node.roles.contains(&Role::Nfs),
        is_up: node.state == NodeState::Up,
        is_draining: node.admin_state == AdminState::Draining,
    };
    let nodes: Vec<NfsNode> = view.map.nodes().map(node).collect();
    let is_down = |export: &&meta::Export| {
        let node = view.map.node(export.node);
        let is_down = node.is_none_or(|node| node.state == NodeState::Down);
        is_down && successor(&nodes, export.node.0).is_none()
    };
    let found = exports.iter().filter(is_down).map(|export| {
        Found::new(
            Code::ExportNotServed,
            &export.name,
            format!(
                "{} is not served: its NFS node {} is down, and no other NFS node is up",
                title(&export.name),
                view.node_name(export.node)
            ),
            "start that node, or another one with the role nfs; clients wait",
        )
    });
    found.collect()
}
