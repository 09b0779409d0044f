//! Exports that clients wait for.

use gateway::placement::{Gateway, successor};
use meta::{AdminState, NodeState, Role};

use crate::serve::cluster::View;
use crate::serve::health::code::Code;
use crate::serve::monitor::Found;
use crate::serve::node::Node;

/// Begins what is told of an export, so that other nodes find it.
fn title(name: &str) -> String {
    format!("NFS export '{name}'")
}

impl Node {
    /// Exports of this node that it does not serve.
    pub(in crate::serve) fn export_problems(&self) -> Vec<Found> {
        let own = self.meta.node_id();
        let exports = self.meta.applied().exports().unwrap_or_default();
        let ours = exports.iter().filter(|export| export.gateway == own);
        let found = ours.filter_map(|export| {
            let progress = self.exports.progress_of(&export.name);
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

/// Why an export of another gateway is not served, by that node's word.
pub fn told_by_gateway(view: &View, export: &meta::Export) -> Option<String> {
    let begin = format!("{} is not served: ", title(&export.name));
    let words = view.words().filter(|(node, _)| *node == export.gateway);
    let mut problems = words.flat_map(|(_, word)| &word.problems);
    problems.find_map(|problem| problem.what.strip_prefix(&begin).map(str::to_owned))
}

/// Exports whose gateway is down, with nobody to take them over.
pub fn orphans(view: &View, exports: &[meta::Export]) -> Vec<Found> {
    let gateway = |node: &meta::Node| Gateway {
        id: node.id.0,
        has_role: node.roles.contains(&Role::Gateway),
        is_up: node.state == NodeState::Up,
        is_draining: node.admin_state == AdminState::Draining,
    };
    let gateways: Vec<Gateway> = view.map.nodes().map(gateway).collect();
    let is_down = |export: &&meta::Export| {
        let node = view.map.node(export.gateway);
        let is_down = node.is_none_or(|node| node.state == NodeState::Down);
        is_down && successor(&gateways, export.gateway.0).is_none()
    };
    let found = exports.iter().filter(is_down).map(|export| {
        Found::new(
            Code::ExportNotServed,
            &export.name,
            format!(
                "{} is not served: its gateway {} is down, and no other gateway is up",
                title(&export.name),
                view.node_name(export.gateway)
            ),
            "start that node, or another one with the role gateway; clients wait",
        )
    });
    found.collect()
}
