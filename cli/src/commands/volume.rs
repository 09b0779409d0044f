//! `penstock volume …`.

use std::path::Path;

use api::client::{Client, encode};
use api::failure::{Failure, Result};
use api::size::{NewSize, Size};
use api::types::{Volume, VolumeCreate, VolumeRename, VolumeResize, VolumeSet};
use hyper::Method;
use serde::Serialize;

use crate::args::{ImageFormat, OnFull, VolumeCommand};
use crate::image;

use super::{confirm, listing, print_json, refuse_json};

/// Runs a verb.
pub async fn run(verb: VolumeCommand, client: &Client, json: bool) -> Result<()> {
    match verb {
        VolumeCommand::Create {
            name,
            size,
            pool,
            on_full,
        } => {
            let request = VolumeCreate {
                name,
                size_bytes: size.0,
                pool,
                on_full_wait_s: on_full.map(OnFull::wait_s),
            };
            create(client, json, &request).await
        }
        VolumeCommand::Set { name, on_full } => set(client, json, &name, on_full).await,
        VolumeCommand::List => listing::volumes(client, json).await,
        VolumeCommand::Show { name } => listing::volume(&show(client, &name).await?, json),
        VolumeCommand::Rename { name, to } => rename(client, json, &name, to).await,
        VolumeCommand::Resize { name, size, yes } => resize(client, json, &name, size, yes).await,
        VolumeCommand::Delete { name, yes } => delete(client, json, &name, yes).await,
        VolumeCommand::Import {
            name,
            file,
            pool,
            format,
            force,
            yes,
        } => {
            let options = image::import::Options {
                pool,
                format,
                force,
                yes,
            };
            let volume = image::import::run(client, &name, &file, options).await?;
            print_volume(&volume, json, "filled from the image")
        }
        VolumeCommand::Export {
            name,
            file,
            format,
            force,
            skip_bad,
            live,
        } => {
            let options = image::export::Options {
                format,
                force,
                live,
                skip_bad: skip_bad.as_deref(),
            };
            export(client, json, &name, &file, options).await
        }
    }
}

/// Path of a volume in the admin API.
pub fn path_of(name: &str) -> String {
    format!("/v1/volumes/{}", encode(name))
}

async fn show(client: &Client, name: &str) -> Result<Volume> {
    client.get(&path_of(name)).await
}

async fn create(client: &Client, json: bool, request: &VolumeCreate) -> Result<()> {
    let volume: Volume = client.call(Method::POST, "/v1/volumes", request).await?;
    print_volume(&volume, json, "created")
}

async fn set(client: &Client, json: bool, name: &str, on_full: OnFull) -> Result<()> {
    let request = VolumeSet {
        on_full_wait_s: on_full.wait_s(),
    };
    let path = format!("{}/settings", path_of(name));
    let volume: Volume = client.call(Method::PUT, &path, &request).await?;
    if json {
        return print_json(&volume);
    }
    eprintln!("penstock: volume {name} changed; its attachments follow within seconds");
    Ok(())
}

async fn rename(client: &Client, json: bool, name: &str, to: String) -> Result<()> {
    let request = VolumeRename { name: to };
    let path = format!("{}/name", path_of(name));
    let volume: Volume = client.call(Method::PUT, &path, &request).await?;
    if json {
        return print_json(&volume);
    }
    eprintln!("penstock: volume {name} is called {} now", volume.name);
    Ok(())
}

async fn resize(client: &Client, json: bool, name: &str, size: NewSize, yes: bool) -> Result<()> {
    let now = show(client, name).await?.size_bytes;
    let size_bytes = match size {
        NewSize::To(size) => size.0,
        NewSize::By(size) => now.checked_add(size.0).ok_or_else(|| {
            Failure::invalid(
                format!("volume '{name}' cannot grow by {size}"),
                "choose a size below 2^64 bytes",
            )
        })?,
    };
    let shrink = size_bytes < now;
    if shrink {
        let (from, to) = (Size(now), Size(size_bytes));
        confirm::confirm(
            &format!("shrink volume '{name}' from {from} to {to} and lose what lies beyond"),
            yes,
        )?;
    }
    let request = VolumeResize { size_bytes, shrink };
    let volume: Volume = client.call(Method::PATCH, &path_of(name), &request).await?;
    print_volume(&volume, json, "resized")
}

async fn delete(client: &Client, json: bool, name: &str, yes: bool) -> Result<()> {
    // Asking about a volume that does not exist would be silly.
    let volume = show(client, name).await?;
    confirm::confirm(
        &format!(
            "delete volume '{name}' ({}) and its data",
            Size(volume.size_bytes)
        ),
        yes,
    )?;
    client.delete(&path_of(name)).await?;
    if json {
        return print_json(&volume);
    }
    eprintln!("penstock: volume {name} deleted");
    Ok(())
}

/// A volume that was exported to a file.
#[derive(Serialize)]
struct Exported<'a> {
    volume: &'a str,
    file: &'a Path,
    format: &'static str,
    /// Size of the volume in bytes; a qcow2 file of it is smaller.
    size_bytes: u64,
}

async fn export(
    client: &Client,
    json: bool,
    name: &str,
    file: &Path,
    options: image::export::Options<'_>,
) -> Result<()> {
    let to_stdout = file == Path::new("-");
    if to_stdout {
        refuse_json(json, "the content of a volume")?;
    }
    let volume = show(client, name).await?;
    image::export::run(client, &volume, file, options).await?;
    if json {
        let format = match options.format {
            ImageFormat::Raw => "raw",
            ImageFormat::Qcow2 => "qcow2",
        };
        return print_json(&Exported {
            volume: name,
            file,
            format,
            size_bytes: volume.size_bytes,
        });
    }
    let target = match to_stdout {
        true => "standard output".to_owned(),
        false => file.display().to_string(),
    };
    eprintln!(
        "penstock: volume {name} exported to {target}, {}",
        Size(volume.size_bytes)
    );
    Ok(())
}

fn print_volume(volume: &Volume, json: bool, what: &str) -> Result<()> {
    if json {
        return print_json(volume);
    }
    eprintln!(
        "penstock: volume {} {what}, {}",
        volume.name,
        Size(volume.size_bytes)
    );
    Ok(())
}
