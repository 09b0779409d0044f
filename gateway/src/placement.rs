//! Which gateway takes an export over. Pure, and the same on every gateway, so that only one asks for it.

/// A node that could serve exports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Gateway {
    /// Its number.
    pub id: u64,
    /// It has the role.
    pub has_role: bool,
    /// It is heard of.
    pub is_up: bool,
    /// An operator wants it empty.
    pub is_draining: bool,
}

impl Gateway {
    fn can_serve(&self) -> bool {
        self.has_role && self.is_up && !self.is_draining
    }
}

/// The gateway that is to take an export over from `current`; none if that can go on, or nobody else can.
///
/// All exports of one gateway go to the same other one: the next by number, and after the last the first. A
/// client that mounts several exports of a gateway talks to it over one connection, and finds them together
/// again.
#[must_use]
pub fn successor(gateways: &[Gateway], current: u64) -> Option<u64> {
    let holder = gateways.iter().find(|gateway| gateway.id == current);
    if holder.is_some_and(Gateway::can_serve) {
        return None;
    }
    let able = gateways.iter().filter(|gateway| gateway.can_serve());
    let mut able: Vec<u64> = able.map(|gateway| gateway.id).collect();
    able.sort_unstable();
    let later = able.iter().find(|id| **id > current);
    later.or(able.first()).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gateways(up: &[(u64, bool)]) -> Vec<Gateway> {
        let gateway = |(id, is_up): &(u64, bool)| Gateway {
            id: *id,
            has_role: true,
            is_up: *is_up,
            is_draining: false,
        };
        up.iter().map(gateway).collect()
    }

    #[test]
    fn who_serves_goes_on() {
        assert_eq!(successor(&gateways(&[(1, true), (2, true)]), 1), None);
    }

    #[test]
    fn the_next_by_number_takes_over_and_after_the_last_the_first() {
        let all = gateways(&[(3, true), (1, false), (2, true)]);
        assert_eq!(successor(&all, 1), Some(2));
        let all = gateways(&[(3, false), (1, true), (2, true)]);
        assert_eq!(successor(&all, 3), Some(1));
    }

    #[test]
    fn a_node_that_drains_or_lacks_the_role_hands_over_and_takes_nothing() {
        let mut all = gateways(&[(1, true), (2, true), (3, true)]);
        all[0].is_draining = true;
        all[1].has_role = false;
        assert_eq!(successor(&all, 1), Some(3));
        all[2].is_draining = true;
        assert_eq!(successor(&all, 1), None);
    }

    #[test]
    fn an_export_of_a_removed_node_is_taken_over() {
        assert_eq!(successor(&gateways(&[(1, true)]), 9), Some(1));
        assert_eq!(successor(&[], 9), None);
    }
}
