//! Options of RocksDB.

use rocksdb::{DBCompressionType, DBRecoveryMode, LogLevel, Options};

use super::format::{GROUP_STATE_PREFIX, LOG};

/// Memory for new writes of one family of the main group, in bytes; beyond it they go to a table file.
const WRITE_BUFFER_BYTES: usize = 4 << 20;
/// Memory for new writes of one family of another group, and the number of such buffers that are filled
/// before writes stop.
const NUMBERED_WRITE_BUFFER_BYTES: usize = 16 << 20;
const NUMBERED_WRITE_BUFFERS: i32 = 6;
/// Number of unmerged tables with which its writes become slower, and stop. RocksDB's defaults are 20 and 36.
const NUMBERED_TABLES_SLOW: i32 = 48;
const NUMBERED_TABLES_STOP: i32 = 96;
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

pub(super) fn family_options() -> Options {
    let mut options = Options::default();
    options.set_compression_type(DBCompressionType::Lz4);
    options.set_write_buffer_size(WRITE_BUFFER_BYTES);
    options
}

/// RocksDB stops all writes when one family has too many buffers or unmerged tables. Families of numbered
/// groups get more of both, so that a flood of their commands does not stop the main group.
pub(super) fn options_of(family: &str) -> Options {
    let mut options = family_options();
    let is_numbered = family.starts_with(GROUP_STATE_PREFIX)
        || family
            .strip_prefix(LOG)
            .is_some_and(|rest| !rest.is_empty());
    if is_numbered {
        options.set_write_buffer_size(NUMBERED_WRITE_BUFFER_BYTES);
        options.set_max_write_buffer_number(NUMBERED_WRITE_BUFFERS);
        options.set_level_zero_slowdown_writes_trigger(NUMBERED_TABLES_SLOW);
        options.set_level_zero_stop_writes_trigger(NUMBERED_TABLES_STOP);
    }
    options
}

pub(super) fn db_options() -> Options {
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
