//! What is cached, and what is left of it after each kind of change.

use namespace::{Directory as DirectoryBody, Time};

use super::*;

const DIR: Ino = Ino(1);
const OTHER: Ino = Ino(2);

fn inode(parent: Option<Ino>, body: Body) -> Inode {
    let at = Time {
        seconds: 1,
        nanoseconds: 0,
    };
    Inode {
        mode: 0o644,
        uid: 0,
        gid: 0,
        nlink: 1,
        parent,
        size: 0,
        atime: at,
        mtime: at,
        ctime: at,
        btime: at,
        change: 1,
        allocated: 0,
        xattr_list_bytes: 0,
        xattr_value_bytes: 0,
        body,
    }
}

pub(in crate::cache) fn file(parent: Ino) -> Inode {
    inode(Some(parent), Body::File(Content::Empty))
}

fn directory(parent: Ino) -> Inode {
    let body = DirectoryBody {
        parent,
        entries: 0,
        next_cookie: FIRST_COOKIE,
    };
    inode(None, Body::Directory(body))
}

fn entry(cookie: u64, name: &str) -> (Entry, Inode) {
    let entry = Entry {
        cookie,
        name: name.into(),
        ino: Ino(cookie + 100),
        kind: Kind::File,
    };
    (entry, file(DIR))
}

/// Puts a page as it is put from an answer.
fn put_page(store: &mut Store, behind: u64, names: &[(u64, &str)], changed: &[&str]) {
    let page: Vec<_> = names
        .iter()
        .map(|(cookie, name)| entry(*cookie, name))
        .collect();
    let changed: HashSet<Vec<u8>> = changed
        .iter()
        .map(|name| name.as_bytes().to_vec())
        .collect();
    for (entry, inode) in &page {
        if !changed.contains(&entry.name) {
            store.put_name(DIR, &entry.name, Named::Present(entry.ino, entry.kind));
            store.put_inode(entry.ino, inode);
        }
    }
    store.put_page(DIR, behind, &page, changed);
}

/// A directory with the names a and b. It is complete.
fn loaded() -> Store {
    let mut store = Store::default();
    store.granted(DIR, true, 1);
    put_page(&mut store, 0, &[(3, "a"), (4, "b")], &[]);
    assert_eq!(store.named(DIR, b"c"), None);
    assert_eq!(store.listing_end(DIR), Some(4));
    put_page(&mut store, 4, &[], &[]);
    assert!(store.is_complete(DIR));
    store
}

fn present(cookie: u64) -> Option<Named> {
    Some(Named::Present(Ino(cookie + 100), Kind::File))
}

#[test]
fn of_a_loaded_directory_absent_names_are_known() {
    let mut store = loaded();
    assert_eq!(store.named(DIR, b"a"), present(3));
    assert_eq!(store.named(DIR, b"c"), Some(Named::Absent));
    let names = store.list(DIR, 3, 9).unwrap();
    assert_eq!(names, [entry(4, "b").0]);
    assert_eq!(store.counts(), (2, 2));
}

#[test]
fn a_name_that_changed_is_unknown_until_it_is_asked_for() {
    let mut store = loaded();
    store.forget_name(DIR, b"c");
    store.forget_listing(DIR);
    assert_eq!(store.named(DIR, b"c"), None);
    assert_eq!(store.named(DIR, b"d"), Some(Named::Absent));
    assert_eq!(store.named(DIR, b"a"), present(3));
    assert_eq!(store.list(DIR, 0, 9), None);
    store.put_name(DIR, b"c", Named::Absent);
    assert_eq!(store.named(DIR, b"c"), Some(Named::Absent));
    assert_eq!(store.list(DIR, 0, 9), None, "a listing begins anew");
    put_page(&mut store, 0, &[(3, "a")], &[]);
    assert_eq!(store.named(DIR, b"d"), None, "until all is loaded again");
}

