//! Opening the database: finding out in one line what is wrong, before anything is served.

use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::{Arc, PoisonError};

use rocksdb::{
    ColumnFamilyDescriptor, DBCompressionType, DBRecoveryMode, ErrorKind, IteratorMode, LogLevel,
    Options, WriteBatch,
};
use tokio::sync::{oneshot, watch};

use super::database::{Database, Rocks, Sync};
use super::group::{GroupStore, Names};
use super::{
    Db, DbError, FORMAT, KEY_FORMAT, KEY_STATE_FAMILY, LOG, META, NAMESPACE_PREFIX, STATE_PREFIX,
    ballast, check_level, encode,
};
use crate::error::OpenError;
use crate::ids::NamespaceGroupId;
use crate::layers::Layers;
use crate::map::ClusterMap;
use crate::raft::GroupConfig;

/// Memory for new writes of one family, in bytes; beyond it they go to a table file. Metadata are small.
const WRITE_BUFFER_BYTES: usize = 4 << 20;
/// The same of a family of a namespace group, and how many of them are filled before writes stop.
const NAMESPACE_WRITE_BUFFER_BYTES: usize = 16 << 20;
const NAMESPACE_WRITE_BUFFERS: i32 = 6;
/// Tables that are not merged yet with which its writes become slower, and stop. RocksDB's own numbers are 20
/// and 36.
const NAMESPACE_TABLES_SLOW: i32 = 48;
const NAMESPACE_TABLES_STOP: i32 = 96;
/// Threads that write and merge tables.
const BACKGROUND_JOBS: i32 = 4;
/// Size of the write-ahead log beyond which the oldest family is written to tables, so that recovery stays
/// short.
const WAL_BYTES_MAX: u64 = 96 << 20;
/// RocksDB's own diagnostic files.
const INFO_LOG_FILES: usize = 2;
const INFO_LOG_BYTES_MAX: usize = 1 << 20;
/// Files that RocksDB keeps open at most; more are closed and opened again.
const OPEN_FILES_MAX: i32 = 64;

/// Every database of RocksDB has this family. Left to RocksDB it would have a write buffer of 64 MiB, and as
/// much space would have to be free before a database that had been full goes on.
const DEFAULT: &str = "default";

pub(super) fn family_options() -> Options {
    let mut options = Options::default();
    options.set_compression_type(DBCompressionType::Lz4);
    options.set_write_buffer_size(WRITE_BUFFER_BYTES);
    options
}

/// RocksDB stops all writes when one family has too many buffers or tables that are not merged yet. Those of
/// namespaces get more of both, so that a flood of operations does not stop the cluster map's group.
pub(super) fn options_of(family: &str) -> Options {
    let mut options = family_options();
    let is_of_namespaces = family.starts_with(NAMESPACE_PREFIX)
        || family
            .strip_prefix(LOG)
            .is_some_and(|rest| !rest.is_empty());
    if is_of_namespaces {
        options.set_write_buffer_size(NAMESPACE_WRITE_BUFFER_BYTES);
        options.set_max_write_buffer_number(NAMESPACE_WRITE_BUFFERS);
        options.set_level_zero_slowdown_writes_trigger(NAMESPACE_TABLES_SLOW);
        options.set_level_zero_stop_writes_trigger(NAMESPACE_TABLES_STOP);
    }
    options
}

fn db_options() -> Options {
    let mut options = family_options();
    options.set_paranoid_checks(true);
    options.set_max_total_wal_size(WAL_BYTES_MAX);
    options.set_keep_log_file_num(INFO_LOG_FILES);
    options.set_max_log_file_size(INFO_LOG_BYTES_MAX);
    options.set_log_level(LogLevel::Warn);
    options.set_max_open_files(OPEN_FILES_MAX);
    options.set_max_background_jobs(BACKGROUND_JOBS);
    // An incomplete record at the end is a write that a crash cut short, and was never acknowledged. A
    // damaged record anywhere else is an error: the default would silently forget everything after it,
    // acknowledged or not.
    options.set_wal_recovery_mode(DBRecoveryMode::TolerateCorruptedTailRecords);
    options
}

impl Db {
    /// Whether there is a database in `dir`, be it a damaged one.
    pub(crate) fn exists(dir: &Path) -> bool {
        let mut entries = std::fs::read_dir(dir.join("db")).into_iter().flatten();
        entries.next().is_some()
    }

