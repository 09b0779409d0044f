//! Path of one request to the leader of a group.

use crate::ids::NodeId;

/// Redirects that a request follows, from the first node that it asks.
#[derive(Debug)]
pub(crate) struct Redirects {
    first: NodeId,
    followed: Vec<NodeId>,
    /// Number of redirects to follow. Further ones are ignored: a node that is named may name another.
    max: usize,
}

impl Redirects {
    pub(crate) fn from(first: NodeId, max: usize) -> Self {
        Self {
            first,
            followed: Vec::new(),
            max,
        }
    }

    /// Returns the node that was named, unless the request has asked it or has followed too many redirects.
    pub(crate) fn follow(&mut self, named: Option<NodeId>) -> Option<NodeId> {
        let is_new = |node: &NodeId| *node != self.first && !self.followed.contains(node);
        let next = named.filter(is_new);
        let next = next.filter(|_| self.followed.len() < self.max)?;
        self.followed.push(next);
        Some(next)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_follows_redirects_and_asks_no_node_twice() {
        let (first, a, b) = (NodeId(1), NodeId(2), NodeId(3));
        let mut redirects = Redirects::from(first, 4);
        assert_eq!(redirects.follow(None), None);
        assert_eq!(redirects.follow(Some(first)), None);
        assert_eq!(redirects.follow(Some(a)), Some(a));
        assert_eq!(redirects.follow(Some(b)), Some(b));
        assert_eq!(redirects.follow(Some(a)), None);
        for node in 4..=5 {
            assert_eq!(redirects.follow(Some(NodeId(node))), Some(NodeId(node)));
        }
        assert_eq!(redirects.follow(Some(NodeId(6))), None, "bounded");
    }
}
