//! What a guest changes, and what its kernel still knows then: as Linux does it, all but what was touched.

use fs_client::OwnedOperation;
use fuse_codec::{Errno, RenameFlags, SetAttr, XattrMode};

use super::Kernel;
use crate::guest::RDWR;
use crate::history::XATTR;

impl Kernel {
    /// Changes something.
    pub(super) async fn change(&mut self) {
        let (dir, name, other) = (self.directory(), self.name(), self.name());
        let (to, random) = (self.directory(), self.world.runtime.below(1000));
        // A real kernel looks names up before it changes them, and so knows what it touches.
        let is_real = self.world.runtime.happens(0.5);
        let target = match is_real {
            true => self.look_up(dir, name).await,
            false => None,
        };
        let from = self.moment();
        let is_known = match self.below(12) {
            0 | 1 => {
                let created = self.guest.create(dir, name, RDWR).await;
                self.check_created(from, (dir, name), created.as_ref().map(|(ino, _)| *ino));
                if let Ok((ino, handle)) = &created {
                    let data = vec![random as u8; 10 + random as usize];
                    let _ = self.guest.write(*ino, *handle, 0, &data).await;
                    let _ = self.guest.release(*ino, *handle).await;
                    self.attributes.remove(ino);
                }
                self.touched(dir, name, created.map(|_| ()))
            }
            2 => {
                let made = self.guest.mkdir(dir, name).await;
                self.check_made(from, (dir, name), made);
                self.touched(dir, name, made.map(|_| ()))
            }
            3 => {
                let removed = self.guest.unlink(dir, name).await;
                self.check_removed(from, (dir, name), removed);
                self.touched(dir, name, removed)
            }
            4 => {
                let removed = self.guest.rmdir(dir, name).await;
                self.check_removed(from, (dir, name), removed);
                self.touched(dir, name, removed)
            }
            5 | 6 => {
                let target_of_other = match is_real {
                    true => self.look_up(to, other).await,
                    false => None,
                };
                let renamed = self.rename((dir, name), (to, other)).await;
                self.attributes
                    .retain(|ino, _| Some(*ino) != target_of_other);
                // Nothing happens to two names of one inode.
                renamed && (target.is_none() || target != target_of_other)
            }
            kind => match self.look_up(dir, name).await {
                Some(ino) => self.change_inode(kind, ino, random).await,
                None => true,
            },
        };
        self.attributes.retain(|ino, _| Some(*ino) != target);
        if !(is_real && is_known) {
            self.forget();
        }
    }

    /// A name was changed, if that is known.
    fn touched(&mut self, dir: u64, name: &str, done: Result<(), Errno>) -> bool {
        self.entries.remove(&(dir, name.to_owned()));
        self.attributes.remove(&dir);
        done.is_ok()
    }

    /// What it knows of a name goes with the name.
    async fn rename(&mut self, (dir, name): (u64, &str), (to, other): (u64, &str)) -> bool {
        let flags = [
            RenameFlags::Replace,
            RenameFlags::Exchange,
            RenameFlags::NoReplace,
            RenameFlags::Whiteout { no_replace: false },
        ];
        let flags = flags[self.below(flags.len())];
        let from = self.moment();
        let renamed = self.guest.rename((dir, name), (to, other), flags).await;
        self.check_renamed(from, (dir, name), (to, other), flags, renamed);
        let (from, to) = ((dir, name.to_owned()), (to, other.to_owned()));
        self.attributes.remove(&from.0);
        self.attributes.remove(&to.0);
        let (moved, replaced) = (self.entries.remove(&from), self.entries.remove(&to));
        if from == to {
            return false;
        }
        if let Some(entry) = moved {
            self.entries.insert(to, entry);
        }
        if let (Some(entry), RenameFlags::Exchange) = (replaced, flags) {
            self.entries.insert(from, entry);
        }
        renamed.is_ok()
    }

    async fn change_inode(&mut self, kind: usize, ino: u64, random: u64) -> bool {
        let done = match kind {
            7 => {
                let (dir, name) = (self.directory(), self.name());
                let from = self.moment();
                let linked = self.guest.link(ino, dir, name).await;
                let made = linked.as_ref().map(|entry| entry.nodeid.0);
                self.check_made(from, (dir, name), made.map_err(|errno| *errno));
                self.touched(dir, name, linked.map(|_| ())).then_some(())
            }
            8 => {
                let set = SetAttr {
                    permissions: Some(random as u32 & 0o777),
                    ..SetAttr::default()
                };
                self.guest.setattr(ino, set).await.ok().map(|_| ())
            }
            9 => {
                let truncated = self.guest.truncate(ino, random * 10).await;
                truncated.ok().map(|_| ())
            }
            10 => {
                let set = OwnedOperation::Setxattr {
                    name: XATTR.into(),
                    value: format!("{random}").into(),
                    mode: XattrMode::Set,
                };
                self.guest.done(ino, set).await.ok()
            }
            _ => match self.guest.open(ino, RDWR).await {
                Ok(handle) => {
                    let data = vec![random as u8; 1 + random as usize * 5];
                    let written = self.guest.write(ino, handle, random * 7, &data).await;
                    let _ = self.guest.release(ino, handle).await;
                    written.ok().map(|_| ())
                }
                Err(_) => None,
            },
        };
        self.attributes.remove(&ino);
        done.is_some()
    }
}
