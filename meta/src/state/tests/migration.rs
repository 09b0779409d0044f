//! Attachments that move between nodes.

use std::time::Duration;

use super::*;
use crate::model::{
    EventKind, INCOMING_TIME_MAX, Incoming, OFFER_TIME_DEFAULT, OFFER_TIME_MAX, Offer, Role,
};

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

/// A volume that node 1 serves and has offered to node 2.
fn offered() -> (World, Attachment) {
    let (mut world, source) = world();
    offer(&mut world, source.id, 2).unwrap();
    (world, source)
}

fn offer(world: &mut World, id: AttachmentId, to: u64) -> Reply {
    offer_at(world, id, to, AT)
}

fn offer_at(world: &mut World, attachment: AttachmentId, to: u64, at: UnixMillis) -> Reply {
    world.run(&Command::OfferAttachment {
        attachment,
        to: NodeId(to),
        lifetime_s: OFFER_TIME_DEFAULT.as_secs(),
        at,
    })
}

/// Begins to move an attachment to node 2, without its guest.
fn moved(world: &mut World, attachment: AttachmentId) -> Result<Attachment, Refusal> {
    let outcome = world.run(&Command::MoveAttachment {
        attachment,
        to: NodeId(2),
        socket: "/run/b.sock".to_owned(),
        at: AT,
    })?;
    match outcome {
        Outcome::Attachment(target) => Ok(target),
        other => panic!("{other:?}"),
    }
}

fn withdraw(world: &mut World, attachment: AttachmentId) -> Reply {
    world.run(&Command::WithdrawOffer { attachment })
}

/// Time after the start of the test.
fn later(time: Duration) -> UnixMillis {
    UnixMillis(AT.0 + u64::try_from(time.as_millis()).unwrap())
}

fn attach_at(world: &mut World, spec: AttachmentSpec, at: UnixMillis) -> Reply {
    world.run(&Command::CreateAttachment {
        attachment: spec,
        at,
    })
}

fn take_over(world: &mut World, id: AttachmentId, expired: Option<u64>) -> Result<Lease, Refusal> {
    take_over_at(world, id, expired, AT)
}

fn take_over_at(
    world: &mut World,
    attachment: AttachmentId,
    expired: Option<u64>,
    at: UnixMillis,
) -> Result<Lease, Refusal> {
    lease_of(world.run(&Command::TakeOverAttachment {
        attachment,
        expired: expired.map(Generation),
        at,
    }))
}

fn attachments(world: &World) -> Vec<Attachment> {
    tables::ATTACHMENTS.all(&world.records).unwrap()
}

#[test]
fn incoming_attachment_takes_over_when_the_lease_is_free() {
    let (mut world, source) = offered();
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
    assert_eq!(
        again.unwrap_err().to_string(),
        format!("attachment {} is not incoming", target.id)
    );
}

#[test]
fn lease_of_a_dead_source_is_taken_once_it_has_run_out() {
    let (mut world, _) = offered();
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
    let (mut world, source) = offered();
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
    let mut world = offered().0;
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
    let first = world.attach(reader("/r1")).unwrap();
    let second = world.attach(reader("/r2")).unwrap();
    assert!(matches!(
        world.attach(incoming(2)),
        Err(Refusal::Attachment(AttachmentRefusal::SharedSource { .. }))
    ));
    assert!(matches!(
        offer(&mut world, first.id, 2),
        Err(Refusal::Attachment(AttachmentRefusal::SharedSource { .. }))
    ));
    world
        .run(&Command::DeleteAttachment {
            attachment: AttachmentKey::Id(second.id),
        })
        .unwrap();
    offer(&mut world, first.id, 2).unwrap();
    let target = world.attach(incoming(2)).unwrap();
    assert!(target.read_only, "the source is read-only");
    assert!(matches!(
        world.attach(reader("/r2")),
        Err(Refusal::Attachment(AttachmentRefusal::VolumeInUse { .. }))
    ));
}

#[test]
fn moved_attachment_keeps_its_options() {
    let (mut world, source) = world();
    let target = moved(&mut world, source.id).unwrap();
    assert_eq!((target.node, target.queues), (NodeId(2), source.queues));
    assert_eq!(target.options.incoming, Some(Incoming::Move));
}

