//! What guests do with a tree that a shell cannot: `filesystem-program VERB ...`, for the tests of this
//! package. It is built for the host, which is the same release of Debian as the guests are.
//!
//! Every verb checks what it does; it prints what its test asks for, and ends with 1 and a line on standard
//! error if something is not as it must be.

use std::path::Path;
use std::process::ExitCode;

use anyhow::{Result, bail};

use mapping::Publish;

mod digest;
mod limits;
mod locks;
mod looked_up;
mod mapping;
mod mark;
mod model;
mod random;
mod stress;
mod upper;

const USAGE: &str = "\
filesystem-program names make|check|remove DIR COUNT
filesystem-program deep make|check|remove DIR LEVELS
filesystem-program links DIR MAX
filesystem-program fill DIR
filesystem-program map FILE BYTES LETTER msync|munmap MARK
filesystem-program map-appended FILE LETTER
filesystem-program locks hold FILE MARK
filesystem-program locks look FILE
filesystem-program looked-up DIR
filesystem-program replace FILE SECONDS
filesystem-program reopen FILE SECONDS
filesystem-program upper DIR
filesystem-program stress own|shared DIR SEED SECONDS
filesystem-program digest DIR [times]";

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = args.iter().map(String::as_str).collect();
    match run(&words) {
        Ok(text) => {
            print!("{text}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("filesystem-program {}: {error:#}", words.join(" "));
            ExitCode::FAILURE
        }
    }
}

fn run(words: &[&str]) -> Result<String> {
    match words {
        ["names", step, dir, count] => limits::names(step, Path::new(dir), count.parse()?),
        ["deep", step, dir, levels] => limits::deep(step, Path::new(dir), levels.parse()?),
        ["links", dir, max] => limits::links(Path::new(dir), max.parse()?),
        ["fill", dir] => limits::fill(Path::new(dir)),
        ["map", file, bytes, letter, by, mark] => {
            let by = match *by {
                "msync" => Publish::Msync,
                "munmap" => Publish::Munmap,
                _ => bail!("{by}: msync or munmap"),
            };
            let (file, letter, mark) = (Path::new(file), one_letter(letter)?, Path::new(mark));
            mapping::fill(file, bytes.parse()?, letter, by, mark)
        }
        ["map-appended", file, letter] => mapping::appended(Path::new(file), one_letter(letter)?),
        ["locks", "hold", file, mark] => locks::hold(Path::new(file), Path::new(mark)),
        ["locks", "look", file] => locks::look(Path::new(file)),
        ["looked-up", dir] => looked_up::stays(Path::new(dir)),
        ["replace", file, seconds] => looked_up::replace(Path::new(file), seconds.parse()?),
        ["reopen", file, seconds] => looked_up::reopen(Path::new(file), seconds.parse()?),
        ["upper", dir] => upper::serves(Path::new(dir)),
        ["stress", "own", dir, seed, seconds] => {
            stress::own(Path::new(dir), seed.parse()?, seconds.parse()?)
        }
        ["stress", "shared", dir, seed, seconds] => {
            stress::shared(Path::new(dir), seed.parse()?, seconds.parse()?)
        }
        ["digest", dir] => digest::of_tree(Path::new(dir), false),
        ["digest", dir, "times"] => digest::of_tree(Path::new(dir), true),
        _ => bail!("usage:\n{USAGE}"),
    }
}

fn one_letter(word: &str) -> Result<u8> {
    match word.as_bytes() {
        [letter] => Ok(*letter),
        _ => bail!("{word:?} is not a letter"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn program(words: &str) -> Result<String> {
        run(&words.split(' ').collect::<Vec<&str>>())
    }

    #[test]
    fn whatever_changes_in_a_tree_changes_its_digest() -> Result<()> {
        let scratch = tempfile::tempdir()?;
        let at = |name: &str| scratch.path().join(name);
        std::fs::create_dir_all(at("a/b"))?;
        std::fs::write(at("a/file"), [1, 2, 3])?;
        std::os::unix::fs::symlink("file", at("a/symlink"))?;
        let digest = || program(&format!("digest {}", scratch.path().display()));
        let mut seen = vec![digest()?];
        let mut differs = |what: &str| -> Result<()> {
            let now = digest()?;
            assert!(!seen.contains(&now), "{what}");
            seen.push(now);
            Ok(())
        };
        std::fs::write(at("a/file"), [1, 2, 4])?;
        differs("a byte")?;
        std::fs::set_permissions(
            at("a/file"),
            std::os::unix::fs::PermissionsExt::from_mode(0o601),
        )?;
        differs("a mode")?;
        std::fs::hard_link(at("a/file"), at("a/b/link"))?;
        differs("a link")?;
        std::fs::rename(at("a/b"), at("a/c"))?;
        differs("a name")?;
        std::fs::remove_file(at("a/symlink"))?;
        std::os::unix::fs::symlink("c", at("a/symlink"))?;
        differs("a target")
    }

    #[test]
    fn a_name_or_a_level_that_lacks_is_an_error() -> Result<()> {
        let scratch = tempfile::tempdir()?;
        let (names, deep) = (scratch.path().join("names"), scratch.path().join("deep"));
        let names =
            |step: &str, count: u64| program(&format!("names {step} {} {count}", names.display()));
        names("make", 50)?;
        names("check", 50)?;
        assert!(names("check", 49).is_err() && names("check", 51).is_err());
        names("remove", 50)?;
        let deep =
            |step: &str, levels: u32| program(&format!("deep {step} {} {levels}", deep.display()));
        deep("make", 50)?;
        deep("check", 50)?;
        assert!(deep("check", 49).is_err() && deep("check", 51).is_err());
        deep("remove", 50)?;
        assert_eq!(std::fs::read_dir(scratch.path())?.count(), 0);
        Ok(())
    }

    #[test]
    fn what_a_model_expects_of_a_local_filesystem_is_there() -> Result<()> {
        // Beside the program, as a filesystem in memory may have no `user.` attributes.
        let program_file = std::env::current_exe()?;
        let scratch = tempfile::tempdir_in(program_file.parent().expect("it is in a directory"))?;
        let own = scratch.path().join("own").display().to_string();
        let model = program(&format!("stress own {own} 1 1"))?;
        assert!(model.lines().count() > 1);
        assert_eq!(program(&format!("digest {own}"))?, model);
        std::fs::write(scratch.path().join("own/more"), b"")?;
        assert_ne!(program(&format!("digest {own}"))?, model);
        program(&format!("stress shared {own} 2 1"))?;
        Ok(())
    }
}
