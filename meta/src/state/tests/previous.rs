//! Below [`Level::OFFERS`] commands do what they do in the previous version: nodes of both apply the same
//! log, and their records must come out the same. The literals are what the previous version writes.

use super::*;
use crate::model::{Incoming, Role};
use crate::refusal::NamedNode;

/// Two nodes that do all, a host, and a volume that a guest of node 1 reads.
fn world() -> (World, Attachment) {
    let mut world = World::ready();
    world.node(2);
    let host = NodeSpec {
        roles: [Role::Host].into(),
        ..NodeSpec::new(NodeId(3), "host".to_owned())
    };
    let register = Command::RegisterNode {
        node: host,
        replaces: Incarnation::default(),
        at: AT,
    };
    world.run(&register).unwrap();
    world.create("disk", GIB).unwrap();
    let spec = AttachmentSpec {
        read_only: true,
        ..attachment("disk", "/run/a")
    };
    let source = world.attach(spec).unwrap();
    world.set_level(Level(Level::OFFERS.0 - 1));
    (world, source)
}

fn incoming(node: u64) -> AttachmentSpec {
    AttachmentSpec {
        node: NodeId(node),
        options: AttachmentOptions {
            incoming: Some(Incoming::Guest),
            ..AttachmentOptions::default()
        },
        ..attachment("disk", "/run/b")
    }
}

fn record(world: &World, id: AttachmentId) -> String {
    let found = tables::ATTACHMENTS.get(&world.records, &id).unwrap();
    serde_json::to_string(&found.unwrap()).unwrap()
}

fn take_over(world: &mut World, attachment: AttachmentId, at: UnixMillis) -> Reply {
    world.run(&Command::TakeOverAttachment {
        attachment,
        expired: None,
        at,
    })
}

fn raise(world: &mut World, at: UnixMillis) {
    let to = Level::OFFERS;
    world.run(&Command::RaiseLevel { to, at }).unwrap();
}

