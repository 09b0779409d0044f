//! Metadata that go on after a disaster.

use std::collections::BTreeSet;

use uuid::Uuid;

use super::*;
use crate::command::AttachmentSpec;
use crate::ids::{Generation, LayerId, VolumeId};
use crate::model::{DeviceEvidence, EventKind};
use crate::refusal::RecoveryRefusal;

const HISTORY: Uuid = Uuid::from_u128(77);

impl World {
    fn begin(&mut self, backup_at: Option<UnixMillis>) {
        self.begin_as(HISTORY, backup_at);
    }

    fn begin_as(&mut self, history: Uuid, backup_at: Option<UnixMillis>) {
        let begin = Command::BeginHistory {
            history,
            node: NodeId(1),
            backup_at,
            choose: backup_at.is_some(),
            groups: BTreeSet::new(),
            at: AT,
        };
        self.run(&begin).unwrap();
    }

    fn choose(&mut self, without_missing: bool) -> Reply {
        self.run(&Command::ChooseReplicas {
            without_missing,
            at: AT,
        })
    }

    /// A device says that it was in sync last at this epoch, and knows these leases.
    fn says(
        &mut self,
        device: u64,
        start: u64,
        id: GroupId,
        mark: u64,
        layers: &[(LayerId, u64)],
    ) -> Reply {
        let in_sync = match mark {
            0 => Vec::new(),
            mark => vec![(id, Epoch(mark))],
        };
        let layers = layers
            .iter()
            .map(|(layer, lease)| (*layer, Generation(*lease)));
        let evidence = DeviceEvidence {
            device: DeviceId(device),
            incarnation: Incarnation(start),
            epoch: Epoch(mark),
            in_sync,
            layers: layers.collect(),
        };
        let report = Command::ReportEvidence { evidence, at: AT };
        self.run(&report)
    }

    fn cluster(&self) -> crate::model::Cluster {
        tables::CLUSTER.get(&self.records, &()).unwrap().unwrap()
    }

    fn what_happened(&self) -> Vec<EventKind> {
        let events = tables::EVENTS.all(&self.records).unwrap();
        events.into_iter().map(|event| event.what).collect()
    }
}

fn recovery(reply: Reply) -> RecoveryRefusal {
    match reply {
        Err(Refusal::Recovery(refusal)) => refusal,
        other => panic!("{other:?}"),
    }
}

/// The backup of three nodes is restored, and all of them are back, each in a new start.
fn restored() -> (World, GroupId) {
    let (mut world, id) = three();
    world.begin(Some(AT));
    for node in 1..=3 {
        world.restart(node, node * 10);
    }
    (world, id)
}

#[test]
fn after_the_loss_of_a_majority_members_in_sync_stay_and_numbers_are_raised() {
    let (mut world, id) = three();
    let (epoch, before) = (world.cluster().epoch, world.states(id));
    let counters = tables::COUNTERS.get(&world.records, &()).unwrap().unwrap();
    world.begin(None);
    assert_eq!(world.states(id), before);
    let cluster = world.cluster();
    assert!(cluster.epoch.0 >= epoch.0 + (1 << 32));
    assert_eq!(
        cluster
            .recovery
            .as_ref()
            .map(|one| (one.history, one.chooses)),
        Some((HISTORY, false))
    );
    let raised = tables::COUNTERS.get(&world.records, &()).unwrap().unwrap();
    assert!(raised.volume > counters.volume && raised.node > counters.node);
    assert!(raised.device > counters.device && raised.pool > counters.pool);
    let nodes = tables::NODES.all(&world.records).unwrap();
    assert!(nodes.iter().all(|node| node.state == NodeState::Down));
    // The same entry again, as after a crash.
    world.begin(None);
    assert_eq!(world.cluster(), cluster);
    assert_eq!(
        recovery(world.choose(true)),
        RecoveryRefusal::NothingToChoose
    );
}

#[test]
fn tokens_and_leases_end_with_the_history_that_granted_them() {
    let (mut world, _) = three();
    let token = crate::pki::JoinToken::from_text("secret");
    let create = Command::CreateToken {
        token: token.hash(),
        roles: None,
        expires_at: UnixMillis(u64::MAX),
        at: AT,
    };
    world.run(&create).unwrap();
    let lease = world.grant("disk", 2, None).unwrap();
    world.begin(None);
    assert!(tables::TOKENS.all(&world.records).unwrap().is_empty());
    let now = tables::LEASES
        .get(&world.records, &lease.volume)
        .unwrap()
        .unwrap();
    assert_eq!(now.holder, None);
    assert!(
        now.generation.0 > lease.generation.0 + 1,
        "others may have been granted unseen"
    );
}

