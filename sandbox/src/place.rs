//! What a path leads to, and who decides that.

use std::collections::VecDeque;
use std::ffi::OsString;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Component, Path, PathBuf};

/// Writing by the group and by others.
const OTHERS_WRITE: u32 = 0o022;
/// Links that are followed, as many as the kernel follows (path_resolution(7)).
const LINKS_MAX: usize = 40;

/// Whether a path leads to a block device.
pub fn is_block_device(path: &Path) -> bool {
    std::fs::metadata(path).is_ok_and(|found| found.file_type().is_block_device())
}

/// Whether root alone decides what is at a path: each directory on the way, also behind links, is root's, and
/// nobody else may write in it. Then root may open it for somebody who cannot put a link to something else
/// there. A path that is relative or leads nowhere is not root's.
pub fn is_roots(path: &Path) -> bool {
    let mut left: VecDeque<OsString> = parts(path);
    let (mut at, mut links) = (PathBuf::from("/"), 0);
    while let Some(part) = left.pop_front() {
        match Path::new(&part).components().next() {
            Some(Component::RootDir) => at = PathBuf::from("/"),
            Some(Component::ParentDir) => {
                at.pop();
            }
            Some(Component::Normal(name)) => {
                let next = at.join(name);
                let Ok(found) = std::fs::symlink_metadata(&next) else {
                    return false;
                };
                if !is_roots_dir(&at) {
                    return false;
                }
                if !found.is_symlink() {
                    at = next;
                    continue;
                }
                links += 1;
                let Ok(target) = std::fs::read_link(&next) else {
                    return false;
                };
                for part in parts(&target).into_iter().rev() {
                    left.push_front(part);
                }
            }
            _ => {}
        }
        if links > LINKS_MAX {
            return false;
        }
    }
    path.is_absolute()
}

fn parts(path: &Path) -> VecDeque<OsString> {
    let parts = path.components();
    parts.map(|part| part.as_os_str().to_owned()).collect()
}

fn is_roots_dir(dir: &Path) -> bool {
    let found = std::fs::metadata(dir);
    found.is_ok_and(|dir| dir.uid() == 0 && dir.mode() & OTHERS_WRITE == 0)
}

#[cfg(test)]
mod tests {
    use std::fs::Permissions;
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    #[test]
    fn a_place_where_others_write_is_not_roots() {
        assert!(is_roots(Path::new("/dev/null")));
        assert!(is_roots(Path::new("/dev/../dev/null")));
        assert!(!is_roots(Path::new("dev/null")));
        assert!(!is_roots(Path::new("/dev/nothing")));

        let dir = tempfile::tempdir().unwrap();
        let all = Permissions::from_mode(0o777);
        std::fs::set_permissions(dir.path(), all).unwrap();
        let link = dir.path().join("disk");
        symlink("/dev/null", &link).unwrap();
        assert!(!is_roots(&link));
    }

    /// Only root can make directories of root's.
    #[test]
    fn a_link_to_a_link_of_others_is_not_roots() {
        if !rustix::process::geteuid().is_root() {
            return;
        }
        // The directories of temporary files are everybody's.
        let roots = tempfile::tempdir_in("/run").unwrap();
        let others = tempfile::tempdir_in("/run").unwrap();
        symlink("/dev/null", others.path().join("disk")).unwrap();
        let link = roots.path().join("disk");
        symlink(others.path().join("disk"), &link).unwrap();
        assert!(is_roots(&link));
        let all = Permissions::from_mode(0o777);
        std::fs::set_permissions(others.path(), all).unwrap();
        assert!(!is_roots(&link));
        // One that leads to itself ends.
        let round = roots.path().join("round");
        symlink(&round, &round).unwrap();
        assert!(!is_roots(&round));
    }
}
