//! Which files damaged blocks of segments belong to. The namespace keeps no way back from an address to a
//! file, so the leader of the filesystem's group looks through all of it. That is done when there is
//! something new to find, and once in a while, as files are renamed and deleted.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use api::failure::{Failure, Kind, Result};
use meta::{FilesystemState, Filesystems};
use namespace::{
    Answer, BLOCKS_MAX, FilesystemId, Ino, Named, NamedBlock, Query, SearchFrom, SegmentId,
};
use service::BoxFuture;
use storage::FileNames;
use storage::damage::{FilePlace, FilesOfBlocks, KnownFiles, SegmentBlock};
use tokio::sync::watch;

use crate::filesystems::FilesystemService;

use crate::shown::{ask, unfit};

/// Whoever asks waits for so long until what is damaged has names.
const NAMES_WAIT_MAX: Duration = Duration::from_millis(500);
/// Damage whose files are not known is not told as an event for so long.
const NAMES_AWAITED_MAX: Duration = Duration::from_secs(60);
/// What was found is looked for anew after this long.
const NAMES_AGE_MAX: Duration = Duration::from_secs(300);
/// Pause between searches, and how many times as long as the last search it is.
const PAUSE: Duration = Duration::from_secs(10);
const PAUSE_FACTOR: u32 = 10;
/// A search that takes longer is given up.
const SEARCH_MAX: Duration = Duration::from_secs(120);
/// Records that a step looks at, which guests' questions wait for.
const STEP_RECORDS: u32 = 2048;
/// Places of blocks in files that are noted. Files that share blocks may have any number.
const PLACES_MAX: usize = 4096;
/// Limits on names, which guests choose. Beyond them a file is told by its number: files of a filesystem that
/// are looked up, the length and depth of a path, and the time for one file.
const FILES_MAX: usize = 32;
const PATH_BYTES_MAX: usize = 1024;
const LEVELS_MAX: usize = 64;
const FILE_WAIT_MAX: Duration = Duration::from_secs(3);

/// Searches for files of damaged blocks, and what the last one found.
#[derive(Debug, Default)]
pub struct DamagedFiles {
    search: Mutex<SearchState>,
    found: watch::Sender<Arc<FilesOfBlocks>>,
}

#[derive(Debug, Default)]
struct SearchState {
    is_under_way: bool,
    last: Option<LastSearch>,
    /// Since when there are blocks whose files are not known.
    unknown_since: Option<Instant>,
}

#[derive(Debug)]
struct LastSearch {
    ended: Instant,
    took: Duration,
    blocks: BTreeSet<SegmentBlock>,
    failed: bool,
}

impl SearchState {
    fn is_due(&self, blocks: &BTreeSet<SegmentBlock>, now: Instant) -> bool {
        let Some(last) = &self.last else {
            return !self.is_under_way;
        };
        let pause = match last.failed || !blocks.is_subset(&last.blocks) {
            true => PAUSE,
            false => NAMES_AGE_MAX,
        };
        let pause = pause.max(last.took * PAUSE_FACTOR);
        !self.is_under_way && now.saturating_duration_since(last.ended) >= pause
    }

    fn is_awaited(&mut self, all_known: bool, now: Instant) -> bool {
        if all_known {
            self.unknown_since = None;
            return false;
        }
        let since = *self.unknown_since.get_or_insert(now);
        now.saturating_duration_since(since) < NAMES_AWAITED_MAX
    }
}

impl DamagedFiles {
    fn lock(&self) -> MutexGuard<'_, SearchState> {
        // What a panic leaves half done is a search that is made once more.
        self.search.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_searching(&self) -> bool {
        self.lock().is_under_way
    }
}

/// A search that is under way until this is dropped.
struct UnderWay(Arc<DamagedFiles>);

impl Drop for UnderWay {
    fn drop(&mut self) {
        self.0.lock().is_under_way = false;
    }
}

impl FilesystemService {
    /// The files of these blocks, as far as they are known soon.
    async fn known_files(&self, blocks: &BTreeSet<SegmentBlock>) -> KnownFiles {
        let searches = &self.damaged_files;
        let mut found = searches.found.subscribe();
        if blocks.is_empty() {
            return KnownFiles::default();
        }
        let is_all = |known: &FilesOfBlocks| blocks.iter().all(|block| known.contains_key(block));
        self.search_if_due(blocks);
        let ended = found.wait_for(|found| is_all(found) || !searches.is_searching());
        // What is not known by then is told without names.
        let _ = tokio::time::timeout(NAMES_WAIT_MAX, ended).await.map(drop);
        let files = Arc::clone(&searches.found.borrow());
        let is_awaited = searches.lock().is_awaited(is_all(&files), Instant::now());
        KnownFiles { files, is_awaited }
    }

