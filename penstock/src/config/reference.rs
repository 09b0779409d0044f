//! `docs/CONFIG.md` names what the configuration understands, and nothing else.

use std::collections::BTreeSet;

use clap::ValueEnum;
use serde::de::DeserializeOwned;

use super::{
    File, FilesystemTable, Labels, Poll, Preallocation, RoleName, SizedDevice, StoreKind,
    Transport, Wire,
};

/// The keys of a table, as its refusal of an unknown one lists them.
fn keys<T: DeserializeOwned>(table: &str) -> Vec<String> {
    let told = toml::from_str::<T>("no_such_key = 1").err();
    let told = told.expect("an unknown key is refused").to_string();
    let (_, list) = told.split_once("expected ").expect("a list of keys");
    let quoted = list.split('`').skip(1).step_by(2);
    quoted.map(|key| format!("{table}{key}")).collect()
}

fn words<T: ValueEnum>() -> Vec<String> {
    let all = T::value_variants().iter();
    let values = all.filter_map(|value| value.to_possible_value());
    values.map(|value| value.get_name().to_owned()).collect()
}

fn page() -> String {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/CONFIG.md");
    std::fs::read_to_string(path).unwrap()
}

#[test]
fn the_reference_names_every_key_and_no_other() {
    let mut known: BTreeSet<String> = keys::<File>("").into_iter().collect();
    known.extend(keys::<SizedDevice>("devices."));
    known.extend(keys::<Labels>("labels."));
    known.extend(keys::<FilesystemTable>("filesystem."));
    assert!(known.len() > 20, "{known:?}");
    let page = page();
    let (page, _) = page.split_once("## Environment variables").unwrap();
    let named = page.lines().filter_map(|line| {
        let (key, _) = line.trim_start().strip_prefix("- `")?.split_once("` — ")?;
        Some(key.to_owned())
    });
    assert_eq!(named.collect::<BTreeSet<String>>(), known);
}

#[test]
fn the_reference_names_every_word_of_a_value() {
    let page = page();
    let words = [
        words::<StoreKind>(),
        words::<Preallocation>(),
        words::<Poll>(),
        words::<Wire>(),
        words::<Transport>(),
        words::<RoleName>(),
    ];
    for word in words.concat() {
        assert!(page.contains(&format!("`{word}`")), "{word}");
    }
}