#[test]
fn names_that_change_while_a_directory_is_loaded_are_unknown_then() {
    let mut store = Store::default();
    store.granted(DIR, true, 1);
    put_page(&mut store, 0, &[(3, "a")], &["x"]);
    store.forget_name(DIR, b"y");
    store.forget_listing(DIR);
    put_page(&mut store, 3, &[(4, "b")], &["y"]);
    assert_eq!(store.list(DIR, 0, 9), None, "it is not shown");
    put_page(&mut store, 4, &[], &[]);
    assert!(store.is_complete(DIR));
    for name in [b"x", b"y"] {
        assert_eq!(store.named(DIR, name), None);
    }
    assert_eq!(store.named(DIR, b"z"), Some(Named::Absent));
    assert_eq!(store.named(DIR, b"b"), present(4));
    assert_eq!(store.list(DIR, 0, 9), None);
}

#[test]
fn a_page_that_does_not_go_on_where_the_listing_ends_is_not_taken() {
    let mut store = Store::default();
    store.granted(DIR, true, 1);
    put_page(&mut store, 3, &[(4, "b")], &[]);
    assert_eq!(store.listing_end(DIR), Some(FIRST_COOKIE - 1));
    assert_eq!(store.named(DIR, b"b"), present(4), "its names are");
    put_page(&mut store, 4, &[], &[]);
    assert!(!store.is_complete(DIR));
}

#[test]
fn too_many_unknown_names_make_all_unknown() {
    let mut store = loaded();
    for number in 0..=UNKNOWN_MAX {
        store.forget_name(DIR, format!("n{number}").as_bytes());
    }
    assert!(!store.is_complete(DIR));
    assert_eq!(store.named(DIR, b"z"), None);
    assert_eq!(store.named(DIR, b"a"), present(3));
}

#[test]
fn records_are_forgotten_by_number_by_place_and_with_their_capability() {
    let mut store = loaded();
    store.granted(OTHER, true, 2);
    store.put_inode(OTHER, &directory(DIR));
    store.granted(Ino(50), false, 3);
    store.put_file(Ino(50), &inode(None, Body::Fifo), None);
    store.put_inode(Ino(60), &file(Ino(9)));
    assert_eq!(
        store.counts(),
        (2, 4),
        "nothing is put where nothing is held"
    );
    store.forget_inode(Ino(103));
    assert_eq!(store.cover_of(Ino(103)), None);
    assert_eq!(store.cover_of(Ino(104)), Some(DIR));
    store.forget_inodes_in(Some(DIR));
    assert_eq!(store.counts(), (2, 1));
    assert!(store.directory(OTHER).unwrap().inode.is_none());
    store.forget_inodes_in(None);
    assert_eq!(store.counts(), (2, 0));
    assert!(store.places.is_empty());
    store.put_inode(OTHER, &directory(DIR));
    store.put_inode(OTHER, &directory(Ino(9)));
    store.forget_inodes_in(Some(DIR));
    assert_eq!(store.counts(), (2, 1), "it was moved");
    store.drop_cover(OTHER);
    store.drop_cover(DIR);
    assert!(store.places.is_empty());
    assert_eq!(store.counts(), (0, 0));
    assert!(store.directory(DIR).is_none());
}

#[test]
fn extents_stay_as_long_as_the_record_says_the_same() {
    let mut store = Store::default();
    let ino = Ino(50);
    store.granted(ino, false, 1);
    let mut record = inode(None, Body::File(Content::Table(2)));
    store.put_file(ino, &record, Some(Arc::new([])));
    store.put_file(ino, &record, None);
    assert!(store.file(ino).unwrap().extents.is_some());
    record.change += 1;
    store.put_file(ino, &record, None);
    assert!(store.file(ino).unwrap().extents.is_none());
}

#[test]
fn what_was_used_least_recently_goes_first() {
    let mut store = Store::default();
    for number in 1..=3 {
        store.granted(Ino(number), true, number);
    }
    store.use_directory(Ino(1));
    assert_eq!(store.oldest(), Some(Ino(2)));
    store.drop_cover(Ino(2));
    assert_eq!(store.oldest(), Some(Ino(3)));
    store.drop_cover(Ino(3));
    assert_eq!(store.oldest(), Some(Ino(1)));
    store.drop_cover(Ino(1));
    assert_eq!(store.oldest(), None);
    assert!(store.queue.is_empty() && store.queued.is_empty());
}
