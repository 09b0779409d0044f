//! What sequences of operations are made of.

use proptest::prelude::*;

use super::model::{Model, What};
use super::world::{Map, all_freed, open_session};
use crate::*;

/// What to do, with choices that are resolved against the model: of all inodes ever made, of names, of
/// segments.
#[derive(Debug, Clone)]
pub(super) enum Act {
    Make(u8, u8, u8),
    Symlink(u8, u8, u8),
    Link(u8, u8, u8),
    Unlink(u8, u8, u8),
    Rmdir(u8, u8, u8),
    Rename([u8; 4], u8, u8),
    MakeTemporary(u8, u8),
    SetMode(u8, u16, bool),
    SetOwner(u8, u8, bool),
    SetTimes(u8, u8),
    Access(u8, u8),
    Resize(u8, u32, bool),
    SetXattr(u8, u8, u8, u8),
    RemoveXattr(u8, u8),
    Commit {
        file: u8,
        segment: u8,
        pieces: Vec<(u8, u8)>,
        skip: u8,
        rest: u16,
        clear: bool,
    },
    Punch(u8, u8, u8, bool),
    Copy([u8; 2], [u8; 2], u8, bool),
    NewSegment,
    Seal(u8, u8),
    Reclaim(u8),
    Release(u8, u8),
    EndSession(u8),
    OpenSession(u8),
    Reap(u8),
    DropSegment(u8),
    RaiseNumbers,
    CreateAgain,
}

const NAMES: [&[u8]; 6] = [
    b"a",
    b"b",
    b"dir",
    b"\xff\xfe\x80",
    b"name with spaces",
    b"b.x",
];
const XATTRS: [&[u8]; 6] = [
    b"user.a",
    b"trusted.overlay",
    b"security.capability",
    b"system.posix_acl_access",
    b"user.",
    b"",
];
pub(super) const SESSIONS: [u64; 3] = [1, 2, 3];

fn name(choice: u8) -> Vec<u8> {
    match choice {
        250 => Vec::new(),
        251 => b"..".to_vec(),
        252 => b"x/y".to_vec(),
        253 => b"x\0".to_vec(),
        254 => vec![b'x'; 256],
        255 => vec![b'x'; 255],
        _ => NAMES[usize::from(choice) % NAMES.len()].to_vec(),
    }
}

pub(super) fn act() -> impl Strategy<Value = Act> {
    let byte = any::<u8>;
    prop_oneof![
        6 => (byte(), byte(), byte()).prop_map(|(a, b, c)| Act::Make(a, b, c)),
        1 => (byte(), byte(), byte()).prop_map(|(a, b, c)| Act::Symlink(a, b, c)),
        3 => (byte(), byte(), byte()).prop_map(|(a, b, c)| Act::Link(a, b, c)),
        4 => (byte(), byte(), byte()).prop_map(|(a, b, c)| Act::Unlink(a, b, c)),
        3 => (byte(), byte(), byte()).prop_map(|(a, b, c)| Act::Rmdir(a, b, c)),
        8 => (any::<[u8; 4]>(), byte(), byte()).prop_map(|(a, b, c)| Act::Rename(a, b, c)),
        3 => (byte(), byte()).prop_map(|(a, b)| Act::MakeTemporary(a, b)),
        1 => (byte(), any::<u16>(), any::<bool>()).prop_map(|(a, b, c)| Act::SetMode(a, b, c)),
        1 => (byte(), byte(), any::<bool>()).prop_map(|(a, b, c)| Act::SetOwner(a, b, c)),
        1 => (byte(), byte()).prop_map(|(a, b)| Act::SetTimes(a, b)),
        1 => (byte(), byte()).prop_map(|(a, b)| Act::Access(a, b)),
        4 => (byte(), 0..60_000_u32, any::<bool>()).prop_map(|(a, b, c)| Act::Resize(a, b, c)),
        2 => (byte(), byte(), byte(), byte()).prop_map(|(a, b, c, d)| Act::SetXattr(a, b, c, d)),
        1 => (byte(), byte()).prop_map(|(a, b)| Act::RemoveXattr(a, b)),
        10 => (
            byte(),
            byte(),
            prop::collection::vec((0..6_u8, 1..4_u8), 0..4),
            byte(),
            any::<u16>(),
            any::<bool>(),
        )
            .prop_map(|(file, segment, pieces, skip, rest, clear)| Act::Commit {
                file,
                segment,
                pieces,
                skip,
                rest,
                clear,
            }),
        3 => (byte(), byte(), byte(), any::<bool>()).prop_map(|(a, b, c, d)| Act::Punch(a, b, c, d)),
        6 => (any::<[u8; 2]>(), any::<[u8; 2]>(), byte(), any::<bool>())
            .prop_map(|(a, b, c, d)| Act::Copy(a, b, c, d)),
        1 => Just(Act::NewSegment),
        1 => (byte(), byte()).prop_map(|(a, b)| Act::Seal(a, b)),
        2 => byte().prop_map(Act::Reclaim),
        2 => (byte(), byte()).prop_map(|(a, b)| Act::Release(a, b)),
        1 => byte().prop_map(Act::EndSession),
        1 => byte().prop_map(Act::OpenSession),
        1 => byte().prop_map(Act::Reap),
        2 => byte().prop_map(Act::DropSegment),
        1 => prop_oneof![Just(Act::RaiseNumbers), Just(Act::CreateAgain)],
    ]
}

