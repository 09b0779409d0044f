//! What one user may hold of a table that many share.
//!
//! A user may hold as much as is left for all others: a dynamic threshold (Choudhury, Hahne, "Dynamic Queue
//! Length Thresholds for Shared-Memory Packet Switches", 1998, with alpha = 1). One that is alone gets half
//! of the table. `n` that want everything get a share of 1/(n+1) each, and that much stays free for whoever
//! comes next. No user has to be known beforehand, and nothing is set aside for those that are idle.

/// Whether a user that holds `held` places may take `more`, of `free` ones. Who holds none may take whatever
/// is free, so that a request which needs many comes to its turn beside many users.
#[inline]
pub fn may_take(held: usize, more: usize, free: usize) -> bool {
    more <= free && (held == 0 || held + more <= free)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every user takes one place at a time in turn, as long as it may.
    fn fill(places: usize, users: usize) -> Vec<usize> {
        let mut held = vec![0; users];
        loop {
            let mut taken = 0;
            for user in 0..users {
                let free = places - held.iter().sum::<usize>();
                if may_take(held[user], 1, free) {
                    held[user] += 1;
                    taken += 1;
                }
            }
            if taken == 0 {
                return held;
            }
        }
    }

    #[test]
    fn greedy_users_share_evenly_and_leave_room_for_one_more() {
        for users in [1, 2, 3, 16, 100] {
            let held = fill(4096, users);
            let share = 4096 / (users + 1);
            assert!(held.iter().all(|&h| h.abs_diff(share) <= 1), "{held:?}");
            let free = 4096 - held.iter().sum::<usize>();
            assert!(free + 1 >= share, "{free} of {share} are free");
        }
    }

    #[test]
    fn nobody_takes_more_than_is_free() {
        assert!(may_take(0, 5, 5));
        assert!(!may_take(0, 6, 5));
        assert!(may_take(2, 3, 5));
        assert!(!may_take(3, 3, 5));
    }
}
