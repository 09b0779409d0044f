//! What a guest sees is true while it looks: guests of several hosts change what the others look at, each
//! with a kernel that goes by what it was told for as long as it was told to.

mod changes;
mod replies;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use fs_client::{ClientOptions, DataCache, LookupTarget, OwnedOperation, OwnedReply};
use fuse_codec::{Attr, Cookie, DirLayout, Entry, Errno};
use futures_util::future::select;

use crate::guest::{DATA_CACHE_BYTES, Guest, ROOT, client_with, last_cookie, names_in, options};
use crate::history::{Fact, Moment, NAMES, Seen, Value, XATTR};
use crate::host::Mutation;
use crate::leader::settings;
use crate::world::{Faults, World};
use crate::{faulty, seeds, slow};

const HOSTS: u64 = 3;
const GUESTS: usize = 3;
const STEPS: usize = 80;

/// What was looked at without the host, and how often the leader was not asked.
#[derive(Default)]
pub struct Tally {
    by_kernels: AtomicU64,
    hits: AtomicU64,
}

/// A guest with its kernel, which does one thing at a time.
struct Kernel {
    world: World,
    guest: Guest,
    directories: Vec<u64>,
    names: usize,
    /// What names lead to, and until when.
    entries: BTreeMap<(u64, String), (Option<u64>, Duration)>,
    attributes: BTreeMap<u64, (Seen, Duration)>,
    /// Inodes that it has seen.
    known: BTreeSet<u64>,
    tally: Arc<Tally>,
}

impl Kernel {
    fn below(&self, end: usize) -> usize {
        self.world.runtime.below(end as u64) as usize
    }

    fn directory(&self) -> u64 {
        self.directories[self.below(self.directories.len())]
    }

