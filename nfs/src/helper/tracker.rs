//! Keeps for the kernel which clients may reclaim: what nfsdcld(8) does, with the records on the volumes.
//!
//! The kernel asks through a pipe of rpc_pipefs, which is there while its server runs. It waits for the
//! answer before a client gets its first state. So a record is on every volume that this machine exports, and
//! synced, before a client has anything that it could want back. With the volume, the records move to another
//! NFS node. The next [start](Tracker::add) of the server there hands them to its kernel.

mod protocol;

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{AtFlags, Mode, OFlags};

use crate::records::{ClientId, ClientRecords};

use protocol::{Command, MESSAGE_BYTES, Message};

/// Where a volume keeps the records: below its root, closed to everybody but root.
const DIR: &str = ".penstock";
const FILE: &str = "nfs-clients.json";
const FILE_NEW: &str = "nfs-clients.new";
/// More than the largest number of records takes.
const FILE_BYTES_MAX: u64 = 256 << 20;
/// How often the pipe is looked for while there is none. The kernel's server waits for a second for somebody
/// who opens it.
const PIPE_PAUSE: Duration = Duration::from_millis(50);
/// How long one wait for a question takes.
const WAIT: Timespec = Timespec {
    tv_sec: 1,
    tv_nsec: 0,
};

/// The records of the volumes that are exported here.
#[derive(Debug, Clone, Default)]
pub struct Tracker(Arc<Mutex<BTreeMap<String, Kept>>>);

#[derive(Debug)]
struct Kept {
    point: PathBuf,
    records: ClientRecords,
}

impl Tracker {
    /// Answers the kernel, whose pipe is at `pipe`, for as long as the process lives.
    pub fn start(&self, pipe: PathBuf) -> io::Result<()> {
        let tracker = self.clone();
        let thread = std::thread::Builder::new().name("nfs-clients".into());
        thread.spawn(move || tracker.serve(&pipe)).map(drop)
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Kept>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a mounted volume in. True if the server has to start anew, for it does not know clients that may
    /// reclaim there.
    pub fn add(&self, name: &str, point: &Path) -> io::Result<bool> {
        let mut all = self.lock();
        if all.contains_key(name) {
            return Ok(false);
        }
        let mut records = load(point)?;
        let has_clients = !records.is_empty();
        // Clients that have state already are not asked about again.
        let known: Vec<ClientId> = all
            .values()
            .flat_map(|kept| kept.records.reclaimable().cloned())
            .collect();
        for client in known {
            records.add(client);
        }
        let kept = Kept {
            point: point.to_owned(),
            records,
        };
        kept.save()?;
        all.insert(name.to_owned(), kept);
        Ok(has_clients)
    }

    /// A volume is exported here no more. Its records stay as they are, for the next NFS node.
    pub fn remove(&self, name: &str) {
        self.lock().remove(name);
    }

    fn serve(&self, pipe: &Path) {
        loop {
            match OpenOptions::new().read(true).write(true).open(pipe) {
                Ok(mut file) => {
                    if let Err(error) = self.answer_all(&mut file) {
                        tracing::debug!(%error, "the pipe of the kernel's NFS server has gone");
                    }
                }
                Err(e) if e.kind() == io::ErrorKind::NotFound => {}
                Err(error) => {
                    tracing::warn!(%error, pipe = %pipe.display(), "open the kernel's pipe")
                }
            }
            std::thread::sleep(PIPE_PAUSE);
        }
    }

    /// Answers until the pipe is gone, with the server that it belongs to.
    fn answer_all(&self, pipe: &mut File) -> io::Result<()> {
        loop {
            let mut waiting = [PollFd::new(&*pipe, PollFlags::IN)];
            if poll(&mut waiting, Some(&WAIT))? == 0 {
                continue;
            }
            let mut bytes = [0; MESSAGE_BYTES];
            let got = pipe.read(&mut bytes)?;
            if got == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            let Some(message) = Message::parse(&bytes[..got]) else {
                return Err(io::Error::other(format!("{got} bytes that are no message")));
            };
            self.answer(&message, pipe)?;
        }
    }

    fn answer(&self, asked: &Message, pipe: &mut impl Write) -> io::Result<()> {
        let status = match asked.command() {
            Some(Command::GetVersion) => return pipe.write_all(&asked.version().bytes()),
            Some(Command::GraceStart) => {
                let status = self.change_all(|records| {
                    records.begin_grace();
                    true
                });
                for client in self.reclaimable() {
                    pipe.write_all(&asked.in_progress(&client).bytes())?;
                }
                status
            }
            Some(Command::GraceDone) => self.change_all(|records| {
                records.end_grace();
                true
            }),
            Some(Command::Create) => match asked.client() {
                Some(client) => self.change_all(|records| records.add(client.clone())),
                None => -libc::EINVAL,
            },
            Some(Command::Remove) => match asked.client() {
                Some(client) => self.change_all(|records| {
                    records.remove(&client);
                    true
                }),
                None => -libc::EINVAL,
            },
            Some(Command::Check) => match asked.client() {
                Some(client) if self.reclaimable().contains(&client) => 0,
                _ => -libc::EACCES,
            },
            None => -libc::EOPNOTSUPP,
        };
        pipe.write_all(&asked.status(status).bytes())
    }

    fn reclaimable(&self) -> std::collections::BTreeSet<ClientId> {
        let all = self.lock();
        all.values()
            .flat_map(|kept| kept.records.reclaimable().cloned())
            .collect()
    }

    /// Changes the records of all volumes and saves them; the status for the kernel.
    fn change_all(&self, change: impl Fn(&mut ClientRecords) -> bool) -> i32 {
        let mut status = 0;
        for (name, kept) in &mut *self.lock() {
            let before = kept.records.clone();
            if !change(&mut kept.records) {
                status = -libc::ENOSPC;
            }
            if kept.records == before {
                continue;
            }
            if let Err(error) = kept.save() {
                tracing::error!(export = name, %error, "save which clients may reclaim");
                status = -libc::EIO;
            }
        }
        status
    }
}

/// The directory of the records. A client that may write the root of its export could put a link in its
/// place: that is not followed.
fn open_dir(point: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let root = rustix::fs::open(point, flags, Mode::empty())?;
    match rustix::fs::mkdirat(&root, DIR, Mode::from_raw_mode(0o700)) {
        Ok(()) => rustix::fs::fsync(&root)?,
        Err(rustix::io::Errno::EXIST) => {}
        Err(e) => return Err(e.into()),
    }
    Ok(rustix::fs::openat(&root, DIR, flags, Mode::empty())?)
}

fn load(point: &Path) -> io::Result<ClientRecords> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = match rustix::fs::openat(open_dir(point)?, FILE, flags, Mode::empty()) {
        Ok(file) => File::from(file),
        Err(rustix::io::Errno::NOENT) => return Ok(ClientRecords::default()),
        Err(e) => return Err(e.into()),
    };
    let mut bytes = Vec::new();
    file.take(FILE_BYTES_MAX).read_to_end(&mut bytes)?;
    Ok(serde_json::from_slice(&bytes)?)
}