/// Acts on the data of a few files of the root, so that three and more come to share what they name.
pub(super) fn data_act() -> impl Strategy<Value = Act> {
    let byte = || 0..240_u8;
    prop_oneof![
        1 => (Just(0), 0..4_u8, Just(0)).prop_map(|(a, b, c)| Act::Make(a, b, c)),
        1 => (Just(0), byte(), byte()).prop_map(|(a, b, c)| Act::Unlink(a, b, c)),
        1 => (byte(), 0..40_000_u32, Just(true)).prop_map(|(a, b, c)| Act::Resize(a, b, c)),
        3 => (byte(), byte(), prop::collection::vec((0..3_u8, 1..4_u8), 1..4)).prop_map(
            |(file, segment, pieces)| Act::Commit {
                file,
                segment,
                pieces,
                skip: 0,
                rest: 0,
                clear: false,
            }
        ),
        2 => (byte(), byte(), byte()).prop_map(|(a, b, c)| Act::Punch(a, b, c, false)),
        8 => (any::<[u8; 2]>(), any::<[u8; 2]>(), byte())
            .prop_map(|(a, b, c)| Act::Copy(a, b, c, false)),
        1 => byte().prop_map(Act::Reclaim),
    ]
}

/// Any inode up to the next one, most often one that is there.
fn ino(model: &Model, choice: u8, want: impl Fn(&What) -> bool) -> Ino {
    let mut there = model.nodes.iter().filter(|(_, node)| want(&node.what));
    let count = there.clone().count();
    if choice < 245 && count > 0 {
        return Ino(*there.nth(usize::from(choice) % count).unwrap().0);
    }
    Ino(u64::from(choice) % 30)
}

fn any_ino(model: &Model, choice: u8) -> Ino {
    ino(model, choice, |_| true)
}

fn directory(model: &Model, choice: u8) -> Ino {
    ino(model, choice, |what| matches!(what, What::Directory(_)))
}

fn file(model: &Model, choice: u8) -> Ino {
    ino(model, choice, |what| matches!(what, What::File(_)))
}

/// A name that is there, most often, with its directory.
fn entry(model: &Model, directory_choice: u8, choice: u8) -> (Ino, Vec<u8>) {
    let parent = directory(model, directory_choice);
    if let Some(What::Directory(children)) = model.nodes.get(&parent.0).map(|node| &node.what) {
        if choice < 230 && !children.is_empty() {
            let mut names = children.keys();
            let name = names.nth(usize::from(choice) % children.len()).unwrap();
            return (parent, name.clone());
        }
    }
    (parent, name(choice))
}

fn openers(choice: u8) -> Openers {
    Openers::Named(match choice % 5 {
        0 => Vec::new(),
        1 => vec![SessionId(u64::from(choice / 5 % 3) + 1)],
        // A session that is not there is nobody.
        2 => vec![SessionId(3), SessionId(2), SessionId(3), SessionId(99)],
        other => return Openers::All { own: other == 3 },
    })
}

