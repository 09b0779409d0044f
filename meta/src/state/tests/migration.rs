//! Attachments that move between nodes.

use super::*;
use crate::model::Incoming;

/// Two nodes, and a volume that a guest of node 1 uses.
fn world() -> (World, Attachment) {
    let mut world = World::ready();
    world.node(2);
    world.node(3);
    world.create("disk", GIB).unwrap();
    let source = world.attach(attachment("disk", "/run/a.sock")).unwrap();
    world.grant("disk", 1, None).unwrap();
    (world, source)
}

fn incoming(node: u64) -> AttachmentSpec {
    let options = AttachmentOptions {
        incoming: Some(Incoming::Guest),
        ..AttachmentOptions::default()
    };
    AttachmentSpec {
        node: NodeId(node),
        options,
        ..attachment("disk", "/run/b.sock")
    }
}

fn take_over(world: &mut World, id: AttachmentId, expired: Option<u64>) -> Result<Lease, Refusal> {
    lease_of(world.run(&Command::TakeOverAttachment {
        attachment: id,
        expired: expired.map(Generation),
        at: AT,
    }))
}

fn attachments(world: &World) -> Vec<Attachment> {
    tables::ATTACHMENTS.all(&world.records).unwrap()
}

#[test]
fn incoming_attachment_takes_over_when_the_lease_is_free() {
    let (mut world, source) = world();
    world
        .run(&Command::SetWriteThrough {
            attachment: source.id,
            on: true,
        })
        .unwrap();
    let target = world.attach(incoming(2)).unwrap();
    let held = take_over(&mut world, target.id, None);
    assert!(
        matches!(held, Err(Refusal::Lease(LeaseRefusal::Held { .. }))),
        "{held:?}"
    );
    assert_eq!(attachments(&world).len(), 2, "nothing has changed");

    let AttachmentTarget::Volume { id: volume, .. } = source.target;
    world.release(volume, 1, 1).unwrap();
    let lease = take_over(&mut world, target.id, None).unwrap();
    assert_eq!(
        (lease.holder, lease.generation),
        (Some(NodeId(2)), Generation(2))
    );
    let left = attachments(&world);
    let [left] = left.as_slice() else {
        panic!("{left:?}");
    };
    assert_eq!((left.id, left.options.incoming), (target.id, None));
    assert!(left.options.write_through, "the guest's choice comes along");
    let again = take_over(&mut world, target.id, None);
    let (id, not_incoming) = (target.id, |id| AttachmentRefusal::NotIncoming { id }.into());
    assert_eq!(again, Err(not_incoming(id)));
}

#[test]
fn lease_of_a_dead_source_is_taken_once_it_has_run_out() {
    let (mut world, _) = world();
    let target = world.attach(incoming(2)).unwrap();
    assert!(
        take_over(&mut world, target.id, Some(7)).is_err(),
        "another lease"
    );
    assert_eq!(
        take_over(&mut world, target.id, Some(1)).unwrap().holder,
        Some(NodeId(2))
    );
}

#[test]
fn choice_of_the_guest_outlives_a_source_that_is_detached_first() {
    let (mut world, source) = world();
    let (attachment, on) = (source.id, true);
    world
        .run(&Command::SetWriteThrough { attachment, on })
        .unwrap();
    let target = world.attach(incoming(2)).unwrap();
    world
        .run(&Command::DeleteAttachment {
            attachment: AttachmentKey::Id(source.id),
        })
        .unwrap();
    take_over(&mut world, target.id, Some(1)).unwrap();
    let left = attachments(&world);
    assert!(
        left[0].options.write_through,
        "it would lose what is not flushed"
    );
}

#[test]
fn incoming_attachment_needs_one_source_on_another_node() {
    let mut world = world().0;
    let same = world.attach(incoming(1));
    assert!(matches!(
        same,
        Err(Refusal::Attachment(AttachmentRefusal::SameNode { .. }))
    ));
    world.attach(incoming(2)).unwrap();
    let second = world.attach(incoming(3));
    assert!(matches!(
        second,
        Err(Refusal::Attachment(AttachmentRefusal::OtherIncoming { .. }))
    ));
    world.create("idle", GIB).unwrap();
    let nothing = AttachmentSpec {
        volume: "idle".to_owned(),
        ..incoming(3)
    };
    assert!(matches!(
        world.attach(nothing),
        Err(Refusal::Attachment(
            AttachmentRefusal::NothingIncoming { .. }
        ))
    ));
}

#[test]
fn shared_volume_does_not_move_and_a_moving_one_is_not_shared() {
    let mut world = World::ready();
    world.node(2);
    world.create("disk", GIB).unwrap();
    let reader = |socket: &str| AttachmentSpec {
        read_only: true,
        ..attachment("disk", socket)
    };
    world.attach(reader("/r1")).unwrap();
    let second = world.attach(reader("/r2")).unwrap();
    assert!(matches!(
        world.attach(incoming(2)),
        Err(Refusal::Attachment(AttachmentRefusal::SharedSource { .. }))
    ));
    world
        .run(&Command::DeleteAttachment {
            attachment: AttachmentKey::Id(second.id),
        })
        .unwrap();
    let target = AttachmentSpec {
        read_only: true,
        ..incoming(2)
    };
    world.attach(target).unwrap();
    assert!(matches!(
        world.attach(reader("/r2")),
        Err(Refusal::Attachment(AttachmentRefusal::VolumeInUse { .. }))
    ));
}

#[test]
fn moved_attachment_keeps_its_options() {
    let (mut world, source) = world();
    let moved = world.run(&Command::MoveAttachment {
        attachment: source.id,
        to: NodeId(2),
        socket: "/run/b.sock".to_owned(),
        at: AT,
    });
    let Ok(Outcome::Attachment(target)) = moved else {
        panic!("{moved:?}");
    };
    assert_eq!((target.node, target.queues), (NodeId(2), source.queues));
    assert_eq!(target.options.incoming, Some(Incoming::Move));
}

#[test]
fn attachments_stay_where_they_are_below_the_level() {
    let (mut world, source) = world();
    world.set_level(Level::ROLES);
    let early = Err(AttachmentRefusal::LevelTooLow.into());
    assert_eq!(world.attach(incoming(2)), early);
    let moved = world.run(&Command::MoveAttachment {
        attachment: source.id,
        to: NodeId(2),
        socket: "/run/b.sock".to_owned(),
        at: AT,
    });
    assert!(moved.is_err());
}
