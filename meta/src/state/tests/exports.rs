//! NFS exports.

use super::*;
use crate::command::ExportSpec;
use crate::model::{Event, EventKind, Export, ExportState, NodeState};
use crate::refusal::ExportRefusal;

/// Two NFS nodes and two volumes.
fn world() -> World {
    let mut world = World::ready();
    world.node(2);
    world.create("data", GIB).unwrap();
    world.create("more", GIB).unwrap();
    world
}

fn spec(name: &str, volume: &str) -> ExportSpec {
    ExportSpec {
        name: name.to_owned(),
        volume: volume.to_owned(),
        node: NodeId(1),
        clients: vec!["10.0.0.0/24".to_owned()],
        read_only: false,
        root_squash: true,
        address: None,
    }
}

fn create(world: &mut World, export: ExportSpec) -> Result<Export, Refusal> {
    let fsid = Uuid::from_u128(7);
    export_of(world.run(&Command::CreateExport {
        fsid,
        export,
        at: AT,
    }))
}

fn export_of(reply: Reply) -> Result<Export, Refusal> {
    reply.map(|outcome| match outcome {
        Outcome::Export(export) => export,
        other => panic!("{other:?}"),
    })
}

fn assign(world: &mut World, from: u64, to: u64, planned: bool) -> Result<Export, Refusal> {
    export_of(world.run(&Command::AssignExport {
        name: "e".to_owned(),
        from: NodeId(from),
        to: NodeId(to),
        planned,
        at: AT,
    }))
}

fn set_down(world: &mut World, node: u64) {
    world
        .run(&Command::SetNodeState {
            node: NodeId(node),
            incarnation: Incarnation::default(),
            state: NodeState::Down,
            at: AT,
        })
        .unwrap();
}

fn last_event(world: &World) -> EventKind {
    let events: Vec<Event> = tables::EVENTS.all(&world.records).unwrap();
    events.last().unwrap().what.clone()
}

fn refused(result: Result<Export, Refusal>) -> ExportRefusal {
    match result {
        Err(Refusal::Export(refusal)) => refusal,
        other => panic!("{other:?}"),
    }
}

#[test]
fn an_export_is_made_once_and_keeps_its_volume() {
    let mut world = world();
    let made = create(&mut world, spec("e", "data")).unwrap();
    assert_eq!((made.node, made.state), (NodeId(1), ExportState::Active));
    assert_eq!(
        create(&mut world, spec("e", "data")).unwrap(),
        made,
        "said twice"
    );
    let delete = Command::DeleteVolume {
        name: "data".to_owned(),
    };
    let told = world.run(&delete).unwrap_err().to_string();
    assert!(told.contains("nfs export delete e"), "{told}");
    let shrink = Command::ResizeVolume {
        name: "data".to_owned(),
        size_bytes: GIB / 2,
        allow_shrink: true,
    };
    assert!(world.run(&shrink).is_err());
    world.resize("data", 2 * GIB, false).unwrap();
}

#[test]
fn what_another_export_has_is_refused() {
    let mut world = world();
    let address = Some("10.0.0.9/24".to_owned());
    let first = ExportSpec {
        address: address.clone(),
        ..spec("e", "data")
    };
    create(&mut world, first).unwrap();
    let other = |export: ExportSpec| Command::CreateExport {
        fsid: Uuid::from_u128(8),
        export,
        at: AT,
    };
    let taken = refused(export_of(world.run(&other(spec("e", "more")))));
    assert!(matches!(taken, ExportRefusal::NameTaken { .. }));
    let taken = refused(export_of(world.run(&other(spec("f", "data")))));
    assert!(matches!(taken, ExportRefusal::VolumeTaken { .. }));
    // The same address, however long its prefix.
    let same = ExportSpec {
        address: Some("10.0.0.9/16".to_owned()),
        ..spec("f", "more")
    };
    let taken = refused(export_of(world.run(&other(same))));
    assert!(matches!(taken, ExportRefusal::AddressTaken { .. }));
    let nobody = ExportSpec {
        clients: Vec::new(),
        ..spec("f", "more")
    };
    let taken = refused(export_of(world.run(&other(nobody))));
    assert!(matches!(taken, ExportRefusal::NoClients { .. }));
}

#[test]
fn only_from_an_nfs_node_that_is_down_is_an_export_taken() {
    let mut world = world();
    create(&mut world, spec("e", "data")).unwrap();
    let up = refused(assign(&mut world, 1, 2, false));
    assert!(matches!(up, ExportRefusal::NodeUp { .. }));
    set_down(&mut world, 1);
    assert_eq!(assign(&mut world, 1, 2, false).unwrap().node, NodeId(2));
    let export = Name::parse("e").unwrap();
    let moved = EventKind::ExportMoved {
        export,
        from: NodeId(1),
        to: NodeId(2),
        planned: false,
    };
    assert_eq!(last_event(&world), moved);
    assert_eq!(
        assign(&mut world, 1, 2, false).unwrap().node,
        NodeId(2),
        "said twice"
    );
    // Back only to one that is up.
    let down = refused(assign(&mut world, 2, 1, true));
    assert!(matches!(down, ExportRefusal::NodeDown { .. }));
}

#[test]
fn two_that_move_an_export_do_not_both_win() {
    let mut world = world();
    world.node(3);
    create(&mut world, spec("e", "data")).unwrap();
    assign(&mut world, 1, 2, true).unwrap();
    let late = refused(assign(&mut world, 1, 3, true));
    assert!(matches!(late, ExportRefusal::MovedMeanwhile { .. }));
}

#[test]
fn an_exported_volume_is_attached_on_its_node_alone() {
    let mut world = world();
    create(&mut world, spec("e", "data")).unwrap();
    let attach = |node| Command::CreateAttachment {
        attachment: AttachmentSpec {
            volume: "data".to_owned(),
            node: NodeId(node),
            socket: format!("/run/{node}"),
            queues: 1,
            read_only: false,
            options: AttachmentOptions::default(),
        },
        at: AT,
    };
    let told = world.run(&attach(2)).unwrap_err();
    assert!(matches!(
        told,
        Refusal::Volume(VolumeRefusal::Exported { .. })
    ));
    world.run(&attach(1)).unwrap();
}

#[test]
fn an_export_is_forgotten_when_its_node_has_taken_it_down() {
    let mut world = world();
    create(&mut world, spec("e", "data")).unwrap();
    let withdrawn = |node| Command::ExportWithdrawn {
        name: "e".to_owned(),
        node: NodeId(node),
        at: AT,
    };
    assert!(world.run(&withdrawn(1)).is_err(), "nobody deleted it");
    let delete = Command::DeleteExport {
        name: "e".to_owned(),
    };
    let deleting = export_of(world.run(&delete)).unwrap();
    assert_eq!(deleting.state, ExportState::Deleting);
    assert!(world.run(&withdrawn(2)).is_err(), "not by another");
    world.run(&withdrawn(1)).unwrap();
    assert!(matches!(
        last_event(&world),
        EventKind::ExportDeleted { .. }
    ));
    assert_eq!(world.run(&withdrawn(1)), Ok(Outcome::Done), "said twice");
    world
        .run(&Command::DeleteVolume {
            name: "data".to_owned(),
        })
        .unwrap();
}
