//! The reference of the configuration, generated from [`keys`](super::keys): `docs/CONFIG.md` for reading,
//! and the manual page penstock.toml(5).

#[cfg(test)]
mod page;

use clap_mangen::roff::{Roff, bold, roman};

use super::keys::{File, Key, Section, TABLES};

/// What comes before the keys of the page.
const BEGIN: &str = "\
# Configuration

`penstock serve` reads a TOML file, `penstock init` and `penstock join` read it, too: the one that `--config`
names, else the one that the variable `PENSTOCK_CONFIG` names, else `/etc/penstock/penstock.toml` for root and
`$XDG_CONFIG_HOME/penstock/penstock.toml` (or below `~/.config`) for other users, if it is there. An empty
`PENSTOCK_CONFIG` means none. Every key is optional. An unknown key is an error that names it.

`penstock config check FILE` says what is wrong with a file before a daemon reads it. `penstock config show`
prints what a running daemon goes by, and where each value comes from.

What counts, in this order: an option of the command, an environment variable, the file, the default.

```toml
data = \"/srv/penstock\"
devices = [\"/dev/nvme0n1\", { path = \"/srv/disk.img\", size = \"100G\" }]
metrics_listen = \"10.0.0.1:9180\"
socket_owner = \":libvirt-qemu\"
socket_mode = \"0660\"
```

Sizes are numbers with a binary suffix: `512M`, `1.5G`, `2TiB`. `GB` and its like are decimal: `10GB` are
10,000,000,000 bytes.

This page and the manual page penstock.toml(5) are generated from the table that parses the file.
";

/// penstock.toml(5).
pub fn manual_page() -> String {
    let mut page = Roff::new();
    let version = format!("penstock {}", env!("CARGO_PKG_VERSION"));
    page.control("TH", ["penstock.toml", "5", "", &version]);
    page.control("SH", ["NAME"]);
    page.text([roman("penstock.toml - configuration of Penstock's daemon")]);
    page.control("SH", ["DESCRIPTION"]);
    let (description, _) = BEGIN.split_once("```toml").unwrap_or((BEGIN, ""));
    for paragraph in description.split("\n\n").skip(1) {
        page.control("PP", []);
        page.text([roman(plain(&paragraph.replace('\n', " ")))]);
    }
    for section in File::SECTIONS {
        page.control("SH", [section.title.to_uppercase().as_str()]);
        if !section.intro.is_empty() {
            page.text([roman(plain(section.intro))]);
        }
        for (_, name, key) in keys_of(section) {
            page.control("TP", []);
            page.text([bold(name), roman(format!(" = {}", plain(key.value)))]);
            let mut text = plain(&text_of(key));
            if !key.overridden_by.is_empty() {
                text += &format!(" Overridden by {}.", plain(key.overridden_by));
            }
            page.text([roman(text)]);
        }
    }
    page.control("SH", ["SEE ALSO"]);
    page.text([bold("penstock"), roman("(1)")]);
    page.render()
}

/// Keys with their whole names; those of a table behind the key that has it, one level deeper.
fn keys_of(section: &Section) -> impl Iterator<Item = (usize, String, &Key)> {
    section.keys.iter().flat_map(|key| {
        let table = TABLES.iter().filter(|(name, _)| *name == key.name);
        let inner = table.flat_map(|(name, sections)| {
            let keys = sections.iter().flat_map(|section| section.keys);
            keys.map(move |key| (1, format!("{name}.{}", key.name), key))
        });
        std::iter::once((0, key.name.to_owned(), key)).chain(inner)
    })
}

fn text_of(key: &Key) -> String {
    let lines = key.text.iter().map(|line| line.trim());
    lines.collect::<Vec<_>>().join(" ")
}

/// Markdown without its marks: links become their text.
fn plain(markdown: &str) -> String {
    let mut text = String::new();
    let mut rest = markdown;
    while let Some((before, link)) = rest.split_once('[') {
        let Some((name, behind)) = link.split_once("](") else {
            break;
        };
        text += before;
        text += name;
        rest = behind.split_once(')').map_or("", |(_, rest)| rest);
    }
    text += rest;
    text.replace('`', "")
}
