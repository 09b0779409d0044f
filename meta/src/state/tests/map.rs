//! The cluster, nodes, devices, pools and placement.

use super::*;

#[test]
fn nothing_is_done_before_the_cluster_is_made() {
    let mut world = World::default();
    assert_eq!(world.create("disk", GIB), Err(MapRefusal::NoCluster.into()));
    assert!(world.records.is_empty());
}

#[test]
fn bootstrap_may_be_repeated_but_not_for_another_cluster() {
    let mut world = World::ready();
    let before = world.records.clone();
    let node = NodeSpec::new(NodeId(1), "one".to_owned());
    let again = |cluster| Command::Bootstrap {
        cluster,
        node: node.clone(),
        pool: None,
        at: UnixMillis(9),
    };
    assert_eq!(world.run(&again(Uuid::from_u128(1))), Ok(Outcome::Done));
    assert!(matches!(
        world.run(&again(Uuid::from_u128(2))),
        Err(Refusal::Map(MapRefusal::OtherCluster { .. }))
    ));
    assert_eq!(world.records, before);
}

#[test]
fn empty_pool_is_placed_again_and_one_with_volumes_is_not() {
    let mut world = World::ready();
    let groups = |world: &World| tables::PLACEMENT_GROUPS.all(&world.records).unwrap();
    world.device(1);
    let spread: std::collections::BTreeSet<_> = groups(&world)
        .into_iter()
        .flat_map(|group| group.members)
        .map(|member| member.device)
        .collect();
    assert_eq!(spread.len(), 2, "both devices are used");
    world.create("disk", GIB).unwrap();
    let before = groups(&world);
    let third = world.device(1);
    for (before, after) in before.iter().zip(groups(&world)) {
        assert!(
            before.in_sync().eq(after.in_sync().map(|member| {
                let before = before.member(member.device);
                before.expect("who is new is not in sync")
            })),
            "whoever held data holds it still"
        );
    }
    world
        .run(&Command::RemoveDevice {
            device: third,
            at: AT,
        })
        .unwrap();
    let refused = world.run(&Command::RemoveDevice {
        device: DeviceId(1),
        at: AT,
    });
    assert!(matches!(
        refused,
        Err(Refusal::Map(MapRefusal::DeviceInUse { .. }))
    ));
}

#[test]
fn a_replica_that_joins_a_group_with_data_is_not_in_sync() {
    let mut world = World::ready();
    let pool = PoolSpec {
        min_in_sync: Some(1),
        failure_domain: FailureDomain::Device,
        ..PoolSpec::new("safe", 2)
    };
    world.run(&Command::CreatePool { pool, at: AT }).unwrap();
    world
        .create_in(VolumeSpec {
            pool: Some("safe".to_owned()),
            ..VolumeSpec::new("disk", GIB)
        })
        .unwrap();
    let joined = world.device(1);
    let pool = tables::POOLS.get(&world.records, "safe").unwrap().unwrap();
    for group in tables::PLACEMENT_GROUPS
        .all_below(&world.records, &pool.id)
        .unwrap()
    {
        let found: Vec<_> = group
            .members
            .iter()
            .map(|member| (member.device, member.state))
            .collect();
        assert_eq!(
            found,
            [
                (DeviceId(1), ReplicaState::InSync),
                (joined, ReplicaState::Out)
            ]
        );
    }
}

#[test]
fn a_device_changes_path_and_size_but_not_identity() {
    let mut world = World::ready();
    let moved = DeviceSpec {
        path: "/dev/elsewhere".to_owned(),
        size_bytes: 7 * GIB,
        ..device(1, 1)
    };
    let reply = world
        .run(&Command::RegisterDevice {
            device: moved,
            incarnation: Incarnation::default(),
            at: UnixMillis(9),
        })
        .unwrap();
    let Outcome::Device(found) = reply else {
        panic!("{reply:?}")
    };
    assert_eq!(
        (found.id, found.size_bytes, found.added_at),
        (DeviceId(1), 7 * GIB, AT)
    );
    let swapped = DeviceSpec {
        path: "/dev/elsewhere".to_owned(),
        ..device(5, 1)
    };
    let refused = world
        .run(&Command::RegisterDevice {
            device: swapped,
            incarnation: Incarnation::default(),
            at: AT,
        })
        .unwrap_err();
    assert!(
        refused.to_string().contains("penstock device remove 1"),
        "{refused}"
    );
    for (path, size_bytes) in [("relative", GIB), ("/dev/x", 0)] {
        let bad = DeviceSpec {
            path: path.to_owned(),
            size_bytes,
            ..device(6, 1)
        };
        let refused = world
            .run(&Command::RegisterDevice {
                device: bad,
                incarnation: Incarnation::default(),
                at: AT,
            })
            .unwrap_err();
        assert_eq!(refused.kind(), RefusalKind::Invalid);
    }
}

