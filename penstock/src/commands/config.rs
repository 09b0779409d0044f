//! `penstock config …`.

use std::path::Path;

use serde::Serialize;

use super::{print, print_json};
use crate::api::client::Client;
use crate::api::types::ConfigValue;
use crate::config;
use crate::failure::{Failure, Result};
use crate::table::Table;

#[derive(Serialize)]
struct Checked<'a> {
    file: &'a Path,
    ok: bool,
}

/// `penstock config check`.
pub fn check(file: Option<&Path>, json: bool) -> Result<()> {
    let Some((path, file)) = config::read_named(file)? else {
        return Err(Failure::invalid(
            "no configuration is in the default place",
            "name one: penstock config check FILE",
        ));
    };
    let config = config::resolve(file)?;
    config::check_admin_socket(&config.admin_socket)?;
    if json {
        return print_json(&Checked {
            file: &path,
            ok: true,
        });
    }
    print(|out| writeln!(out, "{} is well-formed", path.display()))
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
        table.row([key, value, from]);
    }
    print(|mut out| table.print(&mut out))
}
