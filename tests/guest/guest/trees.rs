//! Work on trees of files and on large files, timed inside the guest: `rigio tree VERB ...`.
//!
//! Each verb prints the nanoseconds that its work took and what it counted: files, or MiB. What the work
//! needs (names, an order, empty directories) is made before the clock starts. Each file and its size
//! are checked: a tree that lacks something is an error, not a good figure.

use std::fs::{File, OpenOptions};
use std::io::{Error, ErrorKind, Read, Result, Write};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Barrier;
use std::time::{Duration, Instant};

use super::Rng;

/// Directories of a tree.
const DIRECTORIES: u64 = 100;
/// Threads that make a tree; that is not timed as a measurement.
const MAKERS: u64 = 16;
const MIB: usize = 1 << 20;

/// What a verb came to.
pub struct Timed {
    /// Its time.
    pub elapsed: Duration,
    /// Files, or MiB.
    pub count: u64,
}

/// Runs a verb and its arguments.
pub fn run(words: &[&str]) -> Result<Timed> {
    match words {
        ["make", dir, files, bytes] => make(Path::new(dir), number(files)?, number(bytes)?),
        ["stat", dir, files] => stat(Path::new(dir), number(files)?),
        ["walk", dir] => walk(Path::new(dir)),
        ["open", dir, files, bytes, seed] => open(
            Path::new(dir),
            number(files)?,
            number(bytes)?,
            number(seed)?,
        ),
        ["create", dir, files, threads] => create(Path::new(dir), number(files)?, number(threads)?),
        ["write", file, mib] => write(Path::new(file), number(mib)?),
        ["read", file, mib] => read(Path::new(file), number(mib)?),
        ["run", program, args @ ..] => run_program(program, args),
        _ => Err(invalid(format!("not understood: tree {}", words.join(" ")))),
    }
}

/// The path of a file of a tree: its directories hold equal shares, one after the other.
fn path_of(dir: &Path, files: u64, index: u64) -> PathBuf {
    let directory = index * DIRECTORIES / files;
    dir.join(format!("{directory:02}/file{index:07}"))
}

fn paths(dir: &Path, files: u64) -> Vec<PathBuf> {
    (0..files).map(|index| path_of(dir, files, index)).collect()
}

/// Makes a tree of `files` files of `bytes` bytes in `dir`.
fn make(dir: &Path, files: u64, bytes: u64) -> Result<Timed> {
    std::fs::create_dir_all(dir)?;
    for directory in 0..DIRECTORIES {
        std::fs::create_dir(dir.join(format!("{directory:02}")))?;
    }
    let paths = paths(dir, files);
    let share = files.div_ceil(MAKERS).max(1) as usize;
    let start = Instant::now();
    in_threads(paths.chunks(share).zip(1..), |(paths, seed)| {
        let mut content = vec![0; bytes as usize];
        let mut rng = Rng(seed);
        for path in paths {
            rng.fill(&mut content);
            File::create_new(path)?.write_all(&content)?;
        }
        Ok(())
    })?;
    timed(start, files)
}

/// Asks for the attributes of each file, by names that are known.
fn stat(dir: &Path, files: u64) -> Result<Timed> {
    let paths = paths(dir, files);
    let start = Instant::now();
    for path in &paths {
        if !std::fs::symlink_metadata(path)?.is_file() {
            return Err(invalid(format!("{} is no file", path.display())));
        }
    }
    timed(start, files)
}

/// Lists every directory and asks for the attributes of each entry, as `find -size` does.
fn walk(dir: &Path) -> Result<Timed> {
    let start = Instant::now();
    let mut left = vec![dir.to_owned()];
    let mut files = 0;
    while let Some(directory) = left.pop() {
        for entry in std::fs::read_dir(directory)? {
            let entry = entry?;
            if entry.metadata()?.is_dir() {
                left.push(entry.path());
            } else {
                files += 1;
            }
        }
    }
    timed(start, files)
}

/// Opens, reads and closes each file, in an order that the seed makes.
fn open(dir: &Path, files: u64, bytes: u64, seed: u64) -> Result<Timed> {
    let mut paths = paths(dir, files);
    let mut rng = Rng(seed | 1);
    for index in (1..paths.len()).rev() {
        paths.swap(index, rng.below(index as u64 + 1) as usize);
    }
    let mut buffer = vec![0; bytes as usize + 1];
    let start = Instant::now();
    for path in &paths {
        let found = read_to_end(&mut File::open(path)?, &mut buffer)?;
        if found != bytes {
            return Err(invalid(format!("{} has {found} bytes", path.display())));
        }
    }
    timed(start, files)
}

