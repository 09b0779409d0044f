//! Opening the database and the groups in it. Errors are one line and come before anything is served.

use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::{Arc, PoisonError};

use openraft::EntryPayload;
use rocksdb::{ColumnFamilyDescriptor, ErrorKind, IteratorMode, WriteBatch};
use tokio::sync::oneshot;

use super::ballast;
use super::database::{Database, Rocks, Sync};
use super::error::DbError;
use super::format::{FORMAT, KEY_FORMAT, KEY_STATE_FAMILY, LOG, META, STATE_PREFIX, encode};
use super::group::{GroupId, GroupStore, Names};
use super::options::{db_options, options_of};

/// Every database of RocksDB has this family. Left to RocksDB it would have a write buffer of 64 MiB, and as
/// much space would have to be free before a database that had been full goes on.
const DEFAULT: &str = "default";

/// Reason why a database cannot be opened.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DatabaseError {
    /// Another process has it open.
    #[error("it is in use by another process")]
    Locked,
    /// A file cannot be made, read or written.
    #[error("{0}")]
    Io(String),
    /// The content is damaged.
    #[error("{0}")]
    Corrupt(String),
    /// A newer program made it.
    #[error("it has format {found}, and this program knows {known}")]
    NewerFormat {
        /// Its format.
        found: u32,
        /// Format that this program knows.
        known: u32,
    },
}

/// Reason why a group in a database cannot be used.
#[derive(Debug, Clone, thiserror::Error)]
pub enum CheckError {
    /// Its parts do not fit each other.
    #[error("{0}")]
    Damaged(String),
    /// It cannot be read or written.
    #[error(transparent)]
    Db(#[from] DbError),
}

impl Database {
    /// Returns whether there is a database in `dir`, intact or damaged.
    #[must_use]
    pub fn exists(dir: &Path) -> bool {
        let mut entries = std::fs::read_dir(dir.join("db")).into_iter().flatten();
        entries.next().is_some()
    }

    /// Opens or makes the database in `dir`. The receiver is notified when it is closed again.
    ///
    /// # Errors
    /// In use, damaged, not accessible, or made by a newer version.
    pub fn open(dir: &Path) -> Result<(Arc<Self>, oneshot::Receiver<()>), DatabaseError> {
        let db_dir = dir.join("db");
        std::fs::create_dir_all(dir.join("snapshots")).map_err(io_error)?;
        // RocksDB writes before it reads.
        ballast::tend(dir);
        if is_fresh(&db_dir).map_err(io_error)? {
            make(dir, &db_dir)?;
        }
        if !db_dir.join("CURRENT").exists() {
            return Err(corrupt("the file CURRENT is missing"));
        }
        let families = Rocks::list_cf(&db_options(), &db_dir).map_err(|error| explain(&error))?;
        let missing = [META, LOG]
            .into_iter()
            .find(|name| !families.iter().any(|family| family == name));
        if let Some(name) = missing {
            return Err(corrupt(&format!("the column family {name:?} is missing")));
        }
        let descriptors = families
            .iter()
            .map(|name| ColumnFamilyDescriptor::new(name, options_of(name)));
        let rocks = Rocks::open_cf_descriptors(&db_options(), &db_dir, descriptors)
            .map_err(|error| explain(&error))?;
        let (database, on_closed) = Self::new(rocks, families, dir.to_owned());
        match database.get::<u32>(KEY_FORMAT)? {
            Some(FORMAT) => {}
            Some(found) => {
                let known = FORMAT;
                return Err(DatabaseError::NewerFormat { found, known });
            }
            None => database.initialise()?,
        }
        Ok((Arc::new(database), on_closed))
    }

