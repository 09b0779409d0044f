//! The hook that libvirt runs when a domain starts and ends (<https://libvirt.org/hooks.html>).
//!
//! It never calls virsh: libvirt waits for the hook while it holds the domain, and a call back would wait for
//! libvirt.

use std::io::ErrorKind;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// Where libvirt looks for scripts of its QEMU driver, besides the one script `hooks/qemu`.
pub const DIRECTORY: &str = "/etc/libvirt/hooks/qemu.d";
/// Ours among them. They run in the order of their names.
pub const NAME: &str = "50-penstock";
const SCRIPT: &str = include_str!("../assets/50-penstock.sh");
/// By this line a script is known to be ours.
const MARK: &str = "# Written by `penstock libvirt hook install`";

/// What libvirt calls the hook for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// A domain is about to start: nothing of it exists yet. A failure stops the start.
    Start,
    /// A domain has ended, or its start has failed, and all of it is gone. A failure changes nothing.
    End,
    /// A domain that runs on another host is about to arrive. A failure stops the migration.
    Arrival,
    /// libvirt has been started anew and found a domain that runs. A failure would kill the domain.
    Reconnect,
    /// Nothing to do: `Start` comes as well, or there is nothing of ours in it.
    Other,
}

/// One call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Call {
    /// The domain's name.
    pub domain: String,
    /// What happens.
    pub event: Event,
    /// What libvirt calls it, for people.
    pub operation: String,
}

/// Why a call is none of libvirt's, or a script is not written.
#[derive(Debug, thiserror::Error)]
pub enum HookError {
    /// The wrong arguments.
    #[error("`penstock libvirt hook run` takes libvirt's four arguments, not {0}")]
    Arguments(usize),
    /// A script that somebody else wrote.
    #[error("{0} was not written by `penstock libvirt hook install`")]
    Foreign(PathBuf),
    /// The directory above is missing: there is no libvirt.
    #[error("{0} does not exist: is libvirt installed?")]
    NoLibvirt(PathBuf),
    /// An option of the call that a shell would not pass on.
    #[error("{0:?} is not UTF-8 and cannot be written into a script")]
    NotText(std::ffi::OsString),
    /// A file.
    #[error("cannot {0} {1}: {2}")]
    File(&'static str, PathBuf, #[source] std::io::Error),
}

impl Call {
    /// Reads libvirt's arguments: `NAME OPERATION SUB-OPERATION EXTRA`.
    pub fn parse(arguments: &[String]) -> Result<Self, HookError> {
        let [domain, operation, sub, _] = arguments else {
            return Err(HookError::Arguments(arguments.len()));
        };
        let event = match (operation.as_str(), sub.as_str()) {
            ("prepare", "begin") => Event::Start,
            ("release", "end") => Event::End,
            ("migrate", "begin") => Event::Arrival,
            ("reconnect", "begin") => Event::Reconnect,
            // `restore begin` only lets a hook change the XML; `prepare begin` follows. Newer versions of
            // libvirt have operations that this one does not know.
            _ => Event::Other,
        };
        Ok(Self {
            domain: domain.clone(),
            event,
            operation: format!("{operation} {sub}"),
        })
    }
}

/// The script that runs `program` with `options` before the verb.
pub fn script(program: &Path, options: &[String]) -> Result<String, HookError> {
    let text = |path: &Path| {
        let text = path.to_str().map(quoted);
        text.ok_or_else(|| HookError::NotText(path.as_os_str().to_owned()))
    };
    let options: String = options
        .iter()
        .map(|option| format!(" {}", quoted(option)))
        .collect();
    Ok(SCRIPT
        .replace("@PENSTOCK@", &text(program)?)
        .replace("@OPTIONS@", &options))
}

/// For the shell: in single quotes.
fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', "'\\''"))
}

/// Writes the script into `directory`, in the place of one that it wrote before. Returns its path.
pub fn install(directory: &Path, script: &str) -> Result<PathBuf, HookError> {
    let path = directory.join(NAME);
    is_installed(directory)?;
    let hooks = directory.parent().unwrap_or(directory);
    let libvirt = hooks.parent().unwrap_or(hooks);
    if !libvirt.is_dir() {
        return Err(HookError::NoLibvirt(libvirt.to_owned()));
    }
    std::fs::create_dir_all(directory)
        .map_err(|error| HookError::File("create", directory.to_owned(), error))?;
    // libvirt may call it at any moment: it is never there in part.
    let partial = directory.join(format!(".{NAME}.new"));
    let written = std::fs::OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o755)
        .open(&partial)
        .and_then(|mut file| {
            std::io::Write::write_all(&mut file, script.as_bytes())?;
            file.set_permissions(std::fs::Permissions::from_mode(0o755))
        })
        .and_then(|()| std::fs::rename(&partial, &path));
    match written {
        Ok(()) => Ok(path),
        Err(error) => {
            let _ = std::fs::remove_file(&partial);
            Err(HookError::File("write", path, error))
        }
    }
}

