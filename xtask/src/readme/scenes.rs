//! Machines at which blocks are typed: daemons of the clone's build, each in its own namespace.

use std::collections::BTreeMap;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use cluster_rig::document::Line;
use cluster_rig::typing::{Placeholders, programs, scratch, type_line};
use cluster_rig::{Machine, Network};

use super::blocks::{Block, Command};

/// Machines, and their state before the first block is typed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Scene {
    /// A machine with the program and nothing else.
    FirstDisk,
    /// Three machines with the program on one network.
    ThreeNodes,
    /// A machine with the package.
    Installed,
    /// Two machines with the package on one network.
    InstalledCluster,
    /// A standalone node with a volume, which has run for a while.
    Operations,
}

/// Machines and commands of a scene.
struct Setting {
    /// Names of its machines. The last one is `any`.
    machines: &'static [&'static str],
    /// Commands typed at each machine first.
    before: &'static [&'static str],
    /// Text in the documents that the machines cannot use, and its replacement.
    words: &'static [(&'static str, &'static str)],
    /// Prompts of machines that the scene does not have; a test types these lines.
    without: &'static [&'static str],
}

/// The data directory of the package belongs to the host here.
const PACKAGED: &[&str] = &["export PENSTOCK_DATA=/srv/penstock", "mkdir /run/penstock"];

impl Scene {
    fn setting(self) -> Setting {
        let bare = Setting {
            machines: &["one"],
            before: &[],
            words: &[],
            without: &[],
        };
        match self {
            Self::FirstDisk => bare,
            Self::ThreeNodes => Setting {
                machines: &["one", "two", "three"],
                ..bare
            },
            Self::Installed => Setting {
                before: PACKAGED,
                ..bare
            },
            Self::InstalledCluster => Setting {
                machines: &["one", "two"],
                before: PACKAGED,
                ..bare
            },
            Self::Operations => Setting {
                before: &[
                    "export PENSTOCK_DATA=/srv/penstock",
                    "penstock serve --preallocation off --device-size 1G &",
                    "penstock volume create old 64M",
                ],
                words: &[
                    // This command never ends.
                    (" --follow", ""),
                    ("/dev/nvme2n1", "/srv/nvme2n1:1G"),
                    ("/var/backups/", "/srv/"),
                    ("VOLUME", "old"),
                ],
                // `a_full_pool_says_so_and_takes_removals` trims in a guest.
                without: &["guest"],
                ..bare
            },
        }
    }

    /// Returns whether the scene types commands with this prompt at a machine, or leaves them out.
    #[cfg(test)]
    pub fn knows(self, prompt: &str) -> bool {
        let setting = self.setting();
        let is_any = prompt.is_empty() || prompt == "any";
        is_any || setting.machines.contains(&prompt) || setting.without.contains(&prompt)
    }

    /// Types blocks in order, each command as written. Each must succeed and print the output that the
    /// document shows.
    pub fn play(self, blocks: &[&Block]) -> Result<()> {
        let setting = self.setting();
        let scratch = scratch()?;
        let programs = programs(scratch.path())?;
        stand_in(&programs.join("systemctl"), SYSTEMCTL)?;
        let count = setting.machines.len();
        let network = (count > 1)
            .then(|| {
                let nodes = u8::try_from(count).context("few machines")?;
                Network::with_addresses(nodes, |node| format!("10.0.0.{node}"))
            })
            .transpose()?;
        let mut machines = Vec::new();
        for (node, name) in (1..).zip(setting.machines) {
            let namespace = network.as_ref().map(|network| network.namespace(node));
            let mut machine =
                Machine::start(name, scratch.path(), &programs, namespace.as_deref())?;
            for command in setting.before {
                machine.ok(command)?;
            }
            machines.push(machine);
        }
        let mut placeholders = Placeholders::default();
        for block in blocks {
            eprintln!("{}:{}:", block.document, block.line);
            for command in &block.commands {
                if setting.without.contains(&command.prompt.as_str()) {
                    continue;
                }
                let line = as_typed(command, &setting);
                let place = || format!("{}:{}", block.document, block.line);
                let printed = type_line(&mut machines, &line, &mut placeholders);
                let printed = printed.with_context(place)?;
                shows(&printed, &command.output).with_context(place)?;
            }
        }
        Ok(())
    }
}

fn as_typed(command: &Command, setting: &Setting) -> Line {
    let mut typed = command.text.clone();
    for (word, instead) in setting.words {
        typed = typed.replace(word, instead);
    }
    let prompt = match command.prompt.as_str() {
        "" => "any",
        name => name,
    };
    Line {
        prompt: prompt.to_owned(),
        command: typed,
    }
}

/// Checks that all lines of the document's output were printed, in order.
fn shows(printed: &str, shown: &[String]) -> Result<()> {
    let mut lines = printed.lines().map(str::trim);
    for line in shown {
        ensure!(
            lines.any(|printed| printed == line.trim()),
            "the document shows a line that was not printed: {line}\nprinted was:\n{printed}"
        );
    }
    Ok(())
}

/// Stand-in for systemctl, because a namespace has no systemd: starts the unit's program and waits like
/// systemd.
const SYSTEMCTL: &str = "#!/bin/sh
case \"$*\" in
'enable --now penstock')
    setsid penstock serve --preallocation off > /run/penstock.log 2>&1 < /dev/null &
    for try in $(seq 600); do
        penstock status > /dev/null 2>&1 && exit 0
        sleep 0.1
    done
    cat /run/penstock.log >&2
    exit 1 ;;
*) echo \"systemctl $*: the stand-in does not know this\" >&2; exit 1 ;;
esac
";

fn stand_in(path: &Path, script: &str) -> Result<()> {
    std::fs::write(path, script).with_context(|| format!("write {}", path.display()))?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755))
        .with_context(|| format!("make {} executable", path.display()))
}

/// The blocks of each scene, in the order of the documents.
pub fn by_scene<'a>(
    typed: impl Iterator<Item = (Scene, &'a Block)>,
) -> BTreeMap<Scene, Vec<&'a Block>> {
    let mut scenes = BTreeMap::<_, Vec<_>>::new();
    for (scene, block) in typed {
        scenes.entry(scene).or_default().push(block);
    }
    scenes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn output_that_a_document_shows_must_be_printed_in_its_order() {
        let shown = ["<a>".to_owned(), "  <b/>".to_owned()];
        shows("more\n<a>\nmore\n    <b/>\n</a>\n", &shown).unwrap();
        assert!(shows("<b/>\n<a>\n", &shown).is_err());
        assert!(shows("<a>\n", &shown).is_err());
    }
}
