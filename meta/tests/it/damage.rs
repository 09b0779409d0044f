//! Damaged files: one line that names them, and never other metadata than what was written.

use std::path::{Path, PathBuf};

use crate::common::{GIB, open_with_device};
use meta::{MetaConfig, MetaNode, OpenError, Volume, VolumeSpec};

fn files_below(dir: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            files_below(&path, found)
        } else {
            found.push(path)
        }
    }
}

fn copy_dir(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        let target = to.join(path.file_name().unwrap());
        if path.is_dir() {
            copy_dir(&path, &target)
        } else {
            let _ = std::fs::copy(&path, &target).unwrap();
        }
    }
}

/// What opening and reading gives: the volumes, or why not.
async fn look(dir: &Path) -> Result<Vec<Volume>, String> {
    let node = match MetaNode::open(dir, MetaConfig::embedded("test")).await {
        Ok(node) => node,
        Err(error) => {
            let text = error.to_string();
            assert!(
                text.contains(dir.to_str().unwrap()),
                "the directory is named: {text}"
            );
            return Err(text);
        }
    };
    let volumes = node
        .meta()
        .list_volumes()
        .await
        .map_err(|error| error.to_string());
    // A damaged database may fail to close, too; what counts is what it said.
    let _ = node.shutdown().await;
    volumes
}

async fn written(dir: &Path) -> Vec<Volume> {
    let node = open_with_device(dir).await;
    for number in 0..8 {
        node.meta()
            .create_volume(VolumeSpec::new(format!("disk{number}"), GIB))
            .await
            .unwrap();
    }
    let volumes = node.meta().list_volumes().await.unwrap();
    node.shutdown().await.unwrap();
    volumes
}

#[tokio::test]
async fn a_flipped_bit_in_any_file_is_an_error_or_harmless() {
    let good = tempfile::tempdir().unwrap();
    let volumes = written(good.path()).await;
    let mut files = Vec::new();
    files_below(good.path(), &mut files);
    let mut refused = 0;
    for file in files {
        let length = std::fs::metadata(&file).unwrap().len();
        for part in 0..6 {
            if length == 0 {
                continue;
            }
            let dir = tempfile::tempdir().unwrap();
            copy_dir(good.path(), dir.path());
            let damaged = dir.path().join(file.strip_prefix(good.path()).unwrap());
            let mut bytes = std::fs::read(&damaged).unwrap();
            let position = usize::try_from((length - 1) * part / 5).unwrap();
            bytes[position] ^= 0x04;
            std::fs::write(&damaged, bytes).unwrap();
            match look(dir.path()).await {
                Ok(found) => assert_eq!(found, volumes, "{} at {position}", file.display()),
                Err(text) => {
                    assert!(!text.contains('\n'), "one line: {text}");
                    refused += 1;
                }
            }
        }
    }
    assert!(refused > 0, "no damage was ever noticed");
}

#[tokio::test]
async fn a_missing_file_is_named_and_nothing_is_made_anew() {
    let good = tempfile::tempdir().unwrap();
    written(good.path()).await;
    let mut files = Vec::new();
    files_below(good.path(), &mut files);
    let needed = |path: &PathBuf| {
        let name = path.file_name().unwrap().to_str().unwrap();
        name == "CURRENT" || name.starts_with("MANIFEST") || name.ends_with(".sst")
    };
    let needed: Vec<PathBuf> = files.into_iter().filter(needed).collect();
    assert!(needed.len() >= 3, "{needed:?}");
    for file in needed {
        let dir = tempfile::tempdir().unwrap();
        copy_dir(good.path(), dir.path());
        let name = file.strip_prefix(good.path()).unwrap();
        std::fs::remove_file(dir.path().join(name)).unwrap();
        let error = MetaNode::open(dir.path(), MetaConfig::embedded("test"))
            .await
            .err()
            .unwrap();
        assert!(
            matches!(error, OpenError::Corrupt { .. }),
            "{}: {error}",
            file.display()
        );
        std::fs::copy(&file, dir.path().join(name)).unwrap();
        assert_eq!(
            look(dir.path()).await.unwrap().len(),
            8,
            "putting it back repairs it"
        );
    }
}

#[tokio::test]
async fn a_write_ahead_log_that_a_kill_cut_short_loses_only_its_end() {
    let live = tempfile::tempdir().unwrap();
    let node = open_with_device(live.path()).await;
    for number in 0..8 {
        node.meta()
            .create_volume(VolumeSpec::new(format!("disk{number}"), GIB))
            .await
            .unwrap();
    }
    let volumes = node.meta().list_volumes().await.unwrap();
    let killed = tempfile::tempdir().unwrap();
    copy_dir(live.path(), killed.path());
    node.shutdown().await.unwrap();
    let mut files = Vec::new();
    files_below(killed.path(), &mut files);
    let is_log = |path: &PathBuf| path.extension().is_some_and(|extension| extension == "log");
    let newest = files
        .into_iter()
        .filter(is_log)
        .max_by_key(|path| std::fs::metadata(path).unwrap().len())
        .unwrap();
    let bytes = std::fs::read(&newest).unwrap();
    let mut seen = Vec::new();
    for part in (1..=12).rev() {
        let dir = tempfile::tempdir().unwrap();
        copy_dir(killed.path(), dir.path());
        let log = dir.path().join(newest.strip_prefix(killed.path()).unwrap());
        // The last part, in small steps: the tail of the newest writes.
        std::fs::write(&log, &bytes[..bytes.len() - part * 97]).unwrap();
        let found = look(dir.path()).await.unwrap();
        assert_eq!(
            found,
            volumes[..found.len()],
            "a prefix of what was written"
        );
        seen.push(found.len());
    }
    assert!(seen.is_sorted(), "{seen:?}");
}

#[tokio::test]
async fn a_directory_that_cannot_be_made_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    std::fs::write(&file, "x").unwrap();
    let error = MetaNode::open(file.join("meta"), MetaConfig::embedded("test"))
        .await
        .err()
        .unwrap();
    assert!(matches!(error, OpenError::Io { .. }), "{error:?}");
    let text = error.to_string();
    assert!(text.contains("file/meta") && !text.contains('\n'), "{text}");
}
