//! Attaching and detaching.

use std::path::Path;

use hyper::Method;
use serde::Serialize;

use crate::api::client::{Client, encode};
use crate::api::types::{Attach, Attachment, AttachmentState};
use crate::cli::AttachCommand;
use crate::failure::{Failure, Kind, Result};
use crate::libvirt;

use super::{ask, print, print_json};

/// `penstock attach volume`.
pub async fn attach(verb: AttachCommand, client: &Client, json: bool) -> Result<()> {
    let AttachCommand::Volume {
        name,
        socket,
        queues,
        read_only,
    } = verb;
    let socket = absolute(&socket)?;
    let request = Attach {
        volume: name,
        socket,
        queues,
        read_only,
    };
    let attachment: Attachment = client
        .call(Method::POST, "/v1/attachments", &request)
        .await?;
    if json {
        return print_json(&attachment);
    }
    eprintln!(
        "penstock: volume {} is served on {}",
        attachment.volume, attachment.socket
    );
    Ok(())
}

/// What `penstock detach --json` prints.
#[derive(Serialize)]
struct Detached<'a> {
    volume: &'a str,
    socket: &'a str,
}

/// `penstock detach`.
pub async fn detach(target: &str, yes: bool, client: &Client, json: bool) -> Result<()> {
    // A relative socket path means what it means in this directory, not in the daemon's.
    let target = if target.contains('/') {
        absolute(Path::new(target))?
    } else {
        target.to_owned()
    };
    let attachments: Vec<Attachment> = client.get("/v1/attachments").await?;
    let meant = |a: &&Attachment| a.socket == target || a.volume == target;
    let in_use = |a: &&Attachment| meant(a) && a.state == AttachmentState::Connected;
    let connected = attachments.iter().find(in_use);
    if let Some(a) = connected {
        ask::confirm(&format!("detach {}, which a guest is using", a.socket), yes)?;
    }
    let force = connected.is_some();
    client
        .delete(&format!(
            "/v1/attachments?target={}&force={force}",
            encode(&target)
        ))
        .await?;
    if let Some(a) = attachments.iter().find(meant).filter(|_| json) {
        let (volume, socket) = (&a.volume, &a.socket);
        return print_json(&Detached { volume, socket });
    }
    eprintln!("penstock: detached {target}");
    Ok(())
}

/// `penstock libvirt disk-xml`.
pub async fn disk_xml(name: &str, target: &str, client: &Client) -> Result<()> {
    let attachments: Vec<Attachment> = client.get("/v1/attachments").await?;
    let attachment = attachments
        .iter()
        .find(|a| a.volume == name)
        .ok_or_else(|| {
            Failure::new(
                Kind::NotFound,
                format!("volume '{name}' is not attached"),
                format!("run `penstock attach volume {name} --socket PATH` first"),
            )
        })?;
    let xml = libvirt::disk_xml(attachment, target)?;
    print(|out| out.write_all(xml.as_bytes()))
}

fn absolute(path: &Path) -> Result<String> {
    let path = std::path::absolute(path).map_err(|e| Failure::plain(Kind::Invalid, e))?;
    path.into_os_string().into_string().map_err(|path| {
        Failure::invalid(
            format!("socket path {} is not UTF-8", path.to_string_lossy()),
            "use another path",
        )
    })
}