    fn name(&self) -> &'static str {
        NAMES[self.below(self.names)]
    }

    fn moment(&self) -> Moment {
        let state = self.world.state();
        state.history.as_ref().unwrap().now()
    }

    /// Until when it goes by what it is told now. It may notice a reply late.
    fn until(&self, valid: Duration) -> Option<Duration> {
        let delay = settings().guest_delay.as_micros() as u64;
        let delay = Duration::from_micros(self.world.runtime.below(delay + 1));
        (!valid.is_zero()).then(|| self.world.runtime.now() + delay + valid)
    }

    fn learn_attributes(&mut self, attr: &Attr, valid: Duration) {
        self.known.insert(attr.ino);
        match self.until(valid) {
            Some(until) => self
                .attributes
                .insert(attr.ino, (Seen::by_guest(attr), until)),
            None => self.attributes.remove(&attr.ino),
        };
    }

    fn learn_entry(&mut self, dir: u64, name: &str, ino: Option<u64>, valid: Duration) {
        let key = (dir, name.to_owned());
        match self.until(valid) {
            Some(until) => self.entries.insert(key, (ino, until)),
            None => self.entries.remove(&key),
        };
    }

    /// Whatever it knows may be untrue by what it did itself, if it is not known what that was.
    fn forget(&mut self) {
        self.entries.clear();
        self.attributes.clear();
    }

    /// It saw this at some moment of a span that ends now.
    fn saw(&self, from: Moment, fact: &Fact, value: &Value) {
        let said = {
            let state = self.world.state();
            let history = state.history.as_ref().unwrap();
            let span = (from, history.now());
            let was = history.was(fact, value, span);
            (!was).then(|| format!("{fact:?} {value:?} in {span:?}: {}", history.tell(fact)))
        };
        if let Some(said) = said {
            self.world.violation(said);
        }
    }

    fn saw_entry(&mut self, from: Moment, dir: u64, name: &str, entry: &Entry) {
        let ino = entry.nodeid.0;
        self.saw(from, &Fact::Name(dir, name.into()), &Value::Leads(ino));
        self.saw_attributes(from, &entry.attr);
        self.learn_entry(dir, name, Some(ino), entry.entry_valid);
        self.learn_attributes(&entry.attr, entry.attr_valid);
    }

    fn saw_attributes(&self, from: Moment, attr: &Attr) {
        let seen = Value::Attributes(Seen::by_guest(attr));
        self.saw(from, &Fact::Inode(attr.ino), &seen);
    }

    /// Follows a name.
    async fn look_up(&mut self, dir: u64, name: &str) -> Option<u64> {
        let (from, now) = (self.moment(), self.world.runtime.now());
        let fact = Fact::Name(dir, name.into());
        let cached = self.entries.get(&(dir, name.to_owned()));
        if let Some((ino, until)) = cached.filter(|(_, until)| now < *until) {
            debug_assert!(now < *until);
            self.tally.by_kernels.fetch_add(1, Ordering::Relaxed);
            self.saw(from, &fact, &ino.map_or(Value::Gone, Value::Leads));
            return *ino;
        }
        let name_of = LookupTarget::Name(name.into());
        match self
            .guest
            .call(dir, OwnedOperation::Lookup { name: name_of })
            .await
        {
            OwnedReply::Entry(entry) => {
                self.saw_entry(from, dir, name, &entry);
                Some(entry.nodeid.0)
            }
            OwnedReply::NoEntry(valid) => {
                self.saw(from, &fact, &Value::Gone);
                self.learn_entry(dir, name, None, valid);
                None
            }
            OwnedReply::Error(Errno::ENOENT) => {
                self.saw(from, &fact, &Value::Gone);
                None
            }
            _ => None,
        }
    }

    async fn stat(&mut self, ino: u64) {
        let (from, now) = (self.moment(), self.world.runtime.now());
        let cached = self.attributes.get(&ino);
        if let Some((seen, _)) = cached.filter(|(_, until)| now < *until) {
            self.tally.by_kernels.fetch_add(1, Ordering::Relaxed);
            self.saw(from, &Fact::Inode(ino), &Value::Attributes(seen.clone()));
            return;
        }
        let getattr = OwnedOperation::Getattr { handle: None };
        match self.guest.call(ino, getattr).await {
            OwnedReply::Attr(attr, valid) => {
                self.saw_attributes(from, &attr);
                self.learn_attributes(&attr, valid);
            }
            OwnedReply::Error(Errno::ESTALE) => self.saw(from, &Fact::Inode(ino), &Value::Gone),
            _ => {}
        }
    }

    /// Lists a directory: what is in the listing was there, and what was there all the time is in it.
    async fn list(&mut self, dir: u64) {
        let Ok(handle) = self.guest.opendir(dir).await else {
            return;
        };
        let layout = match self.world.runtime.happens(0.5) {
            true => DirLayout::Plus,
            false => DirLayout::Plain,
        };
        let begin = self.moment();
        let mut missing: BTreeSet<&str> = NAMES.into();
        let mut cookie = 0;
        let is_whole = loop {
            let from = self.moment();
            let readdir = OwnedOperation::Readdir {
                layout,
                handle,
                cookie: Cookie::new(cookie).unwrap(),
                size: 1 << 10,
            };
            let OwnedReply::Bytes(bytes) = self.guest.call(dir, readdir).await else {
                break false;
            };
            if bytes.is_empty() {
                break true;
            }
            cookie = last_cookie(&bytes, layout);
            for (name, ino) in names_in(&bytes, layout) {
                missing.remove(name.as_str());
                self.saw(from, &Fact::Name(dir, name), &Value::Leads(ino));
            }
        };
        for name in missing.into_iter().filter(|_| is_whole) {
            self.saw(begin, &Fact::Name(dir, name.into()), &Value::Gone);
        }
        let close = OwnedOperation::Releasedir { handle };
        let _ = self.guest.done(dir, close).await;
    }

    async fn read(&mut self, ino: u64) {
        let Ok(handle) = self.guest.open(ino, libc::O_RDONLY).await else {
            return;
        };
        for _ in 0..self.below(3) {
            let from = self.moment();
            if let Ok(data) = self.guest.read(ino, handle, 0, 1 << 16).await {
                self.saw(from, &Fact::Content(ino), &Value::Bytes(data));
            }
        }
        let _ = self.guest.release(ino, handle).await;
    }

    async fn xattr(&mut self, ino: u64) {
        let from = self.moment();
        let get = OwnedOperation::Getxattr {
            name: XATTR.into(),
            size: 100,
        };
        let value = match self.guest.call(ino, get).await {
            OwnedReply::Bytes(value) => Value::Bytes(value),
            OwnedReply::Error(Errno::ENODATA | Errno::ESTALE) => Value::Gone,
            _ => return,
        };
        self.saw(from, &Fact::Xattr(ino), &value);
    }

    async fn look(&mut self) {
        let dir = self.directory();
        let name = self.name();
        match self.below(10) {
            0..4 => {
                if let Some(ino) = self.look_up(dir, name).await {
                    self.stat(ino).await;
                }
            }
            4 => self.stat(dir).await,
            5 | 6 => {
                // The newest ones.
                let known: Vec<u64> = self.known.iter().rev().take(6).copied().collect();
                if !known.is_empty() {
                    let known = known[self.below(known.len())];
                    self.stat(known).await;
                }
            }
            7 => self.list(dir).await,
            8 => {
                if let Some(ino) = self.look_up(dir, name).await {
                    self.read(ino).await;
                }
            }
            _ => {
                if let Some(ino) = self.look_up(dir, name).await {
                    self.xattr(ino).await;
                }
            }
        }
    }

    async fn run(mut self, change: f64) {
        for _ in 0..STEPS {
            if !self.world.runtime.happens(change) {
                self.look().await;
            } else if self.world.runtime.happens(0.1) {
                // Its request is dropped, and may be done later.
                let world = self.world.clone();
                let patience = Duration::from_millis(world.runtime.below(30));
                let patience = Box::pin(world.runtime.sleep(patience));
                select(Box::pin(self.change()), patience).await;
                self.forget();
            } else {
                self.change().await;
            }
            let is_long = self.below(4) == 0;
            let pause = self.world.runtime.below(if is_long { 40 } else { 4 });
            let pause = Duration::from_millis(pause);
            self.world.runtime.sleep(pause).await;
        }
    }
}