#[test]
fn a_failed_device_gets_no_new_data() {
    let mut world = World::ready();
    world
        .run(&Command::SetDeviceState {
            device: DeviceId(1),
            state: DeviceState::Failed,
            at: AT,
        })
        .unwrap();
    assert!(matches!(
        world.create("disk", GIB),
        Err(Refusal::Pool(PoolRefusal::TooFewDevices {
            available: 0,
            ..
        }))
    ));
    world
        .run(&Command::RegisterDevice {
            device: device(1, 1),
            incarnation: Incarnation::default(),
            at: AT,
        })
        .unwrap();
    world.create("disk", GIB).unwrap();
}

#[test]
fn pools_are_checked_and_the_default_and_used_ones_stay() {
    let mut world = World::ready();
    let create =
        |world: &mut World, pool: PoolSpec| world.run(&Command::CreatePool { pool, at: AT });
    for bad in [
        PoolSpec::new("p", 0),
        PoolSpec::new("p", 8),
        PoolSpec {
            min_in_sync: Some(3),
            ..PoolSpec::new("p", 2)
        },
        PoolSpec {
            min_in_sync: Some(0),
            ..PoolSpec::new("p", 2)
        },
        PoolSpec {
            placement_groups: Some(0),
            ..PoolSpec::new("p", 1)
        },
        PoolSpec {
            placement_groups: Some(16_385),
            ..PoolSpec::new("p", 1)
        },
    ] {
        assert_eq!(
            create(&mut world, bad).unwrap_err().kind(),
            RefusalKind::Invalid
        );
    }
    let before = world.without_events().len();
    create(&mut world, PoolSpec::new("p", 1)).unwrap();
    assert_eq!(
        create(&mut world, PoolSpec::new("p", 1))
            .unwrap_err()
            .kind(),
        RefusalKind::Conflict
    );
    let volume = world
        .create_in(VolumeSpec {
            pool: Some("p".to_owned()),
            ..VolumeSpec::new("disk", GIB)
        })
        .unwrap();
    let delete = |world: &mut World, name: &str| {
        world.run(&Command::DeletePool {
            name: name.to_owned(),
        })
    };
    let in_use = PoolRefusal::InUse {
        name: "p".to_owned(),
        volume: "disk".to_owned(),
    };
    assert_eq!(delete(&mut world, "p"), Err(in_use.into()));
    assert!(matches!(
        delete(&mut world, DEFAULT_POOL),
        Err(Refusal::Pool(PoolRefusal::IsDefault { .. }))
    ));
    world.delete("disk").unwrap();
    world
        .run(&Command::VolumeDataDropped { volume: volume.id })
        .unwrap();
    delete(&mut world, "p").unwrap();
    let left = world.without_events().len();
    assert_eq!(left, before, "its groups are gone with it");
}

#[test]
fn refusals_name_nodes_as_lists_do() {
    let mut world = World::ready();
    (2..=3).for_each(|node| world.node(node));
    world.create("disk", GIB).unwrap();
    let at = AT;
    let refused = |world: &mut World, command: &Command| {
        let message = world.run(command).unwrap_err().to_string();
        assert!(
            !message.contains("node 1") && !message.contains("node 2"),
            "{message}"
        );
        message
    };
    let attached = AttachmentSpec {
        node: NodeId(2),
        ..attachment("disk", "/run/a.sock")
    };
    world.attach(attached).unwrap();
    let message = world.attach(attachment("disk", "/run/b.sock")).unwrap_err();
    assert!(
        message.to_string().contains("on node node2 already"),
        "{message}"
    );
    let message = world.delete("disk").unwrap_err();
    assert!(message.to_string().contains("on node node2: "), "{message}");
    let node = NodeId(2);
    let message = refused(&mut world, &Command::RemoveNode { node, at });
    assert!(message.starts_with("node node2 serves"), "{message}");
    world.grant("disk", 1, None).unwrap();
    let message = world.grant("disk", 2, None).unwrap_err();
    assert!(
        message.to_string().contains("leased to node one "),
        "{message}"
    );
    let attachment = AttachmentKey::Socket {
        node: NodeId(1),
        socket: "/run/c.sock".to_owned(),
    };
    let message = refused(&mut world, &Command::DeleteAttachment { attachment });
    assert!(message.contains("\"/run/c.sock\" on node one"), "{message}");
    let mut idle = NodeSpec::new(NodeId(3), "node3".to_owned());
    idle.roles = [].into();
    let register = Command::RegisterNode {
        node: idle,
        replaces: Incarnation::default(),
        at,
    };
    assert!(refused(&mut world, &register).starts_with("node node3 has no role"));
}