/// Device 2 was in sync last: 1 was taken out since the backup, and 3 before that.
#[test]
fn the_device_that_was_in_sync_last_counts_and_the_others_are_compared_with_it() {
    let (mut world, id) = restored();
    assert!(world.states(id).iter().all(|(_, state)| *state == Out));
    for node in 1..=3 {
        assert!(
            world.sync(id, node, node * 10).is_err(),
            "nobody to compare with"
        );
    }
    for (device, mark) in [(1, 41), (2, 43), (3, 9)] {
        world.says(device, device * 10, id, mark, &[]).unwrap();
    }
    world.choose(false).unwrap();
    assert_eq!(world.states(id), [(1, Out), (2, InSync), (3, Out)]);
    assert_eq!(
        world.on(id, 1).in_sync_until,
        Epoch(41),
        "should 2 be lost, too"
    );
    for node in [1, 3] {
        world.sync(id, node, node * 10).unwrap();
        world.promote(id, node).unwrap();
    }
    assert!(world.cluster().recovery.is_some_and(|one| !one.chooses));
    assert!(tables::EVIDENCE.all(&world.records).unwrap().is_empty());
    let told = EventKind::ReplicasChosen {
        groups: 1,
        orphans: 0,
        missing: 0,
    };
    assert!(
        world.what_happened().contains(&told),
        "{:?}",
        world.what_happened()
    );
}

/// The group moved to device 4 after the backup.
#[test]
fn a_device_that_the_backup_does_not_know_as_a_member_counts_if_it_was_in_sync_last() {
    let (mut world, id) = three();
    world.begin(Some(AT));
    world.node(4);
    let fourth = world.device(4).0;
    for node in 1..=4 {
        world.restart(node, node * 10);
    }
    let members = world.states(id);
    let is_member = |device: u64| members.iter().any(|(one, _)| *one == device);
    let devices = [(1, 10), (2, 20), (3, 30), (fourth, 40)];
    let (other, _) = *devices
        .iter()
        .find(|(device, _)| !is_member(*device))
        .unwrap();
    for (device, start) in devices {
        let mark = if device == other { 50 } else { 40 };
        world.says(device, start, id, mark, &[]).unwrap();
    }
    world.choose(false).unwrap();
    let on = world.on(id, other);
    assert!(on.is_in_sync() && on.leaving, "{on:?}");
    assert_eq!(world.group(id).in_sync().count(), 1);
}

#[test]
fn while_devices_are_missing_nothing_is_chosen_unless_an_operator_says_so() {
    let (mut world, id) = three();
    world.begin(Some(AT));
    for node in [1, 3] {
        world.restart(node, node * 10);
        world.says(node, node * 10, id, 40 + node, &[]).unwrap();
    }
    let refused = recovery(world.choose(false));
    assert!(
        refused.to_string().contains("device 2 is not back"),
        "{refused}"
    );
    // It is there, but nobody asked it yet; and then another start of it.
    world.restart(2, 20);
    assert!(matches!(
        recovery(world.choose(false)),
        RecoveryRefusal::DevicesMissing { .. }
    ));
    world.says(2, 20, id, 99, &[]).unwrap();
    world.restart(2, 21);
    assert!(matches!(
        recovery(world.choose(false)),
        RecoveryRefusal::DevicesMissing { .. }
    ));
    world.choose(true).unwrap();
    assert_eq!(world.states(id), [(1, Out), (2, Out), (3, InSync)]);
}

#[test]
fn a_device_that_tells_of_an_epoch_no_cluster_comes_to_is_refused() {
    let (mut world, id) = restored();
    let refused = recovery(world.says(1, 10, id, u64::MAX, &[]));
    assert!(
        matches!(refused, RecoveryRefusal::NoSuchEpoch { .. }),
        "{refused}"
    );
}

/// Devices know epochs of the history that a first restoration of the same backup began.
#[test]
fn a_backup_that_is_restored_again_is_newer_than_all_that_devices_know() {
    let (mut world, id) = restored();
    let before = world.cluster().epoch.0;
    for device in 1..=3 {
        let known = before + 1000 + device;
        world.says(device, device * 10, id, known, &[]).unwrap();
    }
    assert!(
        world.group(id).epoch.0 > before + 1003,
        "devices refuse older ones"
    );
    let refused = world.create("early", GIB);
    assert!(
        matches!(refused, Err(Refusal::Recovery(RecoveryRefusal::Choosing))),
        "a device that is not back may know its number"
    );
    world.choose(false).unwrap();
    assert_eq!(world.states(id), [(1, Out), (2, Out), (3, InSync)]);
    assert!(world.group(id).epoch.0 > before + 1003);
    // Without a choice to be made, what a device knows counts, too.
    let volume = tables::VOLUMES
        .get(&world.records, "disk")
        .unwrap()
        .unwrap();
    let later = world.cluster().epoch.0 + 50;
    world
        .says(1, 10, id, later, &[(volume.top_layer(), 1 << 18)])
        .unwrap();
    assert!(world.cluster().epoch.0 > later && world.group(id).epoch.0 > later);
    let lease = world.grant("disk", 1, None).unwrap();
    assert!(lease.generation > Generation(1 << 18));
}

