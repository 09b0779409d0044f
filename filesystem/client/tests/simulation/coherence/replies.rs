//! What the replies to changes of names say was so while they were under way.

use fuse_codec::{Errno, RenameFlags};

use super::Kernel;
use crate::history::{Fact, History, Moment, Value};

type Span = (Moment, Moment);

fn fact((dir, name): (u64, &str)) -> Fact {
    Fact::Name(dir, name.into())
}

impl Kernel {
    /// Something held in a span that ends now.
    fn check(
        &self,
        from: Moment,
        said: impl FnOnce() -> String,
        names: &[&Fact],
        holds: impl FnOnce(&History, Span) -> bool,
    ) {
        let violation = {
            let state = self.world.state();
            let history = state.history.as_ref().unwrap();
            let span = (from, history.now());
            let told = || {
                names
                    .iter()
                    .map(|name| history.tell(name))
                    .collect::<Vec<_>>()
            };
            (!holds(history, span)).then(|| format!("{} in {span:?}: {:?}", said(), told()))
        };
        if let Some(violation) = violation {
            self.world.violation(violation);
        }
    }

    /// A file was opened by its name, or made: the name led to it.
    pub(super) fn check_created(
        &self,
        from: Moment,
        name: (u64, &str),
        created: Result<u64, &Errno>,
    ) {
        if let Ok(ino) = created {
            self.saw(from, &fact(name), &Value::Leads(ino));
        }
    }

    /// A name was made that was not there, or was there.
    pub(super) fn check_made(&self, from: Moment, name: (u64, &str), made: Result<u64, Errno>) {
        let (said, name) = (|| format!("{name:?} is made: {made:?}"), &fact(name));
        self.check(from, said, &[name], |history, span| match made {
            Ok(ino) => history.changes(name, span).contains(&(None, Some(ino))),
            Err(Errno::EEXIST) => history.led(name, span),
            Err(_) => true,
        });
    }

    /// A name was removed that was there, or was not there.
    pub(super) fn check_removed(
        &self,
        from: Moment,
        name: (u64, &str),
        removed: Result<(), Errno>,
    ) {
        let (said, name) = (|| format!("{name:?} is removed: {removed:?}"), &fact(name));
        self.check(from, said, &[name], |history, span| match removed {
            Ok(()) => {
                let mut changes = history.changes(name, span).into_iter();
                changes.any(|(before, after)| before.is_some() && after.is_none())
            }
            Err(Errno::ENOENT) => history.was(name, &Value::Gone, span),
            Err(_) => true,
        });
    }

    /// One name got what the other one led to.
    pub(super) fn check_renamed(
        &self,
        from: Moment,
        old: (u64, &str),
        new: (u64, &str),
        flags: RenameFlags,
        renamed: Result<(), Errno>,
    ) {
        let said = || format!("{old:?} to {new:?}, {flags:?}: {renamed:?}");
        let (old, new) = (&fact(old), &fact(new));
        self.check(from, said, &[old, new], |history, span| match renamed {
            Ok(()) => is_renamed(history, span, old, new),
            Err(Errno::ENOENT) => [old, new]
                .iter()
                .any(|name| history.was(name, &Value::Gone, span)),
            Err(Errno::EEXIST) => history.led(new, span),
            Err(_) => true,
        });
    }
}

fn is_renamed(history: &History, span: Span, old: &Fact, new: &Fact) -> bool {
    // Nothing happens to a name that is renamed to itself, nor to two names of one inode.
    if old == new {
        return history.led(old, span);
    }
    let gained = history.changes(new, span);
    let moved = history.changes(old, span).into_iter();
    let mut moved = moved.filter_map(|(before, _)| before);
    let has_moved = moved.any(|ino| gained.iter().any(|(_, after)| *after == Some(ino)));
    has_moved || {
        let mut common = history.leads(old).into_iter();
        common.any(|ino| {
            [old, new]
                .iter()
                .all(|name| history.was(name, &Value::Leads(ino), span))
        })
    }
}
