//! Who decides what a path leads to.

use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path};

/// Writing by the group and by others.
const OTHERS_WRITE: u32 = 0o022;

/// Whether root alone decides what is at a path: the directories above it are root's, and nobody else may
/// write in them, neither above the name nor above what it leads to. Then root may open it for somebody who
/// cannot put a link to something else there.
pub fn is_roots(path: &Path) -> bool {
    let is_plain =
        path.is_absolute() && !path.components().any(|part| part == Component::ParentDir);
    let is_kept = |path: &Path| path.ancestors().skip(1).all(is_roots_dir);
    is_plain && is_kept(path) && path.canonicalize().is_ok_and(|real| is_kept(&real))
}

fn is_roots_dir(dir: &Path) -> bool {
    let found = std::fs::metadata(dir);
    found.is_ok_and(|dir| dir.uid() == 0 && dir.mode() & OTHERS_WRITE == 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_where_others_write_is_not_roots() {
        assert!(is_roots(Path::new("/dev/null")));
        assert!(!is_roots(Path::new("/dev/../dev/null")));
        assert!(!is_roots(Path::new("dev/null")));
        // Everybody writes in the directory of temporary files.
        let dir = tempfile::tempdir().unwrap();
        let link = dir.path().join("disk");
        std::os::unix::fs::symlink("/dev/null", &link).unwrap();
        assert!(!is_roots(&link));
    }
}