/// Removes the script, if it is there and ours. Returns whether it was there.
pub fn remove(directory: &Path) -> Result<bool, HookError> {
    if !is_installed(directory)? {
        return Ok(false);
    }
    let path = directory.join(NAME);
    match std::fs::remove_file(&path) {
        Ok(()) => Ok(true),
        Err(error) => Err(HookError::File("remove", path, error)),
    }
}

/// Whether the script is there. One of somebody else's is an error.
pub fn is_installed(directory: &Path) -> Result<bool, HookError> {
    let path = directory.join(NAME);
    match std::fs::read(&path) {
        Ok(bytes) => match String::from_utf8_lossy(&bytes).contains(MARK) {
            true => Ok(true),
            false => Err(HookError::Foreign(path)),
        },
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
        Err(error) => Err(HookError::File("read", path, error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(words: &[&str]) -> Result<Call, HookError> {
        let words: Vec<String> = words.iter().map(|word| (*word).to_owned()).collect();
        Call::parse(&words)
    }

    #[test]
    fn libvirt_calls_are_understood() {
        for (words, event) in [
            (["d", "prepare", "begin", "-"], Event::Start),
            (["d", "release", "end", "failed"], Event::End),
            (["d", "migrate", "begin", "-"], Event::Arrival),
            (["d", "reconnect", "begin", "-"], Event::Reconnect),
            (["d", "restore", "begin", "-"], Event::Other),
            (["d", "started", "begin", "-"], Event::Other),
            (["d", "stopped", "end", "-"], Event::Other),
            (["d", "invented", "later", "-"], Event::Other),
        ] {
            assert_eq!(call(&words).unwrap().event, event, "{words:?}");
        }
        for words in [&[][..], &["d"], &["d", "prepare", "begin", "-", "x"]] {
            assert!(call(words).is_err());
        }
    }

    #[test]
    fn only_what_was_installed_is_removed() {
        let scratch = tempfile::tempdir().unwrap();
        let directory = scratch.path().join("libvirt/hooks/qemu.d");
        let text = script(Path::new("/usr/bin/penstock"), &[]).unwrap();
        let error = install(&directory, &text).unwrap_err();
        assert!(matches!(error, HookError::NoLibvirt(_)), "{error}");
        assert!(!remove(&directory).unwrap());
        std::fs::create_dir(scratch.path().join("libvirt")).unwrap();
        let path = install(&directory, &text).unwrap();
        let mode = std::fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o755);
        install(&directory, &text).unwrap();
        let other = directory.join("60-other");
        std::fs::write(&other, "").unwrap();
        assert!(remove(&directory).unwrap());
        assert!(!path.exists() && other.exists());
        std::fs::write(&path, "#!/bin/sh\n").unwrap();
        for error in [
            install(&directory, &text).map(drop).unwrap_err(),
            remove(&directory).map(drop).unwrap_err(),
        ] {
            assert!(matches!(error, HookError::Foreign(_)), "{error}");
        }
        assert!(path.exists());
    }

    #[test]
    fn the_script_passes_everything_on_as_it_is() {
        let scratch = tempfile::tempdir().unwrap();
        let program = scratch.path().join("it's $HOME");
        std::fs::write(&program, "#!/bin/sh\nprintf '<%s>' \"$@\"\ncat\n").unwrap();
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
        let text = script(&program, &["--api".into(), "/a b'c".into()]).unwrap();
        let path = scratch.path().join("hook");
        let run = |text: &str| {
            std::fs::write(&path, text).unwrap();
            let mut command = std::process::Command::new("sh");
            let command = command.arg(&path).args(["-d", "prepare", "begin", "-"]);
            let output = command.stdin(std::process::Stdio::null()).output().unwrap();
            assert!(output.status.success(), "{output:?}");
            String::from_utf8(output.stdout).unwrap()
        };
        assert_eq!(
            run(&text),
            "<--api></a b'c><libvirt><hook><run><--><-d><prepare><begin><->"
        );
        std::fs::remove_file(&program).unwrap();
        assert_eq!(run(&text), "", "other domains start without the program");
    }
}
