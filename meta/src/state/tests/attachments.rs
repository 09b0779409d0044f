//! Attachments.

use super::*;

#[test]
fn a_socket_serves_one_volume_and_is_free_again_after_detaching() {
    let mut world = World::ready();
    world.create("disk", GIB).unwrap();
    world.create("other", GIB).unwrap();
    world.attach(attachment("disk", "/run/a.sock")).unwrap();
    let taken = world
        .attach(attachment("other", "/run/a.sock"))
        .unwrap_err();
    let (socket, node, target) = ("/run/a.sock".to_owned(), "one".into(), "disk".to_owned());
    assert_eq!(
        taken,
        AttachmentRefusal::SocketTaken {
            socket,
            node,
            target
        }
        .into()
    );
    world.node(2);
    let elsewhere = AttachmentSpec {
        node: NodeId(2),
        ..attachment("other", "/run/a.sock")
    };
    world.attach(elsewhere).unwrap();
    let key = AttachmentKey::Socket {
        node: NodeId(1),
        socket: "/run/a.sock".to_owned(),
    };
    world
        .run(&Command::DeleteAttachment {
            attachment: key.clone(),
        })
        .unwrap();
    let unknown = world.run(&Command::DeleteAttachment { attachment: key });
    assert!(matches!(
        unknown,
        Err(Refusal::Attachment(AttachmentRefusal::Unknown { .. }))
    ));
    world.attach(attachment("disk", "/run/a.sock")).unwrap();
}

#[test]
fn one_writes_or_many_read_or_all_say_that_they_share() {
    let mut world = World::ready();
    world.create("disk", GIB).unwrap();
    let reader = |socket: &str| AttachmentSpec {
        read_only: true,
        ..attachment("disk", socket)
    };
    let in_use = |result: Result<Attachment, Refusal>| {
        matches!(
            result,
            Err(Refusal::Attachment(AttachmentRefusal::VolumeInUse { .. }))
        )
    };
    let first = world.attach(reader("/r1")).unwrap();
    let second = world.attach(reader("/r2")).unwrap();
    assert!(in_use(world.attach(attachment("disk", "/w1"))));
    for id in [first.id, second.id] {
        world
            .run(&Command::DeleteAttachment {
                attachment: AttachmentKey::Id(id),
            })
            .unwrap();
    }
    let sharing = AttachmentOptions {
        shared: true,
        ..AttachmentOptions::default()
    };
    let shared = |socket: &str| AttachmentSpec {
        options: sharing.clone(),
        ..attachment("disk", socket)
    };
    world.attach(shared("/s1")).unwrap();
    world.attach(shared("/s2")).unwrap();
    assert!(in_use(world.attach(attachment("disk", "/w1"))));
    assert!(in_use(world.attach(reader("/r1"))));
}

#[test]
fn a_read_only_volume_is_attached_read_only() {
    let mut world = World::ready();
    world
        .create_in(VolumeSpec {
            read_only: true,
            ..VolumeSpec::new("image", GIB)
        })
        .unwrap();
    assert!(world.attach(attachment("image", "/a")).unwrap().read_only);
    assert!(world.attach(attachment("image", "/b")).unwrap().read_only);
}

#[test]
fn attachments_beyond_their_limits_are_refused() {
    let mut world = World::ready();
    world.create("disk", GIB).unwrap();
    for socket in [
        "relative",
        "",
        "/",
        "/run/",
        "/run/..",
        "/a\0b",
        &format!("/{}", "x".repeat(107)),
    ] {
        let refused = world.attach(attachment("disk", socket));
        assert!(
            matches!(
                refused,
                Err(Refusal::Attachment(AttachmentRefusal::BadSocketPath { .. }))
            ),
            "{socket:?}"
        );
    }
    for queues in [0, 257] {
        let refused = world.attach(AttachmentSpec {
            queues,
            ..attachment("disk", "/a")
        });
        assert_eq!(refused, Err(AttachmentRefusal::BadQueues { queues }.into()));
    }
    let many = (0..17)
        .map(|number| (format!("k{number}"), String::new()))
        .collect();
    let long = BTreeMap::from([("k".to_owned(), "x".repeat(1024))]);
    for extra in [many, long] {
        let options = AttachmentOptions {
            extra,
            ..AttachmentOptions::default()
        };
        let refused = world.attach(AttachmentSpec {
            options,
            ..attachment("disk", "/a")
        });
        assert!(matches!(
            refused,
            Err(Refusal::Attachment(AttachmentRefusal::BadOption { .. }))
        ));
    }
    world
        .attach(attachment("disk", &format!("/{}", "x".repeat(106))))
        .unwrap();
}

#[test]
fn write_cache_mode_is_kept_and_ends_with_its_attachment() {
    let mut world = World::ready();
    world.create("disk", GIB).unwrap();
    let made = world.attach(attachment("disk", "/run/a.sock")).unwrap();
    assert!(!made.options.write_through);
    let mut switch = |on| {
        world.run(&Command::SetWriteThrough {
            attachment: made.id,
            on,
        })
    };
    for on in [true, true, false, true] {
        match switch(on).unwrap() {
            Outcome::Attachment(kept) => assert_eq!(kept.options.write_through, on),
            other => panic!("{other:?}"),
        }
    }
    let key = AttachmentKey::Id(made.id);
    world
        .run(&Command::DeleteAttachment { attachment: key })
        .unwrap();
    let gone = world.run(&Command::SetWriteThrough {
        attachment: made.id,
        on: true,
    });
    assert!(matches!(
        gone,
        Err(Refusal::Attachment(AttachmentRefusal::Unknown { .. }))
    ));
    let again = world.attach(attachment("disk", "/run/a.sock")).unwrap();
    assert!(!again.options.write_through);
}
