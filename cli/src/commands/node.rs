//! `penstock node …`.

use api::client::{Client, encode};
use api::failure::Result;
use api::moment::{Moment, duration};
use api::size::Size;
use api::types::{ClusterNode, Drain, MetaPart, NodeAdminState, NodeRemoveQuery, NodeState};
use hyper::Method;
use meta::{LEASE_DURATION, Role};

use crate::args::NodeCommand;
use crate::table::Table;

use super::{confirm, or_dash, print, print_json};

/// Runs a verb.
pub async fn run(verb: NodeCommand, client: &Client, json: bool) -> Result<()> {
    match verb {
        NodeCommand::List => list(client, json).await,
        NodeCommand::Show { node } => show(&get(client, &node).await?, json),
        NodeCommand::Drain { node, cancel, yes } => drain(client, json, &node, !cancel, yes).await,
        NodeCommand::Remove {
            node,
            evict,
            accept_data_loss,
            yes,
        } => {
            let query = NodeRemoveQuery {
                accept_data_loss,
                evict,
            };
            remove(client, json, &node, (&query, yes)).await
        }
    }
}

fn path_of(node: &str) -> String {
    format!("/v1/nodes/{}", encode(node))
}

async fn get(client: &Client, node: &str) -> Result<ClusterNode> {
    client.get(&path_of(node)).await
}

async fn drain(client: &Client, json: bool, node: &str, on: bool, yes: bool) -> Result<()> {
    let found = get(client, node).await?;
    if on && found.admin_state != NodeAdminState::Draining {
        confirm::confirm(&format!("move all data off node '{}'", found.name), yes)?;
    }
    let path = format!("{}/drain", path_of(node));
    let node: ClusterNode = client.call(Method::PUT, &path, &Drain { on }).await?;
    if json {
        return print_json(&node);
    }
    match (on, node.groups_left) {
        (true, Some(0)) => eprintln!(
            "penstock: node {} is empty; `penstock node remove {}` forgets it",
            node.name, node.name
        ),
        (true, left) => eprintln!(
            "penstock: node {} is being emptied, {} placement groups are left; `penstock node show {}` tells \
             how far it is",
            node.name,
            left.unwrap_or(node.groups),
            node.name
        ),
        (false, _) => eprintln!("penstock: node {} may hold data again", node.name),
    }
    Ok(())
}

async fn remove(
    client: &Client,
    json: bool,
    node: &str,
    (query, yes): (&NodeRemoveQuery, bool),
) -> Result<()> {
    let found = get(client, node).await?;
    confirm::confirm(&removal(&found, query), yes)?;
    client.delete(&removal_path(node, query)).await?;
    if json {
        return print_json(&found);
    }
    let name = &found.name;
    match query.evict {
        true => eprintln!(
            "penstock: node {name} evicted; its volumes can be attached elsewhere once their leases have run \
             out, within {} s",
            LEASE_DURATION.as_secs()
        ),
        false => eprintln!(
            "penstock: node {name} removed; if it ever returns it joins with a new token and an empty data \
             directory"
        ),
    }
    if query.evict && has_authority(&found) {
        eprintln!(
            "penstock: node {name} has the key with which nodes are let in, which cannot be taken from it: \
             if it is hostile, move the data to a new cluster"
        );
    }
    Ok(())
}

/// Path and query of a removal.
fn removal_path(node: &str, query: &NodeRemoveQuery) -> String {
    let NodeRemoveQuery {
        accept_data_loss,
        evict,
    } = query;
    format!(
        "{}?accept_data_loss={accept_data_loss}&evict={evict}",
        path_of(node)
    )
}

/// Question for a removal, as it is confirmed.
fn removal(node: &ClusterNode, query: &NodeRemoveQuery) -> String {
    let name = &node.name;
    if query.evict {
        return format!(
            "permanently evict node '{name}': its guests lose their disks and filesystems"
        );
    }
    let with = match query.accept_data_loss {
        true => ", and all data that only it has,",
        false => "",
    };
    format!("permanently remove node '{name}' and its devices{with}")
}

/// Returns whether a node has the key of the cluster's authority.
fn has_authority(node: &ClusterNode) -> bool {
    node.roles
        .iter()
        .any(|role| *role == Role::Meta.to_string())
}