/// The style of a run in which two guests of one host change the same names.
const NARROW: u64 = 2;

/// How often guests change something.
fn chance_of_change(style: u64, host: usize, guest: usize) -> f64 {
    match (style, host, guest) {
        // One does all the time.
        (0, 0, 0) => 0.5,
        (0, ..) => 0.08,
        // Those of one host do.
        (1, 0, _) => 0.5,
        (1, ..) => 0.03,
        // The same, in one directory of few names.
        (NARROW, 0, 2) => 0.0,
        (NARROW, 0, _) => 0.7,
        (NARROW, ..) => 0.0,
        // Hardly anybody does.
        _ => 0.04,
    }
}

/// What goes wrong in between, until it is told to stop.
async fn trouble(world: World, stop: Arc<Mutex<bool>>, leaders: bool, sessions: bool) {
    while !*stop.lock().unwrap() {
        let pause = Duration::from_millis(20 + world.runtime.below(300));
        world.runtime.sleep(pause).await;
        if leaders && world.runtime.happens(0.5) {
            world.change_leader();
        }
        let open = world.sessions();
        if sessions && !open.is_empty() && world.runtime.happens(0.5) {
            let session = open[world.runtime.below(open.len() as u64) as usize];
            world.end_session(session).await;
        }
    }
}

/// What a run is like.
#[derive(Clone, Copy, Default)]
pub struct Plan {
    pub faults: Faults,
    pub leaders: bool,
    pub sessions: bool,
}

