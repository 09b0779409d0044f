use super::*;

const INO: Ino = Ino(7);
const GUEST: GuestId = GuestId(1);
const OTHER: GuestId = GuestId(2);

fn inodes() -> Arc<OpenInodes> {
    let inodes = OpenInodes::new(
        #[cfg(feature = "testing")]
        None,
    );
    inodes.add_guest(GUEST, GuestSession::default());
    inodes.add_guest(OTHER, GuestSession::default());
    inodes
}

fn telling(inodes: &Arc<OpenInodes>, guest: GuestId) -> Telling {
    inodes.begin_telling(guest, GuestSession::default())
}

fn tell(inodes: &Arc<OpenInodes>, guest: GuestId) {
    telling(inodes, guest).tell(INO, true).unwrap();
}

fn found(inodes: &OpenInodes, now: Instant) {
    inodes.note_orphan(now, INO, inodes.moment());
}

/// Returns the orphans that are released.
fn released(inodes: &Arc<OpenInodes>) -> Vec<Ino> {
    let releases = inodes.begin_releases(Instant::START, 9);
    releases.iter().map(|release| release.ino).collect()
}

#[test]
fn an_orphan_is_released_when_its_last_handle_is_closed() {
    let inodes = inodes();
    let first = inodes.open(INO, OpenKind::File).unwrap().into_handle();
    let second = inodes.open(INO, OpenKind::File).unwrap();
    found(&inodes, Instant::START);
    assert!(released(&inodes).is_empty());
    drop(first);
    assert!(released(&inodes).is_empty());
    drop(second);
    let releases = inodes.begin_releases(Instant::START, 9);
    assert_eq!(releases.len(), 1);
    assert!(
        inodes.open(INO, OpenKind::File).is_none(),
        "the inode is being released"
    );
    let stale = telling(&inodes, GUEST).tell(INO, true);
    assert_eq!(stale, Err(Errno::ESTALE), "the inode is being released");
    drop(releases);
    assert_eq!(inodes.len(), 0);
}

#[test]
fn an_orphan_is_released_when_the_last_guest_has_forgotten_it() {
    let inodes = inodes();
    tell(&inodes, GUEST);
    tell(&inodes, GUEST);
    tell(&inodes, OTHER);
    found(&inodes, Instant::START);
    assert!(released(&inodes).is_empty());
    inodes.forget(GUEST, INO, 1);
    inodes.forget(OTHER, INO, 1);
    assert!(inodes.has_user(INO) && !inodes.has_handle(INO));
    assert!(released(&inodes).is_empty());
    inodes.forget(GUEST, INO, 1);
    assert_eq!(released(&inodes), [INO]);
    assert!(!inodes.has_user(INO));
}

#[test]
fn an_inode_is_kept_while_it_is_open_or_looked_up() {
    for closes_first in [true, false] {
        let inodes = inodes();
        tell(&inodes, GUEST);
        let open = inodes.open(INO, OpenKind::File).unwrap().into_handle();
        found(&inodes, Instant::START);
        match closes_first {
            true => drop(open),
            false => {
                inodes.forget(GUEST, INO, 1);
                assert!(released(&inodes).is_empty());
                drop(open);
                assert_eq!(released(&inodes), [INO]);
                continue;
            }
        }
        assert!(released(&inodes).is_empty());
        inodes.forget(GUEST, INO, 1);
        assert_eq!(released(&inodes), [INO]);
    }
}

#[test]
fn an_inode_in_a_pending_reply_is_not_released() {
    let inodes = inodes();
    let first = telling(&inodes, GUEST);
    found(&inodes, Instant::START);
    assert!(released(&inodes).is_empty());
    let _later = telling(&inodes, GUEST);
    first.tell(INO, true).unwrap();
    drop(first);
    assert!(released(&inodes).is_empty(), "the guest has looked it up");
    inodes.forget(GUEST, INO, 1);
    assert_eq!(released(&inodes), [INO], "a later request does not wait");
}

#[test]
fn an_inode_without_a_name_is_returned_only_while_it_is_used() {
    let inodes = inodes();
    let request = telling(&inodes, OTHER);
    assert_eq!(request.tell(INO, false), Err(Errno::ESTALE));
    tell(&inodes, GUEST);
    assert_eq!(request.tell(INO, false), Ok(()));
    assert_eq!(request.tell(Ino::ROOT, false), Ok(()));
}

#[test]
fn an_unmount_forgets_all_lookups() {
    let inodes = inodes();
    tell(&inodes, GUEST);
    let late = telling(&inodes, GUEST);
    found(&inodes, Instant::START);
    inodes.add_guest(GUEST, GuestSession(1));
    assert_eq!(late.tell(INO, true), Err(Errno::EIO));
    drop(late);
    assert!(!inodes.has_user(INO));
    // The background search finds the orphan.
    found(&inodes, Instant::START);
    assert_eq!(released(&inodes), [INO]);
    inodes.remove_guest(OTHER);
    assert_eq!(telling(&inodes, OTHER).tell(INO, true), Err(Errno::EIO));
    inodes.forget(OTHER, INO, 1);
}