    /// Opens or makes the database in `dir`. The receiver learns when it is closed again.
    ///
    /// # Errors
    /// In use, damaged, not accessible, made by a newer version.
    pub(crate) fn open(dir: &Path) -> Result<(Self, oneshot::Receiver<()>), OpenError> {
        let db_dir = dir.join("db");
        let io = |error: io::Error| OpenError::Io {
            dir: dir.to_owned(),
            detail: error.to_string(),
        };
        std::fs::create_dir_all(dir.join("snapshots")).map_err(io)?;
        // RocksDB writes before it reads.
        ballast::tend(dir);
        if is_fresh(&db_dir).map_err(io)? {
            make(dir, &db_dir)?;
        }
        if !db_dir.join("CURRENT").exists() {
            return Err(corrupt(dir, "the file CURRENT is missing".to_owned()));
        }
        let families =
            Rocks::list_cf(&db_options(), &db_dir).map_err(|error| explain(dir, &error))?;
        let missing = [META, LOG]
            .into_iter()
            .find(|name| !families.iter().any(|family| family == name));
        if let Some(name) = missing {
            return Err(corrupt(
                dir,
                format!("the column family {name:?} is missing"),
            ));
        }
        let descriptors = families
            .iter()
            .map(|name| ColumnFamilyDescriptor::new(name, options_of(name)));
        let rocks = Rocks::open_cf_descriptors(&db_options(), &db_dir, descriptors)
            .map_err(|error| explain(dir, &error))?;
        let (database, on_closed) = Database::new(rocks, families, dir.to_owned());
        let names = Names {
            log: LOG.to_owned(),
            state_prefix: STATE_PREFIX.to_owned(),
            key_prefix: String::new(),
            snapshots: dir.join("snapshots"),
        };
        let db = Self {
            group: GroupStore::new(Arc::new(database), names),
            map: watch::Sender::default(),
            layers: watch::Sender::default(),
            openings: watch::Sender::default(),
        };
        db.check().map_err(|error| match error {
            CheckError::Newer(found) => OpenError::NewerFormat {
                dir: dir.to_owned(),
                found,
                known: FORMAT,
            },
            CheckError::Damaged(detail) => corrupt(dir, detail),
            CheckError::Db(error) => explain_db(dir, error),
        })?;
        Ok((db, on_closed))
    }

    fn check(&self) -> Result<(), CheckError> {
        match self.database().get::<u32>(KEY_FORMAT)? {
            Some(FORMAT) => {}
            Some(found) => return Err(CheckError::Newer(found)),
            None => self.initialise()?,
        }
        self.group.find_records()?;
        let map = self.read(|view| Ok::<_, DbError>(ClusterMap::load(view)?))?;
        check_level(&map)?;
        self.map.send_replace(Arc::new(map));
        let layers = self.read(|view| Ok::<_, DbError>(Layers::load(view)?))?;
        self.layers.send_replace(layers);
        self.group.check_log()
    }

    /// First start, or a crash during it: nothing was written before the format.
    fn initialise(&self) -> Result<(), CheckError> {
        let rocks = &self.database().rocks;
        let mut entries = rocks.iterator_cf(&self.group.log_family(), IteratorMode::Start);
        if entries.next().is_some() {
            return Err(CheckError::Damaged(
                "the format number is missing".to_owned(),
            ));
        }
        let mut batch = WriteBatch::default();
        let meta = self.database().family(META);
        batch.put_cf(&meta, KEY_FORMAT, encode(&FORMAT));
        self.group.name_first_family(&mut batch);
        Ok(self.database().write(batch, Sync::Yes)?)
    }
}

/// Opens a namespace group's part of a database, or makes it.
///
/// # Errors
/// Damaged, or not accessible.
pub(crate) fn open_namespace_group<C: GroupConfig>(
    database: Arc<Database>,
    group: NamespaceGroupId,
) -> Result<GroupStore<C>, DbError> {
    let names = Names {
        log: format!("{LOG}.{group}"),
        state_prefix: format!("{NAMESPACE_PREFIX}{group}."),
        key_prefix: format!("group.{group}."),
        snapshots: database.dir().join(format!("groups/{group}")),
    };
    std::fs::create_dir_all(&names.snapshots)?;
    let store = GroupStore::new(database, names);
    let rocks = &store.database.rocks;
    let key = store.names.key(KEY_STATE_FAMILY);
    if store.database.get::<String>(&key)?.is_none() {
        for name in [&store.names.log, &store.names.first_state_family()] {
            // A crash may have come after one of them.
            if rocks.cf_handle(name).is_none() {
                rocks.create_cf(name, &options_of(name))?;
            }
        }
        let mut batch = WriteBatch::default();
        store.name_first_family(&mut batch);
        store.database.write(batch, Sync::Yes)?;
        return Ok(store);
    }
    let checked = match rocks.cf_handle(&store.names.log).is_some() {
        true => store.find_records(),
        false => Err(CheckError::Damaged(format!(
            "the column family {:?} is missing",
            store.names.log
        ))),
    };
    checked
        .and_then(|()| store.check_log())
        .map_err(|error| match error {
            CheckError::Db(error) => error,
            CheckError::Damaged(detail) => DbError::Damaged {
                what: format!("namespace group {group}"),
                detail,
            },
            CheckError::Newer(_) => unreachable!("groups have no format of their own"),
        })?;
    Ok(store)
}