/// Most often nothing, or the counter that the inode has, else another one.
fn expected(model: &Model, ino: Ino, choice: u8) -> Option<u64> {
    let change = model.nodes.get(&ino.0).map_or(0, |node| node.change);
    match choice % 8 {
        0..=4 => None,
        5 | 6 => Some(change),
        _ => Some(change.wrapping_sub(1)),
    }
}

fn resolve_names(model: &Model, act: &Act) -> Option<Operation> {
    Some(match act {
        Act::Make(parent, label, kind) => Operation::Make(Make {
            parent: directory(model, *parent),
            name: name(*label),
            mode: [0o755, 0o2755, 0o6711, 0o644][usize::from(kind / 16 % 4)],
            uid: 5,
            gid: 6,
            node: match kind % 12 {
                0..=4 => NewNode::File,
                5..=8 => NewNode::Directory,
                9 => NewNode::Fifo,
                10 => NewNode::CharacterDevice(0x501),
                _ => NewNode::Socket,
            },
        }),
        Act::MakeTemporary(parent, mode) => Operation::MakeTemporary(MakeTemporary {
            parent: directory(model, *parent),
            mode: [0o600, 0o6755][usize::from(mode % 2)],
            uid: 9,
            gid: 10,
        }),
        Act::Symlink(parent, label, length) => Operation::Symlink {
            parent: directory(model, *parent),
            name: name(*label),
            target: vec![b't'; usize::from(*length) % 9],
            uid: 1,
            gid: 2,
        },
        Act::Link(target, parent, label) => Operation::Link {
            ino: any_ino(model, *target),
            parent: directory(model, *parent),
            name: name(*label),
        },
        Act::Unlink(parent, label, holders) | Act::Rmdir(parent, label, holders) => {
            let (parent, name) = entry(model, *parent, *label);
            let openers = openers(*holders);
            match act {
                Act::Unlink(..) => Operation::Unlink {
                    parent,
                    name,
                    openers,
                },
                _ => Operation::Rmdir {
                    parent,
                    name,
                    openers,
                },
            }
        }
        Act::Rename([from, label, to, new_label], mode, holders) => {
            let (parent, name) = entry(model, *from, *label);
            let (new_parent, new_name) = match mode / 6 % 3 {
                0 => (directory(model, *to), self::name(*new_label)),
                _ => entry(model, *to, *new_label),
            };
            Operation::Rename(Rename {
                parent,
                name,
                new_parent,
                new_name,
                mode: match mode % 6 {
                    0 | 1 => RenameMode::Replace,
                    2 => RenameMode::NoReplace,
                    3 => RenameMode::Exchange,
                    other => RenameMode::Whiteout(Whiteout {
                        no_replace: other == 4,
                        uid: 7,
                        gid: 8,
                    }),
                },
                openers: openers(*holders),
            })
        }
        _ => return None,
    })
}

fn resolve_access(model: &Model, act: &Act) -> Option<Operation> {
    let Act::Access(target, time) = act else {
        return None;
    };
    let atime = Time {
        seconds: i64::from(*time),
        nanoseconds: 2,
    };
    let ino = any_ino(model, *target);
    Some(Operation::SetAccessTime { ino, atime })
}