    /// First start, or a crash during it: nothing was written before the format.
    fn initialise(&self) -> Result<(), DatabaseError> {
        let main = Names::new(self.dir(), GroupId::Main);
        let log = self.family(&main.log);
        let mut entries = self.rocks.iterator_cf(&log, IteratorMode::Start);
        if entries.next().is_some() {
            return Err(corrupt("the format number is missing"));
        }
        let mut batch = WriteBatch::default();
        batch.put_cf(&self.family(META), KEY_FORMAT, encode(&FORMAT));
        self.name_first_family(&main, &mut batch);
        Ok(self.write(batch, Sync::Yes)?)
    }

    /// Makes the first family of a group's records count.
    fn name_first_family(&self, names: &Names, batch: &mut WriteBatch) {
        let first = encode(&names.first_state_family());
        batch.put_cf(&self.family(META), names.key(KEY_STATE_FAMILY), first);
    }

    /// Numbers of the groups that existed when the database was opened.
    #[must_use]
    pub fn numbered_groups(&self) -> Vec<u32> {
        let number = |family: &String| {
            let of_group = family.strip_prefix(LOG)?.strip_prefix('.')?;
            of_group.parse().ok()
        };
        self.families.iter().filter_map(number).collect()
    }
}

impl GroupStore {
    /// Opens a group's part of a database. Makes it, if it is a numbered group that is not there yet. The
    /// caller calls [`Self::check_log`] before it uses the log.
    ///
    /// # Errors
    /// Damaged, or not accessible.
    pub fn open(database: Arc<Database>, group: GroupId) -> Result<Self, CheckError> {
        let store = Self::new(database, group);
        std::fs::create_dir_all(store.snapshots_dir()).map_err(DbError::from)?;
        let (rocks, names) = (&store.database.rocks, &store.names);
        let key = names.key(KEY_STATE_FAMILY);
        let is_named = store.database.get::<String>(&key)?.is_some();
        if !is_named && group != GroupId::Main {
            for name in [&names.log, &names.first_state_family()] {
                // A crash may have come after one of them.
                if rocks.cf_handle(name).is_none() {
                    let made = rocks.create_cf(name, &options_of(name));
                    made.map_err(DbError::from)?;
                }
            }
            let mut batch = WriteBatch::default();
            store.database.name_first_family(names, &mut batch);
            store.database.write(batch, Sync::Yes)?;
            return Ok(store);
        }
        if rocks.cf_handle(&names.log).is_none() {
            return Err(missing_family(&names.log));
        }
        store.find_records()?;
        Ok(store)
    }

    /// Finds the family of the records that count, and removes others.
    fn find_records(&self) -> Result<(), CheckError> {
        let key = self.names.key(KEY_STATE_FAMILY);
        let name: String = self.database.get(&key)?.ok_or_else(|| {
            CheckError::Damaged("the name of the state family is missing".to_owned())
        })?;
        let is_there = |family: &str| self.database.rocks.cf_handle(family).is_some();
        if !is_there(&name) {
            return Err(missing_family(&name));
        }
        let families = self.database.families.iter();
        let others = families.filter(|other| other.starts_with(&self.names.state_prefix));
        for other in others.filter(|other| **other != name && is_there(other)) {
            // Left by a crash while a snapshot was installed.
            self.database.rocks.drop_cf(other).map_err(DbError::from)?;
        }
        let mut current = self
            .state_family
            .write()
            .unwrap_or_else(PoisonError::into_inner);
        *current = name;
        Ok(())
    }