#[test]
fn incoming_attachment_without_an_offer_is_refused() {
    let (mut world, _) = world();
    let refused = world.attach(incoming(2)).unwrap_err();
    let not_offered = AttachmentRefusal::NotOffered {
        volume: "disk".to_owned(),
        node: "one".to_owned(),
        to: "node2".to_owned(),
    };
    assert_eq!(refused, not_offered.into());
    assert_eq!(refused.kind(), RefusalKind::Denied);
    let message = refused.to_string();
    assert!(
        message.contains("run `penstock attachment offer disk --to node2` on node \"one\""),
        "{message}"
    );
    assert_eq!(attachments(&world).len(), 1, "only the source's");
}

#[test]
fn offer_is_valid_for_one_node() {
    let (mut world, source) = offered();
    let refused = world.attach(incoming(3));
    assert!(
        matches!(
            refused,
            Err(Refusal::Attachment(AttachmentRefusal::NotOffered { .. }))
        ),
        "{refused:?}"
    );
    // The next offer replaces the first and ends its incoming attachment.
    world.attach(incoming(2)).unwrap();
    offer(&mut world, source.id, 3).unwrap();
    assert_eq!(attachments(&world).len(), 1);
    assert!(world.attach(incoming(2)).is_err());
    let target = world.attach(incoming(3)).unwrap();
    assert_eq!(target.node, NodeId(3));
}

#[test]
fn offer_expires() {
    let (mut world, source) = offered();
    let end = later(OFFER_TIME_DEFAULT);
    let refused = attach_at(&mut world, incoming(2), end);
    assert!(
        matches!(
            refused,
            Err(Refusal::Attachment(AttachmentRefusal::OfferExpired { .. }))
        ),
        "{refused:?}"
    );
    offer_at(&mut world, source.id, 2, end).unwrap();
    attach_at(&mut world, incoming(2), end).unwrap();
}

#[test]
fn offer_lifetime_is_bounded() {
    let (mut world, source) = world();
    let mut offer_for = |lifetime_s| {
        world.run(&Command::OfferAttachment {
            attachment: source.id,
            to: NodeId(2),
            lifetime_s,
            at: AT,
        })
    };
    for lifetime_s in [0, OFFER_TIME_MAX.as_secs() + 1, u64::MAX] {
        let bad = AttachmentRefusal::BadOffer { lifetime_s };
        assert_eq!(offer_for(lifetime_s), Err(bad.into()));
    }
    offer_for(OFFER_TIME_MAX.as_secs()).unwrap();
}

#[test]
fn offer_needs_another_existing_node() {
    let (mut world, source) = world();
    assert!(matches!(
        offer(&mut world, source.id, 9),
        Err(Refusal::Map(MapRefusal::UnknownNode { .. }))
    ));
    assert!(matches!(
        offer(&mut world, source.id, 1),
        Err(Refusal::Attachment(AttachmentRefusal::SameNode { .. }))
    ));
    offer(&mut world, source.id, 2).unwrap();
    // An incoming attachment cannot be offered.
    let target = world.attach(incoming(2)).unwrap();
    for refused in [
        offer(&mut world, target.id, 3),
        withdraw(&mut world, target.id),
    ] {
        assert!(
            matches!(
                refused,
                Err(Refusal::Attachment(
                    AttachmentRefusal::IncomingOffered { .. }
                ))
            ),
            "{refused:?}"
        );
    }
}

#[test]
fn withdrawn_offer_leaves_the_source_unchanged() {
    let (mut world, source) = world();
    let nothing = AttachmentRefusal::NothingOffered {
        volume: "disk".to_owned(),
    };
    assert_eq!(withdraw(&mut world, source.id), Err(nothing.into()));
    offer(&mut world, source.id, 2).unwrap();
    withdraw(&mut world, source.id).unwrap();
    assert_eq!(attachments(&world), std::slice::from_ref(&source));
    assert!(world.attach(incoming(2)).is_err());

    // The offer is withdrawn after it was accepted. The guest stops and the lease is free, but no one takes
    // it.
    offer(&mut world, source.id, 2).unwrap();
    let target = world.attach(incoming(2)).unwrap();
    withdraw(&mut world, source.id).unwrap();
    assert_eq!(attachments(&world), std::slice::from_ref(&source));
    let AttachmentTarget::Volume { id: volume, .. } = source.target;
    world.release(volume, 1, 1).unwrap();
    assert!(take_over(&mut world, target.id, None).is_err());
    world.grant("disk", 1, None).unwrap();
}