fn resolve_attributes(model: &Model, act: &Act) -> Option<Operation> {
    let mut set = SetAttributes::default();
    match act {
        Act::SetMode(target, mode, clear) => {
            set.ino = any_ino(model, *target);
            set.mode = Some(mode & 0o7777);
            set.clear_privileges = *clear;
        }
        Act::SetOwner(target, owner, clear) => {
            set.ino = any_ino(model, *target);
            set.uid = Some(u32::from(*owner));
            set.gid = (owner % 2 == 0).then_some(9);
            set.expected = expected(model, set.ino, owner / 2);
            set.clear_privileges = *clear;
        }
        Act::SetTimes(target, time) => {
            set.ino = any_ino(model, *target);
            let to = Time {
                seconds: -i64::from(*time),
                nanoseconds: 999_999_999,
            };
            set.atime = Some(SetTime::To(to));
            set.mtime = (time % 2 == 0).then_some(SetTime::Now);
        }
        Act::Resize(target, size, right) => {
            set.ino = file(model, *target);
            let size = u64::from(*size);
            set.size = Some(size);
            let open = model.segments.iter().find(|(_, layer)| !layer.sealed);
            let old = model.nodes.get(&set.ino.0);
            let cuts = old.is_some_and(|node| match &node.what {
                What::File(blocks) => {
                    size < node.size() && size % BLOCK != 0 && blocks.contains_key(&(size / BLOCK))
                }
                _ => false,
            });
            if let (Some((segment, layer)), true) = (open, cuts == *right) {
                set.expected = expected(model, set.ino, (size / 7) as u8);
                set.tail = Some(Tail {
                    segment: SegmentId(*segment),
                    address: layer.end * BLOCK,
                    epoch: size % 5,
                });
            }
        }
        Act::SetXattr(target, label, length, mode) => {
            let lengths = [0, 1, 10, 30_000, 40_000, 65_536, 65_537];
            return Some(Operation::SetXattr {
                ino: any_ino(model, *target),
                name: XATTRS[usize::from(*label) % XATTRS.len()].to_vec(),
                value: vec![b'v'; lengths[usize::from(*length) % lengths.len()]],
                mode: [XattrMode::Set, XattrMode::Create, XattrMode::Replace]
                    [usize::from(*mode) % 3],
            });
        }
        Act::RemoveXattr(target, label) => {
            return Some(Operation::RemoveXattr {
                ino: any_ino(model, *target),
                name: XATTRS[usize::from(*label) % XATTRS.len()].to_vec(),
            });
        }
        _ => return None,
    }
    Some(Operation::SetAttributes(set))
}

fn segment(model: &Model, choice: u8) -> SegmentId {
    let open = model.segments.iter().filter(|(_, layer)| !layer.sealed);
    let count = open.clone().count();
    match choice {
        240.. => SegmentId(u64::from(choice % 5)),
        _ if count == 0 => SegmentId(1),
        _ => SegmentId(*open.clone().nth(usize::from(choice) % count).unwrap().0),
    }
}

/// Extents with holes before them, from a block of a segment on; and where they end in the file.
fn lay_out(pieces: &[(u8, u8)], segment: SegmentId, mut address: u64) -> (Vec<Extent>, u64) {
    let (mut extents, mut offset) = (Vec::new(), 0);
    for (hole, count) in pieces {
        offset += u64::from(*hole);
        extents.push(Extent {
            offset: offset * BLOCK,
            length: u64::from(*count) * BLOCK,
            segment,
            address: address * BLOCK,
            epoch: (offset + address) % 5,
        });
        offset += u64::from(*count);
        address += u64::from(*count);
    }
    (extents, offset * BLOCK)
}

fn resolve_data(model: &Model, act: &Act) -> Option<Operation> {
    Some(match act {
        Act::Commit {
            file: target,
            segment: choice,
            pieces,
            skip,
            rest,
            clear,
        } => {
            let segment = segment(model, *choice);
            let end = model.segments.get(&segment.0).map_or(0, |layer| layer.end);
            // Behind the end, behind a gap, or where it may be a gap, or not.
            let address = match skip % 4 {
                0 | 1 => end,
                2 => end + u64::from(skip / 4 % 3),
                _ => u64::from(skip / 4).min(end),
            };
            let (extents, end) = lay_out(pieces, segment, address);
            let size = end.saturating_sub(u64::from(*rest) % 5000);
            let ino = file(model, *target);
            Operation::Commit(Commit {
                ino,
                expected: expected(model, ino, (rest / 5) as u8),
                extents,
                size,
                mtime: Time {
                    seconds: i64::from(*rest),
                    nanoseconds: 1,
                },
                clear_privileges: *clear,
            })
        }
        Act::Punch(target, offset, length, extend) => {
            let cut = if length % 5 == 0 { 100 } else { 0 };
            Operation::Punch(Punch {
                ino: file(model, *target),
                offset: u64::from(offset % 12) * BLOCK,
                length: (u64::from(length % 6) * BLOCK).saturating_sub(cut),
                extend: *extend,
                clear_privileges: *extend,
            })
        }
        Act::Copy([from, to], [from_offset, to_offset], length, clear) => {
            let from = file(model, *from);
            let size = model.nodes.get(&from.0).map_or(0, |node| node.size());
            Operation::CopyRange(CopyRange {
                from,
                from_offset: u64::from(from_offset % 8) * BLOCK + u64::from(*from_offset == 77),
                to: file(model, *to),
                to_offset: u64::from(to_offset % 10) * BLOCK,
                length: match length % 4 {
                    0 => size,
                    _ => u64::from(length % 9) * BLOCK,
                },
                clear_privileges: *clear,
            })
        }
        _ => return None,
    })
}