    fn search_if_due(&self, blocks: &BTreeSet<SegmentBlock>) {
        let files = Arc::clone(&self.damaged_files);
        {
            let mut search = files.lock();
            if !search.is_due(blocks, Instant::now()) {
                return;
            }
            search.is_under_way = true;
        }
        let under_way = UnderWay(Arc::clone(&files));
        let (searches, blocks) = (self.searches(blocks), blocks.clone());
        tokio::spawn(async move {
            let begun = Instant::now();
            let (mut found, mut failed) = (FilesOfBlocks::new(), false);
            for search in searches {
                let id = search.filesystem.id;
                found.extend(search.outcome().await.unwrap_or_else(|| {
                    failed = true;
                    // What was known before is better than nothing.
                    let known = Arc::clone(&files.found.borrow());
                    let of_one = known.iter().filter(|((of, ..), _)| *of == id);
                    of_one
                        .map(|(block, places)| (*block, places.clone()))
                        .collect()
                }));
            }
            files.lock().last = Some(LastSearch {
                ended: Instant::now(),
                took: begun.elapsed(),
                blocks,
                failed,
            });
            // First, so that whoever is woken sees that it has ended.
            drop(under_way);
            files.found.send_replace(Arc::new(found));
        });
    }

    /// A search in each filesystem that is concerned, for as many blocks as are looked for at once.
    fn searches(&self, blocks: &BTreeSet<SegmentBlock>) -> Vec<Search> {
        let map = self.cluster.meta.map();
        let mut wanted: BTreeMap<FilesystemId, Vec<(SegmentId, u64)>> = BTreeMap::new();
        for (filesystem, segment, address) in blocks {
            let of_one = wanted.entry(*filesystem).or_default();
            if of_one.len() < BLOCKS_MAX {
                of_one.push((*segment, *address));
            }
        }
        let is_ready = |one: &&meta::Filesystem| one.state == FilesystemState::Ready;
        let search = |filesystem: &meta::Filesystem| {
            Some(Search {
                blocks: wanted.remove(&filesystem.id)?,
                group: self.cluster.meta.filesystems(filesystem.group),
                filesystem: filesystem.clone(),
            })
        };
        map.filesystems()
            .filter(is_ready)
            .filter_map(search)
            .collect()
    }
}

impl FileNames for FilesystemService {
    fn files_of(&self, blocks: BTreeSet<SegmentBlock>) -> BoxFuture<'_, KnownFiles> {
        Box::pin(async move { self.known_files(&blocks).await })
    }
}

/// A search in one filesystem.
struct Search {
    filesystem: meta::Filesystem,
    group: Filesystems,
    blocks: Vec<(SegmentId, u64)>,
}

impl Search {
    /// What is found in time; nothing if it fails, which is logged.
    async fn outcome(&self) -> Option<FilesOfBlocks> {
        let found = match tokio::time::timeout(SEARCH_MAX, self.run()).await {
            Ok(found) => found,
            Err(_) => Err(Failure::plain(
                Kind::Failed,
                format!("it takes more than {} s", SEARCH_MAX.as_secs()),
            )),
        };
        found
            .inspect_err(|failure| {
                let name = &self.filesystem.name;
                tracing::warn!(filesystem = %name, %failure, "find files of damaged blocks");
            })
            .ok()
    }

    async fn run(&self) -> Result<FilesOfBlocks> {
        let (named, is_whole) = self.named_blocks().await?;
        let inodes: BTreeSet<Ino> = named.iter().map(|block| block.ino).collect();
        let mut files: BTreeMap<Ino, Arc<str>> = BTreeMap::new();
        for (number, ino) in inodes.into_iter().enumerate() {
            let path = match number < FILES_MAX {
                true => tokio::time::timeout(FILE_WAIT_MAX, self.path(ino))
                    .await
                    .ok(),
                false => None,
            };
            files.insert(ino, path.flatten().unwrap_or_else(|| by_number(ino)).into());
        }
        let block = |segment, address| (self.filesystem.id, segment, address);
        // Only a whole search says that no file uses a block.
        let all = self.blocks.iter().filter(|_| is_whole);
        let all = all.map(|(segment, address)| (block(*segment, *address), Vec::new()));
        let mut found: FilesOfBlocks = all.collect();
        for one in named {
            let places = found.entry(block(one.segment, one.address)).or_default();
            places.push(FilePlace {
                file: Arc::clone(&files[&one.ino]),
                offset: one.offset,
            });
        }
        Ok(found)
    }

