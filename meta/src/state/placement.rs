//! Which devices hold which placement group.
//!
//! **Preference** comes from weighted rendezvous hashing ([`score`]), the weight being the device's size.
//! Hashing alone spreads groups like thrown dice: a device that should hold n groups holds n ± √n, so 5 %
//! would need thousands of groups for each device. **Bounds** correct that: no device takes more than its
//! share rounded up while another lacks one (in the manner of Mirrokni, Thorup and Zadimoghaddam, "Consistent
//! Hashing with Bounded Loads", 2016), so that [`GROUPS_PER_DEVICE`] are enough. **Staying put** makes
//! movement minimal: the present placement, which the records hold, is kept wherever it fits, so a device
//! that comes takes its share and nothing else moves, and of one that goes only what it held.
//!
//! The share of a device is its part of the capacity, except that a failure domain holds at most one replica
//! of a group: what a domain that is too large for that cannot hold is shared by the others.

mod arrange;
mod score;

use std::collections::{BTreeMap, BTreeSet};

use crate::ids::{DeviceId, NodeId};
use crate::model::{Device, DeviceState, FailureDomain, Node, NodeState, Pool};

pub(crate) use arrange::arrange;

/// A device of average size should hold this many replicas of groups. Its share is then rounded by at most
/// 2.5 %, and that of a device half as large by 5 %.
pub(crate) const GROUPS_PER_DEVICE: u32 = 40;

/// How many groups a pool gets that does not say: enough for [`GROUPS_PER_DEVICE`] on each of its devices,
/// and with `least` room to grow, as the number stays for ever.
pub(crate) fn groups_for(devices: usize, replicas: u8, least: u32, most: u32) -> u32 {
    let devices = u32::try_from(devices).unwrap_or(u32::MAX);
    let needed = devices.saturating_mul(GROUPS_PER_DEVICE) / u32::from(replicas.max(1));
    needed
        .checked_next_power_of_two()
        .unwrap_or(most)
        .clamp(least.min(most), most)
}

/// A device that may hold groups of a pool.
#[derive(Debug, Clone)]
pub(crate) struct Candidate {
    id: DeviceId,
    /// Two replicas of a group never share this.
    domain: usize,
    weight: u64,
    /// Whether it may get groups that it does not hold. One that may not keeps those it has.
    joins: bool,
    drawer: score::DeviceScore,
}

/// The devices that may hold groups of the pool.
pub(crate) fn candidates(
    pool: &Pool,
    devices: &[Device],
    nodes: &BTreeMap<NodeId, Node>,
) -> Vec<Candidate> {
    let mut domains = BTreeMap::new();
    let mut found = Vec::new();
    for device in devices.iter().filter(|device| fits(pool, device)) {
        let Some(node) = nodes.get(&device.node).filter(|node| node.keeps_data()) else {
            continue;
        };
        let next = domains.len();
        let domain = *domains
            .entry(domain(pool.failure_domain, device, node))
            .or_insert(next);
        found.push(Candidate {
            id: device.id,
            domain,
            weight: score::weight(device.size_bytes),
            joins: device.state == DeviceState::Online && node.state == NodeState::Up,
            drawer: score::DeviceScore::new(device.id, device.size_bytes),
        });
    }
    found
}

/// How many replicas of a group the candidates could hold, apart as they should be.
pub(crate) fn domains(candidates: &[Candidate]) -> usize {
    let domains: BTreeSet<usize> = candidates.iter().map(|one| one.domain).collect();
    domains.len()
}

fn fits(pool: &Pool, device: &Device) -> bool {
    device.state != DeviceState::Failed
        && !device.draining
        && pool
            .device_class
            .as_ref()
            .is_none_or(|class| *class == device.class)
}

/// What a replica must not share with another.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum Domain {
    Device(DeviceId),
    Node(NodeId),
    Host(String),
    Rack(Option<String>),
}

/// A node without a host label is a host of its own, as nodes mostly are. Nodes without a rack label count as
/// one rack, because nobody said that they are apart.
fn domain(kind: FailureDomain, device: &Device, node: &Node) -> Domain {
    match kind {
        FailureDomain::Device => Domain::Device(device.id),
        FailureDomain::Node => Domain::Node(node.id),
        FailureDomain::Host => match &node.labels.host {
            Some(host) => Domain::Host(host.clone()),
            None => Domain::Node(node.id),
        },
        FailureDomain::Rack => Domain::Rack(node.labels.rack.clone()),
    }
}

#[cfg(test)]
mod tests;
