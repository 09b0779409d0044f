//! What guests asked for, step by step, as a host's owner has to do it.

use fs_capabilities::{GuestId, Instant, Kind, Scope};
use namespace::Ino;
use rand::Rng;

use crate::event::{Body, Event, GuestReply};
use crate::host::scope;
use crate::plan::Mistake;
use crate::world::{World, parent_of};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum What {
    Read(Ino),
    /// Changes a directory's names or a file's attributes at the leader.
    Change(Ino),
    /// Buffers a change of a file.
    Write(Ino),
}

impl What {
    pub fn ino(self) -> Ino {
        match self {
            Self::Read(ino) | Self::Change(ino) | Self::Write(ino) => ino,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    New,
    /// A capability was asked for.
    Wanted,
    /// It was granted, or refused.
    Ready,
    /// A change waits for other guests' validities.
    Until(Instant),
    /// The leader was asked.
    Asked,
}

#[derive(Debug, Clone)]
pub struct Task {
    pub guest: usize,
    pub what: What,
    pub began: u64,
    pub state: State,
    /// The holder knows of the change.
    pub is_begun: bool,
}

impl World {
    /// Goes on with a task. Whether something happened.
    pub fn step(&mut self, host: usize, id: u64) -> bool {
        let Some(task) = self.hosts[host].tasks.get(&id).cloned() else {
            return false;
        };
        match (task.what, task.state) {
            (_, State::Wanted | State::Asked) => false,
            (What::Read(ino), _) => self.step_read(host, id, task, ino),
            (What::Change(ino), _) => self.step_change(host, id, task, ino),
            (What::Write(ino), _) => self.step_write(host, id, task, ino),
        }
    }

    fn set(&mut self, host: usize, id: u64, state: State) {
        if let Some(task) = self.hosts[host].tasks.get_mut(&id) {
            task.state = state;
        }
    }

    fn step_read(&mut self, host: usize, id: u64, task: Task, ino: Ino) -> bool {
        if self.is_changing(host, ino) && !self.is(Mistake::AnswerDuringChange) {
            return false;
        }
        if let Some((value, under)) = self.known(host, ino) {
            self.answer(host, &task, value, Some(under));
            self.hosts[host].tasks.remove(&id);
            return true;
        }
        // The leader does not have what is written back.
        if self.hosts[host].cache.dirty.contains_key(&ino) {
            return false;
        }
        let kind = match parent_of(ino) {
            Some(_) => Kind::FileRead,
            None => Kind::DirectoryRead,
        };
        let wants = task.state == State::New && self.rng.random_ratio(2, 3);
        if wants && !self.acquire(host, ino, kind) {
            self.set(host, id, State::Wanted);
            return true;
        }
        let body = match kind {
            Kind::DirectoryRead => Body::Names(ino),
            Kind::FileRead | Kind::FileExclusive => Body::File(ino),
        };
        self.set(host, id, State::Asked);
        self.ask(host, Some(id), body);
        true
    }

    /// What may be told without asking, and the inode under whose capability.
    fn known(&mut self, host: usize, ino: Ino) -> Option<(u64, Ino)> {
        let may = self.may(host, ino).is_some();
        let cache = &self.hosts[host].cache;
        let Some(parent) = parent_of(ino) else {
            return cache
                .names
                .get(&ino)
                .filter(|_| may)
                .map(|value| (*value, ino));
        };
        let file = cache.dirty.get(&ino).or(cache.files.get(&ino));
        if let Some(value) = file.filter(|_| may) {
            return Some((*value, ino));
        }
        let child = cache.children.get(&ino).copied()?;
        let is_dirty = cache.dirty.contains_key(&ino);
        (!is_dirty && self.may(host, parent).is_some()).then_some((child, parent))
    }

    pub fn finish_read(
        &mut self,
        host: usize,
        task: Option<u64>,
        ino: Ino,
        value: u64,
        under: Option<Ino>,
    ) {
        let task = task.and_then(|id| self.hosts[host].tasks.remove(&id));
        let task = task.expect("a read is asked for by a task");
        assert_eq!(task.what, What::Read(ino), "it reads this");
        self.answer(host, &task, value, under);
    }

    fn step_change(&mut self, host: usize, id: u64, task: Task, ino: Ino) -> bool {
        match task.state {
            State::Until(at) => {
                if self.shown(host) < at {
                    return false;
                }
                let value = self.next_number();
                self.set(host, id, State::Asked);
                let guest = task.guest;
                self.ask(host, Some(id), Body::Change { ino, value, guest });
                true
            }
            _ => {
                // What the host may buffer, it changes by itself.
                let is_own = self.may(host, ino) == Some(Kind::FileExclusive);
                if is_own || self.hosts[host].cache.dirty.contains_key(&ino) {
                    if let Some(task) = self.hosts[host].tasks.get_mut(&id) {
                        task.what = What::Write(ino);
                    }
                    return true;
                }
                self.begin_change(host, id, task, ino);
                true
            }
        }
    }

    fn step_write(&mut self, host: usize, id: u64, task: Task, ino: Ino) -> bool {
        let may = self.may(host, ino) == Some(Kind::FileExclusive);
        match task.state {
            State::Until(at) => {
                if self.shown(host) < at {
                    return false;
                }
                if !may {
                    self.end_change(host, id, ino);
                    self.set(host, id, State::New);
                    return true;
                }
                self.buffer(host, id, task, ino);
                true
            }
            _ if self.is_changing(host, ino) => false,
            _ if may => {
                self.begin_change(host, id, task, ino);
                true
            }
            _ => {
                if !self.acquire(host, ino, Kind::FileExclusive) {
                    self.set(host, id, State::Wanted);
                }
                true
            }
        }
    }

    /// A change begins. It waits for what other guests were told under either capability.
    fn begin_change(&mut self, host: usize, id: u64, task: Task, ino: Ino) {
        let now = self.shown(host);
        let guest = GuestId(task.guest as u64);
        let is_mistaken = self.is(Mistake::ForgetOtherGuests);
        let is_scope_wrong = self.is(Mistake::WrongScope);
        let here = &mut self.hosts[host];
        let holder = here.holder.as_mut().expect("tasks end with their session");
        let covering = [Some(ino), parent_of(ino)].into_iter().flatten();
        let until = covering
            .map(|covering| {
                let scope = match is_scope_wrong {
                    true => Scope::Itself,
                    false => scope(covering, ino),
                };
                holder.begin_change(now, covering, scope, guest)
            })
            .max();
        let mut until = until.expect("the inode itself is one");
        if is_mistaken {
            until = now;
        }
        if let Some(task) = here.tasks.get_mut(&id) {
            task.is_begun = true;
            task.state = State::Until(until);
        }
        let at = here.clock.when(until);
        self.at(at, Event::RunTasks { host });
    }

    fn end_change(&mut self, host: usize, id: u64, ino: Ino) {
        let now = self.shown(host);
        let is_scope_wrong = self.is(Mistake::WrongScope);
        let here = &mut self.hosts[host];
        let task = here.tasks.get_mut(&id).expect("it is under way");
        assert!(task.is_begun, "a change that ends has begun");
        task.is_begun = false;
        let holder = here.holder.as_mut().expect("tasks end with their session");
        for covering in [Some(ino), parent_of(ino)].into_iter().flatten() {
            let scope = match is_scope_wrong {
                true => Scope::Itself,
                false => scope(covering, ino),
            };
            holder.end_change(now, covering, scope);
        }
    }

    fn buffer(&mut self, host: usize, id: u64, task: Task, ino: Ino) {
        let value = self.next_number();
        self.check_alone(ino, host, task.guest, "is written");
        self.check_held(ino, host, Kind::FileExclusive);
        self.checker.writes += 1;
        self.checker.change(ino, value, self.now);
        let cache = &mut self.hosts[host].cache;
        cache.files.remove(&ino);
        cache.children.remove(&ino);
        cache.dirty.insert(ino, value);
        self.end_change(host, id, ino);
        self.hosts[host].tasks.remove(&id);
        self.tell(host, task.guest, GuestReply::Changed { ino });
    }

    pub fn finish_change(
        &mut self,
        host: usize,
        task: Option<u64>,
        ino: Ino,
        value: u64,
        is_first_try: bool,
    ) {
        let id = task.expect("a change is asked for by a task");
        let changes = self.hosts[host].tasks.values();
        let changes = changes
            .filter(|task| task.is_begun && task.what == What::Change(ino))
            .count();
        let may = self.may(host, ino).is_some();
        let cache = &mut self.hosts[host].cache;
        cache.children.remove(&ino);
        cache.files.remove(&ino);
        let was_known = cache.names.remove(&ino).is_some();
        // Replies to retries, and to several changes at a time, come in no order.
        if is_first_try && changes == 1 && may && parent_of(ino).is_none() && was_known {
            cache.names.insert(ino, value);
        }
        self.end_change(host, id, ino);
        let task = self.hosts[host].tasks.remove(&id).expect("it is under way");
        self.tell(host, task.guest, GuestReply::Changed { ino });
    }

    fn acquire(&mut self, host: usize, ino: Ino, kind: Kind) -> bool {
        let now = self.shown(host);
        let parent = match self.is(Mistake::ForgetDirectory) {
            true => None,
            false => parent_of(ino),
        };
        let holder = self.hosts[host]
            .holder
            .as_mut()
            .expect("tasks end with their session");
        holder.acquire(now, ino, kind, parent)
    }
}