#[test]
fn a_listing_that_fails_counts_no_lookup() {
    let (inodes, other, going) = (inodes(), Ino(8), Ino(9));
    inodes.note_orphan(Instant::START, going, inodes.moment());
    let releases = inodes.begin_releases(Instant::START, 9);
    assert_eq!(releases.len(), 1);
    tell(&inodes, GUEST);
    let listing = telling(&inodes, GUEST);
    let told = listing.tell_all(&[INO, other, going]);
    assert_eq!(told, Err(Errno::ESTALE));
    assert!(!inodes.has_user(other));
    inodes.forget(GUEST, INO, 1);
    assert!(!inodes.has_user(INO), "it was counted once, before");
    // What it took back is let go of, if its name is gone meanwhile.
    assert_eq!(listing.tell_all(&[other]), Ok(()));
    inodes.note_orphan(Instant::START, other, inodes.moment());
    assert_eq!(listing.tell_all(&[other, going]), Err(Errno::ESTALE));
    assert!(inodes.has_user(other), "it was counted before");
    listing.take_back(other);
    drop(listing);
    assert_eq!(released(&inodes), [other]);
    drop(releases);
}

#[test]
fn lookups_that_are_taken_back_are_not_those_of_a_later_mount() {
    let inodes = inodes();
    let late = telling(&inodes, GUEST);
    late.tell(INO, true).unwrap();
    inodes.add_guest(GUEST, GuestSession(1));
    let now = inodes.begin_telling(GUEST, GuestSession(1));
    now.tell(INO, true).unwrap();
    late.take_back(INO);
    assert!(inodes.has_user(INO));
}

#[test]
fn an_orphan_that_is_not_open_is_given_up_when_it_is_old() {
    let inodes = inodes();
    let old = Instant::START + GIVEN_UP_AFTER;
    tell(&inodes, GUEST);
    found(&inodes, Instant::START);
    assert_eq!(inodes.give_up(Instant::START, Ino(0), 9), (None, 0));
    let open = inodes.open(INO, OpenKind::File).unwrap().into_handle();
    assert_eq!(inodes.give_up(old, Ino(0), 9), (None, 0));
    drop(open);
    assert!(released(&inodes).is_empty(), "the guest has looked it up");
    assert_eq!(inodes.give_up(old, Ino(0), 1), (Some(Ino(8)), 1));
    assert_eq!(inodes.give_up(old, Ino(8), 1), (None, 0));
    assert_eq!(released(&inodes), [INO]);
    inodes.forget(GUEST, INO, 1);
    assert!(released(&inodes).is_empty(), "once");
}

#[test]
fn a_new_session_holds_no_orphans() {
    let inodes = inodes();
    tell(&inodes, GUEST);
    found(&inodes, Instant::START);
    inodes.set_held_from(Ino(9));
    inodes.session_replaced();
    assert_eq!(inodes.begin_held(), Ino(0));
    inodes.forget(GUEST, INO, 1);
    assert!(released(&inodes).is_empty());
}

#[test]
fn a_file_with_its_first_name_is_no_orphan_whatever_was_answered_before() {
    let inodes = inodes();
    let held = |inodes: &OpenInodes| inodes.note_held(Instant::START, INO, inodes.moment());
    tell(&inodes, GUEST);
    found(&inodes, Instant::START);
    // The answer was given before the name.
    inodes.begin_held();
    inodes.note_name(INO);
    held(&inodes);
    inodes.end_held();
    inodes.forget(GUEST, INO, 1);
    assert!(released(&inodes).is_empty());
    // The next one is right: it has lost that name again.
    inodes.begin_held();
    held(&inodes);
    inodes.end_held();
    assert_eq!(released(&inodes), [INO]);
}

#[test]
fn an_answer_is_not_used_when_too_many_files_got_a_name_meanwhile() {
    let inodes = inodes();
    inodes.begin_held();
    for number in 0..2 * NAMED_MAX as u64 {
        inodes.note_name(Ino(100 + number));
    }
    let remembered = |inodes: &OpenInodes| lock(&inodes.state).named.as_ref().map(BTreeSet::len);
    assert_eq!(remembered(&inodes), Some(NAMED_MAX));
    inodes.note_held(Instant::START, INO, inodes.moment());
    inodes.end_held();
    assert!(released(&inodes).is_empty());
    inodes.note_name(Ino(100));
    assert_eq!(remembered(&inodes), None, "nobody asks");
}

#[test]
fn waiting_releases_are_bounded() {
    let inodes = inodes();
    let _telling = telling(&inodes, GUEST);
    let found = inodes.moment();
    for number in 2..RELEASES_MAX as u64 * 2 {
        inodes.note_orphan(Instant::START, Ino(number), found);
    }
    assert_eq!(lock(&inodes.state).to_release.len(), RELEASES_MAX);
}
