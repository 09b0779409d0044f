//! Where requests go that concern a node's devices rather than a group: a flush, and the fence of a lease.

use std::sync::atomic::Ordering;

use fabric_types::{Command, Request};

use super::{Groups, ReplicaState};
use crate::replica::store_op::ROUND;

/// Devices of a node that are told apart, a bit for each.
pub const FAN_OUT_DEVICES_MAX: u32 = u64::BITS;

impl Groups {
    /// The next of the node's `devices` that a flush or a fence goes to, after the one of this index, one
    /// after another.
    ///
    /// Those on which no group is sent writes are left out: what they hold counts for nobody, and one that
    /// has failed, or was pulled out, must not fail its neighbours. A round of comparison promises something
    /// of its own group only.
    pub fn next_stop(&self, request: &Request, after: Option<u32>, devices: u32) -> Option<u32> {
        let first = after.map_or(0, |device| device + 1);
        if devices <= 1 {
            return (first < devices).then_some(0);
        }
        if request.generation == ROUND {
            let home = self.get(request.pg)?.device();
            return after.is_none().then_some(home);
        }
        // The fence of a map that is not known here yet: a device may be sent writes under it.
        let is_ahead =
            matches!(request.command, Command::Fence { .. }) && request.epoch > self.known();
        let receiving = match is_ahead {
            true => u64::MAX,
            false => self.receiving.load(Ordering::Acquire),
        };
        let mut in_turn = first..devices.min(FAN_OUT_DEVICES_MAX);
        in_turn.find(|device| receiving >> device & 1 != 0)
    }

    /// Whether a flush that has failed on this one of the node's `devices` fails for the node. Not if all
    /// replicas there have yet to be compared, and none is of the group that is asked: where a flush has
    /// failed all later ones fail until the node starts anew, so that those are not promoted, and what lies
    /// on healthy devices shall not be taken out whenever they are tried again.
    #[cold]
    pub fn fails_flush(&self, request: &Request, device: u32, devices: u32) -> bool {
        if devices <= 1 || self.get(request.pg).is_none() {
            return true;
        }
        let groups = self.groups.read().expect("no panic under this lock");
        let mut there = groups.iter().filter(|(_, group)| group.device() == device);
        there.any(|(pg, group)| {
            let may_count = match group.state() {
                ReplicaState::InSync => true,
                ReplicaState::Syncing => group.is_all_compared(),
                ReplicaState::Out => false,
            };
            may_count || *pg == request.pg
        })
    }

    /// Takes up on which devices groups are sent writes.
    pub(super) fn note_receiving(&self) {
        let groups = self.groups.read().expect("no panic under this lock");
        let receiving = groups.values().filter(|group| {
            let is_out = group.state() == ReplicaState::Out;
            !is_out && group.device() < FAN_OUT_DEVICES_MAX
        });
        let devices = receiving.fold(0, |all, group| all | 1 << group.device());
        self.receiving.store(devices, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fabric_types::ids::LayerId;
    use fabric_types::iov::IoVecs;
    use fabric_types::{Epoch, Generation, PgId};

    const LAYER: LayerId = LayerId(1);

    fn fence() -> Command {
        let buffers = IoVecs {
            ptr: std::ptr::null(),
            len: 0,
        };
        Command::Fence {
            layer: LAYER,
            buffers,
            len: 0,
        }
    }

    fn stops(groups: &Groups, request: &Request, devices: u32) -> Vec<u32> {
        let next = |after: &u32| groups.next_stop(request, Some(*after), devices);
        std::iter::successors(groups.next_stop(request, None, devices), next).collect()
    }

    fn asks(command: Command, generation: Generation, epoch: u64) -> Request {
        Request {
            pg: PgId(2),
            epoch: Epoch(epoch),
            generation,
            command,
            ..Request::NOTHING
        }
    }

    /// Of four devices the second holds one group that is in sync and one that is out, the third one that is
    /// out, and the fourth one that is syncing.
    fn node() -> Groups {
        let groups = Groups::default();
        let on = [
            (1, 1, ReplicaState::InSync),
            (2, 1, ReplicaState::Out),
            (3, 2, ReplicaState::Out),
            (4, 3, ReplicaState::Syncing),
        ];
        for (pg, device, state) in on {
            groups.place(PgId(pg), device, 4, Epoch(4));
            groups.set(PgId(pg), state, Epoch(4));
        }
        groups.applied(Epoch(6));
        groups
    }

    #[test]
    fn a_device_on_which_nothing_is_written_is_left_out() {
        let groups = node();
        let flush = Command::Flush { layer: LAYER };
        let fence = fence();
        for command in [flush, fence] {
            let request = asks(command, Generation(1), 6);
            assert_eq!(stops(&groups, &request, 4), [1, 3]);
        }
        groups.set(PgId(1), ReplicaState::Out, Epoch(7));
        groups.set(PgId(3), ReplicaState::Syncing, Epoch(7));
        groups.applied(Epoch(7));
        let request = asks(flush, Generation(1), 6);
        assert_eq!(stops(&groups, &request, 4), [2, 3]);
    }

    #[test]
    fn a_fence_of_a_newer_map_goes_to_all_devices() {
        let groups = node();
        let fence = asks(fence(), Generation(1), 7);
        assert_eq!(stops(&groups, &fence, 4), [0, 1, 2, 3]);
    }

    #[test]
    fn what_a_round_flushes_is_its_own_device() {
        let groups = node();
        let flush = asks(Command::Flush { layer: LAYER }, ROUND, 6);
        assert_eq!(stops(&groups, &flush, 4), [1]);
        groups.forget(PgId(2));
        assert_eq!(stops(&groups, &flush, 4), []);
    }

    #[test]
    fn flush_failure_where_nothing_is_in_sync_fails_no_other_group() {
        let groups = node();
        let flush = |pg| Request {
            pg: PgId(pg),
            ..asks(Command::Flush { layer: LAYER }, Generation(1), 6)
        };
        let fails = |pg, device| groups.fails_flush(&flush(pg), device, 4);
        assert!(fails(1, 1), "its own group's device");
        assert!(fails(4, 1), "one is in sync there");
        assert!(!fails(1, 3), "one is syncing there");
        assert!(fails(4, 3), "the syncing one is asked");
        assert!(fails(9, 3), "a group that is gone");
        groups.get(PgId(4)).unwrap().all_compared();
        assert!(fails(1, 3), "it may be promoted any moment");
        assert!(groups.fails_flush(&flush(1), 3, 1), "the only device");
    }

    #[test]
    fn a_nodes_only_device_is_asked_whatever_it_holds() {
        let groups = Groups::default();
        let flush = asks(Command::Flush { layer: LAYER }, Generation(1), 6);
        assert_eq!(stops(&groups, &flush, 1), [0]);
        assert_eq!(stops(&groups, &flush, 0), []);
        assert_eq!(stops(&groups, &flush, 2), []);
    }
}
