//! What health tells of damaged data: by the names that people gave, not by layers.

use std::collections::BTreeMap;

use fabric::ScrubStatus;
use fabric_store::api::ScrubFinding;
use fabric_types::block::BLOCK_BYTES;
use fabric_types::ids::CHUNK_BYTES;
use meta::{Filesystem, LayerId, Volume};

use super::health::code::Code;
use super::monitor::Found;

/// What becomes of data that have no other copy.
const RESTORE: &str =
    "reading them fails until they are written again: write them, or restore them from a backup";
/// Offsets of a volume that are told; of more only how many.
const OFFSETS_TOLD: usize = 4;

/// Whose each layer is.
#[derive(Debug, Default)]
pub struct Owners(BTreeMap<LayerId, Owner>);

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum Owner {
    Volume(String),
    Filesystem(String),
    /// What is being deleted, or was.
    Nobody,
}

impl Owners {
    pub fn new(volumes: &[Volume], filesystems: &[Filesystem]) -> Self {
        let mut owners = BTreeMap::new();
        for volume in volumes {
            let owner = match &volume.segment {
                None => Owner::Volume(volume.name.to_string()),
                Some(of) => filesystems
                    .iter()
                    .find(|filesystem| filesystem.id == of.filesystem)
                    .map_or(Owner::Nobody, |filesystem| {
                        Owner::Filesystem(filesystem.name.to_string())
                    }),
            };
            owners.extend(volume.layers.iter().map(|layer| (*layer, owner.clone())));
        }
        Self(owners)
    }

    /// Blocks by their owners, like "volume 'web' at bytes 0 and 4096".
    fn describe(&self, blocks: &[ScrubFinding]) -> String {
        let mut offsets: BTreeMap<Owner, Vec<u64>> = BTreeMap::new();
        for block in blocks {
            let owner = self.0.get(&block.layer).cloned().unwrap_or(Owner::Nobody);
            let offset =
                u64::from(block.chunk) * CHUNK_BYTES + u64::from(block.block) * BLOCK_BYTES as u64;
            offsets.entry(owner).or_default().push(offset);
        }
        let blocks = |offsets: &[u64]| count(offsets.len(), "block");
        let described = offsets.into_iter().map(|(owner, mut offsets)| match owner {
            Owner::Volume(name) => {
                offsets.sort_unstable();
                offsets.dedup();
                format!("volume '{name}' at {}", bytes(&offsets))
            }
            // Where in a segment says nothing to anybody.
            Owner::Filesystem(name) => {
                format!("files of filesystem '{name}' ({})", blocks(&offsets))
            }
            Owner::Nobody => format!("what is being deleted ({})", blocks(&offsets)),
        });
        described.collect::<Vec<_>>().join(", ")
    }
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
pub fn told(path: &str, scrub: &ScrubStatus, owners: &Owners, has_peers: bool) -> Option<Found> {
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
    let (what, advice) = match (has_peers, scrub.stuck) {
        (true, 0) => (
            format!("device {path}: {blocks}: {whose}"),
            "they are written again from replicas that are in sync; replace the device if more follow",
        ),
        (true, stuck) => (
            format!("device {path}: {blocks}, {stuck} that no other replica could give: {whose}"),
            "unless one can yet, restore what is named from a backup",
        ),
        (false, _) => (format!("device {path}: {blocks}: {whose}"), RESTORE),
    };
    Some(Found::new(Code::DataDamaged, path, what, advice))
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

    fn owners() -> Owners {
        Owners(BTreeMap::from([
            (LayerId(1), Owner::Volume("web".to_owned())),
            (LayerId(2), Owner::Filesystem("home".to_owned())),
        ]))
    }

    #[test]
    fn repaired_block_is_no_problem_and_a_lost_one_needs_a_backup() {
        let mut scrub = ScrubStatus {
            bad_blocks: 3,
            repaired_blocks: 1,
            findings: vec![finding(1, 0, 3), finding(1, 1, 0)],
            ..ScrubStatus::default()
        };
        let line = |scrub: &ScrubStatus, has_peers| {
            let found = told("/dev/sdx", scrub, &owners(), has_peers)?;
            Some(format!("{}; {}", found.problem.what, found.problem.doing))
        };
        let told = line(&scrub, true).unwrap();
        assert!(
            told.starts_with(
                "device /dev/sdx: 2 bad blocks: volume 'web' at bytes 12288, 4194304; they are written"
            ),
            "{told}"
        );
        scrub.stuck = 1;
        let told = line(&scrub, true).unwrap();
        assert!(
            told.contains("1 that no other replica could give: volume 'web'"),
            "{told}"
        );
        assert!(told.contains("backup"), "{told}");
        let told = line(&scrub, false).unwrap();
        assert!(told.contains("until they are written again"), "{told}");
        scrub.is_more = true;
        let told = line(&scrub, false).unwrap();
        assert!(
            told.contains("2 bad blocks and more, which the next scrub lists"),
            "{told}"
        );
        scrub.findings.clear();
        let told = line(&scrub, false).unwrap();
        assert!(told.contains("device scrub start"), "{told}");
        scrub.is_more = false;
        assert_eq!([line(&scrub, true), line(&scrub, false)], [None, None]);
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
}