    /// The blocks that files use, and whether these are all.
    async fn named_blocks(&self) -> Result<(Vec<NamedBlock>, bool)> {
        let (mut named, mut next) = (Vec::new(), Some(SearchFrom::START));
        while let Some(from) = next.filter(|_| named.len() < PLACES_MAX) {
            let query = Query::FilesAt {
                blocks: self.blocks.clone(),
                from,
                max: STEP_RECORDS,
            };
            match self.ask(query).await? {
                Answer::FilesAt(step) => {
                    named.extend(step.found);
                    next = step.next;
                }
                other => return Err(unfit(&other)),
            }
        }
        Ok((named, next.is_none()))
    }

    /// The path of a file that has one name, and no long one.
    async fn path(&self, ino: Ino) -> Option<String> {
        let (mut names, mut bytes, mut child) = (Vec::new(), 0, ino);
        while names.len() < LEVELS_MAX && bytes < PATH_BYTES_MAX {
            // It is gone, or its leader: then it is told by number.
            let Named { parent, name } = self.name(child).await.ok()??;
            bytes += name.len();
            names.push(shown(&name));
            if parent == Ino::ROOT {
                names.reverse();
                return Some(format!("'/{}'", names.join("/")));
            }
            child = parent;
        }
        None
    }

    async fn name(&self, ino: Ino) -> Result<Option<Named>> {
        let mut next = Some(0);
        while let Some(behind) = next {
            let query = Query::NameOf {
                ino,
                behind,
                max: STEP_RECORDS,
            };
            match self.ask(query).await? {
                Answer::NameOf(step) if step.found.is_some() => return Ok(step.found),
                Answer::NameOf(step) => next = step.next,
                other => return Err(unfit(&other)),
            }
        }
        Ok(None)
    }

    async fn ask(&self, query: Query) -> Result<Answer> {
        ask(&self.group, &self.filesystem, query).await
    }
}

/// How a guest finds a file that has no path of its own.
fn by_number(ino: Ino) -> String {
    format!("with inode number {}", ino.0)
}

/// A name as a terminal may show it: guests choose it.
fn shown(name: &[u8]) -> String {
    String::from_utf8_lossy(name).escape_debug().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_search_is_repeated_soon_for_what_is_new_and_never_beside_another() {
        let begin = Instant::now();
        let after = |seconds| begin + Duration::from_secs(seconds);
        let blocks = |count| -> BTreeSet<SegmentBlock> {
            let block = |address| (FilesystemId(1), SegmentId(1), address);
            (0..count).map(block).collect()
        };
        let mut search = SearchState::default();
        assert!(
            search.is_due(&blocks(1), begin),
            "nothing was looked for yet"
        );
        let last = |failed| LastSearch {
            ended: begin,
            took: Duration::from_secs(2),
            blocks: blocks(2),
            failed,
        };
        search.last = Some(last(false));
        assert!(
            !search.is_due(&blocks(3), after(19)),
            "ten times as long as it took"
        );
        assert!(search.is_due(&blocks(3), after(20)));
        for few in [1, 2] {
            assert!(!search.is_due(&blocks(few), after(299)));
            assert!(search.is_due(&blocks(few), after(300)));
        }
        search.last = Some(last(true));
        assert!(search.is_due(&blocks(1), after(20)));
        search.is_under_way = true;
        assert!(!search.is_due(&blocks(9), after(900)));
    }

    #[test]
    fn names_are_awaited_for_a_while_each_time() {
        let begin = Instant::now();
        let after = |seconds| begin + Duration::from_secs(seconds);
        let mut search = SearchState::default();
        assert!(search.is_awaited(false, begin));
        assert!(search.is_awaited(false, after(59)));
        assert!(!search.is_awaited(false, after(60)));
        assert!(!search.is_awaited(true, after(61)));
        assert!(search.is_awaited(false, after(62)));
    }

    #[test]
    fn a_name_that_a_guest_chose_cannot_write_to_the_terminal() {
        assert_eq!(shown(b"a b"), "a b");
        assert_eq!(shown("Größe".as_bytes()), "Größe");
        assert_eq!(shown(b"\x1b[2J\n'"), "\\u{1b}[2J\\n\\'");
        assert_eq!(shown(b"\xff"), "\u{fffd}");
    }
}