    /// Checks that the log reaches without a hole from the last removed entry to at least the last applied
    /// one, and that every command in it passes `check`.
    ///
    /// # Errors
    /// Damaged, or not accessible.
    pub fn check_log(&self, check: fn(&[u8]) -> Result<(), String>) -> Result<(), CheckError> {
        let purged = self.purged()?.map(|id| id.index);
        let applied = self.read(|view| view.applied())?.last.map(|id| id.index);
        self.progress
            .send_modify(|progress| progress.applied = applied);
        let mut last = purged;
        let mut hole = None;
        let mut refused = Ok(());
        self.for_each_entry(|index, entry| {
            if let (EntryPayload::Normal(command), Ok(())) = (&entry.payload, &refused) {
                refused = check(&command.0);
            }
            let expected = last.map_or(0, |last| last + 1);
            if hole.is_none() && (index != expected || entry.log_id.index != index) {
                hole = Some((expected, index));
            }
            last = Some(index);
        })?;
        refused.map_err(|detail| DbError::Damaged {
            what: "a log entry".to_owned(),
            detail,
        })?;
        if let Some((expected, found)) = hole {
            return Err(CheckError::Damaged(format!(
                "the log has entry {found} where {expected} must be"
            )));
        }
        // Installing a snapshot moves `applied` beyond the log, before the log is cut to it: no hole, but a
        // log that ends early with everything in it applied. Then openraft removes it at start.
        let behind = purged > applied;
        if behind {
            return Err(CheckError::Damaged(format!(
                "the log begins after entry {purged:?} and the records end at {applied:?}"
            )));
        }
        Ok(())
    }
}

fn missing_family(name: &str) -> CheckError {
    CheckError::Damaged(format!("the column family {name:?} is missing"))
}

/// True if there is no database yet.
fn is_fresh(db_dir: &Path) -> io::Result<bool> {
    match std::fs::read_dir(db_dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(true),
        entries => Ok(entries?.next().is_none()),
    }
}

/// Makes a database without records. It gets its name once it is whole: RocksDB makes one family after the
/// other, and what a crash leaves between two of them cannot be told from damage.
fn make(dir: &Path, db_dir: &Path) -> Result<(), DatabaseError> {
    if db_dir.is_symlink() {
        return Err(io_error(io::Error::other(format!(
            "{} is a symbolic link: make one of {} instead",
            db_dir.display(),
            dir.display()
        ))));
    }
    let new = dir.join("db.new");
    for left in [new.as_path(), db_dir] {
        match std::fs::remove_dir_all(left) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(io_error(error)),
            _ => {}
        }
    }
    let mut options = db_options();
    options.create_if_missing(true);
    options.create_missing_column_families(true);
    let families = [DEFAULT, META, LOG, &format!("{STATE_PREFIX}1")]
        .map(|name| ColumnFamilyDescriptor::new(name, options_of(name)));
    let rocks =
        Rocks::open_cf_descriptors(&options, &new, families).map_err(|error| explain(&error))?;
    // Closed before it is moved.
    drop(rocks);
    std::fs::rename(&new, db_dir).map_err(io_error)?;
    File::open(dir)
        .and_then(|dir| dir.sync_all())
        .map_err(io_error)
}

fn io_error(error: io::Error) -> DatabaseError {
    DatabaseError::Io(error.to_string())
}

fn corrupt(detail: &str) -> DatabaseError {
    DatabaseError::Corrupt(one_line(detail))
}

impl From<DbError> for DatabaseError {
    fn from(error: DbError) -> Self {
        match error {
            DbError::Rocks(error) => explain(&error),
            DbError::Io(error) => Self::Io(one_line(&error.to_string())),
            other => corrupt(&other.to_string()),
        }
    }
}

impl From<CheckError> for DatabaseError {
    fn from(error: CheckError) -> Self {
        match error {
            CheckError::Damaged(detail) => corrupt(&detail),
            CheckError::Db(error) => error.into(),
        }
    }
}

fn explain(error: &rocksdb::Error) -> DatabaseError {
    let detail = one_line(error.as_ref());
    let locked = detail.contains("lock file") || detail.contains("lock hold by current process");
    let missing_table =
        detail.contains("No such file") && (detail.contains(".sst") || detail.contains("MANIFEST"));
    match error.kind() {
        ErrorKind::IOError if locked => DatabaseError::Locked,
        ErrorKind::IOError if !missing_table => DatabaseError::Io(detail),
        _ => DatabaseError::Corrupt(detail),
    }
}

fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}
