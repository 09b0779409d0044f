//! The page `docs/CONFIG.md`, and what holds it to the table.

use clap::ValueEnum;

use super::super::{Poll, Preallocation, RoleName, Sandbox, StoreKind, Transport, Wire};
use super::*;

/// Characters of a line of the page.
const WIDTH: usize = 110;

/// What comes behind them.
const END: &str = "
## Environment variables

- `PENSTOCK_CONFIG` — the configuration of `serve`, `init` and `join`, as `--config`; empty for none.
- `PENSTOCK_DATA` — the data directory, for every command, as `--data`.
- `PENSTOCK_API` — the admin socket that commands talk to, as `--api`. It goes before `PENSTOCK_DATA`.
- `PENSTOCK_RUN_DIR` — where running daemons are listed, so that commands find them. Default:
  `/run/penstock-daemons` for root, `$XDG_RUNTIME_DIR/penstock` for other users.
- `PENSTOCK_LOG` — what the daemon logs, like `debug` or `penstock=debug`. Default: `info`, less of it from
  libraries.
- `NO_COLOR` — if it is set, logs have no colours on a terminal.
";

/// `docs/CONFIG.md`.
fn markdown() -> String {
    let mut page = BEGIN.to_owned();
    for section in File::SECTIONS {
        page += &format!("\n## {}\n\n", section.title);
        if !section.intro.is_empty() {
            page += &wrapped(section.intro, "");
            page.push('\n');
        }
        for (depth, name, key) in keys_of(section) {
            let indent = "  ".repeat(depth);
            let mut item = format!("- `{name}` — {}", key.value);
            if !key.overridden_by.is_empty() {
                item += &format!("; {}", key.overridden_by);
            }
            item += &format!(". {}", text_of(key));
            page += &wrapped(&item, &indent);
        }
    }
    page + END
}

/// Words in lines; those behind the first are indented further, as Markdown wants it of items.
fn wrapped(text: &str, indent: &str) -> String {
    let further = match text.starts_with("- ") {
        true => format!("{indent}  "),
        false => indent.to_owned(),
    };
    let mut lines = String::new();
    let mut line = indent.to_owned();
    let mut is_empty = true;
    for word in words(text) {
        let more = line.chars().count() + usize::from(!is_empty) + word.chars().count();
        if !is_empty && more > WIDTH {
            lines += &line;
            lines.push('\n');
            line.clone_from(&further);
            is_empty = true;
        }
        if !is_empty {
            line.push(' ');
        }
        line += word;
        is_empty = false;
    }
    lines + &line + "\n"
}

/// Words, with what stands between backquotes in one.
fn words(text: &str) -> Vec<&str> {
    let mut words = Vec::new();
    let (mut start, mut in_code) = (0, false);
    for (at, c) in text.char_indices() {
        match c {
            '`' => in_code = !in_code,
            ' ' if !in_code => {
                words.push(&text[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    words.push(&text[start..]);
    words
}

/// Set to write the committed page anew instead of comparing with it.
const WRITE: &str = "PENSTOCK_WRITE_CONFIG";

#[test]
fn the_committed_page_is_the_one_of_the_table() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/CONFIG.md");
    let page = markdown();
    if std::env::var_os(WRITE).is_some() {
        std::fs::write(path, &page).unwrap();
    }
    let committed = std::fs::read_to_string(path).unwrap();
    assert!(
        committed == page,
        "docs/CONFIG.md is out of date: {WRITE}=1 cargo nextest run -p config reference"
    );
}

fn words_of<T: ValueEnum>() -> Vec<String> {
    let all = T::value_variants().iter();
    let values = all.filter_map(|value| value.to_possible_value());
    values.map(|value| value.get_name().to_owned()).collect()
}

#[test]
fn the_reference_names_every_word_of_a_value() {
    let page = markdown();
    let words = [
        words_of::<StoreKind>(),
        words_of::<Preallocation>(),
        words_of::<Poll>(),
        words_of::<Sandbox>(),
        words_of::<Wire>(),
        words_of::<Transport>(),
        words_of::<RoleName>(),
    ];
    for word in words.concat() {
        assert!(page.contains(&format!("`{word}`")), "{word}");
    }
}

#[test]
fn the_manual_page_has_every_key_and_no_markdown() {
    let page = manual_page();
    for section in File::SECTIONS {
        for (_, name, key) in keys_of(section) {
            assert!(page.contains(&name.replace('-', "\\-")), "{name}");
            let text = text_of(key);
            assert!(text.ends_with('.'), "{name}: {text}");
        }
    }
    assert!(!page.contains('`') && !page.contains("]("), "{page}");
    assert!(page.contains("filesystem.cache") && page.contains("labels.rack"));
}

#[test]
fn every_table_of_the_file_has_a_reference() {
    let keys = File::SECTIONS.iter().flat_map(|section| section.keys);
    let names: Vec<&str> = keys.map(|key| key.name).collect();
    for (name, _) in TABLES {
        assert!(names.contains(&name), "{name}");
    }
}