fn resolve_space(model: &Model, records: &Map, act: &Act) -> Option<Operation> {
    Some(match act {
        Act::NewSegment => Operation::NewSegment,
        Act::Seal(choice, more) => {
            let segment = segment(model, *choice);
            let end = model.segments.get(&segment.0).map_or(0, |layer| layer.end);
            Operation::SealSegment {
                segment,
                length: (end + u64::from(more % 3)) * BLOCK,
            }
        }
        Act::Reclaim(choice) => {
            let freed = all_freed(records);
            let found = freed.get(usize::from(*choice) % freed.len().max(1))?;
            Operation::Reclaimed {
                segment: found.segment,
                address: found.address,
                length: found.length,
            }
        }
        Act::DropSegment(choice) => {
            let sealed = model.segments.iter().filter(|(_, layer)| layer.sealed);
            let count = sealed.clone().count();
            let found = sealed.clone().nth(usize::from(*choice) % count.max(1));
            let segment = match found {
                Some((id, _)) if *choice < 200 => SegmentId(*id),
                _ => segment(model, *choice),
            };
            Operation::DropSegment { segment }
        }
        _ => return None,
    })
}

fn resolve_sessions(model: &Model, act: &Act) -> Option<Operation> {
    Some(match act {
        Act::Release(target, choice) => Operation::ReleaseOrphan {
            ino: any_ino(model, *target),
            session: any_session(model, *choice),
        },
        Act::EndSession(choice) => Operation::EndSession {
            session: any_session(model, *choice),
        },
        Act::OpenSession(choice) => open_session(u64::from(choice % 4) + 1),
        Act::Reap(target) => Operation::Reap {
            ino: any_ino(model, *target),
            limit: u32::from(target % 3),
        },
        Act::RaiseNumbers => Operation::RaiseNumbers,
        Act::CreateAgain => Operation::CreateFilesystem {
            mode: 0o700,
            uid: 1,
            gid: 1,
        },
        _ => return None,
    })
}

/// One that is open, most often, or one that was there first.
fn any_session(model: &Model, choice: u8) -> SessionId {
    let mut open = model.sessions.iter();
    let count = model.sessions.len();
    match choice {
        0..230 if count > 0 => SessionId(*open.nth(usize::from(choice) % count).unwrap()),
        _ => SessionId(SESSIONS[usize::from(choice) % SESSIONS.len()]),
    }
}

/// The session that asks: the one that writes the segments, most often.
pub(super) fn session(model: &Model, operation: &Operation, choice: u8) -> (SessionId, u16) {
    let slot = u16::from(choice % 2);
    let writer = match operation {
        _ if operation.is_of_leader() => return (SessionId::NONE, 0),
        Operation::Commit(Commit { extents, .. }) if choice < 240 => {
            let extent = extents.first();
            extent.and_then(|extent| model.segments.get(&extent.segment.0))
        }
        Operation::SetAttributes(set) if choice < 240 => set
            .tail
            .and_then(|tail| model.segments.get(&tail.segment.0)),
        Operation::SealSegment { segment, .. } => model.segments.get(&segment.0),
        _ => None,
    };
    let maker = match operation {
        // A file without a name is most often linked by the session that made it.
        Operation::Link { ino, .. } if choice < 200 => {
            let node = model.nodes.get(&ino.0);
            node.and_then(|node| node.openers.first().copied())
        }
        _ => None,
    };
    let id = maker.or(writer.map(|layer| layer.owner));
    (id.map_or(any_session(model, choice / 2), SessionId), slot)
}

/// The operation that an act means now; none if there is nothing to do it to.
pub(super) fn resolve(model: &Model, records: &Map, act: &Act) -> Option<Operation> {
    resolve_names(model, act)
        .or_else(|| resolve_attributes(model, act))
        .or_else(|| resolve_access(model, act))
        .or_else(|| resolve_data(model, act))
        .or_else(|| resolve_space(model, records, act))
        .or_else(|| resolve_sessions(model, act))
}