impl Kept {
    /// In one step: a crash leaves the records of before or these.
    fn save(&self) -> io::Result<()> {
        let dir = open_dir(&self.point)?;
        // One that is there was left by a crash, or put there by a client: it is not written into.
        match rustix::fs::unlinkat(&dir, FILE_NEW, AtFlags::empty()) {
            Ok(()) | Err(rustix::io::Errno::NOENT) => {}
            Err(e) => return Err(e.into()),
        }
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let file = rustix::fs::openat(&dir, FILE_NEW, flags, Mode::from_raw_mode(0o600))?;
        let mut file = File::from(file);
        file.write_all(&serde_json::to_vec(&self.records)?)?;
        file.sync_all()?;
        rustix::fs::renameat(&dir, FILE_NEW, &dir, FILE)?;
        Ok(rustix::fs::fsync(&dir)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ask(tracker: &Tracker, command: u8, name: &[u8]) -> Vec<Message> {
        let mut out = Vec::new();
        tracker
            .answer(&Message::new(command, name), &mut out)
            .unwrap();
        out.chunks(MESSAGE_BYTES)
            .map(|bytes| Message::parse(bytes).unwrap())
            .collect()
    }

    fn statuses(messages: &[Message]) -> Vec<i16> {
        messages.iter().map(Message::told_status).collect()
    }

    const CREATE: u8 = 0;
    const GRACE_DONE: u8 = 3;
    const GRACE_START: u8 = 4;

    #[test]
    fn clients_move_with_their_volume() {
        let dir = tempfile::tempdir().unwrap();
        let first = Tracker::default();
        assert!(
            !first.add("data", dir.path()).unwrap(),
            "nobody has anything yet"
        );
        assert_eq!(statuses(&ask(&first, GRACE_START, b"")), [0]);
        assert_eq!(statuses(&ask(&first, CREATE, b"one")), [0]);
        first.remove("data");

        let second = Tracker::default();
        assert!(
            second.add("data", dir.path()).unwrap(),
            "its client may reclaim"
        );
        let told = ask(&second, GRACE_START, b"");
        assert_eq!(statuses(&told), [-libc::EINPROGRESS as i16, 0]);
        assert_eq!(told[0].client(), ClientId::new(b"one"));
        // It does not come back.
        ask(&second, GRACE_DONE, b"");
        assert_eq!(statuses(&ask(&second, GRACE_START, b"")), [0]);
    }

    #[test]
    fn a_client_of_one_volume_is_recorded_on_one_that_comes_later() {
        let (one, two) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let tracker = Tracker::default();
        tracker.add("one", one.path()).unwrap();
        ask(&tracker, CREATE, b"c");
        assert!(!tracker.add("two", two.path()).unwrap());
        assert_eq!(load(two.path()).unwrap().reclaimable().count(), 1);
    }

    #[test]
    fn what_is_no_question_is_refused_and_the_kernel_goes_on() {
        let tracker = Tracker::default();
        for (command, name) in [(CREATE, &b""[..]), (77, b"x")] {
            assert!(ask(&tracker, command, name)[0].told_status() < 0);
        }
        assert!(Message::parse(&[0; 3]).is_none());
    }

    #[test]
    fn records_that_cannot_be_saved_are_told() {
        let dir = tempfile::tempdir().unwrap();
        let tracker = Tracker::default();
        tracker.add("data", dir.path()).unwrap();
        let (records, elsewhere) = (dir.path().join(DIR), tempfile::tempdir().unwrap());
        std::fs::remove_dir_all(&records).unwrap();
        std::os::unix::fs::symlink(elsewhere.path(), &records).unwrap();
        assert_eq!(statuses(&ask(&tracker, CREATE, b"c")), [-libc::EIO as i16]);
        assert_eq!(
            elsewhere.path().read_dir().unwrap().count(),
            0,
            "a link was followed"
        );
        std::fs::remove_file(&records).unwrap();
        assert_eq!(statuses(&ask(&tracker, CREATE, b"d")), [0]);
    }
}