/// Makes empty files, each thread in a directory of its own.
fn create(dir: &Path, files: u64, threads: u64) -> Result<Timed> {
    std::fs::create_dir_all(dir)?;
    for thread in 0..threads {
        std::fs::create_dir(dir.join(thread.to_string()))?;
    }
    let barrier = Barrier::new(threads as usize + 1);
    std::thread::scope(|scope| {
        let makers: Vec<_> = (0..threads)
            .map(|thread| {
                let (own, barrier) = (dir.join(thread.to_string()), &barrier);
                let share = files / threads + u64::from(thread < files % threads);
                scope.spawn(move || {
                    let paths: Vec<PathBuf> =
                        (0..share).map(|file| own.join(file.to_string())).collect();
                    barrier.wait();
                    paths
                        .iter()
                        .try_for_each(|path| File::create_new(path).map(drop))
                })
            })
            .collect();
        barrier.wait();
        let start = Instant::now();
        for maker in makers {
            maker.join().map_err(|_| invalid("a thread panicked"))??;
        }
        timed(start, files)
    })
}

/// Writes a file of `mib` MiB, a MiB at a time, and flushes it.
fn write(path: &Path, mib: u64) -> Result<Timed> {
    let mut content = vec![0; MIB];
    Rng(mib | 1).fill(&mut content);
    let mut file = OpenOptions::new().create_new(true).write(true).open(path)?;
    let start = Instant::now();
    for _ in 0..mib {
        file.write_all(&content)?;
    }
    file.sync_all()?;
    timed(start, mib)
}

/// Reads such a file, a MiB at a time.
fn read(path: &Path, mib: u64) -> Result<Timed> {
    let mut buffer = vec![0; MIB];
    let start = Instant::now();
    let mut file = File::open(path)?;
    for _ in 0..mib {
        file.read_exact(&mut buffer)?;
    }
    timed(start, mib)
}

/// Runs a program that must succeed.
fn run_program(program: &str, args: &[&str]) -> Result<Timed> {
    let start = Instant::now();
    let status = Command::new(program).args(args).status()?;
    if !status.success() {
        return Err(Error::other(format!("{program}: {status}")));
    }
    timed(start, 1)
}

/// Does something with each item in a thread of its own; the first error counts.
fn in_threads<T: Send>(
    items: impl Iterator<Item = T>,
    work: impl Fn(T) -> Result<()> + Sync,
) -> Result<()> {
    std::thread::scope(|scope| {
        let work = &work;
        let threads: Vec<_> = items.map(|item| scope.spawn(move || work(item))).collect();
        threads.into_iter().try_for_each(|thread| {
            let joined = thread.join();
            joined.unwrap_or_else(|_| Err(invalid("a thread panicked")))
        })
    })
}

fn read_to_end(file: &mut File, buffer: &mut [u8]) -> Result<u64> {
    let mut total = 0;
    loop {
        match file.read(buffer)? {
            0 => return Ok(total),
            count => total += count as u64,
        }
    }
}

fn timed(start: Instant, count: u64) -> Result<Timed> {
    Ok(Timed {
        elapsed: start.elapsed(),
        count,
    })
}

fn number(word: &str) -> Result<u64> {
    word.parse()
        .map_err(|_| invalid(format!("{word} is no number")))
}

fn invalid(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidInput, message.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn verbs_do_their_work_on_a_tree_and_count_it() -> Result<()> {
        let scratch = tempfile::tempdir()?;
        let at = |name: &str| scratch.path().join(name).display().to_string();
        let (tree, file, made) = (at("tree"), at("file"), at("made"));
        let count = |words: &[&str]| run(words).map(|timed| timed.count);
        assert_eq!(count(&["make", &tree, "250", "4096"])?, 250);
        assert_eq!(count(&["stat", &tree, "250"])?, 250);
        assert_eq!(count(&["walk", &tree])?, 250);
        assert_eq!(count(&["open", &tree, "250", "4096", "7"])?, 250);
        assert_eq!(count(&["create", &made, "100", "64"])?, 100);
        assert_eq!(count(&["walk", &made])?, 100);
        assert_eq!(count(&["write", &file, "2"])?, 2);
        assert_eq!(count(&["read", &file, "2"])?, 2);
        assert_eq!(count(&["run", "true"])?, 1);
        assert_eq!(std::fs::metadata(&file)?.len(), 2 << 20);
        Ok(())
    }

    #[test]
    fn a_tree_that_lacks_something_is_an_error() -> Result<()> {
        let scratch = tempfile::tempdir()?;
        let tree = scratch.path().join("tree").display().to_string();
        run(&["make", &tree, "3", "10"])?;
        let path = path_of(Path::new(&tree), 3, 1);
        std::fs::write(&path, b"short")?;
        assert!(run(&["open", &tree, "3", "10", "1"]).is_err());
        std::fs::remove_file(&path)?;
        assert!(run(&["stat", &tree, "3"]).is_err());
        assert!(run(&["read", &tree, "1"]).is_err());
        assert!(run(&["run", "false"]).is_err());
        assert!(run(&["stat", &tree]).is_err());
        assert!(run(&["stat", &tree, "many"]).is_err());
        Ok(())
    }
}
