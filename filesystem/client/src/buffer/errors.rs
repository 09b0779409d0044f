//! Failures of writing back, each told once to every handle that was open.

use std::collections::HashMap;

use fuse_codec::Errno;
use namespace::Ino;

/// Files whose last failure is remembered. With more, a handle is told the last failure of any file.
const FILES_MAX: usize = 1024;

/// Failures that a handle knows of, or that were before it was opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct ErrorMark(u64);

#[derive(Default)]
pub(super) struct Errors {
    last: u64,
    last_errno: Option<Errno>,
    files: HashMap<Ino, (u64, Errno)>,
    /// The last failure that was forgotten.
    forgotten: Option<(u64, Errno)>,
}

impl Errors {
    pub(super) fn mark(&self) -> ErrorMark {
        ErrorMark(self.last)
    }

    pub(super) fn note(&mut self, ino: Ino, errno: Errno) {
        self.last += 1;
        self.last_errno = Some(errno);
        if self.files.len() >= FILES_MAX {
            let all = self.files.drain().map(|(_, failure)| failure);
            let newest = all.max_by_key(|(number, _)| *number);
            self.forgotten = newest.or(self.forgotten);
        }
        self.files.insert(ino, (self.last, errno));
    }

    /// The failure of a file that a handle does not know of.
    pub(super) fn check(&self, ino: Ino, mark: &mut ErrorMark) -> Result<(), Errno> {
        let of_file = self.files.get(&ino).copied();
        let failures = of_file.into_iter().chain(self.forgotten);
        let unknown = failures.filter(|(number, _)| *number > mark.0);
        let last = unknown.max_by_key(|(number, _)| *number);
        match last {
            Some((number, errno)) => {
                mark.0 = number;
                Err(errno)
            }
            None => Ok(()),
        }
    }

    /// The last failure of any file, if it is not known.
    pub(super) fn check_all(&self, mark: &mut ErrorMark) -> Result<(), Errno> {
        let known = std::mem::replace(mark, self.mark());
        match self.last_errno {
            Some(errno) if known != *mark => Err(errno),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_is_told_to_each_handle_once() {
        let mut errors = Errors::default();
        let (mut one, mut two) = (errors.mark(), errors.mark());
        errors.note(Ino(7), Errno::ENOSPC);
        let mut late = errors.mark();
        assert_eq!(errors.check(Ino(8), &mut one), Ok(()));
        assert_eq!(errors.check(Ino(7), &mut one), Err(Errno::ENOSPC));
        assert_eq!(errors.check(Ino(7), &mut one), Ok(()));
        assert_eq!(errors.check(Ino(7), &mut two), Err(Errno::ENOSPC));
        assert_eq!(errors.check(Ino(7), &mut late), Ok(()));
    }

    #[test]
    fn who_asks_for_all_files_is_told_the_last_failure_once() {
        let mut errors = Errors::default();
        let mut mark = errors.mark();
        assert_eq!(errors.check_all(&mut mark), Ok(()));
        errors.note(Ino(7), Errno::ENOSPC);
        errors.note(Ino(8), Errno::EIO);
        assert_eq!(errors.check_all(&mut mark), Err(Errno::EIO));
        assert_eq!(errors.check_all(&mut mark), Ok(()));
        assert_eq!(errors.check_all(&mut errors.mark()), Ok(()));
    }

    #[test]
    fn of_too_many_failures_none_is_kept_from_a_handle() {
        let mut errors = Errors::default();
        let mut mark = errors.mark();
        for number in 0..=FILES_MAX as u64 {
            errors.note(Ino(number), Errno::EIO);
        }
        assert_eq!(errors.check(Ino(3), &mut mark), Err(Errno::EIO));
        assert!(errors.files.len() <= FILES_MAX);
    }
}
