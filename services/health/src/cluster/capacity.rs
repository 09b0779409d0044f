//! Pools that cannot hold what they promise, before there is a volume whose placement groups would tell.

use meta::{AdminState, DEFAULT_POOL, FailureDomain, Node, NodeState, Pool};
use service::code::Code;
use service::found::Found;
use service::view::View;

/// Pools without volumes that have no place for all replicas.
pub(super) fn lacking(view: &View) -> Vec<Found> {
    let in_use = view.pools_in_use();
    let leaving = leaving(view);
    let lacks = |pool: &&Pool| room(view, pool) + leaving < usize::from(pool.replicas);
    // It cannot be deleted: who has another pool that does may leave it alone.
    let has_other = view
        .map
        .pools()
        .any(|pool| pool.name.as_str() != DEFAULT_POOL && !lacks(&pool));
    let may_lack = |pool: &&Pool| has_other && pool.name.as_str() == DEFAULT_POOL;
    let unused = view.map.pools().filter(|pool| !in_use.contains(&pool.id));
    let lacking = unused.filter(lacks).filter(|pool| !may_lack(pool));
    lacking.map(|pool| tell(view, pool)).collect()
}

/// What is being emptied because somebody wants so, who knows what is there without it; that it goes on is
/// told elsewhere.
fn leaving(view: &View) -> usize {
    let nodes = view
        .map
        .nodes()
        .filter(|node| node.admin_state == AdminState::Draining);
    let devices = view.map.devices().filter(|device| device.draining);
    nodes.count() + devices.count()
}

/// Replicas that each placement group has a place for: what meta asks before it makes a volume.
fn room(view: &View, pool: &Pool) -> usize {
    let groups = view.map.groups().filter(|group| group.pool == pool.id);
    let wanted = groups.map(|group| group.wanted().count());
    wanted.min().unwrap_or(0)
}

fn tell(view: &View, pool: &Pool) -> Found {
    let (name, replicas, least) = (&pool.name, pool.replicas, pool.min_in_sync);
    let room = room(view, pool);
    let effect = match room < usize::from(least) {
        true => "no volume can be made",
        false => "a volume made now would lack replicas",
    };
    let class = match &pool.device_class {
        Some(class) => format!(" of class {class}"),
        None => String::new(),
    };
    let apart = match pool.failure_domain {
        FailureDomain::Device => format!("different devices{class}"),
        domain => format!("devices{class} of different {domain}s"),
    };
    let mut what = format!(
        "pool {name}: {effect}: it needs {replicas} replicas on {apart}, {least} at least, and only {room} \
         can be placed"
    );
    let bare = bare(view, pool);
    if !bare.is_empty() {
        what.push_str(&format!("; no suitable device on node {}", bare.join(", ")));
    }
    let more = match pool.failure_domain {
        FailureDomain::Device => "add devices with `penstock device add`",
        FailureDomain::Node | FailureDomain::Host | FailureDomain::Rack => {
            "let further nodes in with `penstock token create --roles meta,storage,host` and `penstock join`"
        }
    };
    let fewer = match room {
        0 => String::new(),
        _ => format!(
            ", or make a pool with fewer replicas: `penstock pool create NAME --replicas {room}`"
        ),
    };
    Found::new(Code::PoolLacking, pool.id, what, format!("{more}{fewer}"))
}

/// Nodes that are there to hold data and have no device that the pool may use.
fn bare(view: &View, pool: &Pool) -> Vec<String> {
    let has_device = |node: &Node| view.usable(pool).any(|device| device.node == node.id);
    let nodes = view.map.nodes();
    let up = nodes.filter(|node| node.state == NodeState::Up && node.keeps_data());
    up.filter(|node| !has_device(node))
        .map(|node| node.name.to_string())
        .collect()
}
