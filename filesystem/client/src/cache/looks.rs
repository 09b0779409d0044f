//! Looking at what is cached.

use std::time::Duration;

use fs_capabilities::{GuestId, Instant, Kind, Scope};
use namespace::{Attributes, Entry, Extent, Ino, Inode};

#[cfg(feature = "testing")]
use super::Mistake;
use super::changes::Part;
use super::store::{self, Named};
use super::touches::scope_of;
use super::{Found, State, Told};

impl State {
    /// Whether an inode's capability is held now.
    pub(super) fn may(&mut self, ino: Ino, kind: Kind) -> bool {
        let now = self.now;
        let may = self.holder.as_mut().and_then(|holder| holder.may(now, ino));
        #[cfg(feature = "testing")]
        if self.is_mistaken(Mistake::IgnoreRecall) || self.is_mistaken(Mistake::KeepAfterSession) {
            return self.holder.is_some();
        }
        may.is_some_and(|may| may.includes(kind))
    }

    /// What a name leads to, if that is cached.
    pub(super) fn named(&mut self, now: Instant, dir: Ino, name: &[u8]) -> Option<Named> {
        self.at(now);
        let may = self.store.directory(dir).is_some() && self.may(dir, Kind::DirectoryRead);
        if !may || !self.changes.is_name_quiet(dir, name) {
            return None;
        }
        self.store.named(dir, name)
    }

    /// An inode's record, and the directory whose capability covers it, if one does.
    pub(super) fn record(&mut self, now: Instant, ino: Ino) -> Option<(&Inode, Option<Ino>)> {
        self.at(now);
        let dir = self.store.cover_of(ino);
        let own = self.store.directory(ino).map(|_| ino);
        let dir = dir
            .or(own)
            .filter(|dir| self.may(*dir, Kind::DirectoryRead));
        let is_file = dir.is_none() && self.store.file(ino).is_some();
        if dir.is_none() && !(is_file && self.may(ino, Kind::FileRead)) {
            return None;
        }
        match dir {
            Some(dir) => self.store.use_directory(dir),
            None => self.store.use_file(ino),
        }
        let inode = match dir {
            Some(dir) if dir == ino => self.store.directory(ino)?.inode.as_ref()?,
            Some(dir) => self.store.child(dir, ino)?,
            None => self.store.file(ino)?.inode.as_ref()?,
        };
        let is_quiet = self.changes.is_inode_quiet(ino, store::place_of(inode));
        is_quiet.then_some((inode, dir))
    }

    /// For how long a guest may use what it is told of this under a directory's capability.
    fn validity(&mut self, dir: Ino, scope: Scope, guest: GuestId) -> Duration {
        let now = self.now;
        if self.promised.is_full(now) {
            return Duration::ZERO;
        }
        let holder = self.holder.as_mut();
        holder.map_or(Duration::ZERO, |holder| {
            holder.validity(now, dir, scope, guest)
        })
    }

    pub(super) fn told(&mut self, now: Instant, guest: GuestId, ino: Ino) -> Option<Told> {
        let (inode, dir) = self.record(now, ino)?;
        let place = store::place_of(inode);
        let mut told = Told::once(Attributes::of(ino, inode));
        if let Some(dir) = dir {
            told.attr_valid = self.validity(dir, scope_of(dir, ino), guest);
            if !told.attr_valid.is_zero() {
                let until = now + self.promise();
                self.promised.note(until, ino, (dir, place));
            }
        }
        Some(told)
    }

    /// How long a guest takes at most to forget what it is told now.
    pub(super) fn promise(&self) -> Duration {
        let settings = &self.limits.settings;
        settings.stretch(settings.validity + settings.guest_delay)
    }

    pub(super) fn lookup(
        &mut self,
        now: Instant,
        guest: GuestId,
        dir: Ino,
        name: &[u8],
    ) -> Option<Found> {
        let found = match self.named(now, dir, name)? {
            Named::Present(ino, _) => Some(self.told(now, guest, ino)?),
            Named::Absent => None,
        };
        let entry_valid = self.validity(dir, Scope::name(name), guest);
        if !entry_valid.is_zero() {
            let until = now + self.promise();
            self.promised.note_name(until);
        }
        Some(match found {
            Some(told) => Found::Inode(Told {
                entry_valid,
                ..told
            }),
            None => Found::Absent { entry_valid },
        })
    }

    pub(super) fn content(
        &mut self,
        now: Instant,
        ino: Ino,
        (from, to): (u64, u64),
        max: usize,
    ) -> Option<(Inode, Vec<Extent>)> {
        let reaches_in = |extent: &&Extent| extent.offset < to && extent.end() > from;
        let (inode, _) = self.record(now, ino)?;
        let inode = inode.clone();
        if let Some(extents) = store::extents_in(&inode) {
            let extents = extents.iter().filter(reaches_in);
            return Some((inode, extents.take(max).copied().collect()));
        }
        if !self.may(ino, Kind::FileRead) {
            return None;
        }
        self.store.use_file(ino);
        let file = self.store.file(ino)?;
        let known = file.inode.as_ref()?;
        let extents = file.extents.as_ref()?;
        if known.change != inode.change {
            return None;
        }
        let first = extents.partition_point(|extent| extent.end() <= from);
        let extents = extents[first..]
            .iter()
            .take_while(|extent| extent.offset < to);
        Some((known.clone(), extents.take(max).copied().collect()))
    }

    pub(super) fn list(
        &mut self,
        now: Instant,
        guest: Option<GuestId>,
        dir: Ino,
        behind: u64,
        max: usize,
    ) -> Option<Vec<(Entry, Option<Told>)>> {
        self.at(now);
        let may = self.store.directory(dir).is_some() && self.may(dir, Kind::DirectoryRead);
        if !may || !self.changes.is_quiet(&Part::Names(dir)) {
            return None;
        }
        let entries = self.store.list(dir, behind, max)?;
        let entries = entries.into_iter().map(|entry| {
            let found = guest.and_then(|guest| self.lookup(now, guest, dir, &entry.name));
            let told = match found {
                Some(Found::Inode(told)) if told.attributes.ino == entry.ino => Some(told),
                _ => None,
            };
            (entry, told)
        });
        Some(entries.collect())
    }
}