#[test]
fn incoming_attachment_needs_no_offer_and_has_no_end() {
    let (mut world, source) = world();
    let target = world.attach(incoming(2)).unwrap();
    let expected = concat!(
        r#"{"id":2,"node":2,"socket":"/run/b","target":{"kind":"volume","name":"disk","id":1},"#,
        r#""queues":1,"read_only":false,"options":{"shared":false,"write_through":false,"#,
        r#""socket_mode":null,"socket_uid":null,"socket_gid":null,"extra":{},"#,
        r#""incoming":"guest"},"created_at":1000}"#
    );
    assert_eq!(record(&world, target.id), expected);
    take_over(&mut world, target.id, UnixMillis(u64::MAX)).unwrap();
    let moved = expected.replace(r#","incoming":"guest""#, "");
    assert_eq!(record(&world, target.id), moved);
    let left = tables::ATTACHMENTS.get(&world.records, &source.id).unwrap();
    assert_eq!(left, None, "its place was taken");
}

#[test]
fn attachment_that_moves_has_no_end() {
    let (mut world, source) = world();
    let moved = world.run(&Command::MoveAttachment {
        attachment: source.id,
        to: NodeId(2),
        socket: "/run/b".to_owned(),
        at: AT,
    });
    let Ok(Outcome::Attachment(target)) = moved else {
        panic!("{moved:?}");
    };
    let expected = concat!(
        r#"{"id":2,"node":2,"socket":"/run/b","target":{"kind":"volume","name":"disk","id":1},"#,
        r#""queues":1,"read_only":true,"options":{"shared":false,"write_through":false,"#,
        r#""socket_mode":null,"socket_uid":null,"socket_gid":null,"extra":{},"#,
        r#""incoming":"move"},"created_at":1000}"#
    );
    assert_eq!(record(&world, target.id), expected);
    // A program of before knows no other refusal of this.
    let again = world.run(&Command::MoveAttachment {
        attachment: target.id,
        to: NodeId(1),
        socket: "/run/c".to_owned(),
        at: AT,
    });
    let other = AttachmentRefusal::OtherIncoming {
        volume: "disk".to_owned(),
        socket: "/run/b".to_owned(),
        node: NamedNode::Number(NodeId(2)),
    };
    assert_eq!(again, Err(other.into()));
}

#[test]
fn lease_of_an_attached_volume_goes_to_whoever_asks() {
    let (mut world, _) = world();
    let lease = world.grant("disk", 3, None).unwrap();
    assert_eq!((lease.holder, lease.generation.0), (Some(NodeId(3)), 1));
    let held = LeaseRefusal::Held {
        volume: "disk".to_owned(),
        holder: NamedNode::Number(NodeId(3)),
        generation: Generation(1),
    };
    assert_eq!(world.grant("disk", 2, None), Err(held.into()));
    world.release(lease.volume, 3, 1).unwrap();
    raise(&mut world, AT);
    let refused = world.grant("disk", 3, None);
    assert!(
        matches!(refused, Err(Refusal::Lease(LeaseRefusal::Attached { .. }))),
        "{refused:?}"
    );
}

#[test]
fn nothing_is_offered_and_nobody_evicted() {
    let (mut world, source) = world();
    let (attachment, node, at) = (source.id, NodeId(3), AT);
    let commands = [
        Command::OfferAttachment {
            attachment,
            to: NodeId(2),
            lifetime_s: 60,
            at,
        },
        Command::WithdrawOffer { attachment },
        Command::ExpireOffers { at },
    ];
    let early = Refusal::from(AttachmentRefusal::OffersTooNew);
    for command in commands {
        let proposed = command.too_new_for(Level(Level::OFFERS.0 - 1));
        assert_eq!(proposed, Some(early.clone()), "{command:?}");
        assert_eq!(command.too_new_for(Level::OFFERS), None);
        assert_eq!(world.run(&command), Err(early.clone()), "{command:?}");
    }
    let evict = Command::EvictNode { node, at };
    let early = Refusal::from(MapRefusal::EvictionTooNew);
    let by = Author {
        node: NodeId(1),
        uid: None,
        forced: false,
    };
    let authored = evict.clone().by(by, AT);
    let proposed = authored.too_new_for(Level(Level::OFFERS.0 - 1));
    assert_eq!(proposed, Some(early.clone()), "whoever wants it");
    assert_eq!(world.run(&evict), Err(early));
    raise(&mut world, AT);
    world.run(&evict).unwrap();
}

/// A migration that began before the upgrade ends after it, one way or the other.
#[test]
fn incoming_attachment_of_before_has_an_end_once_the_level_rises() {
    let (mut first, source) = world();
    let target = first.attach(incoming(2)).unwrap();
    let raised = UnixMillis(5_000);
    raise(&mut first, raised);
    let mut second = first.clone();
    take_over(&mut first, target.id, UnixMillis(6_000)).unwrap();

    let day_ms = 24 * 3600 * 1000;
    let expire = |world: &mut World, at| {
        world.run(&Command::ExpireOffers { at }).unwrap();
        tables::ATTACHMENTS.all(&world.records).unwrap()
    };
    let left = expire(&mut second, UnixMillis(raised.0 + day_ms - 1));
    assert_eq!(left.len(), 2);
    let left = expire(&mut second, UnixMillis(raised.0 + day_ms));
    assert_eq!(left, [source]);
}

#[test]
fn refusals_give_numbers_of_nodes() {
    let (mut world, _) = world();
    let number = NamedNode::Number;
    let at = AT;
    let (name, socket) = (|| "disk".to_owned(), || "/run/a".to_owned());
    let in_use = VolumeRefusal::InUse {
        name: name(),
        socket: socket(),
        node: number(NodeId(1)),
    };
    assert_eq!(world.delete("disk"), Err(in_use.into()));
    let taken = AttachmentRefusal::SocketTaken {
        socket: socket(),
        node: number(NodeId(1)),
        target: name(),
    };
    let refused = world.attach(attachment("disk", "/run/a"));
    assert_eq!(refused, Err(taken.into()));
    let used = AttachmentRefusal::VolumeInUse {
        volume: name(),
        socket: socket(),
        node: number(NodeId(1)),
    };
    let refused = world.attach(attachment("disk", "/run/c"));
    assert_eq!(refused, Err(used.into()));
    let node = NodeId(1);
    let serves = MapRefusal::NodeServes {
        node: number(node),
        socket: socket(),
    };
    let refused = world.run(&Command::RemoveNode { node, at });
    assert_eq!(refused, Err(serves.into()));
    let idle = NodeSpec {
        roles: [].into(),
        ..NodeSpec::new(NodeId(9), "new".to_owned())
    };
    let register = Command::RegisterNode {
        node: idle,
        replaces: Incarnation::default(),
        at,
    };
    let no_role = MapRefusal::NoRole {
        node: number(NodeId(9)),
    };
    assert_eq!(world.run(&register), Err(no_role.into()));
}