pub async fn coherence(world: World, plan: Plan, mutation: Option<Mutation>, tally: Arc<Tally>) {
    let mut options = options(&world, mutation);
    if world.runtime.happens(0.3) {
        (options.cached_names_max, options.cached_inodes_max) = (12, 8);
    }
    let hosts = (1..=HOSTS).map(|node| {
        let bytes = DATA_CACHE_BYTES[world.runtime.below(3) as usize];
        let options = ClientOptions {
            data_cache: DataCache::new(bytes),
            ..options.clone()
        };
        client_with(&world, node, mutation, options)
    });
    let hosts: Vec<_> = hosts.collect();
    let first = Guest::new(&hosts[0]);
    let one = first.mkdir(ROOT, "a").await.unwrap();
    let two = first.mkdir(ROOT, "b").await.unwrap();
    world.record_history();
    world.set_faults(Faults {
        short_lists: world.runtime.happens(0.5),
        ..plan.faults
    });
    let style = world.runtime.below(4);
    let is_narrow = style == NARROW;
    let stop = Arc::new(Mutex::new(false));
    let troubles = trouble(
        world.clone(),
        Arc::clone(&stop),
        plan.leaders,
        plan.sessions,
    );
    let troubles = world.runtime.spawn(troubles);
    let mut running = Vec::new();
    for (number, host) in hosts.iter().enumerate() {
        for guest in 0..GUESTS {
            let kernel = Kernel {
                world: world.clone(),
                guest: Guest::new(host),
                directories: if is_narrow {
                    vec![one]
                } else {
                    vec![ROOT, one, two]
                },
                names: if is_narrow { 2 } else { NAMES.len() },
                entries: BTreeMap::new(),
                attributes: BTreeMap::new(),
                known: BTreeSet::new(),
                tally: Arc::clone(&tally),
            };
            let change = chance_of_change(style, number, guest);
            running.push(world.runtime.spawn(kernel.run(change)));
        }
    }
    for kernel in running {
        kernel.await.unwrap();
    }
    *stop.lock().unwrap() = true;
    troubles.await.unwrap();
    for host in &hosts {
        tally
            .hits
            .fetch_add(host.counters().hits, Ordering::Relaxed);
    }
}

fn check(count: u64, plan: Plan) {
    let tally = Arc::new(Tally::default());
    seeds(count, |world| {
        coherence(world, plan, None, Arc::clone(&tally))
    });
    // Otherwise nothing was tried.
    assert!(tally.by_kernels.load(Ordering::Relaxed) > 0);
    assert!(tally.hits.load(Ordering::Relaxed) > 0);
}

pub fn links() -> Faults {
    Faults {
        link_break: 0.02,
        answer_late: 0.05,
        ..slow()
    }
}

#[test]
fn what_guests_see_is_true() {
    let plan = Plan {
        faults: Faults {
            answer_late: 0.05,
            ..slow()
        },
        ..Plan::default()
    };
    check(60, plan);
}

#[test]
fn what_guests_see_is_true_whatever_is_lost() {
    let faults = Faults {
        link_break: 0.02,
        answer_late: 0.05,
        no_space: 0.0,
        ..faulty()
    };
    let plan = Plan {
        faults,
        ..Plan::default()
    };
    check(60, plan);
}

#[test]
fn what_guests_see_is_true_while_leaders_change() {
    let plan = Plan {
        faults: links(),
        leaders: true,
        ..Plan::default()
    };
    check(60, plan);
}

#[test]
fn what_guests_see_is_true_while_sessions_end() {
    let plan = Plan {
        faults: links(),
        sessions: true,
        ..Plan::default()
    };
    check(60, plan);
}

#[test]
fn what_guests_see_is_true_whatever_goes_wrong() {
    let faults = Faults {
        link_break: 0.02,
        answer_late: 0.05,
        ..faulty()
    };
    let plan = Plan {
        faults,
        leaders: true,
        sessions: true,
    };
    check(60, plan);
}