async fn list(client: &Client, json: bool) -> Result<()> {
    let nodes: Vec<ClusterNode> = client.get("/v1/nodes").await?;
    if json {
        return print_json(&nodes);
    }
    let now = Moment::now();
    let mut table = Table::new([
        ">ID", "NAME", "STATE", "SINCE", "ADMIN", "META", "ROLES", ">DEVICES", ">GROUPS", "VERSION",
    ]);
    for node in nodes {
        let since = node.since.map(|since| duration(since.seconds_until(now)));
        table.row([
            node.id.to_string(),
            node.name,
            state(node.state).to_owned(),
            or_dash(since.unwrap_or_default()),
            admin_state(node.admin_state).to_owned(),
            meta(node.meta).to_owned(),
            node.roles.join(","),
            node.devices.len().to_string(),
            node.groups.to_string(),
            node.version,
        ]);
    }
    print(|mut out| table.print(&mut out))
}

fn show(node: &ClusterNode, json: bool) -> Result<()> {
    if json {
        return print_json(node);
    }
    let now = Moment::now();
    let since = match node.since {
        Some(since) => format!(", since {since}, {}", duration(since.seconds_until(now))),
        None => String::new(),
    };
    let heard = match node.heard_ms_ago {
        Some(ms) => format!(", heard of {ms} ms ago"),
        None => String::new(),
    };
    let labels = [("host", &node.host), ("rack", &node.rack)];
    let labels = labels.iter().filter_map(|(name, label)| {
        let label = label.as_ref()?;
        Some(format!("{name}={label}"))
    });
    let labels: Vec<String> = labels.collect();
    print(|out| {
        writeln!(out, "name         {} (node {})", node.name, node.id)?;
        writeln!(out, "state        {}{since}{heard}", state(node.state))?;
        writeln!(out, "admin state  {}", progress(node))?;
        writeln!(out, "roles        {}", node.roles.join(", "))?;
        writeln!(out, "labels       {}", or_dash(labels.join(", ")))?;
        writeln!(out, "meta         {}", meta(node.meta))?;
        writeln!(out, "control      {}", or_dash(&node.control_address))?;
        writeln!(out, "data         {}", or_dash(&node.data_address))?;
        writeln!(out, "version      {}", or_dash(&node.version))?;
        writeln!(out, "joined       {}", node.joined_at)?;
        writeln!(out, "attachments  {}", node.attachments)?;
        writeln!(out, "groups       {} of {}", node.groups, node.groups_total)?;
        for device in &node.devices {
            let number = device.id.map(|id| format!("{id} ")).unwrap_or_default();
            let used = match device.used_bytes {
                Some(used) => format!("{} of ", Size(used)),
                None => String::new(),
            };
            writeln!(
                out,
                "device       {number}{}, {}, {used}{}",
                device.path,
                device.state.word(),
                Size(device.capacity_bytes)
            )?;
        }
        Ok(())
    })
}

/// The administrative state, and the progress of a drain.
fn progress(node: &ClusterNode) -> String {
    let word = admin_state(node.admin_state);
    match (node.groups_left, node.eta_s) {
        (None, _) => word.to_owned(),
        (Some(0), _) => format!("{word}, empty"),
        (Some(left), None) => format!("{word}, {left} placement groups left"),
        (Some(left), Some(eta_s)) => format!(
            "{word}, {left} placement groups left, about {}",
            duration(eta_s)
        ),
    }
}

fn state(state: NodeState) -> &'static str {
    match state {
        NodeState::Up => "up",
        NodeState::Down => "down",
        NodeState::NotStarted => "not started",
    }
}

fn admin_state(state: NodeAdminState) -> &'static str {
    match state {
        NodeAdminState::Active => "active",
        NodeAdminState::Absent => "absent",
        NodeAdminState::Draining => "draining",
    }
}

fn meta(part: MetaPart) -> &'static str {
    match part {
        MetaPart::Leader => "leader",
        MetaPart::Voter => "voter",
        MetaPart::Learner => "learner",
        MetaPart::None => "-",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn removal_says_what_is_asked_for() {
        let path = |accept_data_loss, evict| {
            let query = NodeRemoveQuery {
                accept_data_loss,
                evict,
            };
            removal_path("two", &query)
        };
        assert_eq!(
            path(true, false),
            "/v1/nodes/two?accept_data_loss=true&evict=false"
        );
        assert_eq!(
            path(false, true),
            "/v1/nodes/two?accept_data_loss=false&evict=true"
        );
    }
}