impl<C: GroupConfig> GroupStore<C> {
    /// Says that the first family of records counts.
    fn name_first_family(&self, batch: &mut WriteBatch) {
        let meta = self.database.family(META);
        let first = encode(&self.names.first_state_family());
        batch.put_cf(&meta, self.names.key(KEY_STATE_FAMILY), first);
    }

    /// Finds the family of the records that count, and removes others.
    fn find_records(&self) -> Result<(), CheckError> {
        let key = self.names.key(KEY_STATE_FAMILY);
        let name: String = self.database.get(&key)?.ok_or_else(|| {
            CheckError::Damaged("the name of the state family is missing".to_owned())
        })?;
        let is_there = |family: &str| self.database.rocks.cf_handle(family).is_some();
        if !is_there(&name) {
            return Err(CheckError::Damaged(format!(
                "the column family {name:?} is missing"
            )));
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

    /// The log must reach without a hole from what was removed to at least what was applied.
    fn check_log(&self) -> Result<(), CheckError> {
        let purged = self.purged()?.map(|id| id.index);
        let applied = self.read(|view| view.applied())?.last.map(|id| id.index);
        self.progress
            .send_modify(|progress| progress.applied = applied);
        let mut last = purged;
        let mut hole = None;
        self.for_each_entry(|index, entry| {
            let expected = last.map_or(0, |last| last + 1);
            if hole.is_none() && (index != expected || entry.log_id.index != index) {
                hole = Some((expected, index));
            }
            last = Some(index);
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

enum CheckError {
    Newer(u32),
    Damaged(String),
    Db(DbError),
}

impl From<DbError> for CheckError {
    fn from(error: DbError) -> Self {
        Self::Db(error)
    }
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
fn make(dir: &Path, db_dir: &Path) -> Result<(), OpenError> {
    let io = |error: io::Error| OpenError::Io {
        dir: dir.to_owned(),
        detail: error.to_string(),
    };
    if db_dir.is_symlink() {
        return Err(io(io::Error::other(format!(
            "{} is a symbolic link: make one of {} instead",
            db_dir.display(),
            dir.display()
        ))));
    }
    let new = dir.join("db.new");
    for left in [new.as_path(), db_dir] {
        match std::fs::remove_dir_all(left) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(io(error)),
            _ => {}
        }
    }
    let mut options = db_options();
    options.create_if_missing(true);
    options.create_missing_column_families(true);
    let families = [DEFAULT, META, LOG, &format!("{STATE_PREFIX}1")]
        .map(|name| ColumnFamilyDescriptor::new(name, options_of(name)));
    let rocks = Rocks::open_cf_descriptors(&options, &new, families)
        .map_err(|error| explain(dir, &error))?;
    // Closed before it is moved.
    drop(rocks);
    std::fs::rename(&new, db_dir).map_err(io)?;
    File::open(dir).and_then(|dir| dir.sync_all()).map_err(io)
}

fn corrupt(dir: &Path, detail: String) -> OpenError {
    OpenError::Corrupt {
        dir: dir.to_owned(),
        detail: one_line(&detail),
    }
}

fn explain_db(dir: &Path, error: DbError) -> OpenError {
    match error {
        DbError::Rocks(error) => explain(dir, &error),
        DbError::Io(error) => OpenError::Io {
            dir: dir.to_owned(),
            detail: one_line(&error.to_string()),
        },
        DbError::Newer { found, known } => OpenError::NewerLevel {
            dir: dir.to_owned(),
            found,
            known,
        },
        other => corrupt(dir, other.to_string()),
    }
}

fn explain(dir: &Path, error: &rocksdb::Error) -> OpenError {
    let detail = one_line(error.as_ref());
    let locked = detail.contains("lock file") || detail.contains("lock hold by current process");
    let missing_table =
        detail.contains("No such file") && (detail.contains(".sst") || detail.contains("MANIFEST"));
    match error.kind() {
        ErrorKind::IOError if locked => OpenError::Locked {
            dir: dir.to_owned(),
        },
        ErrorKind::IOError if !missing_table => OpenError::Io {
            dir: dir.to_owned(),
            detail,
        },
        _ => OpenError::Corrupt {
            dir: dir.to_owned(),
            detail,
        },
    }
}

fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}
