//! What health tells of damaged data: by the names that people gave, not by layers.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use fabric::ScrubStatus;
use fabric_store::api::ScrubFinding;
use fabric_types::block::BLOCK_BYTES;
use fabric_types::ids::CHUNK_BYTES;
use meta::{Filesystem, LayerId, SegmentOf, Volume};
use namespace::{FilesystemId, SegmentId};
use service::code::Code;
use service::found::Found;

/// What becomes of data that have no other copy.
const RESTORE: &str =
    "reading them fails until they are written again: write them, or restore them from a backup";
/// Offsets of a volume that are told; of more only how many.
const OFFSETS_TOLD: usize = 4;
/// Files that are told; of more only how many.
const FILES_TOLD: usize = 4;

/// A block of a segment: its filesystem, segment and address.
pub type SegmentBlock = (FilesystemId, SegmentId, u64);

/// The place of a damaged block in a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FilePlace {
    /// Its path within the filesystem, fit to be shown; or by what number a guest finds it.
    pub file: Arc<str>,
    /// Bytes from its beginning.
    pub offset: u64,
}

/// The files of damaged blocks. Of a block that no file is known to use none; a block that was not looked for
/// is not here.
pub type FilesOfBlocks = BTreeMap<SegmentBlock, Vec<FilePlace>>;

/// Known files of damaged blocks.
#[derive(Debug, Clone, Default)]
pub struct KnownFiles {
    /// The files, by block.
    pub files: Arc<FilesOfBlocks>,
    /// More is about to be known.
    pub is_awaited: bool,
}

/// Whose each layer is, and which files are damaged.
#[derive(Debug, Default)]
pub struct Owners {
    layers: BTreeMap<LayerId, LayerOwner>,
    files: KnownFiles,
}

/// Whose a layer is. What is in none of them is being deleted, or was.
#[derive(Debug, Clone)]
enum LayerOwner {
    Volume(String),
    Segment { filesystem: String, of: SegmentOf },
}

/// Whose a block is.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum Owner {
    Volume(String),
    File {
        filesystem: String,
        file: Arc<str>,
    },
    /// A file, which is not known yet.
    SomeFile {
        filesystem: String,
    },
    /// No file is known to use it.
    Unused {
        filesystem: String,
    },
    Nobody,
}

impl Owners {
    /// Owners of the layers of these volumes, some of which are segments of these filesystems.
    pub fn new(volumes: &[Volume], filesystems: &[Filesystem]) -> Self {
        let mut layers = BTreeMap::new();
        for volume in volumes {
            let owner = match volume.segment {
                None => Some(LayerOwner::Volume(volume.name.to_string())),
                Some(of) => filesystems
                    .iter()
                    .find(|filesystem| filesystem.id == of.filesystem)
                    .map(|filesystem| LayerOwner::Segment {
                        filesystem: filesystem.name.to_string(),
                        of,
                    }),
            };
            let owned = volume.layers.iter().zip(std::iter::repeat(owner));
            layers.extend(owned.filter_map(|(layer, owner)| Some((*layer, owner?))));
        }
        let files = KnownFiles::default();
        Self { layers, files }
    }

    /// Those of the blocks that lie in segments.
    pub fn segment_blocks(&self, blocks: &[ScrubFinding]) -> BTreeSet<SegmentBlock> {
        let in_segment = |block: &ScrubFinding| match self.layers.get(&block.layer)? {
            LayerOwner::Segment { of, .. } => Some((of.filesystem, of.segment, offset_of(block))),
            LayerOwner::Volume(_) => None,
        };
        blocks.iter().filter_map(in_segment).collect()
    }

    /// Says which files blocks of segments belong to.
    pub fn set_files(&mut self, files: KnownFiles) {
        self.files = files;
    }

    /// Whose a block is, and where in that. Several files may share one.
    fn of(&self, block: &ScrubFinding) -> Vec<(Owner, u64)> {
        let offset = offset_of(block);
        let (filesystem, of) = match self.layers.get(&block.layer) {
            None => return vec![(Owner::Nobody, offset)],
            Some(LayerOwner::Volume(name)) => return vec![(Owner::Volume(name.clone()), offset)],
            Some(LayerOwner::Segment { filesystem, of }) => (filesystem.clone(), of),
        };
        match self.files.files.get(&(of.filesystem, of.segment, offset)) {
            None => vec![(Owner::SomeFile { filesystem }, offset)],
            Some(places) if places.is_empty() => vec![(Owner::Unused { filesystem }, offset)],
            Some(places) => places
                .iter()
                .map(|place| {
                    let (filesystem, file) = (filesystem.clone(), place.file.clone());
                    (Owner::File { filesystem, file }, place.offset)
                })
                .collect(),
        }
    }