#[test]
fn two_nodes_do_not_bear_one_name() {
    let mut world = World::ready();
    let named = |id: u64| NodeSpec::new(NodeId(id), "one".to_owned());
    let refused = world.run(&Command::RegisterNode {
        node: named(2),
        replaces: Incarnation::default(),
        at: AT,
    });
    assert!(matches!(
        refused,
        Err(Refusal::Map(MapRefusal::NodeNameTaken { .. }))
    ));
    let idle = NodeSpec {
        roles: [].into(),
        ..named(1)
    };
    assert!(matches!(
        world.run(&Command::RegisterNode {
            node: idle,
            replaces: Incarnation::default(),
            at: AT
        }),
        Err(Refusal::Map(MapRefusal::NoRole { .. }))
    ));
}

/// Says how many numbers were given, as if all these had been made.
fn have_given(world: &mut World, change: impl FnOnce(&mut tables::Counters)) {
    let mut counters = tables::COUNTERS.get(&world.records, &()).unwrap().unwrap();
    change(&mut counters);
    let key = vec![tables::COUNTERS.prefix()];
    world
        .records
        .insert(key, serde_json::to_vec(&counters).unwrap());
}

#[test]
fn layer_id_encodes_pool_and_family_and_ids_are_bounded() {
    let mut world = World::ready();
    let pool = tables::POOLS.get(&world.records, DEFAULT_POOL);
    let pool = pool.unwrap().unwrap().id;
    let first = world.create("first", GIB).unwrap();
    assert_eq!(first.layers, [crate::ids::layer_of(pool, first.id, 1)]);
    have_given(&mut world, |counters| counters.volume = VolumeId::MAX.0);
    let last = world.create("last", GIB).unwrap();
    assert_eq!(last.layers, [crate::ids::layer_of(pool, VolumeId::MAX, 1)]);
    let refused = world.create("beyond", GIB).unwrap_err();
    assert_eq!(refused, VolumeRefusal::TooMany.into());
    have_given(&mut world, |counters| counters.pool = PoolId::MAX.0 + 1);
    let pool = PoolSpec::new("beyond", 1);
    let refused = world.run(&Command::CreatePool { pool, at: AT });
    let name = "beyond".to_owned();
    assert_eq!(refused, Err(PoolRefusal::TooMany { name }.into()));
}

#[test]
fn device_drains_only_if_others_can_take_its_share_and_logs_it() {
    let mut world = World::ready();
    let drain = |on| Command::DrainDevice {
        device: DeviceId(1),
        on,
        at: AT,
    };
    // Nothing is stored yet: nothing has to go anywhere.
    world.run(&drain(true)).unwrap();
    world.run(&drain(false)).unwrap();
    world.create_in(VolumeSpec::new("a", GIB)).unwrap();
    let refused = world.run(&drain(true)).unwrap_err();
    assert!(
        refused.to_string().contains("without device 1") && refused.to_string().contains("0 of 1"),
        "{refused}"
    );
    assert_eq!(refused.kind(), RefusalKind::Conflict);
    world.device(1);
    world.run(&drain(true)).unwrap();
    let told: Vec<String> = tables::EVENTS
        .all(&world.records)
        .unwrap()
        .iter()
        .map(|event| event.what.to_string())
        .filter(|what| what.starts_with("device 1"))
        .collect();
    assert_eq!(
        told,
        [
            "device 1 was added on node 1",
            "device 1 on node 1 is being emptied",
            "device 1 on node 1 may hold data again",
            "device 1 on node 1 is being emptied",
        ]
    );
}
