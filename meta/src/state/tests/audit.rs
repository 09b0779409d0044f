//! Events of what people change, and of what nodes notice.

use super::*;
use crate::command::Notice;
use crate::model::{Event, EventKind, IMPORT_PREFIX};
use crate::refusal::AccessRefusal;

const BY: Author = Author {
    node: NodeId(1),
    uid: Some(1000),
    forced: false,
};
const LATER: UnixMillis = UnixMillis(5_000);

fn events(world: &World) -> Vec<Event> {
    tables::EVENTS.all(&world.records).unwrap()
}

/// The events of what is done.
fn told(world: &mut World, work: impl FnOnce(&mut World)) -> Vec<EventKind> {
    let before = events(world).len();
    work(world);
    let events = events(world).split_off(before);
    events.into_iter().map(|event| event.what).collect()
}

/// One in which somebody does things, at a time.
fn authored() -> World {
    let mut world = World::ready();
    world.author = Some((BY, LATER));
    world
}

fn name(name: &str) -> Name {
    name.parse().unwrap()
}

#[test]
fn each_change_of_a_volume_is_told_once() {
    let mut world = authored();
    let create = Command::CreateVolume {
        uuid: Uuid::from_u128(5),
        volume: VolumeSpec::new("disk", GIB),
        at: AT,
    };
    let made = EventKind::VolumeCreated {
        volume: name("disk"),
        pool: name(DEFAULT_POOL),
        size_bytes: GIB,
    };
    let twice = |world: &mut World| {
        world.run(&create).unwrap();
        world.run(&create).unwrap();
    };
    assert_eq!(told(&mut world, twice), [made]);

    let resized = told(&mut world, |world| {
        world.resize("disk", 2 * GIB, false).unwrap();
        world.resize("disk", 2 * GIB, false).unwrap();
        world.resize("disk", GIB, false).unwrap_err();
    });
    let to_two = EventKind::VolumeResized {
        volume: name("disk"),
        from_bytes: GIB,
        to_bytes: 2 * GIB,
    };
    assert_eq!(resized, [to_two]);

    let rename = |from: &str, to: &str| Command::RenameVolume {
        from: from.to_owned(),
        to: to.to_owned(),
    };
    let renamed = told(&mut world, |world| {
        world.run(&rename("disk", "disk")).unwrap();
        world.run(&rename("disk", "root")).unwrap();
    });
    let (volume, from) = (name("root"), name("disk"));
    assert_eq!(renamed, [EventKind::VolumeRenamed { volume, from }]);

    world.create("next", GIB).unwrap();
    let replaced = told(&mut world, |world| {
        let (from, to) = ("next".to_owned(), "root".to_owned());
        world.run(&Command::PromoteVolume { from, to }).unwrap();
    });
    let (volume, with) = (name("root"), Some(name("next")));
    assert_eq!(replaced, [EventKind::VolumeReplaced { volume, with }]);

    let deleted = told(&mut world, |world| {
        let volume = world.delete("root").unwrap();
        world.delete("root").unwrap();
        let dropped = Command::VolumeDataDropped { volume: volume.id };
        world.run(&dropped).unwrap();
    });
    let volume = name("root");
    assert_eq!(deleted, [EventKind::VolumeDeleted { volume }]);
}

#[test]
fn attachments_pools_leases_and_tokens_are_told() {
    let mut world = authored();
    world.node(2);
    world.create("disk", GIB).unwrap();
    let attached = told(&mut world, |world| {
        let id = world.attach(attachment("disk", "/run/disk")).unwrap().id;
        let attachment = AttachmentKey::Id(id);
        world
            .run(&Command::DeleteAttachment { attachment })
            .unwrap();
    });
    let (volume, node, socket) = (name("disk"), NodeId(1), "/run/disk".to_owned());
    let expected = [
        EventKind::VolumeAttached {
            volume: volume.clone(),
            node,
            socket: socket.clone(),
            read_only: false,
        },
        EventKind::VolumeDetached {
            volume,
            node,
            socket,
        },
    ];
    assert_eq!(attached, expected);

    let leased = told(&mut world, |world| {
        let lease = world.grant("disk", 1, None).unwrap();
        world.grant("disk", 1, None).unwrap();
        let expired = lease.generation.next().0;
        world.grant("disk", 2, Some(expired)).unwrap();
    });
    let taken = EventKind::LeaseTakenOver {
        volume: name("disk"),
        from: NodeId(1),
        node: NodeId(2),
    };
    assert_eq!(leased, [taken]);

    let pools = told(&mut world, |world| {
        let pool = PoolSpec::new("fast", 1);
        world.run(&Command::CreatePool { pool, at: AT }).unwrap();
        let name = "fast".to_owned();
        world.run(&Command::DeletePool { name }).unwrap();
    });
    let made = EventKind::PoolCreated {
        pool: name("fast"),
        replicas: 1,
    };
    let pool = name("fast");
    assert_eq!(pools, [made, EventKind::PoolDeleted { pool }]);

    let tokens = told(&mut world, |world| {
        let token = crate::pki::JoinToken::draw().hash();
        let create = Command::CreateToken {
            token,
            roles: None,
            expires_at: LATER,
            at: AT,
        };
        world.run(&create).unwrap();
        world.run(&Command::RevokeToken { token }).unwrap();
    });
    let made = EventKind::TokenCreated {
        roles: None,
        expires_at: LATER,
    };
    assert_eq!(tokens, [made, EventKind::TokenRevoked]);
}