/// A second disaster before the first one is over.
#[test]
fn what_was_to_be_chosen_is_still_to_be_chosen_after_another_recovery() {
    let (mut world, id) = restored();
    world.begin_as(Uuid::from_u128(78), None);
    let recovery = world.cluster().recovery.unwrap();
    assert!(recovery.chooses && recovery.backup_at == Some(AT));
    for node in 1..=3 {
        world.restart(node, node * 10 + 1);
        world.says(node, node * 10 + 1, id, 40 + node, &[]).unwrap();
    }
    world.choose(false).unwrap();
    assert_eq!(world.states(id), [(1, Out), (2, Out), (3, InSync)]);
}

/// Devices come back one by one: members of the backup must not lose their places to those that are there.
#[test]
fn nothing_is_placed_before_replicas_are_chosen() {
    let (mut world, id) = three();
    world.begin(Some(AT));
    world.node(4);
    world.device(4);
    let members = |world: &World| -> Vec<u64> {
        world
            .states(id)
            .into_iter()
            .map(|(device, _)| device)
            .collect()
    };
    assert_eq!(members(&world), [1, 2, 3]);
    for node in 1..=3 {
        world.restart(node, node * 10);
    }
    assert_eq!(members(&world), [1, 2, 3]);
}

/// Nobody had attached it when the last entry was made that is left; somebody may have since.
#[test]
fn a_volume_that_was_never_leased_gets_no_lease_that_may_have_been_granted() {
    let (mut world, _) = three();
    world.begin(None);
    assert!(world.grant("disk", 1, None).unwrap().generation.0 > 1 << 10);
}

/// What the first recovery left unknown stays so after the second.
#[test]
fn unknown_volumes_of_an_earlier_recovery_are_kept_too() {
    let (mut world, id) = three();
    let first = VolumeId(
        tables::COUNTERS
            .get(&world.records, &())
            .unwrap()
            .unwrap()
            .volume,
    );
    world.begin(None);
    let known = world.create("known", GIB).unwrap();
    world.begin_as(Uuid::from_u128(78), None);
    let recovery = world.cluster().recovery.unwrap();
    assert!(recovery.keeps(crate::ids::layer_of(id.pool, first, 1)));
    assert!(
        !recovery.keeps(known.top_layer()),
        "it is dropped when it is deleted"
    );
}

#[test]
fn a_group_of_which_nobody_was_in_sync_goes_on_and_that_is_told() {
    let (mut world, id) = restored();
    for device in 1..=3 {
        world.says(device, device * 10, id, 0, &[]).unwrap();
    }
    world.choose(false).unwrap();
    assert_eq!(world.group(id).in_sync().count(), 1);
    let told = EventKind::ReplicasChosen {
        groups: 1,
        orphans: 1,
        missing: 0,
    };
    assert!(world.what_happened().contains(&told));
}

#[test]
fn no_lease_and_no_volume_gets_a_number_that_devices_know() {
    let (mut world, id) = restored();
    let volume = tables::VOLUMES
        .get(&world.records, "disk")
        .unwrap()
        .unwrap();
    let made_since = VolumeId(1 << 21);
    let unknown = crate::ids::layer_of(id.pool, made_since, 1);
    world
        .says(
            1,
            10,
            id,
            40,
            &[(volume.top_layer(), 1 << 17), (unknown, 2)],
        )
        .unwrap();
    for device in 2..=3 {
        world.says(device, device * 10, id, 40, &[]).unwrap();
    }
    world.choose(false).unwrap();
    let lease = world.grant("disk", 1, None).unwrap();
    assert!(lease.generation > Generation(1 << 17));
    let new = world.create("more", GIB).unwrap();
    assert!(new.id > made_since);
    let keeps = |world: &World, layer| world.cluster().recovery.unwrap().keeps(layer);
    assert!(keeps(&world, unknown), "its data are not dropped");
    assert!(!keeps(&world, volume.top_layer()) && !keeps(&world, new.top_layer()));
    world.run(&Command::ForgetUnknown { at: AT }).unwrap();
    assert!(!keeps(&world, unknown));
}

/// Groups of a node without peers may have moved between its devices since the backup.
#[test]
fn a_node_without_peers_chooses_replicas_after_a_restore() {
    let mut world = World::ready();
    world.create("disk", GIB).unwrap();
    let attach = AttachmentSpec {
        volume: "disk".to_owned(),
        node: NodeId(1),
        socket: "/run/disk".to_owned(),
        queues: 1,
        read_only: false,
        options: AttachmentOptions::default(),
    };
    let attach = Command::CreateAttachment {
        attachment: attach,
        at: AT,
    };
    world.run(&attach).unwrap();
    world.begin(Some(AT));
    assert!(world.cluster().recovery.is_some_and(|one| one.chooses));
    let waiting = tables::PLACEMENT_GROUPS.all(&world.records).unwrap();
    assert!(waiting.iter().all(|group| group.in_sync().count() == 0));
}
