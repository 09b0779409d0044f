//! Segments of filesystems, which are hidden volumes.

use namespace::{FilesystemId, SegmentId};

use super::*;
use crate::command::ExportSpec;
use crate::model::SegmentOf;
use crate::refusal::FilesystemRefusal;

fn create(world: &mut World, filesystem: FilesystemId, segment: u64) -> Result<Volume, Refusal> {
    volume_of(world.run(&Command::CreateSegmentVolume {
        filesystem,
        segment: SegmentId(segment),
        uuid: Uuid::from_u128(u128::from(segment) << 64),
        size_bytes: GIB,
        at: AT,
    }))
}

fn delete(world: &mut World, filesystem: FilesystemId, segment: u64) -> Reply {
    world.run(&Command::DeleteSegmentVolume {
        filesystem,
        segment: SegmentId(segment),
    })
}

#[test]
fn a_segment_has_one_volume_of_its_filesystems_pool() {
    let mut world = World::ready();
    let filesystem = world.filesystem("home").unwrap().id;
    let made = create(&mut world, filesystem, 17).unwrap();
    let of = SegmentOf {
        filesystem,
        segment: SegmentId(17),
    };
    assert_eq!((made.segment, &*made.pool), (Some(of), DEFAULT_POOL));
    assert_eq!(&*made.name, format!(".segment-{}-17", filesystem.0));
    assert!(!made.read_only && made.size_bytes == GIB);
    let records = world.records.clone();
    assert_eq!(create(&mut world, filesystem, 17).unwrap(), made);
    assert_eq!(world.records, records, "said twice");
    let other = create(&mut world, filesystem, 18).unwrap();
    assert!(other.id > made.id && other.top_layer() != made.top_layer());
    let id = FilesystemId(99);
    let unknown = create(&mut world, id, 1);
    assert_eq!(unknown, Err(FilesystemRefusal::UnknownId { id }.into()));
}

#[test]
fn a_segment_is_written_under_a_lease_and_deleted_in_two_steps() {
    let mut world = World::ready();
    world.node(2);
    let filesystem = world.filesystem("home").unwrap().id;
    let made = create(&mut world, filesystem, 1).unwrap();
    let lease = world.grant(&made.name, 2, None).unwrap();
    assert_eq!(lease.volume, made.id);
    world.grant(&made.name, 1, None).unwrap_err();
    world.release(made.id, 2, lease.generation.0).unwrap();
    let next = world.grant(&made.name, 1, None).unwrap();
    assert!(next.generation > lease.generation);
    let Ok(Outcome::Volume(deleted)) = delete(&mut world, filesystem, 1) else {
        panic!("it is there");
    };
    assert_eq!(
        (deleted.id, deleted.state),
        (made.id, VolumeState::Deleting)
    );
    let records = world.records.clone();
    assert_eq!(
        delete(&mut world, filesystem, 1),
        Ok(Outcome::Volume(deleted))
    );
    assert_eq!(world.records, records, "said twice");
    assert!(world.release(made.id, 1, next.generation.0).is_err());
    let deleting = || {
        let name = made.name.to_string();
        Refusal::from(VolumeRefusal::Deleting { name })
    };
    assert_eq!(create(&mut world, filesystem, 1), Err(deleting()));
    assert_eq!(world.grant(&made.name, 1, None), Err(deleting()));
    let volume = made.id;
    world.run(&Command::VolumeDataDropped { volume }).unwrap();
    assert_eq!(delete(&mut world, filesystem, 1), Ok(Outcome::Done));
}

