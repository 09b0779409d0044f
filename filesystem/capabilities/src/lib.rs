//! Capabilities: which host may cache or buffer what of a filesystem, and how it gives that up.
//!
//! A filesystem's namespace lives in a Raft group. The group's leader grants capabilities to the sessions
//! of hosts, as soft state: no log entry, nothing on a disk. Both sides are machines without I/O and
//! without a clock.
//!
//! # Where to begin
//!
//! - [`Kind`] says what may be granted, [`Access`] how an operation touches an inode, and what conflicts.
//! - [`Manager`] is the leader's side. Each operation passes it: [`Manager::begin`] with what it touches,
//!   then [`Action::Proceed`], then [`Manager::end`].
//! - [`Holder`] is a host's side: [`Holder::acquire`], [`Holder::may`], [`Holder::validity`].
//! - [`ToManager`] and [`ToHolder`] are what they say to each other.
//! - [`Coordinator`] is what a leader runs for each filesystem: a manager, [`footprint()`] of operations by
//!   the records, and numbered messages. Answers pass [`Coordinator::tell`].
//!
//! # What an operation touches
//!
//! | operation | touches |
//! |---|---|
//! | look up, list a directory, its attributes | nothing, see [`Manager::may_cache_child`] |
//! | read attributes or data of a file, uncached | file: `ReadFile` |
//! | create, mkdir, symlink, mknod | directory: `ChangeDirectory` |
//! | unlink | directory: `ChangeDirectory`; file: `MoveFile` |
//! | rmdir | both directories: `ChangeDirectory` |
//! | link | directory: `ChangeDirectory`; file: `MoveFile`; directory of its one name so far: `ChangeChild` |
//! | rename | both directories, a directory moved or replaced: `ChangeDirectory`; such a file: `MoveFile` |
//! | change attributes or data of a file | file: `ChangeFile`; directory of its one name: `ChangeChild` |
//! | copy data | source: `ReadFile`; destination: as above |
//! | change attributes of a directory | directory: `ChangeDirectory` |
//! | note that something was read | nothing: others see the access time when they ask again |
//!
//! Symbolic links and special files count as files.
//!
//! Attributes of a directory are cached under its own capability, not its parent's: otherwise each file
//! that is created would recall the parent directory from everybody. Attributes of a file with several
//! names are cached under the file's own capability, since nobody knows all of its directories.
//!
//! # How a conflict is resolved
//!
//! What waits for an inode waits in order of arrival, so nobody starves. The manager sends a recall to each
//! holder in the way. The holder's owner writes back what it had buffered ([`HolderAction::WriteBack`]) and
//! forgets what it had cached ([`HolderAction::Invalidate`]). Guests' kernels cannot be told: the holder
//! waits until the last validity that it gave under this capability has passed, and then answers. A file
//! that others want to read only stays with its writer as [`Kind::FileRead`], which needs no wait.
//! Operations of a holder that its own capability covers overtake whoever waits for it, so that it can
//! write back; its host keeps slots free for these.
//!
//! A session keeps its own capability in its own operations: their replies tell it what changed. A reply to
//! a retry may be older than what came since; after one, what is cached of its inodes is forgotten. While
//! something is buffered for a file, only its host knows what it is: reads of it that come while it is
//! written back wait for that, and do not go to the leader.
//!
//! # What guests are promised
//!
//! A guest may use what it was told for a while if nothing changed it for a longer while
//! ([`Settings::validity`], [`Settings::quiet`]); otherwise whoever changes it next would have to wait. What
//! a capability covers is told in parts ([`Scope`]): the inode's own attributes, each name, each child's
//! attributes. Changes of this host say which of them they touch, and only these are not quiet: a file that
//! is created leaves other names quiet, and what they lead to. Changes of others come with a recall: after
//! that, the capability was held for a short while only, and nothing under it is quiet.
//!
//! A change waits for promises as exactly as they are known. One of this host waits for what other guests
//! were told of the scopes that it touches; where too much is promised to remember each scope, for what they
//! were told under the capability at all. A recall waits for all promises under the capability.
//!
//! # Invariants
//!
//! - While a session may buffer changes of a file, no other one may use anything cached of it.
//! - While an operation that changes something is under way, no other session, and no guest of one, uses
//!   anything cached that it changes. A holder that does not answer is waited for until its session has
//!   ended.
//! - The same holds between guests of one host ([`Holder::begin_change`]).
//! - Nothing is granted, and no operation goes on, while somebody else may lead.
//! - Nothing is promised to guests for longer than the session's heartbeat lease lasts.
//!
//! One thing is less than exact: a guest's kernel may answer from its cache between the moment at which a
//! change of this same guest is applied and the one at which it gets the reply. A third party that was
//! faster than the reply could notice.
//!
//! # Transport
//!
//! One connection for each session and leader, ordered in both directions. It may break: all that is on its
//! way is lost, or comes late and is recognised by its [`Link`]. On the next connection the holder claims
//! what it holds ([`ToManager::Claims`]) and asks again for what it wants. Numbers of grants ([`GrantId`])
//! tell an answer to an old recall from one to the present grant.
//!
//! Operations, questions and their replies travel apart from it, in any order. So each answer says how many
//! messages had been sent on the session's connection before the leader looked ([`Coordinator::sent`]): it
//! may be cached under a grant among these, as long as that is held.
//!
//! # Operations that decide about each other
//!
//! Which inode a name leads to, and in which directory a file has its only name, is found in the records
//! when an operation comes, and may be otherwise when it is applied. So an operation that changes one of
//! these ([`Part`]) is under way alone among those whose footprint depends on it, and a footprint counts only
//! if it is the same once nothing is in the operation's way.
//!
//! # Clocks
//!
//! Each machine is passed its own monotonic time. Times of two machines are never compared; where two
//! clocks count the same duration, [`Settings::stretch`] makes one count longer by the drift bound.
//!
//! # How it fails
//!
//! - *A holder does not answer.* [`Action::Late`] names it. Operations in conflict wait until its session
//!   has ended, by its heartbeat lease or by the registration of its next incarnation.
//! - *The leader is lost.* A new one waits for the claims of all sessions ([`Action::Reclaimed`]). Only
//!   what cannot conflict goes on: reading names, and what a claim covers. A lost host delays this until
//!   its session has ended.
//! - *The leader is cut off.* Its lease ends, and everything waits.
//! - *A session's lease ends.* The holder drops all at once ([`HolderAction::SessionOver`]). What was
//!   buffered and not committed is lost. A session that lives on goes on with nothing ([`Holder::restart`]).
//! - *A host is stopped between asking [`Holder::may`] and answering its guest,* for longer than its lease:
//!   the guest gets an answer that is too old. A guest that is paused itself may use a validity for longer.
//! - *A session holds too much.* The least recently granted capabilities are recalled. If it does not
//!   answer, it is refused more at twice the number.
//!
//! - *A session sends too much, or does not fetch its messages.* Its link is closed ([`Limit`]).
//!
//! # Bounds
//!
//! Memory at the leader: a session holds at most 2 × [`Settings::capabilities_max`] + [`WAITING_MAX`]
//! capabilities. It has at most [`WAITING_MAX`] requests and as many waiting operations. At most
//! [`ANSWERS_MAX`] answers wait for it, and one recall of each capability, or two of a file that it may
//! continue to read.
//!
//! Work at the leader: a message costs a few look-ups and one step for each session that holds or requests
//! the same inode. The capabilities of an ended session, and those that a session does not claim, are removed
//! a few at a time ([`Manager::tick`]). No message of one session increases the work for other messages.

mod coordinator;
mod exclusion;
mod footprint;
mod holder;
mod kind;
mod limits;
mod manager;
mod message;
mod settings;
mod time;

pub use coordinator::{Coordinator, Event, Gone, Told};
pub use footprint::{Footprint, Part, files_told, footprint};
pub use holder::{GuestId, Holder, HolderAction, Scope, WANTED_MAX};
pub use kind::{Access, Kind, Touch};
pub use limits::{ANSWERS_MAX, Limit, MESSAGES_MAX};
pub use manager::{
    Action, Counts, FOOTPRINT_MAX, Manager, Moment, OperationId, SessionEnd, WAITING_MAX,
};
pub use message::{Claim, GrantId, Link, Refusal, ToHolder, ToManager};
pub use settings::Settings;
pub use time::Instant;
