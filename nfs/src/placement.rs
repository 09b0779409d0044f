//! Which NFS node takes an export over. Pure, and the same on every NFS node, so that only one asks for it.

/// A node that could serve exports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NfsNode {
    /// Its number.
    pub id: u64,
    /// It has the role.
    pub has_role: bool,
    /// It is heard of.
    pub is_up: bool,
    /// An operator wants it empty.
    pub is_draining: bool,
}

impl NfsNode {
    fn can_serve(&self) -> bool {
        self.has_role && self.is_up && !self.is_draining
    }
}

/// The NFS node that is to take an export over from `current`; none if that can go on, or nobody else can.
///
/// All exports of one NFS node go to the same other one: the next by number, and after the last the first. A
/// client that mounts several exports of an NFS node talks to it over one connection, and finds them together
/// again.
#[must_use]
pub fn successor(nodes: &[NfsNode], current: u64) -> Option<u64> {
    let holder = nodes.iter().find(|node| node.id == current);
    if holder.is_some_and(NfsNode::can_serve) {
        return None;
    }
    let able = nodes.iter().filter(|node| node.can_serve());
    let mut able: Vec<u64> = able.map(|node| node.id).collect();
    able.sort_unstable();
    let later = able.iter().find(|id| **id > current);
    later.or(able.first()).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nodes(up: &[(u64, bool)]) -> Vec<NfsNode> {
        let node = |(id, is_up): &(u64, bool)| NfsNode {
            id: *id,
            has_role: true,
            is_up: *is_up,
            is_draining: false,
        };
        up.iter().map(node).collect()
    }

    #[test]
    fn who_serves_goes_on() {
        assert_eq!(successor(&nodes(&[(1, true), (2, true)]), 1), None);
    }

    #[test]
    fn the_next_by_number_takes_over_and_after_the_last_the_first() {
        let all = nodes(&[(3, true), (1, false), (2, true)]);
        assert_eq!(successor(&all, 1), Some(2));
        let all = nodes(&[(3, false), (1, true), (2, true)]);
        assert_eq!(successor(&all, 3), Some(1));
    }

    #[test]
    fn a_node_that_drains_or_lacks_the_role_hands_over_and_takes_nothing() {
        let mut all = nodes(&[(1, true), (2, true), (3, true)]);
        all[0].is_draining = true;
        all[1].has_role = false;
        assert_eq!(successor(&all, 1), Some(3));
        all[2].is_draining = true;
        assert_eq!(successor(&all, 1), None);
    }

    #[test]
    fn an_export_of_a_removed_node_is_taken_over() {
        assert_eq!(successor(&nodes(&[(1, true)]), 9), Some(1));
        assert_eq!(successor(&[], 9), None);
    }
}