#[test]
fn an_event_names_who_asked_and_when() {
    let mut world = World::ready();
    world.create("disk", GIB).unwrap();
    let name = "disk".to_owned();
    let delete = Command::DeleteVolume { name }.by(BY, LATER);
    world.run(&delete).unwrap();
    let last = events(&world).pop().unwrap();
    assert_eq!((last.by, last.at), (Some(BY), LATER));
    assert_eq!(events(&world)[0].by, None);
    // So does one that was there before.
    world.node(2);
    world.device(2);
    let drain = Command::DrainDevice {
        device: DeviceId(1),
        on: true,
        at: AT,
    };
    world.run(&drain.by(BY, LATER)).unwrap();
    let last = events(&world).pop().unwrap();
    assert!(matches!(last.what, EventKind::DeviceDraining { .. }));
    assert_eq!(last.by, Some(BY));
    // Authors do not nest, and only administrative commands have one.
    let twice = Command::Authored {
        by: BY,
        at: AT,
        command: Box::new(delete),
    };
    assert_eq!(world.run(&twice), Err(AccessRefusal::NoSuchAuthor.into()));
    let by_itself = Command::VolumeDataDropped {
        volume: VolumeId(1),
    };
    assert_eq!(by_itself.clone().by(BY, LATER), by_itself);
}

#[test]
fn over_commitment_is_told() {
    let mut world = World::ready();
    let pool = name(DEFAULT_POOL);
    let note = Command::RecordNotice {
        notice: Notice::PoolOverCommitted { pool: pool.clone() },
        at: AT,
    };
    let told = told(&mut world, |world| {
        world.run(&note).unwrap();
    });
    assert_eq!(told, [EventKind::PoolOverCommitted { pool }]);
}

#[test]
fn a_notice_is_kept_unless_it_is_too_long_or_no_line() {
    let mut world = World::ready();
    let notice = |what: &str| Command::RecordNotice {
        notice: Notice::DataDamaged {
            what: what.to_owned(),
            node: NodeId(1),
        },
        at: LATER,
    };
    world.run(&notice("device /dev/sda: 1 bad block")).unwrap();
    let last = events(&world).pop().unwrap();
    assert_eq!(last.at, LATER);
    assert_eq!(
        last.what.to_string(),
        "node 1: device /dev/sda: 1 bad block"
    );
    let long = "x".repeat(Notice::TEXT_MAX + 1);
    for text in [long.as_str(), "a line\nand another", "\u{1b}[2J"] {
        let refused = world.run(&notice(text));
        assert_eq!(refused, Err(AccessRefusal::NoSuchNotice.into()));
    }
}

#[test]
fn an_import_is_told_by_its_own_name() {
    let mut world = authored();
    let import = |world: &mut World, to: &str| {
        let from = format!("{IMPORT_PREFIX}1-x");
        world.create(&from, GIB).unwrap();
        let to = to.to_owned();
        world.run(&Command::PromoteVolume { from, to }).unwrap();
    };
    let first = told(&mut world, |world| import(world, "disk"));
    let made = EventKind::VolumeCreated {
        volume: name("disk"),
        pool: name(DEFAULT_POOL),
        size_bytes: GIB,
    };
    assert_eq!(first, [made]);
    let next = told(&mut world, |world| {
        world.create(&format!("{IMPORT_PREFIX}2-x"), GIB).unwrap();
        let (from, to) = (format!("{IMPORT_PREFIX}2-x"), "disk".to_owned());
        world.run(&Command::PromoteVolume { from, to }).unwrap();
        // The volume that was replaced has the import's name now, and goes.
        world.delete(&format!("{IMPORT_PREFIX}2-x")).unwrap();
    });
    let (volume, with) = (name("disk"), None);
    assert_eq!(next, [EventKind::VolumeReplaced { volume, with }]);
}

#[test]
fn a_guest_that_moves_is_told_where_to() {
    let mut world = World::ready();
    world.node(2);
    world.create("disk", GIB).unwrap();
    let source = world.attach(attachment("disk", "/run/disk")).unwrap().id;
    let moved = told(&mut world, |world| {
        let offer = Command::MoveAttachment {
            attachment: source,
            to: NodeId(2),
            socket: "/run/next".to_owned(),
            at: AT,
        };
        let Ok(Outcome::Attachment(incoming)) = world.run(&offer) else {
            panic!("it was not offered");
        };
        let take = Command::TakeOverAttachment {
            attachment: incoming.id,
            expired: None,
            at: AT,
        };
        world.run(&take).unwrap();
    });
    let (volume, node, socket) = (name("disk"), NodeId(2), "/run/next".to_owned());
    let expected = EventKind::VolumeMoved {
        volume,
        node,
        socket,
    };
    assert_eq!(moved, [expected]);
}

#[test]
fn offers_are_recorded_as_events() {
    let mut world = authored();
    world.node(2);
    world.create("disk", GIB).unwrap();
    let attachment = world.attach(attachment("disk", "/run/disk")).unwrap().id;
    let offered = told(&mut world, |world| {
        let offer = Command::OfferAttachment {
            attachment,
            to: NodeId(2),
            lifetime_s: 60,
            at: AT,
        };
        world.run(&offer).unwrap();
        world.run(&Command::WithdrawOffer { attachment }).unwrap();
    });
    let (volume, node) = (name("disk"), NodeId(1));
    let expected = [
        EventKind::VolumeOffered {
            volume: volume.clone(),
            node,
            to: NodeId(2),
            expires_at: UnixMillis(AT.0 + 60_000),
        },
        EventKind::OfferWithdrawn { volume, node },
    ];
    assert_eq!(offered, expected);
}