#[test]
fn incoming_attachment_takes_over_until_its_deadline() {
    let (mut first, source) = offered();
    let target = first.attach(incoming(2)).unwrap();
    let AttachmentTarget::Volume { id: volume, .. } = source.target;
    first.release(volume, 1, 1).unwrap();
    let mut second = first.clone();

    let last = UnixMillis(later(INCOMING_TIME_MAX).0 - 1);
    take_over_at(&mut first, target.id, None, last).unwrap();
    let [left] = &attachments(&first)[..] else {
        panic!("{:?}", attachments(&first));
    };
    assert_eq!((left.offer, left.expires_at), (None, None));

    let end = later(INCOMING_TIME_MAX);
    let expired = AttachmentRefusal::IncomingExpired {
        volume: "disk".to_owned(),
    };
    let refused = take_over_at(&mut second, target.id, None, end);
    assert_eq!(refused, Err(expired.into()));
    // Another offer to the same node restarts the time.
    offer_at(&mut second, source.id, 2, end).unwrap();
    take_over_at(&mut second, target.id, None, end).unwrap();
}

#[test]
fn expired_offer_is_removed_and_the_source_continues() {
    let (mut world, source) = offered();
    let expire = |world: &mut World, at| world.run(&Command::ExpireOffers { at }).unwrap();
    let target = world.attach(incoming(2)).unwrap();
    let before = world.records.clone();
    expire(&mut world, AT);
    assert_eq!(world.records, before, "no offer has expired");

    expire(&mut world, later(OFFER_TIME_DEFAULT));
    let left = attachments(&world);
    assert_eq!((left.len(), left[0].offer), (2, None));
    expire(&mut world, later(INCOMING_TIME_MAX));
    assert_eq!(attachments(&world), [source]);
    let last = tables::EVENTS.all(&world.records).unwrap().pop().unwrap();
    let expected = EventKind::IncomingExpired {
        volume: target.target.name().clone(),
        node: NodeId(2),
        socket: target.socket,
    };
    assert_eq!(last.what, expected);
    world.grant("disk", 1, None).unwrap();
}

#[test]
fn move_leaves_no_offer_behind() {
    let (mut world, source) = world();
    let target = moved(&mut world, source.id).unwrap();
    world
        .run(&Command::DeleteAttachment {
            attachment: AttachmentKey::Incoming(target.id),
        })
        .unwrap();
    assert_eq!(attachments(&world), [source]);
    assert!(world.attach(incoming(2)).is_err());
}

#[test]
fn offer_is_in_the_record_of_its_attachment() {
    let (world, source) = offered();
    let offer = Offer {
        to: NodeId(2),
        expires_at: later(OFFER_TIME_DEFAULT),
    };
    let expected = Attachment {
        offer: Some(offer),
        ..source
    };
    assert_eq!(attachments(&world), [expected]);
}

#[test]
fn lease_of_an_attached_volume_is_refused_to_other_hosts() {
    let (mut world, source) = world();
    let AttachmentTarget::Volume { id: volume, .. } = source.target;
    let node = NodeSpec {
        roles: [Role::Host].into(),
        ..NodeSpec::new(NodeId(4), "host".to_owned())
    };
    world
        .run(&Command::RegisterNode {
            node,
            replaces: Incarnation::default(),
            at: AT,
        })
        .unwrap();
    // The leader finds the lease run out; after that it is free.
    let run_out = world.grant("disk", 4, Some(1));
    world.release(volume, 1, 1).unwrap();
    let free = world.grant("disk", 4, None);
    for refused in [run_out, free] {
        assert!(
            matches!(refused, Err(Refusal::Lease(LeaseRefusal::Attached { .. }))),
            "{refused:?}"
        );
    }
    // An incoming attachment gives no right to the lease except to take over.
    offer(&mut world, source.id, 4).unwrap();
    let target = world.attach(incoming(4)).unwrap();
    assert!(world.grant("disk", 4, None).is_err());
    take_over(&mut world, target.id, None).unwrap();
    world.grant("disk", 4, None).unwrap();
}