    /// Whether there are files among the owners that are not known.
    fn is_nameless(&self, blocks: &[ScrubFinding]) -> bool {
        let mut owners = blocks.iter().flat_map(|block| self.of(block));
        owners.any(|(owner, _)| matches!(owner, Owner::SomeFile { .. }))
    }

    /// Blocks by their owners, like "volume 'web' at bytes 0 and 4096".
    fn describe(&self, blocks: &[ScrubFinding]) -> String {
        let mut offsets: BTreeMap<Owner, Vec<u64>> = BTreeMap::new();
        for (owner, offset) in blocks.iter().flat_map(|block| self.of(block)) {
            offsets.entry(owner).or_default().push(offset);
        }
        let (mut described, mut files) = (Vec::new(), 0);
        for (owner, mut offsets) in offsets {
            offsets.sort_unstable();
            offsets.dedup();
            files += usize::from(owner.is_file());
            if !owner.is_file() || files <= FILES_TOLD {
                described.push(owner.describe(&offsets));
            }
        }
        if files > FILES_TOLD {
            described.push(count(files - FILES_TOLD, "more file"));
        }
        described.join(", ")
    }
}

impl Owner {
    fn is_file(&self) -> bool {
        matches!(self, Self::File { .. })
    }

    fn describe(&self, offsets: &[u64]) -> String {
        let blocks = count(offsets.len(), "block");
        match self {
            Self::Volume(name) => format!("volume '{name}' at {}", bytes(offsets)),
            Self::File { filesystem, file } => {
                format!(
                    "file {file} of filesystem '{filesystem}' at {}",
                    bytes(offsets)
                )
            }
            Self::SomeFile { filesystem } => {
                format!("files of filesystem '{filesystem}' ({blocks})")
            }
            Self::Unused { filesystem } => {
                format!("what no file of filesystem '{filesystem}' is known to use ({blocks})")
            }
            Self::Nobody => format!("what is being deleted ({blocks})"),
        }
    }
}

/// Bytes from the beginning of its layer.
fn offset_of(block: &ScrubFinding) -> u64 {
    u64::from(block.chunk) * CHUNK_BYTES + u64::from(block.block) * BLOCK_BYTES as u64
}

