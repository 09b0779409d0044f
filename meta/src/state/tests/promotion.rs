//! A volume takes the name of another, or one that is free.

use super::*;
use crate::model::OnFull;

fn promote(world: &mut World, from: &str, to: &str) -> Result<Volume, Refusal> {
    let (from, to) = (from.to_owned(), to.to_owned());
    volume_of(world.run(&Command::PromoteVolume { from, to }))
}

#[test]
fn a_volume_moves_to_a_free_name() {
    let mut world = World::ready();
    let part = world.create("part", GIB).unwrap();
    let disk = promote(&mut world, "part", "disk").unwrap();
    assert_eq!((disk.id, disk.name.as_str()), (part.id, "disk"));
    // The old name is free, and the number leads to the new one.
    world.create("part", GIB).unwrap();
    let volume = disk.id;
    world.delete("disk").unwrap();
    world.run(&Command::VolumeDataDropped { volume }).unwrap();
    world.create("disk", GIB).unwrap();
}

#[test]
fn a_replaced_volume_goes_away_under_the_other_name() {
    let mut world = World::ready();
    let old = world.create("disk", GIB).unwrap();
    world.grant("disk", 1, None).unwrap();
    let new = world.create("part", 2 * GIB).unwrap();
    assert_eq!(promote(&mut world, "part", "disk").unwrap().id, new.id);
    let going = world.delete("part").unwrap();
    assert_eq!((going.id, going.state), (old.id, VolumeState::Deleting));
    world
        .run(&Command::VolumeDataDropped { volume: old.id })
        .unwrap();
    assert_eq!(world.resize("disk", 3 * GIB, false).unwrap().id, new.id);
    world.create("part", GIB).unwrap();
}

#[test]
fn neither_volume_may_be_attached_or_missing() {
    let mut world = World::ready();
    world.create("disk", GIB).unwrap();
    world.create("part", GIB).unwrap();
    world.attach(attachment("disk", "/run/disk")).unwrap();
    for (from, to) in [("part", "disk"), ("disk", "part")] {
        let refused = promote(&mut world, from, to).unwrap_err();
        assert!(refused.to_string().contains("/run/disk"), "{refused}");
    }
    let refused = promote(&mut world, "nope", "disk").unwrap_err();
    assert_eq!(refused.kind(), RefusalKind::NotFound);
    let refused = promote(&mut world, "part", "bad/name").unwrap_err();
    assert_eq!(refused.kind(), RefusalKind::Invalid);
}

fn rename(world: &mut World, from: &str, to: &str) -> Result<Volume, Refusal> {
    let (from, to) = (from.to_owned(), to.to_owned());
    volume_of(world.run(&Command::RenameVolume { from, to }))
}

#[test]
fn a_volume_is_renamed_to_a_free_name_only() {
    let mut world = World::ready();
    let disk = world.create("disk", GIB).unwrap();
    let other = world.create("other", GIB).unwrap();
    let refused = rename(&mut world, "disk", "other").unwrap_err();
    assert_eq!(refused.kind(), RefusalKind::Conflict);
    assert_eq!(rename(&mut world, "disk", "disk").unwrap().id, disk.id);
    let renamed = rename(&mut world, "disk", "root").unwrap();
    assert_eq!((renamed.id, renamed.name.as_str()), (disk.id, "root"));
    assert_eq!(world.resize("other", 2 * GIB, false).unwrap().id, other.id);
    // The old name is free, the number leads to the new one.
    assert_ne!(world.create("disk", GIB).unwrap().id, disk.id);
    world.delete("root").unwrap();
    world
        .run(&Command::VolumeDataDropped { volume: disk.id })
        .unwrap();
    rename(&mut world, "other", "root").unwrap();
    for (from, to) in [("nope", "x"), ("disk", "bad/name")] {
        let refused = rename(&mut world, from, to).unwrap_err();
        assert_ne!(refused.kind(), RefusalKind::Conflict, "{refused}");
    }
    world.attach(attachment("disk", "/run/disk")).unwrap();
    let refused = rename(&mut world, "disk", "free").unwrap_err();
    assert!(refused.to_string().contains("/run/disk"), "{refused}");
}

#[test]
fn a_volume_says_how_long_its_writes_wait_for_space() {
    let mut world = World::ready();
    let made = world.create("disk", GIB).unwrap();
    assert_eq!(made.on_full.wait_s, 60);
    let set = |name: &str, on_full| Command::SetVolume {
        name: name.to_owned(),
        on_full,
    };
    let changed = volume_of(world.run(&set("disk", OnFull::ERROR))).unwrap();
    assert_eq!(changed.on_full, OnFull::ERROR);
    let spec = |name: &str| VolumeSpec {
        on_full: OnFull { wait_s: 300 },
        ..VolumeSpec::new(name, GIB)
    };
    let patient = world.create_in(spec("patient")).unwrap();
    assert_eq!(patient.on_full.wait_s, 300);
    let unknown = world.run(&set("nope", OnFull::ERROR)).unwrap_err();
    assert_eq!(unknown.kind(), RefusalKind::NotFound);
}