#[test]
fn peoples_commands_do_not_find_a_segment_by_its_name() {
    let mut world = World::ready();
    let filesystem = world.filesystem("home").unwrap().id;
    let segment = create(&mut world, filesystem, 1).unwrap();
    world.create("disk", GIB).unwrap();
    let name = || segment.name.to_string();
    let unknown = || Refusal::from(VolumeRefusal::Unknown { name: name() });
    assert_eq!(world.resize(&name(), 2 * GIB, false), Err(unknown()));
    assert_eq!(world.delete(&name()), Err(unknown()));
    assert_eq!(world.attach(attachment(&name(), "/run/a")), Err(unknown()));
    let promote = |from: &str, to: &str| Command::PromoteVolume {
        from: from.to_owned(),
        to: to.to_owned(),
    };
    assert_eq!(world.run(&promote(&name(), "disk")), Err(unknown()));
    let taken = world.run(&promote("disk", &name()));
    assert!(matches!(taken, Err(Refusal::Name(_))), "{taken:?}");
    let made = world.create(&name(), GIB);
    assert!(matches!(made, Err(Refusal::Name(_))), "{made:?}");
    let export = Command::CreateExport {
        fsid: Uuid::from_u128(1),
        export: ExportSpec {
            name: "export".to_owned(),
            volume: name(),
            node: NodeId(1),
            clients: vec!["10.0.0.0/24".to_owned()],
            read_only: false,
            root_squash: true,
            address: None,
        },
        at: AT,
    };
    assert_eq!(world.run(&export), Err(unknown()));
    let found = tables::VOLUMES.get(&world.records, &name()).unwrap();
    assert_eq!(found, Some(segment));
}

#[test]
fn segments_go_before_their_filesystem_and_it_before_its_pool() {
    let mut world = World::ready();
    let pool = PoolSpec::new("fast", 1);
    world.run(&Command::CreatePool { pool, at: AT }).unwrap();
    let filesystem = FilesystemSpec {
        name: "home".to_owned(),
        pool: "fast".to_owned(),
    };
    let made = world.run(&Command::CreateFilesystem {
        uuid: Uuid::from_u128(1),
        filesystem,
        at: AT,
    });
    let id = filesystem_of(made).unwrap().id;
    let volumes = [1, 2].map(|segment| create(&mut world, id, segment).unwrap().id);
    let pool_goes = |world: &mut World| {
        let name = "fast".to_owned();
        world.run(&Command::DeletePool { name })
    };
    let (name, filesystem) = ("fast".to_owned(), "home".to_owned());
    let in_use = PoolRefusal::HasFilesystem { name, filesystem };
    assert_eq!(pool_goes(&mut world), Err(in_use.into()));
    world.delete_filesystem("home").unwrap();
    let refused = create(&mut world, id, 3).unwrap_err();
    assert!(
        refused.to_string().contains("\"home\" is being deleted"),
        "{refused}"
    );
    delete(&mut world, id, 1).unwrap();
    let refused = world.run(&Command::FilesystemDropped { id }).unwrap_err();
    assert!(refused.to_string().contains(".segment-1-2"), "{refused}");
    delete(&mut world, id, 2).unwrap();
    world.run(&Command::FilesystemDropped { id }).unwrap();
    let name = "fast".to_owned();
    let freeing = PoolRefusal::StillFreeing { name };
    assert_eq!(pool_goes(&mut world), Err(freeing.into()));
    for volume in volumes {
        world.run(&Command::VolumeDataDropped { volume }).unwrap();
    }
    pool_goes(&mut world).unwrap();
}

#[test]
fn data_that_would_be_lost_are_those_of_the_filesystem() {
    let mut world = World::ready();
    let filesystem = world.filesystem("home").unwrap().id;
    (1..=9).for_each(|segment| drop(create(&mut world, filesystem, segment).unwrap()));
    let device = tables::DEVICES.all(&world.records).unwrap()[0].id;
    world
        .run(&Command::SetDeviceState {
            device,
            state: DeviceState::Offline,
            at: AT,
        })
        .unwrap();
    let refused = world.run(&Command::RemoveDevice { device, at: AT });
    let told = refused.unwrap_err().to_string();
    assert!(told.contains("filesystem \"home\""), "{told}");
    assert!(!told.contains("segment"), "{told}");
}