fn bytes(offsets: &[u64]) -> String {
    let told = &offsets[..offsets.len().min(OFFSETS_TOLD)];
    let words: Vec<String> = told.iter().map(u64::to_string).collect();
    let noun = match offsets.len() {
        1 => "byte",
        _ => "bytes",
    };
    let more = match offsets.len() - told.len() {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    format!("{noun} {}{more}", words.join(", "))
}

/// What a human must act upon. What was written again, by a guest or from other nodes' replicas, is no
/// problem any more.
pub fn told(path: &str, scrub: &ScrubStatus, owners: &Owners) -> Option<Found> {
    if scrub.findings.is_empty() {
        return scrub.is_more.then(|| {
            let what = format!("device {path}: more bad blocks were found than could be listed");
            let doing = "`penstock device scrub start` lists those that are left";
            Found::new(Code::DataDamaged, path, what, doing)
        });
    }
    let mut blocks = count(scrub.findings.len(), "bad block");
    if scrub.is_more {
        blocks.push_str(" and more, which the next scrub lists");
    }
    let whose = owners.describe(&scrub.findings);
    let (what, advice) = match scrub.lost.len() {
        0 => (
            format!("device {path}: {blocks}: {whose}"),
            "they are written again from replicas that are in sync; replace the device if more follow",
        ),
        lost => (
            format!("device {path}: {blocks}, {lost} that no other replica could give: {whose}"),
            RESTORE,
        ),
    };
    let mut found = Found::new(Code::DataDamaged, path, what, advice);
    found.is_preliminary = owners.files.is_awaited && owners.is_nameless(&scrub.findings);
    Some(found)
}

fn count(number: usize, noun: &str) -> String {
    match number {
        1 => format!("1 {noun}"),
        _ => format!("{number} {noun}s"),
    }
}

#[cfg(test)]
mod tests {
    use fabric_types::ids::Version;
    use namespace::{FilesystemId, SegmentId};

    use super::*;

    fn finding(layer: u64, chunk: u32, block: u32) -> ScrubFinding {
        ScrubFinding {
            layer: LayerId(layer),
            chunk,
            block,
            version: Version(0),
            device_offset: 0,
        }
    }

    const HOME: SegmentOf = SegmentOf {
        filesystem: FilesystemId(1),
        segment: SegmentId(5),
    };

    fn owners() -> Owners {
        let segment = LayerOwner::Segment {
            filesystem: "home".to_owned(),
            of: HOME,
        };
        Owners {
            layers: BTreeMap::from([
                (LayerId(1), LayerOwner::Volume("web".to_owned())),
                (LayerId(2), segment),
            ]),
            files: KnownFiles::default(),
        }
    }

    #[test]
    fn repaired_block_is_no_problem_and_a_lost_one_needs_a_backup() {
        let mut scrub = ScrubStatus {
            bad_blocks: 3,
            repaired_blocks: 1,
            findings: vec![finding(1, 0, 3), finding(1, 1, 0)],
            ..ScrubStatus::default()
        };
        let line = |scrub: &ScrubStatus| {
            let found = told("/dev/sdx", scrub, &owners())?;
            Some(format!("{}; {}", found.problem.what, found.problem.doing))
        };
        let told = line(&scrub).unwrap();
        assert!(
            told.starts_with(
                "device /dev/sdx: 2 bad blocks: volume 'web' at bytes 12288, 4194304; they are written"
            ),
            "{told}"
        );
        scrub.lost = vec![finding(1, 0, 3)];
        let told = line(&scrub).unwrap();
        assert!(
            told.contains("1 that no other replica could give: volume 'web'"),
            "{told}"
        );
        assert!(told.contains("backup"), "{told}");
        assert!(told.contains("until they are written again"), "{told}");
        scrub.is_more = true;
        let told = line(&scrub).unwrap();
        assert!(
            told.contains("2 bad blocks and more, which the next scrub lists"),
            "{told}"
        );
        scrub.findings.clear();
        let told = line(&scrub).unwrap();
        assert!(told.contains("device scrub start"), "{told}");
        scrub.is_more = false;
        assert_eq!(line(&scrub), None);
    }

    #[test]
    fn lost_blocks_are_told_by_owner_and_not_all_of_them() {
        let blocks: Vec<ScrubFinding> = (0..7)
            .rev()
            .map(|block| finding(1, 0, block))
            .chain([finding(2, 9, 9), finding(2, 9, 8), finding(7, 0, 0)])
            .collect();
        assert_eq!(
            owners().describe(&blocks),
            "volume 'web' at bytes 0, 4096, 8192, 12288 and 3 more, files of filesystem 'home' (2 blocks), \
             what is being deleted (1 block)"
        );
    }

    #[test]
    fn damaged_files_are_told_by_path_and_offset() {
        let place = |file: &str, offset| FilePlace {
            file: file.into(),
            offset,
        };
        let block = |block| (HOME.filesystem, HOME.segment, block * BLOCK_BYTES as u64);
        let found = [
            finding(2, 0, 0),
            finding(2, 0, 1),
            finding(2, 0, 2),
            finding(2, 0, 3),
        ];
        let mut owners = owners();
        let wanted = owners.segment_blocks(&[&found[..], &[finding(1, 0, 0)]].concat());
        assert_eq!(wanted, (0..4).map(block).collect());
        let known = |files: &[(SegmentBlock, Vec<FilePlace>)]| KnownFiles {
            files: Arc::new(files.iter().cloned().collect()),
            is_awaited: true,
        };
        owners.set_files(known(&[
            (
                block(0),
                vec![place("'/a'", 8192), place("with inode number 9", 0)],
            ),
            (block(1), vec![place("'/a'", 0)]),
            (block(2), Vec::new()),
        ]));
        assert_eq!(
            owners.describe(&found),
            "file '/a' of filesystem 'home' at bytes 0, 8192, file with inode number 9 of filesystem 'home' \
             at byte 0, files of filesystem 'home' (1 block), what no file of filesystem 'home' is \
             known to use (1 block)"
        );
        let is_preliminary = |found: &[ScrubFinding], owners: &Owners| {
            let findings = found.to_vec();
            let scrub = ScrubStatus {
                findings,
                ..ScrubStatus::default()
            };
            told("/dev/sdx", &scrub, owners).unwrap().is_preliminary
        };
        assert!(is_preliminary(&found, &owners), "one has no name yet");
        assert!(!is_preliminary(&found[..3], &owners));
        let many = (0..7).map(|file| place(&format!("'/{file}'"), 0)).collect();
        owners.set_files(known(&[(block(0), many)]));
        let told = owners.describe(&found[..1]);
        assert!(
            told.ends_with("file '/3' of filesystem 'home' at byte 0, 3 more files"),
            "{told}"
        );
    }
}
