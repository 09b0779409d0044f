//! `penstock config …`.

use std::path::Path;
use std::process::ExitCode;

use api::client::Client;
use api::failure::{Failure, Result};
use api::types::ConfigValue;
use serde::Serialize;

use crate::table::Table;

use super::{print, print_json};

/// Result of a check of a configuration.
#[derive(Serialize)]
struct Checked<'a> {
    file: &'a Path,
    ok: bool,
    mistakes: &'a [Failure],
}

/// `penstock config check`.
pub fn check(file: Option<&Path>, json: bool) -> Result<ExitCode> {
    let Some(path) = file.map(Path::to_owned).or_else(config::default_path) else {
        return Err(Failure::invalid(
            "no configuration is in the default place",
            "name one: penstock config check FILE",
        ));
    };
    let mistakes = config::mistakes(&path)?;
    let ok = mistakes.is_empty();
    let (file, list) = (path.as_path(), mistakes.as_slice());
    match ok {
        _ if json => print_json(&Checked {
            file,
            ok,
            mistakes: list,
        })?,
        true => print(|out| writeln!(out, "{} is well-formed", path.display()))?,
        false => list
            .iter()
            .for_each(|one| eprintln!("penstock: error: {one}")),
    }
    Ok(ExitCode::from(if ok { 0 } else { 2 }))
}

/// `penstock config show`.
pub async fn show(client: &Client, json: bool) -> Result<()> {
    let values: Vec<ConfigValue> = client.get("/v1/config").await?;
    if json {
        return print_json(&values);
    }
    let mut table = Table::new(["KEY", "VALUE", "FROM"]);
    for ConfigValue {
        key,
        value,
        origin,
        file,
    } in values
    {
        let from = match file {
            Some(file) => file.display().to_string(),
            None => origin.word().to_owned(),
        };
        table.row([key, config::as_toml(&value), from]);
    }
    print(|mut out| table.print(&mut out))
}
